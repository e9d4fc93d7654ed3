"""Memory of one tier, divided into slots that are allocated once and reused.

A slot has exactly the bytes that the budget counts for its group. So nothing is lost to
fragmentation, and the budget counts the memory that is really allocated (and, with an accelerator,
page-locked). A released slot waits for the next group of its size; when another size needs the
memory, idle slots are freed first. Host slots lie in 2 MiB pages, because direct reads into 4 KiB
pages reach about half of a disk's bandwidth.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from tierstore.model.locks import RLock, under
from tierstore.system.streams import empty_cache, run_on
from tierstore.tiers.pages import RecycledPages
from tierstore.tiers.pinned import RegisteredMemory, RegisteredSlab, pinned_memory

if TYPE_CHECKING:
    from tierstore.tiers.slot_views import LiveViews, SlotViews

T = TypeVar("T")

Spans = Sequence[tuple[int, int]]
"""Parts of a slot's memory, as (start, stop) in bytes."""


@dataclass(eq=False)
class Slot:
    """Memory for one group. `memory` (uint8, `nbytes` long) is set from `Arena.fill` on.

    `pending` are events of device work that still uses the memory: wait for them before writing to
    it or freeing it. `arrival` is a device event that completes once the group is in its slot
    there. A slot that is released before it has memory is no longer `wanted`, and never gets any.
    `views` are the group's tensors, after the first access. `stream` is the device stream in which
    the last lease ended; views may be used in `streams` after a lease. A small page-locked slot is
    part of a `slab`. A slot is `exposed` while callers may have a view of it.
    """

    nbytes: int
    memory: torch.Tensor | None = None
    wanted: bool = True
    views: SlotViews | None = None
    pending: list[torch.Event] = field(default_factory=list)
    arrival: torch.Event | None = None
    stream: torch.Stream | None = None
    streams: set[torch.Stream] = field(default_factory=set)
    slab: RegisteredSlab | None = None
    exposed: bool = False

    def while_locked(self, action: Callable[[], T]) -> T:
        """Call `action` while page-locked memory stays page-locked.

        Used to queue device work on the memory, or to hand out views of it.
        """
        return action() if self.slab is None else under(self.slab.lock, action)

    def may_have_views(self) -> bool:
        """Return whether other code may have a view of the memory."""
        return self.exposed or (self.views is not None and self.views.are_in_use())

    def end_views(self) -> LiveViews | None:
        """Drop the group's tensors. Returns the views that are still in use, or None."""
        return self.while_locked(self._end_views)

    def _end_views(self) -> LiveViews | None:
        views, self.views = self.views, None
        live = None if views is None else views.end()
        self.exposed = self.exposed or live is not None
        return live

    def bytes(self) -> memoryview:
        """Return the memory of a host slot."""
        assert self.memory is not None
        return self.memory.numpy().data

    def wait(self) -> None:
        """Wait for the device work that still uses the memory."""
        while waiting := self.pending[-1:]:
            waiting[0].synchronize()
            self._remove_passed(waiting)  # by now a newer one may have been appended

    def poll(self) -> list[torch.Event]:
        """Return the events of unfinished device work that uses the memory, without waiting."""
        self._remove_passed([event for event in self.pending if event.query()])
        return list(self.pending)

    def _remove_passed(self, events: list[torch.Event]) -> None:
        for event in events:
            with suppress(ValueError):  # another thread has removed it
                self.pending.remove(event)


