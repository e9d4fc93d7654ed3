"""What pages say of tests is true: each one that they name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability.md"
OTHERS = [ROOT / "docs" / "decisions" / "0024-on-a-real-gpu.md"]
NAMED = re.compile(r"`(?P<path>tests/[\w/]+\.py)?::(?P<name>\w+)`")


def named(text: str) -> list[tuple[str, str]]:
    """The tests that a text names: `path::name`, or `::name` of the path before in the line."""
    found = []
    for line in text.splitlines():
        path = ""
        for match in NAMED.finditer(line):
            path = match["path"] or path
            found.append((path, match["name"]))
    return found


def missing(path: str, name: str) -> str | None:
    """Why there is no such test; None if there is one."""
    file = ROOT / path
    if not path or not file.is_file():
        return f"there is no file {path!r}"
    if not re.search(rf"^(async )?def {name}\(", file.read_text(encoding="utf-8"), re.MULTILINE):
        return f"{path} has no {name}"
    return None


@pytest.mark.parametrize(("page", "least"), [(PAGE, 50), *((page, 10) for page in OTHERS)])
def test_every_test_that_is_named_is_there(page: Path, least: int) -> None:
    tests = named(page.read_text(encoding="utf-8"))
    assert len(tests) > least
    assert [why for test in tests if (why := missing(*test)) is not None] == []


@pytest.mark.parametrize(
    "text",
    ["`tests/nowhere.py::test_it`", "`tests/docs/test_reliability.py::test_it`", "`::test_it`"],
)
def test_one_that_is_not_there_is_noticed(text: str) -> None:
    [test] = named(text)
    assert missing(*test) is not None


def test_each_promise_has_a_test_and_every_test_a_control() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for number in range(1, 7):
        section = text.split(f"### P{number}: ")[1].split("\n#")[0]
        rows = [line for line in section.splitlines() if line.startswith("| `tests/")]
        assert len(rows) >= 4, f"P{number}"
        assert all(len(row.split(" | ")) == 3 for row in rows), f"P{number}"
