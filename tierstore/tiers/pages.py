"""Pages of host memory that serve one slot after the other and are populated only once.

To populate memory, the kernel zeroes it: 0.3 to 2.4 s per GiB, several times what a direct read
into it costs. Slots of many sizes come and go, so their pages stay where they are as far as they
can. They lie in a room: addresses with a boundary at a multiple of 2 MiB. A slot has whole 2 MiB
below the boundary, in huge pages (direct reads into 4 KiB pages are half as fast), and the rest,
less than 2 MiB, above it in small pages. It gets the free room whose pages fit it best. Huge pages
that are spare there are for other rooms to take, also while the slot is in use. Huge pages that are
lacking are taken so: `mremap` moves each in about 10 us, without a copy.
Populated is what nobody has to spare; spare pages go back to the system before there are too many.

The pages of a slot come back when the last view of it is gone. A tensor that outlives its lease
reads old bytes, then; never an address without memory.
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
"""Seconds to wait for pages whose last view is just going, before memory above the budget is
taken."""

_SMALL_PAGE_COST = 50
"""How much longer it takes to populate small pages than to move huge ones, for each byte."""

_MAPS_OF_A_ROOM = 3  # addresses without memory, huge pages, small ones

_NO_ACCESS = 0
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED = 0x10
_MADV_POPULATE_WRITE = 23  # of Linux 5.14 and later
_MREMAP_MAYMOVE_FIXED_DONTUNMAP = 1 | 2 | 4

libc.mremap.restype = c_void_p
libc.mremap.argtypes = [c_void_p, c_size_t, c_size_t, c_int, c_void_p]


class _Room:
    """Addresses for one slot at a time, populated from `low` to `high`, around `boundary`.

    The slot has those from `begin` to `end`; in a free room that is nothing, at the boundary.
    What is populated outside of it is spare.
    """

    def __init__(self, whole: int) -> None:
        map_limit.count(_MAPS_OF_A_ROOM)
        self.floor = _reserve(whole + HUGE_PAGE)
        self.boundary = self.floor + whole
        self.low = self.high = self.begin = self.end = self.boundary

    def lay_out(self, whole: int, tail: int) -> None:
        """Give the addresses of `whole` bytes in huge pages and `tail` in small ones to a slot."""
        self.begin, self.end = self.boundary - whole, self.boundary + tail

    def is_free_for(self, whole: int) -> bool:
        return self.begin == self.end and self.boundary - whole >= self.floor

    def misfit(self, whole: int, tail: int) -> int:
        """What it costs to make the pages here those of a slot; 0 if they are."""
        small = abs(self.high - self.boundary - tail)
        return abs(self.boundary - self.low - whole) + _SMALL_PAGE_COST * small

    def lacking_huge(self) -> int:
        """Bytes of the slot that are not populated yet."""
        return max(0, self.low - self.begin)

    def lacking_small(self) -> int:
        return max(0, self.end - self.high)

    def spare_huge(self) -> int:
        """Populated bytes that are not the slot's."""
        return max(0, self.begin - self.low)

    def spare_small(self) -> int:
        return max(0, self.high - self.end)

    def take_from(self, other: _Room) -> None:
        """Move huge pages that the slot lacks here, as many as the other room can spare."""
        nbytes = min(other.spare_huge(), self.lacking_huge())
        moved = 0
        while moved < nbytes and _move_huge_page(other.low + moved, self.low - HUGE_PAGE):
            moved += HUGE_PAGE
            self.low -= HUGE_PAGE
        if moved:
            _vacate(other.low, moved)
            other.low += moved

    def populate(self) -> None:
        """Let what the slot lacks be populated as soon as it is touched."""
        if self.lacking_huge():
            _populate_on_touch(self.begin, self.lacking_huge(), mmap.MADV_HUGEPAGE)
        if self.end > self.high == self.boundary:
            _populate_on_touch(self.boundary, HUGE_PAGE, mmap.MADV_NOHUGEPAGE)
        self.low = min(self.low, self.begin)
        self.high = max(self.high, self.end)

    def give_up_huge(self, nbytes: int) -> int:
        """Return spare pages to the system, as few as make `nbytes`. Gives how many bytes."""
        given = min(self.spare_huge(), round_up(nbytes, HUGE_PAGE))
        if given:
            _vacate(self.low, given)
        self.low += given
        return given

    def give_up_small(self, nbytes: int) -> int:
        given = min(self.spare_small(), round_up(nbytes, PAGE))
        self.high -= given
        if given:
            libc.madvise(self.high, given, mmap.MADV_DONTNEED)
        return given

    def close(self) -> None:
        _unmap(self.floor, self.boundary + HUGE_PAGE - self.floor)


