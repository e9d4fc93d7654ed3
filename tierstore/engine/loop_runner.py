"""Follow the plan of a loop: at each step, make exactly the copies that the plan lists.

A plan (`tierstore.plan.loop_plan`) gives, for every step of a loop, the addresses of its groups on
the fastest tier, and the copies that may begin once the step has ended. While a plan is followed,
nothing is decided, no lock of the store is taken, and no object is created for a group. The planner
sees only this:

- *Groups that stay resident* are leased where they are, until the plan is left.
- *All other groups pass through a ring*: memory reserved on each tier (`events.MemoryBorrowed`).
  The planner does not track its contents: for it, those groups are on disk, or in host memory if
  they stay there.

Some calls leave the plan first (`leave`): a request for a group that is not resident, a put, a
change or discard of a group of the loop, or other work on the loop's thread. Then no further copy
begins. The leases end, and the memory is freed once its last copy and the step that uses it have
ended. The planner takes over; its records have stayed correct.

For steps, see `tierstore.engine.loops`.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto

import torch

from tierstore.engine.core import Core
from tierstore.engine.lease_table import LeaseTable
from tierstore.engine.loop_memory import KeyedPlan, LeaseSource, LoopMemory, LoopRing, StepKeys
from tierstore.engine.transaction import transact
from tierstore.engine.wait_queue import POLL_SECONDS, caller
from tierstore.model.locks import AutoResetEvent, RLock, check_may_wait, under
from tierstore.model.tiers import Tier
from tierstore.observe.device_times import Mark
from tierstore.observe.journal import STALL, FollowedPlan, LeaseUse, Span, hop
from tierstore.plan.loop_follower import LoopFollower
from tierstore.plan.loop_plan import Resident, TileCopy
from tierstore.system.files import READ_BLOCK
from tierstore.system.streams import stream_context
from tierstore.tiers.device_tier import copy_all
from tierstore.tiers.mover import without_frames
from tierstore.tiers.workers import EARLY

READS = 4
"""Maximum number of tiles that are read at the same time."""

DIFFERENT_STEP = "a different step began"
VIEW_OUTLIVES_STEP = "a view of a weight outlives its step"


class _Begun(Enum):
    """Outcome of beginning a step: it follows the plan, or the plan was left."""

    FOLLOWED = auto()
    LEFT = auto()


class StepLease:
    """A lease of a unit's tensors, for one step of a followed plan. It is never revoked."""

    __slots__ = ("_runner", "_steps", "key", "released", "tensors")

    def __init__(
        self, runner: LoopRunner, key: str, tensors: dict[str, torch.Tensor], steps: int
    ) -> None:
        self._runner = runner
        self._steps = steps
        self.key = key
        self.tensors = tensors
        self.released = False

    def release(self) -> None:
        """End the lease, once the unit has run. A second call does nothing."""
        if not self.released:
            self.released = True
            self.tensors = {}  # first: the end of the step checks for remaining views
            self._runner.end(self._steps)


@dataclass
class PlanExit:
    """The end of a followed plan: at step `step` of a pass, after `steps` in total."""

    step: int
    steps: int
    reason: str


