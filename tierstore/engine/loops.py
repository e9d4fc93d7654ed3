"""Sees that a thread repeats its steps, has them planned, and follows the plan.

A *step* is what a unit borrows: the keys of its groups, and those of the units that it is in. A
unit says when it begins and ends; nobody decides anything for it while a plan is followed. A thread
that has gone through the same steps twice has its loop planned, on a thread of the disk's, and
enters the plan at the beginning of a pass. Whatever does not fit leaves it again (`LoopRunner`).

One plan is followed at a time, and only while no other thread uses units.
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
from tierstore.engine.loop_runner import ANOTHER_STEP, VIEW_IS_KEPT, LoopRunner, StepLease
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

THREADS = 256
"""Threads that are remembered to have used units."""
FORGOTTEN = 8192
"""Different steps of one thread after which all are forgotten."""
LEAVES = 3
"""A plan that was left so often, each time within a pass, rests before it is entered again. One
that was left so often because views of weights were kept is not entered any more."""
BETTER = 0.97
"""A plan is left for another one whose passes take so much of its time, or less, and take less by
`SAVED` seconds: entering it takes about as long as a pass."""
SAVED = 0.01
LONGEST_REST = 4
"""It rests for two passes, then for four, and so on, so many times doubled at most."""


@dataclass
class Planned:
    """The plan of a loop, which names `groups` by number, or that there is none."""

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
    early: int = 0  # how often it was left within a pass, one time after the other
    rest: int = 0  # passes before it is entered again
    left_after: int = -1  # steps for which it was followed
    timed: bool = False  # while it was followed

    def left(self, steps: int) -> None:
        """It was left after so many steps, or could not be entered."""
        self.early = self.early + 1 if steps < self.length else 0
        resting = self.early - LEAVES
        self.rest = 0 if resting <= 0 else 1 << min(resting, LONGEST_REST)
        self.left_after = steps
        self.asked = time.monotonic()


class ThreadSteps:
    """The steps of one thread. Only that thread has it."""

    def __init__(self, running: list[StepKeys] | None = None) -> None:
        self.open: list[StepKeys] = running or []  # of the units that run, with those they are in
        self.inner = False  # whether a unit in the innermost open one has run
        self.recorder = LoopRecorder()
        self.own: dict[StepKeys, StepKeys] = {}  # of the unit that began, by step
        self.latest: StepKeys | None = None
        self.after = 0  # steps since the plan was asked for
        self.planned: Planned | None = None
        self.runner: LoopRunner | None = None  # of the plan that is followed
        self.known: Planned | None = None  # the plan that was left
        self.kept_views: dict[frozenset[StepKeys], int] = {}  # by loop: it was left for so many
        self._since: dict[StepKeys, int] = {}
        self._distance = self._same = self._count = 0

    @property
    def distance(self) -> int:
        """Steps since the latest one came before, where those that follow each other with the same
        keys count once: so many a period has at least."""
        return self._distance

    def note(self, step: StepKeys, own: StepKeys) -> None:
        """A step begins, and the one before it is over."""
        if len(self.own) > FORGOTTEN:  # of models that are gone, or are edited all the time
            self.__init__(self.open)  # type: ignore[misc]
        if self.latest is not None:
            self.recorder.note(self.latest)
            self.after += 1
        again = step == self.latest
        self.own[step] = own
        self.latest = step
        if again:  # units that follow each other may be in one group
            return
        count, before = self._count, self._since.get(step)
        distance = 0 if before is None else count - before
        self._same = self._same + 1 if distance and distance == self._distance else 0
        self._distance = distance
        self._since[step] = count
        self._count = count + 1

    def interrupted(self) -> None:
        """Note that a plan was followed, whose steps were not noted."""
        self.latest = None
        self.recorder.interrupted()
        self._since.clear()
        self._distance = self._same = 0

    def note_chosen(self) -> None:
        """Note a use that data chose. Steps with one of these are no loop: a plan would take the
        memory in which groups that are often chosen stay."""
        self.recorder.interrupted()

    def keeps_views(self, steps: tuple[StepKeys, ...]) -> bool:
        """Whether this loop keeps views of weights, each time. They would have to be copied."""
        return self.kept_views.get(frozenset(steps), 0) >= LEAVES

    def may_repeat(self) -> bool:
        """Whether a period may have come to its end: cheap, and sometimes wrong. A period that was
        told of is told of again when it has passed once more."""
        if not self._distance or self._same < self._distance:
            return False
        self._same = 0
        return True


def is_known(known: Planned | None, steps: tuple[StepKeys, ...]) -> bool:
    """Return whether these are the steps of a plan, from whichever on."""
    if known is None or len(steps) != known.length:
        return False
    firsts = [number for number, step in enumerate(steps) if step == known.steps[0]]
    return any(steps[first:] + steps[:first] == known.steps for first in firsts)


_all: weakref.WeakSet[Loops] = weakref.WeakSet()


def _forget_in_child() -> None:
    """A fork has none of the threads that read, nor the memory of a device."""
    for loops in list(_all):
        loops.runner = None


os.register_at_fork(after_in_child=_forget_in_child)


class Loops:
    """The loops of a store, and the runner of the one that is followed."""

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
        self.least_tile: int | None = None  # bytes, for tests
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
        """Begin a unit that uses these groups. Afterwards `end` has to be called, with the number
        of units that were open before.

        Returns its tensors if a plan is followed. Else they are to be acquired.
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
        if len(self._used_by) > THREADS:
            self._used_by = {thread: now}
        steps.note(step, keys)
        if self.enabled and self._looks_for_a_plan(steps):
            runner = steps.runner = self._enter(steps)
            return None if runner is None else self._follow(steps, runner, step, keys)
        return None

    def end(self, steps: ThreadSteps, depth: int) -> None:
        """End the unit that began when so many were open, after its leases were released. May be
        called again if it was interrupted."""
        if len(steps.open) <= depth:
            return  # it did not come to begin
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
        """Begin the next step of the plan that this thread follows. None if the plan was left."""
        self.core.refuse_capture()
        if runner.left is not None or self.runner is runner:  # else the process was forked
            lease = runner.begin(step, keys[0] if keys else "")
            if lease is not None:
                return lease
        self._was_left(steps, runner)
        return None

    def _was_left(self, steps: ThreadSteps, runner: LoopRunner) -> None:
        left, steps.runner = runner.left, None
        if left is None:
            return
        logger.debug("the plan of a loop was left at step %d: %s", left.step, left.reason)
        planned, steps.planned = steps.planned, None
        steps.interrupted()
        if planned is None:
            return
        if left.reason == VIEW_IS_KEPT:
            loop = frozenset(planned.steps)
            steps.kept_views[loop] = steps.kept_views.get(loop, 0) + 1
        # Left after as many steps as before, for another unit: this is a part of a longer loop.
        is_part = left.reason == ANOTHER_STEP and left.steps == planned.left_after
        planned.left(left.steps)
        steps.known = None if is_part else planned
        if is_part:
            steps.recorder.left(planned.length, left.steps)

    # Planning ----------------------------------------------------------------------------------

    def _looks_for_a_plan(self, steps: ThreadSteps) -> bool:
        """Whether there is a plan whose first step is the one that begins."""
        if steps.planned is None and self._is_back(steps):
            steps.planned, steps.after = steps.known, 0
        planned = steps.planned
        if planned is None:
            if steps.may_repeat():
                self._ask_for_a_plan(steps)
            return False
        if steps.after % planned.length:
            if steps.latest != planned.steps[steps.after % planned.length]:
                steps.planned = None  # it goes on in another way
            return False
        if steps.latest != planned.steps[0]:
            steps.planned = None
            return False
        if planned.ready and planned.plan is None:
            return False
        return planned.ready and self.runner is None and not self._others_since(planned.asked)

    def _is_back(self, steps: ThreadSteps) -> bool:
        """Whether a pass of the loop that was left has been gone through, and the next begins."""
        known = steps.known
        if known is None or steps.latest != known.steps[0]:
            return False
        if not steps.recorder.ends_with(known.steps):
            return False
        if steps.keeps_views(known.steps):
            return False
        if known.rest:
            known.rest -= 1
            return False
        if self._budgets() != known.budgets:
            steps.known = None
        return steps.known is not None

    def _others_since(self, began: float) -> bool:
        """Whether other threads have used units since then."""
        thread = threading.get_ident()
        for other, latest in list(self._used_by.items()):
            if other != thread and latest > began:
                return True
            if other != thread:
                self._used_by.pop(other, None)
        return False

    def _ask_for_a_plan(self, steps: ThreadSteps) -> None:
        length = steps.recorder.period(steps.distance)
        if not length:
            return
        names = tuple(steps.recorder.keys(length))
        if steps.keeps_views(names) or is_known(steps.known, names):
            return
        sizes = self._sizes({key for step in names for key in step})
        if sizes is None:
            return
        own = tuple(steps.own[step] for step in names)
        budgets, speeds = self._budgets(), self._speeds()
        planned = Planned(length, names, own, sizes, budgets, speeds, time.monotonic())
        steps.planned, steps.after = planned, 0
        plan = functools.partial(self._plan, planned)
        self.core.tiers.reader.workers.submit(EARLY, plan)

    @transaction
    def _sizes(self, keys: set[str]) -> dict[str, int] | None:
        """Return the bytes of these groups; None if one of them has to pass through a ring, but
        cannot."""
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
            if entry.sticky or core.tiers.top.left.storages_of(group):
                return None
            found[key] = entry.spec.nbytes
        budget = core.planner.budgets[core.planner.top]
        all_stay = budget is None or sum(found.values()) <= budget
        return None if unsaved and not all_stay else found

    @transaction
    def _budgets(self) -> dict[Tier, int | None]:
        """The bytes of each tier in memory that nobody has for good."""
        core = self.core
        planner, top = core.planner, core.planner.top
        kept = dict.fromkeys(planner.budgets, 0)
        for record in core.leases:
            if record.caller is None:
                tier = top if record.held is None else Tier.HOST
                kept[tier] += core.mover.entry(record.group).spec.nbytes
        limits = {tier: n for tier, n in planner.budgets.items() if not tier.persistent}
        return {tier: None if n is None else n - kept[tier] for tier, n in limits.items()}

    def _plan(self, planned: Planned) -> None:
        """Compute a plan, on a thread of the disk's."""
        try:
            self._plan_for(planned, self._seconds(planned))
        except Exception:  # nobody waits for it
            logger.exception("planning a loop failed")
        planned.ready = True

    def _plan_for(self, planned: Planned, seconds: list[float]) -> None:
        loop, groups = as_loop(planned.steps, planned.sizes, seconds)
        planned.groups = tuple(groups)
        tile, whole = tile_bytes(planned.budgets, self.least_tile), self._whole(groups)
        planned.plan = plan_loop(loop, planned.budgets, planned.speeds, tile, whole)

    @transaction
    def _whole(self, keys: Sequence[str]) -> set[int]:
        """Return the numbers of the groups that may not move in tiles."""
        core = self.core
        groups = [core.current.get(key) for key in keys]
        return {
            number
            for number, group in enumerate(groups)
            if group is None or moves_as_a_whole(core, core.mover.entry(group))
        }

    def _speeds(self) -> dict[tuple[Tier, Tier], float]:
        """Return the bytes per second of each way to a tier in memory, as far as it is known."""
        planner = self.core.planner
        memory = in_memory(planner.tiers)
        ways = zip([*memory[1:], Tier.DISK], memory, strict=True)
        bandwidth = {way: planner.bandwidth(*way) for way in ways}
        return {way: speed for way, speed in bandwidth.items() if speed}

    def _timed(self, planned: Planned, runner: LoopRunner) -> None:
        """Plan a loop anew with times of passes that followed its plan. The first ones were
        measured while the host decided at each use, and the device may have waited for it."""
        if self.refines and not planned.timed:
            planned.timed = True
            seconds, speed = list(runner.seconds), runner.read_speed
            if speed is not None:
                planned.speeds[Tier.DISK, runner.memory.rings[-1].tier] = speed
            plan_anew = functools.partial(self._plan_anew, planned, seconds)
            self.core.tiers.reader.workers.submit(EARLY, plan_anew)

    def _plan_anew(self, planned: Planned, seconds: list[float]) -> None:
        """Leave a plan for a better one, if there is one."""
        followed = planned.plan
        assert followed is not None
        try:
            self._plan_for(planned, seconds)
        except Exception:  # nobody waits for it
            logger.exception("planning a loop anew failed")
        by_tier = [planned.speeds.get(way) for way in followed.ways]
        before = seconds_per_pass(followed.timed(seconds), by_tier)
        now = before if planned.plan is None else seconds_per_pass(planned.plan, by_tier)
        if now <= min(BETTER * before, before - SAVED):
            leave = functools.partial(self.core.leave_loop, "there is a better plan")
            transact(self.core, leave)
        else:
            planned.plan = followed

    def _seconds(self, planned: Planned) -> list[float]:
        """Return for how long each step computes. Those that follow each other with the same groups
        have been measured together."""
        core = self.core
        if core.tiers.device is not None:
            core.tiers.device.times.look()
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
        """Enter the plan of this thread. None if that cannot be done now."""
        planned = steps.planned
        assert planned is not None and planned.plan is not None
        keyed = KeyedPlan(planned.plan, planned.groups, planned.steps, planned.own)
        timed = functools.partial(self._timed, planned)
        runner = LoopRunner(self.core, self._lease_table, keyed, self._over, timed)
        if not runner.memory.find_groups():
            steps.planned = steps.known = None
            return None
        if runner.memory.others_have_leases():
            return None
        self.runner = self.core.followed = runner
        entered = False
        try:
            entered = runner.enter(self)
        except (LoopLeftError, TierStoreError, OSError) as error:
            # Whoever needs what is missing raises it.
            logger.debug("the plan of a loop could not be entered: %r", error)
        finally:
            self._leases.end_stream(id(runner))
            if not entered:
                self._over(runner)
        if not entered:
            planned.left(0)
            steps.known, steps.planned = planned, None
            return None
        return runner

    def _over(self, runner: LoopRunner) -> None:
        if self.runner is runner:
            self.runner = self.core.followed = None

    # What a runner borrows -----------------------------------------------------------------------

    def lease(self, key: str, tier: Tier, owner: object) -> Lease:
        """See `LeaseSource`."""
        if tier is not self.core.tiers.top.tier:
            return self._mutable_groups.lease_in_host(key, HostAccess.READ, owner)
        return self._leases.acquire_for_plan(owner, key)
