"""Context managers that slow down the disk and page-locking to known speeds.

The overhead of the machine itself then has little weight.
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
"""Bytes that the disk reads for one thread before it serves the next."""


@contextlib.contextmanager
def slow_disk(speed: float) -> Iterator[None]:
    """Limit all file reads together to `speed` bytes per second.

    Concurrent reads share it evenly, as the kernel splits each into many requests.
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
    """Limit zeroing and page-locking of memory to `speed` bytes per second on each thread."""
    real = RegisteredMemory._call_register

    def register(memory: RegisteredMemory, registration: Registration) -> None:
        began = time.monotonic()
        real(memory, registration)
        time.sleep(max(0.0, began + registration.nbytes / speed - time.monotonic()))

    with mock.patch.object(RegisteredMemory, "_call_register", register):
        yield
