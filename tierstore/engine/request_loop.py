"""The wait loop of callers. Only this module sleeps, between transactions."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from tierstore.engine.core import Core, check_not_waiting_for_itself
from tierstore.engine.lease_table import LeaseTable
from tierstore.engine.transaction import transaction
from tierstore.engine.wait_queue import POLL_SECONDS, LoopEvent, Request, RequestKind
from tierstore.errors import StoreTimeoutError
from tierstore.model.groups import NO_GROUP
from tierstore.model.locks import check_may_wait
from tierstore.observe.ranges import ranged
from tierstore.plan.records import State

_WAITS = {
    RequestKind.LEASE: "wait",
    RequestKind.PUT: "wait for room for",
    RequestKind.HOST_LEASE: "wait in host memory for",
    RequestKind.SAVE: "wait until saved:",
}
"""Label of a wait in a profiler, by kind of request."""

T = TypeVar("T")


class RequestLoop:
    """Tries requests until they succeed. A request that fails is withdrawn completely."""

    def __init__(self, core: Core, lease_table: LeaseTable) -> None:
        self.core = core
        self._lease_table = lease_table

    def wait(
        self,
        request: Request,
        attempt: Callable[[Request], T | None],
        timeout: float | None = None,
    ) -> T:
        """Run `attempt` as a transaction until it returns a result. Sleeps between attempts.

        Raises StoreTimeoutError after `timeout` seconds (None: never), and ReentrantCallError if
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
            self.cancel(request)
            raise

    def _sleep_until(
        self, request: Request, attempt: Callable[[Request], T | None], timeout: float | None
    ) -> T:
        wakeup = request.wakeup
        assert not isinstance(wakeup, LoopEvent), "a coroutine must use `wait_async`"
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = POLL_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise StoreTimeoutError(request.key, request.kind.value, timeout or 0.0)
            wakeup.wait(min(left, POLL_SECONDS))
            if (result := self._try(request, attempt)) is not None:
                return result

    async def wait_async(
        self,
        request: Request,
        attempt: Callable[[Request], T | None],
        timeout: float | None = None,
    ) -> T:
        """Async `wait`. Never blocks the event loop."""
        request.wakeup = woken = LoopEvent()
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while True:
                woken.reset()
                if (result := self._try(request, attempt)) is not None:
                    return result
                left = POLL_SECONDS if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    raise StoreTimeoutError(request.key, request.kind.value, timeout or 0.0)
                await woken.wait(min(left, POLL_SECONDS))
        except BaseException:
            self.cancel(request)
            raise

    @transaction
    def attempt_once(self, request: Request, attempt: Callable[[Request], T | None]) -> T | None:
        """Run `attempt` once if the group is leasable; otherwise demand nothing."""
        core = self.core
        group = core.lookup(request.key)
        if not core.planner.leasable(group, request.access):
            return None
        return attempt(request)

    @transaction
    def _try(self, request: Request, attempt: Callable[[Request], T | None]) -> T | None:
        core = self.core
        result = attempt(request)
        if result is None and core.revocable and not self.is_in_flight(request):
            self._lease_table.revoke_all()
            result = attempt(request)
        if result is None:
            check_not_waiting_for_itself(core, request)
            core.queue.enqueue_request(request)
        else:
            core.queue.remove_request(request)
        return result

    def is_in_flight(self, request: Request) -> bool:
        """Return True if the awaited group is in flight, so that the request lacks no memory."""
        if request.kind is RequestKind.LEASE:
            return self.core.planner.state_of(request.group) in (State.RESERVED, State.ARRIVING)
        return request.kind is RequestKind.SAVE

    @transaction
    def cancel(self, request: Request) -> None:
        """Cancel a request: withdraw its demand, and end a lease that was granted."""
        core = self.core
        if core.is_stopped():
            request.group = NO_GROUP
            return
        core.queue.remove_request(request)
        core.observer.acquire_failed(request.noted)
        if request.record is not None:
            self._lease_table.reclaim(request.record)
        demand, request.group = request.demand, NO_GROUP
        core.withdraw(demand)
