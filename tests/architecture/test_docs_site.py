"""What is looked for in the built site is found: each fault is made in a small one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import tierstore
from tools import docs, docs_site

INDEX = """<nav class="md-nav md-nav--primary"><a href=".">First</a>
<a href="guides/store/">The store</a> <a href="reference/">API</a></nav>
<link rel="stylesheet" href="style.css"><link rel="canonical" href="https://elsewhere.example/">
<a href="guides/store/#put">put</a> <a href="https://elsewhere.example/">out</a>
<img src="data:image/svg+xml,">"""
STORE = """<h1 id="put">Put</h1><a href="../../">up</a> <a href="#put">here</a>
<a href="../../style.css">style</a>"""
REFERENCE = '<h2 id="tierstore.TierStore">TierStore</h2>'
LOST = '<a href="/guides/store/">store</a>'


@pytest.fixture
def site(tmp_path: Path) -> Path:
    entries = [{"location": "reference/#tierstore.TierStore", "title": "TierStore", "text": ""}]
    files = {
        "index.html": INDEX,
        "404.html": LOST,
        "style.css": "",
        "guides/store/index.html": STORE,
        "reference/index.html": REFERENCE,
        "search/search_index.json": json.dumps({"docs": entries}),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_whole_site_has_no_fault(site: Path) -> None:
    assert docs_site.faults(site, ["TierStore"]) == []


@pytest.mark.parametrize(
    ("page", "before", "after", "fault"),
    [
        ("index.html", '<a href="guides/store/">The', "The", "does not reach guides/store/index"),
        ("index.html", "</nav>", "", None),  # a control: no fault, as nothing else has changed
        ("index.html", "store/#put", "store/#get", "leads nowhere: index.html: guides/store/#get"),
        ("index.html", '"style.css"', '"styles.css"', "leads nowhere: index.html: styles.css"),
        ("index.html", "data:image", "https://a.example/image", "is fetched from elsewhere: index"),
        ("index.html", '"style.css"', '"https://a.example/s.css"', "is fetched from elsewhere"),
        ("guides/store/index.html", '"../../"', '"../"', "leads nowhere: guides/store/index.html"),
        ("guides/store/index.html", '"#put"', '"#set"', "leads nowhere: guides/store/index.html"),
        ("404.html", "/guides/store/", "/guides/shop/", "leads nowhere: 404.html: /guides/shop/"),
        ("search/search_index.json", "tierstore.Tier", "Tier", "does not find TierStore"),
    ],
)
def test_a_fault_is_noticed(
    site: Path, page: str, before: str, after: str, fault: str | None
) -> None:
    text = (site / page).read_text()
    assert before in text
    (site / page).write_text(text.replace(before, after))
    found = docs_site.faults(site, ["TierStore"])
    assert len(found) == (fault is not None)
    assert fault is None or fault in found[0]


def test_public_names_are_read_without_an_import() -> None:
    assert docs_site.public_names() == tierstore.__all__


def test_the_status_says_whether_it_is_whole(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert docs_site.report(site, ["TierStore"]) == 0
    assert docs_site.report(site, ["Lease"]) == 1
    assert "the search does not find Lease" in capsys.readouterr().out


@pytest.mark.full("makes an environment")
def test_without_packages_to_reach_no_site_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    if docs.is_installed():
        assert docs.interpreter(tmp_path / "venv") == Path(sys.executable)
    else:
        with pytest.raises(RuntimeError, match="could not be installed"):
            docs.interpreter(tmp_path / "venv")
