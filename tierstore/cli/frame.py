"""What every command shares: exit codes, common options, where text goes.

Data goes to stdout; questions, remarks and errors go to stderr.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from tierstore.cli import words
from tierstore.cli.failures import Code, Failure
from tierstore.transfer.objects import check_key


class Inspector(click.Group):
    """The command with its exit codes. A directory in place of a command means `ls`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put `ls` in front of a directory."""
        first = args[0] if args else "--help"
        if first not in self.commands and first not in ("-h", "--help", "--version"):
            if not first.startswith("-") and os.sep not in first and not os.path.lexists(first):
                ctx.fail(f"{words.printable(first)!r} is neither a command nor a directory.")
            args = ["ls", *args]
        return super().parse_args(ctx, args)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command and exit with its code."""
        kwargs["standalone_mode"] = False
        try:
            outcome = super().main(*args, **kwargs)
            code = outcome if isinstance(outcome, int) else Code.OK
        except click.ClickException as error:
            error.show()
            code = Code.USAGE
        except (click.Abort, KeyboardInterrupt):
            code = Code.INTERRUPTED
        except Failure as failure:
            remark(f"Error: {failure}")
            remark(failure.advice)
            code = failure.code
        except OSError as error:
            remark(f"Error: {error}")
            remark("Check that there is room for what is printed or written, and try again.")
            code = Code.UNEXPECTED
        sys.exit(int(code))


def remark(text: str) -> None:
    """Print prose to stderr."""
    click.echo(words.printable(text), err=True)


def data(text: str) -> None:
    """Print a line of data to stdout."""
    click.echo(words.printable(text))


def examples(*lines: str) -> str:
    """Examples for the end of a help text."""
    return "\b\nExamples:\n" + "\n".join(f"  tierstore-inspect {line}" for line in lines)


as_json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print a JSON document: raw bytes, seconds since 1970."
)
directory_argument = click.argument("directory", metavar="DIR")
yes_option = click.option("-y", "--yes", is_flag=True, help="Do not ask.")
dry_run_option = click.option("--dry-run", is_flag=True, help="Only say what would be removed.")


def checked_key(key: str) -> str:
    """A key as it was typed, if it can be one."""
    try:
        return check_key(key)
    except ValueError as error:
        raise Failure(str(error), "Give a key as `ls` shows it.", Code.USAGE) from error


def unknown_keys(keys: Sequence[str], directory: str) -> Failure:
    """The failure for keys that no file belongs to."""
    names = ", ".join(repr(key) for key in keys)
    return Failure(
        f"{directory} holds no group {names}",
        f"List the keys with: tierstore-inspect ls {directory}",
        Code.UNKNOWN_KEY,
    )
