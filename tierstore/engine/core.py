"""What a store believes: the planner, the mover, and who waits, in agreement.

This is the only module that knows both planner and mover. Every transaction follows one pattern:
tell the planner, and hand its instructions to the mover, so that their order is kept. The mover's
threads report back in the same way. Nothing here waits.

The planner can be made anew at any time. What is true of a group is known elsewhere: which copies
the mover has made and is making, which generation of a key readers see, and what is leased. If a
transaction was cut short, whatever the planner believed by then is forgotten.
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
from tierstore.model.locks import RLock, held_here, inside, may_wait
from tierstore.model.moves import Copy, Instruction
from tierstore.model.objects import StoredObject
from tierstore.model.tiers import Access, Tier
from tierstore.observe.event_log import EventLog
from tierstore.observe.observer import Observer
from tierstore.plan.planner import planner_for
from tierstore.system.collector import paused
from tierstore.system.objects import object_name
from tierstore.system.streams import is_captured, question_of_capture
from tierstore.tiers.assembly import build
from tierstore.tiers.directory import ObjectDirectory
from tierstore.tiers.entry import GroupEntry
from tierstore.tiers.mover import Mover, MoverCallbacks
from tierstore.tiers.workers import Future
from tierstore.torch_private import stream_of_device


class LoopLeftError(Exception):
    """The plan of a loop was left while it was being entered."""


class FollowedLoop(Protocol):
    """The runner of the plan that is followed. See `tierstore.engine.loop_runner`."""

    keys: frozenset[str]

    @property
    def left(self) -> object:
        """How the plan was left; None while it is followed."""

    def leave(self, reason: str) -> None:
        """Follow it no more, as part of a transaction."""

    def borrowed(self) -> Iterator[tuple[Tier, int]]:
        """The bytes that it has of tiers now."""


class Core:
    """What the parts of the engine share. Its methods need the lock, unless they say otherwise.

    `current` has the group that readers see of each key; `unseen` are groups that are being put,
    with the caller that fills the room that it was granted, or None.
    `leases` are out, and `revocable` those of them whose holders do not use them at this moment.
    `deferred` is what finalizers want done: they may run in the middle of any transaction, so it is
    done by the next one. Each can be done again if that was cut short.
    """

    def __init__(self, settings: Settings) -> None:
        self.device = settings.tiers.device
        self.settings = settings
        self.lock = RLock()
        self.dirty = False  # a transaction has begun, and is not over
        self.closing = False  # nothing new may begin; what there is, is being saved
        self.closed = False
        self.current: dict[str, GroupId] = {}
        self.unseen: dict[GroupId, object] = {}
        self.leases: dict[LeaseRecord, None] = {}
        self.revocable: dict[LeaseRecord, None] = {}
        self.deferred: deque[Callable[[], object]] = deque()
        self.permanent_host_bytes = 0  # bytes leased in host memory by who never gives them back
        self.shared_budget = 0  # bytes that a service allows to be leased at once
        self.largest = 0  # bytes of the largest group that was leased or saved for autograd so far
        self.measurements = Measurements()
        self.followed: FollowedLoop | None = None
        self._pid = os.getpid()
        self._numbers = itertools.count(1)
        self.references = ObjectReferences(self)
        self._begin_planning()
        self.queue = WaitQueue(self._ready, partial(_is_idle, self), self._refuse_the_hopeless)
        self.directory = ObjectDirectory(settings.disk_dir)
        try:
            self.reports = TransferReports(self)
            self.tiers, self.mover = build(settings.tiers, self.directory, self.reports.told())
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
            self.observer.level(self.planner.used)
        except BaseException:
            self.finalizer()
            raise

    def _begin_planning(self) -> None:
        """Have a planner that knows nothing yet, and the log of what it is told."""
        budgets, policy = self.settings.tiers.budgets, self.settings.policy
        on_device = self.device.type != "cpu"
        self.planner = planner_for(budgets, policy, timed_by_device=on_device)
        self.events = EventLog(budgets, policy, timed_by_device=on_device)
        self._instructed: list[Instruction] = []  # to make room, and not handed out yet

    def _recover(self) -> None:
        """Know the groups that the directory holds."""
        instructions: list[Instruction] = []
        with paused():
            entries = [self._recovered(stored) for stored in self.directory.objects()]
            self.mover.add(*entries)
            for entry in entries:
                group = entry.group
                instructions += self.handled(events.Registered(group, entry.spec.nbytes))
                self.tiers.disk.add_file(group.key)
                self.current[group.key] = group
        self.deliver(instructions)
        self.references.found(self.current)
        self.deliver(self.references.make_room(0))
        budget, held = self.planner.budgets[Tier.DISK], self.planner.used[Tier.DISK]
        if budget is not None and held > budget:
            raise BudgetError(
                self.directory.path,
                Tier.DISK.name,
                held,
                budget,
                "raise disk_budget, or remove groups with tierstore-inspect rm",
            )

    def _recovered(self, stored: StoredObject) -> GroupEntry:
        source = stored.source(self.directory.path_of(stored.key))
        group = GroupId(stored.key, 0)
        return GroupEntry(group, stored.spec(), source, stored.packing, single=stored.single)

    # Keys and groups ---------------------------------------------------------------------------

    def new_group(self, key: str) -> GroupId:
        """A generation of the key that there was not yet. Needs no lock."""
        return GroupId(key, next(self._numbers))

    def newest(self) -> int:
        """A number that is higher than those of all generations so far. Needs no lock."""
        return next(self._numbers)

    def lookup(self, key: str) -> GroupId:
        """The group that readers see. Raises UnknownKeyError, or says why its file is damaged."""
        group = self.current.get(key)
        if group is None:
            damage = None
            with suppress(ValueError, AttributeError):  # there cannot be such a key
                damage = self.directory.damaged.get(object_name(key))
            raise damage or UnknownKeyError(key)
        return group

    def refuse_duplicate(self, key: str) -> None:
        """Raise DuplicateKeyError if readers see a group of the key, and no finalizer has discarded
        it in the middle of a transaction: then it goes now."""
        if self.deferred and not inside():
            transact(self, self.collect_garbage)
        if key in self.current:
            raise DuplicateKeyError(key)

    def leave_loop(self, reason: str, key: str | None = None) -> None:
        """Have the plan of a loop left, if one is followed (and uses this key)."""
        followed = self.followed
        if followed is not None and (key is None or key in followed.keys):
            followed.leave(reason)

    def check_still_entering(self, request: Request) -> None:
        """Raise LoopLeftError if a request is for entering a plan that was left meanwhile."""
        followed = self.followed
        if followed is not None and request.owner is followed and followed.left is not None:
            raise LoopLeftError

    # Whether a call may go on: none of these needs the lock ---------------------------------------

    def ended(self) -> bool:
        """Whether the store was closed, by `close` or by the end of the interpreter."""
        return self.closed or self.mover.stopped

    def check_open(self, *, saving: bool = False) -> None:
        """Raise ClosedError if the store is closed, or is being closed and this saves nothing."""
        if self.ended() or (self.closing and not saving):
            raise ClosedError(
                "the store is closed: open a new TierStore on its disk_dir, and give it the models "
                "again (such as enable_group_offload(pipe, store))"
            )

    def forked(self) -> bool:
        """Whether this process is a child of the one that opened the store."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Raise ClosedError in a forked process."""
        if self.forked():
            raise ClosedError(
                "this process was forked from the one that opened the store: open a TierStore of "
                "its own, with another disk_dir, after the fork"
            )

    def refuse_capture(self) -> None:
        """Raise CaptureError, before anything is done, where a graph is being captured."""
        ask = question_of_capture(self.device.type)
        if ask is not None and ask():
            raise CaptureError

    def current_stream(self) -> torch.Stream | None:
        """The stream of the caller's device work; None on the CPU."""
        if self.device.type == "cpu":
            return None
        return stream_of_device(self.device.index)

    @staticmethod
    def order_after_arrival(entry: GroupEntry, stream: torch.Stream | None) -> None:
        """What the stream does from now on, it does when the group is there."""
        if entry.arrival is not None and stream is not None:
            stream.wait_event(entry.arrival)

    # Between the planner and the mover -----------------------------------------------------------

    def tell(self, event: events.Event) -> None:
        """Tell the planner what happened, and see that what it instructs is done."""
        self.deliver(self.handled(event))

    def handled(self, event: events.Event, *, make_room: bool = True) -> list[Instruction]:
        """Tell the planner what happened. Returns its instructions, for `deliver`.

        Before that, object files that nothing refers to make room on disk, if they are to.
        """
        if make_room:  # noted first: if the planner raises, they are handed out the next time
            self._instructed += self.references.make_room_before(event)
        now = time.monotonic()
        instructions = self.planner.handle(event, now)
        self.events.note(now, event, instructions)
        if make_room:
            instructions = self._instructed + instructions
            self._instructed = []
        return instructions

    def deliver(self, instructions: list[Instruction]) -> None:
        """Hand the planner's instructions on, in order, and wake the waiters that it can help.

        What is over at once makes the planner instruct more, until nothing is.
        """
        idle = self.idle_memory
        while instructions:
            if not idle.wanted:
                idle.note(instructions)
            over = self.mover.accept(instructions)
            instructions = [more for copy, error in over for more in self.ended_copy(copy, error)]
        if not idle.wanted:
            idle.give_back()
        self.observer.level(self.planner.used)
        self.queue.changed()

    def ended_copy(self, copy: Copy, error: BaseException | None) -> list[Instruction]:
        """Tell the planner of the end of a copy. Returns its instructions, for `deliver`."""
        if error is not None:
            return self.handled(events.Failed(copy.group, copy.src, copy.dst, error))
        timed = copy.dst is not Tier.DEVICE  # else it is queued
        return self.handled(events.Arrived(copy.group, copy.src, copy.dst, timed))

    # Requests that wait --------------------------------------------------------------------------

    def _ready(self, request: Request) -> bool:
        """Whether to try again can make a difference for a request that waits."""
        group, planner, kind = request.group, self.planner, request.kind
        if self.closing or self.ended() or kind not in (RequestKind.LEASE, RequestKind.ROOM):
            return True
        if group not in planner or planner.error_of(group) is not None:
            return True
        if kind is RequestKind.ROOM:
            return planner.granted(group)
        if self.current.get(request.key) != group or planner.leasable(group, request.access):
            return True
        return request.access is not Access.READ and planner.leased_permanently(group)

    def _refuse_the_hopeless(self, request: Request, held: set[GroupId]) -> None:
        """Raise: whoever could give the room (or the group) back is waiting too.

        But not if that was garbage: leases that only a cycle of objects had, as an error and the
        frames that it came through may be.
        """
        gc.collect()
        if self.deferred:
            self.collect_garbage()
            return  # whom that helps was woken
        if request.group in held:
            raise LeaseError(
                f"group {request.key!r} is leased by callers that all wait for something: release "
                "those leases first"
            )
        known = [self.mover.entry(group).spec.nbytes for group in held if group in self.planner]
        top = self.planner.top
        nbytes = sum(known) + self.planner.borrowed[top]
        raise BudgetError(
            request.key,
            top.name,
            self.mover.entry(request.group).spec.nbytes,
            self.planner.budgets[top] or 0,
            f"the leases of callers that all wait take {nbytes:,} bytes; release some of them "
            "first, or raise the budget",
        )

    def withdraw(self, demand: Demand) -> None:
        """See that the planner pursues a demand no more."""
        if demand.group in self.planner:
            if demand.kind is RequestKind.HOST_LEASE and demand.purpose is not None:
                self.tell(events.HostWithdrawn(demand.group, demand.purpose))
            elif demand.kind is not RequestKind.SAVE:
                self.tell(events.Withdrawn(demand.group))
        end_room(self, demand.group)

    def collect_garbage(self) -> None:
        """Do what finalizers have left, and take back what only garbage wanted."""
        for demand in self.queue.lost_demands():
            self.withdraw(demand)
        while self.deferred:
            self.deferred[0]()
            self.deferred.popleft()
        self.idle_memory.collect()

    def collect_garbage_if_free(self) -> None:
        """Do what finalizers have left now, if that does not wait; else the next transaction does.

        For finalizers, on any thread and without the lock.
        """
        if not (self.forked() or self.closing or self.ended() or is_captured(self.device)):
            transact_if_free(self, self.collect_garbage)

    def wait_for_removal(self, removal: Future[None]) -> None:
        """Wait until a file is removed, and wake who flushes: they wait for it, too.

        Where an event loop runs, or on a thread of the store (for a finalizer), nothing waits:
        `flush` and `close` tell if it fails. Without the lock.
        """
        if asyncio._get_running_loop() is not None or not may_wait():
            removal.then(self.reports.removed_if_open)
            return
        try:
            removal.wait()
        finally:
            self.reports.removed()

    # After a transaction that was cut short ---------------------------------------------------

    def rebuild(self) -> None:
        """Derive everything anew from what there is, after a transaction was cut short.

        What was learned of the order of use is lost, and so are hints. Whoever waits asks again.
        """
        if self.ended():
            return
        self.mover.catch_up()
        self.mover.rebuild()
        for demand in self.queue.lost_demands():
            self.unseen.pop(demand.group, None)
        peak = self.planner.peak
        self._begin_planning()
        instructions = []
        if self.shared_budget:
            instructions = self.handled(events.SharedBudgetChanged(self.shared_budget))
        for tier, nbytes in self.followed.borrowed() if self.followed is not None else ():
            instructions += self.handled(events.MemoryBorrowed(tier, nbytes))
        instructions += self.handled(events.Recovered(tuple(self._existing_groups())))
        for tier, nbytes in peak.items():
            self.planner.peak[tier] = max(self.planner.peak[tier], nbytes)
        for request in self.queue.requests():
            if request.kind in (RequestKind.LEASE, RequestKind.HOST_LEASE):
                request.group = NO_GROUP
        leases = ((record.caller, record.group) for record in self.leases)
        rooms = ((owner, group) for group, owner in self.unseen.items())
        self.queue.recount(itertools.chain(leases, rooms))
        self.permanent_host_bytes = sum(
            self.mover.entry(record.group).spec.nbytes
            for record in self.leases
            if record.held is not None and record.caller is None
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
                tuple((n.access, n.caller is None) for n in records if n.held is None),
                next((n.held for n in records if n.held is not None), None),
                backing=entry.backing,
                use_order=entry.use_order,
                sticky=entry.sticky,
                shared=self.tiers.host.lends(entry),
                visible=self.current.get(group.key) == group,
                claimed=group in self.unseen,
            )


