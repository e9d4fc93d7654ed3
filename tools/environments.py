"""Environments beside the one that runs the tests, for tests that need other packages.

Each is in a folder of its own, and is made anew where it does not have the packages that it should.
Where pip reaches none, nothing that needs them is said to work.
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
"""The exit status where packages are not to be had: no test has passed, and none has failed."""

MOST_SECONDS = 900
"""An installation that takes longer is given up."""


def pinned(names: Iterable[str], constraints: str) -> list[str]:
    """`name==version` for each, as constraints have it. Raises ValueError if one is not there."""
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
    """An environment with these packages; with `ours_too`, beside all that this one has.

    With `constrained`, what they bring along has the versions of `tools/constraints.txt`, too. It
    is one of this Python, or of `python`.
    Raises RuntimeError where it cannot be made.
    """
    stamp = place / "complete"
    wanted = "\n".join([*packages, *([CONSTRAINTS.read_text()] if constrained else [])])
    if stamp.exists() and stamp.read_text() == wanted:
        return
    shutil.rmtree(place, ignore_errors=True)
    # Most modules of what is installed are never imported: those that are get compiled then.
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
            f"{', '.join(packages)} could not be installed into {place}: without that nobody knows "
            "whether it works (is there a network?)"
        ) from error
    stamp.write_text(wanted)
    print(f"{place.name} was made in {time.monotonic() - began:.0f} s", flush=True)


def without_workers() -> dict[str, str]:
    """The environment variables, but for those that make a process one of pytest's workers."""
    return {name: text for name, text in os.environ.items() if "XDIST" not in name}
