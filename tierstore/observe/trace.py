"""Reads trace files: timelines for Perfetto that also contain the data for replays.

A trace is JSON in the Chrome trace event format, which Perfetto and `chrome://tracing` open; it is
gzipped if its name ends with `.gz`. Times are microseconds after `baseTimeNanoseconds` (since
1970), the clock of `torch.profiler`'s traces. Events of the store have the category `tierstore`.
The object `tierstore`, which viewers ignore, has the same information for programs:

    version    1. Removing a field or changing its meaning makes it 2; adding one does not, since
               older programs skip the kinds of events that they do not know.
    groups     [[key, bytes], ...] in the order in which they were registered or put
    uses       [[key, seconds], ...] in the order in which groups were requested; the seconds are
               the work between this use and the next request
    budgets    {tier: bytes, or null for no limit}
    bandwidth  {"DISK>HOST": bytes per second, ...} for each hop over which bytes moved
    dropped    number of oldest events that were dropped because there were too many
    device     device of the leases, such as "cpu"
    stats      `store.stats()` at the end, as a dict
    events     the planner's events and instructions, in the format of
               `tierstore.observe.event_log`; missing in older traces
"""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import os
import re
import zlib
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

from tierstore.errors import InvalidTraceError
from tierstore.model.tiers import TIERS
from tierstore.observe.event_log import EventRecord, from_document
from tierstore.observe.stats import Stats

VERSION = 1
CATEGORY = "tierstore"
COMPUTE = "compute"
STALLS = "stall"
PASSES = "pass"
PLANS = "plan"
KINDS = {
    PASSES: PASSES,
    PLANS: PLANS,
    STALLS: STALLS,
    COMPUTE: COMPUTE,
    "HOST>DEVICE": "host to device",
    "DEVICE>HOST": "device to host",
    "DISK>HOST": "disk read",
    "HOST>DISK": "disk write",
    "REMOTE>DISK": "download",
}
"""Displayed kind of a slice, by its kind in the journal, from top to bottom of the timeline."""

_FARTHEST = 1e18
"""Exclusive limit on every time in microseconds and every number of bytes."""

_BY_NAME = (
    "used_bytes",
    "peak_bytes",
    "budget_bytes",
    "reserved_bytes",
    "busy_seconds",
    "activations",
)
_ADDED: dict[str, Any] = {
    "reserved_bytes": {},
    "routed_uses": 0,
    "routed_bytes_used": 0,
    "routed_bytes_read": 0,
    "bytes_fetched": 0,
    "plans_followed": 0,
    "followed_seconds": 0.0,
}
"""Fields of `Stats` that older traces lack, with their default values."""
_GZIP = b"\x1f\x8b"
_LARGEST = 1 << 30
"""Largest trace to unpack, in bytes: a small gzip file may expand to fill all memory."""
_TIERS = "|".join((*TIERS, "REMOTE"))
_TIER = re.compile(_TIERS)
_HOP = re.compile(f"({_TIERS})>({_TIERS})")

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TraceSlice:
    """One interval on a timeline.

    Attributes:
        kind: a value of `KINDS`, such as `"pass"`, `"stall"`, `"compute"` or `"disk read"`.
        track: the track that it is drawn on. Slices of one track do not overlap.
        name: the key of a group; for a pass, the model and a number.
        start: seconds after the first event of the trace.
        seconds: its duration in seconds.
        args: details. A pass has its `model`, `does` ("forward", or the method or step that was
            called) and its `number`, from 1. A plan has the `steps` of a pass and, if it was left,
            the step (`at`) and the reason (`left`). Older traces have no passes or no plans.
    """

    kind: str
    track: str
    name: str
    start: float
    seconds: float
    args: dict[str, Any]


@dataclass(frozen=True)
class Recorded:
    """The contents of a trace file.

    Attributes:
        groups: (key, bytes) of each group, in the order in which they were registered or put.
        uses: (key, seconds) in the order in which groups were requested; the seconds are the work
            between this use and the next request.
        budgets: bytes, or None for no limit, by the name of a tier.
        bandwidth: bytes per second by hop, such as `"DISK>HOST"`, for hops over which bytes moved.
        dropped: number of oldest events that were dropped because there were too many.
        device: device of the leases, such as `"cpu"`.
        stats: every field of `store.stats()` at the end.
        slices: the intervals of the timeline.
        counters: for each name, such as `HOST used` and `HOST budget`, (seconds after the first
            event, bytes) in order of time.
        events: the planner's events and instructions; None if the trace has none.
    """

    groups: tuple[tuple[str, int], ...]
    uses: tuple[tuple[str, float], ...]
    budgets: dict[str, int | None]
    bandwidth: dict[str, float]
    dropped: int
    device: str
    stats: dict[str, Any]
    slices: tuple[TraceSlice, ...]
    counters: dict[str, list[tuple[float, float]]]
    events: EventRecord | None = None

    @property
    def seconds(self) -> float:
        """Seconds from the first event to the end of the last."""
        ends = [one.start + one.seconds for one in self.slices]
        return max([*ends, *(points[-1][0] for points in self.counters.values())], default=0.0)


