"""What happened, and when: the newest events one by one, and sums over all that ever happened.

A store always keeps one, so noting must cost next to nothing: events are small objects in rings
that forget the oldest. What lasts (a transfer, a wait) is a `Span`, with a beginning and an end;
all times are seconds of `time.monotonic`. The sums go by *hop*, such as `DISK>HOST`.

*Overlap* is the share of the time in which bytes moved that nobody waited. Both are unions: two
transfers at once move for as long as the longer one, and two who wait do not wait twice.
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
"""The kind of span in which somebody waited for a group; every other kind is a hop."""

ROUTED = "routed"
"""What was read of groups that data choose, among the bytes that were moved."""

PLANNED = "planned"
"""How an acquire is met that enters the plan of a loop: it is no use of its group."""

KEPT = 1 << 15
"""Events of each sort that are kept: about 5 MB of memory each, if there were so many."""

_UNSETTLED = 1024
_A_MOMENT = 0.02  # seconds
_numbers = itertools.count(1)


def hop(src: Tier, dst: Tier) -> str:
    """The name of a way between two tiers.

    >>> hop(Tier.DISK, Tier.HOST)
    'DISK>HOST'
    """
    return f"{src.name}>{dst.name}"


@dataclass(eq=False, slots=True)
class Span:
    """Something that took time. `kind` is a hop, or `STALL`; `note` says how it went."""

    kind: str
    key: str
    nbytes: int = 0
    note: str = ""
    start: float = 0.0
    end: float = 0.0


@dataclass(eq=False, slots=True)
class LeaseUse:
    """One lease: when it was asked for, granted and released, by whom, and how it was met.

    `group`, of `nbytes` bytes. A time is 0.0 until it came. On an accelerator,
    which works later than it is told to, the group was `ready` late if that waited for it, and what
    was begun with the lease is `done` after its release.
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
    """An acquire that began at `since`, and how it was `met`. Its wait is the `stall`, which began
    on an accelerator at `mark`, a `Mark`."""

    since: float = field(default_factory=time.monotonic)
    met: str = ""
    stall: Span | None = None
    mark: Any = None


@dataclass(eq=False, slots=True)
class FollowedPlan:
    """A plan of a loop that was followed from `start` to `end` (0.0: it still is).

    A pass has `steps` steps. `reason` says why the plan was left, at the step `at`.
    """

    steps: int
    start: float
    end: float = 0.0
    at: int = 0
    reason: str = ""


class Ring(Generic[T]):
    """The newest of the events that were added."""

    def __init__(self, kept: int = KEPT) -> None:
        self._events: deque[T] = deque(maxlen=kept)
        self._added = 0

    def add(self, event: T) -> None:
        """Note an event."""
        self._events.append(event)
        self._added += 1

    def events(self) -> list[T]:
        """Those that are kept, the oldest first."""
        return list(self._events)

    @property
    def newest(self) -> T | None:
        """The one that was added last."""
        return self._events[-1] if self._events else None

    @property
    def added(self) -> int:
        """How many were added so far."""
        return self._added

    @property
    def dropped(self) -> int:
        """How many were forgotten."""
        return self._added - len(self._events)


