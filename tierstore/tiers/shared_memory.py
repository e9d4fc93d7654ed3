"""Host memory that several processes share: one allocates and frees it, the others read it.

The owner creates an unnamed file in memory (a memfd), and maps it once. Readers get a read-only
descriptor, and also map it once. The file can neither shrink, which would kill readers of its end,
nor grow. It is sparse: only touched pages take memory.

A slot is one run of bytes: a reader needs only its offset. With a file as large as the budget,
fragmentation would waste memory, because free ranges between slots may each be too short for the
next one. The file is therefore `RANGES` times as large, which costs only addresses: free ranges
have no pages. Robson (1977) gives the upper bound for first fit by the lowest offset: about log2(n)
times the bytes in use, where n is the ratio of the largest to the smallest slot size. That is 16
for slots from 4 KiB to 256 MiB in the worst possible order. Only such an order of a wider range of
sizes exceeds it, so slots never have to move.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator

import numpy as np
import torch

from tierstore.model.locks import RLock, under
from tierstore.model.sizes import PAGE, round_up
from tierstore.system.files import close_quietly
from tierstore.system.mapping import libc, map_beginning
from tierstore.system.maps import may_be_written
from tierstore.tiers.pages import HUGE_PAGE

RANGES = 16
"""Ratio of the file's size to the budget."""

CHUNK = HUGE_PAGE
"""Alignment of slots of at least this many bytes: a huge page."""

_MAP_NORESERVE = 0x4000  # in Python's mmap only from 3.12 on
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
MADV_COLLAPSE = 25  # of Linux 6.1 and later
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class FreeRanges:
    """The free bytes of [0, `size`), as ordered ranges of which no two touch.

    Each change is one assignment: an interrupt may lose a range, but never hands one out twice.
    """

    def __init__(self, size: int) -> None:
        self.ranges = [(0, size)] if size else []

    def take(self, nbytes: int, alignment: int) -> int | None:
        """Return the lowest aligned free offset with `nbytes` bytes, or None."""
        for i, (start, stop) in enumerate(self.ranges):
            offset = round_up(start, alignment)
            end = offset + nbytes
            if end <= stop:
                left = (start, offset), (end, stop)
                self.ranges[i : i + 1] = [one for one in left if one[0] < one[1]]
                return offset
        return None

    def release(self, offset: int, nbytes: int) -> None:
        """Free bytes that were taken."""
        start, stop = offset, offset + nbytes
        first = last = bisect.bisect(self.ranges, (offset,))
        if first and self.ranges[first - 1][1] == start:
            first -= 1
            start = self.ranges[first][0]
        if last < len(self.ranges) and self.ranges[last][0] == stop:
            stop = self.ranges[last][1]
            last += 1
        self.ranges[first:last] = [(start, stop)]


