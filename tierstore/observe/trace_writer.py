"""From the notes of a store to the tracks of a trace.

What happens at once (four reads, three callers) goes to different tracks of one kind, "disk read",
"disk read 2" and so on, so that slices of one track never overlap. A caller *computes* from the
grant of a lease until it asks for the next group or gives the last lease back; while it holds
several, the newest gives the name. On an accelerator the caller only queues the work: there the
computing with a group begins when the one before is done.
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
"""Microseconds. torch.profiler counts its own from the last multiple of this."""
_ORDER = {kind: place for place, kind in enumerate(KINDS.values())}
_PID = 1 << 22
"""Processes have smaller numbers, so that a merged trace can show the store beside them."""


@dataclass(frozen=True)
class Notes:
    """What store number `number` of this process noted until `now`.

    `groups` are the keys and bytes of those it holds, the oldest first.
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
    """A slice that has no track yet."""

    kind: str
    name: str
    start: float
    end: float
    args: dict[str, Any]


def document(notes: Notes) -> Document:
    """The trace that the notes make."""
    clock = _Clock(notes)
    pid = os.getpid() + _PID * (1 + notes.number % 500)
    pieces = itertools.chain(
        map(_passed, notes.passes),
        (_followed(plan, notes.now) for plan in notes.plans),
        map(_transferred, notes.spans),
        _computed(notes),
    )
    events = [*_laid_out(pieces, clock), *_counted(notes, clock)]
    if notes.dropped:
        text = f"{notes.dropped:,} older events were forgotten"
        events.insert(0, {"ph": "i", "s": "p", "name": text, "ts": clock(clock.first), "tid": 0})
    events.insert(0, _named("process_name", 0, name=f"tierstore on {notes.device}"))
    events.insert(1, _named("process_sort_index", 0, sort_index=-notes.number))
    return {
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": clock.base * 1000,
        CATEGORY: {**_in_words(notes), "process": pid},
        "traceEvents": [{"cat": f"{CATEGORY},", "pid": pid, **event} for event in events],
    }


