"""Only `adapters/compat/` knows other libraries: one file each, found by its presence."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import tierstore
from tierstore.adapters.compat import Library, libraries

PACKAGE = Path(tierstore.__file__).parent
COMPAT = PACKAGE / "adapters" / "compat"
NAMES = "|".join(each.name for each in libraries())
LIBRARIES = re.compile(rf"\b({NAMES})\b|_hf_hook|_diffusers_hook")
PROSE = {"raise", "warn", "warning", "info", "log", "add_note", "help"}


def _message_lines(tree: ast.Module) -> set[int]:
    """Return the lines of docstrings, and of calls that produce messages for people."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            is_message = name in PROSE or name.endswith("Error")
        else:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            is_message = docstring or isinstance(node, ast.Raise)
        if is_message:
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))  # type: ignore[attr-defined]
    return lines


def mentions(source: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of code that name a library, without comments and messages."""
    prose = _message_lines(ast.parse(source))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        line = token.start[0]
        is_code = token.type in (tokenize.NAME, tokenize.STRING) and line not in prose
        if is_code and LIBRARIES.search(token.string):
            yield line, token.string


def test_mentions_finds_names_in_code() -> None:
    source = '"""accelerate"""\nimport diffusers  # peft\nx = "_hf_hook"\nraise E("peft")\n'
    assert [line for line, _ in mentions(source)] == [2, 3]


def test_libraries_are_named_in_compat_only() -> None:
    paths = set(PACKAGE.rglob("*.py")) - set(COMPAT.rglob("*.py"))
    found = {str(path): where for path in paths if (where := [*mentions(path.read_text())])}
    assert not found, "ask a Library of tierstore/adapters/compat instead"


def test_each_file_of_compat_has_one_library() -> None:
    names = {path.stem for path in COMPAT.glob("*.py")} - {"__init__"}
    assert {type(each).__module__.rpartition(".")[2] for each in libraries()} == names
    assert {each.name for each in libraries()} == names


def test_library_defaults_answer_nothing() -> None:
    silent = Library()
    assert not silent.hidden_tensors(object())  # type: ignore[arg-type]
    assert silent.loading() is None
