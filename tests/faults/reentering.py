"""Calls of a store in the middle of other calls on the same thread.

A finalizer runs wherever the garbage collector does, and a signal handler between any two
instructions of the main thread. `Visitor` runs a function every N instructions of the library's own
code, and `Calls` is that function: it calls each method of a store in turn.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from tests.faults.interrupting import PACKAGE
from tests.store.helpers import PAGE, pages
from tierstore import Access, TierStore
from tierstore.errors import (
    BudgetError,
    ClosedError,
    DuplicateKeyError,
    LeaseError,
    ReentrantCallError,
)
from tierstore.model import signal_handlers

PATIENCE = 20.0
"""Seconds after which a call counts as hanging."""


class Visitor:
    """Calls `visit` before every `stride`-th instruction of the package on this thread.

    Begins at instruction `first`, and skips those that `visit` runs itself.
    """

    def __init__(self, visit: Callable[[str], None], stride: int, first: int = 0) -> None:
        self.visits = 0
        self._visit = visit
        self._stride = stride
        self._count = -first
        self._visiting = False

    def run(self, action: Callable[[], Any]) -> None:
        threading.current_thread()
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            action()
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self._visiting or not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_lines = False
        frame.f_trace_opcodes = True
        return self._instruction

    def _instruction(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode" and not self._visiting:
            if self._count % self._stride == 0:
                self._visits_at(frame)
            self._count += 1
        return self._instruction

    def _visits_at(self, frame: FrameType) -> None:
        self.visits += 1
        self._visiting = True
        try:
            self._visit(f"{frame.f_code.co_qualname}:{frame.f_lineno} at {frame.f_lasti}")
        finally:
            self._visiting = False


class Dying:
    """A caller's object whose finalizer runs a function."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def __del__(self) -> None:
        self._act()


def by_finalizer(act: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that calls `act` in the finalizer of an object that dies there."""

    def visit(where: str) -> None:
        Dying(lambda: act(where))

    return visit


class Signalling:
    """A context manager: calls `act` in the handler of a signal that arrives there."""

    def __init__(self, act: Callable[[str], None]) -> None:
        self.sent = self.handled = self.passed = 0
        self._act = act
        self._handling = False
        self._where = ""

    def __enter__(self) -> Signalling:
        self._before = signal.signal(signal.SIGUSR1, self._handle)
        signal_handlers.request_refresh()  # the next section must see the new handler
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGUSR1, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.handled += 1
        if self._handling:  # it was deferred meanwhile
            self.passed += 1
            return
        self._handling = True
        tracing = sys.gettrace()
        sys.settrace(None)
        try:
            self._act(self._where)
        finally:
            sys.settrace(tracing)
            self._handling = False

    def visit(self, where: str) -> None:
        if not self._handling:
            self.sent += 1
            self._where = where
            signal.raise_signal(signal.SIGUSR1)


class Calls:
    """Calls each public method of a store in turn, and compares the results.

    `refused` counts calls that raised because they were reentrant, by place. `unlucky` counts those
    that failed because of other callers' leases or the closed store. `wrong` lists all faults.
    """

    def __init__(self, store: TierStore, scratch: Path, patience: float = PATIENCE) -> None:
        self.store = store
        self.done: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.unlucky: Counter[str] = Counter()
        self.wrong: list[tuple[str, str, BaseException]] = []
        self._patience = patience
        self._scratch = scratch
        self._turns = itertools.count(1)
        self._calls = itertools.cycle(
            [
                self.get,
                self.put,
                self.acquire,
                self.flush,
                self.hint,
                self.look,
                self.update,
                self.discard,
                self.register,
                self.get_async,
                self.trace,
            ]
        )
        store.put("steady", pages(7))

    def make(self, where: str) -> None:
        """Make the next call."""
        self.one(next(self._calls), where)

    def one(self, call: Callable[[], None], where: str) -> None:
        """Make this call and record its errors."""
        try:
            call()
        except ReentrantCallError:
            self.refused[where] += 1
        except (BudgetError, LeaseError, ClosedError) as error:
            self.unlucky[type(error).__name__] += 1
        except BaseException as error:
            self.wrong.append((where, call.__name__, error))
        else:
            self.done[call.__name__] += 1

    def get(self) -> None:
        assert torch.equal(self.got("steady"), pages(7))

    def put(self) -> None:
        key, wanted = self._next()
        self.store.put(key, wanted, timeout=self._patience)
        assert torch.equal(self.got(key), wanted)
        self.store.discard(key)

    def acquire(self) -> None:
        with self.store.acquire("steady", timeout=self._patience) as lease:
            assert torch.equal(lease.tensor.cpu(), pages(7))

    def update(self) -> None:
        key, wanted = self._next()
        self.store.put(key, pages(0), timeout=self._patience)
        with self.store.acquire(key, Access.UPDATE, timeout=self._patience) as lease:
            lease.tensor.copy_(wanted)
        assert torch.equal(self.got(key), wanted)
        self.store.discard(key)

    def flush(self) -> None:
        self.store.flush(timeout=self._patience)

    def hint(self) -> None:
        self.store.prefetch("steady")
        self.store.offload("steady")
        self.store.make_sticky("steady")

    def look(self) -> None:
        assert "steady" in self.store
        assert len(self.store) > 0
        assert self.store.keys("stead") == ["steady"]
        stats = self.store.stats()
        assert all(stats.used_bytes[t] <= (n or PAGE**9) for t, n in stats.budget_bytes.items())
        assert self.store.snapshot().groups
        assert "TierStore" in self.store.report()
        assert repr(self.store)

    def discard(self) -> None:
        key, wanted = self._next()
        self.store.put(key, wanted, durable=False, timeout=self._patience)
        self.store.discard(key)
        assert key not in self.store

    def register(self) -> None:
        try:
            self.store.register("registered", {"w": pages(3)})
        except DuplicateKeyError:
            self.store.discard("registered")

    def get_async(self) -> None:
        assert torch.equal(asyncio.run(self._aget()).cpu(), pages(7))

    async def _aget(self) -> torch.Tensor:
        found = await asyncio.wait_for(self.store.aget("steady"), self._patience)
        assert isinstance(found, torch.Tensor)
        return found

    def trace(self) -> None:
        self.store.trace(self._scratch / "trace.json")

    def _next(self) -> tuple[str, torch.Tensor]:
        """Return an unused key, and a value."""
        turn = next(self._turns)
        return f"visited {turn}", pages(turn)

    def got(self, key: str) -> torch.Tensor:
        found = self.store.get(key, timeout=self._patience)
        assert isinstance(found, torch.Tensor)
        return found.cpu()


class Neighbour:
    """A context manager: another thread uses the store continuously."""

    def __init__(self, store: TierStore, patience: float = PATIENCE) -> None:
        self.store = store
        self.rounds = 0
        self.errors: list[BaseException] = []
        self._patience = patience
        self._over = False
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Neighbour:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over = True
        self._thread.join(3 * PATIENCE)
        assert not self._thread.is_alive(), "another thread's call hangs"

    def _work(self) -> None:
        try:
            while not self._over and not self.store.closed:
                self._round(self.rounds % 3)
                self.rounds += 1
        except ClosedError:
            pass
        except BaseException as error:
            self.errors.append(error)

    def _round(self, number: int) -> None:
        key, wanted = f"neighbour {number}", pages(self.rounds)
        self.store.put(key, wanted, timeout=self._patience)
        with self.store.acquire(key, timeout=self._patience) as lease:
            assert torch.equal(lease.tensor.cpu(), wanted)
        found = self.store.get(key, timeout=self._patience)
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found.cpu(), wanted)
