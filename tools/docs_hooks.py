"""mkdocs hooks that add pages to the site beside those of docs/ (see mkdocs.yml).

- `start.md` is README.md, with its links adjusted to docs/.
- Repository files that pages link to, such as tests, are copied to `source/`.
- In the navigation, `decisions/` expands to all pages of that folder, with the index first.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent

OUTSIDE = re.compile(
    r"(?P<before>\]\(|^\[\w+\]: )(?P<up>(?:\.\./)+)(?P<path>[\w./-]+)", re.MULTILINE
)
"""A link that leads out of a folder of docs/."""


def on_config(config: Any) -> Any:
    config.nav = _unfolded(config.nav, Path(config.docs_dir))
    return config


def _unfolded(entry: Any, docs: Path) -> Any:
    match entry:
        case list():
            return [_unfolded(each, docs) for each in entry]
        case dict():
            return {name: _unfolded(each, docs) for name, each in entry.items()}
        case str() if entry.endswith("/"):
            pages = sorted(
                (docs / entry).glob("*.md"), key=lambda page: (page.name != "index.md", page)
            )
            return [str(page.relative_to(docs)) for page in pages]
    return entry


def on_files(files: Files, config: Any) -> Files:
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "start.md", content=text))
    pages = [page for page in files.documentation_pages() if page.src_uri != "start.md"]
    for path in sorted({path for page in pages for path in _outside(page)}):
        files.append(File.generated(config, f"source/{path}", abs_src_path=str(ROOT / path)))
    return files


def _outside(page: File) -> list[str]:
    """Return the repository files that a page links to, except README.md."""
    found = (_path_outside(page, match) for match in OUTSIDE.finditer(page.content_string))
    return [path for path in found if path not in (None, "README.md")]


def _path_outside(page: File, match: re.Match[str]) -> str | None:
    """Return the target of a link, relative to the repository; None if it is in docs/."""
    ups, depth = match["up"].count("../"), page.src_uri.count("/")
    return match["path"] if ups > depth else None


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    def inside(match: re.Match[str]) -> str:
        path = _path_outside(page.file, match)
        if path is None:
            return match[0]
        to_docs = "../" * page.file.src_uri.count("/")
        return match["before"] + to_docs + ("start.md" if path == "README.md" else f"source/{path}")

    return OUTSIDE.sub(inside, markdown)
