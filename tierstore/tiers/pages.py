"""Host memory pages that are populated once and reused by one slot after another.

To populate memory, the kernel zeroes it: 0.3 to 2.4 s per GiB, several times the cost of a direct
read into it. Slots of many sizes come and go; their pages stay where they are as far as possible.
Each slot lies in an address range with a boundary at a multiple of 2 MiB. Whole 2 MiB parts of the
slot lie below the boundary, in huge pages (direct reads into 4 KiB pages are half as fast), and the
rest, less than 2 MiB, above it in small pages. A slot gets the free range whose pages fit best.
Missing huge pages are taken from ranges that have spare ones, even ranges in use: `mremap` moves
each in about 10 us, without a copy. Pages are populated only if there are no spare ones; spare
pages are returned to the system before the budget is exceeded.

The pages of a slot are reused only after its last view is gone. A tensor that outlives its lease
reads old bytes, never unmapped addresses.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from ctypes import c_int, c_size_t, c_void_p

import torch

from tierstore.model.sizes import PAGE, round_up
from tierstore.system.mapping import PRIVATE_MEMORY, libc, map_limit, map_pages
from tierstore.tiers.slabs import Slab, SlabPart

logger = logging.getLogger("tierstore.tiers")

HUGE_PAGE = 2 * 1024**2
PATIENCE = 0.5
"""Seconds to wait for views that are about to go, before exceeding the budget."""

_SMALL_PAGE_COST = 50
"""Cost of populating a byte in small pages, relative to moving it in huge pages."""

_MAPS_PER_RANGE = 3  # addresses without memory, huge pages, small ones

_NO_ACCESS = 0
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED = 0x10
_MADV_POPULATE_WRITE = 23  # of Linux 5.14 and later
_MREMAP_MAYMOVE_FIXED_DONTUNMAP = 1 | 2 | 4

libc.mremap.restype = c_void_p
libc.mremap.argtypes = [c_void_p, c_size_t, c_size_t, c_int, c_void_p]


class _AddressRange:
    """Addresses for one slot at a time, populated from `low` to `high`, around `boundary`.

    The slot has those from `begin` to `end`; a free range has `begin == end`, at the boundary.
    Populated pages outside of the slot are spare.
    """

    def __init__(self, whole: int) -> None:
        map_limit.count(_MAPS_PER_RANGE)
        self.floor = _reserve(whole + HUGE_PAGE)
        self.boundary = self.floor + whole
        self.low = self.high = self.begin = self.end = self.boundary

    def assign(self, whole: int, tail: int) -> None:
        """Assign the slot `whole` bytes in huge pages and `tail` bytes in small ones."""
        self.begin, self.end = self.boundary - whole, self.boundary + tail

    def is_free_for(self, whole: int) -> bool:
        return self.begin == self.end and self.boundary - whole >= self.floor

    def misfit(self, whole: int, tail: int) -> int:
        """Return the cost of adapting the populated pages to a slot; 0 if they fit."""
        small = abs(self.high - self.boundary - tail)
        return abs(self.boundary - self.low - whole) + _SMALL_PAGE_COST * small

    def lacking_huge(self) -> int:
        """Return the slot's bytes below the boundary that are not populated."""
        return max(0, self.low - self.begin)

    def lacking_small(self) -> int:
        return max(0, self.end - self.high)

    def spare_huge(self) -> int:
        """Return populated bytes below the boundary that are not the slot's."""
        return max(0, self.begin - self.low)

    def spare_small(self) -> int:
        return max(0, self.high - self.end)

    def take_from(self, other: _AddressRange) -> None:
        """Move missing huge pages here, as many as the other range can spare."""
        nbytes = min(other.spare_huge(), self.lacking_huge())
        moved = 0
        while moved < nbytes and _move_huge_page(other.low + moved, self.low - HUGE_PAGE):
            moved += HUGE_PAGE
            self.low -= HUGE_PAGE
        if moved:
            _vacate(other.low, moved)
            other.low += moved

    def populate(self) -> None:
        """Map the slot's missing pages. The kernel populates them on first touch."""
        if self.lacking_huge():
            _populate_on_touch(self.begin, self.lacking_huge(), mmap.MADV_HUGEPAGE)
        if self.end > self.high == self.boundary:
            _populate_on_touch(self.boundary, HUGE_PAGE, mmap.MADV_NOHUGEPAGE)
        self.low = min(self.low, self.begin)
        self.high = max(self.high, self.end)

    def release_huge(self, nbytes: int) -> int:
        """Return up to `nbytes` of spare pages, rounded up, to the system. Returns the bytes."""
        given = min(self.spare_huge(), round_up(nbytes, HUGE_PAGE))
        if given:
            _vacate(self.low, given)
        self.low += given
        return given

    def release_small(self, nbytes: int) -> int:
        given = min(self.spare_small(), round_up(nbytes, PAGE))
        self.high -= given
        if given:
            libc.madvise(self.high, given, mmap.MADV_DONTNEED)
        return given

    def close(self) -> None:
        _unmap(self.floor, self.boundary + HUGE_PAGE - self.floor)


