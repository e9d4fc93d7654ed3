"""The walk of a key in docs/how-it-works.md: its functions are there, and call each other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-it-works.md"
ROW = re.compile(
    r"^\| (?:`(?P<file>tierstore/[\w/]+\.py)`)? ?\| `(?P<name>[\w.]+)` \|", re.MULTILINE
)
MOST_FILES = 10


def walks(text: str) -> list[list[tuple[str, str]]]:
    """The tables of the section: in each, the file and the function at each stop."""
    section = text.split("## The walk of a key")[1].split("\n## ")[0]
    tables = re.split(r"\n\n(?!\|)", section)
    found = [[(m["file"] or "", m["name"]) for m in ROW.finditer(table)] for table in tables]
    return [stops for stops in found if stops]


def function(tree: ast.AST, name: str) -> ast.AST | None:
    """The definition of `Class.method` in a file."""
    owner, _, method = name.rpartition(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == owner:
            for each in node.body:
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name == method:
                    return each
    return None


def uses(node: ast.AST, name: str) -> bool:
    """Whether a function calls the other one, or hands it on to be called."""
    last = name.rpartition(".")[2]
    return any(isinstance(n, ast.Attribute) and n.attr == last for n in ast.walk(node))


# What is called by another name: a callback, or a value that was handed on.
HANDED_ON = {
    ("RequestLoop._try", "Leases._attempt"): "attempt",
    ("Core.handled", "Planner.handle"): "handle",
}


def broken(stops: list[tuple[str, str]]) -> list[str]:
    """What is not as a table says."""
    found = []
    for (file, name), (_, following) in zip(stops, [*stops[1:], ("", "")], strict=True):
        if not file:
            continue
        node = function(ast.parse((ROOT / file).read_text(encoding="utf-8")), name)
        if node is None:
            found.append(f"{file} has no {name}")
        elif following:
            handed = HANDED_ON.get((name, following))
            called = uses(node, following) or (
                handed is not None
                and any(isinstance(n, ast.Name) and n.id == handed for n in ast.walk(node))
            )
            if not called:
                found.append(f"{name} does not call {following}")
    return found


def test_each_function_is_there_and_calls_the_next_one() -> None:
    tables = walks(PAGE.read_text(encoding="utf-8"))
    assert [len(stops) > 10 for stops in tables] == [True, True]
    assert [problem for stops in tables for problem in broken(stops)] == []


def test_a_key_goes_through_few_files() -> None:
    tables = walks(PAGE.read_text(encoding="utf-8"))
    files = {file for stops in tables for file, _ in stops if file}
    assert len(files) <= MOST_FILES, sorted(files)
    assert tables[0][0][1] == "TierStore.acquire"
    assert tables[-1][-1] == ("", "os.preadv")


@pytest.mark.parametrize(
    "stops",
    [
        [("tierstore/store.py", "TierStore.nothing")],
        [("tierstore/store.py", "TierStore.acquire"), ("tierstore/store.py", "TierStore.close")],
    ],
)
def test_a_wrong_row_is_noticed(stops: list[tuple[str, str]]) -> None:
    assert broken(stops)
