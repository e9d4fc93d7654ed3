"""Follows the plan of a loop: at each step, the copies that the plan has there, and nothing else.

A plan (`tierstore.plan.loop_plan`) says for every step of a loop where its groups are on the
fastest tier, and which copies may begin once it has ended. While it is followed, nothing is
decided, no lock of the store is taken, and no object is made for a group. To the planner it is
nothing special:

- *What stays for good* is leased where it is, and nobody gives it back.
- *Everything else passes through memory that is borrowed* (`events.MemoryBorrowed`), one piece for
  each tier. What is in there is not in the planner's books: it believes that those groups are on
  disk, or, of what stays for good in host memory, there.

So whoever asks the store for anything that is not there at once, puts, changes or discards what
the loop uses, or runs something else on the thread of the loop, has the plan left first
(`leave`). No copy begins then any more. Leases end, and the memory comes back as soon as no copy
goes on in it and the step that uses it has ended. The planner takes over with its books, which
were true all the time.

A step is what a thread uses between two of its calls: see `tierstore.engine.loops`.
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
from tierstore.engine.wait_queue import LOOK_AGAIN, caller
from tierstore.model.locks import AutoResetEvent, RLock, check_may_wait, under
from tierstore.model.tiers import Tier
from tierstore.observe.device_times import Mark
from tierstore.observe.journal import STALL, FollowedPlan, LeaseUse, Span, hop
from tierstore.plan.loop_follower import LoopFollower
from tierstore.plan.loop_plan import Resident, TileCopy
from tierstore.system.files import READ_BLOCK
from tierstore.system.streams import entered
from tierstore.tiers.device_tier import copy_all
from tierstore.tiers.mover import without_frames
from tierstore.tiers.workers import EARLY

READS = 4
"""Tiles that are read at the same time, if the plan lets so many begin."""

ANOTHER_STEP = "another step came"
VIEW_IS_KEPT = "a view of a weight is kept"


class _Begun(Enum):
    """How a step began: as it was planned, or the plan was left."""

    FOLLOWED = auto()
    LEFT = auto()


class StepLease:
    """The tensors of a unit, for one step of a loop that is followed. Only `release` ends it."""

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
        """The unit has run. A second time, nothing happens."""
        if not self.released:
            self.released = True
            self.tensors = {}  # first: they are looked at when the step ends
            self._runner.end(self._steps)


@dataclass
class Left:
    """How a plan was left: at which step, after how many, and why."""

    step: int
    steps: int
    reason: str


class LoopRunner:
    """Follows a plan for the thread that makes it. `over` is told, on any thread, when everything
    was given back; and `timed`, when a device has gone through two passes."""

    def __init__(
        self,
        core: Core,
        lease_table: LeaseTable,
        keyed: KeyedPlan,
        over: Callable[[LoopRunner], None],
        timed: Callable[[LoopRunner], None],
    ) -> None:
        self.core = core
        plan = keyed.plan
        self.steps = keyed.steps
        self.keys = frozenset(keyed.groups)
        self.left: Left | None = None
        self.follower = LoopFollower(plan)
        self.memory = LoopMemory(core, lease_table, keyed)
        self._journal = core.mover.journal
        self._counts = core.observer.counts_of_loops
        self._followed = FollowedPlan(len(self.steps), 0.0)
        self._over = over
        self._timed = timed
        self._lease_table = lease_table
        self._device = core.tiers.device
        self._lock = RLock()
        self._arrived = AutoResetEvent()
        self._entering = 0  # the thread that does
        self._thread = threading.get_ident()
        self._owner: object = None  # who holds what the step uses, when the plan was left in it
        self._in_step = False
        self._uses: list[LeaseUse] = []  # of the step that goes on
        self.seconds = [0.0] * len(plan.steps)  # that the device computed for each, the last time
        self._steps_done, self._done_at = 0, 0.0
        self._bytes_read, self._seconds_read, self._read_at = 0, 0.0, 0.0
        self._waited: tuple[Mark, ...] = ()  # from when to when the device waits for its copies
        self._reading = self._bytes_reading = 0
        self._read: set[int] = set()  # numbers of reads that ended before older ones
        self._given_back = False
        self.step_marks: list[Mark | None] = [None] * len(plan.steps)
        self._copy_marks: list[Mark | None] = [None] * len(plan.top.copies)

    # Entering ----------------------------------------------------------------------------------

    def enter(self, source: LeaseSource) -> bool:
        """Bring everything to where the plan wants it before its first step. Waits for that.

        False if there is no room, or somebody else needs some: then nothing has changed. Raises
        what an acquire raises; then nothing is kept.
        """
        self._entering = threading.get_ident()
        try:
            entered = self._bring(source)
        except BaseException:
            self.left = self.left or Left(0, 0, "it could not be entered")
            raise
        finally:
            self._entering = 0
            self._give_back_if_over()
        return entered

    def _bring(self, source: LeaseSource) -> bool:
        if not self.memory.enter(source, self):
            self.left = Left(0, 0, "there is no room")
            return False
        self._followed.start = time.monotonic()
        under(self._lock, self._advance_if_followed)
        if self.left is not None:
            return False
        self._journal.plans.add(self._followed)
        return True

    # Steps -------------------------------------------------------------------------------------

    def begin(self, step: StepKeys, key: str) -> StepLease | None:
        """The next step begins. Waits until its groups are there. None: the plan was left."""
        asked = time.monotonic()
        begin = functools.partial(self._begin, step)
        began = under(self._lock, begin)
        late = began is None
        if began is None:
            began = self._wait(begin, key)
        if began is _Begun.LEFT:
            self._give_back_if_over()
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
        """Begin the step, if its groups are there. None: they are not yet."""
        if step != self.steps[(self.follower.steps + self._in_step) % len(self.steps)]:
            self._leave(ANOTHER_STEP)
        if self._in_step:  # of the unit that this one is in, which keeps views of what it uses
            self._end()
        if self.left is not None:
            return _Begun.LEFT
        arrivals = self.follower.arrivals
        if arrivals and not self._is_there(arrivals):
            self._arrived.clear()
            return None
        self._in_step = True
        return _Begun.FOLLOWED

    def _is_there(self, arrivals: int) -> bool:
        """Whether so many copies are there, or will be when the device gets that far."""
        counts = self.follower.ended if self._device is None else self.follower.begun
        return counts[0] >= arrivals

    def _order_after(self, arrivals: int) -> bool:
        """Order what follows on the current stream after so many copies. Returns whether it has to
        wait for them."""
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
                self._arrived.wait(LOOK_AGAIN)
            return began
        except BaseException:
            under(self._lock, functools.partial(self._leave, "a wait was interrupted"))
            raise
        finally:
            self._journal.end(stall)

    def end(self, steps: int) -> None:
        """The step that began after so many is over: on a device, its work is queued. Nothing
        happens if it ended with the beginning of the next."""
        under(self._lock, functools.partial(self._end_once, steps))
        self._give_back_if_over()

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
                self._device.times.tell(done, *self._waited, mark)
                self._waited = ()
            self.follower.step_ended()
            passing = self.memory.views[number].passing if self.left is None else ()
            if any([views.are_looked_at() for views in passing]):
                self._leave(VIEW_IS_KEPT)
            self._advance_if_followed()
        except BaseException:  # what was counted may not be what was done
            self._leave("a step was cut short")
            raise

    def _done(self, number: int, uses: list[LeaseUse], times: list[float]) -> None:
        """The device has done a step, maybe after it had waited for it."""
        late = [use.granted for use in uses if use.met == "late"]
        began, self._done_at = max([self._done_at, *times[1:-1], *late]), times[-1]
        self.seconds[number] = max(self._done_at - began, 0.0)
        self._steps_done += 1
        if self._steps_done == 2 * len(self.steps):
            self._timed(self)
        for use in uses:
            use.done = times[-1]
        if len(times) > 1:
            for use in uses:
                use.ready = times[1]
            key = uses[0].group.key if uses else ""
            self._journal.end_between(Span(STALL, key, note="late"), times[:2])

    # Copies ------------------------------------------------------------------------------------

    def _advance_if_followed(self) -> None:
        """Begin the copies that may begin now."""
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
            read = functools.partial(self._read_one, number)
            self.core.tiers.reader.workers.submit(EARLY, read)

    def _may_read(self) -> bool:
        """Whether one more read may begin. Two large ones at once would share the disk, and the one
        that is needed first would come as late as the other."""
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
        with entered(device.up):
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
        device.times.tell(functools.partial(self._journal.end_between, span), began, ended)

    def _read_one(self, number: int) -> None:
        """Read a tile into the ring, on a thread of the disk's."""
        last = len(self.memory.rings) - 1
        ring = self.memory.rings[last]
        copies = ring.planned.copies
        copy = copies[number % len(copies)]
        began, error = 0.0, None
        try:
            began = self._read_into(ring, copy)
        except BaseException as caught:
            error = without_frames(caught)  # nothing here has the memory any more
        under(self._lock, functools.partial(self._read_ended, number, copy.nbytes, began, error))
        self._give_back_if_over()

    def _read_ended(
        self, number: int, nbytes: int, began: float, error: BaseException | None
    ) -> None:
        last, now = len(self.memory.rings) - 1, time.monotonic()
        self._reading -= 1
        self._bytes_reading -= nbytes
        if error is None:  # reads at the same time share the disk
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
        """Read a tile once its place is free. Returns when the read began."""
        if self._device is not None:
            mark = self._copy_marks[copy.after]
            if mark is not None:  # the device may not have got that far
                mark.event.synchronize()
        began = time.monotonic()
        self.memory.read(ring, Resident(copy.group, copy.offset, copy.nbytes, copy.target))
        return began

    @property
    def read_speed(self) -> float | None:
        """Bytes per second of what was read so far."""
        return self._bytes_read / self._seconds_read if self._seconds_read else None

    # Leaving -----------------------------------------------------------------------------------

    def borrowed(self) -> Iterator[tuple[Tier, int]]:
        """See `FollowedLoop`."""
        if not self._given_back:
            yield from ((ring.tier, ring.nbytes) for ring in self.memory.rings)

    def leave(self, reason: str) -> None:
        """Follow the plan no more, as part of a transaction. Waits for nothing."""
        if self._entering == threading.get_ident():
            return  # it is its own
        if under(self._lock, functools.partial(self._leave_now, reason)):
            self.give_back()
            self._over(self)

    def _leave_now(self, reason: str) -> bool:
        """Whether nothing is under way, and everything is to be given back."""
        news = self.left is None
        self._leave(reason)
        if self._entering:
            return False
        if self._in_step and news:
            self._give_way()
        return self._is_over()

    def _is_over(self) -> bool:
        """Whether the plan was left, and nothing is under way any more: told once."""
        over = self.left is not None and not (self._in_step or self._reading or self._given_back)
        self._given_back = self._given_back or over
        return over

    def _give_way(self) -> None:
        """As part of a transaction: let go of all that the step that goes on does not use. If it is
        this thread's, it holds the rest, and waits in vain for more than that."""
        memory, core = self.memory, self.core
        self._note_device_work()
        memory.forget_views()
        kept = memory.keep_only(self.steps[self.follower.steps % len(self.steps)])
        if threading.get_ident() == self._thread:
            self._owner = caller()
            for record in [r for r in core.leases if r.caller is self and r.group in kept]:
                self._lease_table.pass_on(record, self._owner)
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
            self.left = left = Left(steps % len(self.steps), steps, reason)
            self._followed.at, self._followed.reason = left.step, reason
            self._followed.end = time.monotonic()
            self._arrived.set()

    def _give_back_if_over(self) -> None:
        """End leases, and give the memory back, once nothing is under way any more."""
        if self.left is not None and under(self._lock, self._is_over):
            transact(self.core, self.give_back)
            self._over(self)

    def give_back(self) -> None:
        """End leases, and give the memory back, as part of a transaction."""
        self._note_device_work()
        self.memory.give_back()
        self.core.queue.remove_lease(self._owner, self.memory.rings[0].entry.group)
