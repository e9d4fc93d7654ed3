"""`trace`: what a store did while it was recorded, in numbers and as a picture."""

from __future__ import annotations

import dataclasses
import os
from collections import defaultdict
from typing import TYPE_CHECKING

import click

from tierstore.cli import options, words
from tierstore.cli.output import (
    Code,
    Column,
    Document,
    Failure,
    data,
    draw,
    print_json,
    remark,
    system_failures,
)
from tierstore.completion import files
from tierstore.model.errors import InvalidTraceError

if TYPE_CHECKING:
    from tierstore.observe.trace import Recorded

WORST = 5
"""So many groups are listed that were waited for the longest, and so many plans, the newest."""


@options.command(
    "trace", "trace run.json", "trace run.json --png run.png", "trace run.json.gz --json"
)
@click.argument("file", metavar="FILE", shell_complete=files)
@click.option("--png", metavar="PICTURE", help="Draw it too. Needs matplotlib.")
def trace(file: str, png: str | None, as_json: bool) -> None:
    """Tell what a store did: how long it kept its callers waiting, and what moved meanwhile.

    FILE is what `store.trace(path)` wrote. OVERLAP is the share of the time in which bytes moved
    that nobody waited. A PASS is one call of a whole model, such as one step of denoising. A PLAN
    is that of a loop, which was followed until it was LEFT. The picture shows the bytes on each
    tier over time against its budget, and below that the share of the time that was waited, and
    when models ran, plans were followed, bytes moved, callers computed and waited.
    """
    recorded = recorded_in(file)
    if png is not None:
        _draw_picture(recorded, png)
    document = {"trace": os.path.abspath(file), **_document(recorded)}
    if as_json:
        print_json(document)
    else:
        _show(document)
    if recorded.dropped:
        remark(
            f"{words.count(recorded.dropped, 'older event')} were forgotten: sums are of all, "
            "but what is told of single groups, and drawn, is of the newest."
        )


def recorded_in(path: str) -> Recorded:
    """What a trace file holds."""
    from tierstore.observe.trace import read_trace

    try:
        with system_failures(f"reading {path}"):
            return read_trace(path)
    except InvalidTraceError as error:
        raise Failure(str(error), "Give a file that store.trace(path) wrote.") from error


def _draw_picture(recorded: Recorded, png: str) -> None:
    try:
        from tierstore.cli import picture
    except ImportError as error:
        raise Failure(
            f"the picture cannot be drawn: {error}",
            "Install what draws it: pip install 'tierstore[plot]'",
            Code.UNEXPECTED,
        ) from error
    with system_failures(f"writing {png}"):
        picture.draw(recorded, png)


def _document(recorded: Recorded) -> Document:
    from tierstore.observe.stats import BYTES_MOVED
    from tierstore.observe.trace import KINDS, PLANS, STALLS, passes_of

    stats, budgets = recorded.stats, recorded.budgets
    busy, peaks = stats["busy_seconds"], stats["peak_bytes"]
    waits: dict[str, list[float]] = defaultdict(list)
    for one in recorded.slices:
        if one.kind == STALLS:
            waits[one.name].append(one.seconds)
    stalls = [
        {"key": key, "count": len(seconds), "seconds": sum(seconds)}
        for key, seconds in waits.items()
    ]
    return {
        "device": recorded.device,
        "seconds": recorded.seconds,
        "uses": len(recorded.uses),
        "groups": len(recorded.groups),
        **{name: stats[name] for name in ("hits", "late", "misses", "stalled_seconds", "overlap")},
        "hops": [  # seconds in which any bytes moved, bytes per second
            {
                "kind": KINDS[hop],
                "nbytes": stats[field],
                "seconds": busy.get(hop, 0.0),
                "bandwidth": recorded.bandwidth.get(hop),
            }
            for hop, field in BYTES_MOVED.items()
            if stats[field] or hop in busy
        ],
        # A tier that only an edited trace knows has no peak.
        "tiers": [{"tier": t, "peak": peaks.get(t), "budget": budgets[t]} for t in budgets],
        "passes": [dataclasses.asdict(one) for one in passes_of(recorded.slices)],
        "plans": [
            {"start": one.start, "seconds": one.seconds, **one.args}
            for one in recorded.slices
            if one.kind == PLANS
        ],
        "stalls": sorted(stalls, key=lambda stall: -stall["seconds"]),
        "dropped": recorded.dropped,
    }


