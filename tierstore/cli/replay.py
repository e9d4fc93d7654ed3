"""`replay`: a recorded run, with other budgets or another policy."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from tierstore.cli import options, words
from tierstore.cli.frame import Code, Failure, as_json_option, examples, print_json, remark
from tierstore.cli.render import Column, draw
from tierstore.cli.trace import recorded_in
from tierstore.model.errors import BudgetError
from tierstore.model.tiers import TIERS, Tier

if TYPE_CHECKING:  # they bring numpy: only who replays shall wait for that
    from tierstore.observe.trace import Recorded

POLICIES = ("next-use", "lru")
_COUNTED = ("stalled_seconds", "hits", "late", "misses")


@dataclass(frozen=True)
class Row:
    """A run: budgets and bytes in bytes, times in seconds. `problem` tells why there is none."""

    name: str
    ram: int | None
    device: int | None
    read: int | None = None
    onloaded: int | None = None
    computed_seconds: float | None = None
    stalled_seconds: float | None = None
    hits: int | None = None
    late: int | None = None
    misses: int | None = None
    problem: str | None = None

    @property
    def seconds(self) -> float | None:
        """Computing and waiting together, as on one thread."""
        if self.computed_seconds is None or self.stalled_seconds is None:
            return None
        return self.computed_seconds + self.stalled_seconds


@click.command(
    "replay",
    epilog=examples(
        "replay run.json",
        "replay run.json --ram 4GB --ram 8GB --ram 16GB",
        "replay run.json --ram 8GB --policy next-use --policy lru --json",
    ),
)
@click.argument("trace", metavar="TRACE")
@click.option(
    "--ram",
    type=options.ram,
    metavar="SIZE",
    multiple=True,
    help="A ram_budget to try; may be given several times. Left out: the recorded one.",
)
@click.option(
    "--device",
    type=options.device,
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
@as_json_option
def replay(
    trace: str,
    ram: tuple[int, ...],
    device: int | None,
    policy: tuple[str, ...],
    as_json: bool,
) -> None:
    """Tell what a recorded run would have taken with other budgets, or another policy.

    TRACE is a file that `store.trace(path)` wrote. The groups, the order of their uses, the time
    between uses and the speed of each hop are the recorded ones; the planner is the real one. All
    groups begin on disk, and nothing is written.
    """
    recorded = _read(trace)
    rows = [_recorded_row(recorded), *_replayed(recorded, ram, device, policy)]
    if as_json:
        runs = [{**asdict(row), "seconds": row.seconds} for row in rows]
        print_json({"trace": os.path.abspath(trace), "runs": runs})
        return
    _draw(rows)
    if recorded.dropped:
        remark(
            f"The trace is not whole: its {words.count(recorded.dropped, 'oldest event')} were "
            "dropped, so that the replays begin later than the recorded run did."
        )


def _read(path: str) -> Recorded:
    recorded = recorded_in(path)
    if not recorded.uses:
        raise Failure(
            f"{path} holds no use of any group: there is nothing to replay",
            "Record a run in which groups are used.",
            Code.USAGE,
        )
    return recorded


def _recorded_row(recorded: Recorded) -> Row:
    stats = recorded.stats
    return Row(
        "recorded",
        recorded.budgets.get(Tier.HOST.name),
        recorded.budgets.get(Tier.DEVICE.name),
        read=stats["bytes_read"],
        onloaded=stats["bytes_onloaded"],
        computed_seconds=sum(seconds for _, seconds in recorded.uses),
        **{name: stats[name] for name in _COUNTED},
    )


def _replayed(
    recorded: Recorded, rams: Sequence[int], device: int | None, policies: Iterable[str]
) -> list[Row]:
    device = device or recorded.budgets.get(Tier.DEVICE.name)
    budget = recorded.budgets.get(Tier.HOST.name)
    tried = rams or ([] if budget is None else [budget])
    if not tried:
        raise Failure("the trace tells no ram_budget", "Give --ram.", Code.USAGE)
    return [_row(recorded, ram, device, policy) for ram in tried for policy in policies]


def _row(recorded: Recorded, ram: int, device: int | None, policy: str) -> Row:
    from tierstore.simulation import Use, simulate

    uses = [Use(key, seconds) for key, seconds in recorded.uses]
    bandwidth = {}
    for hop, speed in recorded.bandwidth.items():
        src, _, dst = hop.partition(">")
        if speed:
            bandwidth[TIERS[src], TIERS[dst]] = speed
    try:
        outcome = simulate(
            dict(recorded.groups),
            uses,
            options.budgets_of(ram, device),
            bandwidth=bandwidth,
            policy=policy,
        )
    except BudgetError as error:
        return Row(policy, ram, device, problem=str(error))
    return Row(
        policy,
        ram,
        device,
        read=outcome.bytes_moved.get((Tier.DISK, Tier.HOST), 0),
        onloaded=outcome.bytes_moved.get((Tier.HOST, Tier.DEVICE), 0),
        computed_seconds=outcome.computed_seconds,
        **{name: getattr(outcome, name) for name in _COUNTED},
    )


def _draw(rows: Sequence[Row]) -> None:
    columns = [
        Column[Row]("RUN", lambda row: row.name),
        _numbers("RAM", words.size, lambda row: row.ram),
        _numbers("DEVICE", words.size, lambda row: row.device),
        _numbers("READ", words.size, lambda row: row.read),
        _numbers("ONLOADED", words.size, lambda row: row.onloaded),
        _numbers("STALLED", "{:.3f}".format, lambda row: row.stalled_seconds),
        _numbers("SECONDS", "{:.3f}".format, lambda row: row.seconds),
        _numbers("HITS", "{:,}".format, lambda row: row.hits),
        _numbers("LATE", "{:,}".format, lambda row: row.late),
        _numbers("MISSES", "{:,}".format, lambda row: row.misses),
    ]
    if all(row.device is None for row in rows):
        columns = [column for column in columns if column.title not in ("DEVICE", "ONLOADED")]
    draw(columns, rows)
    for problem in dict.fromkeys(row.problem for row in rows if row.problem):
        remark(problem)


def _numbers(
    title: str, told: Callable[[Any], str], value: Callable[[Row], float | None]
) -> Column[Row]:
    def cell(row: Row) -> str:
        found = value(row)
        return "-" if found is None else told(found)

    return Column(title, cell, right=True)
