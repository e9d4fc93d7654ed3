"""Waiting requests, lease owners, and the detection of deadlocks.

Each change of the store starts a new *epoch*, and wakes only the waiters that may proceed: a failed
attempt costs a thread switch, and dozens of threads would do nothing else. A request records the
epoch of its last failed attempt, or of the last change that could not help it. If all requests have
the newest epoch, every lease is held by a waiter, and no copy is in flight, then no waiter can
proceed. The waiters that hold leases then raise instead of waiting forever.

A caller may wait twice: a signal handler interrupts its wait, and waits for the store as well. Only
the newer request can proceed, and the leases of the older ones are held until it does.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tierstore.model.groups import NO_GROUP, GroupId
from tierstore.model.locks import AutoResetEvent
from tierstore.model.tiers import Access, HostAccess
from tierstore.observe.journal import AcquireNote, LeaseUse

POLL_SECONDS = 1.0
"""Seconds between polls for leases dropped without release, which wake no waiter."""

MAX_ENTRY_SECONDS = 10.0
"""Longest wait for one group while a plan is entered, after which the plan is abandoned."""


def caller() -> object:
    """Return the owner of new leases: the running task, or else the thread."""
    # Runs in every acquire: without an event loop, this check is the whole cost.
    task = None if asyncio._get_running_loop() is None else asyncio.current_task()
    return task if task is not None else threading.get_ident()


class RequestKind(Enum):
    """The purpose of a request. Values complete "waiting for ..." in errors."""

    LEASE = "a lease"
    PUT = "memory for a put"
    HOST_LEASE = "a host-memory lease"
    SAVE = "a save to disk"


class LoopEvent:
    """An event that any thread may set, for one waiting coroutine."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._set = asyncio.Event()

    def set(self) -> None:
        """Wake the waiter."""
        with suppress(RuntimeError):  # the loop is closed, and the waiter is gone
            self._loop.call_soon_threadsafe(self._set.set)

    def clear(self) -> None:
        """Do nothing: `reset` clears the event, on the thread of the loop."""

    async def wait(self, seconds: float) -> None:
        """Wait until the event is set, or for `seconds`. Does not clear it: see `reset`."""
        # asyncio.wait_for may lose a cancellation in Python 3.11.
        alarm = self._loop.call_later(seconds, self._set.set)
        try:
            await self._set.wait()
        finally:
            alarm.cancel()

    def reset(self) -> None:
        """Clear the event. Called by the waiting coroutine."""
        self._set.clear()


@dataclass(frozen=True, slots=True)
class Demand:
    """A demand on the planner, until the request is fulfilled or withdrawn."""

    kind: RequestKind
    group: GroupId
    purpose: HostAccess | None = None


@dataclass(eq=False, slots=True, weakref_slot=True)
class Request:
    """A caller's request for the group of `key`.

    `group` is the generation demanded from the planner, or NO_GROUP. `record` is the record of the
    granted lease. `stream` identifies a sequence of uses: the thread, or a worker. `noted` is the
    journal's note of an acquire. Setting `wakeup` makes the waiter try again.
    """

    key: str
    kind: RequestKind
    access: Access = Access.READ
    purpose: HostAccess | None = None
    group: GroupId = NO_GROUP
    owner: object = field(default_factory=caller)
    stream: int = field(default_factory=threading.get_ident)
    noted: AcquireNote = field(default_factory=AcquireNote)
    record: LeaseRecord | None = None
    wakeup: AutoResetEvent | LoopEvent = field(default_factory=AutoResetEvent)

    @property
    def demand(self) -> Demand:
        """The demand on the planner for this request."""
        return Demand(self.kind, self.group, self.purpose)


@dataclass(eq=False, slots=True)
class LeaseRecord(LeaseUse):
    """The store's record of a lease, and later its entry in the journal.

    The lease is of the copy in host memory if `host_access` is set, or else on the fastest tier.
    `stream` is the last known device stream on which the tensors are used: a dropped lease may be
    ended on another one. `tensors` are the leased tensors, until the lease ends.
    """

    access: Access = Access.READ
    host_access: HostAccess | None = None
    stream: Any = None
    tensors: dict[str, Any] | None = None


class QueuedRequest(weakref.ref[Request]):
    """A weak reference to a waiting request, and its demand, which outlives it.

    `tried_epoch` is the epoch of its last failed attempt.
    """

    __slots__ = ("demand", "tried_epoch")
    demand: Demand
    tried_epoch: int


