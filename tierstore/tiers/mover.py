"""Moves bytes between the tiers, and decides nothing.

The planner's instructions are accepted in order, and each is handed to the driver of a tier, or to
the hop between two. A copy to a device is queued there and then, by whoever has come to need it:
that takes microseconds, and no other thread has to wake up. All else is off the caller's thread.
One thread keeps the books of the other tiers (which slot belongs to which group); nothing that it
does can be cut short half-way. Hops copy on threads of their own. What is urgent goes before what
is hoped for.

The books of the device's memory are kept by callers, as part of a step of the store. If that is cut
short, `rebuild` finds what is true. What *arrived* means on each tier, `Hop.copy` says.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tierstore.errors import BudgetError, ServiceLostError, TransferError
from tierstore.model.groups import GroupId
from tierstore.model.moves import Copy, Drop, Forget, Instruction, Reserve
from tierstore.model.tiers import Tier, UseOrder
from tierstore.observe.journal import ROUTED, Journal, Span, hop
from tierstore.observe.ranges import MOVES, ranged
from tierstore.system.files import transfer_error
from tierstore.tiers.driver import CallersDriver, TierDriver, WaitingDriver
from tierstore.tiers.entry import GroupEntry
from tierstore.tiers.hop import Hop, QueuedHop
from tierstore.tiers.workers import EARLY, PATIENCE, URGENT, SerialExecutor, Workers

logger = logging.getLogger("tierstore.tiers")

Ended = tuple[Copy, BaseException | None]
"""A copy that is over, and why it could not be made; None: it was."""


@dataclass(frozen=True)
class MoverCallbacks:
    """Who is told of what, on any thread.

    `over`: a copy is done or has failed. `ending`: the last bytes of a copy are asked for. `timed`:
    from when to when (in seconds of `time.monotonic`) a device made a copy that was queued there.
    """

    over: Callable[[Copy, BaseException | None], None]
    ending: Callable[[Copy], None]
    timed: Callable[[Copy, float, float], None]


class Mover:
    """Runs instructions: with `drivers`, one for each tier, the fastest first, and with `hops`.

    `names` counts the versions that there are of each key.
    """

    def __init__(
        self,
        drivers: Sequence[TierDriver],
        hops: Iterable[Hop],
        serial: SerialExecutor,
        names: Counter[str],
        journal: Journal,
        callbacks: MoverCallbacks,
    ) -> None:
        self.journal = journal
        self.stopped = False
        self.drivers = {driver.tier: driver for driver in drivers}
        self.hops: dict[tuple[Tier, Tier], Hop] = {(one.src, one.dst): one for one in hops}
        self._top = drivers[0]
        self._by_callers = {d.tier: d for d in drivers if isinstance(d, CallersDriver)}
        self._queued = {way: one for way, one in self.hops.items() if isinstance(one, QueuedHop)}
        clocks = [one.times for one in self.hops.values() if one.times is not None]
        self._clocks = list(dict.fromkeys(clocks))
        self._serial = serial
        self._names = names
        self._callbacks = callbacks
        self._entries: dict[GroupId, GroupEntry] = {}
        self._moving: dict[tuple[GroupId, Tier], Copy] = {}

    def add_tier(self, driver: TierDriver, hops: Iterable[Hop]) -> None:
        """There is a tier below the others from now on. `hops` may take the places of others."""
        self.drivers = {**self.drivers, driver.tier: driver}
        self.hops = {**self.hops, **{(one.src, one.dst): one for one in hops}}

    # What is known -----------------------------------------------------------------------------

    def add(self, *entries: GroupEntry) -> None:
        """Make groups known, before any instruction names them."""
        self._entries.update((entry.group, entry) for entry in entries)
        names = [entry.group.key for entry in entries]
        self._serial.give(lambda: self._names.update(names))

    def entry(self, key: GroupId) -> GroupEntry:
        """What is known of a group."""
        return self._entries[key]

    def entries(self) -> list[GroupEntry]:
        """What is known of all groups, the oldest first."""
        return list(self._entries.values())

    def tiers_of(self, entry: GroupEntry) -> list[Tier]:
        """Where there is a copy of a group, complete or not, or room for one."""
        return [tier for tier, driver in self.drivers.items() if driver.holds(entry)]

    def moving(self) -> list[Copy]:
        """The copies that are under way. Nobody was told of their end yet, or is being told."""
        return list(self._moving.values())

    # Instructions ------------------------------------------------------------------------------

    def accept(self, instructions: Iterable[Instruction]) -> list[Ended]:
        """Take instructions, in order, as part of a step of the store. Waits for nobody.

        What changes the device's memory is done by this thread. Returns the copies that it has
        queued, or has failed to: nobody is told of these.
        """
        ended: list[Ended] = []
        others = []
        for instruction in instructions:
            if isinstance(instruction, Drop) and instruction.tier in self._by_callers:
                self._by_callers[instruction.tier].drop(self._entries[instruction.group])
                continue
            if isinstance(instruction, Copy) and instruction.dst in self._by_callers:
                now = self._queue(instruction, self._entries[instruction.group])
                ended += now
                if now:
                    continue
            others.append(instruction)
        if others:
            self._serial.give(functools.partial(self._execute, others))
        return ended

    def _queue(self, copy: Copy, entry: GroupEntry) -> list[Ended]:
        """Queue a copy to the device. If that takes longer, only room is set aside."""
        self._by_callers[copy.dst].reserve(entry)
        queue = self._queued.get((copy.src, copy.dst))
        if queue is None or not queue.only_queues(entry):
            return []
        # An interrupt is no failure of the copy. And nobody is to be told of its end.
        return [(copy, self._copied(copy, entry, lambda: None, Exception))]

    def _execute(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Copy):
                self._begin(instruction, self._entries[instruction.group])
            elif isinstance(instruction, Reserve):
                driver = self.drivers[instruction.tier]
                driver.reserve(self._entries[instruction.group], for_caller=True)
            elif isinstance(instruction, Drop):
                self.drivers[instruction.tier].drop(self._entries[instruction.group])
            else:
                self._forget(instruction)

    def _forget(self, instruction: Forget) -> None:
        del self._entries[instruction.group]
        name = instruction.group.key
        self._names[name] -= 1
        if not self._names[name]:
            del self._names[name]

    def _begin(self, copy: Copy, entry: GroupEntry) -> None:
        self._moving[copy.group, copy.dst] = copy
        if copy.dst not in self._by_callers:
            self.drivers[copy.dst].reserve(entry)
        workers = self.hops[copy.src, copy.dst].workers
        workers.submit(URGENT if copy.urgent else EARLY, functools.partial(self._copy, copy, entry))

    def _copy(self, copy: Copy, entry: GroupEntry) -> None:
        ending = functools.partial(self._callbacks.ending, copy)
        # Every failure must reach whoever waits.
        error = self._copied(copy, entry, ending, BaseException)
        self._log(copy, entry, error)
        if error is None and copy.dst is self._top.tier:
            with suppress(MemoryError, RuntimeError):  # who leases it tries again, and is told
                self._top.view(entry)  # here, as every torch call may cost who computes the GIL
        self.look()
        self._callbacks.over(copy, error)

    def _log(self, copy: Copy, entry: GroupEntry, error: BaseException | None) -> None:
        way = hop(copy.src, copy.dst)
        with suppress(Exception):  # of somebody's handler: whoever waits must go on
            if error is None:
                logger.debug("%s of group %r: %d bytes", way, copy.group.key, entry.spec.nbytes)
            else:  # as text: a handler that keeps records must not keep frames, and their tensors
                level = logging.DEBUG if self.stopped else logging.WARNING
                logger.log(level, "%s of group %r failed: %s", way, copy.group.key, str(error))

    def _copied(
        self,
        copy: Copy,
        entry: GroupEntry,
        ending: Callable[[], None],
        failures: type[BaseException],
    ) -> BaseException | None:
        """Make a copy, and note when it was made. Returns the failure, if it is one of these."""
        used = self.hops[copy.src, copy.dst]
        span = Span(hop(copy.src, copy.dst), copy.group.key, start=time.monotonic())
        if used.times is None:  # else it is told later when it began
            self.journal.begin(span)
        try:
            with ranged(MOVES.get(span.kind, span.kind), span.key):
                copied = used.copy(entry, ending)
        except failures as failure:
            span.note = "failed"
            self.journal.end(span)
            return explained(failure, copy)
        span.nbytes = copied.nbytes
        self.journal.count(span.kind, span.nbytes)
        if copy.src.persistent and entry.use_order is UseOrder.ROUTED:
            self.journal.count(ROUTED, span.nbytes)
        if used.times is None or copied.marks is None:
            self.journal.end(span)
        else:
            noted = functools.partial(self._note_times, span, copy)
            used.times.tell(noted, *copied.marks)
        return None

    def _note_times(self, span: Span, copy: Copy, times: list[float]) -> None:
        self.journal.end_between(span, times)
        if copy.dst in self._by_callers:
            self._callbacks.timed(copy, *times)

    def look(self) -> None:
        """Learn what devices have done meanwhile, for the journal."""
        for times in self._clocks:
            times.look()

    def moved(self, copy: Copy) -> None:
        """Whoever was told of the end of a copy has heard it."""
        del self._moving[copy.group, copy.dst]

    def catch_up(self) -> None:
        """Wait until all instructions are in the books. Waits for no bytes."""
        self._serial.catch_up()

    def rebuild(self) -> None:
        """Make the books that callers keep anew, after a step was cut short."""
        for tier, driver in self._by_callers.items():
            driver.rebuild(self.entries(), {key for key, dst in self._moving if dst is tier})

    def stop(self) -> bool:
        """End the threads and give memory and files back.

        False if some thread does not end, because a disk does not answer. Then the files stay
        open, as it may still use them.
        """
        self.stopped = True
        for driver in self.drivers.values():
            if isinstance(driver, WaitingDriver):
                driver.stop_waiting()
        ends = time.monotonic() + PATIENCE
        ended = True
        for threads in self._threads():
            ended &= threads.stop(ends)
        if not ended:
            return False
        for driver in self.drivers.values():
            driver.close(self._entries.values())
        return True

    def runs_here(self) -> bool:
        """Whether this thread is one of those that move groups: it cannot wait for itself."""
        return any(threads.has(threading.current_thread()) for threads in self._threads())

    def _threads(self) -> list[SerialExecutor | Workers]:
        return [self._serial, *dict.fromkeys(used.workers for used in self.hops.values())]


def explained(error: BaseException, copy: Copy) -> BaseException:
    """The library's error for a failed copy, with the cause attached."""
    key = copy.group.key
    if isinstance(error, TransferError):
        error.key = error.key or key
        return without_frames(error)
    if isinstance(error, BudgetError | ServiceLostError):  # of the service that has the group
        return without_frames(error)
    if isinstance(error, OSError):
        without_frames(error)
        path = str(error.filename or f"group {key!r}")
        return transfer_error(error, "writing", key=key, path=path)
    failed = TransferError(
        f"moving group {key!r} from {copy.src.name} to {copy.dst.name} failed "
        f"({type(error).__name__}: {error}): free memory on that tier or lower its budget",
        key=key,
    )
    failed.add_note("".join(traceback.format_exception(error)))
    failed.__cause__ = without_frames(error)
    return failed


def without_frames(error: BaseException) -> BaseException:
    """The error, without the frames that it came through: they hold the memory of the group."""
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__
    return error