def begin_room(core: Core, request: Request) -> None:
    """A put has been granted its room: until `end_room`, others may wait for its caller."""
    core.unseen[request.group] = request.owner
    core.queue.add_lease(request.owner, request.group)


def end_room(core: Core, group: GroupId) -> None:
    """A put is over, one way or the other. A second time, nothing happens."""
    core.queue.remove_lease(core.unseen.pop(group, None), group)


def _is_idle(core: Core, interrupted: Collection[Request]) -> bool:
    """Whether nothing is on its way, but for what these and other callers are to fill."""
    planner = core.planner
    filling = sum(owner is not None for owner in core.unseen.values())
    for request in interrupted:
        filling += request.kind is RequestKind.ROOM and planner.granted(request.group)
    return planner.copies.in_flight <= filling


def refuse_to_wait_for_itself(core: Core, request: Request) -> None:
    """Raise LeaseError if a caller waits for a group that a lease of its own keeps from it: it
    is to be saved or leased, and leased to be changed, or the other way round."""
    if request.group not in core.queue.held_by(request.owner):
        return
    changes = request.kind is RequestKind.LEASE and request.access is not Access.READ
    for record in core.leases:
        if record.group != request.group or record.caller != request.owner:
            continue
        if request.kind is RequestKind.LEASE and record.held is not None:
            continue  # who has it in host memory may read it on the device
        if changes or record.access is not Access.READ:
            raise LeaseError(
                f"group {request.key!r} is leased by this caller itself, which would wait for "
                "that lease to be released: release it first"
            )


