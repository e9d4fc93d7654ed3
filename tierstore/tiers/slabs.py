"""Small slots of pageable host memory, many of them in one memory map.

A process may have about 65,000 maps (`vm.max_map_count`), which all code in it shares: each thread
and each large allocation needs some. Slots of less than 2 MiB therefore lie in slabs. A slab stays
one map: its pages are populated, and returned to the system, one by one, which does not split the
map. A slab thus takes no more memory than its slots.
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
    """Addresses for many slots, each of whole pages. Unmapped with its last reference."""

    def __init__(self) -> None:
        self.address = map_pages(None, SLAB, mmap.PROT_READ | mmap.PROT_WRITE, PRIVATE_MEMORY)
        weakref.finalize(self, libc.munmap, self.address, SLAB).atexit = False
        # With huge pages, the first small slot would populate 2 MiB.
        libc.madvise(self.address, SLAB, mmap.MADV_NOHUGEPAGE)
        self._free = FreeRuns(SLAB)
        self._populated = np.zeros(SLAB // PAGE, dtype=bool)
        self._spare = 0

    def take(self, nbytes: int) -> SlabPart | None:
        """Return addresses for a slot, or None if no free run is long enough."""
        offset = self._free.take(nbytes)
        if offset is None:
            return None
        part = SlabPart(self, self.address + offset, nbytes)
        self._spare -= nbytes - part.lacking()
        return part

    def release(self, part: SlabPart) -> None:
        """Free a slot. Its populated pages are spare."""
        self._spare += part.end - part.begin - part.lacking()
        self._free.release(part.begin - self.address, part.end - part.begin)

    def pages(self, begin: int, end: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return the flags of the pages between these addresses: True if populated. Writable."""
        return self._populated[(begin - self.address) // PAGE : (end - self.address) // PAGE]

    def has_free(self, nbytes: int) -> bool:
        """Return whether `nbytes` bytes are free, maybe not contiguous."""
        return self._free.nbytes >= nbytes

    def is_empty(self) -> bool:
        """Return whether it has neither slots nor spare pages."""
        return self._free.nbytes == SLAB and not self._spare

    def spare_small(self) -> int:
        """Return the populated bytes without a slot."""
        return self._spare

    def release_small(self, nbytes: int) -> int:
        """Return up to `nbytes` of spare pages, rounded up, to the system. Returns the bytes."""
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
        """Return the bytes that are not populated."""
        pages = self.slab.pages(self.begin, self.end)
        return PAGE * (len(pages) - int(np.count_nonzero(pages)))

    def populate(self) -> None:
        """Mark all pages as populated; the kernel populates them on first touch."""
        self.slab.pages(self.begin, self.end)[:] = True

    def close(self) -> None:
        """Free the pages, after the owner has closed."""
        libc.madvise(self.begin, self.end - self.begin, mmap.MADV_DONTNEED)
