"""Detect that a thread repeats its steps, plan the loop, and follow the plan.

A *step* is the set of groups that a unit leases: the keys of its groups, and those of the units
that contain it. Each unit reports its beginning and end. While a plan is followed, the planner
decides nothing for it. After a thread has run the same steps twice, its loop is planned on a disk
thread, and the thread enters the plan at the beginning of a pass. Any deviation leaves the plan
(`LoopRunner`).

Only one plan is followed at a time, and only while no other thread uses units.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tierstore.engine.core import Core, LoopLeftError
from tierstore.engine.lease_table import LeaseTable
from tierstore.engine.leases import Leases
from tierstore.engine.loop_memory import KeyedPlan, StepKeys, moves_as_a_whole
from tierstore.engine.loop_runner import DIFFERENT_STEP, VIEW_OUTLIVES_STEP, LoopRunner, StepLease
from tierstore.engine.mutable_groups import MutableGroups
from tierstore.engine.transaction import transact, transaction
from tierstore.errors import TierStoreError
from tierstore.lease import Lease
from tierstore.model.outline import tile_bytes
from tierstore.model.tiers import HostAccess, Tier, UseOrder, in_memory
from tierstore.plan.loop_plan import LoopPlan
from tierstore.plan.loop_planner import plan_loop
from tierstore.plan.loop_recorder import LoopRecorder, as_loop
from tierstore.plan.loop_timing import seconds_per_pass
from tierstore.tiers.workers import EARLY

logger = logging.getLogger("tierstore.engine")

MAX_THREADS = 256
"""Maximum number of threads whose last use of units is tracked."""
MAX_STEPS = 8192
"""Maximum number of distinct steps tracked per thread. Above it, all are dropped."""
LEAVES_BEFORE_REST = 3
"""Number of consecutive times that a plan may be left within a pass before it rests.

A loop whose plan was left so often because views of weights were kept is not planned again."""
MAX_TIME_RATIO = 0.97
"""A plan is replaced by one whose passes take at most this fraction of its time.

