"""Find constructions that docs/contributing.md rules out, in code and in pages.

    python -m tests.docs.style [PATH ...]

Prints a line for each: the file, the line, the rule and the text. Rules are about how a sentence is
built, never about single words:

- `opening`: a docstring, help text or message that begins with a question word or a relative
  clause instead of a verb or a noun;
- `actor`: a sentence that hides the actor (a passive of "tell", an indefinite pronoun);
- `length`: a sentence of a page with more than 35 words;
- `summary`: a docstring whose first line does not end its sentence;
- `test name`: one longer than 60 letters, or built as a clause.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

OPENING = re.compile(
    r"(What|Who|Whoever|Whom|Whose|Nobody|Nothing|Of|That|Those|Is told|Whether|Where|How|Why|If"
    r"|Left out|Anybody|Anyone|Everybody|Everyone|All that)\b(?![^.]*\?)"
)
ACTOR = re.compile(r"\b(whoever|nobody|(?:is|are|was|were|be|been) told|tells? of|told of)\b", re.I)
CLAUSE = re.compile(r"_(what|who|whoever|whom|whose|nobody|is_told|of_its_own)(_|$)")
LOGGED = {"warn", "warning", "error", "info", "debug", "exception"}
LONGEST_SENTENCE = 35
LONGEST_TEST_NAME = 60

FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2[ ]*$", re.MULTILINE | re.DOTALL)
SENTENCE_END = re.compile(
    r"(?<=[.!?:;])[\"')*_]*\s+(?=[\"'(*_`\[A-Z0-9])|\n\s*\n|\n\s*(?:[-*]|\d+\.) "
)


@dataclass(frozen=True)
class Fault:
    """A text at `line` of `path` (relative to the repository) that breaks `rule`."""

    path: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


# Code ---------------------------------------------------------------------------------------------


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the docstrings of modules, classes, functions and, after an assignment, of names."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        documented = isinstance(
            node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        )
        for before, each in zip([None, *body], body, strict=False):
            if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)):
                continue
            text = each.value.value
            if isinstance(text, str) and (
                (before is None and documented) or isinstance(before, (ast.Assign, ast.AnnAssign))
            ):
                yield each.lineno, text


def literal(node: ast.expr) -> str:
    """Return the text that a message begins with; braces stand for values."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            literal(part) if isinstance(part, ast.Constant) else "{}" for part in node.values
        )
    if isinstance(node, ast.BinOp):
        return literal(node.left)
    return ""


def messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the texts of errors that are raised, of warnings and logs, and of options' help."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from ((node.lineno, literal(text)) for text in node.exc.args[:1])
        if isinstance(node, ast.Call):
            helps = [keyword.value for keyword in node.keywords if keyword.arg == "help"]
            logged = node.args[:1] if called(node) in LOGGED else []
            yield from ((node.lineno, literal(text)) for text in [*logged, *helps])


def called(call: ast.Call) -> str:
    """Return the last part of the name of the function called."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    return str(name)


def test_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith(
            "test_"
        ):
            yield node.lineno, node.name


def faults_in_docstring(path: str, line: int, text: str) -> Iterator[Fault]:
    first = text.split("\n", 1)[0]
    if OPENING.match(text):
        yield Fault(path, line, "opening", first)
    if first != text.split("\n\n", 1)[0] and not re.search(r"[.:!?)`]$", first):
        yield Fault(path, line, "summary", first)
    for found in ACTOR.finditer(text):
        yield Fault(path, line, "actor", text[max(0, found.start() - 40) : found.end() + 20])


def faults_in_message(path: str, line: int, text: str) -> Iterator[Fault]:
    if OPENING.match(text):
        yield Fault(path, line, "opening", text)
    if ACTOR.search(text):
        yield Fault(path, line, "actor", text)


def faults_in_code(path: str, source: str) -> Iterator[Fault]:
    tree = ast.parse(source)
    for line, text in docstrings(tree):
        yield from faults_in_docstring(path, line, text.strip())
    for line, text in messages(tree):
        yield from faults_in_message(path, line, text.strip())
    for line, name in test_names(tree):
        if len(name) > LONGEST_TEST_NAME or CLAUSE.search(name):
            yield Fault(path, line, "test name", name)


# Pages --------------------------------------------------------------------------------------------


def sentences(page: str) -> Iterator[tuple[int, str]]:
    """Yield the sentences of a page in Markdown, without code, tables and headings."""

    def blank(found: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", found[0])

    prose = FENCE.sub(blank, page)
    prose = re.sub(r"^(?:\||#|!!!|\?\?\?|<|::: | {4}).*$", "", prose, flags=re.MULTILINE)
    start = 0
    for end in [*(found.end() for found in SENTENCE_END.finditer(prose)), len(prose)]:
        text = re.sub(r"^\s*(?:[-*]|\d+\.) ", "", prose[start:end]).strip()
        if text:
            line = prose.count(
                "\n", 0, start + len(prose[start:end]) - len(prose[start:end].lstrip())
            )
            yield line + 1, " ".join(text.split())
        start = end


def faults_in_page(path: str, page: str) -> Iterator[Fault]:
    for line, text in sentences(page):
        if len(re.sub(r"\]\([^)]*\)", "]", text).split()) > LONGEST_SENTENCE:
            yield Fault(path, line, "length", text)
        if OPENING.match(text.lstrip("*_(")) and not re.match(r"(If|Where)\b", text):
            yield Fault(path, line, "opening", text)
        if ACTOR.search(text):
            yield Fault(path, line, "actor", text)


# All ----------------------------------------------------------------------------------------------


def faults(paths: Sequence[Path]) -> Iterator[Fault]:
    """Yield the faults of files, and of the Python files and pages of directories."""
    for given in paths:
        files = sorted([*given.rglob("*.py"), *given.rglob("*.md")]) if given.is_dir() else [given]
        for file in files:
            name = str(file.resolve().relative_to(ROOT))
            text = file.read_text(encoding="utf-8")
            if file.suffix == ".py":
                yield from faults_in_code(name, text)
            elif "changelog" not in name:
                yield from faults_in_page(name, text)


if __name__ == "__main__":
    for fault in faults([Path(each) for each in sys.argv[1:]] or [ROOT]):
        print(fault)
