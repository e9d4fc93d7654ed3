"""How names and sentences are chosen, where a program can tell: docs/contributing.md has the rest.

A docstring of the reference or a help text begins with a verb or a noun. A class has a name of its
own, and a word of the glossary one meaning.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter, defaultdict
from collections.abc import Iterator

import click

from tests.architecture.test_layers import ROOT, parsed_files
from tests.docs.test_docstrings import public_docstrings
from tierstore.cli.commands import inspector
from tierstore.service.cli import serve

TURNED = re.compile(r"(What|Who|Whoever|Nobody|Of|That which|Is told|Whether or not)\b")

NOT_YET = {
    *("tierstore.Access", "tierstore.types.ActivationStats", "tierstore.OffloadModel.forward"),
    *("tierstore.types.Snapshot", "tierstore.Stats", "tierstore.errors.StoreTimeoutError"),
    *("tierstore.TierStore.snapshot", "tierstore.TierStore.stats", "tierstore.trace.Recorded"),
    *("tierstore.trace.read_trace", "serve --disk"),
}
"""Texts that were there before the rule: this becomes empty, and none is added."""

MESSAGES = "tierstore/wire/messages.py"
"""Messages have the names of what they ask for, and are written with their module."""


def help_texts(command: click.Command) -> Iterator[tuple[str, str]]:
    yield str(command.name), command.help or ""
    for parameter in command.params:
        yield f"{command.name} {parameter.opts[0]}", getattr(parameter, "help", None) or ""
    for inner in getattr(command, "commands", {}).values():
        yield from help_texts(inner)


def test_texts_for_users_begin_with_a_verb_or_a_noun() -> None:
    texts = [*public_docstrings(), *help_texts(inspector), *help_texts(serve)]
    assert {name for name, text in texts if TURNED.match(inspect.cleandoc(text))} <= NOT_YET


def test_a_class_and_a_glossary_word_have_one_meaning() -> None:
    homes = defaultdict(list)
    for path, tree in parsed_files():
        file = str(path.relative_to(ROOT))
        for node in ast.iter_child_nodes(tree) if file != MESSAGES else ():
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(file)
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| [^|]*\|$", page, re.MULTILINE)
    words = Counter(word.strip() for row in rows for word in row.split(","))
    assert words and max(words.values()) == 1
