"""How callers wait: the only place of the engine that sleeps, between transactions."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from tierstore.engine.core import Core, refuse_to_wait_for_itself
from tierstore.engine.lease_table import LeaseTable
from tierstore.engine.transaction import transaction
from tierstore.engine.wait_queue import LOOK_AGAIN, LoopEvent, Request, RequestKind
from tierstore.errors import StoreTimeoutError
from tierstore.model.groups import NO_GROUP
from tierstore.model.locks import check_may_wait
from tierstore.observe.ranges import ranged
from tierstore.plan.records import State

_WAITS = {
    RequestKind.LEASE: "wait",
    RequestKind.ROOM: "wait for room for",
    RequestKind.HOST_LEASE: "wait in host memory for",
    RequestKind.SAVE: "wait until saved:",
}
"""What a profiler is told of a wait, by what it is for."""

T = TypeVar("T")


class RequestLoop:
    """Tries what callers ask for until it can be done, or leaves nothing of it behind."""

    def __init__(self, core: Core, lease_table: LeaseTable) -> None:
        self.core = core
        self._lease_table = lease_table

    def wait(
        self,
        request: Request,
        attempt: Callable[[Request], T | None],
        timeout: float | None = None,
    ) -> T:
        """Try until `attempt`, as a transaction, gives something; sleep until something changed.

        Raises StoreTimeoutError after `timeout` seconds (None: never), and ReentrantCallError where
        the thread would wait for itself.
        """
        check_may_wait()
        try:
            result = self._try(request, attempt)
            if result is None:
                with ranged(_WAITS[request.kind], request.key):
                    result = self._sleep_until(request, attempt, timeout)
            return result
        except BaseException:
            self.give_up(request)
            raise

    def _sleep_until(
        self, request: Request, attempt: Callable[[Request], T | None], timeout: float | None
    ) -> T:
        wakeup = request.wakeup
        assert not isinstance(wakeup, LoopEvent), "a coroutine waits in `wait_async`"
        ends = None if timeout is None else time.monotonic() + timeout
        while True:
            left = LOOK_AGAIN if ends is None else ends - time.monotonic()
            if left <= 0:
                raise StoreTimeoutError(request.key, request.kind.value, timeout or 0.0)
            wakeup.wait(min(left, LOOK_AGAIN))
            if (result := self._try(request, attempt)) is not None:
                return result

    async def wait_async(
        self,
        request: Request,
        attempt: Callable[[Request], T | None],
        timeout: float | None = None,
    ) -> T:
        """`wait` for coroutines: never blocks the event loop."""
        request.wakeup = woken = LoopEvent()
        ends = None if timeout is None else time.monotonic() + timeout
        try:
            while True:
                woken.reset()
                if (result := self._try(request, attempt)) is not None:
                    return result
                left = LOOK_AGAIN if ends is None else ends - time.monotonic()
                if left <= 0:
                    raise StoreTimeoutError(request.key, request.kind.value, timeout or 0.0)
                await woken.wait(min(left, LOOK_AGAIN))
        except BaseException:
            self.give_up(request)
            raise

    @transaction
    def attempt_once(self, request: Request, attempt: Callable[[Request], T | None]) -> T | None:
        """Try once: what is not there is not asked for, and nothing is left behind."""
        core = self.core
        group = core.lookup(request.key)
        if not core.planner.leasable(group, request.access):
            return None
        return attempt(request)

    @transaction
    def _try(self, request: Request, attempt: Callable[[Request], T | None]) -> T | None:
        core = self.core
        result = attempt(request)
        if result is None and core.revocable and not self.is_coming(request):
            self._lease_table.revoke_all()
            result = attempt(request)
        if result is None:
            refuse_to_wait_for_itself(core, request)
            core.queue.tried_in_vain(request)
        else:
            core.queue.leave(request)
        return result

    def is_coming(self, request: Request) -> bool:
        """Whether what a request waits for is on its way: then it lacks no room."""
        if request.kind is RequestKind.LEASE:
            return self.core.planner.state_of(request.group) in (State.RESERVED, State.ARRIVING)
        return request.kind is RequestKind.SAVE

    @transaction
    def give_up(self, request: Request) -> None:
        """Leave nothing of a request behind."""
        core = self.core
        if core.ended():
            request.group = NO_GROUP
            return
        core.queue.leave(request)
        core.observer.gave_up(request.noted)
        if request.record is not None:
            self._lease_table.take_back(request.record)
        demand, request.group = request.demand, NO_GROUP
        core.withdraw(demand)
