"""Commands that the documentation shows exist, with the options that it gives them.

What they print is tested in tests/cli. Here each line is parsed as the command itself would, in
blocks of `sh` and `console` and in `code` within a line: a verb, an option or a choice that there
is not is an error; that a path is not there is none. Of programs of Python, the file is there.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tests.docs.test_code_blocks import blocks_of, name_in_repository
from tierstore.cli.commands import inspector
from tierstore.service.cli import serve

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

IN_A_LINE = re.compile(r"`(tierstore-(?:inspect|serve) [^`\n]+)`")
ASSIGNMENT = re.compile(r"\w+=")
DIRECTORIES = ("DIR", "offload")
"""What a page calls a store's directory, where it leaves out the verb `ls`."""

OTHERS = ("echo", "eval", "pip", "pip3", "python3", "torchrun")
"""Commands that are not ours. (`python3 -m venv ...` in README.md is run by .ci/run.)"""


def command_lines(text: str) -> Iterator[tuple[str, bool]]:
    """The lines of a page that are commands, and whether each is whole."""
    for block in blocks_of(text):
        for line in block.code.splitlines() if block.language in ("sh", "console") else ():
            if block.language == "sh":
                yield line, True
            elif line.startswith("$ "):
                yield line.removeprefix("$ "), True
    yield from ((each, False) for each in IN_A_LINE.findall(text))


def wrong(line: str, whole: bool = True) -> str:
    """What is wrong with a command; empty if nothing is."""
    words = shlex.split(line, comments=True)
    words = words[: words.index("|")] if "|" in words else words
    while words and ASSIGNMENT.match(words[0]):
        words = words[1:]
    match words:
        case [] | ["$", *_]:
            return ""
        case ["tierstore-inspect", *rest]:
            return wrong_verb(rest, whole)
        case ["tierstore-serve", *rest]:
            return wrong_words(serve, rest, whole)
        case ["python" | ".venv/bin/python", "-m", module, *_]:
            return "" if importlib.util.find_spec(module) else f"there is no module {module}"
        case ["python" | ".venv/bin/python", program, *_]:
            return "" if (ROOT / program).is_file() else f"there is no {program}"
        case [other, *_]:
            return "" if other in OTHERS else f"{other} is not known here"


def wrong_verb(words: list[str], whole: bool) -> str:
    if not words:  # its help
        return ""
    verb = words[0]
    if verb.startswith("-") or verb in DIRECTORIES:
        verb, words = "ls", ["ls", *words]
    command = inspector.commands.get(verb)
    return f"there is no {verb}" if command is None else wrong_words(command, words[1:], whole)


def wrong_words(command: click.Command, words: list[str], whole: bool) -> str:
    """What a command's own parser says of its words; of values, only what may be chosen."""
    context = click.Context(command, **inspector.context_settings)
    try:
        values, left, _ = command.make_parser(context).parse_args(list(words))
        for parameter in command.params:
            value = values.get(parameter.name or "")
            if isinstance(parameter.type, click.Choice) and isinstance(value, str | list):
                for each in [value] if isinstance(value, str) else value:
                    parameter.type.convert(each, parameter, context)
    except (click.MissingParameter, click.BadOptionUsage) as error:
        return error.format_message() if whole else ""
    except click.UsageError as error:
        return error.format_message()
    return f"too many words: {left}" if left else ""


@pytest.mark.parametrize("page", PAGES, ids=name_in_repository)
def test_commands_are_those_that_there_are(page: Path) -> None:
    lines = command_lines(page.read_text(encoding="utf-8"))
    found = {line: why for line, whole in lines if (why := wrong(line, whole))}
    assert found == {}


def test_commands_are_many() -> None:
    """The control: they are found."""
    ours = [
        line
        for page in PAGES
        for line, _ in command_lines(page.read_text(encoding="utf-8"))
        if line.startswith("tierstore-")
    ]
    assert len(ours) > 60


@pytest.mark.parametrize(
    "line",
    [
        "tierstore-inspect nothing",
        "tierstore-inspect plan model --no-such-option",
        "tierstore-inspect plan model --ram",
        "tierstore-inspect plan model another yet-another --ram 8GB",
        "tierstore-inspect replay run.json --policy magic",
        "tierstore-serve /nvme --rom 8GB",
        "python tools/nothing.py",
        "python -m tools.nothing",
        "sudo rm",
    ],
)
def test_a_command_that_there_is_not_is_noticed(line: str) -> None:
    assert wrong(line)
