"""Tests that pages name as evidence exist."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
NAMED = re.compile(
    r"`(?P<path>tests/[\w/]+\.py)?::(?P<name>\w+)`|\[`(?P<shown>\w+)`\]\[(?P<label>\w+)\]"
)
LABEL = re.compile(r"^\[(\w+)\]: (\S+/test_\w+\.py)$", re.MULTILINE)


def named(text: str, folder: Path = DOCS) -> list[tuple[str, str]]:
    """Find `path::name`, `::name` of the path before in the line, and [`name`][label of a file]."""
    labels = {
        label: os.path.relpath(os.path.normpath(folder / path), ROOT)
        for label, path in LABEL.findall(text)
    }
    found = []
    for line in text.splitlines():
        path = ""
        for match in NAMED.finditer(line):
            path = match["path"] or labels.get(match["label"] or "", path)
            found.append((path, match["name"] or match["shown"]))
    return found


def missing(path: str, name: str, root: Path = ROOT) -> str | None:
    """Return why there is no such test, or None if it exists."""
    file = root / path
    if not path or not file.is_file():
        return f"there is no file {path!r}"
    if not re.search(rf"^(async )?def {name}\(", file.read_text(encoding="utf-8"), re.MULTILINE):
        return f"{path} has no {name}"
    return None


def test_tests_named_by_pages_exist() -> None:
    tests = {
        page: named(page.read_text(encoding="utf-8"), page.parent) for page in DOCS.rglob("*.md")
    }
    for page in ("reliability.md", "testing.md", "guides/dispatch.md"):
        assert tests[DOCS / page]
    assert [why for each in tests.values() for test in each if (why := missing(*test))] == []


def test_each_promise_and_each_line_of_dispatch_names_a_test() -> None:
    """Each test of a promise also has a control beside it."""
    page = (DOCS / "reliability.md").read_text(encoding="utf-8")
    for section in page.split("\n### P")[1:]:
        rows = [
            line for line in section.split("\n## ")[0].splitlines() if line.startswith("| `tests/")
        ]
        assert rows and all(row.split(" | ")[2].strip("| ") for row in rows)
    table = (DOCS / "guides" / "dispatch.md").read_text(encoding="utf-8")
    lines = table.split("<!-- table: begin -->\n")[1].split("<!-- table: end -->")[0].splitlines()
    assert lines[2:] and all(NAMED.search(line.split("|")[-2]) for line in lines[2:])


@pytest.mark.parametrize(
    "text",
    [
        *(
            "`tests/nowhere.py::test_it`",
            "`tests/docs/test_named_tests.py::test_it`",
            "`::test_it`",
        ),
        "[`test_it`][here]\n\n[here]: ../tests/docs/test_named_tests.py",
    ],
)
def test_missing_test_is_reported(text: str) -> None:
    [test] = named(text)
    assert missing(*test) is not None
