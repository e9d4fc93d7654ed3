"""Simulate a run: the real planner on a virtual clock, without reading data.

Plays a list of uses against the planner. Each hop makes one copy at a time, urgent ones first,
as on a busy disk or link; compute takes the seconds given with each use. No data is read and no
thread runs, so results are exact and reproducible. The command line predicts run times with it,
tests check the planner with it, and benchmarks compare measurements to it.

`replay` plays the recorded events of a real run instead, at their recorded times.
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
from tierstore.observe.event_log import EventRecord, Handled, replay_events
from tierstore.plan.loop_plan import Loop, LoopPlan
from tierstore.plan.loop_planner import plan_loop
from tierstore.plan.loop_timing import PlanClock
from tierstore.plan.planner import Planner, planner_for
from tierstore.plan.records import State

Hop = tuple[Tier, Tier]
"""The source and the destination tier of a copy."""


@dataclass(frozen=True, slots=True)
class Use:
    """One use of a group, and the seconds of compute that follow it."""

    key: str
    seconds: float


@dataclass(frozen=True, slots=True)
class UseResult:
    """The outcome of one use: compute began at `start`, after `waited` seconds (virtual time).

    `bytes_read` counts all bytes read from disk by then. `found` is "hit", "late" or "miss".
    """

    key: str
    start: float
    waited: float
    bytes_read: int
    found: str


@dataclass(frozen=True)
class Outcome:
    """Times and traffic of a simulated run. Sizes are in bytes, times in seconds.

    `reads` counts the reads from disk of each group.
    """

    seconds: float
    computed_seconds: float
    stalled_seconds: float
    hits: int
    late: int
    misses: int
    bytes_moved: dict[Hop, int]
    uses: tuple[UseResult, ...]
    reads: dict[str, int]
    peak_bytes: dict[Tier, int]


def simulate(
    groups: Mapping[str, int],
    uses: Sequence[Use],
    budgets: Mapping[Tier, int | None],
    *,
    bandwidth: Mapping[Hop, float] | None = None,
    policy: str = "next-use",
    prefetch: bool = True,
) -> Outcome:
    """Simulate `uses` of `groups` (key -> bytes, in the order of registration) on one thread.

    `bandwidth` is in bytes per second, by hop; copies on a hop without an entry take no time.
    Without `prefetch`, groups move only on demand. Raises BudgetError if a group is larger than a
    budget, and KeyError for a use of an unknown group.
    """
    clock = Clock()
    planner = planner_with_groups(groups, budgets, clock, policy=policy, prefetch=prefetch)
    return play(planner, clock, uses, bandwidth or {})


def planner_with_groups(
    groups: Mapping[str, int],
    budgets: Mapping[Tier, int | None],
    clock: Clock,
    *,
    policy: str = "next-use",
    prefetch: bool = True,
) -> Planner:
    """Return a planner on this clock, with the groups registered."""
    planner = planner_for(budgets, policy, prefetch=prefetch)
    for key, nbytes in groups.items():
        planner.handle(Registered(GroupId(key, 0), nbytes, backing=True), clock.now)
    return planner


def play(
    planner: Planner,
    clock: Clock,
    uses: Sequence[Use],
    bandwidth: Mapping[Hop, float],
) -> Outcome:
    """Simulate uses with a planner that is on this clock and already has its groups."""
    run = SimulatedRun(planner, clock, bandwidth)
    for use in uses:
        run.use(use)
    return run.outcome()


def simulate_together(
    groups: Mapping[str, int],
    threads: Sequence[Sequence[Use]],
    budgets: Mapping[Tier, int | None],
    *,
    bandwidth: Mapping[Hop, float] | None = None,
) -> Outcome:
    """Simulate several threads. Their compute overlaps without slowing each other down."""
    clock = Clock()
    run = SimulatedRun(planner_with_groups(groups, budgets, clock), clock, bandwidth or {})
    run.use_together(threads)
    return run.outcome()


def replay(record: EventRecord) -> Iterator[tuple[Event, list[Instruction]]]:
    """Yield each recorded event, with the instructions of a new planner after it.

    Raises ValueError if the record lacks events, or if no planner can be made from its settings.
    Events that do not follow from the instructions before them may raise any exception.
    """
    if record.dropped:
        raise ValueError(f"the record lacks its {record.dropped:,} oldest events")
    planner = planner_for(record.budgets, record.policy, timed_by_device=record.timed_by_device)
    return replay_events(((one.now, one.event) for one in record.handled), planner)


@dataclass(frozen=True)
class Difference:
    """The first event for which the current planner's instructions differ from the recorded ones.

    `number` is the index of the event, from 0. `error` is set if the planner raised.
    """

    number: int
    recorded: Handled
    instructions: tuple[Instruction, ...] = ()
    error: str | None = None


def first_difference(record: EventRecord) -> Difference | None:
    """Return the first difference between a record and its replay, or None if they are equal.

    Raises ValueError if the record lacks events, or if no planner can be made from its settings.
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
    """One pass of a loop.

    `seconds` include the `stalled` seconds, in which nothing computed. `reads` counts reads from
    disk by group number. `planned` is True if the pass followed a plan.
    """

    seconds: float
    stalled: float
    bytes_moved: Mapping[Hop, int]
    reads: Mapping[int, int]
    planned: bool


