"""Tests use public names: uses of private ones are counted, and may only become fewer.

Private names are there to be changed, and a test that reaches for one has to be changed with it.
The ceiling below goes down with each use that goes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

MOST_PRIVATE_NAMES = 12

OTHERS = {"_buffers", "_fields", "_modules", "_parameters", "_repr_html_"}
"""Names of torch, notebooks and Python's named tuples, which parts of the library have, too."""


A_NAME = re.compile(r"\b_\w+")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def names_bound(nodes: list[ast.AST]) -> set[str]:
    """Private functions, classes, attributes and variables that a file defines."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return {name for name in found if is_private(name)}


def private_uses(nodes: list[ast.AST], theirs: set[str]) -> Iterator[tuple[int, str]]:
    """Where a test uses a private name of the library. A name that its file binds is its own."""
    names = theirs - names_bound(nodes) - OTHERS
    for node in nodes:
        if isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if node.attr in names and not own:
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tierstore"):
            for alias in node.names:
                if is_private(alias.name):
                    yield node.lineno, f"{node.module}.{alias.name}"


def parsed(folder: str) -> Iterator[tuple[Path, list[ast.AST]]]:
    for path in sorted((ROOT / folder).rglob("*.py")):
        yield path, nodes_of(path.read_text(encoding="utf-8"))


def nodes_of(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def counted(folder: str = "tests") -> list[str]:
    """Every private use, such as `tests/plan/test_x.py:12: planner._groups`."""
    theirs = set().union(*(names_bound(nodes) for _, nodes in parsed("tierstore")))
    private = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if theirs.isdisjoint(A_NAME.findall(text)):
            continue  # most files: to parse them takes seconds
        nodes, where = nodes_of(text), path.relative_to(ROOT)
        private += [f"{where}:{line}: {text}" for line, text in private_uses(nodes, theirs)]
    return private


@pytest.mark.parametrize(
    ("source", "uses"),
    [
        ("store._lock", ["store._lock"]),
        ("a.b()._lock = 1", ["a.b()._lock"]),
        ("from tierstore.store import _lock", ["tierstore.store._lock"]),
        ("self._lock", []),
        ("store._other", []),
        ("store.__dict__", []),
        ("class Mine:\n def f(self): self._lock = 1\nMine()._lock", []),
    ],
)
def test_what_is_a_private_use(source: str, uses: list[str]) -> None:
    assert [text for _, text in private_uses(nodes_of(source), {"_lock"})] == uses


def test_private_names_are_used_no_more_than_before() -> None:
    private = counted()
    assert len(private) <= MOST_PRIVATE_NAMES, "use public names:\n" + "\n".join(private)
