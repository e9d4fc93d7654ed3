"""What users read is in plain words: pages for users, errors, warnings, the command line.

Some words have a meaning of their own in the code, and in docs/glossary.md. A reader who has not
seen that page takes them for something else, so users' texts do without: pages, messages, and the
docstrings of the reference. Where plain English needs one, its phrase is named here.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.test_docstrings import Shown, shown

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "tierstore"
PAGES = [
    ROOT / "README.md",
    *(DOCS / name for name in ("index.md", "why.md", "reliability.md")),
    *sorted(DOCS.glob("guides/*.md")),
    *sorted(DOCS.glob("examples/*.*")),
]

PRIVATE = re.compile(
    r"\b(homes?|adopt\w*|own(?:er|ers|ed)|place[sd]?|holds?|held|holding|tile[sd]?|units?)\b",
    re.IGNORECASE,
)

PLAIN = (
    r"\bin\s+(?:its |their |the )?place\b",  # changed in place; put another in its place
    r"\btakes? the place of\b",
    r"\btakes place\b",
    r"\bholds others up\b",  # it makes them wait
    r"\bbudgets?[- ](?:that )?(?:holds?|held)\b",  # it is kept
    r"\bChecksums still hold\b",
    r"\brule holds\b",
    r"\bif it did\s+not hold\b",
    r"\bThe same\s+holds\b",
    r"\bhome directory\b",
    r"\bhas no unit\b|\bwithout a unit\b|\bthe unknown unit\b|\bin the units\b",  # of a number
    r"^\[Unit\]$",  # systemd
    r"\btraining[- ]state[- ]has[- ]places\b",  # the name of a decision
    r"`[^`]*`",  # what is called so in a program
)
ALLOWED = re.compile("|".join(PLAIN), re.IGNORECASE | re.MULTILINE)

FOR_MAINTAINERS = PACKAGE / "plan" / "invariants.py"
"""What `Planner.check` says: tests read it."""


def private(text: str) -> list[str]:
    """The lines of a text that use a private word otherwise than in a plain phrase."""
    left = ALLOWED.sub(lambda match: "\n" * match[0].count("\n"), text)
    lines = enumerate(left.splitlines(), start=1)
    return [f"{number}: {match[0]}" for number, line in lines for match in PRIVATE.finditer(line)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_for_users_have_no_private_words(page: Path) -> None:
    assert private(page.read_text(encoding="utf-8")) == []


def sentences(tree: ast.AST) -> Iterator[str]:
    """The texts of a module that have several words, save docstrings: errors, warnings, help."""
    remarks = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and " " in text and id(node) not in remarks:
            yield text


def test_errors_warnings_and_commands_have_no_private_words() -> None:
    found = {}
    for path in sorted(set(PACKAGE.rglob("*.py")) - {FOR_MAINTAINERS}):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if words := {text for text in sentences(tree) if private(text)}:
            found[str(path.relative_to(ROOT))] = words
    assert found == {}


@pytest.mark.parametrize("each", shown(), ids=lambda each: each.name)
def test_the_reference_has_no_private_words(each: Shown) -> None:
    found = {name: private(text) for name, text in docstrings_of(each)}
    assert {name: words for name, words in found.items() if words} == {}


def docstrings_of(each: Shown) -> Iterator[tuple[str, str]]:
    value = each.value
    yield each.name, value.__doc__ or ""
    for name, member in vars(value).items() if isinstance(value, type) else ():
        public = not name.startswith("_") and (each.members is None or name in each.members)
        if public and (inspect.isroutine(member) or isinstance(member, property)):
            yield f"{each.name}.{name}", member.__doc__ or ""


@pytest.mark.parametrize(
    "text",
    [
        "The owner of a weight.",
        "A group is held.",
        "the store holds no group",
        "Adopt the checkpoint.",
        "it goes home",
        "one tile at a time",
        "a unit of the model",
        "a place for bytes",
    ],
)
def test_a_private_word_is_noticed(text: str) -> None:
    assert len(private(text)) == 1


@pytest.mark.parametrize(
    "text", ["changed in place", "takes the place of it", "budgets hold", "[Unit]", "`tile`"]
)
def test_a_plain_phrase_is_no_private_word(text: str) -> None:
    assert private(text) == []


def test_an_error_is_noticed() -> None:
    source = '"""A tile."""\nraise ValueError(f"it holds {x}")\nlogger.info("a place")\n'
    found = [text for text in sentences(ast.parse(source)) if private(text)]
    assert sorted(found) == ["a place", "it holds "]
