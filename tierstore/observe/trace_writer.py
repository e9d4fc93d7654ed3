"""Writes traces: turns the journal of a store into tracks and slices.

Concurrent work (four reads, three callers) goes to several tracks of one kind, "disk read",
"disk read 2" and so on: slices of one track never overlap. A caller *computes* from the grant of a
lease until it requests the next group or releases its last lease; the slice is named after its
newest lease. On an accelerator the caller only queues the work: there, computing with a group
begins when the previous one is done.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierstore.observe.event_log import EventRecord, to_document
from tierstore.observe.journal import FollowedPlan, LeaseUse, Span, Summary
from tierstore.observe.passes import FORWARD, ModelPass
from tierstore.observe.stats import BYTES_MOVED, Stats
from tierstore.observe.trace import (
    CATEGORY,
    COMPUTE,
    KINDS,
    PASSES,
    PLANS,
    STALLS,
    VERSION,
    Document,
)

_QUARTER = 7_889_238 * 10**6
"""A quarter of a year in microseconds: torch.profiler's times start at a multiple of this."""
_ORDER = {kind: place for place, kind in enumerate(KINDS.values())}
_PID = 1 << 22
"""Process ids are smaller, so a store never shares one with a process in a merged trace."""


@dataclass(frozen=True)
class Notes:
    """The journal of store number `number` of this process, as of `now`.

    `groups` has the keys and bytes of the store's groups, the oldest first.
    """

    stats: Stats
    summary: Summary
    spans: Sequence[Span]
    uses: Sequence[LeaseUse]
    levels: Sequence[tuple[float, tuple[int, ...]]]
    groups: Mapping[str, int]
    device: str
    dropped: int
    number: int
    now: float
    events: EventRecord
    passes: Sequence[ModelPass] = ()
    plans: Sequence[FollowedPlan] = ()


@dataclass(frozen=True, slots=True)
class _Piece:
    """A slice without a track."""

    kind: str
    name: str
    start: float
    end: float
    args: dict[str, Any]


def document(notes: Notes) -> Document:
    """Build a trace."""
    clock = _Clock(notes)
    pid = os.getpid() + _PID * (1 + notes.number % 500)
    pieces = itertools.chain(
        map(_pass_piece, notes.passes),
        (_plan_piece(plan, notes.now) for plan in notes.plans),
        map(_span_piece, notes.spans),
        _compute_pieces(notes),
    )
    events = [*_slice_events(pieces, clock), *_counter_events(notes, clock)]
    if notes.dropped:
        text = f"{notes.dropped:,} older events were dropped"
        events.insert(0, {"ph": "i", "s": "p", "name": text, "ts": clock(clock.first), "tid": 0})
    events.insert(0, _metadata("process_name", 0, name=f"tierstore on {notes.device}"))
    events.insert(1, _metadata("process_sort_index", 0, sort_index=-notes.number))
    return {
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": clock.base * 1000,
        CATEGORY: {**_program_data(notes), "process": pid},
        "traceEvents": [{"cat": f"{CATEGORY},", "pid": pid, **event} for event in events],
    }


class _Clock:
    """Converts seconds of `time.monotonic` to whole microseconds after `base` (since 1970).

    Times are rounded down, so intervals that did not overlap still do not.
    """

    def __init__(self, notes: Notes) -> None:
        started = [*(s.start for s in notes.spans), *(p.start for p in notes.passes)]
        started += [use.asked for use in notes.uses] + [plan.start for plan in notes.plans]
        self.first = min([notes.now, *started, *(at for at, _ in notes.levels[:1])])
        self._since_1970 = time.time_ns() - time.monotonic_ns()
        self.base = 0
        self.base = self(self.first) // _QUARTER * _QUARTER

    def __call__(self, seconds: float) -> int:
        return (round(seconds * 1e9) + self._since_1970) // 1000 - self.base


# Slices ----------------------------------------------------------------------------------------


def _span_piece(span: Span) -> _Piece:
    args: dict[str, Any] = {"met": span.note} if span.kind == STALLS else {"nbytes": span.nbytes}
    if span.note == "failed":
        args["failed"] = True
    return _Piece(KINDS.get(span.kind, span.kind), span.key, span.start, span.end, args)