@dataclass(frozen=True)
class PassesOfModel:
    """Totals of the passes of one model and kind: their number, and times in seconds.

    `stalled_seconds` is the time that all callers together waited during these passes.
    """

    model: str
    does: str
    count: int
    seconds: float
    median: float
    longest: float
    stalled_seconds: float


def passes_of(slices: Sequence[TraceSlice]) -> list[PassesOfModel]:
    """Summarize the passes among slices by model and kind, in the order in which they began."""
    passes: dict[tuple[str, str], list[TraceSlice]] = {}
    stalls = sorted((one for one in slices if one.kind == STALLS), key=lambda one: one.start)
    starts = [stall.start for stall in stalls]
    for one in slices:
        if one.kind == PASSES:
            model, does = one.args.get("model", one.name), one.args.get("does", "forward")
            passes.setdefault((str(model), str(does)), []).append(one)
    found = []
    for (model, does), of_model in passes.items():
        seconds = [one.seconds for one in of_model]
        waits = 0.0
        for one in of_model:
            end = one.start + one.seconds
            within = stalls[bisect_left(starts, one.start) : bisect_left(starts, end)]
            waits += sum(min(stall.seconds, end - stall.start) for stall in within)
        found.append(
            PassesOfModel(
                model, does, len(seconds), sum(seconds), median(seconds), max(seconds), waits
            )
        )
    return found


def read_trace(path: str | os.PathLike[str]) -> Recorded:
    """Read a trace file, which may be merged with a profile.

        slowest = max(read_trace("run.json").slices, key=lambda each: each.seconds)

    Args:
        path: a file that `TierStore.trace` wrote.

    Raises:
        InvalidTraceError: if the file is not a complete trace of a store.
        OSError: if the file cannot be read.
    """
    document = load(path)
    try:
        return _parse(document)
    except _Damaged as damage:
        raise InvalidTraceError(str(path), str(damage)) from damage


def load(path: str | os.PathLike[str], *, largest: int = _LARGEST) -> Document:
    """Read any Chrome trace, unpacking at most `largest` bytes if it is gzipped.

    Raises InvalidTraceError or OSError.
    """
    raw = Path(path).read_bytes()
    try:
        text = _unpacked(raw, str(path), largest) if raw.startswith(_GZIP) else raw
        document = json.loads(text, parse_constant=_reject_constant)
    except (ValueError, EOFError, OSError, zlib.error, RecursionError) as error:
        raise InvalidTraceError(str(path), f"it is not a complete JSON file ({error})") from error
    if isinstance(document, list):  # the format's short form
        document = {"traceEvents": document}
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise InvalidTraceError(str(path), "it has no list of traceEvents")
    return document


def _reject_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _unpacked(raw: bytes, path: str, largest: int) -> bytes:
    with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
        found = file.read(largest + 1)
    if len(found) > largest:
        raise InvalidTraceError(path, f"it unpacks to more than {largest:,} bytes")
    return found


class _Damaged(Exception):
    """The reason why a trace is invalid."""


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise _Damaged(what)


def _parse(document: Document) -> Recorded:
    ours = document.get(CATEGORY)
    if not isinstance(ours, dict):
        raise _Damaged("it was not written by a store: it has no object 'tierstore'")
    version = ours.get("version")
    _expect(version == VERSION, f"its version is {version!r}, but this program reads {VERSION}")
    groups = _pairs(ours, "groups", _is_bytes)
    uses = _pairs(ours, "uses", _is_amount)
    known = {key for key, _ in groups}
    _expect(len(known) == len(groups), "it lists a group twice")
    _expect(all(key in known for key, _ in uses), "it uses a group that it does not list")
    dropped, device = ours.get("dropped"), ours.get("device")
    _expect(_is_bytes(dropped), "'dropped' is not a count")
    _expect(isinstance(device, str), "'device' is not a string")
    budgets = _mapping(
        ours,
        "budgets",
        lambda name: _TIER.fullmatch(name) is not None,
        lambda size: size is None or _is_bytes(size),
    )
    stats = _stats(ours)
    for name in ("peak_bytes", "busy_seconds"):
        _expect(
            all(map(_is_amount, stats[name].values())), f"{name!r} has a value that is not a number"
        )
    # A trace merged with that of another store also has the other's events.
    slices, counters = _events(document["traceEvents"], ours.get("process"))
    return Recorded(
        groups,
        uses,
        budgets,
        _mapping(ours, "bandwidth", lambda name: _HOP.fullmatch(name) is not None, _is_amount),
        int(dropped or 0),
        str(device),
        stats,
        slices,
        counters,
        _record(ours),
    )


