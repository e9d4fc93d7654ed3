"""`trace`: what a store did while it was recorded, in numbers and as a picture."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click

from tierstore.cli import words
from tierstore.cli.frame import (
    Code,
    Document,
    Failure,
    as_json_option,
    data,
    examples,
    print_json,
    remark,
    system_failure,
)
from tierstore.cli.render import Column, draw
from tierstore.model.errors import InvalidTraceError

if TYPE_CHECKING:
    from tierstore.observe.trace import Recorded

WORST = 5
"""So many groups are listed that were waited for the longest."""


@dataclass(frozen=True)
class HopTotals:
    """One way between two tiers: bytes, seconds in which any moved, bytes per second."""

    kind: str
    nbytes: int
    seconds: float
    bandwidth: float | None


@dataclass(frozen=True)
class Level:
    """One tier, in bytes: the most that it held, and what it may hold (None: no limit).

    Of a tier that only an edited trace knows there is no peak: None.
    """

    tier: str
    peak: int | None
    budget: int | None


@dataclass(frozen=True)
class Stall:
    """A group that was waited for: how often, and how long in all."""

    key: str
    count: int
    seconds: float


@click.command(
    "trace",
    epilog=examples("trace run.json", "trace run.json --png run.png", "trace run.json.gz --json"),
)
@click.argument("file", metavar="FILE")
@click.option("--png", metavar="PICTURE", help="Draw it too. Needs matplotlib.")
@as_json_option
def trace(file: str, png: str | None, as_json: bool) -> None:
    """Tell what a store did: how long it kept its callers waiting, and what moved meanwhile.

    FILE is what `store.trace(path)` wrote. OVERLAP is the share of the time in which bytes moved
    that nobody waited. The picture shows the bytes on each tier over time against its budget,
    and below that when bytes moved, when callers computed and when they waited.
    """
    recorded = recorded_in(file)
    if png is not None:
        _draw_picture(recorded, png)
    if as_json:
        print_json({"trace": os.path.abspath(file), **_document(recorded)})
    else:
        _show(recorded)
    if recorded.dropped:
        remark(
            f"{words.count(recorded.dropped, 'older event')} were forgotten: sums are of all, "
            "but what is told of single groups, and drawn, is of the newest."
        )


def recorded_in(path: str) -> Recorded:
    """What a trace file holds."""
    from tierstore.observe.trace import read_trace

    try:
        return read_trace(path)
    except InvalidTraceError as error:
        advice = "Give a file that store.trace(path) wrote."
        raise Failure(str(error), advice, Code.USAGE) from error
    except OSError as error:
        raise system_failure(error, f"reading {path}") from error


def _draw_picture(recorded: Recorded, png: str) -> None:
    try:
        from tierstore.cli import picture
    except ImportError as error:
        raise Failure(
            f"the picture cannot be drawn: {error}",
            "Install what draws it: pip install 'tierstore[plot]'",
            Code.UNEXPECTED,
        ) from error
    try:
        picture.draw(recorded, png)
    except OSError as error:
        raise system_failure(error, f"writing {png}") from error


def _hops(recorded: Recorded) -> list[HopTotals]:
    from tierstore.observe.stats import BYTES_MOVED
    from tierstore.observe.trace import KINDS

    stats = recorded.stats
    return [
        HopTotals(
            KINDS[hop],
            stats[field],
            stats["busy_seconds"].get(hop, 0.0),
            recorded.bandwidth.get(hop),
        )
        for hop, field in BYTES_MOVED.items()
        if stats[field] or hop in stats["busy_seconds"]
    ]


def _levels(recorded: Recorded) -> list[Level]:
    peaks = recorded.stats["peak_bytes"]
    return [Level(tier, peaks.get(tier), budget) for tier, budget in recorded.budgets.items()]


def _stalls(recorded: Recorded) -> list[Stall]:
    """Groups that were waited for, the worst first."""
    from tierstore.observe.trace import STALLS

    waits: dict[str, list[float]] = defaultdict(list)
    for one in recorded.slices:
        if one.kind == STALLS:
            waits[one.name].append(one.seconds)
    stalls = [Stall(key, len(seconds), sum(seconds)) for key, seconds in waits.items()]
    return sorted(stalls, key=lambda stall: -stall.seconds)


def _document(recorded: Recorded) -> Document:
    stats = recorded.stats
    return {
        "device": recorded.device,
        "seconds": recorded.seconds,
        "uses": len(recorded.uses),
        "groups": len(recorded.groups),
        **{name: stats[name] for name in ("hits", "late", "misses", "stalled_seconds", "overlap")},
        "hops": [asdict(hop) for hop in _hops(recorded)],
        "tiers": [asdict(level) for level in _levels(recorded)],
        "stalls": [asdict(stall) for stall in _stalls(recorded)],
        "dropped": recorded.dropped,
    }


_HOPS: Sequence[Column[HopTotals]] = (
    Column("MOVED", lambda hop: hop.kind),
    Column("BYTES", lambda hop: words.size(hop.nbytes), right=True),
    Column("BUSY", lambda hop: _seconds(hop.seconds), right=True),
    Column(
        "SPEED",
        lambda hop: "?" if hop.bandwidth is None else f"{words.size(hop.bandwidth)}/s",
        right=True,
    ),
)
_LEVELS: Sequence[Column[Level]] = (
    Column("TIER", lambda level: level.tier),
    Column("PEAK", lambda level: _size(level.peak, "?"), right=True),
    Column("BUDGET", lambda level: _size(level.budget, "no limit"), right=True),
)
_STALLS: Sequence[Column[Stall]] = (
    Column("WAITED FOR", lambda stall: stall.key, flexible=True),
    Column("TIMES", lambda stall: f"{stall.count:,}", right=True),
    Column("IN ALL", lambda stall: _seconds(stall.seconds), right=True),
)


def _show(recorded: Recorded) -> None:
    stats, seconds = recorded.stats, recorded.seconds
    data(f"length    {_seconds(seconds)} on {recorded.device}")
    data(
        f"uses      {words.count(len(recorded.uses), 'use')} of "
        f"{words.count(len(recorded.groups), 'group')}"
    )
    data(f"acquires  {stats['hits']:,} hit, {stats['late']:,} late, {stats['misses']:,} missed")
    share = f", {stats['stalled_seconds'] / seconds:.1%} of the length" if seconds else ""
    data(f"stalled   {_seconds(stats['stalled_seconds'])}{share}")
    data(f"overlap   {stats['overlap']:.1%}")
    if hops := _hops(recorded):
        data("")
        draw(_HOPS, hops)
    data("")
    draw(_LEVELS, _levels(recorded))
    if worst := _stalls(recorded)[:WORST]:
        data("")
        draw(_STALLS, worst)


def _size(nbytes: int | None, otherwise: str) -> str:
    return otherwise if nbytes is None else words.size(nbytes)


def _seconds(seconds: float) -> str:
    """A time, in a unit that shows some of it."""
    return f"{seconds:.3f} s" if seconds < 100 else f"{seconds:,.0f} s"