def _pass_piece(one: ModelPass) -> _Piece:
    args: dict[str, Any] = {"model": one.model, "does": one.does, "number": one.number}
    if one.failed:
        args["failed"] = True
    what = one.model if one.does == FORWARD else f"{one.model} {one.does}"
    return _Piece(PASSES, f"{what} {one.number}", one.start, one.end, args)


def _plan_piece(plan: FollowedPlan, now: float) -> _Piece:
    args: dict[str, Any] = {"steps": plan.steps}
    if plan.end:
        args |= {"at": plan.at, "left": plan.reason}
    return _Piece(PLANS, f"plan of {plan.steps} steps", plan.start, plan.end or now, args)


def _compute_pieces(notes: Notes) -> Iterator[_Piece]:
    if notes.device == "cpu":
        callers: dict[int, list[LeaseUse]] = defaultdict(list)
        for use in notes.uses:
            callers[use.caller if isinstance(use.caller, int) else id(use.caller)].append(use)
        for uses in callers.values():
            yield from _caller_compute(uses, notes.now)
        return
    done = 0.0
    for use in sorted((use for use in notes.uses if use.done), key=lambda use: use.done):
        start = max(done, use.granted, use.ready)
        done = max(use.done, start)
        yield _compute_piece(use, start, done)


def _caller_compute(uses: Iterable[LeaseUse], now: float) -> Iterator[_Piece]:
    """Yield the computing of one caller, without waits and times when it held no lease."""
    edges: list[tuple[float, int, int, LeaseUse]] = []
    for number, use in enumerate(uses):
        times = (use.asked, use.granted, use.released or now)
        edges += [(at, step, number, use) for step, at in enumerate(times)]
    held: dict[int, LeaseUse] = {}
    asking, since = 0, 0.0
    for at, step, number, use in sorted(edges, key=lambda edge: edge[:3]):
        if held and not asking and at > since:
            yield _compute_piece(next(reversed(held.values())), since, at)
        since = at
        if step == 2:
            held.pop(number, None)
        else:
            asking += 1 if step == 0 else -1
        if step == 1:
            held[number] = use


def _compute_piece(use: LeaseUse, start: float, end: float) -> _Piece:
    args = {"nbytes": use.nbytes, "met": use.met}
    return _Piece(COMPUTE, use.group.key, start, end, args)


def _slice_events(pieces: Iterable[_Piece], clock: _Clock) -> Iterator[Document]:
    """Yield each slice on the first free track of its kind, and the names of the tracks."""
    ends: dict[str, list[int]] = defaultdict(list)
    others: dict[str, int] = {}  # hops of tiers that a caller added
    for piece in sorted(pieces, key=lambda piece: (piece.start, piece.end)):
        start, end = clock(piece.start), clock(piece.end)
        tracks = ends[piece.kind]
        track = next((i for i, free in enumerate(tracks) if free <= start), len(tracks))
        tracks[track:] = [end, *tracks[track + 1 :]]
        yield {
            "cat": f"{CATEGORY},{piece.kind}",
            "ph": "X",
            "ts": start,
            "dur": end - start,
            "tid": _tid(piece.kind, track, others),
            "name": piece.name,
            "args": piece.args,
        }
    for kind, tracks in ends.items():
        for track in range(len(tracks)):
            tid = _tid(kind, track, others)
            yield _metadata("thread_name", tid, name=f"{kind} {track + 1}" if track else kind)
            yield _metadata("thread_sort_index", tid, sort_index=tid)


def _tid(kind: str, track: int, others: dict[str, int]) -> int:
    place = _ORDER.get(kind)
    if place is None:
        place = len(_ORDER) + others.setdefault(kind, len(others))
    return 1000 * (1 + place) + track


def _metadata(what: str, tid: int, **args: Any) -> Document:
    return {"ph": "M", "name": what, "tid": tid, "args": args}


# Counters --------------------------------------------------------------------------------------