def simulate_loop(
    loop: Loop,
    budgets: Mapping[Tier, int | None],
    passes: int,
    *,
    bandwidth: Mapping[Hop, float],
    tile: int = TILE,
) -> list[LoopPass]:
    """Simulate passes of a loop.

    The first two passes use the planner, which learns the order of use. Later passes follow the
    plan of `plan_loop`, if there is one. Groups that are resident by then are reused; loading the
    other groups that the plan starts with counts toward the first planned pass. `bandwidth` is in
    bytes per second. Raises BudgetError if a group is larger than a budget.
    """
    plan = plan_loop(loop, budgets, bandwidth, tile)
    keys = [str(number) for number in range(len(loop.sizes))]
    clock = Clock()
    planner = planner_with_groups(dict(zip(keys, loop.sizes, strict=True)), budgets, clock)
    run = SimulatedRun(planner, clock, bandwidth)
    found: list[LoopPass] = []
    for _ in range(passes if plan is None else min(LEARNING_PASSES, passes)):
        before = run.outcome()
        for step in loop.steps:
            run.use_step([keys[group] for group in step.groups], step.seconds)
        found.append(_pass_between(before, run.outcome()))
    if plan is None:
        return found
    residence = {int(group.key): planner.residence(group) for group in planner.groups()}
    return [*found, *_planned_passes(plan, residence, passes - len(found), bandwidth)]


LEARNING_PASSES = 2
"""Passes that the planner needs to learn the order of a loop."""


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
    plan: LoopPlan,
    residence: Mapping[int, Sequence[Tier]],
    passes: int,
    bandwidth: Mapping[Hop, float],
) -> Iterator[LoopPass]:
    ways = plan.ways
    entering = plan.missing(residence)
    seconds = max(
        (n / bandwidth[hop] for hop, n in entering.items() if bandwidth.get(hop)), default=0.0
    )
    clock = PlanClock(plan, [bandwidth.get(hop) for hop in ways])
    begun, stalled, lowest = -seconds, -seconds, plan.tiers[-1]
    reads = Counter(
        copy.group for copy in lowest.copies if not copy.offset
    )  # one read, however many tiles
    entered = Counter(
        each.group for each in lowest.start if lowest.tier not in residence[each.group]
    )
    for number in range(passes):
        end = clock.run_pass()
        moved = {
            hop: tier.moved + (entering[hop] if number == 0 else 0)
            for hop, tier in zip(ways, plan.tiers, strict=True)
        }
        read = reads + entered if number == 0 else reads
        yield LoopPass(end - begun, clock.stalled - stalled, moved, read, planned=True)
        begun, stalled = end, clock.stalled


