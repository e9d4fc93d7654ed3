"""The arguments and options that several commands have, and how their texts are read."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import click

from tierstore.cli.output import Failure, remark
from tierstore.completion import directories
from tierstore.engine.directories import VARIABLE, chosen_directory
from tierstore.model.sizes import PAGE, parse_size
from tierstore.system.objects import check_key

TOO_MUCH = 1 << 63
"""Bytes that no file can have."""
LONGEST = 1e9
"""Seconds. What takes longer than thirty years is a mistake, and sums of it may be infinite."""


def command(name: str, *examples: str) -> Callable[[Callable[..., Any]], click.Command]:
    """A command that has `--json`, and examples at the end of its help."""
    epilog = "\b\nExamples:\n" + "\n".join(f"  tierstore-inspect {line}" for line in examples)

    def made(function: Callable[..., Any]) -> click.Command:
        found = click.command(name, epilog=epilog)(function)
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


def seconds(text: str) -> float:
    """A time that is over some day, in seconds."""
    try:
        found = float(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is no number of seconds.") from error
    if not 0 <= found <= LONGEST:
        raise click.BadParameter(f"{text!r}: write seconds, such as 1.5.")
    return found


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