class Stretches:
    """For how long spans of each kind lasted, when they may overlap and are told in any order.

    Time up to `total_up_to` is added up and done with: what is told later of that time is left out.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.moving = 0.0  # seconds in which any bytes moved
        self.hidden = 0.0  # of these, the ones in which nobody waited
        self._edges: list[tuple[float, int, str]] = []
        self._going: Counter[str] = Counter()
        self._settled = float("-inf")

    def __len__(self) -> int:
        return len(self._edges)

    def add(self, kind: str, start: float, end: float) -> None:
        """One span."""
        start = max(start, self._settled)
        if end > start:
            heapq.heappush(self._edges, (start, 1, kind))
            heapq.heappush(self._edges, (end, -1, kind))

    def middle(self) -> float:
        """The time before which half of what is not settled yet began or ended."""
        return sorted(self._edges)[len(self._edges) // 2][0]

    def total_up_to(self, until: float) -> None:
        """Add up the time until then."""
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

    def copy(self) -> Stretches:
        """A copy that can be settled without harm to this one."""
        other = copy.copy(self)
        other.seconds = dict(self.seconds)
        other._edges, other._going = list(self._edges), Counter(self._going)
        return other


@dataclass(frozen=True)
class Summary:
    """Sums over everything that happened so far. `moved` (bytes) and `busy` (seconds) go by hop;
    what was read of groups that data choose is in `moved` once more, as `ROUTED`.

    `stalled` adds up what each waiter waited, in seconds. `bandwidth` is in bytes per second.
    """

    moved: dict[str, int]
    busy: dict[str, float]
    bandwidth: dict[str, float]
    stalled: float
    overlap: float


@dataclass
class Journal:
    """The events of one store.

    `uses` and `levels` (time, bytes used on each tier) are the store's, under its lock; while a
    plan is followed, `uses` are those of the thread that follows it. Spans begin and end on any
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
        self._timed: Counter[str] = Counter()  # bytes, of which it is known when they moved
        self._stalled = 0.0
        self.stretches = Stretches()

    def begin(self, span: Span) -> None:
        """A span begins: now, or at its `start` if it has one."""
        span.start = span.start or time.monotonic()
        under(self._lock, lambda: self._going.add(span))

    def end(self, span: Span) -> None:
        """A span is over: now, or at its `end` if it has one. It need not have been begun."""
        under(self._lock, lambda: self._end(span))

    def _end(self, span: Span) -> None:
        self._going.discard(span)
        span.end = max(span.end or time.monotonic(), span.start)
        self.spans.add(span)
        self._timed[span.kind] += span.nbytes
        self.stretches.add(span.kind, span.start, span.end)
        if span.kind == STALL:
            self._stalled += span.end - span.start
        if len(self.stretches) > _UNSETTLED:
            # Not yet the newest: what an accelerator did is told late.
            self.stretches.total_up_to(
                min([self.stretches.middle(), *(going.start for going in self._going)])
            )

    def end_between(self, span: Span, times: list[float]) -> None:
        """A span began and ended at these times."""
        span.start, span.end = times
        self.end(span)

    def count(self, kind: str, nbytes: int) -> None:
        """So many bytes more were moved on a hop."""
        under(self._lock, lambda: self._moved.update({kind: nbytes}))

    def summary(self) -> Summary:
        """What all of it comes to."""
        return under(self._lock, self._summary)

    def glance(self) -> Summary:
        """`summary`, but without times where somebody is in the middle of a change for long."""
        known = if_free(self._lock, self._summary, _A_MOMENT)
        return known or Summary(dict(self._moved), {}, {}, self._stalled, 1.0)

    def read(self) -> tuple[Summary, list[Span]]:
        """The sums, and the newest spans, as of one moment."""
        return under(self._lock, lambda: (self._summary(), self.spans.events()))

    def _summary(self) -> Summary:
        stretches, stalled, now = self.stretches.copy(), self._stalled, time.monotonic()
        for span in self._going:
            stretches.add(span.kind, span.start, now)
            stalled += now - span.start if span.kind == STALL else 0.0
        stretches.total_up_to(float("inf"))
        busy = {kind: s for kind, s in sorted(stretches.seconds.items()) if kind != STALL}
        overlap = stretches.hidden / stretches.moving if stretches.moving else 1.0
        rates = {kind: self._timed[kind] / s for kind, s in busy.items() if self._timed[kind]}
        return Summary(dict(self._moved), busy, rates, stalled, overlap)

    @property
    def dropped(self) -> int:
        """Events that were forgotten. With the store's lock."""
        return self.uses.dropped + self.levels.dropped + self.spans.dropped
