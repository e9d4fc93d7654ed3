"""Moves bytes between the tiers, as the planner instructs.

Instructions are accepted in order. Each goes to the driver of a tier, or to the hop between two.
The caller that needs a copy on the device queues it there itself: that takes microseconds, and no
other thread must wake up. Everything else runs on other threads. One thread does the accounting of
the other tiers (which slot belongs to which group), where no interrupt can stop it half-way. Hops
copy on their own threads, urgent copies first.

Callers do the accounting of the device's memory, as part of a step of the store. If that is
interrupted, `rebuild` restores it. `Hop.copy` defines *arrival* for each tier.
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

Finished = tuple[Copy, BaseException | None]
"""A copy that has ended, and its error; None if it succeeded."""


@dataclass(frozen=True)
class MoverCallbacks:
    """Callbacks, which any thread may call.

    `done`: a copy has succeeded or failed. `ending`: the last bytes of a copy are requested.
    `timed`: start and end (in seconds of `time.monotonic`) of a copy that was queued on a device.
    """

    done: Callable[[Copy, BaseException | None], None]
    ending: Callable[[Copy], None]
    timed: Callable[[Copy, float, float], None]


class Mover:
    """Runs instructions: with `drivers`, one for each tier, the fastest first, and with `hops`.

    `names` counts the versions of each key.
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
        self._caller_drivers = {d.tier: d for d in drivers if isinstance(d, CallersDriver)}
        self._queued = {way: one for way, one in self.hops.items() if isinstance(one, QueuedHop)}
        clocks = [one.times for one in self.hops.values() if one.times is not None]
        self._clocks = list(dict.fromkeys(clocks))
        self._serial = serial
        self._names = names
        self._callbacks = callbacks
        self._entries: dict[GroupId, GroupEntry] = {}
        self._moving: dict[tuple[GroupId, Tier], Copy] = {}

    def add_tier(self, driver: TierDriver, hops: Iterable[Hop]) -> None:
        """Add a tier below the others. `hops` may replace existing ones."""
        self.drivers = {**self.drivers, driver.tier: driver}
        self.hops = {**self.hops, **{(one.src, one.dst): one for one in hops}}

    # Groups ------------------------------------------------------------------------------------

    def add(self, *entries: GroupEntry) -> None:
        """Add groups, before any instruction names them."""
        self._entries.update((entry.group, entry) for entry in entries)
        names = [entry.group.key for entry in entries]
        self._serial.submit(lambda: self._names.update(names))

    def entry(self, key: GroupId) -> GroupEntry:
        """Return the entry of a group."""
        return self._entries[key]

    def entries(self) -> list[GroupEntry]:
        """Return the entries of all groups, the oldest first."""
        return list(self._entries.values())

    def tiers_of(self, entry: GroupEntry) -> list[Tier]:
        """Return the tiers with a copy of a group, complete or not, or with memory for one."""
        return [tier for tier, driver in self.drivers.items() if driver.holds(entry)]

    def moving(self) -> list[Copy]:
        """Return the copies in progress, including those whose end is not acknowledged yet."""
        return list(self._moving.values())

    # Instructions ------------------------------------------------------------------------------

    def accept(self, instructions: Iterable[Instruction]) -> list[Finished]:
        """Accept instructions, in order, as part of a step of the store. Does not block.

        This thread makes the changes to the device's memory. Returns the copies that it has queued
        or failed to queue; `MoverCallbacks.done` is not called for these.
        """
        ended: list[Finished] = []
        others = []
        for instruction in instructions:
            if isinstance(instruction, Drop) and instruction.tier in self._caller_drivers:
                self._caller_drivers[instruction.tier].drop(self._entries[instruction.group])
                continue
            if isinstance(instruction, Copy) and instruction.dst in self._caller_drivers:
                now = self._queue(instruction, self._entries[instruction.group])
                ended += now
                if now:
                    continue
            others.append(instruction)
        if others:
            self._serial.submit(functools.partial(self._execute, others))
        return ended

    def _queue(self, copy: Copy, entry: GroupEntry) -> list[Finished]:
        """Queue a copy to the device. If that would block, only reserve memory."""
        self._caller_drivers[copy.dst].reserve(entry)
        queue = self._queued.get((copy.src, copy.dst))
        if queue is None or not queue.only_queues(entry):
            return []
        # An interrupt is not a failure of the copy. The result is returned, not notified.
        return [(copy, self._run_hop(copy, entry, lambda: None, Exception))]

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
        if copy.dst not in self._caller_drivers:
            self.drivers[copy.dst].reserve(entry)
        workers = self.hops[copy.src, copy.dst].workers
        workers.submit(URGENT if copy.urgent else EARLY, functools.partial(self._copy, copy, entry))

    def _copy(self, copy: Copy, entry: GroupEntry) -> None:
        ending = functools.partial(self._callbacks.ending, copy)
        # Every failure must reach the waiter.
        error = self._run_hop(copy, entry, ending, BaseException)
        self._log(copy, entry, error)
        if error is None and copy.dst is self._top.tier:
            with suppress(MemoryError, RuntimeError):  # raised again by the lease
                self._top.view(entry)  # here, as torch calls may cost the compute thread the GIL
        self.poll()
        self._callbacks.done(copy, error)

    def _log(self, copy: Copy, entry: GroupEntry, error: BaseException | None) -> None:
        way = hop(copy.src, copy.dst)
        with suppress(Exception):  # of a user's log handler: the waiter must continue
            if error is None:
                logger.debug("%s of group %r: %d bytes", way, copy.group.key, entry.spec.nbytes)
            else:  # as text: a handler that keeps records must not keep frames with tensors
                level = logging.DEBUG if self.stopped else logging.WARNING
                logger.log(level, "%s of group %r failed: %s", way, copy.group.key, str(error))

    def _run_hop(
        self,
        copy: Copy,
        entry: GroupEntry,
        ending: Callable[[], None],
        failures: type[BaseException],
    ) -> BaseException | None:
        """Copy, and record the time. Returns the failure if it is one of `failures`."""
        used = self.hops[copy.src, copy.dst]
        span = Span(hop(copy.src, copy.dst), copy.group.key, start=time.monotonic())
        if used.times is None:  # otherwise the start is reported later
            self.journal.begin(span)
        try:
            with ranged(MOVES.get(span.kind, span.kind), span.key):
                copied = used.copy(entry, ending)
        except failures as failure:
            span.note = "failed"
            self.journal.end(span)
            return library_error(failure, copy)
        span.nbytes = copied.nbytes
        self.journal.count(span.kind, span.nbytes)
        if copy.src.persistent and entry.use_order is UseOrder.ROUTED:
            self.journal.count(ROUTED, span.nbytes)
        if used.times is None or copied.marks is None:
            self.journal.end(span)
        else:
            noted = functools.partial(self._note_times, span, copy)
            used.times.notify(noted, *copied.marks)
        return None

    def _note_times(self, span: Span, copy: Copy, times: list[float]) -> None:
        self.journal.end_between(span, times)
        if copy.dst in self._caller_drivers:
            self._callbacks.timed(copy, *times)

    def poll(self) -> None:
        """Poll the devices' timers, for the journal."""
        for times in self._clocks:
            times.poll()

    def acknowledge(self, copy: Copy) -> None:
        """Record that the end of a copy has been handled."""
        del self._moving[copy.group, copy.dst]

    def drain(self) -> None:
        """Wait until all instructions are accounted for. Does not wait for copies."""
        self._serial.drain()

    def rebuild(self) -> None:
        """Restore the accounting of callers after a step was interrupted."""
        for tier, driver in self._caller_drivers.items():
            driver.rebuild(self.entries(), {key for key, dst in self._moving if dst is tier})

    def stop(self) -> bool:
        """Stop the threads, free all memory, and close all files.

        Returns False if a thread does not end because a disk does not answer. Then the files stay
        open, since that thread may still use them.
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
        """Return whether this thread moves groups, and so cannot wait for a move."""
        return any(threads.has(threading.current_thread()) for threads in self._threads())

    def _threads(self) -> list[SerialExecutor | Workers]:
        return [self._serial, *dict.fromkeys(used.workers for used in self.hops.values())]


def library_error(error: BaseException, copy: Copy) -> BaseException:
    """Return the library's error for a failed copy, with the cause attached."""
    key = copy.group.key
    if isinstance(error, TransferError):
        error.key = error.key or key
        return without_frames(error)
    if isinstance(error, BudgetError | ServiceLostError):  # from the service
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
    """Remove the traceback from an error: its frames hold the memory of the group."""
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__
    return error
