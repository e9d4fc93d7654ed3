"""The planner on a virtual clock: what a run would do, without doing it.

A list of uses is played against the real planner. Moves take time on their hops, one after the
other and urgent ones first, as on a disk or a link that is busy; computing takes the seconds that
each use says. Nothing is read, and no thread runs, so that results are exact and the same each
time. The command line predicts with it, tests assert with it, and benchmarks compare with it.

The events of a real run can be played, too, with their own times: see `replay`.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tierstore.model.events import Arrived, Demanded, Event, Leased, Registered, Released
from tierstore.model.groups import GroupId
from tierstore.model.moves import Copy, Instruction
from tierstore.model.outline import TILE
from tierstore.model.tiers import Access, Tier
from tierstore.observe.event_log import EventRecord, Handled, replayed
from tierstore.plan.loop_plan import Loop, LoopPlan
from tierstore.plan.loop_planner import plan_loop
from tierstore.plan.loop_timing import PlanClock
from tierstore.plan.planner import Planner, planner_for
from tierstore.plan.records import State

Way = tuple[Tier, Tier]
"""Where a move goes from, and to."""


@dataclass(frozen=True, slots=True)
class Use:
    """One use of a group, and the seconds of computing that follow it."""

    key: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Served:
    """How one use went: its computing began at `start`, after `waited` seconds (all virtual).

    `bytes_read` is what had been read from disk by then, in all; `found` is "hit", "late" or
    "miss".
    """

    key: str
    start: float
    waited: float
    bytes_read: int
    found: str


@dataclass(frozen=True)
class Outcome:
    """What a simulated run took. Sizes are in bytes, times in seconds.

    `reads` says how often each group was read from disk.
    """

    seconds: float
    computed_seconds: float
    stalled_seconds: float
    hits: int
    late: int
    misses: int
    bytes_moved: dict[Way, int]
    uses: tuple[Served, ...]
    reads: dict[str, int]
    peak_bytes: dict[Tier, int]


def simulate(
    groups: Mapping[str, int],
    uses: Sequence[Use],
    budgets: Mapping[Tier, int | None],
    *,
    bandwidth: Mapping[Way, float] | None = None,
    policy: str = "next-use",
    prefetch: bool = True,
) -> Outcome:
    """Play `uses` of `groups` (key -> bytes, in the order of registration) on one thread.

    `bandwidth` gives bytes per second for each hop; None, or a hop that it leaves out: moves take
    no time. Without `prefetch`, groups move only when they are asked for. Raises BudgetError if a
    group is larger than a budget, and KeyError for a use of an unknown group.
    """
    clock = Clock()
    planner = planner_of(groups, budgets, clock, policy=policy, prefetch=prefetch)
    return play(planner, clock, uses, bandwidth or {})


def planner_of(
    groups: Mapping[str, int],
    budgets: Mapping[Tier, int | None],
    clock: Clock,
    *,
    policy: str = "next-use",
    prefetch: bool = True,
) -> Planner:
    """The planner that `simulate` plays with: it knows the groups, and looks at this clock."""
    planner = planner_for(budgets, policy, foretell=prefetch)
    for key, nbytes in groups.items():
        planner.handle(Registered(GroupId(key, 0), nbytes, backing=True), clock.now)
    return planner


def play(
    planner: Planner,
    clock: Clock,
    uses: Sequence[Use],
    bandwidth: Mapping[Way, float],
) -> Outcome:
    """`simulate` with a planner that knows its groups, and looks at this clock."""
    run = SimulatedRun(planner, clock, bandwidth)
    for use in uses:
        run.use(use)
    return run.outcome()


def simulate_together(
    groups: Mapping[str, int],
    threads: Sequence[Sequence[Use]],
    budgets: Mapping[Tier, int | None],
    *,
    bandwidth: Mapping[Way, float] | None = None,
) -> Outcome:
    """`simulate` with several threads, which compute at the same time, each as if it were alone."""
    clock = Clock()
    run = SimulatedRun(planner_of(groups, budgets, clock), clock, bandwidth or {})
    run.use_together(threads)
    return run.outcome()


def replay(record: EventRecord) -> Iterator[tuple[Event, list[Instruction]]]:
    """Each event of a record, and what a new planner instructs after it.

    Raises ValueError for a record that is not whole, or from which no planner can be made. Events
    that do not follow from the instructions before them may raise anything.
    """
    if record.dropped:
        raise ValueError(f"the record lacks its {record.dropped:,} oldest events")
    planner = planner_for(record.budgets, record.policy, timed_by_device=record.timed_by_device)
    return replayed(((one.now, one.event) for one in record.handled), planner)


@dataclass(frozen=True)
class Difference:
    """Event `number` of a record, counted from 0, is the first after which today's planner
    instructs something else. `error` tells why it could not go on, if that is so."""

    number: int
    recorded: Handled
    instructions: tuple[Instruction, ...] = ()
    error: str | None = None


def first_difference(record: EventRecord) -> Difference | None:
    """Where a replay of a record goes another way than the run did; None if it never does.

    Raises ValueError for a record that is not whole, or from which no planner can be made.
    """
    answers = replay(record)
    for number, one in enumerate(record.handled):
        try:
            _, instructions = next(answers)
        except Exception as error:  # a planner trusts its events: these may have been edited
            return Difference(number, one, error=f"{type(error).__name__}: {error}")
        if tuple(instructions) != one.instructions:
            return Difference(number, one, tuple(instructions))
    return None


@dataclass(frozen=True, slots=True)
class LoopPass:
    """One pass of a loop: its seconds, of them those in which nothing was computed, the bytes that
    moved, how often each group was read from disk, and whether it followed a plan."""

    seconds: float
    stalled: float
    bytes_moved: Mapping[Way, int]
    reads: Mapping[int, int]
    planned: bool


def simulate_loop(
    loop: Loop,
    budgets: Mapping[Tier, int | None],
    passes: int,
    *,
    bandwidth: Mapping[Way, float],
    tile: int = TILE,
) -> list[LoopPass]:
    """Play passes of a loop: the first two with the planner that decides at each use, which learns
    the order; the others as `plan_loop` plans them, if it does.

    What is there by then is used. What the plan starts with beside that is brought first, and
    counts for the first pass that follows the plan. Raises BudgetError if a group is larger than a
    budget.
    """
    plan = plan_loop(loop, budgets, bandwidth, tile)
    keys = [str(number) for number in range(len(loop.sizes))]
    clock = Clock()
    planner = planner_of(dict(zip(keys, loop.sizes, strict=True)), budgets, clock)
    run = SimulatedRun(planner, clock, bandwidth)
    found: list[LoopPass] = []
    for _ in range(passes if plan is None else min(LEARNED, passes)):
        before = run.outcome()
        for step in loop.steps:
            run.use_step([keys[group] for group in step.groups], step.seconds)
        found.append(_pass_between(before, run.outcome()))
    if plan is None:
        return found
    there = {int(group.key): planner.residence(group) for group in planner.groups()}
    return [*found, *_planned_passes(plan, there, passes - len(found), bandwidth)]


LEARNED = 2
"""Passes after which the order of a loop is known."""


def _pass_between(before: Outcome, after: Outcome) -> LoopPass:
    moved = Counter(after.bytes_moved)
    moved.subtract(before.bytes_moved)
    reads = Counter({int(key): count for key, count in after.reads.items()})
    reads.subtract({int(key): count for key, count in before.reads.items()})
    return LoopPass(
        after.seconds - before.seconds,
        after.stalled_seconds - before.stalled_seconds,
        moved,
        +reads,
        planned=False,
    )


def _planned_passes(
    plan: LoopPlan, there: Mapping[int, Sequence[Tier]], passes: int, bandwidth: Mapping[Way, float]
) -> Iterator[LoopPass]:
    ways = plan.ways
    entering = plan.missing(there)
    seconds = max(
        (n / bandwidth[way] for way, n in entering.items() if bandwidth.get(way)), default=0.0
    )
    clock = PlanClock(plan, [bandwidth.get(way) for way in ways])
    begun, stalled, lowest = -seconds, -seconds, plan.tiers[-1]
    reads = Counter(copy.group for copy in lowest.copies if not copy.offset)  # once for all tiles
    entered = Counter(each.group for each in lowest.start if lowest.tier not in there[each.group])
    for number in range(passes):
        end = clock.run_pass()
        moved = {
            way: tier.moved + (entering[way] if number == 0 else 0)
            for way, tier in zip(ways, plan.tiers, strict=True)
        }
        read = reads + entered if number == 0 else reads
        yield LoopPass(end - begun, clock.stalled - stalled, moved, read, planned=True)
        begun, stalled = end, clock.stalled


class Clock:
    """Says what time it is in a simulated run, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0


