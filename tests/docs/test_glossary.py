"""The glossary has one meaning per term, and the code uses no word that it rules out."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator

from tests.architecture.test_layers import ROOT, parsed_files

ROW = re.compile(r"^\| ([^|]+) \| [^|]+ \| ([^|]*)\|$", re.MULTILINE)
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")

STORED = {"tierstore/model/events.py", "tierstore/wire/messages.py"}
"""Files whose class names are written to traces or sent to other versions."""


def rows() -> list[tuple[list[str], list[str]]]:
    """Return the terms of each row, and the words that are not used for them."""
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    found = [[cell.strip().split(", ") for cell in row] for row in ROW.findall(page)]
    return [(terms, [word for word in words if word]) for terms, words in found[1:]]


def names(tree: ast.AST) -> Iterator[str]:
    """Yield every name that a module defines: modules' own, classes, functions, arguments."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def ruled_out(name: str, words: set[str]) -> bool:
    """Return whether one of `words`, or its plural, stands in `name`."""
    parts = f" {' '.join(WORD.findall(name)).lower()} "
    return any(f" {word} " in parts or f" {word}s " in parts for word in words)


def test_glossary_terms_have_one_meaning_each() -> None:
    terms = Counter(term for row, _ in rows() for term in row)
    assert terms
    assert [term for term, count in terms.items() if count > 1] == []
    synonyms = {word for _, words in rows() for word in words}
    assert synonyms & set(terms) == set()


def test_code_uses_no_synonym_of_a_term_as_a_name() -> None:
    words = {word for _, synonyms in rows() for word in synonyms}
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path, tree in parsed_files()
        if str(path.relative_to(ROOT)) not in STORED
        for name in names(tree)
        if ruled_out(name, words)
    }
    assert sorted(found) == []


def test_planted_synonym_is_found() -> None:
    words = {word for _, synonyms in rows() for word in synonyms}
    planted = "def find_strays(room, rooms): self.put_away = homes = KeptHome = home_page = 1"
    found = [name for name in names(ast.parse(planted)) if ruled_out(name, words)]
    assert found == ["find_strays", "room", "rooms", "put_away", "homes", "KeptHome", "home_page"]
