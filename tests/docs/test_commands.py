"""Commands that the documentation shows exist, with the options that it gives them.

Their output is tested in tests/cli. Here each line is parsed as the command itself would, in blocks
of `sh` and `console` and in `code` within a line: an unknown verb, option or choice is an error.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator

import click
import pytest

from tests.docs.test_code_blocks import PAGES, ROOT, blocks_of
from tierstore.cli.commands import inspector
from tierstore.service.cli import serve

INLINE_COMMAND = re.compile(r"`(tierstore-(?:inspect|serve) [^`\n]+)`")
DIRECTORIES = ("DIR", "offload")
"""A store's directory as pages call it, where they omit the verb `ls`."""

OTHERS = ("echo", "eval", "pip", "pip3", "python3", "torchrun")
"""Commands of other programs. (`python3 -m venv ...` in README.md is run by .ci/run.)"""


def command_lines(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the lines of a page that are commands, and whether each is complete."""
    for block in blocks_of(text):
        lines = block.code.splitlines()
        if block.language == "sh":
            yield from ((line, True) for line in lines)
        elif block.language == "console":
            yield from ((line[2:], True) for line in lines if line.startswith("$ "))
    yield from ((each, False) for each in INLINE_COMMAND.findall(text))


def wrong(line: str, whole: bool = True) -> str:
    """Return the fault of a command; empty if there is none."""
    words = shlex.split(re.sub(r"^(\w+=\S* )+|\|.*", "", line), comments=True)
    match words:
        case [] | ["$", *_] | ["tierstore-inspect"]:
            return ""
        case ["tierstore-inspect", verb, *rest]:
            if verb.startswith("-") or verb in DIRECTORIES:
                verb, rest = "ls", words[1:]
            command = inspector.commands.get(verb)
            return f"there is no {verb}" if command is None else wrong_words(command, rest, whole)
        case ["tierstore-serve", *rest]:
            return wrong_words(serve, rest, whole)
        case ["python" | ".venv/bin/python", "-m", module, *_]:
            return "" if importlib.util.find_spec(module) else f"there is no module {module}"
        case ["python" | ".venv/bin/python", program, *_]:
            return "" if (ROOT / program).is_file() else f"there is no {program}"
    return "" if words[0] in OTHERS else f"{words[0]} is not known here"


def wrong_words(command: click.Command, words: list[str], whole: bool) -> str:
    """Return the error of a command's own parser for its words. Of values, only choices count."""
    context = click.Context(command, **inspector.context_settings)
    try:
        values, left, _ = command.make_parser(context).parse_args(list(words))
        for parameter in command.params:
            value = values.get(parameter.name or "")
            if isinstance(parameter.type, click.Choice) and isinstance(value, str | list):
                for each in [value] if isinstance(value, str) else value:
                    parameter.type.convert(each, parameter, context)
    except click.UsageError as error:
        cut_short = isinstance(error, click.MissingParameter | click.BadOptionUsage) and not whole
        return "" if cut_short else error.format_message()
    return f"too many words: {left}" if left else ""


def test_commands_of_the_pages_exist() -> None:
    lines = [each for page in PAGES for each in command_lines(page.read_text(encoding="utf-8"))]
    assert len([line for line, _ in lines if line.startswith("tierstore-")]) > 40
    assert {line: why for line, whole in lines if (why := wrong(line, whole))} == {}


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
def test_unknown_command_is_reported(line: str) -> None:
    assert wrong(line)