def _seconds(seconds: float) -> str:
    """A time, in a unit that shows some of it."""
    return f"{seconds:.3f} s" if seconds < 100 else f"{seconds:,.0f} s"


def _of_hops(units: words.Units) -> tuple[Column, ...]:
    def speed(hop: Document) -> str:
        found = hop["bandwidth"]
        return "?" if found is None else f"{words.size(found, units)}/s"

    return (
        Column("MOVED", lambda hop: hop["kind"]),
        Column("BYTES", lambda hop: words.size(hop["nbytes"], units), right=True),
        Column("BUSY", lambda hop: _seconds(hop["seconds"]), right=True),
        Column("SPEED", speed, right=True),
    )


def _of_tiers(units: words.Units) -> tuple[Column, ...]:
    def size(nbytes: int | None, otherwise: str) -> str:
        return otherwise if nbytes is None else words.size(nbytes, units)

    return (
        Column("TIER", lambda tier: tier["tier"]),
        Column("PEAK", lambda tier: size(tier["peak"], "?"), right=True),
        Column("BUDGET", lambda tier: size(tier["budget"], "no limit"), right=True),
    )


_PASSES = (
    Column("MODEL", lambda one: one["model"], flexible=True),
    Column("PASS", lambda one: one["does"]),
    Column("TIMES", lambda one: f"{one['count']:,}", right=True),
    Column("MEDIAN", lambda one: _seconds(one["median"]), right=True),
    Column("LONGEST", lambda one: _seconds(one["longest"]), right=True),
    Column("STALLED", lambda one: _seconds(one["stalled_seconds"]), right=True),
)
_PLANS = (
    Column("PLAN OF", lambda plan: words.count(plan.get("steps", 0), "step"), right=True),
    Column("SINCE", lambda plan: _seconds(plan["start"]), right=True),
    Column("FOR", lambda plan: _seconds(plan["seconds"]), right=True),
    Column("LEFT", lambda plan: plan.get("left", "not"), flexible=True),
)
_STALLS = (
    Column("WAITED FOR", lambda stall: stall["key"], flexible=True),
    Column("TIMES", lambda stall: f"{stall['count']:,}", right=True),
    Column("IN ALL", lambda stall: _seconds(stall["seconds"]), right=True),
)


def _show(document: Document) -> None:
    hits, late, misses = (document[name] for name in ("hits", "late", "misses"))
    seconds, stalled = document["seconds"], document["stalled_seconds"]
    share = f", {stalled / seconds:.1%} of the length" if seconds else ""
    uses, groups = words.count(document["uses"], "use"), words.count(document["groups"], "group")
    data(f"length    {_seconds(seconds)} on {document['device']}")
    data(f"uses      {uses} of {groups}")
    data(f"acquires  {hits:,} hit, {late:,} late, {misses:,} missed")
    data(f"stalled   {_seconds(stalled)}{share}")
    data(f"overlap   {document['overlap']:.1%}")
    worst = document["stalls"][:WORST]
    units = words.units_of_tiers({tier["tier"]: tier["budget"] for tier in document["tiers"]})
    tables = (
        (_PASSES, document["passes"]),
        (_PLANS, document["plans"][-WORST:]),
        (_of_hops(units), document["hops"]),
        (_of_tiers(units), document["tiers"]),
        (_STALLS, worst),
    )
    for columns, rows in tables:
        if rows:
            data("")
            draw(columns, rows)
