"""Build the site of the documentation, strictly: `python tools/docs.py [--serve]`.

It is in `build/site` then. A page that the navigation does not reach, a link that leads nowhere
and a docstring that names arguments which there are not are errors, and so is what
`tools/docs_site.py` finds in what was built. With `--serve` it is at http://127.0.0.1:8000 instead,
and made anew whenever a page changes.

Where the extra `docs` is not installed, its packages come into an environment of their own,
`.venv-docs`. Where pip reaches no packages, it says so and ends with the status `NOT_INSTALLED`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools import docs_site, environments
from tools.environments import CONSTRAINTS, NOT_INSTALLED, ROOT, pinned

PLACE = ROOT / ".venv-docs"
IMPORTED = ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers")
NEEDED = ("mkdocs-material", "mkdocstrings", "mkdocstrings-python", "ruff")


def is_installed() -> bool:
    """Whether this Python has the packages."""
    return all(importlib.util.find_spec(name) for name in IMPORTED)


def interpreter(place: Path = PLACE) -> Path:
    """A Python that has the packages. Raises RuntimeError where they cannot be had."""
    if is_installed():
        return Path(sys.executable)
    environments.make(place, pinned(NEEDED, CONSTRAINTS.read_text()), constrained=True)
    return place / "bin" / "python"


def mkdocs(python: Path, *words: str) -> int:
    command = [python, "-m", "mkdocs", *words, "-f", ROOT / "tools" / "mkdocs.yml"]
    # mkdocstrings lays signatures out with the ruff that is on the path.
    path = f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "PATH": path, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", action="store_true", help="show it while you write")
    chosen = parser.parse_args()
    try:
        python = interpreter()
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return NOT_INSTALLED
    if chosen.serve:
        return mkdocs(python, "serve")
    if status := mkdocs(python, "build", "--strict", "--clean"):
        return status
    return docs_site.report(docs_site.SITE)


if __name__ == "__main__":
    sys.exit(main())
