"""The guide to dispatch promises things line by line, and names the tests that show them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs/guides/dispatch.md"

NAMED = re.compile(r"\[`(?P<test>test_\w+)`\]\[(?P<label>\w+)\]")
LABEL = re.compile(r"^\[(?P<label>\w+)\]: (?P<path>\S+)$", re.MULTILINE)


def lines_of(text: str) -> list[str]:
    """The table's lines, without its head."""
    _, _, rest = text.partition("<!-- table: begin -->\n")
    table, end, _ = rest.partition("<!-- table: end -->")
    assert end
    return table.splitlines()[2:]


def missing(text: str) -> list[str]:
    """The named tests of the table that there are not, as `file::test`."""
    paths = {match["label"]: GUIDE.parent / match["path"] for match in LABEL.finditer(text)}
    return [
        f"{paths[match['label']].name}::{match['test']}"
        for line in lines_of(text)
        for match in NAMED.finditer(line)
        if match["test"] not in functions_in(paths[match["label"]])
    ]


def functions_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


TEXT = GUIDE.read_text(encoding="utf-8")


@pytest.mark.parametrize("line", lines_of(TEXT), ids=lambda line: line.split("|")[1].strip())
def test_every_line_names_a_test(line: str) -> None:
    assert NAMED.search(line.split("|")[-2])


def test_every_test_that_is_named_exists() -> None:
    assert not missing(TEXT)


def test_a_test_that_was_renamed_is_noticed() -> None:
    """The control."""
    changed = TEXT.replace("[`test_backward_raises`]", "[`test_backward_rises`]")
    assert missing(changed) == ["test_gradients.py::test_backward_rises"]
