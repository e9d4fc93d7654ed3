"""Check that this folder can be released as a version: `python tools/release.py X.Y.Z`.

Uploads nothing. Prints the remaining tasks (docs/releasing.md), and exits with status 1 if there
are any. No lane of tests runs it, because there are tasks until the release.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.environments import ROOT
from tools.package_text import assigned

EXAMPLE = re.compile(r"https?://[\w.-]*\.example\b")
"""A placeholder address, under the reserved top-level domain."""


def version_of(package: str) -> str:
    """Return `__version__` from the text of the package's `__init__.py`."""
    return str(assigned(package, "__version__"))


def remaining_tasks(root: Path, wanted: str) -> list[str]:
    """Return the tasks that remain before a release of version `wanted`, one line each."""

    def text(path: str) -> str:
        return (root / path).read_text(encoding="utf-8")

    found = []
    version = version_of(text("tierstore/__init__.py"))
    if version != wanted:
        found.append(f"tierstore/__init__.py has version {version}, not {wanted}")
    if not re.search(
        rf"^## {re.escape(wanted)} \(\d{{4}}-\d\d-\d\d\)$", text("docs/changelog.md"), re.M
    ):
        found.append(f"docs/changelog.md has no heading '## {wanted} (YEAR-MONTH-DAY)'")
    for path in ("pyproject.toml", "README.md", "docs/security.md", "docs/contributing.md"):
        addresses = sorted(set(EXAMPLE.findall(text(path))))
        if addresses:
            found.append(f"{path} has placeholder addresses: {', '.join(addresses)}")
    if "not on a package index yet" in text("README.md"):
        found.append("README.md still says that the package is not on a package index")
    if "There is no public address yet" in text("docs/security.md"):
        found.append("docs/security.md still says that there is no address for reports")
    return found


def main(words: list[str], root: Path = ROOT) -> int:
    if len(words) != 1:
        print(__doc__.splitlines()[0], file=sys.stderr)
        return 2
    wanted = words[0].removeprefix("v")
    found = remaining_tasks(root, wanted)
    print("\n".join(found) or f"{wanted} can be released")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
