"""The command `replay`: simulates a recorded run with other budgets or another policy."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from tierstore.cli import options
from tierstore.cli.output import Column, Document, Failure, data, draw, print_json, remark
from tierstore.cli.trace import recorded_in
from tierstore.errors import BudgetError
from tierstore.forecasting.budgets import Budget, by_tier
from tierstore.model.formatting import Units, count, size, units_of
from tierstore.model.tiers import TIERS, Tier

if TYPE_CHECKING:  # these import numpy, which would slow down other commands
    from tierstore.observe.event_log import EventRecord
    from tierstore.observe.trace import Recorded

POLICIES = ("next-use", "lru")
_LONGEST = 300
"""Maximum characters of an event, or of instructions, in a message."""
_COUNTED = ("stalled_seconds", "hits", "late", "misses")
_MEASURED = ("read", "onloaded", "computed_seconds", *_COUNTED)


@options.command(
    "replay",
    "replay run.json",
    "replay run.json --ram 4GB --ram 8GB --ram 16GB",
    "replay run.json --ram 8GB --policy next-use --policy lru --json",
)
@click.argument("trace", metavar="TRACE", shell_complete=options.complete_files)
@options.ram_option
@click.option(
    "--device",
    type=options.device,
    metavar="SIZE",
    help="device_budget to try (default: the recorded one).",
)
@click.option(
    "--policy",
    type=click.Choice(POLICIES),
    multiple=True,
    default=POLICIES[:1],
    show_default=True,
    help="Policy to try. May be given several times.",
)
def replay(
    trace: str,
    rams: tuple[Budget, ...],
    device: Budget | None,
    policy: tuple[str, ...],
    as_json: bool,
) -> None:
    """Simulate a recorded run with other budgets, or another policy.

    TRACE is a file written by `store.trace(path)`. The simulation uses the store's planner, with
    the recorded groups, uses, times between uses and speeds. All groups start on disk, and nothing
    is written. Without --ram, tries the recorded budget.

    Also replays the recorded events, to check that the planner still makes the same decisions.
    """
    recorded = recorded_in(trace)
    if not recorded.uses:
        raise Failure(
            f"{trace} has no uses of groups to replay",
            "Record a run that uses groups.",
        )
    events = None if recorded.events is None else _compare(recorded.events)
    rows = [_recorded_row(recorded), *_replayed(recorded, rams, device, policy)]
    if as_json:
        print_json({"trace": os.path.abspath(trace), "runs": rows, "events": events})
        return
    ram = recorded.budgets.get(Tier.HOST.name)
    units = Units.DECIMAL if ram is None else units_of(ram)
    _draw(rows, options.units_typed([*rams, device]) or units)
    if events is not None:
        data("")
        data(f"same decisions at {events['agreed']:,} of {count(events['count'], 'event')}")
        if events["problem"]:
            remark(events["problem"])
    if recorded.dropped:
        remark(
            f"The trace is incomplete: its {count(recorded.dropped, 'oldest event')} were dropped, "
            "so the replays begin later than the recorded run."
        )


def _compare(record: EventRecord) -> Document:
    """Count the recorded events before the first one at which the planner now differs."""
    from tierstore.simulation import first_difference

    total = len(record.handled)
    try:
        difference = first_difference(record)
    except ValueError as error:
        problem = f"The recorded decisions cannot be compared: {error}."
        return {"count": total, "agreed": 0, "problem": problem}
    if difference is None:
        return {"count": total, "agreed": total, "problem": None}
    then = _shortened(_listed(difference.recorded.instructions))
    now = _shortened(difference.error or _listed(difference.instructions))
    problem = (
        f"From event {difference.number + 1:,} on, the planner decides differently, or the trace "
        f"was edited. After {_shortened(difference.recorded.event)} it instructed {then}; "
        f"now: {now}"
    )
    return {"count": total, "agreed": difference.number, "problem": problem}


def _listed(instructions: Iterable[object]) -> str:
    return ", ".join(map(str, instructions)) or "nothing"


def _shortened(what: object) -> str:
    text = str(what)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _row(
    name: str,
    ram: Budget | int | None,
    device: int | None,
    problem: str | None = None,
    **measured: Any,
) -> Document:
    """Describe a run, in bytes and seconds. `problem` says why there are no measurements.

    `ram_budget` is the text as typed. `seconds` are computing plus waiting, as on one thread.
    """
    text, nbytes = (ram.text, ram.nbytes) if isinstance(ram, Budget) else (None, ram)
    row = {"name": name, "ram_budget": text, "ram": nbytes, "device": device}
    row |= {**dict.fromkeys(_MEASURED), **measured}
    seconds = measured["computed_seconds"] + measured["stalled_seconds"] if measured else None
    return {**row, "problem": problem, "seconds": seconds}


def _recorded_row(recorded: Recorded) -> Document:
    stats = recorded.stats
    return _row(
        "recorded",
        recorded.budgets.get(Tier.HOST.name),
        recorded.budgets.get(Tier.DEVICE.name),
        read=stats["bytes_read"],
        onloaded=stats["bytes_onloaded"],
        computed_seconds=sum(seconds for _, seconds in recorded.uses),
        **{name: stats[name] for name in _COUNTED},
    )


def _replayed(
    recorded: Recorded, rams: Sequence[Budget], typed: Budget | None, policies: Iterable[str]
) -> list[Document]:
    from tierstore.simulation import Use, simulate

    device = typed.nbytes if typed else recorded.budgets.get(Tier.DEVICE.name)
    recorded_ram = recorded.budgets.get(Tier.HOST.name)
    tried: Sequence[Budget | int] = rams or ([] if recorded_ram is None else [recorded_ram])
    if not tried:
        raise Failure("the trace has no ram_budget", "Give --ram.")
    groups, uses = dict(recorded.groups), [Use(key, seconds) for key, seconds in recorded.uses]
    bandwidth = {}
    for hop, speed in recorded.bandwidth.items():
        src, _, dst = hop.partition(">")
        if speed and src in TIERS and dst in TIERS:  # a simulation has only these tiers
            bandwidth[TIERS[src], TIERS[dst]] = speed
    rows = []
    for ram, policy in itertools.product(tried, policies):
        budgets = by_tier(ram.nbytes if isinstance(ram, Budget) else ram, device)
        try:
            outcome = simulate(groups, uses, budgets, bandwidth=bandwidth, policy=policy)
        except BudgetError as error:
            rows.append(_row(policy, ram, device, problem=str(error)))
            continue
        rows.append(
            _row(
                policy,
                ram,
                device,
                read=outcome.bytes_moved.get((Tier.DISK, Tier.HOST), 0),
                onloaded=outcome.bytes_moved.get((Tier.HOST, Tier.DEVICE), 0),
                computed_seconds=outcome.computed_seconds,
                **{name: getattr(outcome, name) for name in _COUNTED},
            )
        )
    return rows


def _draw(rows: Sequence[Document], units: Units) -> None:
    def ram(row: Document) -> str:
        if row["ram_budget"]:
            return Budget(row["ram_budget"], row["ram"]).formatted(units)
        return "-" if row["ram"] is None else size(row["ram"], units)

    def numbers(title: str, form: Callable[[Any], str], field: str = "") -> Column:
        name = field or title.lower()
        return Column(title, lambda row: "-" if row[name] is None else form(row[name]), right=True)

    def nbytes(value: int) -> str:
        return size(value, units)

    columns = [
        Column("RUN", lambda row: row["name"]),
        Column("RAM", ram, right=True),
        numbers("DEVICE", nbytes),
        numbers("READ", nbytes),
        numbers("ONLOADED", nbytes),
        numbers("STALLED", "{:.3f}".format, "stalled_seconds"),
        numbers("SECONDS", "{:.3f}".format),
        numbers("HITS", "{:,}".format),
        numbers("LATE", "{:,}".format),
        numbers("MISSES", "{:,}".format),
    ]
    if all(row["device"] is None for row in rows):
        columns = [column for column in columns if column.title not in ("DEVICE", "ONLOADED")]
    draw(columns, rows)
    for problem in dict.fromkeys(row["problem"] for row in rows if row["problem"]):
        remark(problem)
