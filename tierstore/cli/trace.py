"""The command `trace`: summarizes a recorded run, and draws it."""

from __future__ import annotations

import dataclasses
import os
from collections import defaultdict
from typing import TYPE_CHECKING

import click

from tierstore.cli import options
from tierstore.cli.output import Code, Column, Document, Failure, data, draw, print_json, remark
from tierstore.errors import TransferError
from tierstore.inspection.directories import not_a_directory
from tierstore.model.formatting import Units, count, size, units_of_tiers
from tierstore.system.files import transfer_errors

if TYPE_CHECKING:
    from tierstore.observe.trace import Recorded

WORST = 5
"""Rows of the tables of groups (with the longest waits) and of plans (the newest)."""


@options.command(
    "trace", "trace run.json", "trace run.json --png run.png", "trace run.json.gz --json"
)
@click.argument("file", metavar="FILE", shell_complete=options.complete_files)
@click.option(
    "--png", metavar="PICTURE", help="Also draw the run to this file. Requires matplotlib."
)
def trace(file: str, png: str | None, as_json: bool) -> None:
    """Summarize a recorded run: waits, transfers and passes.

    FILE is written by `store.trace(path)`. OVERLAP is the fraction of transfer time hidden behind
    compute. A PASS is one call of a whole model, such as one denoising step. A PLAN is the plan of
    a loop, followed until it was LEFT. The picture shows the bytes on each tier over time against
    its budget, the fraction of time that callers waited, and a timeline of passes, plans,
    transfers, computing and waits. Sizes are in the units of the budgets (MB or MiB).
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
            f"{count(recorded.dropped, 'older event')} were dropped: totals cover all events, "
            "tables of groups and the picture only the newest."
        )


def recorded_in(path: str) -> Recorded:
    """Read a trace file. Raises InvalidTraceError, TransferError or Failure."""
    from tierstore.observe.trace import read_trace

    advice = "Give a file written by store.trace(path)."
    try:
        with transfer_errors("reading", path=path):
            return read_trace(path)
    except TransferError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            raise Failure(f"there is no file {path}", advice, Code.UNEXPECTED) from error
        if isinstance(error.__cause__, IsADirectoryError):
            raise Failure(f"{path} is a directory", advice, Code.UNEXPECTED) from error
        raise


def _draw_picture(recorded: Recorded, png: str) -> None:
    try:
        from tierstore.cli import picture
    except ImportError as error:
        raise Failure(
            f"the picture cannot be drawn: {error}",
            "Install matplotlib: pip install 'tierstore[plot]'",
            Code.UNEXPECTED,
        ) from error
    parent = os.path.dirname(os.path.realpath(png))
    if not os.path.isdir(parent):
        problem = f"{png} cannot be written: {not_a_directory(parent)}"
        raise Failure(problem, "Give a path in an existing directory.", Code.UNEXPECTED)
    if os.path.isdir(png):
        raise Failure(f"{png} is a directory", "Give the path of a file.", Code.UNEXPECTED)
    with transfer_errors("writing", path=png):
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
    stalls = [{"key": key, "count": len(each), "seconds": sum(each)} for key, each in waits.items()]
    return {
        "device": recorded.device,
        "seconds": recorded.seconds,
        "uses": len(recorded.uses),
        "groups": len(recorded.groups),
        **{name: stats[name] for name in ("hits", "late", "misses", "stalled_seconds", "overlap")},
        "hops": [  # seconds during which bytes moved; bytes per second
            {
                "kind": KINDS[hop],
                "nbytes": stats[field],
                "seconds": busy.get(hop, 0.0),
                "bandwidth": recorded.bandwidth.get(hop),
            }
            for hop, field in BYTES_MOVED.items()
            if stats[field] or hop in busy
        ],
        # An edited trace may have a tier without a peak.
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
    return f"{seconds:.3f} s" if seconds < 100 else f"{seconds:,.0f} s"


def _of_hops(units: Units) -> tuple[Column, ...]:
    def speed(hop: Document) -> str:
        return "?" if hop["bandwidth"] is None else f"{size(hop['bandwidth'], units)}/s"

    return (
        Column("MOVED", lambda hop: hop["kind"]),
        Column("BYTES", lambda hop: size(hop["nbytes"], units), right=True),
        Column("BUSY", lambda hop: _seconds(hop["seconds"]), right=True),
        Column("SPEED", speed, right=True),
    )


def _of_tiers(units: Units) -> tuple[Column, ...]:
    def bytes_or(nbytes: int | None, otherwise: str) -> str:
        return otherwise if nbytes is None else size(nbytes, units)

    return (
        Column("TIER", lambda tier: tier["tier"]),
        Column("PEAK", lambda tier: bytes_or(tier["peak"], "?"), right=True),
        Column("BUDGET", lambda tier: bytes_or(tier["budget"], "no limit"), right=True),
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
    Column("PLAN OF", lambda plan: count(plan.get("steps", 0), "step"), right=True),
    Column("START", lambda plan: _seconds(plan["start"]), right=True),
    Column("DURATION", lambda plan: _seconds(plan["seconds"]), right=True),
    Column("LEFT", lambda plan: plan.get("left", "not"), flexible=True),
)
_STALLS = (
    Column("WAITED FOR", lambda stall: stall["key"], flexible=True),
    Column("TIMES", lambda stall: f"{stall['count']:,}", right=True),
    Column("TOTAL", lambda stall: _seconds(stall["seconds"]), right=True),
)


def _show(document: Document) -> None:
    from tierstore.observe.report import acquires

    hits, late, misses = (document[name] for name in ("hits", "late", "misses"))
    seconds, stalled = document["seconds"], document["stalled_seconds"]
    share = f", {stalled / seconds:.1%} of the length" if seconds else ""
    data(f"length    {_seconds(seconds)} on {document['device']}")
    data(f"uses      {count(document['uses'], 'use')} of {count(document['groups'], 'group')}")
    data(f"acquires  {acquires(hits, late, misses)}")
    data(f"stalled   {_seconds(stalled)}{share}")
    data(f"overlap   {document['overlap']:.1%}")
    units = units_of_tiers({tier["tier"]: tier["budget"] for tier in document["tiers"]})
    for columns, rows in (
        (_PASSES, document["passes"]),
        (_PLANS, document["plans"][-WORST:]),
        (_of_hops(units), document["hops"]),
        (_of_tiers(units), document["tiers"]),
        (_STALLS, document["stalls"][:WORST]),
    ):
        if rows:
            data("")
            draw(columns, rows)
