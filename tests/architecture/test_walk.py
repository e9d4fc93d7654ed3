"""The walks in docs/how-it-works.md: their functions exist, and call each other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(
    r"^\| (?:`(?P<file>tierstore/[\w/]+\.py)`)? ?\| `(?P<name>[\w.]+)` \|", re.MULTILINE
)

# Functions that are called by another name: a callback, or a value that was passed on; no name,
# where the method before calls both.
CALLED_BY_OTHER_NAMES = {
    ("RequestLoop._try", "Leases._attempt"): "attempt",
    ("Core.handled", "Planner.handle"): "handle",
    ("enable_group_offload", "OffloadHandle._enable"): "OffloadHandle",
    ("Attachment.patch", "MethodPatch.__call__"): "MethodPatch",
    ("MethodPatch.__call__", "ForwardRunner.__call__"): "run",
    ("UnitContext._lease", "TierStore.acquire"): "lease",
    ("TierStore.acquire", "UnitContext._bind"): "",
}


def tables(title: str) -> list[list[tuple[str, str]]]:
    """Read the tables of a section of the page: the file and the function at each stop."""
    page = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    section = page.split(f"## {title}\n")[1].split("\n## ")[0]
    found = [ROW.findall(table) for table in re.split(r"\n\n(?!\|)|\n\n(?=\| file)", section)]
    return [stops for stops in found if stops]


def names_in(file: str, name: str) -> set[str]:
    """Return the names that a function or a method `Class.method` of a file uses.

    Return none if it does not exist.
    """
    kind, _, method = name.rpartition(".")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    classes = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == kind]
    for node in (tree if not kind else classes[0] if classes else ast.Module([], [])).body:
        if getattr(node, "name", None) == method:
            return {getattr(n, "attr", getattr(n, "id", "")) for n in ast.walk(node)}
    return set()


def broken(stops: list[tuple[str, str]]) -> list[str]:
    """List the stops that are not as a table says."""
    found = []
    for (file, name), (_, following) in zip(stops, [*stops[1:], ("", "")], strict=True):
        used = names_in(file, name) if file else {""}
        called = CALLED_BY_OTHER_NAMES.get((name, following), following.rpartition(".")[2])
        if not used:
            found.append(f"{file} has no {name}")
        elif file and following and called and called not in used:
            found.append(f"{name} does not call {following}")
    return found


def test_key_walk_functions_call_the_next_one() -> None:
    down, on = tables("The walk of a key")
    assert down[0][1] == "TierStore.acquire" and on[-1] == ("", "os.preadv")
    assert [*broken(down), *broken(on)] == []


@pytest.mark.parametrize(
    ("title", "most", "first", "last"),
    [
        ("The walk of a model", 12, "enable_group_offload", "bind_all"),
        ("The walk of a gradient", 8, "GradientStreamer.add", "MutableGroups.lease_in_host"),
    ],
)
def test_walk_functions_call_the_next_one(title: str, most: int, first: str, last: str) -> None:
    begin, end = tables(title)
    assert (begin[0][1], end[-1][1]) == (first, last)
    assert [*broken(begin), *broken(end)] == []
    assert len({file for file, _ in [*begin, *end]}) <= most


@pytest.mark.parametrize("name", ["TierStore.nothing", "TierStore.close"])
def test_walk_with_a_wrong_row_is_reported(name: str) -> None:
    acquire = ("tierstore/store.py", "TierStore.acquire")
    assert broken([acquire, ("tierstore/store.py", name)])
