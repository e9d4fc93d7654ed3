"""Build the site of the documentation, strictly: `python tools/docs.py [--serve]`.

It is in `build/site` then. A page that the navigation does not reach, a link that leads nowhere
and a docstring that names arguments which there are not are errors. With `--serve` it is at
http://127.0.0.1:8000 instead, and made anew whenever a page changes.

Needs `pip install -c tools/constraints.txt -e '.[docs]'`; where that is not there, it says so and
ends with the status `NOT_INSTALLED`.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.environments import NOT_INSTALLED, ROOT

NEEDED = ("mkdocs", "material", "mkdocstrings")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", action="store_true", help="show it while you write")
    chosen = parser.parse_args()
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        print(f"{', '.join(missing)}: not here. pip install -e '.[docs]'", file=sys.stderr)
        return NOT_INSTALLED
    work = ["serve"] if chosen.serve else ["build", "--strict", "--clean"]
    command = [sys.executable, "-m", "mkdocs", *work, "-f", ROOT / "tools" / "mkdocs.yml"]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