def _counter_events(notes: Notes, clock: _Clock) -> Iterator[Document]:
    """Yield counters: bytes on each tier, its budget, and bytes moved so far.

    The last values are those of the statistics.
    """
    stats = notes.stats.as_dict()
    tiers = list(notes.stats.used_bytes)
    for at, used in notes.levels:
        for tier, nbytes in zip(
            tiers, used, strict=False
        ):  # the last tier may have been added later
            yield _count(tier, "used", clock(at), nbytes)
    for hop, field in BYTES_MOVED.items():
        what = field.removeprefix("bytes_")
        moves = sorted((s for s in notes.spans if s.kind == hop), key=lambda span: span.end)
        steps = [span.nbytes for span in moves]
        so_far = itertools.accumulate(steps, initial=stats[field] - sum(steps))
        for at, nbytes in zip([clock.first, *(span.end for span in moves)], so_far, strict=True):
            yield _count("bytes", what, clock(at), nbytes)
        yield _count("bytes", what, clock(notes.now), stats[field])
    for tier, budget in notes.stats.budget_bytes.items():
        yield _count(tier, "used", clock(notes.now), notes.stats.used_bytes[tier])
        for at in (clock.first, notes.now) if budget is not None else ():
            yield _count(tier, "budget", clock(at), budget or 0)


def _count(name: str, what: str, at: int, value: int) -> Document:
    return {"ph": "C", "ts": at, "tid": 0, "name": name, "args": {what: value}}


# For programs ----------------------------------------------------------------------------------


def _program_data(notes: Notes) -> Document:
    uses = sorted(notes.uses, key=lambda use: use.asked)
    groups = {**{use.group.key: use.nbytes for use in uses}, **notes.groups}
    in_order = [*notes.groups, *(key for key in groups if key not in notes.groups)]
    return {
        "version": VERSION,
        "groups": [[key, groups[key]] for key in in_order],
        "uses": [
            [use.group.key, round(seconds, 9)]
            for use, seconds in zip(uses, _work_after(uses, notes), strict=True)
        ],
        "budgets": notes.stats.budget_bytes,
        "bandwidth": notes.summary.bandwidth,
        "dropped": notes.dropped,
        "device": notes.device,
        "stats": notes.stats.as_dict(),
        "events": to_document(notes.events),
    }


def _work_after(uses: Sequence[LeaseUse], notes: Notes) -> Iterator[float]:
    """Yield the seconds of work between each use and the next request."""
    done = 0.0
    for use, following in itertools.zip_longest(uses, uses[1:]):
        until = following.asked if following else use.released or notes.now
        since = use.granted
        if use.done:
            until, since = use.done, max(done, use.granted, use.ready)
            done = use.done
        yield max(until - since, 0.0)


# Files -----------------------------------------------------------------------------------------


def save(document: Document, path: str | os.PathLike[str]) -> None:
    """Write a trace atomically. Raises OSError."""
    raw = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    if Path(path).name.endswith(".gz"):
        raw = gzip.compress(raw, compresslevel=5)
    write_whole(path, raw)


def write_whole(path: str | os.PathLike[str], raw: bytes) -> None:
    """Write a file atomically: readers see the old or the complete new content. Raises OSError.

    A target that is not a regular file, such as a pipe, is written to directly.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        target.write_bytes(raw)
        return
    # Unique among threads, and short enough for any file system.
    draft = target.with_name(f".{uuid.uuid4()}.trace")
    try:
        draft.write_bytes(raw)
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)


def merged(document: Document, profile: Document) -> Document:
    """Merge a trace of a store into another Chrome trace of the same process, on its clock."""
    base = profile.get("baseTimeNanoseconds", 0)  # older ones count from 1970
    later = (document["baseTimeNanoseconds"] - (base if isinstance(base, int) else 0)) // 1000
    ours = [
        {**event, "ts": event["ts"] + later} if "ts" in event else event
        for event in document["traceEvents"]
    ]
    pids = list({event["pid"] for event in ours})  # not a set: foreign ids may be unhashable
    others = [e for e in profile["traceEvents"] if isinstance(e, dict) and e.get("pid") not in pids]
    return {**profile, CATEGORY: document[CATEGORY], "traceEvents": [*others, *ours]}