class LoopRunner:
    """Follows a plan for the thread that creates it.

    Calls `on_finished`, on any thread, when all memory is freed, and `on_timed` when a device has
    completed two passes.
    """

    def __init__(
        self,
        core: Core,
        lease_table: LeaseTable,
        keyed: KeyedPlan,
        on_finished: Callable[[LoopRunner], None],
        on_timed: Callable[[LoopRunner], None],
    ) -> None:
        self.core = core
        plan = keyed.plan
        self.steps = keyed.steps
        self.keys = frozenset(keyed.groups)
        self.left: PlanExit | None = None
        self.follower = LoopFollower(plan)
        self.memory = LoopMemory(core, lease_table, keyed)
        self._journal = core.mover.journal
        self._counts = core.observer.counts_of_loops
        self._followed = FollowedPlan(len(self.steps), 0.0)
        self._on_finished = on_finished
        self._on_timed = on_timed
        self._lease_table = lease_table
        self._device = core.tiers.device
        self._lock = RLock()
        self._arrived = AutoResetEvent()
        self._entering = 0  # the thread that is entering, or 0
        self._thread = threading.get_ident()
        self._owner: object = None  # owner of the step's leases, if the plan was left in a step
        self._in_step = False
        self._uses: list[LeaseUse] = []  # of the running step
        self.seconds = [0.0] * len(plan.steps)  # latest compute time of each step on the device
        self._steps_done, self._done_at = 0, 0.0
        self._bytes_read, self._seconds_read, self._read_at = 0, 0.0, 0.0
        self._waited: tuple[Mark, ...] = ()  # begin and end of a wait for copies on the device
        self._reading = self._bytes_reading = 0
        self._read: set[int] = set()  # numbers of reads that finished out of order
        self._memory_freed = False
        self.step_marks: list[Mark | None] = [None] * len(plan.steps)
        self._copy_marks: list[Mark | None] = [None] * len(plan.top.copies)

    # Entering ----------------------------------------------------------------------------------

    def enter(self, source: LeaseSource) -> bool:
        """Load all groups to their places before the first step of the plan. Blocks until done.

        Returns False if there is not enough memory, or if another caller needs it: then nothing has
        changed. Raises the errors of `TierStore.acquire`; then all leases have ended.
        """
        self._entering = threading.get_ident()
        try:
            entered = self._bring(source)
        except BaseException:
            self.left = self.left or PlanExit(0, 0, "the plan could not be entered")
            raise
        finally:
            self._entering = 0
            self._free_if_finished()
        return entered

    def _bring(self, source: LeaseSource) -> bool:
        if not self.memory.enter(source, self):
            self.left = PlanExit(0, 0, "there is not enough memory")
            return False
        self._followed.start = time.monotonic()
        under(self._lock, self._advance_if_followed)
        if self.left is not None:
            return False
        self._journal.plans.add(self._followed)
        return True

    # Steps -------------------------------------------------------------------------------------

    def begin(self, step: StepKeys, key: str) -> StepLease | None:
        """Begin the next step. Blocks until its groups are resident. None: the plan was left."""
        asked = time.monotonic()
        begin = functools.partial(self._begin, step)
        began = under(self._lock, begin)
        late = began is None
        if began is None:
            began = self._wait(begin, key)
        if began is _Begun.LEFT:
            self._free_if_finished()
            return None
        number, arrivals = self.follower.steps % len(self.steps), self.follower.arrivals
        uses = self._uses = [
            LeaseUse(group, self._thread, "hit", asked, nbytes, asked)
            for group, nbytes in self.memory.used[number]
        ]
        if self._device is not None and arrivals:
            late |= self._order_after(arrivals)
        for use in uses:
            if late:
                use.met, use.granted = "late", time.monotonic()
            self._journal.uses.add(use)
        self._counts["late" if late else "hit"] += len(uses)
        return StepLease(self, key, self.memory.views[number].tensors, self.follower.steps)

    def _begin(self, step: StepKeys) -> _Begun | None:
        """Begin the step if its groups are resident. Return None if they are not yet."""
        if step != self.steps[(self.follower.steps + self._in_step) % len(self.steps)]:
            self._leave(DIFFERENT_STEP)
        if self._in_step:  # the step of the enclosing unit, which may hold views
            self._end()
        if self.left is not None:
            return _Begun.LEFT
        arrivals = self.follower.arrivals
        if arrivals and not self._have_arrived(arrivals):
            self._arrived.clear()
            return None
        self._in_step = True
        return _Begun.FOLLOWED

    def _have_arrived(self, arrivals: int) -> bool:
        """Return True if this many copies have ended; on a device, if they are queued."""
        counts = self.follower.ended if self._device is None else self.follower.begun
        return counts[0] >= arrivals

    def _order_after(self, arrivals: int) -> bool:
        """Make the current stream wait for this many copies. Return False if they have ended."""
        mark, device = self._copy_marks[(arrivals - 1) % len(self._copy_marks)], self._device
        stream = self.core.current_stream()
        assert mark is not None and stream is not None and device is not None
        if mark.event.query():
            return False
        before = device.times.mark(stream)
        stream.wait_event(mark.event)
        self._waited = before, device.times.mark(stream)
        return True

    def _wait(self, begin: Callable[[], _Begun | None], key: str) -> _Begun:
        check_may_wait()
        stall = Span(STALL, key, note="late")
        self._journal.begin(stall)
        try:
            while (began := under(self._lock, begin)) is None:
                self._arrived.wait(POLL_SECONDS)
            return began
        except BaseException:
            under(self._lock, functools.partial(self._leave, "a wait was interrupted"))
            raise
        finally:
            self._journal.end(stall)

    def end(self, steps: int) -> None:
        """End the step that began after `steps` steps: on a device, its work is queued.

        Does nothing if the beginning of the next step has ended it.
        """
        under(self._lock, functools.partial(self._end_once, steps))
        self._free_if_finished()

    def _end_once(self, steps: int) -> None:
        if self._in_step and self.follower.steps == steps:
            self._end()

    def _end(self) -> None:
        number = self.follower.steps % len(self.steps)
        self._in_step = False
        try:
            uses, now = self._uses, time.monotonic()
            for use in uses:
                use.released = now
            if self._device is not None:
                mark = self._device.times.mark(self.core.current_stream())
                self.step_marks[number] = mark
                done = functools.partial(self._done, number, uses)
                self._device.times.notify(done, *self._waited, mark)
                self._waited = ()
            self.follower.step_ended()
            passing = self.memory.views[number].passing if self.left is None else ()
            if any([views.are_in_use() for views in passing]):
                self._leave(VIEW_OUTLIVES_STEP)
            self._advance_if_followed()
        except BaseException:  # the counters may be inconsistent
            self._leave("a step was interrupted")
            raise

    def _done(self, number: int, uses: list[LeaseUse], times: list[float]) -> None:
        """Record that the device has completed a step, possibly after a wait for copies."""
        late = [use.granted for use in uses if use.met == "late"]
        began, self._done_at = max([self._done_at, *times[1:-1], *late]), times[-1]
        self.seconds[number] = max(self._done_at - began, 0.0)
        self._steps_done += 1
        if self._steps_done == 2 * len(self.steps):
            self._on_timed(self)
        for use in uses:
            use.done = times[-1]
        if len(times) > 1:
            for use in uses:
                use.ready = times[1]
            key = uses[0].group.key if uses else ""
            self._journal.end_between(Span(STALL, key, note="late"), times[:2])

    # Copies ------------------------------------------------------------------------------------

    def _advance_if_followed(self) -> None:
        """Begin the copies that may begin now, unless the plan was left."""
        if self.left is None:
            self._advance()

    def _advance(self) -> None:
        if self._device is not None:
            self._queue()
        last = len(self.memory.rings) - 1
        while self._may_read() and (copy := self.follower.next_copy(last)) is not None:
            number = self.follower.begun[last]
            self.follower.copy_begun(last)
            self._reading += 1
            self._bytes_reading += copy.nbytes
            read = functools.partial(self._read_tile, number)
            self.core.tiers.reader.workers.submit(EARLY, read)

    def _may_read(self) -> bool:
        """Return True if one more read may begin.

        Two large concurrent reads would share the disk, and delay the one that is needed first.
        """
        return self._reading < READS and self._bytes_reading <= READ_BLOCK

    def _queue(self) -> None:
        """Queue the copies to the device that may begin now."""
        device, follower = self._device, self.follower
        assert device is not None
        copy = follower.next_copy(0)
        if copy is None:
            return
        waited: Mark | None = None
        moved, began = 0, device.times.mark(device.up)
        with stream_context(device.up):
            while copy is not None:
                number = follower.begun[0] % len(self._copy_marks)
                mark = self.step_marks[copy.after]  # of the pass before, if that is negative
                if mark is not None and mark is not waited:
                    device.up.wait_event(mark.event)
                    waited = mark
                slot, places = self.memory.copies[number]
                slot.while_locked(functools.partial(copy_all, places))
                self._copy_marks[number] = ended = device.times.mark(device.up)
                moved += copy.nbytes
                follower.copy_begun(0)
                follower.copy_ended(0)
                copy = follower.next_copy(0)
        span = Span(hop(Tier.HOST, Tier.DEVICE), self.memory.rings[0].entry.group.key, moved)
        self._journal.count(span.kind, moved)
        device.times.notify(functools.partial(self._journal.end_between, span), began, ended)

    def _read_tile(self, number: int) -> None:
        """Read a tile into the ring, on a disk thread."""
        last = len(self.memory.rings) - 1
        ring = self.memory.rings[last]
        copies = ring.planned.copies
        copy = copies[number % len(copies)]
        began, error = 0.0, None
        try:
            began = self._read_into(ring, copy)
        except BaseException as caught:
            error = without_frames(caught)  # the traceback must not keep the memory alive
        under(self._lock, functools.partial(self._read_ended, number, copy.nbytes, began, error))
        self._free_if_finished()

    def _read_ended(
        self, number: int, nbytes: int, began: float, error: BaseException | None
    ) -> None:
        last, now = len(self.memory.rings) - 1, time.monotonic()
        self._reading -= 1
        self._bytes_reading -= nbytes
        if error is None:  # parallel reads share the disk
            self._bytes_read += nbytes
            self._seconds_read += now - max(began, self._read_at)
        self._read_at = now
        if error is not None:
            self._leave("a read failed")
        self._read.add(number)
        while self.follower.ended[last] in self._read:
            self._read.remove(self.follower.ended[last])
            self.follower.copy_ended(last)
        self._advance_if_followed()
        self._arrived.set()

    def _read_into(self, ring: LoopRing, copy: TileCopy) -> float:
        """Read a tile once its memory is free. Return the time at which the read began."""
        if self._device is not None:
            mark = self._copy_marks[copy.after]
            if mark is not None:  # the device may still read the old contents
                mark.event.synchronize()
        began = time.monotonic()
        self.memory.read(ring, Resident(copy.group, copy.offset, copy.nbytes, copy.target))
        return began

    @property
    def read_speed(self) -> float | None:
        """Read bandwidth so far, in bytes per second; None before the first read."""
        return self._bytes_read / self._seconds_read if self._seconds_read else None

    # Leaving -----------------------------------------------------------------------------------

    def reserved_bytes(self) -> Iterator[tuple[Tier, int]]:
        """See `FollowedLoop`."""
        if not self._memory_freed:
            yield from ((ring.tier, ring.nbytes) for ring in self.memory.rings)

    def leave(self, reason: str) -> None:
        """Stop following the plan. Never waits. Part of a transaction."""
        if self._entering == threading.get_ident():
            return  # the call comes from entering the plan
        if under(self._lock, functools.partial(self._leave_now, reason)):
            self.free_memory()
            self._on_finished(self)

    def _leave_now(self, reason: str) -> bool:
        """Leave the plan. Return True if the caller must free the memory now."""
        news = self.left is None
        self._leave(reason)
        if self._entering:
            return False
        if self._in_step and news:
            self._yield_memory()
        return self._claim_finish()

    def _claim_finish(self) -> bool:
        """Return True, only once, if the plan was left and no step, read or copy is in progress."""
        is_last = self.left is not None and not (
            self._in_step or self._reading or self._memory_freed
        )
        self._memory_freed = self._memory_freed or is_last
        return is_last

    def _yield_memory(self) -> None:
        """Release all leases that the running step does not use. Part of a transaction.

        If the step runs on this thread, this caller becomes the owner of the remaining leases, so
        that waiting for their memory is detected as a deadlock.
        """
        memory, core = self.memory, self.core
        self._note_device_work()
        memory.forget_views()
        kept = memory.keep_only(self.steps[self.follower.steps % len(self.steps)])
        if threading.get_ident() == self._thread:
            self._owner = caller()
            for record in [r for r in core.leases if r.caller is self and r.group in kept]:
                self._lease_table.change_owner(record, self._owner)
            core.queue.add_lease(self._owner, memory.rings[0].entry.group)

    def _note_device_work(self) -> None:
        marks = [mark for mark in self.step_marks if mark is not None]
        streams = {mark.stream for mark in marks if mark.stream is not None}
        marks_of_copies, begun = self._copy_marks, self.follower.begun[0]
        latest = marks_of_copies[(begun - 1) % len(marks_of_copies)] if marks_of_copies else None
        self.memory.note_device_work(streams, None if latest is None else latest.event)

    def _leave(self, reason: str) -> None:
        if self.left is None:
            steps = self.follower.steps
            self.left = left = PlanExit(steps % len(self.steps), steps, reason)
            self._followed.at, self._followed.reason = left.step, reason
            self._followed.end = time.monotonic()
            self._arrived.set()

    def _free_if_finished(self) -> None:
        """End the leases and free the memory once the plan was left and nothing is in progress."""
        if self.left is not None and under(self._lock, self._claim_finish):
            transact(self.core, self.free_memory)
            self._on_finished(self)

    def free_memory(self) -> None:
        """End the leases and free the memory. Part of a transaction."""
        self._note_device_work()
        self.memory.free()
        self.core.queue.remove_lease(self._owner, self.memory.rings[0].entry.group)
