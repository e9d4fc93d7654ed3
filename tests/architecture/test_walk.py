"""The walk of a key in docs/how-it-works.md: its functions are there, and call each other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(
    r"^\| (?:`(?P<file>tierstore/[\w/]+\.py)`)? ?\| `(?P<name>[\w.]+)` \|", re.MULTILINE
)

# What is called by another name: a callback, or a value that was handed on.
HANDED_ON = {
    ("RequestLoop._try", "Leases._attempt"): "attempt",
    ("Core.handled", "Planner.handle"): "handle",
}


def tables() -> list[list[tuple[str, str]]]:
    """Read the two tables of the page: the file and the function at each stop."""
    page = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    section = page.split("## The walk of a key")[1].split("\n## ")[0]
    found = [ROW.findall(table) for table in re.split(r"\n\n(?!\|)", section)]
    return [stops for stops in found if stops]


def names_in(file: str, name: str) -> set[str]:
    """Return the names that a method `Class.method` of a file uses; none if it is not there."""
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef) and node.name == name.partition(".")[0]:
            for each in node.body:
                if getattr(each, "name", None) == name.partition(".")[2]:
                    return {getattr(n, "attr", getattr(n, "id", "")) for n in ast.walk(each)}
    return set()


def broken(stops: list[tuple[str, str]]) -> list[str]:
    """List what is not as a table says."""
    found = []
    for (file, name), (_, following) in zip(stops, [*stops[1:], ("", "")], strict=True):
        used = names_in(file, name) if file else {""}
        called = HANDED_ON.get((name, following), following.rpartition(".")[2])
        if not used:
            found.append(f"{file} has no {name}")
        elif file and following and called not in used:
            found.append(f"{name} does not call {following}")
    return found


def test_each_function_is_there_and_calls_the_next_one() -> None:
    down, on = tables()
    assert down[0][1] == "TierStore.acquire" and on[-1] == ("", "os.preadv")
    assert [*broken(down), *broken(on)] == []


@pytest.mark.parametrize("name", ["TierStore.nothing", "TierStore.close"])
def test_a_wrong_row_is_noticed(name: str) -> None:
    acquire = ("tierstore/store.py", "TierStore.acquire")
    assert broken([acquire, ("tierstore/store.py", name)])
