"""Sees that a thread repeats its steps, has them planned, and follows the plan.

A *step* is what a unit borrows: the keys of its groups, and those of the units that it is in. A
unit says when it begins and ends; nobody decides anything for it while a plan is followed. A thread
that has gone through the same steps twice has its loop planned, on a thread of the disk's, and
enters the plan at the beginning of a pass. Whatever does not fit leaves it again (`LoopRunner`).

One plan is followed at a time, and only while no other thread uses units.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
import weakref
from dataclasses import dataclass

from tierstore.engine.core import Core, LoopLeftError
from tierstore.engine.lease_table import LeaseTable
from tierstore.engine.leases import Leases
from tierstore.engine.loop_memory import KeyedPlan, StepKeys
from tierstore.engine.loop_runner import LoopRunner, StepLease
from tierstore.engine.mutable_groups import MutableGroups
from tierstore.engine.transaction import transaction
from tierstore.lease import Lease
from tierstore.model.errors import TierStoreError
from tierstore.model.locks import RLock
from tierstore.model.tiers import HostAccess, Tier, UseOrder, in_memory
from tierstore.plan.loop_plan import Loop, LoopPlan
from tierstore.plan.loop_planner import plan_loop
from tierstore.plan.loop_recorder import LoopRecorder
from tierstore.tiers.workers import EARLY

logger = logging.getLogger("tierstore.engine")

THREADS = 256
"""Threads that are remembered to have used units."""
FORGOTTEN = 8192
"""Different steps of one thread after which all are forgotten."""
LEAVES = 3
"""A loop that was left so often, each time within a pass, is not followed any more."""


@dataclass
class Planned:
    """The plan of a loop, or that there is none. `loop` names `groups` by number."""

    length: int
    steps: tuple[StepKeys, ...]
    own: tuple[StepKeys, ...]
    groups: tuple[str, ...]
    loop: Loop
    budgets: dict[Tier, int | None]
    asked: float
    ready: bool = False
    plan: LoopPlan | None = None


class ThreadSteps:
    """The steps of one thread. Only that thread has it."""

    def __init__(self, running: list[StepKeys] | None = None) -> None:
        self.open: list[StepKeys] = running or []  # of the units that run, with those they are in
        self.inner = False  # whether a unit in the innermost open one has run
        self.recorder = LoopRecorder()
        self.own: dict[StepKeys, StepKeys] = {}  # of the unit that began, by step
        self.latest: StepKeys | None = None
        self.begun = 0.0
        self.after = 0  # steps since the plan was asked for
        self.planned: Planned | None = None
        self.barred: dict[tuple[StepKeys, ...], int] = {}  # loops that were left at once
        self._since: dict[StepKeys, int] = {}
        self._distance = self._same = self._count = 0

    @property
    def distance(self) -> int:
        """Steps since the latest one came before, where those that follow each other with the same
        keys count once: so many a period has at least."""
        return self._distance

    def note(self, step: StepKeys, own: StepKeys, now: float) -> None:
        """A step begins, and the one before it is over."""
        if len(self.own) > FORGOTTEN:  # of models that are gone, or are edited all the time
            self.__init__(self.open)  # type: ignore[misc]
        if self.latest is not None:
            self.recorder.note(self.latest, now - self.begun)
            self.after += 1
        again = step == self.latest
        self.own[step] = own
        self.latest, self.begun = step, now
        if again:  # units that follow each other may be in one group
            return
        count, before = self._count, self._since.get(step)
        distance = 0 if before is None else count - before
        self._same = self._same + 1 if distance and distance == self._distance else 0
        self._distance = distance
        self._since[step] = count
        self._count = count + 1

    def may_repeat(self) -> bool:
        """Whether a period may have come to its end: cheap, and sometimes wrong. A period that was
        told of is told of again when it has passed once more."""
        if not self._distance or self._same < self._distance:
            return False
        self._same = 0
        return True


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
        self.enabled = core.settings.tiers.link is None and len(persistent) == 1
        self._lease_table = lease_table
        self._leases = leases
        self._mutable_groups = mutable_groups
        self._threads = threading.local()
        self._lock = RLock()
        self._followed_by = 0
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
        runner, thread = self.runner, threading.get_ident()
        if runner is not None and self._followed_by == thread:
            self.core.refuse_capture()
            lease = runner.begin(step, keys[0] if keys else "")
            if lease is not None:
                return lease
            self._was_left(steps, runner)
        now = time.monotonic()
        self._used_by[thread] = now
        if len(self._used_by) > THREADS:
            self._used_by = {thread: now}
        steps.note(step, keys, now)
        if self.enabled and self._looks_for_a_plan(steps) and self._enter(steps, thread):
            assert self.runner is not None
            return self.runner.begin(step, keys[0] if keys else "")
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
        runner, thread = self.runner, threading.get_ident()
        if runner is not None and self._followed_by == thread:
            lease = runner.begin(step, "")
            if lease is not None:
                lease.release()
                return
            self._was_left(steps, runner)
        steps.note(step, (), time.monotonic())

    def _was_left(self, steps: ThreadSteps, runner: LoopRunner) -> None:
        left = runner.left
        assert left is not None
        logger.debug("the plan of a loop was left at step %d: %s", left.step, left.reason)
        planned, steps.planned = steps.planned, None
        if planned is not None:
            loop = planned.steps
            if left.always:
                steps.barred[loop] = LEAVES
            elif left.steps < planned.length:
                steps.barred[loop] = steps.barred.get(loop, 0) + 1
                steps.recorder.left(planned.length, left.steps)
        steps.latest = None

    # Planning ----------------------------------------------------------------------------------

    def _looks_for_a_plan(self, steps: ThreadSteps) -> bool:
        """Whether there is a plan whose first step is the one that begins."""
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
        sizes = self._sizes({key for step in names for key in step})
        if sizes is None or steps.barred.get(names, 0) >= LEAVES:
            return
        loop, groups = steps.recorder.loop(length, sizes)
        budgets = self._budgets()
        own = tuple(steps.own[step] for step in names)
        planned = Planned(length, names, own, tuple(groups), loop, budgets, time.monotonic())
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
        core = self.core
        try:
            memory = in_memory(core.planner.tiers)
            ways = list(zip([*memory[1:], Tier.DISK], memory, strict=True))
            bandwidth = {way: core.planner.bandwidth(*way) for way in ways}
            known = {way: speed for way, speed in bandwidth.items() if speed}
            whole = max(planned.loop.sizes)
            planned.plan = plan_loop(planned.loop, planned.budgets, known, whole)
        except Exception:  # nobody waits for it
            logger.exception("planning a loop failed")
        planned.ready = True

    # Entering and leaving ----------------------------------------------------------------------

    def _enter(self, steps: ThreadSteps, thread: int) -> bool:
        planned = steps.planned
        assert planned is not None and planned.plan is not None
        keyed = KeyedPlan(planned.plan, planned.groups, planned.steps, planned.own)
        runner = LoopRunner(self.core, self._lease_table, keyed, self._over)
        if not runner.memory.find_groups():
            steps.planned = None
            return False
        if runner.memory.others_have_leases():
            return False  # not now
        self._followed_by, self.runner = thread, runner
        self.core.followed = runner
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
            steps.barred[planned.steps] = steps.barred.get(planned.steps, 0) + 1
            steps.planned = None
            return False
        return True

    def _over(self, runner: LoopRunner) -> None:
        if self.runner is runner:
            self.runner = self.core.followed = None

    # What a runner borrows -----------------------------------------------------------------------

    def lease(self, key: str, tier: Tier, owner: object) -> Lease:
        """See `LeaseSource`."""
        if tier is not self.core.tiers.top.tier:
            return self._mutable_groups.lease_in_host(key, HostAccess.READ, owner)
        return self._leases.acquire_for_plan(owner, key)
