"""`tierstore-inspect` and its commands."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from tierstore.cli import options
from tierstore.cli.bench import bench
from tierstore.cli.list_commands import disk_use, environment, list_groups, show
from tierstore.cli.output import Code, Failure, remark
from tierstore.cli.plan import plan
from tierstore.cli.removal import prune, remove_groups
from tierstore.cli.replay import replay
from tierstore.cli.services import list_workers, top
from tierstore.cli.trace import trace
from tierstore.cli.verify import verify
from tierstore.errors import StoreLockedError, TierStoreError, TransferError
from tierstore.model.formatting import printable
from tierstore.model.urls import without_secrets
from tierstore.system.machine import version_of

SECTIONS: dict[str, dict[click.Command, str]] = {
    "Look at a store": {
        list_groups: "List the groups: key, tensors, size, age, state.",
        show: "List the tensors of one group.",
        disk_use: "Show the disk space of directories.",
        verify: "Check every group; --repair moves damage away.",
    },
    "Remove": {
        remove_groups: "Delete groups for good.",
        prune: "Delete temporary files of crashed processes.",
    },
    "Measure and predict": {
        bench: "Measure the disk that DIR lies on.",
        plan: "Predict a model's speed at some budgets.",
        replay: "Predict a recorded run at other budgets.",
        trace: "Summarize a recorded run, and draw it.",
    },
    "See what runs": {
        list_workers: "List services and their workers.",
        top: "Show what a service or a store does now.",
        environment: "Describe this machine, for bug reports.",
    },
}
"""All commands, each with a summary of less than half a line."""


_CODES = {StoreLockedError: Code.LOCKED, TransferError: Code.UNEXPECTED}


def _may_be_directory(text: str) -> bool:
    return text.startswith("-") or os.sep in text or os.path.lexists(text)


class Inspector(click.Group):
    """The command with its exit codes. A directory in place of a command means `ls`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Prepend `ls` to a directory."""
        first = args[0] if args else "--help"
        if first not in self.commands and first not in ("-h", "--help", "--version"):
            if not ctx.resilient_parsing and not _may_be_directory(first):
                shown = printable(first)
                meant = options.did_you_mean(shown, list(self.commands))
                ctx.fail(f"{shown!r} is neither a command nor a directory.{meant}")
            args = ["ls", *args]
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List all commands by section."""
        width = max(map(len, self.commands))
        for title, commands in SECTIONS.items():
            rows = [(command.name or "", summary) for command, summary in commands.items()]
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), summary) for name, summary in rows])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> options.Items:
        """Complete commands, or else directories, which stand for `ls`."""
        found = super().shell_complete(ctx, incomplete)
        return found or options.complete_directories(ctx, None, incomplete)

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
        except TierStoreError as error:
            remark(f"Error: {without_secrets(str(error))}")
            codes = (code for kind, code in _CODES.items() if isinstance(error, kind))
            code = next(codes, Code.USAGE)
        except OSError as error:
            remark(f"Error: {error}")
            remark("Check that there is room for the output, and try again.")
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
    "  0 done, 1 unexpected failure, 2 wrong usage (or DIR is no store), 3 damage\n"
    "  found, 4 no such key, 11 the directory is in use by a live process",
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
    """Inspect, verify and tidy the directory of a store.

    `tierstore-inspect DIR` is short for `tierstore-inspect ls DIR`. An optional [DIR] defaults to
    the directory of stores that name none: TIERSTORE_DIR, or one in your cache. Only `prune`, `rm`
    and `verify --repair` change anything.
    """


for _section in SECTIONS.values():
    for _command, _summary in _section.items():
        _command.short_help = _summary
        inspector.add_command(_command)