@dataclass
class _Channel:
    """One hop: what is queued on it, and what moves now."""

    bandwidth: float | None
    queue: list[tuple[int, int, Copy]] = field(default_factory=list)
    busy: bool = False


@dataclass(frozen=True, slots=True)
class _Asking:
    """A use that a thread waits for, `since` when, and what it `found`."""

    use: Use
    group: GroupId
    since: float
    found: str
    thread: int


class SimulatedRun:
    """One simulated run. Each instruction is `told` of, too, before it is followed."""

    def __init__(
        self,
        planner: Planner,
        clock: Clock,
        bandwidth: Mapping[Way, float],
        told: Callable[[Instruction], object] = lambda instruction: None,
    ) -> None:
        self._planner = planner
        self._clock = clock
        self._bandwidth = bandwidth
        self._timed_by_device = told
        self._served: list[Served] = []
        self._computed = 0.0
        self._channels: dict[Way, _Channel] = {}
        self._moving: list[tuple[float, int, Copy]] = []  # (end, age, copy)
        self._age = itertools.count()
        self._moved: Counter[Way] = Counter()
        self._read = 0
        self._reads: Counter[str] = Counter()

    def outcome(self) -> Outcome:
        """What the uses so far took."""
        counts = Counter(served.found for served in self._served)
        return Outcome(
            seconds=self._clock.now,
            computed_seconds=self._computed,
            stalled_seconds=sum(served.waited for served in self._served),
            hits=counts["hit"],
            late=counts["late"],
            misses=counts["miss"],
            bytes_moved=dict(self._moved),
            uses=tuple(self._served),
            reads=dict(self._reads),
            peak_bytes=dict(self._planner.peak),
        )

    def use(self, use: Use) -> None:
        """Wait for a group, compute with it, and give it back."""
        group = self._acquire(use)
        self._pass(use.seconds)
        self._tell(Released(group, Access.READ))

    def use_step(self, keys: Sequence[str], seconds: float) -> None:
        """Wait for groups, one after the other, compute with all of them, and give them back."""
        groups = [self._acquire(Use(key, 0.0)) for key in keys]
        self._computed += seconds
        self._pass(seconds)
        for group in groups:
            self._tell(Released(group, Access.READ))

    def _acquire(self, use: Use) -> GroupId:
        """Wait for a group, and lease it."""
        asking = self._ask(use)
        while not self._try(asking):
            self._wait_for_a_move()
        return asking.group

    def use_together(self, threads: Sequence[Sequence[Use]]) -> None:
        """The uses of several threads, each of which waits, computes and gives back by itself."""
        uses = [iter(each) for each in threads]
        awake = [(self._clock.now, thread) for thread in range(len(threads))]  # a heap
        waiting: dict[int, _Asking] = {}
        computing: dict[int, _Asking] = {}
        while awake or waiting:
            if awake and (not self._moving or awake[0][0] <= self._moving[0][0]):
                self._clock.now, thread = heapq.heappop(awake)
                if thread in computing:
                    self._tell(Released(computing.pop(thread).group, Access.READ))
                use = next(uses[thread], None)
                if use is not None:
                    waiting[thread] = self._ask(use, thread)
            else:
                self._wait_for_a_move()
            for thread, asking in list(waiting.items()):
                if self._try(asking):
                    computing[thread] = waiting.pop(thread)
                    heapq.heappush(awake, (self._clock.now + asking.use.seconds, thread))

    def _ask(self, use: Use, thread: int = 0) -> _Asking:
        group = GroupId(use.key, 0)
        state = self._planner.state_of(group)
        found = {State.PRESENT: "hit", None: "miss"}.get(state, "late")
        asking = _Asking(use, group, self._clock.now, found, thread)
        self._tell(Demanded(group, thread))
        return asking

    def _try(self, asking: _Asking) -> bool:
        """Lease the group, if it is there."""
        group, start = asking.group, self._clock.now
        if not self._planner.leasable(group, Access.READ):
            error = self._planner.error_of(group)
            if error is not None:
                raise error
            return False
        self._tell(Leased(group, Access.READ, stream=asking.thread))
        waited = start - asking.since
        self._served.append(Served(asking.use.key, start, waited, self._read, asking.found))
        self._computed += asking.use.seconds
        return True

    def _tell(self, event: Event) -> None:
        for copy in self._planner.handle(event, self._clock.now):
            self._timed_by_device(copy)
            if isinstance(copy, Copy):
                way = (copy.src, copy.dst)
                channel = self._channels.setdefault(way, _Channel(self._bandwidth.get(way)))
                heapq.heappush(channel.queue, (not copy.urgent, next(self._age), copy))
                self._start(channel)

    def _start(self, channel: _Channel) -> None:
        if channel.busy or not channel.queue:
            return
        copy = heapq.heappop(channel.queue)[2]
        seconds = copy.nbytes / channel.bandwidth if channel.bandwidth else 0.0
        channel.busy = True
        heapq.heappush(self._moving, (self._clock.now + seconds, next(self._age), copy))

    def _wait_for_a_move(self) -> None:
        assert self._moving, "somebody waits, and nothing moves"
        self._end_a_move()

    def _pass(self, seconds: float) -> None:
        """Computing goes on for so long; what arrives meanwhile, arrives."""
        end = self._clock.now + seconds
        while self._moving and self._moving[0][0] <= end:
            self._end_a_move()
        self._clock.now = end

    def _end_a_move(self) -> None:
        when, _, copy = heapq.heappop(self._moving)
        way = (copy.src, copy.dst)
        self._clock.now = max(self._clock.now, when)
        self._moved[way] += copy.nbytes
        if copy.src is Tier.DISK:
            self._read += copy.nbytes
            self._reads[copy.group.key] += 1
        channel = self._channels[way]
        channel.busy = False
        self._tell(Arrived(copy.group, copy.src, copy.dst))
        self._start(channel)
