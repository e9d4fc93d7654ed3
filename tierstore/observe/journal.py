"""The journal of a store: its newest events, and totals over all events.

Every store keeps one, so recording must cost next to nothing: events are small objects in rings
that drop the oldest. A transfer or a wait is a `Span` with a start and an end. All times are
seconds of `time.monotonic`. The totals are kept by *hop*, such as `DISK>HOST`.

*Overlap* is the fraction of transfer time during which no caller waited. Both times are unions:
concurrent transfers, or concurrent waits, count once.
"""

from __future__ import annotations

import copy
import heapq
import itertools
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from tierstore.model.groups import GroupId
from tierstore.model.locks import RLock, if_free, under
from tierstore.model.tiers import Tier

T = TypeVar("T")

STALL = "stall"
"""The kind of a span in which a caller waited for a group. Every other kind is a hop."""

ROUTED = "routed"
"""Key of the bytes read for routed groups, which the totals by hop include."""

PLANNED = "planned"
"""Outcome of an acquire that enters the plan of a loop. It does not count as a use."""

KEPT = 1 << 15
"""Events of each sort to keep; a full ring takes about 5 MB."""

_UNSETTLED = 1024
_A_MOMENT = 0.02  # seconds
_numbers = itertools.count(1)


def hop(src: Tier, dst: Tier) -> str:
    """Return the name of a hop between two tiers.

    >>> hop(Tier.DISK, Tier.HOST)
    'DISK>HOST'
    """
    return f"{src.name}>{dst.name}"


@dataclass(eq=False, slots=True)
class Span:
    """A transfer or a wait. `kind` is a hop or `STALL`; `note` is its outcome."""

    kind: str
    key: str
    nbytes: int = 0
    note: str = ""
    start: float = 0.0
    end: float = 0.0


@dataclass(eq=False, slots=True)
class LeaseUse:
    """One lease of `group`, of `nbytes` bytes: the caller, the times, and the outcome `met`.

    A time is 0.0 until it is known. An accelerator runs behind its caller: `ready` is when the
    group had arrived if the device had to wait for it, and `done` is when the device finished the
    work begun with the lease, which is after its release.
    """

    group: GroupId
    caller: object
    met: str
    asked: float
    nbytes: int = 0
    granted: float = 0.0
    released: float = 0.0
    ready: float = 0.0
    done: float = 0.0


@dataclass(eq=False, slots=True)
class AcquireNote:
    """An acquire that began at `since`, and its outcome `met`.

    `stall` is its wait, if any. On an accelerator the wait begins at `mark`, a `Mark`.
    """

    since: float = field(default_factory=time.monotonic)
    met: str = ""
    stall: Span | None = None
    mark: Any = None


@dataclass(eq=False, slots=True)
class FollowedPlan:
    """A loop plan that was followed from `start` to `end` (0.0: it still is).

    A pass has `steps` steps. The plan was left at step `at`, for `reason`.
    """

    steps: int
    start: float
    end: float = 0.0
    at: int = 0
    reason: str = ""


class Ring(Generic[T]):
    """A bounded list of the newest events."""

    def __init__(self, kept: int = KEPT) -> None:
        self._events: deque[T] = deque(maxlen=kept)
        self._added = 0

    def add(self, event: T) -> None:
        """Append an event, dropping the oldest if the ring is full."""
        self._events.append(event)
        self._added += 1

    def events(self) -> list[T]:
        """Return the events in the ring, the oldest first."""
        return list(self._events)

    @property
    def newest(self) -> T | None:
        """The latest event; None if there is none."""
        return self._events[-1] if self._events else None

    @property
    def added(self) -> int:
        """Number of events added so far."""
        return self._added

    @property
    def dropped(self) -> int:
        """Number of events dropped so far."""
        return self._added - len(self._events)


