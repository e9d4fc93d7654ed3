"""What every command shares: exit codes, failures, common options, where text goes.

Data goes to stdout; questions, remarks and errors go to stderr. What `--json` prints are documents
of raw bytes and seconds, for scripts, and `schema` is their version: a new field does not change
it; a field that goes away or changes its meaning does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import click

from tierstore.cli import words
from tierstore.system.objects import check_key

SCHEMA = 1

Document = dict[str, Any]


class Code(IntEnum):
    """What the command's exit code means. Scripts rely on these numbers."""

    OK = 0
    UNEXPECTED = 1
    USAGE = 2
    DAMAGED = 3
    UNKNOWN_KEY = 4
    LOCKED = 11
    INTERRUPTED = 130


class Failure(Exception):
    """The command cannot do what it was asked for; `advice` is what the user can do about it."""

    def __init__(self, message: str, advice: str, code: Code) -> None:
        super().__init__(message)
        self.advice = advice
        self.code = code


def system_failure(error: OSError, doing: str) -> Failure:
    """The failure for an error of the system."""
    return Failure(
        f"{doing} failed: {error.strerror or error}",
        "Check that the directory is there and that you may read (or change) it.",
        Code.UNEXPECTED,
    )


def unknown_keys(keys: Sequence[str], directory: str) -> Failure:
    """The failure for keys that no file belongs to."""
    names = ", ".join(repr(key) for key in keys)
    return Failure(
        f"{directory} holds no group {names}",
        f"List the keys with: tierstore-inspect ls {directory}",
        Code.UNKNOWN_KEY,
    )


def checked_key(key: str) -> str:
    """A key as it was typed, if it can be one."""
    try:
        return check_key(key)
    except ValueError as error:
        raise Failure(str(error), "Give a key as `ls` shows it.", Code.USAGE) from error


def remark(text: str) -> None:
    """Print prose to stderr."""
    click.echo(words.printable(text), err=True)


def data(text: str) -> None:
    """Print a line of data to stdout."""
    click.echo(words.printable(text))


def print_json(document: Document) -> None:
    """Print a document. Whatever is not ASCII is escaped, so keys cannot steer a terminal."""
    try:
        click.echo(json.dumps({"schema": SCHEMA, **document}, indent=2, allow_nan=False))
    except ValueError as error:  # Python would write NaN, which no other reader takes
        raise Failure(
            "some of what is to be told is a number without end",
            "Give speeds and times that a machine can have.",
            Code.USAGE,
        ) from error


def examples(*lines: str) -> str:
    """Examples for the end of a help text."""
    return "\b\nExamples:\n" + "\n".join(f"  tierstore-inspect {line}" for line in lines)


as_json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print a JSON document: raw bytes, seconds since 1970."
)
directory_argument = click.argument("directory", metavar="DIR")
yes_option = click.option("-y", "--yes", is_flag=True, help="Do not ask.")
dry_run_option = click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
