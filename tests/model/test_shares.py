"""A single table has every share of a budget."""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path

from tierstore.model import shares

PACKAGE = Path(__file__).resolve().parents[2] / "tierstore"
TABLE = Path(shares.__file__)
SHARES = {name: value for name, value in vars(shares).items() if name.isupper()}
OF_A_BUDGET = re.compile(r"\b_?(\w+_)?(budget|free|available|spare)(\(\))? *// *[0-9]")


def test_each_share_is_in_the_docstrings_table_with_a_reason() -> None:
    rows = re.findall(r"^    ([A-Z_]+) ", shares.__doc__ or "", re.MULTILINE)
    assert rows == list(SHARES)
    assert all(isinstance(value, int) and value > 1 for value in SHARES.values())
    body = ast.parse(TABLE.read_text()).body
    said = [
        before.targets[0].id
        for before, after in pairwise(body)
        if isinstance(before, ast.Assign)
        and isinstance(before.targets[0], ast.Name)
        and isinstance(after, ast.Expr)
    ]
    assert said == list(SHARES)


def test_each_share_is_used() -> None:
    code = "".join(path.read_text() for path in PACKAGE.rglob("*.py") if path != TABLE)
    used = set(re.findall(r"\bshares\.([A-Z_]+)\b", code))
    assert used == SHARES.keys()


def test_budgets_are_shared_out_here_only() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if OF_A_BUDGET.search(line) or re.match(r"\w*SHARE *=", line)
    ]
    assert not found, "add it to model/shares.py:\n" + "\n".join(found)
    assert OF_A_BUDGET.search("room = budget // 4") and OF_A_BUDGET.search("self._spare() // 2")
