"""Host memory that several processes share: one makes and unmakes it, the others look at it.

The owner has a file without a name that lies in memory (a memfd), and maps it once. Readers get a
descriptor of it that cannot be written to, and map it once, too. The file can neither shrink, which
would kill who looks at its end, nor grow. It is sparse: only pages that somebody touched are there.

A slot is one run of bytes, so that a reader needs to know no more than where it begins. That would
waste memory if the file were no larger than the budget, as free ranges between slots may each be
too short for the next one. So the file is `RANGES` times as large, which costs addresses and
nothing else: free ranges hold no pages. Robson (1977) showed how much room first fit by the lowest
offset takes at most: about log2(n) times the bytes in use, n being the size of the largest slot
counted in that of the smallest. That is 16 for slots from 4 KiB to 256 MiB in an order chosen to be
as bad as possible; sizes further apart exceed it in such an order only. So nothing is ever moved.
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
"""How many times as large as the budget the file is."""

CHUNK = HUGE_PAGE
"""Bytes of which a slot that has as many begins at a multiple: a huge page."""

_MAP_NORESERVE = 0x4000  # in Python's mmap only from 3.12 on
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
MADV_COLLAPSE = 25  # of Linux 6.1 and later
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class FreeRanges:
    """Which bytes of [0, `size`) are free: ranges in order, of which no two touch each other.

    Each change is one assignment: who is cut short may lose a range, but nobody gets one twice.
    """

    def __init__(self, size: int) -> None:
        self.ranges = [(0, size)] if size else []

    def take(self, nbytes: int, alignment: int) -> int | None:
        """The lowest free offset, a multiple of `alignment`, with `nbytes` bytes; None: no room."""
        for i, (start, stop) in enumerate(self.ranges):
            offset = round_up(start, alignment)
            end = offset + nbytes
            if end <= stop:
                left = (start, offset), (end, stop)
                self.ranges[i : i + 1] = [one for one in left if one[0] < one[1]]
                return offset
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Bytes that were taken are free again."""
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
    """Memory for slots of at most `budget` bytes together, which other processes may look at.

    `size` are the bytes of the file, most of which never take any memory. The budget is kept by
    whoever calls `make` and `unmake`, such as an `Arena`.

    Raises MemoryError or OSError where the system grants no such file, or no addresses for it.
    """

    def __init__(self, budget: int) -> None:
        self.size = RANGES * round_up(budget, CHUNK)
        self._free = FreeRanges(self.size)
        self._made: dict[int, int] = {}  # bytes of ranges by their offsets
        self._kept: set[int] = set()
        self._lock = RLock()
        with _refusals(self.size):
            flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            self._descriptor: int | None = os.memfd_create("tierstore", flags)
            try:
                os.fchmod(self._descriptor, 0o400)  # nobody opens it anew to write to it by mistake
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
        """uint8 memory of `nbytes` bytes in whole pages of its own, with whatever bytes it holds.

        It begins at a multiple of `CHUNK` in the file if it has as many bytes, and of a page
        otherwise. Its whole chunks are in huge pages from the start, where there are any to be had;
        the rest takes what is touched of it. Raises MemoryError if no free range is long enough.
        """
        if nbytes <= 0:
            raise ValueError(f"{nbytes} is not a positive number of bytes: ask for at least 1")
        if self._map is None:
            raise ValueError("this shared memory is closed: make another")
        offset = under(self._lock, lambda: self._take(round_up(nbytes, PAGE)))
        if offset is None:
            raise MemoryError(
                f"no free range of the shared memory has {nbytes:,} bytes: give back groups first, "
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

    def unmake(self, memory: torch.Tensor) -> None:
        """Give the pages of memory that was made back to the system, at once; its range is free.

        Whoever still looks at it sees zeros, and later what is made there next. What is to be kept
        stays.
        Raises ValueError for other memory, and OSError if the system refuses: then it stays.
        """
        offset = self.offset_of(memory)
        if offset in self._kept:
            return
        nbytes, address = self._made[offset], self._address + offset
        if libc.madvise(address, nbytes, mmap.MADV_REMOVE):
            number = ctypes.get_errno()
            raise OSError(number, f"{os.strerror(number)}: could not give shared memory back")
        if whole := nbytes // CHUNK * CHUNK:
            _advise(address, whole, mmap.MADV_NOHUGEPAGE)
        under(self._lock, lambda: self._free.give(offset, self._made.pop(offset)))

    def keep(self, memory: torch.Tensor) -> None:
        """Have memory last as long as the file: somebody still looks at it. Raises ValueError."""
        self._kept.add(self.offset_of(memory))

    def offset_of(self, memory: torch.Tensor) -> int:
        """Where in the file memory begins that was made and not unmade. Raises ValueError."""
        offset = _address(memory.numpy().data) - self._address
        if offset not in self._made:
            raise ValueError("this is no memory that was made here: pass what make() returned")
        return offset

    def read_only_descriptor(self) -> int:
        """A new descriptor of the file, which the caller closes or passes to a reader.

        Nothing can be written by it, nor by a shared map that is made of it. Raises OSError.
        """
        if self._descriptor is None:
            raise ValueError("this shared memory is closed: make another")
        return os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Forget the file. It goes once nobody, here or elsewhere, has it mapped any more."""
        descriptor, self._descriptor, self._map = self._descriptor, None, None
        if descriptor is not None:
            close_quietly(descriptor)


class SharedMap:
    """What a reader sees of the memory of a `SharedArena` of `size` bytes.

    `private`: tensors may be written to, and then only this process sees that, in pages of its own.
    Otherwise a write ends the process; such a map is for device drivers, which lock the pages that
    all processes share. `descriptor` stays the caller's, and may be closed.

    Raises ValueError if the file is shorter than `size`, and MemoryError or OSError where the
    system grants no addresses.
    """

    def __init__(self, descriptor: int, size: int, *, private: bool) -> None:
        there = os.fstat(descriptor).st_size
        if there < size:
            raise ValueError(f"the file has {there:,} bytes, not {size:,}: pass the arena's size")
        flags = (mmap.MAP_PRIVATE if private else mmap.MAP_SHARED) | _MAP_NORESERVE
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if private else 0)
        with _refusals(size):
            self._map = map_beginning(descriptor, size, flags, protection, CHUNK)
        self._private = private

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """uint8 memory of the map itself. Raises ValueError for bytes that it does not have."""
        return torch.frombuffer(self._part(offset, nbytes), dtype=torch.uint8)

    def refresh(self, offset: int, nbytes: int) -> None:
        """Show the owner's bytes again, whatever this process wrote to these whole pages.

        Where it wrote to none, as almost always, they stay as they are: to find each page anew
        costs more than to look whether it must be. Raises ValueError for a map that is not private,
        and for bytes that it does not have.
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
                "this map: ask the service where the group is"
            )
        return self._map[offset : offset + nbytes]

    def close(self) -> None:
        """Show nothing more. The map goes with the last tensor over it."""
        self._map = memoryview(b"")


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)


def _make_huge(address: int, nbytes: int) -> None:
    """Have whole chunks in huge pages.

    Most systems make none for shared memory on a first touch, but do where they are asked to
    collapse pages that are there: so there is one in each chunk. A disk reads into them 1.7 times
    as fast, and whoever looks at them finds 512 pages at once.
    """
    _advise(address, nbytes, mmap.MADV_HUGEPAGE)
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    for at in range(0, nbytes, CHUNK):
        memory[at] = 0
    _advise(address, nbytes, MADV_COLLAPSE)


def _advise(address: int, nbytes: int, advice: int) -> None:
    libc.madvise(address, nbytes, advice)  # if refused, it is slower, not wrong


@contextlib.contextmanager
def _refusals(nbytes: int) -> Iterator[None]:
    """Say what to do about a system that grants no shared memory."""
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