class SharedArena:
    """Memory for slots of at most `budget` bytes together, which other processes may read.

    `size` is the length of the file in bytes, most of which never takes memory. The caller of
    `make` and `free`, such as an `Arena`, enforces the budget.

    Raises MemoryError or OSError if the system cannot provide the file or its addresses.
    """

    def __init__(self, budget: int) -> None:
        self.size = RANGES * round_up(budget, CHUNK)
        self._free = FreeRanges(self.size)
        self._made: dict[int, int] = {}  # bytes of ranges by their offsets
        self._kept: set[int] = set()
        self._lock = RLock()
        with _explain_refusal(self.size):
            flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            self._descriptor: int | None = os.memfd_create("tierstore", flags)
            try:
                os.fchmod(self._descriptor, 0o400)  # prevents reopening it for writing by mistake
                os.ftruncate(self._descriptor, self.size)
                fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
                flags = mmap.MAP_SHARED | _MAP_NORESERVE
                self._map: memoryview | None = map_beginning(
                    self._descriptor, self.size, flags, _READ_WRITE, CHUNK
                )
            except BaseException:
                os.close(self._descriptor)
                raise
        self._address = _address(self._map)
        _advise(self._address, self.size, mmap.MADV_NOHUGEPAGE)

    def make(self, nbytes: int) -> torch.Tensor:
        """Return uint8 memory of `nbytes` bytes in its own whole pages, with undefined contents.

        Its offset in the file is a multiple of `CHUNK` if it has at least that many bytes, and
        of a page otherwise. Its whole chunks are in huge pages from the start, if available; the
        rest takes memory when it is touched. Raises MemoryError if no free range is long enough.
        """
        if nbytes <= 0:
            raise ValueError(f"{nbytes} is not a positive number of bytes: ask for at least 1")
        if self._map is None:
            raise ValueError("this shared memory is closed: create another")
        offset = under(self._lock, lambda: self._take(round_up(nbytes, PAGE)))
        if offset is None:
            raise MemoryError(
                f"no free range of the shared memory has {nbytes:,} bytes: release groups first, "
                "or raise --ram"
            )
        if whole := nbytes // CHUNK * CHUNK:
            _make_huge(self._address + offset, whole)
        return torch.frombuffer(self._map[offset : offset + nbytes], dtype=torch.uint8)

    def _take(self, nbytes: int) -> int | None:
        offset = self._free.take(nbytes, CHUNK if nbytes >= CHUNK else PAGE)
        if offset is not None:
            self._made[offset] = nbytes
        return offset

    def free(self, memory: torch.Tensor) -> None:
        """Return the pages of memory to the system at once, and free its range.

        Remaining readers see zeros, and later the contents of the next slot there. Memory passed to
        `keep` stays. Raises ValueError for other memory, and OSError if the system refuses, which
        leaves the memory allocated.
        """
        offset = self.offset_of(memory)
        if offset in self._kept:
            return
        nbytes, address = self._made[offset], self._address + offset
        if libc.madvise(address, nbytes, mmap.MADV_REMOVE):
            number = ctypes.get_errno()
            raise OSError(number, f"{os.strerror(number)}: could not free shared memory")
        if whole := nbytes // CHUNK * CHUNK:
            _advise(address, whole, mmap.MADV_NOHUGEPAGE)
        under(self._lock, lambda: self._free.release(offset, self._made.pop(offset)))

    def keep(self, memory: torch.Tensor) -> None:
        """Keep memory as long as the file exists, for its readers. Raises ValueError."""
        self._kept.add(self.offset_of(memory))

    def offset_of(self, memory: torch.Tensor) -> int:
        """Return the offset of allocated memory in the file. Raises ValueError."""
        offset = _address(memory.numpy().data) - self._address
        if offset not in self._made:
            raise ValueError("this memory is not from this arena: pass the result of make()")
        return offset

    def read_only_descriptor(self) -> int:
        """Return a new read-only descriptor of the file, which the caller owns.

        Shared maps made of it are read-only as well. Raises OSError.
        """
        if self._descriptor is None:
            raise ValueError("this shared memory is closed: create another")
        return os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Close the file. It is freed once no process has it mapped."""
        descriptor, self._descriptor, self._map = self._descriptor, None, None
        if descriptor is not None:
            close_quietly(descriptor)


class SharedMap:
    """A reader's map of the memory of a `SharedArena` of `size` bytes.

    `private`: tensors are writable copy-on-write, visible to this process only. Otherwise a write
    kills the process; such a map is for device drivers, which lock the pages that all processes
    share. `descriptor` stays the caller's, and may be closed.

    Raises ValueError if the file is shorter than `size`, and MemoryError or OSError if the system
    grants no addresses.
    """

    def __init__(self, descriptor: int, size: int, *, private: bool) -> None:
        there = os.fstat(descriptor).st_size
        if there < size:
            raise ValueError(f"the file has {there:,} bytes, not {size:,}: pass the arena's size")
        flags = (mmap.MAP_PRIVATE if private else mmap.MAP_SHARED) | _MAP_NORESERVE
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if private else 0)
        with _explain_refusal(size):
            self._map = map_beginning(descriptor, size, flags, protection, CHUNK)
        self._private = private

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return uint8 memory of the map itself. Raises ValueError for bytes outside of it."""
        return torch.frombuffer(self._part(offset, nbytes), dtype=torch.uint8)

    def refresh(self, offset: int, nbytes: int) -> None:
        """Discard this process's writes to these whole pages, which show the owner's bytes again.

        Pages without writes, nearly always all of them, stay mapped: faulting in each page again
        costs more than checking for writes. Raises ValueError for a map that is not private, and
        for bytes outside of it.
        """
        if not self._private or offset % PAGE:
            raise ValueError("only whole pages of a private map can be refreshed")
        address = _address(self._part(offset, nbytes))
        if not may_be_written(address, nbytes):
            return
        if libc.madvise(address, round_up(nbytes, PAGE), mmap.MADV_DONTNEED):
            number = ctypes.get_errno()
            raise OSError(number, f"{os.strerror(number)}: could not refresh shared memory")

    def _part(self, offset: int, nbytes: int) -> memoryview:
        if offset < 0 or nbytes <= 0 or offset + nbytes > len(self._map):
            raise ValueError(
                f"bytes {offset:,} to {offset + nbytes:,} are not among the {len(self._map):,} of "
                "this map: query the service for the offset of the group"
            )
        return self._map[offset : offset + nbytes]

    def close(self) -> None:
        """Stop returning views. The map is removed with the last tensor over it."""
        self._map = memoryview(b"")


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)


def _make_huge(address: int, nbytes: int) -> None:
    """Back whole chunks by huge pages.

    Most systems create none for shared memory on first touch, but they do collapse existing pages
    on request: touching one page per chunk suffices. A disk reads into huge pages 1.7 times as
    fast, and a reader's page fault maps 512 pages at once.
    """
    _advise(address, nbytes, mmap.MADV_HUGEPAGE)
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    for at in range(0, nbytes, CHUNK):
        memory[at] = 0
    _advise(address, nbytes, MADV_COLLAPSE)


def _advise(address: int, nbytes: int, advice: int) -> None:
    libc.madvise(address, nbytes, advice)  # if refused, it is slower, not wrong


@contextlib.contextmanager
def _explain_refusal(nbytes: int) -> Iterator[None]:
    """Add advice to the error of a system that grants no shared memory."""
    try:
        yield
    except OSError as error:
        number = error.errno or errno.ENOMEM
        text = (
            f"{os.strerror(number)}: the system grants no {nbytes:,} bytes of addresses for shared "
            "memory: lower --ram, or raise the limits of shared memory and of address space "
            "(ulimit -v) of this process and its container"
        )
        raise MemoryError(text) if number == errno.ENOMEM else OSError(number, text) from error