class Clock:
    """Virtual time of a simulated run, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0


@dataclass
class _Channel:
    """One hop: its queue, and whether it is copying."""

    bandwidth: float | None
    queue: list[tuple[int, int, Copy]] = field(default_factory=list)
    busy: bool = False


@dataclass(frozen=True, slots=True)
class _PendingUse:
    """A use that a thread has been waiting for since time `since`. `found`: see `UseResult`."""

    use: Use
    group: GroupId
    since: float
    found: str
    thread: int


class SimulatedRun:
    """One simulated run. Calls `on_instruction` with each instruction before carrying it out."""

    def __init__(
        self,
        planner: Planner,
        clock: Clock,
        bandwidth: Mapping[Hop, float],
        on_instruction: Callable[[Instruction], object] = lambda instruction: None,
    ) -> None:
        self._planner = planner
        self._clock = clock
        self._bandwidth = bandwidth
        self._on_instruction = on_instruction
        self._served: list[UseResult] = []
        self._computed = 0.0
        self._channels: dict[Hop, _Channel] = {}
        self._in_flight: list[tuple[float, int, Copy]] = []  # (end, age, copy)
        self._age = itertools.count()
        self._moved: Counter[Hop] = Counter()
        self._read = 0
        self._reads: Counter[str] = Counter()

    def outcome(self) -> Outcome:
        """Return the totals of all uses so far."""
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
        """Wait for a group, compute with it, and release it."""
        group = self._acquire(use)
        self._compute(use.seconds)
        self._handle(Released(group, Access.READ))

    def use_step(self, keys: Sequence[str], seconds: float) -> None:
        """Wait for groups one after the other, compute with all of them, and release them."""
        groups = [self._acquire(Use(key, 0.0)) for key in keys]
        self._computed += seconds
        self._compute(seconds)
        for group in groups:
            self._handle(Released(group, Access.READ))

    def _acquire(self, use: Use) -> GroupId:
        """Wait for a group, and lease it."""
        pending = self._demand(use)
        while not self._try_lease(pending):
            self._wait_for_copy()
        return pending.group

    def use_together(self, threads: Sequence[Sequence[Use]]) -> None:
        """Simulate the uses of several threads, each of which waits, computes and releases."""
        uses = [iter(each) for each in threads]
        awake = [(self._clock.now, thread) for thread in range(len(threads))]  # a heap
        waiting: dict[int, _PendingUse] = {}
        computing: dict[int, _PendingUse] = {}
        while awake or waiting:
            if awake and (not self._in_flight or awake[0][0] <= self._in_flight[0][0]):
                self._clock.now, thread = heapq.heappop(awake)
                if thread in computing:
                    self._handle(Released(computing.pop(thread).group, Access.READ))
                use = next(uses[thread], None)
                if use is not None:
                    waiting[thread] = self._demand(use, thread)
            else:
                self._wait_for_copy()
            for thread, pending in list(waiting.items()):
                if self._try_lease(pending):
                    computing[thread] = waiting.pop(thread)
                    heapq.heappush(awake, (self._clock.now + pending.use.seconds, thread))

    def _demand(self, use: Use, thread: int = 0) -> _PendingUse:
        group = GroupId(use.key, 0)
        state = self._planner.state_of(group)
        found = {State.PRESENT: "hit", None: "miss"}.get(state, "late")
        pending = _PendingUse(use, group, self._clock.now, found, thread)
        self._handle(Demanded(group, thread))
        return pending

    def _try_lease(self, pending: _PendingUse) -> bool:
        """Lease the group if it is resident. Return whether it was."""
        group, start = pending.group, self._clock.now
        if not self._planner.leasable(group, Access.READ):
            error = self._planner.error_of(group)
            if error is not None:
                raise error
            return False
        self._handle(Leased(group, Access.READ, stream=pending.thread))
        waited = start - pending.since
        self._served.append(UseResult(pending.use.key, start, waited, self._read, pending.found))
        self._computed += pending.use.seconds
        return True

    def _handle(self, event: Event) -> None:
        for copy in self._planner.handle(event, self._clock.now):
            self._on_instruction(copy)
            if isinstance(copy, Copy):
                hop = (copy.src, copy.dst)
                channel = self._channels.setdefault(hop, _Channel(self._bandwidth.get(hop)))
                heapq.heappush(channel.queue, (not copy.urgent, next(self._age), copy))
                self._start(channel)

    def _start(self, channel: _Channel) -> None:
        if channel.busy or not channel.queue:
            return
        copy = heapq.heappop(channel.queue)[2]
        seconds = copy.nbytes / channel.bandwidth if channel.bandwidth else 0.0
        channel.busy = True
        heapq.heappush(self._in_flight, (self._clock.now + seconds, next(self._age), copy))

    def _wait_for_copy(self) -> None:
        assert self._in_flight, "a use waits, but no copy is in flight"
        self._finish_copy()

    def _compute(self, seconds: float) -> None:
        """Advance the clock by `seconds` of compute, and finish the copies that end meanwhile."""
        end = self._clock.now + seconds
        while self._in_flight and self._in_flight[0][0] <= end:
            self._finish_copy()
        self._clock.now = end

    def _finish_copy(self) -> None:
        when, _, copy = heapq.heappop(self._in_flight)
        hop = (copy.src, copy.dst)
        self._clock.now = max(self._clock.now, when)
        self._moved[hop] += copy.nbytes
        if copy.src is Tier.DISK:
            self._read += copy.nbytes
            self._reads[copy.group.key] += 1
        channel = self._channels[hop]
        channel.busy = False
        self._handle(Arrived(copy.group, copy.src, copy.dst))
        self._start(channel)
