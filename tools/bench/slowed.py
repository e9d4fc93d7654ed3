"""A machine with a slow disk and slow page-locking, for a `with` statement each.

Their speeds are known then, and what this machine does itself counts for little beside them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from unittest import mock

from tierstore.system.files import DataFile
from tierstore.tiers.pinned import RegisteredMemory, Registration

REQUEST = 1 << 20
"""Bytes that the disk reads for one thread before it turns to the next."""


@contextlib.contextmanager
def slow_disk(speed: float) -> Iterator[None]:
    """Files are read at `speed` bytes per second in all, and not faster.

    Reads at the same time share that evenly, as the kernel makes many requests of each.
    """
    real, lock, free_at = DataFile.read_at_least, threading.Lock(), [0.0]

    def read(file: DataFile, room: memoryview, offset: int, needed: int) -> int:
        done = 0
        while done < needed:
            part = room[done : done + REQUEST]
            with lock:
                free_at[0] = ends = max(time.monotonic(), free_at[0]) + len(part) / speed
            done += real(file, part, offset + done, min(needed - done, len(part)))
            time.sleep(max(0.0, ends - time.monotonic()))
        return done

    with mock.patch.object(DataFile, "read_at_least", read):
        yield


@contextlib.contextmanager
def page_locking(speed: float) -> Iterator[None]:
    """To zero and page-lock memory goes at `speed` bytes per second on each thread."""
    real = RegisteredMemory._ask_to_register

    def register(memory: RegisteredMemory, registration: Registration) -> None:
        began = time.monotonic()
        real(memory, registration)
        time.sleep(max(0.0, began + registration.nbytes / speed - time.monotonic()))

    with mock.patch.object(RegisteredMemory, "_ask_to_register", register):
        yield
