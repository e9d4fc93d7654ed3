"""`replay`: a recorded run, with other budgets or another policy."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click

from tierstore.cli import documents, options, words
from tierstore.cli.failures import Code, Failure
from tierstore.cli.frame import as_json_option, examples, remark
from tierstore.cli.trace import recorded_in
from tierstore.model.errors import BudgetError
from tierstore.model.tiers import Tier

if TYPE_CHECKING:  # they bring numpy: only who replays shall wait for that
    from tierstore.trace import Recorded

POLICIES = ("next-use", "lru")


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
        click.echo(documents.text_of({"trace": os.path.abspath(trace), "runs": runs}))
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
        read=stats.get("bytes_read"),
        onloaded=stats.get("bytes_onloaded"),
        computed_seconds=sum(seconds for _, seconds in recorded.uses),
        stalled_seconds=stats.get("stalled_seconds"),
        hits=stats.get("hits"),
        late=stats.get("late"),
        misses=stats.get("misses"),
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
            bandwidth[Tier[src], Tier[dst]] = speed
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
        stalled_seconds=outcome.stalled_seconds,
        hits=outcome.hits,
        late=outcome.late,
        misses=outcome.misses,
    )


def _draw(rows: Sequence[Row]) -> None:
    from tierstore.cli.render import Column, draw

    on_device = any(row.device is not None for row in rows)
    columns = {
        "RUN": [row.name for row in rows],
        "RAM": [_size(row.ram) for row in rows],
        "DEVICE": [_size(row.device) for row in rows],
        "READ": [_size(row.read) for row in rows],
        "ONLOADED": [_size(row.onloaded) for row in rows],
        "STALLED": [_seconds(row.stalled_seconds) for row in rows],
        "SECONDS": [_seconds(row.seconds) for row in rows],
        "HITS": [_count(row.hits) for row in rows],
        "LATE": [_count(row.late) for row in rows],
        "MISSES": [_count(row.misses) for row in rows],
    }
    if not on_device:
        del columns["DEVICE"], columns["ONLOADED"]
    draw(
        [Column(title, right=title != "RUN") for title in columns],
        zip(*columns.values(), strict=True),
    )
    for problem in dict.fromkeys(row.problem for row in rows if row.problem):
        remark(problem)


def _size(nbytes: int | None) -> str:
    return "-" if nbytes is None else words.size(nbytes)


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f}"


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"
