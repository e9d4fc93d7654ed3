"""Links lead somewhere, and the site's navigation reaches every page and every public name.

`python tools/docs.py` builds the site, and finds more. This is what needs no site: links as a code
host follows them, between files of the repository.
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
PAGES = [
    ROOT / "README.md",
    *sorted(DOCS.rglob("*.md")),
    *sorted((ROOT / ".github").rglob("*.md")),
]

CODE = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"\]\((?P<inline>[^)\s]+)\)|^\[\w+\]: (?P<defined>\S+)$", re.MULTILINE)


def links(text: str) -> list[str]:
    """The targets of all links of a Markdown text."""
    prose = CODE.sub("code", BLOCK.sub("", text))
    return [match["inline"] or match["defined"] for match in LINK.finditer(prose)]


def broken(page: Path, text: str) -> list[str]:
    """The links of a page that lead nowhere."""
    here = [link for link in links(text) if not link.startswith(("http://", "https://"))]
    return [link for link in here if not leads_somewhere(page, link)]


def leads_somewhere(page: Path, link: str) -> bool:
    """Whether there is such a file, with such a heading."""
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    if not target.is_file():
        return False
    return not anchor or anchor in anchors(target.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert broken(page, page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "text",
    [
        "[a](nowhere.md)",
        "[a](guides/)",
        "[a](guides/store.md#no-such-heading)",
        "[a][b]\n\n[b]: ../tests/nowhere.py\n",
        "![a](nowhere.svg)",
    ],
)
def test_a_link_to_nowhere_is_noticed(text: str) -> None:
    assert len(broken(DOCS / "index.md", text)) == 1


def test_what_is_code_is_no_link() -> None:
    assert links("`layers[2](x)`\n\n```python\nlayers[2](x)\n```\n[`code`](a.md)") == ["a.md"]


def test_links_are_many() -> None:
    """The control: they are found."""
    assert sum(len(links(page.read_text(encoding="utf-8"))) for page in PAGES) > 300


def unreached(navigation: str) -> list[str]:
    """The pages that the site's navigation does not have, alone or with their folder."""
    entries = set(re.findall(r"[\w./-]+\.md\b|[\w-]+/(?=\s)", navigation.partition("\nnav:")[2]))
    names = [str(page.relative_to(DOCS)) for page in PAGES if DOCS in page.parents]
    return [name for name in names if not {name, f"{name.partition('/')[0]}/"} & entries]


def test_the_navigation_reaches_every_page() -> None:
    assert unreached((ROOT / "tools" / "mkdocs.yml").read_text(encoding="utf-8")) == []


def test_a_page_that_it_does_not_reach_is_noticed() -> None:
    text = (ROOT / "tools" / "mkdocs.yml").read_text(encoding="utf-8")
    assert unreached(text.replace("- guides/training.md", "")) == ["guides/training.md"]


def unlisted(index: Path, text: str, pattern: str) -> list[str]:
    """The files by an index that its text has no link to."""
    linked = {index.parent / link.partition("#")[0] for link in links(text)}
    return [
        path.name for path in sorted(index.parent.glob(pattern)) if path not in {*linked, index}
    ]


LISTS = [
    ("decisions/index.md", "*.md"),
    ("benchmarks/index.md", "*.md"),
    ("index.md", "examples/*.*"),
]


@pytest.mark.parametrize(("index", "pattern"), LISTS)
def test_an_index_has_all_of_its_folder(index: str, pattern: str) -> None:
    text = (DOCS / index).read_text(encoding="utf-8")
    assert unlisted(DOCS / index, text, pattern) == []


@pytest.mark.parametrize(("index", "pattern"), LISTS)
def test_what_an_index_leaves_out_is_noticed(index: str, pattern: str) -> None:
    assert len(unlisted(DOCS / index, "", pattern)) > 5


def test_each_public_name_is_in_the_reference_once() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in DOCS.glob("reference/*.md"))
    found = Counter(re.findall(r"^::: tierstore\.(\w+)$", pages, re.MULTILINE))
    assert found == Counter(tierstore.__all__)