class LateViews:
    """Views of slots that are gone, which keep memory for longer than the budget allows for."""

    def __init__(self, budget: int | None, patience: float = PATIENCE) -> None:
        self._budget = budget
        self._patience = patience
        self._overdue = 0  # bytes above the budget that such views cost

    def wait(self, nbytes: int, used: Callable[[], int]) -> None:
        """Wait until `nbytes` more fit the budget, beside those that are `used`.

        Another thread may be about to drop a late view. If it keeps the view, there is nothing to
        wait for: that much is above the budget until it drops it.
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
                "%s bytes of host memory above the budget of %s: tensors are kept after their "
                "lease; release leases later, or keep copies (store.get)",
                f"{nbytes:,}",
                f"{self._budget:,}",
            )
        self._overdue = nbytes


class RecycledPages:
    """Anonymous host memory, at most `budget` bytes of it, counting pages that wait for a slot.

    Whoever asks has made sure that what is in use and what is asked for fit the budget together;
    then waiting pages are the only thing that may stand in the way, and they give way. `held` are
    the bytes of memory that there are.
    """

    def __init__(self, budget: int | None, *, patience: float = PATIENCE) -> None:
        self._budget = budget
        self.held = 0
        self._used = 0  # those of slots
        self._late_views = LateViews(budget, patience)
        self._waiting: list[_Room] = []  # free rooms, and rooms in use with pages to spare
        self._slabs: list[Slab] = []
        self._returned: deque[_Room | SlabPart] = deque()  # free, but not yet among those
        self._closed = False
        self._lock = threading.Lock()

    def allocate(self, nbytes: int) -> torch.Tensor:
        """uint8 memory with whatever bytes it last held: small, of a slab, or at a multiple of
        2 MiB. Raises OSError."""
        nbytes = round_up(nbytes, PAGE)
        with self._lock:
            self._late_views.wait(nbytes, self._used_now)
            room = self._part_of_a_slab(nbytes) if nbytes < HUGE_PAGE else self._room(nbytes)
            self._used += nbytes
            self._forget_what_has_no_pages()
        buffer = (ctypes.c_uint8 * nbytes).from_address(room.begin)
        weakref.finalize(buffer, self._come_back, room).atexit = False
        return torch.frombuffer(buffer, dtype=torch.uint8)

    @property
    def waiting(self) -> int:
        """Bytes of memory that wait for a slot."""
        rooms = sum(room.spare_small() + room.spare_huge() for room in self._waiting)
        return rooms + sum(slab.spare_small() for slab in self._slabs)

    def leave(self, memory: torch.Tensor, spans: Sequence[tuple[int, int]] | None) -> None:
        """Memory of a slot is somebody else's: these parts of it, and the pages of others go back
        to the system. With None, it is ours again, before it is let go of."""
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

    def give_back(self) -> None:
        """Give waiting pages back to the system."""
        with self._lock:
            self._sort_in()
            self._give_up(self.held)
            self._forget_what_has_no_pages()

    def close(self) -> None:
        """Give waiting pages back to the system: now, and those in use once they come back."""
        self.give_back()
        with self._lock:
            self._slabs.clear()  # those in use go with their last slot
            self._closed = True
        self._close_returned()

    def __del__(self) -> None:
        self.close()

    def _come_back(self, room: _Room | SlabPart) -> None:
        # Possibly in the middle of anything, even of `allocate` (garbage collection): no lock.
        self._returned.append(room)
        if self._closed:
            self._close_returned()

    def _close_returned(self) -> None:
        with contextlib.suppress(IndexError):  # two threads may be here
            while True:
                self._returned.popleft().close()

    def _used_now(self) -> int:
        self._sort_in()
        return self._used

    def _sort_in(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                room = self._returned.popleft()
                self._used -= room.end - room.begin
                if isinstance(room, SlabPart):
                    room.slab.give(room)
                    continue
                room.lay_out(0, 0)
                if room not in self._waiting:
                    self._waiting.append(room)

    def _part_of_a_slab(self, nbytes: int) -> SlabPart:
        part = next(filter(None, (slab.take(nbytes) for slab in self._slabs)), None)
        if part is None:
            map_limit.count(1)
            self._slabs.append(slab := Slab())
            part = slab.take(nbytes)
            assert part is not None
        lacking = part.lacking()
        self._give_way(lacking)
        part.populate()
        self.held += lacking
        return part

    def _room(self, nbytes: int) -> _Room:
        tail = nbytes % HUGE_PAGE
        room = self._room_for(nbytes - tail, tail)
        room.lay_out(nbytes - tail, tail)
        try:
            self._furnish(room)
        except BaseException:
            room.lay_out(0, 0)
            raise
        return room

    def _room_for(self, whole: int, tail: int) -> _Room:
        free = [room for room in self._waiting if room.is_free_for(whole)]
        if free:
            return min(free, key=lambda room: room.misfit(whole, tail))
        room = _Room(whole)
        self._waiting.append(room)
        return room

    def _furnish(self, room: _Room) -> None:
        """Put pages where the slot lacks them: spare huge ones first, new ones for the rest."""
        if room.lacking_huge():
            # The smallest first: that leaves fewer, and the larger ones together.
            for other in sorted(self._waiting, key=_Room.spare_huge):
                room.take_from(other)
        lacking = room.lacking_huge() + room.lacking_small()
        self._give_way(lacking)
        room.populate()
        self.held += lacking

    def _give_way(self, lacking: int) -> None:
        """So many bytes are about to be populated: what waits gives way, if there is a budget."""
        if self._budget is not None:
            self._give_up(self.held + lacking - self._budget)

    def _give_up(self, nbytes: int) -> None:
        """Return at least `nbytes` of the waiting pages to the system, if there are so many."""
        # The largest first: each time costs a call, and stops the other threads for a moment.
        small: list[_Room | Slab] = [*self._waiting, *self._slabs] if nbytes > 0 else []
        for room in sorted(small, key=lambda room: room.spare_small(), reverse=True):
            nbytes -= self._given(room.give_up_small(max(0, nbytes)))
        for large in (
            sorted(self._waiting, key=_Room.spare_huge, reverse=True) if nbytes > 0 else ()
        ):
            nbytes -= self._given(large.give_up_huge(max(0, nbytes)))

    def _given(self, nbytes: int) -> int:
        self.held -= nbytes
        return nbytes

    def _forget_what_has_no_pages(self) -> None:
        if any(slab.is_empty() for slab in self._slabs):
            self._slabs = [slab for slab in self._slabs if not slab.is_empty()]
        waiting, self._waiting = self._waiting, []
        for room in waiting:
            if room.spare_huge() or room.spare_small():
                self._waiting.append(room)
            elif room.begin == room.end:
                room.close()


def fresh_map(nbytes: int) -> mmap.mmap:
    """A map of whole pages, huge ones where that is possible, of zeros."""
    mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # without transparent huge pages it is slower, not wrong
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def fresh_memory(nbytes: int) -> torch.Tensor:
    """uint8 memory of zeros in a map of its own, which goes with its last view."""
    return torch.frombuffer(fresh_map(nbytes), dtype=torch.uint8)


def populate(address: int, nbytes: int) -> bool:
    """Have the kernel put zeroed memory behind whole pages of ours. False: it cannot, or does not
    know how."""
    return bool(libc.madvise(address, nbytes, _MADV_POPULATE_WRITE) == 0)


def leave_to_forks(address: int, nbytes: int, leave: bool) -> None:
    """Whether forked processes find whole pages of ours at these addresses, or nothing at all."""
    advice = mmap.MADV_DOFORK if leave else mmap.MADV_DONTFORK
    libc.madvise(address, nbytes, advice)  # if refused, a fork is slower, not wrong


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


def _populate_on_touch(address: int, nbytes: int, advice: int) -> None:
    _map(address, nbytes, _READ_WRITE, _MAP_FIXED)
    libc.madvise(address, nbytes, advice)  # if refused, it is slower, not wrong


def _vacate(address: int, nbytes: int) -> None:
    """Leave addresses without memory, but reserved."""
    try:
        _map(address, nbytes, _NO_ACCESS, _MAP_FIXED)
    except OSError:  # too many maps: it stays as it is, but empty
        libc.madvise(address, nbytes, mmap.MADV_DONTNEED)


def _map(address: int | None, nbytes: int, protection: int, flags: int) -> int:
    return map_pages(address, nbytes, protection, flags | PRIVATE_MEMORY)


def _move_huge_page(start: int, address: int) -> bool:
    flags = _MREMAP_MAYMOVE_FIXED_DONTUNMAP
    return bool(libc.mremap(start, HUGE_PAGE, HUGE_PAGE, flags, address) == address)


def _unmap(address: int, nbytes: int) -> None:
    libc.munmap(address, nbytes)
