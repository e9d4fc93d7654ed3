"""Critical sections: locks that survive an interrupt at any instruction, and re-entrant calls.

`with lock:` does not: the interpreter may stop just before it would give the lock back, and then
no thread ever gets it again.

A thread may be made to call the library while it is in the middle of one of its sections: by the
finalizer of a caller's object that the garbage collector runs there, or by a signal handler. A
plain lock would then wait for its own thread, and a reentrant one would let the call see a
half-done change. So the first lock that a thread takes is noted with the thread, and a lock's own
knowledge of its owner says whether the section still goes on: a note that an interrupt has left
behind does no harm. Who finds its thread inside raises ReentrantCallError at once. Signal handlers
are held back meanwhile: see `signal_handlers`.
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
    """Notes of a thread: the outermost lock of its sections, the lock of what it does exclusively,
    and whether it serves a store."""

    section: Any = None
    exclusive: Any = None
    serves = False


_here = _Here()


def inside() -> bool:
    """Whether this thread is in the middle of a critical section."""
    section = _here.section
    return section is not None and section._is_owned()


def held_here(lock: Any) -> bool:
    """Whether this thread has an RLock."""
    return bool(lock._is_owned())


def serve(job: Callable[[], None]) -> None:
    """Run what a thread of a store does: it must never wait for what only such threads do."""
    _here.serves = True
    try:
        job()
    finally:
        _here.serves = False


def may_wait() -> bool:
    """Whether this thread may wait for a store: in a section, or serving, it waits for itself."""
    exclusive = _here.exclusive
    return not (_here.serves or inside() or (exclusive is not None and exclusive._is_owned()))


def check_may_wait() -> None:
    """Raise ReentrantCallError where `may_wait` is False."""
    if not may_wait():
        raise ReentrantCallError


def under(lock: Any, action: Callable[[], T], *, seconds: float = -1.0) -> T:
    """Do something under an RLock, which is given back wherever an exception comes up.

    There are two ends: an exception in the inner one, before it gave the lock back, is met by the
    outer one. The lock knows whether this thread has it. `seconds` is how long to wait for it:
    then `action` has to look whether it came.

    On the main thread, signal handlers run after the outermost section that they come in.
    Raises ReentrantCallError if this thread has the lock.
    """
    if lock._is_owned():
        raise ReentrantCallError
    outer = _here.section
    outermost = outer is None or not outer._is_owned()
    held = None
    try:
        try:
            if outermost:
                # Before the lock is taken. A handler that comes just before that may have sections
                # of its own, and leaves the note as it was.
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
                signal_handlers.let_go(held or ())


def exclusively(lock: Any, action: Callable[[], T]) -> T:
    """Do something that may take long, such as to connect, under an RLock that others may want.

    It is no critical section: signal handlers run in the middle of it, and it may begin
    transactions. Raises ReentrantCallError if this thread has the lock.
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
    """Do something under an RLock, if it comes free within so many seconds; else None.

    A thread that has the lock is in the middle of something that its own code shall not see.
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
    """Wakes one thread that waits for it. Rung before anybody waits, it wakes the next at once.

    Who rings and who resets hold a lock in common.
    """

    def __init__(self) -> None:
        self._silent = Lock()
        self._silent.acquire()

    def set(self) -> None:
        """Wake who waits."""
        if self._silent.locked():
            self._silent.release()

    def clear(self) -> None:
        """Forget that it was rung."""
        self._silent.acquire(blocking=False)

    def wait(self, seconds: float) -> bool:
        """Wait until it is rung, or for so long. Returns whether it was."""
        return self._silent.acquire(timeout=seconds)