class Arena:
    """The slots of one tier, never more than `budget` bytes of them (None: no limit).

    `take` and `release` only do accounting and never block. `fill` allocates the memory; it frees
    retired slots first, each after `before_free` has waited for its device work. Code that reads
    into a slot calls `provide`, and `lock` in parallel, in place of `fill`. `reclaim` is called
    when freed memory must be available to others at once. `on_detach` is called with detached
    memory and the spans that views use (see `detach`), and with None for the spans when the memory
    is counted again.

    `bytes_held` and `peak_held` count allocated memory, `bytes_counted` the slots that are in use
    or idle. `allocations` and `frees` count the operations, which are slow where memory is
    page-locked. An interrupt in here leaves no lock held; `recount` repairs the counts.
    """

    def __init__(
        self,
        budget: int | None,
        make: Callable[[int], torch.Tensor],
        free: Callable[[torch.Tensor], None] = lambda memory: None,
        close: Callable[[], None] = lambda: None,
        before_free: Callable[[Slot], None] = lambda slot: slot.wait(),
        reclaim: Callable[[], None] = lambda: None,
    ) -> None:
        self.budget = budget
        self.make = make
        self._free = free
        self._close = close
        self._before_free = before_free
        self._reclaim = reclaim
        self.on_detach: Callable[[torch.Tensor, Spans | None], None] = lambda memory, spans: None
        self._idle: dict[int, deque[Slot]] = {}  # by size, in order of release
        self._retired: list[Slot] = []
        self.bytes_counted = 0
        self._lock = RLock()
        self._making = RLock()
        self.bytes_held = 0
        self.peak_held = 0
        self.allocations = self.frees = 0

    def take(self, nbytes: int) -> Slot:
        """Return a slot of `nbytes` bytes. The planner has ensured that the budget allows it."""
        return under(self._lock, lambda: self._take(nbytes))

    def _take(self, nbytes: int) -> Slot:
        same = self._idle.get(nbytes)
        if same:
            return same.popleft()  # its device work is the oldest
        self.bytes_counted += nbytes
        self._retire_until_it_fits()
        return Slot(nbytes)

    def resize(self, budget: int) -> None:
        """Set the budget. Only slots in use may exceed it."""
        self.budget = budget
        under(self._lock, self._retire_until_it_fits)

    def _retire_until_it_fits(self) -> None:
        if self.budget is None:
            return
        for nbytes in sorted(self._idle, reverse=True):
            idle = self._idle[nbytes]
            while idle and self.bytes_counted > self.budget:
                self._retired.append(idle.popleft())
                self.bytes_counted -= nbytes

    def release(self, slot: Slot, *, keep: bool = True) -> None:
        """Return a slot. Unless `keep`, its memory is freed at the next `fill`."""
        under(self._lock, lambda: self._release(slot, keep))

    def _release(self, slot: Slot, keep: bool) -> None:
        if keep and slot.memory is not None:
            self._idle.setdefault(slot.nbytes, deque()).append(slot)
            return
        slot.wanted = False
        self.bytes_counted -= slot.nbytes
        self._retired.append(slot)  # even without memory: another thread may be allocating it

    def detach(self, slot: Slot, spans: Spans) -> None:
        """Stop counting a slot in use, whose memory now belongs to the remaining views.

        The bytes in `spans`, as (start, stop), are preserved; others need not be.
        """
        assert slot.memory is not None
        under(self._lock, lambda: self._detach(slot.nbytes))
        self.on_detach(slot.memory, spans)

    def _detach(self, nbytes: int) -> None:
        self.bytes_counted -= nbytes
        self.bytes_held -= nbytes

    def free_detached(self, slot: Slot) -> None:
        """Free a detached slot after its last view is gone."""
        memory, slot.memory = slot.memory, None
        if memory is not None:
            self.on_detach(memory, None)
            self._before_free(slot)
            self._free(memory)

    def fill(self, slot: Slot) -> torch.Tensor:
        """Return the slot's memory, allocated and page-locked if necessary.

        May wait for the device. If a device is out of memory, frees idle slots and tries once more.
        Raises RuntimeError if the slot was released, because the caller was interrupted.
        """
        memory = self.provide(slot)
        if self.needs_lock(slot):
            self.lock(slot)
        return memory

    def provide(self, slot: Slot) -> torch.Tensor:
        """Return the slot's memory as `fill` does, without page-locking it, which is slow.

        The caller locks it in parallel to filling it. Until then, no copy to or from a device may
        use it.
        """
        memory = slot.memory
        return under(self._making, lambda: self._provide(slot)) if memory is None else memory

    def needs_lock(self, slot: Slot) -> bool:
        """Return whether the memory of a slot must still be page-locked."""
        return False

    def lock(self, slot: Slot) -> None:
        """Page-lock the memory of a slot in use. Its bytes may be written meanwhile."""

    def _provide(self, slot: Slot) -> torch.Tensor:
        self._free_retired()
        if not slot.wanted:
            raise RuntimeError("this slot was released before its memory was allocated")
        slot.memory = memory = self._made(slot)
        self.allocations += 1
        self.bytes_held += slot.nbytes
        self.peak_held = max(self.peak_held, self.bytes_there())
        return memory

    def bytes_there(self) -> int:
        """Return the bytes of allocated memory, including unused parts of shared slabs."""
        return self.bytes_held

    def _made(self, slot: Slot) -> torch.Tensor:
        with suppress(torch.OutOfMemoryError):
            return self.make(slot.nbytes)
        self._free_idle()
        return self.make(slot.nbytes)

    def unused_slots(self) -> list[Slot]:
        """Return the slots without a group: idle ones, and those freed at the next `fill`."""
        return under(self._lock, lambda: [*chain(*self._idle.values()), *self._retired])

    @property
    def idle_bytes(self) -> int:
        """Bytes of the idle slots."""
        idle = self._idle
        return under(self._lock, lambda: sum(size * len(same) for size, same in idle.items()))

    def free_idle(self, *, reclaim: bool = True) -> None:
        """Free every idle slot; with `reclaim`, make the memory available to others at once.

        Waits for the device work that still uses the slots.
        """
        under(self._making, functools.partial(self._free_idle, reclaim=reclaim))

    def _free_idle(self, *, reclaim: bool = True) -> None:
        under(self._lock, self._retire_idle)
        self._free_retired()
        if reclaim:
            self._reclaim()

    def _retire_idle(self) -> None:
        for nbytes, idle in self._idle.items():
            self.bytes_counted -= nbytes * len(idle)
            self._retired += idle
        self._idle.clear()

    def _free_retired(self) -> None:
        retired = under(self._lock, self._take_retired)
        for slot in retired:
            self._before_free(slot)
            if slot.memory is not None:
                self._free(slot.memory)
                slot.memory = None
                self.frees += 1
                self.bytes_held -= slot.nbytes

    def _take_retired(self) -> list[Slot]:
        retired, self._retired = self._retired, []
        return retired

    def recount(self, in_use: Iterable[Slot]) -> None:
        """Rebuild the counts after an interrupt. `in_use` are all slots in use."""
        under(self._making, lambda: under(self._lock, lambda: self._recount(list(in_use))))

    def _recount(self, in_use: list[Slot]) -> None:
        slots = [*in_use, *(slot for same in self._idle.values() for slot in same)]
        self.bytes_counted = sum(slot.nbytes for slot in slots)
        there = [slot for slot in [*slots, *self._retired] if slot.memory is not None]
        self.bytes_held = sum(slot.nbytes for slot in there)
        self._retire_until_it_fits()

    def close(self) -> None:
        """Free every idle slot. Slots in use are freed with their last view."""
        under(self._lock, self._retire_idle)
        under(self._making, self._free_retired)
        self._close()


