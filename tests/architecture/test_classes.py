"""How large a class may be, and what it may inherit from.

Two objects of over 100 methods were once cut into files by inheritance: no file was long, and
whoever followed a key through them lost it. So what is counted is the class, and the classes of
the store's own parts are composed, not derived from each other.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierstore import TierStore

PACKAGE = Path(__file__).resolve().parents[2] / "tierstore"

MOST_METHODS = 29
MOST_LINES = 400
MOST_PUBLIC_NAMES = 25

COMPOSED = {"engine", "plan", "store.py", "lease.py"}
"""Where no class inherits from another one of the package."""

DATA = {("LeaseRecord", "LeaseUse"), ("OpenLease", "Lease")}
"""A note with more fields, and a lease that says so if it is lost: no behaviour is cut in two."""


def classes(tree: ast.AST) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def too_large(tree: ast.AST) -> list[str]:
    """The classes with too many methods (properties are some, too) or lines."""
    found = []
    for node in classes(tree):
        methods = sum(
            isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body
        )
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if methods > MOST_METHODS or lines > MOST_LINES:
            found.append(f"{node.name}: {methods} methods, {lines} lines")
    return found


def derived(tree: ast.AST, ours: dict[str, ast.ClassDef]) -> list[str]:
    """The classes that inherit from a class of `ours` that is no protocol."""
    found = []
    for node in classes(tree):
        for base in node.bases:
            name = ast.unparse(base).partition("[")[0].rpartition(".")[2]
            if name in ours and not is_protocol(ours[name]) and (node.name, name) not in DATA:
                found.append(f"{node.name}({name})")
    return found


def is_protocol(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).partition("[")[0] == "Protocol" for base in node.bases)


def parsed() -> dict[Path, ast.AST]:
    files = sorted(PACKAGE.rglob("*.py"))
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}


MANY = "class A:\n" + "".join(f"    def m{n}(self): pass\n" for n in range(MOST_METHODS + 1))
LONG = "class A:\n" + "    x = 1\n" * MOST_LINES


@pytest.mark.parametrize("source", [MANY, LONG])
def test_a_large_class_is_noticed(source: str) -> None:
    assert too_large(ast.parse(source))
    assert not too_large(ast.parse(source.rpartition("\n    ")[0]))


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("class A: pass\nclass B(A): pass", ["B(A)"]),
        ("class A(Generic[T]): pass\nclass B(A[int]): pass", ["B(A)"]),
        ("class A(Protocol): pass\nclass B(A): pass", []),
        ("class B(Elsewhere): pass", []),
    ],
)
def test_what_is_derived(source: str, found: list[str]) -> None:
    tree = ast.parse(source)
    assert derived(tree, {node.name: node for node in classes(tree)}) == found


def test_no_class_is_too_large() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}: {c}" for path, t in parsed().items() for c in too_large(t)
    ]
    assert not found, f"at most {MOST_METHODS} methods and {MOST_LINES} lines"


def test_the_store_s_own_parts_are_composed() -> None:
    trees = parsed()
    ours = {node.name: node for tree in trees.values() for node in classes(tree)}
    found = [
        f"{path.relative_to(PACKAGE)}: {each}"
        for path, tree in trees.items()
        if path.relative_to(PACKAGE).parts[0] in COMPOSED
        for each in derived(tree, ours)
    ]
    assert not found, "hold the other object instead"


def test_a_store_has_few_public_names() -> None:
    names = [name for name in {*dir(TierStore), "device"} if not name.startswith("_")]
    assert len(names) <= MOST_PUBLIC_NAMES, sorted(names)
