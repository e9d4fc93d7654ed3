"""Pages of host memory that move from one slot to the next and are populated only once.

To populate memory, the kernel zeroes it: 0.3 to 2.4 s per GiB, several times what a direct read
into it costs. Slots of many sizes come and go, so a slot is not handed on whole: `mremap` moves its
pages to the address of the next slot, in pieces, at about 10 us per MiB, whatever their size. What
a slot holds in whole 2 MiB stays in huge pages (direct reads into 4 KiB pages are half as fast);
the rest of it, less than 2 MiB, is made of small pages and kept apart.

The pages of a slot come back when the last view of it is gone. A tensor that outlives its lease
reads old bytes, then; never an address without memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
import time
import weakref
from collections import deque

import torch

from tierstore.model.sizes import PAGE

HUGE_PAGE = 2 * 1024**2
PATIENCE = 0.1
"""Seconds to wait for pages whose last view is just going, before memory above the budget is
taken."""

_NO_ACCESS = 0
_MAP_FIXED = 0x10
_MREMAP_MAYMOVE_FIXED = 1 | 2
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class RecycledPages:
    """Anonymous host memory, at most `budget` bytes of it, counting pages that wait for a slot.

    Whoever asks has made sure that what is in use and what is asked for fit the budget together;
    then waiting pages are the only thing that may stand in the way, and they give way.
    """

    def __init__(self, budget: int | None) -> None:
        self._budget = budget
        self._held = 0
        self._huge: list[tuple[int, int]] = []  # (address, bytes) of waiting pages
        self._small: list[tuple[int, int]] = []
        self._returned: deque[tuple[int, int]] = deque()  # not yet sorted into the two
        self._overdue = 0  # bytes above the budget that views which outlive their lease cost
        self._closed = False
        self._lock = threading.Lock()

    def allocate(self, nbytes: int) -> torch.Tensor:
        """uint8 memory at a multiple of 2 MiB, with whatever bytes it last held."""
        nbytes = -(-nbytes // PAGE) * PAGE
        with self._lock:
            self._await_pages(nbytes)
            address = _reserve(nbytes)
            whole = nbytes // HUGE_PAGE * HUGE_PAGE
            try:
                self._furnish(address, whole, self._huge)
                self._furnish(address + whole, nbytes - whole, self._small)
            except BaseException:
                # What was furnished goes with the reservation; it is no longer held by anyone.
                _unmap(address, nbytes)
                raise
        buffer = (ctypes.c_uint8 * nbytes).from_address(address)
        weakref.finalize(buffer, self._come_back, address, nbytes).atexit = False
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def close(self) -> None:
        """Give waiting pages back to the system: now, and those in use once they come back."""
        with self._lock:
            self._closed = True
            self._sort_in()
            self._give_up(self._held)

    def __del__(self) -> None:
        self.close()

    def _come_back(self, address: int, nbytes: int) -> None:
        # Possibly in the middle of anything, even of `allocate` (garbage collection): no lock.
        if self._closed:
            _unmap(address, nbytes)
        else:
            self._returned.append((address, nbytes))

    def _await_pages(self, nbytes: int) -> None:
        """Wait until `nbytes` more fit the budget, as they do when the views of old slots are gone.

        Another thread may be about to let go of such a view. If it keeps it, there is nothing to
        wait for: that much is above the budget for as long as it does.
        """
        until = time.monotonic() + PATIENCE
        while True:
            self._sort_in()
            if self._budget is None:
                return
            waiting = sum(length for _, length in self._huge + self._small)
            above = self._held - waiting + nbytes - self._budget
            if above <= self._overdue or time.monotonic() > until:
                self._overdue = max(above, 0)
                self._give_up(self._held - self._budget)
                return
            time.sleep(PATIENCE / 200)

    def _sort_in(self) -> None:
        while self._returned:
            address, nbytes = self._returned.popleft()
            whole = nbytes // HUGE_PAGE * HUGE_PAGE
            if whole:
                self._huge.append((address, whole))
            if nbytes > whole:
                self._small.append((address + whole, nbytes - whole))

    def _furnish(self, address: int, nbytes: int, waiting: list[tuple[int, int]]) -> None:
        """Put pages at `address`: waiting ones of this kind first, new ones for the rest."""
        while nbytes and waiting:
            start, length = waiting.pop()
            part = min(length, nbytes)
            if length > part:
                waiting.append((start, length - part))
            start += length - part
            if not _move(start, part, address):
                _unmap(start, part)  # too many maps: give the pages back and take new ones
                self._held -= part
                break
            address += part
            nbytes -= part
        if nbytes:
            if self._budget is not None:
                self._give_up(self._held + nbytes - self._budget)
            _populate_on_touch(address, nbytes)
            self._held += nbytes

    def _give_up(self, nbytes: int) -> None:
        """Return at least `nbytes` of the waiting pages to the system, if there are so many."""
        for waiting, unit in ((self._small, PAGE), (self._huge, HUGE_PAGE)):
            while nbytes > 0 and waiting:
                start, length = waiting.pop()
                part = min(length, -(-nbytes // unit) * unit)
                if length > part:
                    waiting.append((start, length - part))
                _unmap(start + length - part, part)
                self._held -= part
                nbytes -= part


def fresh_memory(nbytes: int) -> torch.Tensor:
    """uint8 memory in whole pages, huge ones where that is possible, of zeros."""
    mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # without transparent huge pages it is slower, not wrong
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def _reserve(nbytes: int) -> int:
    """Addresses for `nbytes` at a multiple of 2 MiB, with no memory behind them."""
    room = nbytes + HUGE_PAGE
    found = _map(None, room, _NO_ACCESS, 0)
    address = -(-found // HUGE_PAGE) * HUGE_PAGE
    if address > found:
        _unmap(found, address - found)
    if found + room > address + nbytes:
        _unmap(address + nbytes, found + room - address - nbytes)
    return address


def _populate_on_touch(address: int, nbytes: int) -> None:
    _map(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, _MAP_FIXED)
    # Without transparent huge pages it is slower, not wrong.
    _libc.madvise(address, nbytes, mmap.MADV_HUGEPAGE)


def _map(address: int | None, nbytes: int, protection: int, flags: int) -> int:
    flags |= mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    found = _libc.mmap(address, nbytes, protection, flags, -1, 0)
    if found == _FAILED:
        raise _no_memory(nbytes)
    return int(found)


def _move(start: int, nbytes: int, address: int) -> bool:
    moved = _libc.mremap(start, nbytes, nbytes, _MREMAP_MAYMOVE_FIXED, address)
    return bool(moved == address)


def _unmap(address: int, nbytes: int) -> None:
    _libc.munmap(address, nbytes)


def _no_memory(nbytes: int) -> OSError:
    number = ctypes.get_errno() or errno.ENOMEM
    return OSError(number, f"{os.strerror(number)}: could not map {nbytes} bytes of memory")
