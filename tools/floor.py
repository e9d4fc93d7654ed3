"""Run the tests marked `floor` with the oldest supported torch.

    python tools/floor.py [-- ARGUMENTS FOR PYTEST]

The version is that of `torch>=X` in `pyproject.toml`. The tests run in a separate environment,
`.venv-floor`, which is recreated if it has another torch. Other packages have the versions of
`tools/constraints.txt`.

Without access to packages, exits with status `NOT_INSTALLED`. torch's standard build of 2.8 for
Linux includes the CUDA libraries: 3.6 GB to download, 7 GB installed, which took three minutes. The
tests take one minute.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools import environments
from tools.environments import NOT_INSTALLED, ROOT, pinned, without_workers

PLACE = ROOT / ".venv-floor"
MARK = re.compile(r"^(pytestmark = |    |@)pytest\.mark\.floor\b", re.MULTILINE)

NEEDED = (
    "aiofiles",
    "click",
    "hypothesis",
    "numpy",
    "platformdirs",
    "psutil",
    "pytest",
    "pytest-timeout",
    "rich",
    "safetensors",
    "xxhash",
)


def oldest_torch(text: str) -> str:
    """Return the minimum torch version in a pyproject.toml."""
    found = re.search(r'"torch>=([\d.]+)"', text)
    if found is None:
        raise ValueError("pyproject.toml does not contain torch>=X")
    version = found[1]
    return version if version.count(".") > 1 else f"{version}.0"


def marked_files(tests: Path) -> list[Path]:
    """Return the files with marked tests. Others may need more packages, so do not import them."""
    found = sorted(tests.rglob("test_*.py"))
    return [file for file in found if MARK.search(file.read_text(encoding="utf-8"))]


def make(place: Path, torch: str) -> None:
    """Create an environment with this torch. Raises RuntimeError if that fails."""
    packages = pinned(NEEDED, (ROOT / "tools" / "constraints.txt").read_text())
    environments.make(place, [f"torch=={torch}", *packages])


def run_marked(python: Path, words: Sequence[str]) -> int:
    """Run the marked tests with the packages of this interpreter."""
    command = [python, "-m", "pytest", "-q", "-m", "floor", "-p", "no:cacheprovider", *words]
    command += marked_files(ROOT / "tests")
    return subprocess.run(command, cwd=ROOT, env=without_workers(), check=False).returncode


def main(words: Sequence[str] | None = None, place: Path = PLACE) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="arguments for pytest")
    options = parser.parse_args(words)
    torch = oldest_torch((ROOT / "pyproject.toml").read_text())
    try:
        make(place, torch)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return NOT_INSTALLED
    return run_marked(place / "bin" / "python", options.words)


if __name__ == "__main__":
    sys.exit(main())
