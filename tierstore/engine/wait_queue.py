"""Who waits for the store, who holds leases, and whether anybody can still get on.

Whatever changes the store starts a new *epoch*, and wakes the waiters that it can help: to try in
vain costs a switch of threads, and with dozens of them that would be all they do. A request that
tries in vain notes the epoch, and so does one that need not try. When all have the newest epoch,
every lease is held by somebody who waits, and nothing is on its way, nobody can get on: those who
hold leases are told so instead of waiting for ever.

A caller may wait twice: a signal handler comes while it waits, and waits for the store itself. Only
the newer request can get on, and what the older ones have is held until it does.
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

LOOK_AGAIN = 1.0
"""Seconds between looks at what nobody can be woken for: leases that were lost, not released."""

LONGEST_ENTRY = 10.0
"""Seconds that entering the plan of a loop waits for one group. Then it is given up."""


def caller() -> object:
    """Who is asking: the running task, or else the thread."""
    # Every acquire asks; where no loop runs, that is all it costs.
    task = None if asyncio._get_running_loop() is None else asyncio.current_task()
    return task if task is not None else threading.get_ident()


class RequestKind(Enum):
    """What a request is for."""

    LEASE = "a lease"
    ROOM = "room for a put"
    HOST_LEASE = "a group in host memory"
    SAVE = "a copy on disk"


class LoopEvent:
    """Wakes the coroutine that waits for it, from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._set = asyncio.Event()

    def set(self) -> None:
        """Wake who waits."""
        with suppress(RuntimeError):  # the loop was closed, and nobody waits there any more
            self._loop.call_soon_threadsafe(self._set.set)

    def clear(self) -> None:
        """Nothing: `wait` forgets that it was rung, on the thread of the loop."""

    async def wait(self, seconds: float) -> None:
        """Wait until it is rung, or for so long. What rang before is for `reset` to forget."""
        # Not asyncio.wait_for: in Python 3.11 it may lose a cancellation.
        alarm = self._loop.call_later(seconds, self._set.set)
        try:
            await self._set.wait()
        finally:
            alarm.cancel()

    def reset(self) -> None:
        """Forget that it was rung. By the coroutine."""
        self._set.clear()


@dataclass(frozen=True, slots=True)
class Demand:
    """What the planner pursues because of a request, until it is met or taken back."""

    kind: RequestKind
    group: GroupId
    purpose: HostAccess | None = None


