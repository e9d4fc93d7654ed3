"""Look whether the site of the documentation is whole: `python tools/docs_site.py [build/site]`.

mkdocs looks at the Markdown files. This looks at what a reader gets:

- the navigation of the first page reaches every page;
- every link inside of the site leads to a file, and to an anchor that is in it;
- nothing is fetched from elsewhere: no script, style, picture or font;
- the search finds every public name, under its place in the reference.

`tools/docs.py` calls it when it has built the site.
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
"""Which attributes of which elements a browser fetches by itself; `link` depends on its `rel`."""

FETCHED_RELATIONS = {"icon", "stylesheet", "preload", "modulepreload", "preconnect", "manifest"}

LOST = "404.html"
"""Shown for any address, so that it is no page of its own and its links begin at the root."""


class Page(HTMLParser):
    """What one page links to, what it fetches, which anchors it has, what its navigation has."""

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
    """The files of a built site, by their paths from its root."""

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
        """The title of each entry of the search, by where it leads."""
        index = json.loads((self.root / "search" / "search_index.json").read_text(encoding="utf-8"))
        return {entry["location"]: entry["title"] for entry in index["docs"]}

    def unreached(self) -> list[str]:
        """The pages that the navigation of the first page does not reach."""
        reached = {
            self._target("index.html", link)[0] for link in self.pages["index.html"].navigation
        }
        return sorted(set(self.pages) - reached - {LOST, "index.html"})

    def broken(self) -> list[str]:
        """Links and fetches that lead to no file of the site, or to no anchor of it."""
        return [
            f"{page}: {link}"
            for page, parsed in self.pages.items()
            for link in (*parsed.links, *parsed.fetched)
            if not is_elsewhere(link) and not self._leads_somewhere(page, link)
        ]

    def foreign(self) -> list[str]:
        """What a browser would fetch from elsewhere."""
        return [
            f"{page}: {link}"
            for page, parsed in self.pages.items()
            for link in parsed.fetched
            if is_elsewhere(link) and not link.startswith("data:")
        ]

    def not_found_by_search(self, names: list[str]) -> list[str]:
        """Those public names for which the search has no entry at their anchor in the reference."""
        anchors = {
            location.partition("#")[2] for location in self.search if "reference/" in location
        }
        found = {re.sub(r"^tierstore\.(errors\.|types\.)?", "", anchor) for anchor in anchors}
        return [name for name in names if name not in found]

    def _leads_somewhere(self, page: str, link: str) -> bool:
        path, anchor = self._target(page, link)
        if not (self.root / path).is_file():
            return False
        return not anchor or path not in self.pages or anchor in self.pages[path].anchors

    def _target(self, page: str, link: str) -> tuple[str, str]:
        """The file, from the root of the site, and the anchor that a link of a page leads to."""
        base = "/" if page == LOST else f"/{page}"
        path, anchor = urldefrag(urljoin(base, link))
        path = unquote(urlsplit(path).path).lstrip("/")
        if path == "" or path.endswith("/"):
            path += "index.html"
        return path, unquote(anchor)


def is_elsewhere(link: str) -> bool:
    """Whether a link leaves the site."""
    return bool(urlsplit(link).scheme or urlsplit(link).netloc)


def public_names(package: Path = ROOT / "tierstore") -> list[str]:
    """Read the names of the public modules without importing them: torch need not be here."""
    found: list[str] = []
    for module in ("__init__.py", "errors.py", "types.py"):
        names = assigned((package / module).read_text(encoding="utf-8"), "__all__")
        if not isinstance(names, list):
            raise ValueError(f"{package / module} has no list __all__")
        found += [str(name) for name in names if name not in found]
    return found


def faults(root: Path, names: list[str]) -> list[str]:
    """What is wrong with a built site, a line each."""
    site = Site(root)
    return [
        *(f"the navigation does not reach {page}" for page in site.unreached()),
        *(f"leads nowhere: {link}" for link in site.broken()),
        *(f"is fetched from elsewhere: {link}" for link in site.foreign()),
        *(f"the search does not find {name}" for name in site.not_found_by_search(names)),
    ]


def report(root: Path, names: list[str] | None = None) -> int:
    """Print what is wrong with a built site, or that nothing is, and return the exit status.

    The search has to find `names`: the package's public ones, unless others are passed.
    """
    found = faults(root, public_names() if names is None else names)
    print("\n".join(found) or f"{root}: every link, every page and every public name is found")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(report(Path(sys.argv[1]) if sys.argv[1:] else SITE))
