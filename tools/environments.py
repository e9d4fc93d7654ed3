"""Separate virtual environments for checks that need other packages.

Each is in its own folder, and is recreated if its packages are not the required ones. Without
access to packages, such checks are reported as not run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

NOT_INSTALLED = os.EX_UNAVAILABLE
"""Exit status if packages cannot be installed: nothing was tested."""

MOST_SECONDS = 900
"""Time limit of an installation, in seconds."""


def pinned(names: Iterable[str], constraints: str) -> list[str]:
    """Return `name==version` of each, from constraints. Raises ValueError if one is missing."""
    versions = dict(re.findall(r"^([\w-]+)==(\S+)$", constraints, re.MULTILINE))
    missing = [name for name in names if name not in versions]
    if missing:
        raise ValueError(f"tools/constraints.txt does not name {missing}")
    return [f"{name}=={versions[name]}" for name in names]


CONSTRAINTS = ROOT / "tools" / "constraints.txt"


def make(
    place: Path,
    packages: list[str],
    *,
    ours_too: bool = False,
    constrained: bool = False,
    python: Path | None = None,
) -> None:
    """Create an environment with these packages. Raises RuntimeError if that fails.

    With `ours_too`, it also has all packages of the current one. With `constrained`, dependencies
    have the versions of `tools/constraints.txt`. It uses this Python, unless `python` is given.
    """
    stamp = place / "complete"
    wanted = "\n".join([*packages, *([CONSTRAINTS.read_text()] if constrained else [])])
    if stamp.exists() and stamp.read_text() == wanted:
        return
    shutil.rmtree(place, ignore_errors=True)
    # Most installed modules are never imported, so compile on import only.
    command = [place / "bin" / "python", "-m", "pip", "install", "-q", "--no-compile"]
    if ours_too:
        command.append("--no-deps")
    if constrained:
        command += ["-c", CONSTRAINTS]
    began = time.monotonic()
    try:
        subprocess.run([python or sys.executable, "-m", "venv", place], check=True)
        if ours_too:
            paths = {"base": str(place), "platbase": str(place)}
            own = Path(sysconfig.get_path("purelib", scheme="venv", vars=paths))
            (own / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run([*command, *packages], check=True, timeout=MOST_SECONDS)
    except subprocess.SubprocessError as error:
        raise RuntimeError(
            f"{', '.join(packages)} could not be installed into {place}, so nothing was tested: "
            "check the network"
        ) from error
    stamp.write_text(wanted)
    print(f"{place.name} was made in {time.monotonic() - began:.0f} s", flush=True)


def without_workers() -> dict[str, str]:
    """Return the environment variables without those that mark a pytest-xdist worker."""
    return {name: text for name, text in os.environ.items() if "XDIST" not in name}
