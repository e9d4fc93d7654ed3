"""The checker of the built site finds each kind of fault in a small site."""

from __future__ import annotations

import json
from pathlib import Path

import tierstore
from tools import docs_site

SITE = {
    "index.html": """<nav class="md-nav md-nav--primary"><a href="guides/store/">The store</a></nav>
<link rel="canonical" href="https://elsewhere.example/"><img src="data:image/svg+xml,">
<a href="guides/store/#put">put</a> <a href="https://elsewhere.example/">out</a>""",
    "404.html": '<a href="/guides/store/">store</a>',
    "style.css": "",
    "guides/store/index.html": """<h1 id="put">Put</h1> <a href="../../">up</a>
<a href="#put">here</a> <link rel="stylesheet" href="../../style.css">""",
    "search/search_index.json": json.dumps(
        {"docs": [{"location": "reference/#tierstore.Lease", "title": "Lease"}]}
    ),
}
FAULTS = {
    "lost.html": "<p>",
    "404.html": '<a href="/guides/shop/">shop</a>',
    "guides/store/index.html": """<a href="#put">here</a> <a href="../">up</a>
<link rel="stylesheet" href="https://a.example/s.css"><img src="https://a.example/image">
<link rel="stylesheet" href="../../styles.css">""",
}


def write(site: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)


def test_docs_site_faults_are_found(tmp_path: Path) -> None:
    write(tmp_path, SITE)
    assert docs_site.report(tmp_path, ["Lease"]) == 0
    write(tmp_path, FAULTS)
    assert docs_site.report(tmp_path, ["Lease", "Tier"]) == 1
    assert sorted(docs_site.faults(tmp_path, ["Lease", "Tier"])) == [
        "broken link: 404.html: /guides/shop/",
        "broken link: guides/store/index.html: #put",
        "broken link: guides/store/index.html: ../",
        "broken link: guides/store/index.html: ../../styles.css",
        "broken link: index.html: guides/store/#put",
        "fetched from another host: guides/store/index.html: https://a.example/image",
        "fetched from another host: guides/store/index.html: https://a.example/s.css",
        "the navigation does not reach lost.html",
        "the search does not find Tier",
    ]


def test_public_names_are_read_without_an_import() -> None:
    public = {*tierstore.__all__, *tierstore.errors.__all__, *tierstore.types.__all__}
    assert set(docs_site.public_names()) == public