class RegisteredArena(Arena):
    """Slots in page-locked memory.

    The memory outlives pending device work on a slot even if the arena is dropped.
    """

    def __init__(self, budget: int | None, memory: RegisteredMemory) -> None:
        super().__init__(budget, memory.make, close=memory.close)
        self.on_detach = memory.set_detached
        self._memory = memory

    def _made(self, slot: Slot) -> torch.Tensor:
        memory = super()._made(slot)
        self._memory.track_user(memory, slot)
        slot.slab = self._memory.slab_of(memory)
        return memory

    def _release(self, slot: Slot, keep: bool) -> None:
        super()._release(slot, keep and not (slot.slab is not None and slot.slab.unlocked))

    def needs_lock(self, slot: Slot) -> bool:
        assert slot.memory is not None
        return self._memory.needs_lock(slot.memory)

    def lock(self, slot: Slot) -> None:
        assert slot.memory is not None
        self._memory.lock(slot.memory)

    def bytes_there(self) -> int:
        return self._memory.used()


def host_arena(budget: int | None, device: torch.device) -> Arena:
    """Return an arena of host memory for transfers to `device`, page-locked if it needs that.

    For accelerators whose module has a `cudart`, as torch.cuda, memory is mapped here and
    registered. For others, torch page-locks it.
    """
    if device.type == "cpu":
        pages = RecycledPages(budget)
        arena = Arena(budget, pages.allocate, close=pages.close, reclaim=pages.trim)
        arena.on_detach = pages.set_detached
        return arena
    module = torch.get_device_module(device)
    if hasattr(module, "cudart"):
        return RegisteredArena(budget, RegisteredMemory(module, device, budget))
    return Arena(budget, pinned_memory)


def device_arena(budget: int | None, device: torch.device, stream: Any) -> Arena:
    """Return an arena of an accelerator's memory, allocated on the stream that fills it.

    Only that stream waits for work that uses freed memory: the next allocation is on the same
    stream.
    """

    @torch.inference_mode(mode=False)  # the memory outlives the first caller's inference mode
    def make(nbytes: int) -> torch.Tensor:
        return run_on(stream, lambda: torch.empty(nbytes, dtype=torch.uint8, device=device))

    def before_free(slot: Slot) -> None:
        for event in slot.poll():
            stream.wait_event(event)

    # torch caches freed memory for the stream on which it was allocated.
    return Arena(
        budget, make, before_free=before_free, reclaim=functools.partial(empty_cache, device)
    )
