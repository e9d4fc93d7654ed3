"""Small slots of ordinary host memory: many of them in one memory map.

A process may have some 65,000 maps (`vm.max_map_count`), and everybody in it needs some: each
thread, each large allocation. So slots of less than 2 MiB lie in slabs. A slab is one map for as
long as it is there: its pages are populated, and go back to the system, one by one, which divides
no map. So a slab takes no more memory than its slots do.
"""

from __future__ import annotations

import mmap
import weakref

import numpy as np

from tierstore.model.sizes import PAGE, round_up
from tierstore.system.mapping import PRIVATE_MEMORY, libc, map_pages
from tierstore.tiers.free_runs import FreeRuns

SLAB = 16 << 20
"""Bytes of addresses of one slab."""


class Slab:
    """Addresses for many slots, each of whole pages. They go with the last reference to this."""

    def __init__(self) -> None:
        self.address = map_pages(None, SLAB, mmap.PROT_READ | mmap.PROT_WRITE, PRIVATE_MEMORY)
        weakref.finalize(self, libc.munmap, self.address, SLAB).atexit = False
        # A huge page would be populated for the first small slot in it.
        libc.madvise(self.address, SLAB, mmap.MADV_NOHUGEPAGE)
        self._free = FreeRuns(SLAB)
        self._populated = np.zeros(SLAB // PAGE, dtype=bool)
        self._spare = 0

    def take(self, nbytes: int) -> SlabPart | None:
        """Addresses for a slot; None if there are not so many in one piece."""
        offset = self._free.take(nbytes)
        if offset is None:
            return None
        part = SlabPart(self, self.address + offset, nbytes)
        self._spare -= nbytes - part.lacking()
        return part

    def give(self, part: SlabPart) -> None:
        """The slot has gone: what is populated of it is spare."""
        self._spare += part.end - part.begin - part.lacking()
        self._free.give(part.begin - self.address, part.end - part.begin)

    def pages(self, begin: int, end: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Of each page between these addresses, whether it is populated: to look at, and to set."""
        return self._populated[(begin - self.address) // PAGE : (end - self.address) // PAGE]

    def has_room(self, nbytes: int) -> bool:
        """Whether so many bytes are free, maybe not in one piece."""
        return self._free.nbytes >= nbytes

    def is_empty(self) -> bool:
        """Whether there is neither a slot nor a spare page in it."""
        return self._free.nbytes == SLAB and not self._spare

    def spare_small(self) -> int:
        """Populated bytes that are no slot's."""
        return self._spare

    def give_up_small(self, nbytes: int) -> int:
        """Return spare pages to the system, as few as make `nbytes`. Gives how many bytes."""
        wanted = min(round_up(nbytes, PAGE), self._spare)
        given = 0
        for offset, length in self._free:
            if given == wanted:
                break
            pages = self.pages(self.address + offset, self.address + offset + length)
            populated = np.flatnonzero(pages)[: (wanted - given) // PAGE]
            if len(populated):
                first, end = int(populated[0]), int(populated[-1]) + 1
                start = self.address + offset + first * PAGE
                libc.madvise(start, (end - first) * PAGE, mmap.MADV_DONTNEED)
                pages[first:end] = False
                given += PAGE * len(populated)
        self._spare -= given
        return given


class SlabPart:
    """The addresses of one slot, from `begin` to `end`."""

    __slots__ = ("begin", "end", "slab")

    def __init__(self, slab: Slab, begin: int, nbytes: int) -> None:
        self.slab = slab
        self.begin = begin
        self.end = begin + nbytes

    def lacking(self) -> int:
        """Bytes that are not populated."""
        pages = self.slab.pages(self.begin, self.end)
        return PAGE * (len(pages) - int(np.count_nonzero(pages)))

    def populate(self) -> None:
        """All of it is populated: as soon as it is touched."""
        self.slab.pages(self.begin, self.end)[:] = True

    def close(self) -> None:
        """Nobody wants these pages again."""
        libc.madvise(self.begin, self.end - self.begin, mmap.MADV_DONTNEED)
