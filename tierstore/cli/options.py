"""Arguments and options of several commands: parsing, errors and completion."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import click
from click.shell_completion import CompletionItem

from tierstore.cli.output import Failure, remark
from tierstore.engine.directories import VARIABLE, chosen_directory
from tierstore.errors import TierStoreError
from tierstore.forecasting.budgets import Budget
from tierstore.model.formatting import Units, printable
from tierstore.model.sizes import PAGE, is_auto, parse_size
from tierstore.system.objects import check_key

TOO_MUCH = 1 << 63
"""Exclusive limit on sizes in bytes."""
LONGEST = 1e9
"""Longest time in seconds. Anything longer is a mistake, and sums of it may be infinite."""
_MIN_PART = 3
"""Letters of the shortest part of a name to match: shorter ones occur in too many names."""

_MOST_MEANT = 3
"""Suggestions in an error. A store may have thousands of similar keys."""

_NUMBER = r"(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?"
_TIME = re.compile(rf"(?P<number>{_NUMBER})\s?(?P<unit>s|s/it|it/s)?", re.ASCII)
_WHOLE_IN_SHELLS = re.compile(r"[\w@%+./-]+")
"""Keys that bash, zsh and fish read as one word without quotes."""

# Commands -----------------------------------------------------------------------------------------


class Command(click.Command):
    """A command that suggests similar options for an unknown one."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse arguments. The error for an unknown option names the closest ones."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            known = [name for each in self.get_params(ctx) for name in each.opts]
            wrong = printable(error.option_name)
            meant = did_you_mean(wrong, [name for name in known if name.startswith("--")])
            raise click.UsageError(f"No such option {wrong!r}.{meant}", ctx) from error


def did_you_mean(typed: str, known: Sequence[str]) -> str:
    """Return a suggestion to append to an error: names that resemble or contain the typed one.

    >>> did_you_mean("--disk", ["--disk-bandwidth", "--device"]), did_you_mean("x", ["ls"])
    (" Did you mean '--disk-bandwidth'?", '')
    """
    import difflib

    part, names = typed.lstrip("-"), {name.lstrip("-"): name for name in known}
    alike = difflib.get_close_matches(part, names)
    alike += sorted(each for each in names if part and each.startswith(part))
    alike += sorted(each for each in names if len(part) >= _MIN_PART and part in each)
    closest = list(dict.fromkeys(alike))[:_MOST_MEANT]
    meant = " or ".join(repr(names[each]) for each in sorted(closest))
    return f" Did you mean {meant}?" if meant else ""


def command(name: str, *examples: str) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a command with a `--json` option, and with examples at the end of its help."""
    epilog = "\b\nExamples:\n" + "\n".join(f"  tierstore-inspect {line}" for line in examples)

    def made(function: Callable[..., Any]) -> click.Command:
        found = click.command(name, cls=Command, epilog=epilog)(function)
        json_help = "Print JSON: sizes in bytes, times in seconds since 1970."
        found.params.append(click.Option(["--json", "as_json"], is_flag=True, help=json_help))
        return found

    return made


# Completion ---------------------------------------------------------------------------------------

Items = list[CompletionItem]


def complete_directories(_: click.Context, __: click.Parameter | None, incomplete: str) -> Items:
    """Complete directories."""
    return [CompletionItem(incomplete, type="dir")]


def complete_files(_: click.Context, __: click.Parameter | None, incomplete: str) -> Items:
    """Complete files."""
    return [CompletionItem(incomplete, type="file")]


def complete_keys(context: click.Context, _: click.Parameter | None, incomplete: str) -> Items:
    """Complete keys of the given or default DIR; without any, directories."""
    names = context.params.get("names") or ()
    directory = context.params.get("directory")
    if directory is None:  # `show [DIR] KEY`
        directory = names[0] if names else chosen_directory(None)
    typed = {*names, *(context.params.get("keys") or ())}
    keys = [key for key in keys_of(directory) if key.startswith(incomplete) and key not in typed]
    found = [CompletionItem(key) for key in keys]
    is_first = "names" in context.params and not names
    return found or (complete_directories(context, None, incomplete) if is_first else [])


def complete_prefixes(context: click.Context, _: click.Parameter | None, incomplete: str) -> Items:
    """Complete prefixes of keys, up to each slash."""
    # Click has not parsed the arguments yet when it completes an option's value.
    directory = context.args[0] if context.args else context.params.get("directory")
    found: set[str] = set()
    for key in keys_of(directory):
        found.update(itertools.accumulate(f"{part}/" for part in key.split("/")[:-1]))
    return [CompletionItem(prefix) for prefix in sorted(found) if prefix.startswith(incomplete)]


def keys_of(directory: str | None) -> list[str]:
    """Return a store's keys that need no quotes; none if the directory cannot be read."""
    from tierstore.inspection.survey import survey

    with suppress(TierStoreError, OSError):
        groups = survey(os.path.expanduser(directory)).groups if directory else []
        return sorted(g.key for g in groups if g.key and _WHOLE_IN_SHELLS.fullmatch(g.key))
    return []