@dataclass(eq=False, slots=True, weakref_slot=True)
class Request:
    """A caller that wants something of `key`.

    `group` is the one that the planner pursues; NO_GROUP if it pursues none. `record` is of the
    lease that it got. `stream` is who uses one group after another: the thread, or a worker. Of an
    acquire, `noted` is for the journal. `wakeup` has whoever waits try again.
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
        """What the planner pursues for it."""
        return Demand(self.kind, self.group, self.purpose)


@dataclass(eq=False, slots=True)
class LeaseRecord(LeaseUse):
    """The store's side of a lease, and later a note of it.

    It is of the copy on the fastest tier, or `held` in host memory. `stream` is where the device
    uses what was lent, as far as is known: if the lease is lost, whoever finds it is on another.
    `tensors` are those that the lease gives, until it ends.
    """

    access: Access = Access.READ
    held: HostAccess | None = None
    stream: Any = None
    tensors: dict[str, Any] | None = None


class QueuedRequest(weakref.ref[Request]):
    """Of a request that waits, and of its demand, which may be all that is left of it. `tried` is
    the epoch of its last vain attempt."""

    __slots__ = ("demand", "tried")
    demand: Demand
    tried: int


class WaitQueue:
    """Requests that wait, and leases that are out. All methods are parts of transactions.

    `ready` tells whether to try again can make a difference for a request; `idle`, whether nothing
    is on its way, but for room that callers fill, or will when they are not `interrupted` any more.
    `refuse` raises for a request that can never be met, given the versions that are held: leased,
    or being put into room that was granted; or it finds some that nobody has any more. Only who
    holds something is refused: others just came at a bad moment.
    """

    def __init__(
        self,
        ready: Callable[[Request], bool],
        idle: Callable[[Collection[Request]], bool],
        refuse: Callable[[Request, set[GroupId]], None],
    ) -> None:
        self._ready = ready
        self._idle = idle
        self._refuse = refuse
        self._epoch = 0
        self._called = -1  # the epoch in which a holder was woken to be refused
        self._queued: dict[int, QueuedRequest] = {}
        self._lost: deque[Demand] = deque()
        self._held: dict[object, dict[GroupId, int]] = {}  # owner -> version -> leases of it

    def anybody(self) -> bool:
        """Whether anybody may wait."""
        return bool(self._queued)

    def requests(self) -> list[Request]:
        """Those who wait."""
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
        """What requests wanted that are gone without having been met or given up."""
        if self._queued:
            self.requests()
        if not self._lost:
            return []
        lost, self._lost = self._lost, deque()
        return list(lost)

    def changed(self) -> None:
        """Something is different: wake the waiters that it can help."""
        self._epoch += 1
        if not self._queued:
            return
        for request in self.requests():
            if self._ready(request):
                request.wakeup.set()
            else:
                self._queued[id(request)].tried = self._epoch
        self._call(self._stuck())

    def add_lease(self, owner: object, version: GroupId) -> None:
        """A lease goes out. With no `owner` it does so for good: nobody waits for it."""
        if owner is None:
            return
        held = self._held.setdefault(owner, {})
        held[version] = held.get(version, 0) + 1

    def remove_lease(self, owner: object, version: GroupId) -> None:
        """A lease comes back."""
        if owner is None:
            return
        held = self._held.get(owner, {})
        left = held.pop(version, 0) - 1
        if left > 0:
            held[version] = left
        elif not held:
            self._held.pop(owner, None)

    def held_by(self, owner: object) -> Collection[GroupId]:
        """The versions that a caller holds."""
        return self._held.get(owner, ())

    def recount(self, leases: Iterable[tuple[object, GroupId]]) -> None:
        """These leases are out, and no others: by whom, and of which version."""
        self._held = {}
        for owner, version in leases:
            self.add_lease(owner, version)

    def leave(self, request: Request) -> None:
        """The request waits no more."""
        self._queued.pop(id(request), None)

    def tried_in_vain(self, request: Request) -> None:
        """The request has to wait for a change. Raises if there can be none."""
        request.wakeup.clear()
        queued = QueuedRequest(request)
        queued.demand, queued.tried = request.demand, self._epoch
        self._queued[id(request)] = queued
        stuck = self._stuck()
        if request in stuck:
            self._refuse(request, self._out_of_reach())
        self._call(stuck)

    def _stuck(self) -> list[Request]:
        """Those who wait and hold something, if nobody can get on: nobody else holds anything."""
        # Of each caller the newest: it runs in a signal handler that has interrupted the others.
        waiting = {request.owner or request: request for request in self.requests()}
        interrupted = self._interrupted() if len(waiting) < len(self._queued) else []
        holders = {*self._held, *(request.owner for request in interrupted)}
        if not holders or not holders <= waiting.keys() or not self._idle(interrupted):
            return []
        if any(self._queued[id(request)].tried != self._epoch for request in waiting.values()):
            return []
        return [request for owner, request in waiting.items() if owner in holders]

    def _interrupted(self) -> list[Request]:
        """Those whose callers wait for something newer before they can go on."""
        newest: dict[object, Request] = {}
        older = []
        for request in self.requests():
            if request.owner in newest:
                older.append(newest[request.owner])
            if request.owner is not None:
                newest[request.owner] = request
        return older

    def _out_of_reach(self) -> set[GroupId]:
        """What is held, or is pursued for callers that cannot go on."""
        held = {version for held in self._held.values() for version in held}
        return held | {request.group for request in self._interrupted()} - {NO_GROUP}

    def _call(self, stuck: list[Request]) -> None:
        """Have them try once more, to be refused."""
        if stuck and self._called != self._epoch:
            self._called = self._epoch
            for request in stuck:
                request.wakeup.set()