class LateViews:
    """Views that outlive their slot, and keep memory beyond the budget."""

    def __init__(self, budget: int | None, patience: float = PATIENCE) -> None:
        self._budget = budget
        self._patience = patience
        self._overdue = 0  # bytes above the budget that such views cost

    def wait(self, nbytes: int, used: Callable[[], int]) -> None:
        """Wait until `nbytes` more fit the budget, in addition to those that are `used`.

        Another thread may be about to drop a late view. If it keeps the view, waiting is useless:
        memory exceeds the budget by that much until the view is gone.
        """
        until = time.monotonic() + self._patience
        while True:
            in_use = used()
            if self._budget is None:
                return
            above = in_use + nbytes - self._budget
            if above <= self._overdue or time.monotonic() > until:
                self._note_overdue(max(above, 0))
                return
            time.sleep(self._patience / 1000)

    def _note_overdue(self, nbytes: int) -> None:
        if nbytes and not self._overdue:
            logger.warning(
                "%s bytes of host memory above the budget of %s, because tensors outlive their "
                "leases: release leases later, or keep copies (store.get)",
                f"{nbytes:,}",
                f"{self._budget:,}",
            )
        self._overdue = nbytes


class RecycledPages:
    """Anonymous host memory, at most `budget` bytes of it, including pages that wait for a slot.

    The caller has ensured that the slots in use and the requested one fit the budget together;
    waiting pages are freed if necessary. `held` is the number of bytes of memory that exist.
    """

    def __init__(self, budget: int | None, *, patience: float = PATIENCE) -> None:
        self._budget = budget
        self.held = 0
        self._used = 0  # bytes of slots
        self._late_views = LateViews(budget, patience)
        self._waiting: list[_AddressRange] = []  # free ones, and those with spare pages
        self._slabs: list[Slab] = []
        self._returned: deque[_AddressRange | SlabPart] = deque()  # released, not yet processed
        self._closed = False
        self._lock = threading.Lock()

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return uint8 memory with undefined contents. Raises OSError.

        Small memory is part of a slab; other memory begins at a multiple of 2 MiB.
        """
        nbytes = round_up(nbytes, PAGE)
        with self._lock:
            self._late_views.wait(nbytes, self._used_now)
            addresses = self._part_of_a_slab(nbytes) if nbytes < HUGE_PAGE else self._range(nbytes)
            self._used += nbytes
            self._remove_empty()
        buffer = (ctypes.c_uint8 * nbytes).from_address(addresses.begin)
        weakref.finalize(buffer, self._on_release, addresses).atexit = False
        return torch.frombuffer(buffer, dtype=torch.uint8)

    @property
    def waiting(self) -> int:
        """Bytes of memory that wait for a slot."""
        ranges = sum(
            addresses.spare_small() + addresses.spare_huge() for addresses in self._waiting
        )
        return ranges + sum(slab.spare_small() for slab in self._slabs)

    def set_detached(self, memory: torch.Tensor, spans: Sequence[tuple[int, int]] | None) -> None:
        """Stop counting a slot's memory, where views use `spans`; with None, count it again.

        Pages outside of `spans` are returned to the system.
        """
        nbytes = round_up(memory.nbytes, PAGE)
        with self._lock:
            self._used += nbytes if spans is None else -nbytes
            self.held += nbytes if spans is None else -nbytes
        start, at = memory.data_ptr(), 0
        for begin, end in [*sorted(spans), (nbytes, nbytes)] if spans is not None else ():
            begin, at = begin // PAGE * PAGE, round_up(at, PAGE)
            if begin > at:
                libc.madvise(start + at, begin - at, mmap.MADV_DONTNEED)
            at = max(at, end)

    def trim(self) -> None:
        """Return waiting pages to the system."""
        with self._lock:
            self._collect_returned()
            self._reclaim(self.held)
            self._remove_empty()

    def close(self) -> None:
        """Return waiting pages to the system, now; those in use follow when they are released."""
        self.trim()
        with self._lock:
            self._slabs.clear()  # those in use are freed with their last slot
            self._closed = True
        self._close_returned()

    def __del__(self) -> None:
        self.close()

    def _on_release(self, addresses: _AddressRange | SlabPart) -> None:
        # May run anywhere, even inside `allocate` (garbage collection): takes no lock.
        self._returned.append(addresses)
        if self._closed:
            self._close_returned()

    def _close_returned(self) -> None:
        with contextlib.suppress(IndexError):  # two threads may be here
            while True:
                self._returned.popleft().close()

    def _used_now(self) -> int:
        self._collect_returned()
        return self._used

    def _collect_returned(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                addresses = self._returned.popleft()
                self._used -= addresses.end - addresses.begin
                if isinstance(addresses, SlabPart):
                    addresses.slab.release(addresses)
                    continue
                addresses.assign(0, 0)
                if addresses not in self._waiting:
                    self._waiting.append(addresses)

    def _part_of_a_slab(self, nbytes: int) -> SlabPart:
        part = next(filter(None, (slab.take(nbytes) for slab in self._slabs)), None)
        if part is None:
            map_limit.count(1)
            self._slabs.append(slab := Slab())
            part = slab.take(nbytes)
            assert part is not None
        lacking = part.lacking()
        self._make_space(lacking)
        part.populate()
        self.held += lacking
        return part

    def _range(self, nbytes: int) -> _AddressRange:
        tail = nbytes % HUGE_PAGE
        addresses = self._range_for(nbytes - tail, tail)
        addresses.assign(nbytes - tail, tail)
        try:
            self._populate(addresses)
        except BaseException:
            addresses.assign(0, 0)
            raise
        return addresses

    def _range_for(self, whole: int, tail: int) -> _AddressRange:
        free = [addresses for addresses in self._waiting if addresses.is_free_for(whole)]
        if free:
            return min(free, key=lambda addresses: addresses.misfit(whole, tail))
        addresses = _AddressRange(whole)
        self._waiting.append(addresses)
        return addresses

    def _populate(self, addresses: _AddressRange) -> None:
        """Provide the slot's missing pages: spare huge ones first, new ones for the rest."""
        if addresses.lacking_huge():
            # The smallest first: this empties ranges, and keeps the larger ones together.
            for other in sorted(self._waiting, key=_AddressRange.spare_huge):
                addresses.take_from(other)
        lacking = addresses.lacking_huge() + addresses.lacking_small()
        self._make_space(lacking)
        addresses.populate()
        self.held += lacking

    def _make_space(self, lacking: int) -> None:
        """Free waiting pages for `lacking` bytes that are about to be populated."""
        if self._budget is not None:
            self._reclaim(self.held + lacking - self._budget)

    def _reclaim(self, nbytes: int) -> None:
        """Return `nbytes` of waiting pages to the system, rounded up, or all if there are fewer."""
        # The largest first: each release costs a system call, and stalls the other threads.
        small: list[_AddressRange | Slab] = [*self._waiting, *self._slabs] if nbytes > 0 else []
        for addresses in sorted(small, key=lambda addresses: addresses.spare_small(), reverse=True):
            nbytes -= self._count_released(addresses.release_small(max(0, nbytes)))
        for large in (
            sorted(self._waiting, key=_AddressRange.spare_huge, reverse=True) if nbytes > 0 else ()
        ):
            nbytes -= self._count_released(large.release_huge(max(0, nbytes)))

    def _count_released(self, nbytes: int) -> int:
        self.held -= nbytes
        return nbytes

    def _remove_empty(self) -> None:
        if any(slab.is_empty() for slab in self._slabs):
            self._slabs = [slab for slab in self._slabs if not slab.is_empty()]
        waiting, self._waiting = self._waiting, []
        for addresses in waiting:
            if addresses.spare_huge() or addresses.spare_small():
                self._waiting.append(addresses)
            elif addresses.begin == addresses.end:
                addresses.close()