class SpanTotals:
    """Adds up the time covered by spans of each kind, which may overlap and come in any order.

    `total_up_to` settles the time before a moment: spans added later do not count there.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.moving = 0.0  # seconds in which any bytes moved
        self.hidden = 0.0  # of these, seconds in which no caller waited
        self._edges: list[tuple[float, int, str]] = []
        self._going: Counter[str] = Counter()
        self._settled = float("-inf")

    def __len__(self) -> int:
        return len(self._edges)

    def add(self, kind: str, start: float, end: float) -> None:
        """Add a span of `kind` from `start` to `end`, in seconds."""
        start = max(start, self._settled)
        if end > start:
            heapq.heappush(self._edges, (start, 1, kind))
            heapq.heappush(self._edges, (end, -1, kind))

    def middle(self) -> float:
        """Return the median time of the starts and ends that are not settled yet."""
        return sorted(self._edges)[len(self._edges) // 2][0]

    def total_up_to(self, until: float) -> None:
        """Settle the time before `until`."""
        while self._edges and self._edges[0][0] <= until:
            at, step, kind = heapq.heappop(self._edges)
            self._advance(at)
            self._going[kind] += step
        self._advance(until)

    def _advance(self, now: float) -> None:
        passed = now - self._settled
        if passed <= 0:
            return
        self._settled = now
        going = [kind for kind, count in self._going.items() if count]
        for kind in going:
            self.seconds[kind] = self.seconds.get(kind, 0.0) + passed
        if any(kind != STALL for kind in going):
            self.moving += passed
            self.hidden += 0.0 if STALL in going else passed

    def copy(self) -> SpanTotals:
        """Return an independent copy."""
        other = copy.copy(self)
        other.seconds = dict(self.seconds)
        other._edges, other._going = list(self._edges), Counter(self._going)
        return other


@dataclass(frozen=True)
class Summary:
    """Totals since the store opened.

    `moved` (bytes) and `busy` (seconds) are by hop; `moved` also has the bytes read for routed
    groups, as `ROUTED`. `stalled` is the sum of the seconds that each caller waited. `bandwidth` is
    in bytes per second, by hop. `overlap` is a fraction from 0 to 1.
    """

    moved: dict[str, int]
    busy: dict[str, float]
    bandwidth: dict[str, float]
    stalled: float
    overlap: float


@dataclass
class Journal:
    """The events of one store.

    `uses` and `levels` (time, bytes used on each tier) are guarded by the store's lock. While a
    plan is followed, `uses` belongs to the thread that follows it. Spans begin and end on any
    thread.
    """

    uses: Ring[LeaseUse] = field(default_factory=Ring)
    levels: Ring[tuple[float, tuple[int, ...]]] = field(default_factory=Ring)
    plans: Ring[FollowedPlan] = field(default_factory=Ring)

    def __post_init__(self) -> None:
        self.number = next(_numbers)
        self._lock = RLock()
        self.spans: Ring[Span] = Ring()
        self._going: set[Span] = set()
        self._moved: Counter[str] = Counter()
        self._timed: Counter[str] = Counter()  # bytes of spans that have ended
        self._stalled = 0.0
        self.totals = SpanTotals()

    def begin(self, span: Span) -> None:
        """Begin a span: now, or at its `start` if that is set."""
        span.start = span.start or time.monotonic()
        under(self._lock, lambda: self._going.add(span))

    def end(self, span: Span) -> None:
        """End a span: now, or at its `end` if that is set. It need not have been begun."""
        under(self._lock, lambda: self._end(span))

    def _end(self, span: Span) -> None:
        self._going.discard(span)
        span.end = max(span.end or time.monotonic(), span.start)
        self.spans.add(span)
        self._timed[span.kind] += span.nbytes
        self.totals.add(span.kind, span.start, span.end)
        if span.kind == STALL:
            self._stalled += span.end - span.start
        if len(self.totals) > _UNSETTLED:
            # Leave the newest half: an accelerator's times arrive late.
            self.totals.total_up_to(
                min([self.totals.middle(), *(going.start for going in self._going)])
            )

    def end_between(self, span: Span, times: list[float]) -> None:
        """End a span that began and ended at these two times."""
        span.start, span.end = times
        self.end(span)

    def count(self, kind: str, nbytes: int) -> None:
        """Count bytes moved over a hop."""
        under(self._lock, lambda: self._moved.update({kind: nbytes}))

    def summary(self) -> Summary:
        """Return the totals, with spans that still run counted until now."""
        return under(self._lock, self._summary)

    def sample(self) -> Summary:
        """Return `summary`; only `moved` and `stalled` if the lock is not free within 0.02 s."""
        known = if_free(self._lock, self._summary, _A_MOMENT)
        return known or Summary(dict(self._moved), {}, {}, self._stalled, 1.0)

    def read(self) -> tuple[Summary, list[Span]]:
        """Return the totals and the newest spans, as of one moment."""
        return under(self._lock, lambda: (self._summary(), self.spans.events()))

    def _summary(self) -> Summary:
        totals, stalled, now = self.totals.copy(), self._stalled, time.monotonic()
        for span in self._going:
            totals.add(span.kind, span.start, now)
            stalled += now - span.start if span.kind == STALL else 0.0
        totals.total_up_to(float("inf"))
        busy = {kind: s for kind, s in sorted(totals.seconds.items()) if kind != STALL}
        overlap = totals.hidden / totals.moving if totals.moving else 1.0
        rates = {kind: self._timed[kind] / s for kind, s in busy.items() if self._timed[kind]}
        return Summary(dict(self._moved), busy, rates, stalled, overlap)

    @property
    def dropped(self) -> int:
        """Number of events dropped. Needs the store's lock."""
        return self.uses.dropped + self.levels.dropped + self.spans.dropped
