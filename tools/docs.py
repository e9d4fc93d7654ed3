"""Build the documentation site in strict mode: `python tools/docs.py [--serve]`.

Writes `build/site`. Errors are: a page missing from the navigation, a broken link, a docstring that
documents arguments that do not exist, and any fault that `tools/docs_site.py` finds. With
`--serve`, serves the site at http://127.0.0.1:8000 and rebuilds it when a page changes.

If the extra `docs` is not installed, installs its packages into a separate environment,
`.venv-docs`. Without access to packages, exits with status `NOT_INSTALLED`.
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
    """Return True if this Python has the packages."""
    return all(importlib.util.find_spec(name) for name in IMPORTED)


def interpreter(place: Path = PLACE) -> Path:
    """Return a Python that has the packages. Raises RuntimeError if they cannot be installed."""
    if is_installed():
        return Path(sys.executable)
    environments.make(place, pinned(NEEDED, CONSTRAINTS.read_text()), constrained=True)
    return place / "bin" / "python"


def mkdocs(python: Path, *words: str) -> int:
    command = [python, "-m", "mkdocs", *words, "-f", ROOT / "tools" / "mkdocs.yml"]
    # mkdocstrings formats signatures with the ruff on the path.
    path = f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "PATH": path, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--serve", action="store_true", help="serve the site and rebuild it on changes"
    )
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