They must also be shorter by `MIN_SAVED_SECONDS`: entering a plan takes about as long as a pass."""
MIN_SAVED_SECONDS = 0.01
MAX_REST_DOUBLINGS = 4
"""Maximum number of times that the rest of a plan doubles: two passes, then four, and so on."""


@dataclass
class PlannedLoop:
    """A loop and its plan, which numbers its `groups`. `plan` is None if none was found."""

    length: int
    steps: tuple[StepKeys, ...]
    own: tuple[StepKeys, ...]
    sizes: dict[str, int]
    budgets: dict[Tier, int | None]
    speeds: dict[tuple[Tier, Tier], float]
    asked: float
    ready: bool = False
    groups: tuple[str, ...] = ()
    plan: LoopPlan | None = None
    early: int = 0  # consecutive times that it was left within a pass
    rest: int = 0  # passes until it may be entered again
    left_after: int = -1  # steps after which it was last left
    timed: bool = False  # measured while it was followed

    def mark_left(self, steps: int) -> None:
        """Record that the plan was left after `steps`, or could not be entered (0)."""
        self.early = self.early + 1 if steps < self.length else 0
        resting = self.early - LEAVES_BEFORE_REST
        self.rest = 0 if resting <= 0 else 1 << min(resting, MAX_REST_DOUBLINGS)
        self.left_after = steps
        self.asked = time.monotonic()


class ThreadSteps:
    """The steps of one thread. Used by that thread only."""

    def __init__(self, running: list[StepKeys] | None = None) -> None:
        self.open: list[StepKeys] = running or []  # steps of the running units, outermost first
        self.inner = False  # True if a unit inside the innermost open one has run
        self.recorder = LoopRecorder()
        self.own: dict[StepKeys, StepKeys] = {}  # keys of the unit that began the step, by step
        self.latest: StepKeys | None = None
        self.after = 0  # steps since the plan was requested
        self.planned: PlannedLoop | None = None
        self.runner: LoopRunner | None = None  # runner of the followed plan
        self.left_plan: PlannedLoop | None = None
        # By loop: how often its plan was left because views of weights were kept.
        self.kept_views: dict[frozenset[StepKeys], int] = {}
        self._since: dict[StepKeys, int] = {}
        self._distance = self._same = self._count = 0

    @property
    def distance(self) -> int:
        """Steps since the previous occurrence of the latest step: a lower bound of the period.

        Consecutive steps with the same keys count as one.
        """
        return self._distance

    def note(self, step: StepKeys, own: StepKeys) -> None:
        """Record that a step begins, and that the previous one has ended."""
        if (
            len(self.own) > MAX_STEPS
        ):  # steps of discarded models, or of a model that is edited often
            self.__init__(self.open)  # type: ignore[misc]
        if self.latest is not None:
            self.recorder.note(self.latest)
            self.after += 1
        again = step == self.latest
        self.own[step] = own
        self.latest = step
        if again:  # consecutive units may be in one group
            return
        count, before = self._count, self._since.get(step)
        distance = 0 if before is None else count - before
        self._same = self._same + 1 if distance and distance == self._distance else 0
        self._distance = distance
        self._since[step] = count
        self._count = count + 1

    def note_gap(self) -> None:
        """Record that a plan was followed, whose steps were not recorded."""
        self.latest = None
        self.recorder.note_gap()
        self._since.clear()
        self._distance = self._same = 0

    def note_chosen(self) -> None:
        """Record a use that depends on data (routing), so that the steps are not taken for a loop.

        A plan would take the memory in which often-routed groups stay.
        """
        self.recorder.note_gap()

    def keeps_views(self, steps: tuple[StepKeys, ...]) -> bool:
        """Return True if views of weights outlive this loop's steps each time."""
        return self.kept_views.get(frozenset(steps), 0) >= LEAVES_BEFORE_REST

    def may_repeat(self) -> bool:
        """Return True if a period may have ended: a cheap test, sometimes wrong.

        A reported period is reported again only after it has passed once more.
        """
        if not self._distance or self._same < self._distance:
            return False
        self._same = 0
        return True


def is_same_loop(left_plan: PlannedLoop | None, steps: tuple[StepKeys, ...]) -> bool:
    """Return True if these are the steps of a known plan, from any starting point."""
    if left_plan is None or len(steps) != left_plan.length:
        return False
    firsts = [number for number, step in enumerate(steps) if step == left_plan.steps[0]]
    return any(steps[first:] + steps[:first] == left_plan.steps for first in firsts)


_all: weakref.WeakSet[Loops] = weakref.WeakSet()


def _forget_in_child() -> None:
    """Drop all plans in a forked child, which has neither disk threads nor device memory."""
    for loops in list(_all):
        loops.runner = None


os.register_at_fork(after_in_child=_forget_in_child)


