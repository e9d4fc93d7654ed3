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
from tierstore.model.urls import redact_secrets
from tierstore.system.machine import version_of

SECTIONS: dict[str, dict[click.Command, str]] = {
    "Inspect a store": {
        list_groups: "List the groups: key, tensors, size, age, state.",
        show: "List the tensors of one group.",
        disk_use: "Show the disk space of directories.",
        verify: "Check every group; --repair quarantines damage.",
    },
    "Remove": {
        remove_groups: "Delete groups for good.",
        prune: "Delete temporary files of crashed processes.",
    },
    "Measure and predict": {
        bench: "Measure the disk of a directory.",
        plan: "Predict the speed of a model by budget.",
        replay: "Simulate a recorded run with other budgets.",
        trace: "Summarize or draw a recorded run.",
    },
    "Monitor": {
        list_workers: "List services and their workers.",
        top: "Show the activity of services or stores.",
        environment: "Describe this machine, for bug reports.",
    },
}
"""Commands by section, each with a summary that fits half a line."""


_CODES = {StoreLockedError: Code.LOCKED, TransferError: Code.UNEXPECTED}


def _may_be_directory(text: str) -> bool:
    return text.startswith("-") or os.sep in text or os.path.lexists(text)


class Inspector(click.Group):
    """The main command. A directory in place of a subcommand means `ls`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert `ls` before a directory."""
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
        """Complete commands, or directories if none matches."""
        found = super().shell_complete(ctx, incomplete)
        return found or options.complete_directories(ctx, None, incomplete)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command, and exit with its code."""
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
            remark(f"Error: {redact_secrets(str(error))}")
            codes = (code for kind, code in _CODES.items() if isinstance(error, kind))
            code = next(codes, Code.USAGE)
        except OSError as error:
            remark(f"Error: {error}")
            remark("Check that the output has disk space, and try again.")
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
    "  0 success, 1 unexpected failure, 2 wrong usage (or DIR is not a store),\n"
    "  3 damage found, 4 no such key, 11 a live process uses the directory,\n"
    "  130 interrupted",
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
    """Inspect, verify and clean up the directory of a store.

    `tierstore-inspect DIR` is short for `tierstore-inspect ls DIR`. An optional [DIR] defaults to
    $TIERSTORE_DIR, or to the default directory in your cache. Only `prune`, `rm` and
    `verify --repair` change a store. Sizes of files are in powers of 1024 (MiB); sizes in memory
    are in the units of the budgets (MB or MiB).
    """


for _section in SECTIONS.values():
    for _command, _summary in _section.items():
        _command.short_help = _summary
        inspector.add_command(_command)
