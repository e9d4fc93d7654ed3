"""Who waits for the store, who holds leases, and whether anybody can still get on.

One condition guards the store. Whatever changes it starts a new *epoch* and wakes everybody; a
request that tries in vain notes the epoch. When all requests have tried in the newest epoch, every
lease is held by somebody who waits, and nothing is on its way, nobody can get on: the last to try
is told so instead of waiting for ever.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tierstore.model.journal import Span
from tierstore.model.tiers import Access

T = TypeVar("T")

LOOK_AGAIN = 1.0
"""Seconds between looks at what nobody can be woken for: leases that were lost, not released."""


def caller() -> object:
    """Who is asking: the running task, or else the thread."""
    # Every acquire asks; where no loop runs, that is all it costs.
    task = None if asyncio._get_running_loop() is None else asyncio.current_task()
    return task if task is not None else threading.get_ident()


@dataclass(eq=False, slots=True)
class Request:
    """A caller that wants something of `key`. `tried` is the epoch of its last vain attempt.

    `met` says how an acquire was met; `stall` is its wait, which began on an accelerator at `mark`.
    """

    key: str
    access: Access = Access.READ
    version: str = ""
    owner: object = field(default_factory=caller)
    since: float = field(default_factory=time.monotonic)
    tried: int = -1
    met: str = ""
    stall: Span | None = None
    mark: Any = None


class WaitingRoom:
    """Requests that wait on `condition`, which is the store's lock too, and leases that are out.

    `idle` tells whether nothing is on its way; `refuse` raises for a request that can never be met,
    given the versions that are held. Only who holds a lease is refused: others just came at a bad
    moment. All methods but `wait` and `wait_async` need the lock.
    """

    def __init__(
        self, idle: Callable[[], bool], refuse: Callable[[Request, set[str]], None]
    ) -> None:
        self.condition = threading.Condition()
        self._idle = idle
        self._refuse = refuse
        self._epoch = 0
        self._called = -1  # the epoch in which a holder was woken to be refused
        self._requests: set[Request] = set()
        self._listeners: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._held: dict[object, dict[str, int]] = {}  # owner -> version -> leases of it

    def changed(self) -> None:
        """Wake everybody: something is different."""
        self._epoch += 1
        self._wake()

    def _wake(self) -> None:
        self.condition.notify_all()
        for loop, woken in self._listeners:
            if not loop.is_closed():
                loop.call_soon_threadsafe(woken.set)

    def lend(self, owner: object, version: str) -> None:
        """A lease goes out. With no `owner` it does so for good: nobody waits for it."""
        if owner is None:
            return
        held = self._held.setdefault(owner, {})
        held[version] = held.get(version, 0) + 1

    def give_back(self, owner: object, version: str) -> None:
        """A lease comes back."""
        if owner is None:
            return
        held = self._held.get(owner, {})
        left = held.pop(version, 0) - 1
        if left > 0:
            held[version] = left
        elif not held:
            self._held.pop(owner, None)

    def wait(self, request: Request, attempt: Callable[[Request], T | None]) -> T:
        """Try until `attempt` gives something, sleeping until something has changed."""
        with self.condition:
            self._requests.add(request)
            try:
                while (result := attempt(request)) is None:
                    self._tried_in_vain(request)
                    self.condition.wait(LOOK_AGAIN)
                return result
            finally:
                self._requests.discard(request)

    async def wait_async(self, request: Request, attempt: Callable[[Request], T | None]) -> T:
        """`wait` for coroutines: never blocks the event loop."""
        listener = (asyncio.get_running_loop(), asyncio.Event())
        with self.condition:
            self._requests.add(request)
            self._listeners.add(listener)
        try:
            while True:
                listener[1].clear()
                with self.condition:
                    result = attempt(request)
                    if result is not None:
                        return result
                    self._tried_in_vain(request)
                with suppress(TimeoutError):
                    await asyncio.wait_for(listener[1].wait(), LOOK_AGAIN)
        finally:
            with self.condition:
                self._requests.discard(request)
                self._listeners.discard(listener)

    def _tried_in_vain(self, request: Request) -> None:
        request.tried = self._epoch
        waiting = {r.owner for r in self._requests}
        all_tried = all(r.tried == self._epoch for r in self._requests)
        if not self._held or not self._held.keys() <= waiting or not all_tried or not self._idle():
            return
        if request.owner in self._held:
            self._refuse(request, {v for held in self._held.values() for v in held})
        elif self._called != self._epoch:
            self._called = self._epoch
            self._wake()
