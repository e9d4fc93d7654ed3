"""The words of docs/glossary.md: each has one meaning in the code; what is banned stays away."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "glossary.md"

MEANT = {
    "tier": "tierstore/model/tiers.py: Tier",
    "driver": "tierstore/tiers/driver.py: TierDriver",
    "hop": "tierstore/tiers/hop.py: Hop",
    "extent": "tierstore/model/groups.py: Extent",
    "lease": "tierstore/lease.py: Lease",
    "access": "tierstore/model/tiers.py: Access",
    "planner": "tierstore/plan/planner.py: Planner",
    "mover": "tierstore/tiers/mover.py: Mover",
    "policy": "tierstore/plan/policy.py: Policy",
    "slot": "tierstore/tiers/arena.py: Slot",
    "engine": "tierstore/engine/engine.py: Engine",
}
"""Where the class of a glossary word is. No other class may have that name."""

MESSAGES = "tierstore/wire/messages.py"
"""Messages have the names of what they ask for or tell, and are written with their module:
`messages.Lease`. No other module imports one by the bare name that another class has."""

BANNED = (
    "Books", "Shelf", "Shelves", "Desk", "Clerk", "Loan", "Lent", "OpenLoan", "Visit", "Passage",
    "Foresight", "Residents", "Answer", "Bell", "Together", "Want", "Wish", "Ticket", "WaitingRoom",
    "Cargo", "Carrier", "Stocktaking", "Lessons", "Copiers", "KeepingState", "PuttingAside",
    "settle", "settle_on_disk", "put_aside", "put_away_all", "hand_over_all", "land", "givers",
    "held_for_good", "acquire_for_good", "torn", "mend", "guided", "customs",
    "lendable", "host_lendable",
)  # fmt: skip
"""Names that were metaphors, or meant several things: `docs/decisions/0026` and `0027`."""


def words() -> list[str]:
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| [^|]*\|$", PAGE.read_text(encoding="utf-8"), re.M)
    return [word.strip() for row in rows[1:] for word in row.split(",")]


def trees() -> Iterator[tuple[str, ast.AST]]:
    for path in sorted((ROOT / "tierstore").rglob("*.py")):
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def names_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The names that code binds or asks for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def banned(tree: ast.AST) -> list[str]:
    return [f"{line}: {name}" for line, name in names_in(tree) if name.lstrip("_") in BANNED]


def test_each_word_is_in_the_glossary_once() -> None:
    found = words()
    assert len(found) == len(set(found)) > 40
    assert set(MEANT) <= set(found)


def test_a_glossary_word_names_one_class() -> None:
    homes = defaultdict(list)
    for file, tree in trees():
        for node in ast.walk(tree) if file != MESSAGES else ():
            if isinstance(node, ast.ClassDef):
                homes[node.name.lower()].append(f"{file}: {node.name}")
    for word, home in MEANT.items():
        name = home.rpartition(" ")[2]
        assert homes[name.lower()] == [home], word


def test_no_two_classes_share_a_name() -> None:
    homes = defaultdict(list)
    for file, tree in trees():
        for node in ast.iter_child_nodes(tree) if file != MESSAGES else ():
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(file)
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_messages_are_written_with_their_module() -> None:
    others = {
        node.name
        for file, tree in trees()
        if file != MESSAGES
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    bare = [
        f"{file}: {alias.name}"
        for file, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "tierstore.wire.messages"
        for alias in node.names
        if alias.name in others
    ]
    assert not bare


def test_no_banned_word_is_used() -> None:
    found = [f"{file}:{use}" for file, tree in trees() for use in banned(tree)]
    assert not found, "docs/glossary.md has the word to use"


@pytest.mark.parametrize(
    "source", ["class Shelf: pass", "x.torn = 1", "def f(guided): pass", "loan = Loan()", "a._wish"]
)
def test_a_banned_word_is_noticed(source: str) -> None:
    capital = source.replace("a._wish", "a._Wish")
    assert banned(ast.parse(capital))