def _pairs(
    ours: Document, field: str, is_valid: Callable[[Any], bool]
) -> tuple[tuple[str, Any], ...]:
    rows = ours.get(field)
    if not isinstance(rows, list):
        raise _Damaged(f"{field!r} is not a list")
    for row in rows:
        pair = isinstance(row, list) and len(row) == 2
        _expect(pair and isinstance(row[0], str) and is_valid(row[1]), f"{field!r} has {row!r}")
    return tuple((key, value) for key, value in rows)


def _mapping(
    ours: Document,
    field: str,
    is_name: Callable[[str], bool],
    is_valid: Callable[[Any], bool],
) -> dict[str, Any]:
    found = ours.get(field)
    if not isinstance(found, dict):
        raise _Damaged(f"{field!r} is not an object")
    for name, value in found.items():
        _expect(is_name(name) and is_valid(value), f"{field!r} has {name!r}: {value!r}")
    return found


def _record(ours: Document) -> EventRecord | None:
    try:
        return None if ours.get("events") is None else from_document(ours["events"])
    except ValueError as error:
        raise _Damaged(f"'events' is not a valid event record: {error}") from error


def _stats(ours: Document) -> dict[str, Any]:
    found = _ADDED | _mapping(ours, "stats", lambda _: True, _is_figure)
    names = [field.name for field in dataclasses.fields(Stats)]
    _expect(found.keys() >= set(names), "'stats' is incomplete")
    for name in names:
        _expect(name.endswith(_BY_NAME) == isinstance(found[name], dict), f"'stats' has no {name}")
    return found


def _is_figure(value: object) -> bool:
    if isinstance(value, dict):
        return all(number is None or _is_figure(number) for number in value.values())
    return _is_amount(value)


def _is_bytes(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -_FARTHEST < value < _FARTHEST


def _is_amount(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _events(
    events: list[Any], process: object
) -> tuple[tuple[TraceSlice, ...], dict[str, list[tuple[float, float]]]]:
    ours = [e for e in events if isinstance(e, dict) and _kind_of(e) is not None]
    ours = [e for e in ours if process is None or e.get("pid") == process]
    tracks = {_thread_of(e): _args(e).get("name") for e in ours if e.get("name") == "thread_name"}
    timed = [event for event in ours if event.get("ph") in ("X", "C")]
    for event in timed:
        _expect(_is_number(event.get("ts")), f"an event has the time {event.get('ts')!r}")
    first = min((event["ts"] for event in timed), default=0.0)
    slices: list[TraceSlice] = []
    counters: dict[str, list[tuple[float, float]]] = {}
    for event in sorted(timed, key=lambda event: float(event["ts"])):
        start, name = (event["ts"] - first) / 1e6, str(event.get("name"))
        if event["ph"] == "C":
            _expect(len(_args(event)) == 1, f"the counter {name!r} does not have exactly one value")
            for what, value in _args(event).items():
                _expect(_is_amount(value), f"the counter {name!r} is {value!r}")
                counters.setdefault(f"{name} {what}", []).append((start, float(value)))
            continue
        lasted, track = event.get("dur", -1), tracks.get(_thread_of(event))
        _expect(_is_amount(lasted), f"an event lasts {lasted!r}")
        _expect(isinstance(track, str), f"{name!r} is on a track without a name")
        kind = str(_kind_of(event))
        slices.append(TraceSlice(kind, str(track), name, start, lasted / 1e6, _args(event)))
    return tuple(slices), counters


def _kind_of(event: Document) -> str | None:
    """Return the part of the category after `tierstore,`; None for events of other programs."""
    category, _, kind = str(event.get("cat")).partition(",")
    return kind if category == CATEGORY else None


def _thread_of(event: Document) -> tuple[str, str]:
    return str(event.get("pid")), str(event.get("tid"))


def _args(event: Document) -> Document:
    args = event.get("args")
    return args if isinstance(args, dict) else {}