class Loops:
    """The loops of a store, and the runner of the followed plan."""

    def __init__(
        self, core: Core, lease_table: LeaseTable, leases: Leases, mutable_groups: MutableGroups
    ) -> None:
        self.core = core
        self.runner: LoopRunner | None = None
        persistent = [tier for tier in core.planner.tiers if tier.persistent]
        self.enabled = not core.tiers.host.connected and len(persistent) == 1
        self._lease_table = lease_table
        self._leases = leases
        self._mutable_groups = mutable_groups
        self._threads = threading.local()
        self.refines = True
        self.least_tile: int | None = None  # smallest tile in bytes, for tests
        self._used_by: dict[int, float] = {}
        _all.add(self)

    # For units ---------------------------------------------------------------------------------

    def steps(self) -> ThreadSteps:
        """Return the steps of the calling thread."""
        try:
            found: ThreadSteps = self._threads.steps
        except AttributeError:
            found = self._threads.steps = ThreadSteps()
        return found

    def begin(self, steps: ThreadSteps, keys: StepKeys) -> StepLease | None:
        """Begin a unit that uses these groups.

        Returns a lease of its tensors if a plan is followed. Otherwise returns None, and the caller
        acquires them. The caller must call `end`, with the number of units that were open before.
        """
        step = keys if not steps.open else steps.open[-1] + keys
        steps.open.append(step)
        steps.inner = False
        if steps.runner is not None:
            lease = self._follow(steps, steps.runner, step, keys)
            if lease is not None:
                return lease
        now, thread = time.monotonic(), threading.get_ident()
        self._used_by[thread] = now
        if len(self._used_by) > MAX_THREADS:
            self._used_by = {thread: now}
        steps.note(step, keys)
        if self.enabled and self._may_enter(steps):
            runner = steps.runner = self._enter(steps)
            return None if runner is None else self._follow(steps, runner, step, keys)
        return None

    def end(self, steps: ThreadSteps, depth: int) -> None:
        """End the unit that began when `depth` units were open, after its leases are released.

        May be called again if it was interrupted.
        """
        if len(steps.open) <= depth:
            return  # `begin` was interrupted
        step = steps.open[depth]
        del steps.open[depth:]
        inner, steps.inner = steps.inner, True
        if not inner:
            return
        if steps.runner is not None:
            lease = self._follow(steps, steps.runner, step, ())
            if lease is not None:
                lease.release()
                return
        steps.note(step, ())

    def _follow(
        self, steps: ThreadSteps, runner: LoopRunner, step: StepKeys, keys: StepKeys
    ) -> StepLease | None:
        """Begin the next step of the plan of this thread. Return None if the plan was left."""
        self.core.check_not_capturing()
        if runner.left is not None or self.runner is runner:  # otherwise the process was forked
            lease = runner.begin(step, keys[0] if keys else "")
            if lease is not None:
                return lease
        self._handle_left(steps, runner)
        return None

    def _handle_left(self, steps: ThreadSteps, runner: LoopRunner) -> None:
        left, steps.runner = runner.left, None
        if left is None:
            return
        logger.debug("the plan of a loop was left at step %d: %s", left.step, left.reason)
        planned, steps.planned = steps.planned, None
        steps.note_gap()
        if planned is None:
            return
        if left.reason == VIEW_OUTLIVES_STEP:
            loop = frozenset(planned.steps)
            steps.kept_views[loop] = steps.kept_views.get(loop, 0) + 1
        # Left at the same step as before, for another unit: this is part of a longer loop.
        is_part = left.reason == DIFFERENT_STEP and left.steps == planned.left_after
        planned.mark_left(left.steps)
        steps.left_plan = None if is_part else planned
        if is_part:
            steps.recorder.left(planned.length, left.steps)

    # Planning ----------------------------------------------------------------------------------

    def _may_enter(self, steps: ThreadSteps) -> bool:
        """Return True if a plan is ready whose first step begins now."""
        if steps.planned is None and self._left_loop_repeats(steps):
            steps.planned, steps.after = steps.left_plan, 0
        planned = steps.planned
        if planned is None:
            if steps.may_repeat():
                self._request_plan(steps)
            return False
        if steps.after % planned.length:
            if steps.latest != planned.steps[steps.after % planned.length]:
                steps.planned = None  # the steps differ from the plan
            return False
        if steps.latest != planned.steps[0]:
            steps.planned = None
            return False
        if planned.ready and planned.plan is None:
            return False
        return (
            planned.ready and self.runner is None and not self._other_threads_since(planned.asked)
        )

    def _left_loop_repeats(self, steps: ThreadSteps) -> bool:
        """Return True if the loop whose plan was left has completed a pass since."""
        left_plan = steps.left_plan
        if left_plan is None or steps.latest != left_plan.steps[0]:
            return False
        if not steps.recorder.ends_with(left_plan.steps):
            return False
        if steps.keeps_views(left_plan.steps):
            return False
        if left_plan.rest:
            left_plan.rest -= 1
            return False
        if self._budgets() != left_plan.budgets:
            steps.left_plan = None
        return steps.left_plan is not None

    def _other_threads_since(self, began: float) -> bool:
        """Return True if other threads have used units since then."""
        thread = threading.get_ident()
        for other, latest in list(self._used_by.items()):
            if other != thread and latest > began:
                return True
            if other != thread:
                self._used_by.pop(other, None)
        return False

    def _request_plan(self, steps: ThreadSteps) -> None:
        length = steps.recorder.period(steps.distance)
        if not length:
            return
        names = tuple(steps.recorder.keys(length))
        if steps.keeps_views(names) or is_same_loop(steps.left_plan, names):
            return
        sizes = self._sizes({key for step in names for key in step})
        if sizes is None:
            return
        own = tuple(steps.own[step] for step in names)
        budgets, speeds = self._budgets(), self._speeds()
        planned = PlannedLoop(length, names, own, sizes, budgets, speeds, time.monotonic())
        steps.planned, steps.after = planned, 0
        plan = functools.partial(self._plan, planned)
        self.core.tiers.reader.workers.submit(EARLY, plan)

    @transaction
    def _sizes(self, keys: set[str]) -> dict[str, int] | None:
        """Return the bytes of these groups by key, or None if one cannot be part of a plan.

        Such a group must pass through a ring, but cannot.
        """
        core = self.core
        found, unsaved = {}, False
        for key in keys:
            group = core.current.get(key)
            if group is None:
                return None
            entry = core.mover.entry(group)
            if entry.mutable or entry.use_order is not UseOrder.LEARNED:
                return None
            unsaved |= entry.source is None
            if entry.sticky or core.tiers.top.detached.storages_of(group):
                return None
            found[key] = entry.spec.nbytes
        budget = core.planner.budgets[core.planner.top]
        all_stay = budget is None or sum(found.values()) <= budget
        return None if unsaved and not all_stay else found

    @transaction
    def _budgets(self) -> dict[Tier, int | None]:
        """Return the budget of each memory tier in bytes, less its permanent leases."""
        core = self.core
        planner, top = core.planner, core.planner.top
        kept = dict.fromkeys(planner.budgets, 0)
        for record in core.leases:
            if record.caller is None:
                tier = top if record.host_access is None else Tier.HOST
                kept[tier] += core.mover.entry(record.group).spec.nbytes
        limits = {tier: n for tier, n in planner.budgets.items() if not tier.persistent}
        return {tier: None if n is None else n - kept[tier] for tier, n in limits.items()}

    def _plan(self, planned: PlannedLoop) -> None:
        """Compute a plan, on a disk thread."""
        try:
            self._plan_for(planned, self._seconds(planned))
        except Exception:  # no caller waits for the result
            logger.exception("planning a loop failed")
        planned.ready = True

    def _plan_for(self, planned: PlannedLoop, seconds: list[float]) -> None:
        loop, groups = as_loop(planned.steps, planned.sizes, seconds)
        planned.groups = tuple(groups)
        tile, whole = tile_bytes(planned.budgets, self.least_tile), self._unsplittable(groups)
        planned.plan = plan_loop(loop, planned.budgets, planned.speeds, tile, whole)

    @transaction
    def _unsplittable(self, keys: Sequence[str]) -> set[int]:
        """Return the numbers of the groups that cannot move in tiles."""
        core = self.core
        groups = [core.current.get(key) for key in keys]
        return {
            number
            for number, group in enumerate(groups)
            if group is None or moves_as_a_whole(core, core.mover.entry(group))
        }

    def _speeds(self) -> dict[tuple[Tier, Tier], float]:
        """Return the known bandwidths of hops to memory tiers, in bytes per second."""
        planner = self.core.planner
        memory = in_memory(planner.tiers)
        ways = zip([*memory[1:], Tier.DISK], memory, strict=True)
        bandwidth = {way: planner.bandwidth(*way) for way in ways}
        return {way: speed for way, speed in bandwidth.items() if speed}

    def _request_replan(self, planned: PlannedLoop, runner: LoopRunner) -> None:
        """Plan a loop again, with times measured while its plan was followed.

        The first measurements were made while the planner decided at each use, so the device may
        have waited for it.
        """
        if self.refines and not planned.timed:
            planned.timed = True
            seconds, speed = list(runner.seconds), runner.read_speed
            if speed is not None:
                planned.speeds[Tier.DISK, runner.memory.rings[-1].tier] = speed
            replan = functools.partial(self._replan, planned, seconds)
            self.core.tiers.reader.workers.submit(EARLY, replan)

    def _replan(self, planned: PlannedLoop, seconds: list[float]) -> None:
        """Compute a new plan, and leave the followed one if the new one is better."""
        followed = planned.plan
        assert followed is not None
        try:
            self._plan_for(planned, seconds)
        except Exception:  # no caller waits for the result
            logger.exception("planning a loop again failed")
        by_tier = [planned.speeds.get(way) for way in followed.ways]
        before = seconds_per_pass(followed.timed(seconds), by_tier)
        now = before if planned.plan is None else seconds_per_pass(planned.plan, by_tier)
        if now <= min(MAX_TIME_RATIO * before, before - MIN_SAVED_SECONDS):
            leave = functools.partial(self.core.leave_loop, "there is a better plan")
            transact(self.core, leave)
        else:
            planned.plan = followed

    def _seconds(self, planned: PlannedLoop) -> list[float]:
        """Return the seconds of compute of each step.

        Consecutive steps with the same groups are measured together, and share the time evenly.
        """
        core = self.core
        if core.tiers.device is not None:
            core.tiers.device.times.poll()
        by_key = self._seconds_by_key(planned.sizes)
        seconds = [0.0] * planned.length
        using = [number for number, keys in enumerate(planned.own) if keys]
        for keys, run in itertools.groupby(using, lambda number: planned.own[number]):
            numbers = list(run)
            for number in numbers:
                seconds[number] = sum(by_key[key] for key in keys) / len(numbers)
        return seconds

    @transaction
    def _seconds_by_key(self, keys: Iterable[str]) -> dict[str, float]:
        core = self.core
        self._lease_table.learn()
        found = {key: core.current.get(key) for key in keys}
        return {
            key: 0.0 if group is None else core.planner.computing_seconds(group)
            for key, group in found.items()
        }

    # Entering and leaving ----------------------------------------------------------------------

    def _enter(self, steps: ThreadSteps) -> LoopRunner | None:
        """Enter the plan of this thread. Return None if that is not possible now."""
        planned = steps.planned
        assert planned is not None and planned.plan is not None
        keyed = KeyedPlan(planned.plan, planned.groups, planned.steps, planned.own)
        timed = functools.partial(self._request_replan, planned)
        runner = LoopRunner(self.core, self._lease_table, keyed, self._finished, timed)
        if not runner.memory.find_groups():
            steps.planned = steps.left_plan = None
            return None
        if runner.memory.others_have_leases():
            return None
        self.runner = self.core.followed = runner
        entered = False
        try:
            entered = runner.enter(self)
        except (LoopLeftError, TierStoreError, OSError) as error:
            # The unit that acquires the missing group raises this error.
            logger.debug("the plan of a loop could not be entered: %r", error)
        finally:
            self._leases.end_stream(id(runner))
            if not entered:
                self._finished(runner)
        if not entered:
            planned.mark_left(0)
            steps.left_plan, steps.planned = planned, None
            return None
        return runner

    def _finished(self, runner: LoopRunner) -> None:
        if self.runner is runner:
            self.runner = self.core.followed = None

    # Leases of the runner ------------------------------------------------------------------------

    def lease(self, key: str, tier: Tier, owner: object) -> Lease:
        """See `LeaseSource`."""
        if tier is not self.core.tiers.top.tier:
            return self._mutable_groups.lease_in_host(key, HostAccess.READ, owner)
        return self._leases.acquire_for_plan(owner, key)
