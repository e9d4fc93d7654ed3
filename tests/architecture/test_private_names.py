"""Tests use what is public: how often they do not is counted, and may only become less.

What is private is there to be changed. A test that reaches for it, or that replaces a part of the
library (or of Python) by something else, has to be changed with it, and shows less: that the parts
work as the test makes them work. Better are a parameter, a real fault (a file, a limit, a signal,
the file systems of tests/faults), or an audit event (tests/helpers/events.py).

The ceilings below go down with each use that goes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

MOST_PRIVATE_NAMES = 12
MOST_PATCHES = 52

PATCHING = ("setattr", "delattr", "setitem")

OTHERS = {"_buffers", "_fields", "_modules", "_parameters", "_repr_html_"}
"""Names of torch, notebooks and Python's named tuples, which parts of the library have, too."""


A_NAME = re.compile(r"\b_\w+")
MAY_PATCH = re.compile(rf"{'|'.join(PATCHING)}|^\s*\w+(\.\w+)+( *,.*)? *=", re.MULTILINE)


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


def names_imported(nodes: list[ast.AST]) -> set[str]:
    """Modules, classes and functions of others, but for those whose attributes are hooks."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return found - {"sys", "threading"}


def patches(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Where a test replaces an attribute or an item: with pytest's MonkeyPatch, or by itself in
    what it imports."""
    imported = names_imported(nodes)
    for node in nodes:
        calls = isinstance(node, ast.Call) and is_patching(node, imported)
        sets = isinstance(node, ast.Assign) and any(is_of(to, imported) for to in node.targets)
        if calls or sets:
            yield node.lineno, ast.unparse(node)


def is_patching(call: ast.Call, imported: set[str]) -> bool:
    if isinstance(call.func, ast.Name) and call.func.id in PATCHING and call.args:
        return isinstance(call.args[0], ast.Name) and call.args[0].id in imported
    return (
        isinstance(call.func, ast.Attribute)
        and call.func.attr in PATCHING
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id != "object"
    )


def is_of(target: ast.expr, imported: set[str]) -> bool:
    """Whether it is an attribute of something imported, however deep."""
    if not isinstance(target, ast.Attribute):
        return False
    value = target.value
    while isinstance(value, ast.Attribute):
        value = value.value
    return isinstance(value, ast.Name) and value.id in imported


def parsed(folder: str) -> Iterator[tuple[Path, list[ast.AST]]]:
    for path in sorted((ROOT / folder).rglob("*.py")):
        yield path, nodes_of(path.read_text(encoding="utf-8"))


def nodes_of(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def counted(folder: str = "tests") -> tuple[list[str], list[str]]:
    """Every private use, and every patch, such as `tests/plan/test_x.py:12: planner._groups`."""
    theirs = set().union(*(names_bound(nodes) for _, nodes in parsed("tierstore")))
    private, patched = [], []
    for path in sorted((ROOT / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if theirs.isdisjoint(A_NAME.findall(text)) and not MAY_PATCH.search(text):
            continue  # most files: to parse them takes seconds
        nodes, where = nodes_of(text), path.relative_to(ROOT)
        private += [f"{where}:{line}: {text}" for line, text in private_uses(nodes, theirs)]
        patched += [f"{where}:{line}: {text}" for line, text in patches(nodes)]
    return private, patched


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


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("monkeypatch.setattr(os, 'open', f)", 1),
        ("with monkeypatch.context() as patch: patch.delattr(os, 'x')", 1),
        ("monkeypatch.setenv('A', 'b')\nmonkeypatch.chdir('/')", 0),
        ("object.setattr", 0),
        ("import os\nsetattr(os, 'open', f)", 1),
        ("from a import B\nB.c.d = f", 1),
        ("import sys\nsys.argv = []", 0),
        ("mine = Mine()\nsetattr(mine, 'a', 1)\nmine.b = 2", 0),
    ],
)
def test_what_is_a_patch(source: str, count: int) -> None:
    assert len(list(patches(nodes_of(source)))) == count


def test_no_more_private_names_and_patches_than_before() -> None:
    private, patched = counted()
    assert len(private) <= MOST_PRIVATE_NAMES, "use what is public:\n" + "\n".join(private)
    assert len(patched) <= MOST_PATCHES, "use a parameter or a real fault:\n" + "\n".join(patched)