def fresh_map(nbytes: int) -> mmap.mmap:
    """Map whole pages of zeros, huge ones where possible."""
    mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # without transparent huge pages it is slower, not wrong
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def fresh_memory(nbytes: int) -> torch.Tensor:
    """Return uint8 memory of zeros in its own map, which is unmapped with its last view."""
    return torch.frombuffer(fresh_map(nbytes), dtype=torch.uint8)


def populate(address: int, nbytes: int) -> bool:
    """Populate whole pages with zeros. Returns False if the kernel cannot."""
    return bool(libc.madvise(address, nbytes, _MADV_POPULATE_WRITE) == 0)


def set_fork_inheritance(address: int, nbytes: int, inherited: bool) -> None:
    """Set whether forked processes inherit whole pages at these addresses."""
    advice = mmap.MADV_DOFORK if inherited else mmap.MADV_DONTFORK
    libc.madvise(address, nbytes, advice)  # if refused, a fork is slower, not wrong


def _reserve(nbytes: int) -> int:
    """Reserve addresses for `nbytes` at a multiple of 2 MiB, without memory."""
    reserved = nbytes + HUGE_PAGE
    found = _map(None, reserved, _NO_ACCESS, 0)
    address = -(-found // HUGE_PAGE) * HUGE_PAGE
    if address > found:
        _unmap(found, address - found)
    if found + reserved > address + nbytes:
        _unmap(address + nbytes, found + reserved - address - nbytes)
    return address


def _populate_on_touch(address: int, nbytes: int, advice: int) -> None:
    _map(address, nbytes, _READ_WRITE, _MAP_FIXED)
    libc.madvise(address, nbytes, advice)  # if refused, it is slower, not wrong


def _vacate(address: int, nbytes: int) -> None:
    """Free the memory at these addresses, and keep them reserved."""
    try:
        _map(address, nbytes, _NO_ACCESS, _MAP_FIXED)
    except OSError:  # too many maps: keep the mapping, but free its pages
        libc.madvise(address, nbytes, mmap.MADV_DONTNEED)


def _map(address: int | None, nbytes: int, protection: int, flags: int) -> int:
    return map_pages(address, nbytes, protection, flags | PRIVATE_MEMORY)


def _move_huge_page(start: int, address: int) -> bool:
    flags = _MREMAP_MAYMOVE_FIXED_DONTUNMAP
    return bool(libc.mremap(start, HUGE_PAGE, HUGE_PAGE, flags, address) == address)


def _unmap(address: int, nbytes: int) -> None:
    libc.munmap(address, nbytes)
