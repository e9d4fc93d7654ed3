"""Look whether this folder may be uploaded as a version: `python tools/release.py X.Y.Z`.

It uploads nothing. It says what is left to do (docs/releasing.md), and ends with the status 1 as
long as there is something. No lane of tests runs it: until a release, there is.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.environments import ROOT
from tools.package_text import assigned

EXAMPLE = re.compile(r"https?://[\w.-]*\.example\b")
"""An address that nobody can have."""


def version_of(package: str) -> str:
    """`__version__`, from the text of the package's `__init__.py`."""
    return str(assigned(package, "__version__"))


def left_to_do(root: Path, wanted: str) -> list[str]:
    """What keeps this folder from being uploaded as the version `wanted`, a line each."""

    def text(path: str) -> str:
        return (root / path).read_text(encoding="utf-8")

    found = []
    version = version_of(text("tierstore/__init__.py"))
    if version != wanted:
        found.append(f"tierstore/__init__.py says that this is {version}, not {wanted}")
    if not re.search(
        rf"^## {re.escape(wanted)} \(\d{{4}}-\d\d-\d\d\)$", text("docs/changelog.md"), re.M
    ):
        found.append(f"docs/changelog.md has no heading '## {wanted} (YEAR-MONTH-DAY)'")
    for path in ("pyproject.toml", "README.md", "docs/security.md", "docs/contributing.md"):
        addresses = sorted(set(EXAMPLE.findall(text(path))))
        if addresses:
            found.append(f"{path} has addresses that nobody has: {', '.join(addresses)}")
    if "not on a package index yet" in text("README.md"):
        found.append("README.md says what to do until it is on a package index")
    if "There is no public address yet" in text("docs/security.md"):
        found.append("docs/security.md says that there is no way to report a vulnerability")
    return found


def main(words: list[str], root: Path = ROOT) -> int:
    if len(words) != 1:
        print(__doc__.splitlines()[0], file=sys.stderr)
        return 2
    wanted = words[0].removeprefix("v")
    found = left_to_do(root, wanted)
    print("\n".join(found) or f"{wanted} may be uploaded")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