def refuse_beyond_the_disk(core: Core, key: str, nbytes: int) -> None:
    """Raise BudgetError if so many bytes more are not allowed on disk."""
    if inside():  # part of a transaction
        core.deliver(core.references.make_room(nbytes))
    else:
        core.references.make_room_now(nbytes)
    budget = core.planner.budgets[Tier.DISK]
    if budget is not None and core.planner.used[Tier.DISK] + nbytes > budget:
        advice = "raise disk_budget, or discard groups that are not needed"
        raise BudgetError(key, Tier.DISK.name, nbytes, budget, advice)


class TransferReports:
    """What the mover's threads report, each in a transaction. They do not keep the core alive."""

    def __init__(self, core: Core) -> None:
        self._core = weakref.ref(core)

    @property
    def core(self) -> Core:
        """Whom is reported to, by who has seen to it that it is there."""
        core = self._core()
        assert core is not None, "the store is gone"
        return core

    def told(self) -> MoverCallbacks:
        """Where the mover reports to."""

        def over(copy: Copy, error: BaseException | None) -> None:
            if (core := self._core()) is not None:
                core.reports.arrived(copy, error)

        def ending(copy: Copy) -> None:
            if (core := self._core()) is not None:
                core.reports.ending(copy)

        core = self.core
        return MoverCallbacks(over, ending, core.measurements.moved)

    @transaction
    def ending(self, copy: Copy) -> None:
        """The last bytes of a copy are asked for."""
        self.core.tell(events.Ending(copy.group, copy.src, copy.dst))

    @transaction
    def arrived(self, copy: Copy, error: BaseException | None) -> None:
        """A copy is done, or has failed."""
        core = self.core
        instructions = core.ended_copy(copy, error)
        core.mover.moved(copy)
        core.deliver(instructions)

    @transaction
    def removed(self) -> None:
        """A file was removed: who flushes may have waited for it."""
        self.core.queue.changed()

    def removed_if_open(self) -> None:
        """`removed`, unless nobody has the store any more."""
        core = self._core()
        if core is None:
            return
        if held_here(core.lock):  # the file went before the transaction that removes it was over
            core.queue.changed()
        else:
            core.reports.removed()


def _shut_down(mover: Mover, directory: ObjectDirectory, pid: int) -> None:
    # A forked child has neither the threads nor the lock. And a thread that a dead disk has stopped
    # may still write, some day: until then nobody else may have the directory.
    if os.getpid() != pid:
        return
    if mover.runs_here():  # it had the last reference to the store, for a moment
        end = threading.Thread(target=_shut_down, args=(mover, directory, pid))
        end.start()  # no daemon: the interpreter waits for it
    elif mover.stop():
        directory.close()
