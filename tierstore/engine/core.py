"""The state of a store: keeps the planner, the mover and the waiting callers consistent.

This is the only module that knows both planner and mover. Every transaction follows one pattern:
pass an event to the planner, and its instructions, in order, to the mover. The mover's threads
report back in the same way. Nothing here blocks.

The planner can be rebuilt at any time, because the facts are held elsewhere: the copies that exist
and that are in progress (mover), the generation of each key that readers see, and the leases. If a
transaction is interrupted, the state of the planner is discarded.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial
from typing import Protocol

import torch

from tierstore.engine.idle_memory import IdleMemory
from tierstore.engine.measurements import Measurements
from tierstore.engine.object_references import ObjectReferences
from tierstore.engine.settings import Settings
from tierstore.engine.transaction import transact, transact_if_free, transaction
from tierstore.engine.wait_queue import Demand, LeaseRecord, Request, RequestKind, WaitQueue
from tierstore.errors import (
    BudgetError,
    CaptureError,
    ClosedError,
    DuplicateKeyError,
    LeaseError,
    UnknownKeyError,
)
from tierstore.model import events
from tierstore.model.groups import NO_GROUP, GroupId
from tierstore.model.locks import RLock, inside, is_owner, may_wait
from tierstore.model.moves import Copy, Instruction
from tierstore.model.objects import StoredObject
from tierstore.model.tiers import Access, Tier
from tierstore.observe.event_log import EventLog
from tierstore.observe.observer import Observer
from tierstore.plan.planner import planner_for
from tierstore.system.collector import paused
from tierstore.system.objects import object_name
from tierstore.system.streams import capture_query, is_captured
from tierstore.tiers.assembly import build
from tierstore.tiers.directory import ObjectDirectory
from tierstore.tiers.entry import GroupEntry
from tierstore.tiers.mover import Mover, MoverCallbacks
from tierstore.tiers.workers import Future
from tierstore.torch_private import stream_of_device


class LoopLeftError(Exception):
    """The plan of a loop was abandoned while a thread entered it."""


class FollowedLoop(Protocol):
    """The runner of the plan that a loop follows. See `tierstore.engine.loop_runner`."""

    keys: frozenset[str]

    @property
    def left(self) -> object:
        """The reason why the plan was left, or None while it is followed."""

    def leave(self, reason: str) -> None:
        """Stop following the plan. Part of a transaction."""

    def reserved_bytes(self) -> Iterator[tuple[Tier, int]]:
        """Yield the bytes that it has reserved, by tier."""


class Core:
    """State shared by the parts of the engine. Methods need the lock, unless they say otherwise.

    `current` is the group that readers see, by key. `unpublished` are the groups that are being
    put, each with the caller that fills its memory, or None until memory is granted.
    `leases` are the open leases, and `revocable` those that their holders do not use at the moment.
    `deferred` are actions of finalizers, which may run inside any transaction. The next transaction
    runs them; each can be repeated if that one is interrupted.
    """

    def __init__(self, settings: Settings) -> None:
        self.device = settings.tiers.device
        self.settings = settings
        self.lock = RLock()
        self.dirty = False  # a transaction has begun and has not ended
        self.closing = False  # no new calls; durable groups are being saved
        self.closed = False
        self.current: dict[str, GroupId] = {}
        self.unpublished: dict[GroupId, object] = {}
        self.leases: dict[LeaseRecord, None] = {}
        self.revocable: dict[LeaseRecord, None] = {}
        self.deferred: deque[Callable[[], object]] = deque()
        self.permanent_host_bytes = 0  # leased in host memory, never released
        self.shared_budget = 0  # bytes that a service allows this worker to lease at once
        self.largest = 0  # bytes of the largest group leased, or saved for autograd
        self.measurements = Measurements()
        self.followed: FollowedLoop | None = None
        self._pid = os.getpid()
        self._numbers = itertools.count(1)
        self.references = ObjectReferences(self)
        self._begin_planning()
        self.queue = WaitQueue(self._ready, partial(_is_idle, self), self._fail_blocked)
        self.directory = ObjectDirectory(settings.disk_dir)
        try:
            self.reports = TransferReports(self)
            self.tiers, self.mover = build(settings.tiers, self.directory, self.reports.callbacks())
        except BaseException:
            self.directory.close()
            raise
        self.idle_memory = IdleMemory(self.tiers)
        self.finalizer = weakref.finalize(self, _shut_down, self.mover, self.directory, self._pid)
        try:
            device = self.tiers.device
            times = None if device is None else device.times
            self.observer = Observer(self.mover.journal, times, self.measurements.ran)
            self._recover()
            self.observer.record_levels(self.planner.used)
        except BaseException:
            self.finalizer()
            raise

    def _begin_planning(self) -> None:
        """Create an empty planner, and the log of its events."""
        budgets, policy = self.settings.tiers.budgets, self.settings.policy
        on_device = self.device.type != "cpu"
        self.planner = planner_for(budgets, policy, timed_by_device=on_device)
        self.events = EventLog(budgets, policy, timed_by_device=on_device)
        self._instructed: list[
            Instruction
        ] = []  # instructions that free disk space, not yet delivered

    def _recover(self) -> None:
        """Register the groups found in the directory."""
        instructions: list[Instruction] = []
        with paused():
            entries = [self._recovered_entry(stored) for stored in self.directory.objects()]
            self.mover.add(*entries)
            for entry in entries:
                group = entry.group
                instructions += self.instructions_for(events.Registered(group, entry.spec.nbytes))
                self.tiers.disk.add_file(group.key)
                self.current[group.key] = group
        self.deliver(instructions)
        self.references.add_existing(self.current)
        self.deliver(self.references.free_disk(0))
        budget, held = self.planner.budgets[Tier.DISK], self.planner.used[Tier.DISK]
        if budget is not None and held > budget:
            raise BudgetError(
                self.directory.path,
                Tier.DISK.name,
                held,
                budget,
                "raise disk_budget, or remove groups with tierstore-inspect rm",
            )

    def _recovered_entry(self, stored: StoredObject) -> GroupEntry:
        source = stored.source(self.directory.path_of(stored.key))
        group = GroupId(stored.key, 0)
        return GroupEntry(group, stored.spec(), source, stored.packing, single=stored.single)

    # Keys and groups ---------------------------------------------------------------------------

    def new_group(self, key: str) -> GroupId:
        """Return a new generation of a key. Needs no lock."""
        return GroupId(key, next(self._numbers))

    def next_number(self) -> int:
        """Return a number higher than those of all generations so far. Needs no lock."""
        return next(self._numbers)

    def lookup(self, key: str) -> GroupId:
        """Return the group that readers see.

        Raises UnknownKeyError, or the recorded error if the file of the key is damaged.
        """
        group = self.current.get(key)
        if group is None:
            damage = None
            with suppress(ValueError, AttributeError):  # not a valid key
                damage = self.directory.damaged.get(object_name(key))
            raise damage or UnknownKeyError(key, self.current)
        return group

    def check_key_is_new(self, key: str) -> None:
        """Raise DuplicateKeyError if there is a group with this key.

        First runs deferred actions: a finalizer may have discarded the group.
        """
        if self.deferred and not inside():
            transact(self, self.run_deferred)
        if key in self.current:
            raise DuplicateKeyError(key)

    def leave_loop(self, reason: str, key: str | None = None) -> None:
        """Leave the plan of a loop, if one is followed and (given a key) uses that key."""
        followed = self.followed
        if followed is not None and (key is None or key in followed.keys):
            followed.leave(reason)

    def check_still_entering(self, request: Request) -> None:
        """Raise LoopLeftError if a request was made to enter a plan that has since been left."""
        followed = self.followed
        if followed is not None and request.owner is followed and followed.left is not None:
            raise LoopLeftError

    # Checks at the start of a call: none needs the lock ------------------------------------------

    def is_stopped(self) -> bool:
        """Return True if the store was closed, by `close` or at interpreter exit."""
        return self.closed or self.mover.stopped

    def check_open(self, *, saving: bool = False) -> None:
        """Raise ClosedError if the store is closed, or is closing and this is not a save."""
        if self.is_stopped() or (self.closing and not saving):
            raise ClosedError(
                "the store is closed: open a new TierStore on its disk_dir, and offload the models "
                "to it again (such as enable_group_offload(pipe, store))"
            )

    def forked(self) -> bool:
        """Return True if this process was forked from the one that opened the store."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Raise ClosedError in a forked process."""
        if self.forked():
            raise ClosedError(
                "this process was forked from the one that opened the store: open another "
                "TierStore, with another disk_dir, after the fork"
            )

    def check_not_capturing(self) -> None:
        """Raise CaptureError if the current stream is being captured into a graph."""
        ask = capture_query(self.device.type)
        if ask is not None and ask():
            raise CaptureError

    def current_stream(self) -> torch.Stream | None:
        """Return the caller's current stream on the device; None on the CPU."""
        if self.device.type == "cpu":
            return None
        return stream_of_device(self.device.index)

    @staticmethod
    def order_after_arrival(entry: GroupEntry, stream: torch.Stream | None) -> None:
        """Make later work on the stream wait until the group has arrived."""
        if entry.arrival is not None and stream is not None:
            stream.wait_event(entry.arrival)

    # Between the planner and the mover -----------------------------------------------------------

    def apply(self, event: events.Event) -> None:
        """Pass an event to the planner, and deliver its instructions."""
        self.deliver(self.instructions_for(event))

    def instructions_for(self, event: events.Event, *, free_disk: bool = True) -> list[Instruction]:
        """Pass an event to the planner. Return its instructions, for `deliver`.

        With `free_disk`, first removes unreferenced object files if the event needs disk space.
        """
        if free_disk:  # stored first: if the planner raises, the next call returns them
            self._instructed += self.references.free_disk_for(event)
        now = time.monotonic()
        instructions = self.planner.handle(event, now)
        self.events.note(now, event, instructions)
        if free_disk:
            instructions = self._instructed + instructions
            self._instructed = []
        return instructions

    def deliver(self, instructions: list[Instruction]) -> None:
        """Pass instructions to the mover, in order, and wake the waiters that may proceed.

        Copies that finish immediately cause more instructions: repeats until there are none.
        """
        idle = self.idle_memory
        while instructions:
            if not idle.wanted:
                idle.note(instructions)
            finished = self.mover.accept(instructions)
            instructions = [
                more for copy, error in finished for more in self.copy_finished(copy, error)
            ]
        if not idle.wanted:
            idle.free()
        self.observer.record_levels(self.planner.used)
        self.queue.notify_change()

    def copy_finished(self, copy: Copy, error: BaseException | None) -> list[Instruction]:
        """Report a finished copy to the planner. Return its instructions, for `deliver`."""
        if error is not None:
            return self.instructions_for(events.Failed(copy.group, copy.src, copy.dst, error))
        timed = copy.dst is not Tier.DEVICE  # a copy to the device is only queued
        return self.instructions_for(events.Arrived(copy.group, copy.src, copy.dst, timed))

    # Requests that wait --------------------------------------------------------------------------

    def _ready(self, request: Request) -> bool:
        """Return True if another attempt of a waiting request may succeed."""
        group, planner, kind = request.group, self.planner, request.kind
        if self.closing or self.is_stopped() or kind not in (RequestKind.LEASE, RequestKind.PUT):
            return True
        if group not in planner or planner.error_of(group) is not None:
            return True
        if kind is RequestKind.PUT:
            return planner.granted(group)
        if self.current.get(request.key) != group or planner.leasable(group, request.access):
            return True
        return request.access is not Access.READ and planner.leased_permanently(group)

    def _fail_blocked(self, request: Request, held: set[GroupId]) -> None:
        """Raise for a request that is blocked: every holder of memory (or of the group) waits too.

        Does not raise if garbage collection released a lease. A cycle of objects can hold leases,
        such as an error and the frames of its traceback.
        """
        gc.collect()
        if self.deferred:
            self.run_deferred()
            return  # the waiters that may proceed were woken
        if request.group in held:
            raise LeaseError(
                f"group {request.key!r} is leased by callers that all wait for the store (a "
                "deadlock): release those leases first"
            )
        known = [self.mover.entry(group).spec.nbytes for group in held if group in self.planner]
        top = self.planner.top
        nbytes = sum(known) + self.planner.carved_out[top]
        raise BudgetError(
            request.key,
            top.name,
            self.mover.entry(request.group).spec.nbytes,
            self.planner.budgets[top] or 0,
            f"callers that all wait for the store hold leases of {nbytes:,} bytes; release some "
            "of them first, or raise the budget",
        )

    def withdraw(self, demand: Demand) -> None:
        """Withdraw a demand from the planner."""
        if demand.group in self.planner:
            if demand.kind is RequestKind.HOST_LEASE and demand.purpose is not None:
                self.apply(events.HostWithdrawn(demand.group, demand.purpose))
            elif demand.kind is not RequestKind.SAVE:
                self.apply(events.Withdrawn(demand.group))
        end_fill(self, demand.group)

    def run_deferred(self) -> None:
        """Run the deferred actions of finalizers, and withdraw demands of dropped requests."""
        for demand in self.queue.lost_demands():
            self.withdraw(demand)
        while self.deferred:
            self.deferred[0]()
            self.deferred.popleft()
        self.idle_memory.collect()

    def run_deferred_if_free(self) -> None:
        """Run deferred actions now if the lock is free; otherwise the next transaction does.

        For finalizers, on any thread and without the lock.
        """
        if not (self.forked() or self.closing or self.is_stopped() or is_captured(self.device)):
            transact_if_free(self, self.run_deferred)

    def wait_for_removal(self, removal: Future[None]) -> None:
        """Wait until a file is removed, and wake callers of `flush`, which may wait for it too.

        Does not block on a thread that runs an event loop, nor on a thread of the store (for a
        finalizer). Then `flush` and `close` raise if the removal fails. Needs no lock.
        """
        if asyncio._get_running_loop() is not None or not may_wait():
            removal.then(self.reports.removed_if_open)
            return
        try:
            removal.wait()
        finally:
            self.reports.removed()

    # After an interrupted transaction ----------------------------------------------------------

    def rebuild(self) -> None:
        """Rebuild the state after an interrupted transaction.

        Uses the copies of the mover, the current groups, and the open leases.

        The learned order of use and all hints are lost. Waiting requests are resubmitted.
        """
        if self.is_stopped():
            return
        self.mover.drain()
        self.mover.rebuild()
        for demand in self.queue.lost_demands():
            self.unpublished.pop(demand.group, None)
        peak = self.planner.peak
        self._begin_planning()
        instructions = []
        if self.shared_budget:
            instructions = self.instructions_for(events.SharedBudgetChanged(self.shared_budget))
        for tier, nbytes in self.followed.reserved_bytes() if self.followed is not None else ():
            instructions += self.instructions_for(events.MemoryBorrowed(tier, nbytes))
        instructions += self.instructions_for(events.Recovered(tuple(self._existing_groups())))
        for tier, nbytes in peak.items():
            self.planner.peak[tier] = max(self.planner.peak[tier], nbytes)
        for request in self.queue.requests():
            if request.kind in (RequestKind.LEASE, RequestKind.HOST_LEASE):
                request.group = NO_GROUP
        leases = ((record.caller, record.group) for record in self.leases)
        puts = ((owner, group) for group, owner in self.unpublished.items())
        self.queue.recount(itertools.chain(leases, puts))
        self.permanent_host_bytes = sum(
            self.mover.entry(record.group).spec.nbytes
            for record in self.leases
            if record.host_access is not None and record.caller is None
        )
        self.deliver(instructions)

    def _existing_groups(self) -> Iterator[events.RecoveredGroup]:
        leased: dict[GroupId, list[LeaseRecord]] = {}
        for record in self.leases:
            leased.setdefault(record.group, []).append(record)
        moving = self.mover.moving()
        for entry in self.mover.entries():
            group = entry.group
            records = leased.get(group, [])
            moves = tuple((copy.src, copy.dst) for copy in moving if copy.group == group)
            yield events.RecoveredGroup(
                group,
                entry.spec.nbytes,
                tuple(sorted({*self.mover.tiers_of(entry), *(dst for _, dst in moves)})),
                moves,
                tuple((n.access, n.caller is None) for n in records if n.host_access is None),
                next((n.host_access for n in records if n.host_access is not None), None),
                backing=entry.backing,
                use_order=entry.use_order,
                sticky=entry.sticky,
                shared=self.tiers.host.is_shared(entry),
                visible=self.current.get(group.key) == group,
                claimed=group in self.unpublished,
            )