class WaitQueue:
    """Waiting requests and open leases. All methods are parts of transactions.

    `ready` returns whether another attempt of a request may succeed. `idle` returns whether no copy
    is in flight except memory that callers fill. Its argument lists the interrupted requests: their
    callers wait for newer ones first, and fill memory later. `fail_blocked` raises for a blocked
    request, given the groups that are leased or being put, unless garbage collection releases some.
    Only lease owners fail: other waiters cannot cause a deadlock.
    """

    def __init__(
        self,
        ready: Callable[[Request], bool],
        idle: Callable[[Collection[Request]], bool],
        fail_blocked: Callable[[Request, set[GroupId]], None],
    ) -> None:
        self._ready = ready
        self._idle = idle
        self._fail_blocked = fail_blocked
        self._epoch = 0
        self._woken_epoch = -1  # the epoch in which blocked requests were woken to fail
        self._queued: dict[int, QueuedRequest] = {}
        self._lost: deque[Demand] = deque()
        self._held: dict[object, dict[GroupId, int]] = {}  # owner -> group -> number of leases

    def has_waiters(self) -> bool:
        """Return True if any request may be waiting."""
        return bool(self._queued)

    def requests(self) -> list[Request]:
        """Return the waiting requests."""
        found = []
        for number, queued in list(self._queued.items()):
            request = queued()
            if request is None:  # its caller was interrupted
                self._lost.append(queued.demand)
                del self._queued[number]
            else:
                found.append(request)
        return found

    def lost_demands(self) -> list[Demand]:
        """Return the demands of requests that were dropped without a result."""
        if self._queued:
            self.requests()
        if not self._lost:
            return []
        lost, self._lost = self._lost, deque()
        return list(lost)

    def notify_change(self) -> None:
        """Start a new epoch, and wake the waiters that may proceed."""
        self._epoch += 1
        if not self._queued:
            return
        for request in self.requests():
            if self._ready(request):
                request.wakeup.set()
            else:
                self._queued[id(request)].tried_epoch = self._epoch
        self._wake_blocked(self._blocked_requests())

    def add_lease(self, owner: object, version: GroupId) -> None:
        """Count a lease. A lease without an `owner` is permanent, and is not counted."""
        if owner is None:
            return
        held = self._held.setdefault(owner, {})
        held[version] = held.get(version, 0) + 1

    def remove_lease(self, owner: object, version: GroupId) -> None:
        """Remove a lease from the counts."""
        if owner is None:
            return
        held = self._held.get(owner, {})
        left = held.pop(version, 0) - 1
        if left > 0:
            held[version] = left
        elif not held:
            self._held.pop(owner, None)

    def held_by(self, owner: object) -> Collection[GroupId]:
        """Return the groups that an owner has leased."""
        return self._held.get(owner, ())

    def recount(self, leases: Iterable[tuple[object, GroupId]]) -> None:
        """Replace the counts by these leases: pairs of owner and group."""
        self._held = {}
        for owner, version in leases:
            self.add_lease(owner, version)

    def remove_request(self, request: Request) -> None:
        """Remove a request that no longer waits."""
        self._queued.pop(id(request), None)

    def enqueue_request(self, request: Request) -> None:
        """Let a request wait for the next change. Raises if it is blocked."""
        request.wakeup.clear()
        queued = QueuedRequest(request)
        queued.demand, queued.tried_epoch = request.demand, self._epoch
        self._queued[id(request)] = queued
        stuck = self._blocked_requests()
        if request in stuck:
            self._fail_blocked(request, self._unavailable_groups())
        self._wake_blocked(stuck)

    def _blocked_requests(self) -> list[Request]:
        """Return the requests of waiting lease owners if no waiter can proceed, else nothing."""
        # The newest of each caller: it belongs to a signal handler that interrupted the others.
        waiting = {request.owner or request: request for request in self.requests()}
        interrupted = self._interrupted() if len(waiting) < len(self._queued) else []
        holders = {*self._held, *(request.owner for request in interrupted)}
        if not holders or not holders <= waiting.keys() or not self._idle(interrupted):
            return []
        if any(
            self._queued[id(request)].tried_epoch != self._epoch for request in waiting.values()
        ):
            return []
        return [request for owner, request in waiting.items() if owner in holders]

    def _interrupted(self) -> list[Request]:
        """Return the requests that newer requests of the same callers have interrupted."""
        newest: dict[object, Request] = {}
        older = []
        for request in self.requests():
            if request.owner in newest:
                older.append(newest[request.owner])
            if request.owner is not None:
                newest[request.owner] = request
        return older

    def _unavailable_groups(self) -> set[GroupId]:
        """Return the groups that are leased, or demanded by interrupted requests."""
        held = {version for held in self._held.values() for version in held}
        return held | {request.group for request in self._interrupted()} - {NO_GROUP}

    def _wake_blocked(self, stuck: list[Request]) -> None:
        """Wake blocked requests: their next attempt raises."""
        if stuck and self._woken_epoch != self._epoch:
            self._woken_epoch = self._epoch
            for request in stuck:
                request.wakeup.set()