# Directories and keys -----------------------------------------------------------------------------


def named_or_default(context: click.Context, directory: str | None) -> str:
    """Return the given directory, or the default one after printing a remark."""
    if directory is not None:
        return directory
    chosen = chosen_directory(None)
    if not context.resilient_parsing:
        why = f"from {VARIABLE}" if os.environ.get(VARIABLE) else "the default directory"
        remark(f"No DIR given: using {chosen}, {why}.")
    return chosen


directory_argument = click.argument("directory", metavar="DIR", shell_complete=complete_directories)
"""For commands that change or measure: they never touch a directory that was not given."""
default_directory_argument = click.argument(
    "directory",
    metavar="[DIR]",
    required=False,
    callback=lambda context, _, directory: named_or_default(context, directory),
    shell_complete=complete_directories,
)
"""For commands that only read."""
yes_option = click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
dry_run_option = click.option("--dry-run", is_flag=True, help="Only list what would be removed.")


def key(text: str) -> str:
    """Validate a key."""
    try:
        return check_key(text)
    except ValueError as error:
        raise Failure(str(error), "Give a key as listed by `ls`.") from error


# Sizes, speeds and times --------------------------------------------------------------------------


def parsed_bytes(text: str) -> int:
    """Parse bytes, such as `12GB`. A percentage is an error."""
    if "%" in text:
        raise click.BadParameter(f"{text!r} is a percentage: give bytes, such as 12GB.")
    return _parsed(text)


def speed(text: str) -> float:
    """Parse bytes per second, such as `3GB/s`."""
    size, _, unit = text.partition("/")
    if unit.strip().lower() != "s":
        raise click.BadParameter(f"{text!r} is not a speed: write it like 3GB/s.")
    return float(_parsed(size))


def seconds_of_step(text: str) -> float:
    """Parse the seconds of a step: `1.5`, `1.5s`, `1.5s/it` or `3.2it/s`."""
    found = _TIME.fullmatch(text.strip())
    number = seconds = float(found["number"]) if found else math.inf
    if found and found["unit"] == "it/s":
        seconds = 1 / number if number else math.inf
    if max(number, seconds) > LONGEST:
        raise click.BadParameter(
            f"{text!r} is not the time of a step: give seconds, such as 1.5, or the figure of a "
            "progress bar, such as 1.5s/it or 3.2it/s."
        )
    return seconds


def _parsed(text: str) -> int:
    try:
        found = (
            parse_size(text) if len(text) < 100 else TOO_MUCH
        )  # Python limits the length of numbers
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from error
    if found >= TOO_MUCH:
        raise click.BadParameter(f"{text:.20}... is more than any machine has.")
    return found


# Budgets -----------------------------------------------------------------------------------------


def ram(text: str) -> Budget:
    """Parse a `ram_budget` as a store does; `auto` is evaluated on this machine."""
    if not is_auto(text):
        _parsed(text)
    return _checked(Budget.parse(text))


def device(text: str) -> Budget:
    """Parse a `device_budget`: bytes only, because the device is not queried."""
    if is_auto(text):
        raise click.BadParameter(
            "'auto' is half of the accelerator's free memory when the store opens, which this "
            "command does not query. Give bytes, such as 12GB: half of the free memory that "
            "`nvidia-smi` shows."
        )
    parsed_bytes(text)
    return _checked(Budget.parse(text))


def _checked(budget: Budget) -> Budget:
    if budget.nbytes < PAGE:
        raise click.BadParameter(f"{budget.text!r} is less than one page of {PAGE} bytes.")
    return budget


ram_option = click.option(
    "--ram",
    "rams",
    type=ram,
    metavar="SIZE",
    multiple=True,
    help="ram_budget to try: 8GB, 8GiB, 50% of this machine's memory, or auto; rounded down to "
    "whole pages. May be given several times.",
)


def units_typed(budgets: Iterable[Budget | None]) -> Units | None:
    """Return the units of the first budget that was typed with units."""
    return next((budget.units for budget in budgets if budget and budget.units), None)
