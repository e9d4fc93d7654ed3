"""The arguments and options that several commands have, and how their texts are read."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import click

from tierstore.cli import words
from tierstore.cli.output import Failure, remark
from tierstore.completion import directories
from tierstore.engine.directories import VARIABLE, chosen_directory
from tierstore.model.sizes import PAGE, parse_size
from tierstore.system.objects import check_key

TOO_MUCH = 1 << 63
"""Bytes that no file can have."""
LONGEST = 1e9
"""Seconds. What takes longer than thirty years is a mistake, and sums of it may be infinite."""
_TELLING = 3
"""Letters. A shorter part of a name is in too many names to tell which one is meant."""

_NUMBER = r"(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?"
_TIME = re.compile(rf"(?P<number>{_NUMBER})\s?(?P<unit>s|s/it|it/s)?", re.ASCII)


class Command(click.Command):
    """A command that says of an option which there is not which one may be meant."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does, which takes no beginning of a long name for that name."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            known = [name for each in self.get_params(ctx) for name in each.opts]
            wrong = words.printable(error.option_name)
            meant = did_you_mean(wrong, [name for name in known if name.startswith("--")])
            raise click.UsageError(f"No such option {wrong!r}.{meant}", ctx) from error


def did_you_mean(typed: str, known: Sequence[str]) -> str:
    """What to say at the end of an error: the names that are alike, or begin so, or have this part.

    >>> did_you_mean("--disk", ["--disk-bandwidth", "--device"]), did_you_mean("x", ["ls"])
    (" Did you mean '--disk-bandwidth'?", '')
    """
    import difflib

    part, names = typed.lstrip("-"), {name.lstrip("-"): name for name in known}
    alike = set(difflib.get_close_matches(part, names))
    alike |= {each for each in names if part and each.startswith(part)}
    alike |= {each for each in names if len(part) >= _TELLING and part in each}
    meant = " or ".join(repr(names[each]) for each in sorted(alike))
    return f" Did you mean {meant}?" if meant else ""


def command(name: str, *examples: str) -> Callable[[Callable[..., Any]], click.Command]:
    """A command that has `--json`, and examples at the end of its help."""
    epilog = "\b\nExamples:\n" + "\n".join(f"  tierstore-inspect {line}" for line in examples)

    def made(function: Callable[..., Any]) -> click.Command:
        found = click.command(name, cls=Command, epilog=epilog)(function)
        json_help = "Print a JSON document: raw bytes, seconds since 1970."
        found.params.append(click.Option(["--json", "as_json"], is_flag=True, help=json_help))
        return found

    return made


def named_or_default(context: click.Context, directory: str | None) -> str:
    """The directory that was named, or else the one of stores that name none: then that is said."""
    if directory is not None:
        return directory
    chosen = chosen_directory(None)
    if not context.resilient_parsing:
        why = f"as {VARIABLE} says" if os.environ.get(VARIABLE) else "the default directory"
        remark(f"DIR is left out: this is {chosen}, {why}.")
    return chosen


directory_argument = click.argument("directory", metavar="DIR", shell_complete=directories)
"""For what changes or measures something: nobody shall hit a directory that was not named."""
default_directory_argument = click.argument(
    "directory",
    metavar="[DIR]",
    required=False,
    callback=lambda context, _, directory: named_or_default(context, directory),
    shell_complete=directories,
)
"""For what looks only."""
yes_option = click.option("-y", "--yes", is_flag=True, help="Do not ask.")
dry_run_option = click.option("--dry-run", is_flag=True, help="Only say what would be removed.")


def key(text: str) -> str:
    """A key as it was typed, if it can be one."""
    try:
        return check_key(text)
    except ValueError as error:
        raise Failure(str(error), "Give a key as `ls` shows it.") from error


def bytes_only(text: str) -> int:
    """Bytes, from a text that is no share of anything."""
    if "%" in text:
        raise click.BadParameter(f"{text!r}: a share of what? Write bytes, such as 12GB.")
    return parsed(text)


def speed(text: str) -> float:
    """Bytes per second, from a text like `3GB/s`."""
    size, _, unit = text.partition("/")
    if unit.strip().lower() != "s":
        raise click.BadParameter(f"{text!r} is no speed: write it like 3GB/s.")
    return float(parsed(size))


def seconds_of_step(text: str) -> float:
    """How long a step takes, in seconds, from a text like `1.5`, `1.5s`, `1.5s/it` or `3.2it/s`."""
    found = _TIME.fullmatch(text.strip())
    number = seconds = float(found["number"]) if found else math.inf
    if found and found["unit"] == "it/s":
        seconds = 1 / number if number else math.inf
    if max(number, seconds) > LONGEST:
        raise click.BadParameter(
            f"{text!r} is no time of a step: write seconds, such as 1.5, or what a progress bar "
            "shows, such as 1.5s/it or 3.2it/s."
        )
    return seconds


def parsed(text: str) -> int:
    """Bytes, of a number that a machine can have."""
    try:
        found = parse_size(text) if len(text) < 100 else TOO_MUCH  # Python reads no longer ones
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from error
    if found >= TOO_MUCH:
        raise click.BadParameter(f"{text:.20}... is more than any machine has.")
    return found


def whole_pages(nbytes: int, text: str) -> int:
    """Bytes in whole pages, as a store counts them."""
    if nbytes < PAGE:
        raise click.BadParameter(f"{text!r} is less than one page of {PAGE} bytes.")
    return nbytes // PAGE * PAGE
