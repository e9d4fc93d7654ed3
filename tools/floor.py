"""Run a small set of tests with the oldest torch that the package says it works with.

    python tools/floor.py [-- ARGUMENTS FOR PYTEST]

`pyproject.toml` names it (`torch>=X`); nothing else does. The tests are those marked `floor`, where
they stand. They run in an environment of its own, `.venv-floor`, which is made anew where it is not
of that torch; the other packages have the versions of `tools/constraints.txt`.

Where pip reaches no packages, it says so and ends with the status `NOT_INSTALLED`: what was not
tested is not said to work. torch's ordinary build of 2.8 for Linux comes with CUDA's libraries:
3.6 GB to fetch, 7 GB unpacked, which took three minutes; the tests take one.
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
    """The version that a pyproject.toml asks for at least."""
    found = re.search(r'"torch>=([\d.]+)"', text)
    if found is None:
        raise ValueError("pyproject.toml does not say torch>=X")
    version = found[1]
    return version if version.count(".") > 1 else f"{version}.0"


def marked_files(tests: Path) -> list[Path]:
    """The files with tests that are marked. Others are not even imported: they need more."""
    found = sorted(tests.rglob("test_*.py"))
    return [file for file in found if MARK.search(file.read_text(encoding="utf-8"))]


def make(place: Path, torch: str) -> None:
    """An environment with this torch. Raises RuntimeError where it cannot be made."""
    packages = pinned(NEEDED, (ROOT / "tools" / "constraints.txt").read_text())
    environments.make(place, [f"torch=={torch}", *packages])


def run_marked(python: Path, words: Sequence[str]) -> int:
    """Run the tests that are marked with the packages of this interpreter."""
    command = [python, "-m", "pytest", "-q", "-m", "floor", "-p", "no:cacheprovider", *words]
    command += marked_files(ROOT / "tests")
    return subprocess.run(command, cwd=ROOT, env=without_workers(), check=False).returncode


def main(words: Sequence[str] | None = None, place: Path = PLACE) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="more arguments for pytest")
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