def begin_fill(core: Core, request: Request) -> None:
    """Mark a put as filling its memory: until `end_fill`, others may wait for its caller."""
    core.unpublished[request.group] = request.owner
    core.queue.add_lease(request.owner, request.group)


def end_fill(core: Core, group: GroupId) -> None:
    """Mark a put as ended, published or not. A second call does nothing."""
    core.queue.remove_lease(core.unpublished.pop(group, None), group)


def _is_idle(core: Core, interrupted: Collection[Request]) -> bool:
    """Return True if nothing is in flight but memory that callers fill or are about to fill."""
    planner = core.planner
    filling = sum(owner is not None for owner in core.unpublished.values())
    for request in interrupted:
        filling += request.kind is RequestKind.PUT and planner.granted(request.group)
    return planner.copies.in_flight <= filling


def check_not_waiting_for_itself(core: Core, request: Request) -> None:
    """Raise LeaseError if a caller would wait for its own lease.

    This happens if it saves or leases a group that it has leased for writing, or leases a group for
    writing that it has leased for reading.
    """
    if request.group not in core.queue.held_by(request.owner):
        return
    changes = request.kind is RequestKind.LEASE and request.access is not Access.READ
    for record in core.leases:
        if record.group != request.group or record.caller != request.owner:
            continue
        if request.kind is RequestKind.LEASE and record.host_access is not None:
            continue  # the holder of a host lease may read the group on the device
        if changes or record.access is not Access.READ:
            raise LeaseError(
                f"group {request.key!r} is already leased by this caller, which would wait for "
                "itself: release it first"
            )


