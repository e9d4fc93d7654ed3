"""`replay`: a recorded run, with other budgets or another policy."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from tierstore.cli import budgets, options, words
from tierstore.cli.budgets import Budget
from tierstore.cli.output import Column, Document, Failure, data, draw, print_json, remark
from tierstore.cli.trace import recorded_in
from tierstore.completion import files
from tierstore.model.errors import BudgetError
from tierstore.model.tiers import TIERS, Tier

if TYPE_CHECKING:  # they bring numpy: only who replays shall wait for that
    from tierstore.model.moves import Instruction
    from tierstore.observe.event_log import EventRecord
    from tierstore.observe.trace import Recorded

POLICIES = ("next-use", "lru")
_LONGEST = 300
"""Characters that are told of an event, or of instructions."""
_COUNTED = ("stalled_seconds", "hits", "late", "misses")
_MEASURED = ("read", "onloaded", "computed_seconds", *_COUNTED)


@options.command(
    "replay",
    "replay run.json",
    "replay run.json --ram 4GB --ram 8GB --ram 16GB",
    "replay run.json --ram 8GB --policy next-use --policy lru --json",
)
@click.argument("trace", metavar="TRACE", shell_complete=files)
@budgets.ram_option
@click.option(
    "--device",
    type=budgets.device,
    metavar="SIZE",
    help="A device_budget to try. Left out: the recorded one.",
)
@click.option(
    "--policy",
    type=click.Choice(POLICIES),
    multiple=True,
    default=POLICIES[:1],
    show_default=True,
    help="A policy to try; may be given several times.",
)
def replay(
    trace: str,
    rams: tuple[Budget, ...],
    device: Budget | None,
    policy: tuple[str, ...],
    as_json: bool,
) -> None:
    """Tell what a recorded run would have taken with other budgets, or another policy.

    TRACE is a file that `store.trace(path)` wrote. The groups, the order of their uses, the time
    between uses and the speed of each hop are the recorded ones; the planner is the real one. All
    groups begin on disk, and nothing is written. Left out --ram, the recorded budget is tried.

    First the recorded events are played to the planner, to see whether it still decides as it did
    in the recorded run.
    """
    recorded = _read(trace)
    events = None if recorded.events is None else _checked(recorded.events)
    rows = [_recorded_row(recorded), *_replayed(recorded, rams, device, policy)]
    if as_json:
        print_json({"trace": os.path.abspath(trace), "runs": rows, "events": events})
        return
    _draw(rows, budgets.units_typed([*rams, device]) or _units_of(recorded))
    if events is not None:
        data("")
        data(f"same decisions at {events['agreed']:,} of {words.count(events['count'], 'event')}")
        if events["problem"]:
            remark(events["problem"])
    if recorded.dropped:
        remark(
            f"The trace is not whole: its {words.count(recorded.dropped, 'oldest event')} were "
            "dropped, so that the replays begin later than the recorded run did."
        )


def _read(path: str) -> Recorded:
    recorded = recorded_in(path)
    if not recorded.uses:
        raise Failure(
            f"{path} has no use of any group: there is nothing to replay",
            "Record a run in which groups are used.",
        )
    return recorded


def _checked(record: EventRecord) -> Document:
    """At how many recorded events the planner decides as it did; `problem` tells what came next."""
    from tierstore.simulation import first_difference

    count = len(record.handled)
    try:
        difference = first_difference(record)
    except ValueError as error:
        problem = f"The recorded decisions cannot be compared: {error}."
        return {"count": count, "agreed": 0, "problem": problem}
    if difference is None:
        return {"count": count, "agreed": count, "problem": None}
    one = difference.recorded
    then = _told(one.instructions)
    now = _told(difference.instructions) if difference.error is None else difference.error
    problem = (
        f"From event {difference.number + 1:,} on the planner decides otherwise, or the trace was "
        f"edited. After {_shortened(one.event)} it instructed {then}; now: {_shortened(now)}"
    )
    return {"count": count, "agreed": difference.number, "problem": problem}


def _told(instructions: Sequence[Instruction]) -> str:
    return _shortened(", ".join(map(str, instructions)) or "nothing")


def _shortened(what: object) -> str:
    text = str(what)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _units_of(recorded: Recorded) -> words.Units:
    """The units in which somebody wrote the recorded budget."""
    ram = recorded.budgets.get(Tier.HOST.name)
    return words.Units.DECIMAL if ram is None else words.units_of(ram)


def _row(
    name: str,
    ram: Budget | int | None,
    device: int | None,
    problem: str | None = None,
    **measured: Any,
) -> Document:
    """A run: budgets and bytes in bytes, times in seconds. `problem` tells why there is none.

    `ram_budget` is what was typed, if anything. `seconds` are computing and waiting together, as on
    one thread.
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
        raise Failure("the trace tells no ram_budget", "Give --ram.")
    groups, uses = dict(recorded.groups), [Use(key, seconds) for key, seconds in recorded.uses]
    bandwidth = {}
    for hop, speed in recorded.bandwidth.items():
        src, _, dst = hop.partition(">")
        if (
            speed and src in TIERS and dst in TIERS
        ):  # what a simulation has no tier for, it leaves out
            bandwidth[TIERS[src], TIERS[dst]] = speed
    rows = []
    for ram, policy in itertools.product(tried, policies):
        by_tier = budgets.by_tier(ram.nbytes if isinstance(ram, Budget) else ram, device)
        try:
            outcome = simulate(groups, uses, by_tier, bandwidth=bandwidth, policy=policy)
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


def _draw(rows: Sequence[Document], units: words.Units) -> None:
    def size(nbytes: int) -> str:
        return words.size(nbytes, units)

    def ram(row: Document) -> str:
        if row["ram_budget"]:
            return Budget(row["ram_budget"], row["ram"]).shown(units)
        return "-" if row["ram"] is None else size(row["ram"])

    columns = [
        Column("RUN", lambda row: row["name"]),
        Column("RAM", ram, right=True),
        _numbers("DEVICE", size),
        _numbers("READ", size),
        _numbers("ONLOADED", size),
        _numbers("STALLED", "{:.3f}".format, "stalled_seconds"),
        _numbers("SECONDS", "{:.3f}".format),
        _numbers("HITS", "{:,}".format),
        _numbers("LATE", "{:,}".format),
        _numbers("MISSES", "{:,}".format),
    ]
    if all(row["device"] is None for row in rows):
        columns = [column for column in columns if column.title not in ("DEVICE", "ONLOADED")]
    draw(columns, rows)
    for problem in dict.fromkeys(row["problem"] for row in rows if row["problem"]):
        remark(problem)


def _numbers(title: str, told: Callable[[Any], str], field: str = "") -> Column:
    def cell(row: Document) -> str:
        found = row[field or title.lower()]
        return "-" if found is None else told(found)

    return Column(title, cell, right=True)