class _Clock:
    """From seconds of `time.monotonic` to whole microseconds after `base` (since 1970).

    Whole ones, rounded down, so that what did not overlap never does.
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


def _transferred(span: Span) -> _Piece:
    args: dict[str, Any] = {"met": span.note} if span.kind == STALLS else {"nbytes": span.nbytes}
    if span.note == "failed":
        args["failed"] = True
    return _Piece(KINDS.get(span.kind, span.kind), span.key, span.start, span.end, args)


def _passed(one: ModelPass) -> _Piece:
    args: dict[str, Any] = {"model": one.model, "does": one.does, "number": one.number}
    if one.failed:
        args["failed"] = True
    what = one.model if one.does == FORWARD else f"{one.model} {one.does}"
    return _Piece(PASSES, f"{what} {one.number}", one.start, one.end, args)


def _followed(plan: FollowedPlan, now: float) -> _Piece:
    args: dict[str, Any] = {"steps": plan.steps}
    if plan.end:
        args |= {"at": plan.at, "left": plan.reason}
    return _Piece(PLANS, f"plan of {plan.steps} steps", plan.start, plan.end or now, args)


def _computed(notes: Notes) -> Iterator[_Piece]:
    if notes.device == "cpu":
        callers: dict[int, list[LeaseUse]] = defaultdict(list)
        for use in notes.uses:
            callers[use.caller if isinstance(use.caller, int) else id(use.caller)].append(use)
        for uses in callers.values():
            yield from _computed_by(uses, notes.now)
        return
    done = 0.0
    for use in sorted((use for use in notes.uses if use.done), key=lambda use: use.done):
        start = max(done, use.granted, use.ready)
        done = max(use.done, start)
        yield _computing(use, start, done)


def _computed_by(uses: Iterable[LeaseUse], now: float) -> Iterator[_Piece]:
    """What one caller computed, with waiting and with nothing on lease left out."""
    edges: list[tuple[float, int, int, LeaseUse]] = []
    for number, use in enumerate(uses):
        times = (use.asked, use.granted, use.released or now)
        edges += [(at, step, number, use) for step, at in enumerate(times)]
    held: dict[int, LeaseUse] = {}
    asking, since = 0, 0.0
    for at, step, number, use in sorted(edges, key=lambda edge: edge[:3]):
        if held and not asking and at > since:
            yield _computing(next(reversed(held.values())), since, at)
        since = at
        if step == 2:
            held.pop(number, None)
        else:
            asking += 1 if step == 0 else -1
        if step == 1:
            held[number] = use


def _computing(use: LeaseUse, start: float, end: float) -> _Piece:
    args = {"nbytes": use.nbytes, "met": use.met}
    return _Piece(COMPUTE, use.group.key, start, end, args)


def _laid_out(pieces: Iterable[_Piece], clock: _Clock) -> Iterator[Document]:
    """Slices, each on the first track of its kind that is free, and the names of the tracks."""
    ends: dict[str, list[int]] = defaultdict(list)
    others: dict[str, int] = {}  # hops of tiers that somebody has added
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
            yield _named("thread_name", tid, name=f"{kind} {track + 1}" if track else kind)
            yield _named("thread_sort_index", tid, sort_index=tid)


def _tid(kind: str, track: int, others: dict[str, int]) -> int:
    place = _ORDER.get(kind)
    if place is None:
        place = len(_ORDER) + others.setdefault(kind, len(others))
    return 1000 * (1 + place) + track


def _named(what: str, tid: int, **args: Any) -> Document:
    return {"ph": "M", "name": what, "tid": tid, "args": args}


# Counters --------------------------------------------------------------------------------------


def _counted(notes: Notes, clock: _Clock) -> Iterator[Document]:
    """Bytes on each tier against its budget, and bytes moved so far. They end at the truth."""
    stats = notes.stats.as_dict()
    tiers = list(notes.stats.used_bytes)
    for at, used in notes.levels:
        for tier, nbytes in zip(tiers, used, strict=False):  # the last tier may have come later
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


def _in_words(notes: Notes) -> Document:
    uses = sorted(notes.uses, key=lambda use: use.asked)
    groups = {**{use.group.key: use.nbytes for use in uses}, **notes.groups}
    in_order = [*notes.groups, *(key for key in groups if key not in notes.groups)]
    return {
        "version": VERSION,
        "groups": [[key, groups[key]] for key in in_order],
        "uses": [
            [use.group.key, round(seconds, 9)]
            for use, seconds in zip(uses, _worked_after(uses, notes), strict=True)
        ],
        "budgets": notes.stats.budget_bytes,
        "bandwidth": notes.summary.bandwidth,
        "dropped": notes.dropped,
        "device": notes.device,
        "stats": notes.stats.as_dict(),
        "events": to_document(notes.events),
    }


def _worked_after(uses: Sequence[LeaseUse], notes: Notes) -> Iterator[float]:
    """Seconds of work between each use and the next request."""
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
    """Write a trace: wholly, or not at all. Raises OSError."""
    raw = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    if Path(path).name.endswith(".gz"):
        raw = gzip.compress(raw, compresslevel=5)
    write_whole(path, raw)


def write_whole(path: str | os.PathLike[str], raw: bytes) -> None:
    """Write a file so that there is the old one, or the whole new one. Raises OSError.

    What is no regular file, such as a pipe, is written to.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        target.write_bytes(raw)
        return
    # A name that no other thread has, and no longer than others may be.
    draft = target.with_name(f".{uuid.uuid4()}.trace")
    try:
        draft.write_bytes(raw)
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)


def merged(document: Document, profile: Document) -> Document:
    """A trace of a store beside another Chrome trace of the same process, on the other's clock."""
    base = profile.get("baseTimeNanoseconds", 0)  # older ones count from 1970
    later = (document["baseTimeNanoseconds"] - (base if isinstance(base, int) else 0)) // 1000
    ours = [
        {**event, "ts": event["ts"] + later} if "ts" in event else event
        for event in document["traceEvents"]
    ]
    pids = list({event["pid"] for event in ours})  # no set: theirs may be anything
    others = [e for e in profile["traceEvents"] if isinstance(e, dict) and e.get("pid") not in pids]
    return {**profile, CATEGORY: document[CATEGORY], "traceEvents": [*others, *ours]}
