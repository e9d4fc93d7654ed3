"""Locks that an interrupt at any instruction of the interpreter leaves as they should be.

`with lock:` is not one: the interpreter may stop just before it would give the lock back, and then
nobody ever gets it again.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock, RLock
from typing import Any, TypeVar

T = TypeVar("T")

__all__ = ["AutoResetEvent", "RLock", "if_free", "under"]


def under(lock: Any, action: Callable[[], T]) -> T:
    """Do something under an RLock, which is given back wherever an exception comes up.

    There are two ends: an exception in the inner one, before it gave the lock back, is met by the
    outer one. The lock knows whether this thread has it.
    """
    try:
        try:
            lock.acquire()
            return action()
        finally:
            if lock._is_owned():
                lock.release()
    finally:
        if lock._is_owned():
            lock.release()


def if_free(lock: Any, action: Callable[[], T], seconds: float) -> T | None:
    """Do something under an RLock, if it comes free within so many seconds; else None.

    A thread that has the lock is in the middle of something that its own code shall not see.
    """
    if lock._is_owned():
        return None
    try:
        try:
            return action() if lock.acquire(timeout=seconds) else None
        finally:
            if lock._is_owned():
                lock.release()
    finally:
        if lock._is_owned():
            lock.release()


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
