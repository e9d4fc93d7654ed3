"""Links have existing targets, and the site's navigation reaches every page and public name.

`python tools/docs.py` builds the site, and finds more. These tests need no site: they follow links
as a code host does, between files of the repository.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

import tierstore
from tools.markdown_pages import BLOCK, anchors

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *DOCS.rglob("*.md"), *(ROOT / ".github").rglob("*.md")]

CODE = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"\]\(([^)\s]+)\)|^\[\w+\]: (\S+)$", re.MULTILINE)


def links(text: str) -> list[str]:
    """Return the targets of all links of a Markdown text."""
    prose = CODE.sub("code", BLOCK.sub("", text))
    return [inline or defined for inline, defined in LINK.findall(prose)]


def broken(page: Path, text: str) -> list[str]:
    """Return the links of a page whose file, or heading in it, does not exist."""
    found = []
    for link in links(text):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if link.startswith(("http://", "https://")):
            continue
        if not target.is_file() or (anchor and anchor not in anchors(target.read_text("utf-8"))):
            found.append(f"{page.name}: {link}")
    return found


def test_links_have_existing_targets() -> None:
    assert sum(len(links(page.read_text("utf-8"))) for page in PAGES) > 300
    assert [link for page in PAGES for link in broken(page, page.read_text("utf-8"))] == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("[a](nowhere.md)", 1),
        ("[a](guides/)", 1),
        ("[a](guides/store.md#no-such-heading)", 1),
        ("[a][b]\n\n[b]: ../tests/nowhere.py\n", 1),
        ("![a](nowhere.svg)", 1),
        ("`layers[2](x)`\n\n```python\nlayers[2](x)\n```\n[`code`](index.md)", 0),
    ],
)
def test_dead_links_are_reported(text: str, count: int) -> None:
    assert len(broken(DOCS / "index.md", text)) == count


@pytest.mark.parametrize(
    ("index", "pattern"),
    [
        ("docs/decisions/index.md", "*.md"),
        ("docs/benchmarks/index.md", "*.md"),
        ("docs/index.md", "examples/*.*"),
    ],
)
def test_index_lists_all_of_its_folder(index: str, pattern: str) -> None:
    folder = (ROOT / index).parent
    linked = {folder / link.partition("#")[0] for link in links((ROOT / index).read_text("utf-8"))}
    assert [path for path in folder.glob(pattern) if path not in {*linked, ROOT / index}] == []


def test_navigation_reaches_every_page() -> None:
    """Each page is named, or its folder is."""
    navigation = (ROOT / "tools" / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[2]
    entries = set(re.findall(r"[\w./-]+\.md\b|[\w-]+/(?=\s)", navigation))
    names = [str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")]
    assert [name for name in names if not {name, f"{name.partition('/')[0]}/"} & entries] == []


def test_each_public_name_is_in_the_reference_once() -> None:
    pages = "\n".join(page.read_text("utf-8") for page in DOCS.glob("reference/*.md"))
    found = Counter(
        re.findall(r"^::: tierstore\.(?:(?:errors|types)\.)?(\w+)$", pages, re.MULTILINE)
    )
    public = {*tierstore.__all__, *tierstore.errors.__all__, *tierstore.types.__all__}
    assert found == Counter(public)
