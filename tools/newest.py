"""Run the tests marked `floor` with the newest supported Python.

    python tools/newest.py [-- ARGUMENTS FOR PYTEST]

The version is the newest in the classifiers of `pyproject.toml`; its interpreter is `python3.X` on
the path or one of pyenv's. The tests run in a separate environment, `.venv-newest`, with the
versions of `tools/constraints.txt`. Without such a Python or access to packages, exits with status
`NOT_INSTALLED`. Only the long lane runs this, because torch without a CPU-only build includes the
CUDA libraries, as for tools/floor.py.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools import environments
from tools.environments import CONSTRAINTS, NOT_INSTALLED, ROOT, pinned
from tools.floor import NEEDED, run_marked

PLACE = ROOT / ".venv-newest"


def named_pythons(text: str) -> list[str]:
    """Return the Python versions in the classifiers of a pyproject.toml, oldest first."""
    found = re.findall(r"Python :: (3\.\d+)", text)
    return sorted(found, key=lambda version: int(version.partition(".")[2]))


def newest_python(text: str) -> str:
    return named_pythons(text)[-1]


def interpreter(version: str) -> Path | None:
    """Return a working Python of this version, or None."""
    name = f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    candidates = [shutil.which(name), *sorted(pyenv.glob(f"versions/{version}.*/bin/{name}"))]
    return next((Path(each) for each in candidates if each and _is_of(Path(each), version)), None)


def _is_of(python: Path, version: str) -> bool:
    program = "import sys; print('%d.%d' % sys.version_info[:2])"
    command = [python, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode == 0 and done.stdout.strip() == version


def main(
    words: Sequence[str] | None = None,
    place: Path = PLACE,
    find: Callable[[str], Path | None] = interpreter,
) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="arguments for pytest")
    options = parser.parse_args(words)
    version = newest_python((ROOT / "pyproject.toml").read_text())
    python = find(version)
    if python is None:
        print(f"Python {version} is not installed, so nothing was tested", file=sys.stderr)
        return NOT_INSTALLED
    try:
        packages = pinned(("torch", *NEEDED), CONSTRAINTS.read_text())
        environments.make(place, packages, python=python)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return NOT_INSTALLED
    return run_marked(place / "bin" / "python", options.words)


if __name__ == "__main__":
    sys.exit(main())
