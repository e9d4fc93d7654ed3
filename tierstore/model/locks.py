"""Critical sections that survive interrupts at any instruction and detect re-entrant calls.

`with lock:` is not enough: an interrupt just before the release would leave the lock held forever.

A thread in a critical section may be made to call the library again, by the finalizer of a caller's
object that the garbage collector runs there, or by a signal handler. A plain lock would deadlock on
its own thread, and a re-entrant one would expose a half-done change. So each thread records the
first lock that it takes, and the lock's owner shows whether the section is still active: a stale
record, left by an interrupt, is harmless. A call from inside a section raises ReentrantCallError at
once. Signal handlers are deferred meanwhile: see `signal_handlers`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from threading import Lock, RLock
from typing import Any, Concatenate, ParamSpec, TypeVar

from tierstore.errors import ReentrantCallError
from tierstore.model import signal_handlers

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

__all__ = [
    "AutoResetEvent",
    "RLock",
    "check_may_wait",
    "exclusively",
    "guarded",
    "if_free",
    "inside",
    "may_wait",
    "serve",
    "under",
]


class _Here(threading.local):
    """Records of a thread.

    `section` is the lock of its outermost section, `exclusive` the lock of `exclusively`, and
    `serves` is True while the thread runs a job of a store.
    """

    section: Any = None
    exclusive: Any = None
    serves = False


_here = _Here()


def inside() -> bool:
    """Return True if this thread is in a critical section."""
    section = _here.section
    return section is not None and section._is_owned()


def is_owner(lock: Any) -> bool:
    """Return True if this thread owns an RLock."""
    return bool(lock._is_owned())


def serve(job: Callable[[], None]) -> None:
    """Run the job of a store's own thread, which must never wait for the store itself."""
    _here.serves = True
    try:
        job()
    finally:
        _here.serves = False


def may_wait() -> bool:
    """Return True if this thread may wait for a store.

    In a critical section, or on a thread of a store, it would wait for itself.
    """
    exclusive = _here.exclusive
    return not (_here.serves or inside() or (exclusive is not None and exclusive._is_owned()))


def check_may_wait() -> None:
    """Raise ReentrantCallError where `may_wait` is False."""
    if not may_wait():
        raise ReentrantCallError


def under(lock: Any, action: Callable[[], T], *, seconds: float = -1.0) -> T:
    """Run `action` under an RLock, which is released wherever an exception occurs.

    There are two `finally` blocks: the outer one handles an exception in the inner one, before it
    released the lock. With a timeout of `seconds`, `action` must check that the lock was acquired.

    On the main thread, signal handlers are deferred to the end of the outermost section.
    Raises ReentrantCallError if this thread owns the lock.
    """
    if lock._is_owned():
        raise ReentrantCallError
    outer = _here.section
    outermost = outer is None or not outer._is_owned()
    held = None
    try:
        try:
            if outermost:
                # Before the lock is acquired: a handler that runs just before may enter sections
                # itself, and restores the record.
                _here.section = lock
                held = signal_handlers.hold(inside, nested=outer is not None)
            lock.acquire(timeout=seconds)
            return action()
        finally:
            if lock._is_owned():
                lock.release()
            if outermost:
                _here.section = outer
    finally:
        if lock._is_owned():
            lock.release()
        if outermost:
            _here.section = outer
            if held or signal_handlers.arrived:
                signal_handlers.release(held or ())


def exclusively(lock: Any, action: Callable[[], T]) -> T:
    """Run a slow `action`, such as connecting, under an RLock.

    This is not a critical section: signal handlers run during it, and it may begin transactions.
    Raises ReentrantCallError if this thread owns the lock.
    """
    if lock._is_owned():
        raise ReentrantCallError
    outer = _here.exclusive
    try:
        try:
            _here.exclusive = lock
            lock.acquire()
            return action()
        finally:
            if lock._is_owned():
                lock.release()
            _here.exclusive = outer
    finally:
        if lock._is_owned():
            lock.release()
        _here.exclusive = outer


def if_free(lock: Any, action: Callable[[], T], seconds: float) -> T | None:
    """Run `action` under an RLock if it can be acquired within `seconds`; else return None.

    Returns None, too, if this thread owns the lock: the protected state may be half-changed.
    """
    if lock._is_owned():
        return None
    return under(lock, lambda: action() if lock._is_owned() else None, seconds=seconds)


def guarded(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Make a method a critical section under the `_lock` of its object."""

    @functools.wraps(method)
    def whole(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return under(self._lock, lambda: method(self, *args, **kwargs))  # type: ignore[attr-defined]

    return whole


class AutoResetEvent:
    """Wakes one waiting thread, then resets. If set early, the next wait returns at once.

    Callers of `set` and `clear` must hold a common lock.
    """

    def __init__(self) -> None:
        self._unset = Lock()
        self._unset.acquire()

    def set(self) -> None:
        """Wake the waiting thread, or the next to wait."""
        if self._unset.locked():
            self._unset.release()

    def clear(self) -> None:
        """Reset the event."""
        self._unset.acquire(blocking=False)

    def wait(self, seconds: float) -> bool:
        """Wait until the event is set, for up to `seconds`. Return True if it was set."""
        return self._unset.acquire(timeout=seconds)
