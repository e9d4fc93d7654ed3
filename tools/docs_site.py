"""Check the built documentation site: `python tools/docs_site.py [build/site]`.

mkdocs checks the Markdown files; this checks the HTML:

- the navigation of the first page reaches every page;
- every internal link leads to an existing file and anchor;
- nothing is fetched from other hosts: no script, style, image or font;
- the search finds every public name in the reference.

`tools/docs.py` runs it after building the site.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, field
from functools import cached_property
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.environments import ROOT
from tools.package_text import assigned

SITE = ROOT / "build" / "site"

FETCHES = {
    "audio": ("src",),
    "iframe": ("src",),
    "img": ("src",),
    "script": ("src",),
    "source": ("src",),
    "video": ("src",),
}
"""Attributes that a browser fetches automatically, by element; `link` depends on its `rel`."""

FETCHED_RELATIONS = {"icon", "stylesheet", "preload", "modulepreload", "preconnect", "manifest"}

LOST = "404.html"
"""The error page. It is served at any address, so its links start at the root."""


class Page(HTMLParser):
    """The links, fetches, anchors and navigation entries of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.navigation: list[str] = []
        self._navs: list[bool] = []
        self.feed(text)

    def handle_starttag(self, tag: str, found: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in found}
        self.anchors |= {attributes[name] for name in ("id", "name") if attributes.get(name)}
        if tag == "nav":
            self._navs.append("md-nav--primary" in attributes.get("class", "").split())
        if tag == "a" and "href" in attributes:
            self.links.append(attributes["href"])
            if any(self._navs):
                self.navigation.append(attributes["href"])
        self.fetched += [attributes[name] for name in FETCHES.get(tag, ()) if name in attributes]
        if tag == "link" and FETCHED_RELATIONS & set(attributes.get("rel", "").split()):
            self.fetched.append(attributes.get("href", ""))

    def handle_endtag(self, tag: str) -> None:
        if tag == "nav" and self._navs:
            self._navs.pop()


@dataclass
class Site:
    """The files of a built site, by path relative to its root."""

    root: Path
    pages: dict[str, Page] = field(init=False)

    def __post_init__(self) -> None:
        files = sorted(self.root.rglob("*.html"))
        self.pages = {
            file.relative_to(self.root).as_posix(): Page(file.read_text(encoding="utf-8"))
            for file in files
        }

    @cached_property
    def search(self) -> dict[str, str]:
        """Return the title of each search entry, by its target."""
        index = json.loads((self.root / "search" / "search_index.json").read_text(encoding="utf-8"))
        return {entry["location"]: entry["title"] for entry in index["docs"]}

    def unreachable_pages(self) -> list[str]:
        """Return the pages that the navigation of the first page does not reach."""
        reached = {
            self._target("index.html", link)[0] for link in self.pages["index.html"].navigation
        }
        return sorted(set(self.pages) - reached - {LOST, "index.html"})

    def broken_links(self) -> list[str]:
        """Return the links and fetches without an existing file or anchor."""
        return [
            f"{page}: {link}"
            for page, parsed in self.pages.items()
            for link in (*parsed.links, *parsed.fetched)
            if not is_external(link) and not self._is_valid_link(page, link)
        ]

    def external_fetches(self) -> list[str]:
        """Return the fetches from other hosts."""
        return [
            f"{page}: {link}"
            for page, parsed in self.pages.items()
            for link in parsed.fetched
            if is_external(link) and not link.startswith("data:")
        ]

    def missing_from_search(self, names: list[str]) -> list[str]:
        """Return the names without a search entry at their anchor in the reference."""
        anchors = {
            location.partition("#")[2] for location in self.search if "reference/" in location
        }
        found = {re.sub(r"^tierstore\.(errors\.|types\.)?", "", anchor) for anchor in anchors}
        return [name for name in names if name not in found]

    def _is_valid_link(self, page: str, link: str) -> bool:
        path, anchor = self._target(page, link)
        if not (self.root / path).is_file():
            return False
        return not anchor or path not in self.pages or anchor in self.pages[path].anchors

    def _target(self, page: str, link: str) -> tuple[str, str]:
        """Return the file, relative to the root of the site, and the anchor of a link."""
        base = "/" if page == LOST else f"/{page}"
        path, anchor = urldefrag(urljoin(base, link))
        path = unquote(urlsplit(path).path).lstrip("/")
        if path == "" or path.endswith("/"):
            path += "index.html"
        return path, unquote(anchor)


def is_external(link: str) -> bool:
    """Return True if a link leaves the site."""
    return bool(urlsplit(link).scheme or urlsplit(link).netloc)


def public_names(package: Path = ROOT / "tierstore") -> list[str]:
    """Read the names of the public modules without importing them, since torch may be missing."""
    found: list[str] = []
    for module in ("__init__.py", "errors.py", "types.py"):
        names = assigned((package / module).read_text(encoding="utf-8"), "__all__")
        if not isinstance(names, list):
            raise ValueError(f"{package / module} has no list __all__")
        found += [str(name) for name in names if name not in found]
    return found


def faults(root: Path, names: list[str]) -> list[str]:
    """Return the faults of a built site, one line each."""
    site = Site(root)
    return [
        *(f"the navigation does not reach {page}" for page in site.unreachable_pages()),
        *(f"broken link: {link}" for link in site.broken_links()),
        *(f"fetched from another host: {link}" for link in site.external_fetches()),
        *(f"the search does not find {name}" for name in site.missing_from_search(names)),
    ]


def report(root: Path, names: list[str] | None = None) -> int:
    """Print the faults of a built site, if any, and return the exit status.

    The search must find `names` (default: the package's public names).
    """
    found = faults(root, public_names() if names is None else names)
    print("\n".join(found) or f"{root}: every link, every page and every public name is found")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(report(Path(sys.argv[1]) if sys.argv[1:] else SITE))
