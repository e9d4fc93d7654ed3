"""`tierstore-inspect` and its commands."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from tierstore.cli import words
from tierstore.cli.bench import bench
from tierstore.cli.listing import disk_use, environment, list_groups, show
from tierstore.cli.machine import version_of
from tierstore.cli.output import Code, Failure, remark
from tierstore.cli.plan import plan
from tierstore.cli.ps import list_workers
from tierstore.cli.removal import prune, remove_groups
from tierstore.cli.replay import replay
from tierstore.cli.top import top
from tierstore.cli.trace import trace
from tierstore.cli.verify import verify


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


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        click.echo(f"tierstore-inspect {version_of('tierstore') or '(not installed)'}")
        ctx.exit()


@click.group(
    cls=Inspector,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="\b\n"
    "Exit codes:\n"
    "  0 done, 1 unexpected failure, 2 wrong usage (or DIR is no store), 3 damage found,\n"
    "  4 no such key, 11 the directory is in use by a live process",
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Print the version and exit.",
)
def inspector() -> None:
    """Look into a tierstore directory: what it holds, whether it is whole, what can go.

    `tierstore-inspect DIR` is short for `tierstore-inspect ls DIR`. Only `prune`, `rm` and `verify
    --repair` change anything. `ps` and `top` look at what runs: services (`tierstore-serve`).
    """


for _command in (list_groups, show, disk_use, verify, prune, remove_groups):
    inspector.add_command(_command)
for _command in (environment, bench, plan, replay, trace, list_workers, top):
    inspector.add_command(_command)