def check_disk_budget(core: Core, key: str, nbytes: int) -> None:
    """Raise BudgetError if `nbytes` more do not fit within the disk budget."""
    if inside():  # part of a transaction
        core.deliver(core.references.free_disk(nbytes))
    else:
        core.references.free_disk_now(nbytes)
    budget = core.planner.budgets[Tier.DISK]
    if budget is not None and core.planner.used[Tier.DISK] + nbytes > budget:
        advice = "raise disk_budget, or discard groups that you do not need"
        raise BudgetError(key, Tier.DISK.name, nbytes, budget, advice)


class TransferReports:
    """Reports of the mover's threads, each in a transaction. Does not keep the core alive."""

    def __init__(self, core: Core) -> None:
        self._core = weakref.ref(core)

    @property
    def core(self) -> Core:
        """The core. The caller must hold a reference to it."""
        core = self._core()
        assert core is not None, "the core was collected"
        return core

    def callbacks(self) -> MoverCallbacks:
        """Return the callbacks for the mover."""

        def finished(copy: Copy, error: BaseException | None) -> None:
            if (core := self._core()) is not None:
                core.reports.arrived(copy, error)

        def ending(copy: Copy) -> None:
            if (core := self._core()) is not None:
                core.reports.ending(copy)

        core = self.core
        return MoverCallbacks(finished, ending, core.measurements.moved)

    @transaction
    def ending(self, copy: Copy) -> None:
        """Report that a copy has requested its last bytes."""
        self.core.apply(events.Ending(copy.group, copy.src, copy.dst))

    @transaction
    def arrived(self, copy: Copy, error: BaseException | None) -> None:
        """Report that a copy has finished or failed."""
        core = self.core
        instructions = core.copy_finished(copy, error)
        core.mover.acknowledge(copy)
        core.deliver(instructions)

    @transaction
    def removed(self) -> None:
        """Report that a file was removed: callers of `flush` may wait for it."""
        self.core.queue.notify_change()

    def removed_if_open(self) -> None:
        """Report that a file was removed, unless the store was collected."""
        core = self._core()
        if core is None:
            return
        if is_owner(core.lock):  # removed before the transaction that requested it ended
            core.queue.notify_change()
        else:
            core.reports.removed()


def _shut_down(mover: Mover, directory: ObjectDirectory, pid: int) -> None:
    # A forked child has neither the threads nor the lock. A thread that hangs on a dead disk may
    # still write later: until it ends, no other store may open the directory.
    if os.getpid() != pid:
        return
    if mover.runs_here():  # a mover thread held the last reference to the store
        end = threading.Thread(target=_shut_down, args=(mover, directory, pid))
        end.start()  # not a daemon: the interpreter waits for it
    elif mover.stop():
        directory.close()
