"""Memory of one tier, cut into slots that are made once and used again.

A slot has the size that its group is counted with, so nothing is lost to fragments, and what the
budget counts is what is really taken (and, with an accelerator, really page-locked).
A slot given back waits for the next group of its size; when another size needs the room, idle
slots are unmade first. Host slots lie in 2 MiB pages, which direct reads want: into 4 KiB pages a
disk delivers about half of its speed.
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
from tierstore.system.streams import empty_cache, on
from tierstore.tiers.pages import RecycledPages
from tierstore.tiers.pinned import RegisteredMemory, RegisteredSlab, pinned_memory

if TYPE_CHECKING:
    from tierstore.tiers.slot_views import LookedAt, SlotViews

T = TypeVar("T")

Spans = Sequence[tuple[int, int]]
"""Parts of a slot's memory: bytes from the one to the other."""


@dataclass(eq=False)
class Slot:
    """Room for one group. `memory` (uint8, `nbytes` long) is there from `Arena.fill` on.

    `pending` are events of device work that still uses the memory: whoever writes to it, or
    unmakes it, waits for them first. `arrival` is an event of the device that has passed once the
    group has come into a slot there. A slot that was given back before it had any memory is not
    `wanted`: it never gets some. `views` are the tensors of the group, once somebody looked at it.
    The last lease ended in `stream` of a device; in `streams` views of it may be used after one.
    A small page-locked slot is part of a `slab`; callers may have a view of one that is `exposed`.
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
        """Queue device work on the memory, or give others a view of it: for so long, memory that is
        page-locked stays so."""
        return action() if self.slab is None else under(self.slab.lock, action)

    def is_seen(self) -> bool:
        """Whether anybody else may have a view of the memory."""
        return self.exposed or (self.views is not None and self.views.are_looked_at())

    def end_views(self) -> LookedAt | None:
        """Forget the tensors of the group. Returns what somebody still looks at, if he does."""
        return self.while_locked(self._end_views)

    def _end_views(self) -> LookedAt | None:
        views, self.views = self.views, None
        looked_at = None if views is None else views.end()
        self.exposed = self.exposed or looked_at is not None
        return looked_at

    def bytes(self) -> memoryview:
        """The memory of a host slot."""
        assert self.memory is not None
        return self.memory.numpy().data

    def wait(self) -> None:
        """Wait for the device work that still uses the memory."""
        while waiting := self.pending[-1:]:
            waiting[0].synchronize()
            self._over(waiting)  # by now there may be a newer one at the end

    def look(self) -> list[torch.Event]:
        """The device work that still uses the memory. Waits for nothing."""
        self._over([event for event in self.pending if event.query()])
        return list(self.pending)

    def _over(self, events: list[torch.Event]) -> None:
        for event in events:
            with suppress(ValueError):  # another thread found out, too
                self.pending.remove(event)


class Arena:
    """The slots of one tier, never more than `budget` bytes of them (None: no limit).

    `take` and `give` only keep books and never block; `fill` makes the memory, unmaking idle
    slots before, once `passed` has seen to it that no device work uses them any more. Whoever reads
    into a slot calls `provide`, and `lock` beside that, in place of `fill`. `reclaim` is
    called where memory that was unmade is to be had by others at once, `when_left` for memory that
    is left to others (see `leave`), and with None when it comes back. `bytes_held` and `peak_held`
    count memory that exists, `bytes_counted` slots that are in use or idle; `made` and `unmade`,
    how often it was made and unmade, which takes long where memory has to be page-locked. Of a
    caller that an interrupt cuts short in here, no lock is left behind; what it has counted wrong,
    `recount` puts right.
    """

    def __init__(
        self,
        budget: int | None,
        make: Callable[[int], torch.Tensor],
        unmake: Callable[[torch.Tensor], None] = lambda memory: None,
        close: Callable[[], None] = lambda: None,
        passed: Callable[[Slot], None] = lambda slot: slot.wait(),
        reclaim: Callable[[], None] = lambda: None,
    ) -> None:
        self.budget = budget
        self.make = make
        self._unmake = unmake
        self._close = close
        self._passed = passed
        self._reclaim = reclaim
        self.when_left: Callable[[torch.Tensor, Spans | None], None] = lambda memory, spans: None
        self._idle: dict[int, deque[Slot]] = {}  # by size, the one given back first in front
        self._condemned: list[Slot] = []
        self.bytes_counted = 0
        self._lock = RLock()
        self._making = RLock()
        self.bytes_held = 0
        self.peak_held = 0
        self.made = self.unmade = 0

    def take(self, nbytes: int) -> Slot:
        """A slot of `nbytes` bytes. The planner has made sure that the budget allows it."""
        return under(self._lock, lambda: self._take(nbytes))

    def _take(self, nbytes: int) -> Slot:
        same = self._idle.get(nbytes)
        if same:
            return same.popleft()  # device work is longest over where it was given first
        self.bytes_counted += nbytes
        self._condemn_until_it_fits()
        return Slot(nbytes)

    def resize(self, budget: int) -> None:
        """HostAccess no more than so many bytes from now on, but for what is in use."""
        self.budget = budget
        under(self._lock, self._condemn_until_it_fits)

    def _condemn_until_it_fits(self) -> None:
        if self.budget is None:
            return
        for nbytes in sorted(self._idle, reverse=True):
            idle = self._idle[nbytes]
            while idle and self.bytes_counted > self.budget:
                self._condemned.append(idle.popleft())
                self.bytes_counted -= nbytes

    def give(self, slot: Slot, *, keep: bool = True) -> None:
        """The slot is free again. Its memory goes at the next `fill`, unless it is to `keep`."""
        under(self._lock, lambda: self._give(slot, keep))

    def _give(self, slot: Slot, keep: bool) -> None:
        if keep and slot.memory is not None:
            self._idle.setdefault(slot.nbytes, deque()).append(slot)
            return
        slot.wanted = False
        self.bytes_counted -= slot.nbytes
        self._condemned.append(slot)  # even with no memory yet: somebody may be at making it

    def leave(self, slot: Slot, spans: Spans) -> None:
        """A slot in use, with memory, is somebody else's from now on: it does not count here. These
        parts of it, as (start, stop), keep their bytes; others need not."""
        assert slot.memory is not None
        under(self._lock, lambda: self._leave(slot.nbytes))
        self.when_left(slot.memory, spans)

    def _leave(self, nbytes: int) -> None:
        self.bytes_counted -= nbytes
        self.bytes_held -= nbytes

    def unmake_left(self, slot: Slot) -> None:
        """Unmake a slot that was left: nobody looks at it any more."""
        memory, slot.memory = slot.memory, None
        if memory is not None:
            self.when_left(memory, None)
            self._passed(slot)
            self._unmake(memory)

    def fill(self, slot: Slot) -> torch.Tensor:
        """The slot's memory, made and page-locked if it must be. May wait for device work.

        If a device has no memory left, idle slots are unmade and it is tried once more. Raises
        RuntimeError if the slot was given back: whoever asked for it was interrupted.
        """
        memory = self.provide(slot)
        if self.is_to_lock(slot):
            self.lock(slot)
        return memory

    def provide(self, slot: Slot) -> torch.Tensor:
        """`fill` without page-locking, which takes long: whoever fills the memory does that beside.

        Until then nobody may copy between it and a device.
        """
        memory = slot.memory
        return under(self._making, lambda: self._provide(slot)) if memory is None else memory

    def is_to_lock(self, slot: Slot) -> bool:
        """Whether the memory of a slot is to be page-locked, and is not: it is locked once."""
        return False

    def lock(self, slot: Slot) -> None:
        """Page-lock the memory of a slot in use. Its bytes may come in meanwhile."""

    def _provide(self, slot: Slot) -> torch.Tensor:
        self._unmake_condemned()
        if not slot.wanted:
            raise RuntimeError("this room was given back before it was filled")
        slot.memory = memory = self._made(slot)
        self.made += 1
        self.bytes_held += slot.nbytes
        self.peak_held = max(self.peak_held, self.bytes_there())
        return memory

    def bytes_there(self) -> int:
        """Bytes of memory that exist now, those that slots share and none has included."""
        return self.bytes_held

    def _made(self, slot: Slot) -> torch.Tensor:
        with suppress(torch.OutOfMemoryError):
            return self.make(slot.nbytes)
        self._unmake_idle()
        return self.make(slot.nbytes)

    def spare(self) -> list[Slot]:
        """The slots that nobody has: those that are idle, and those that go at the next `fill`."""
        return under(self._lock, lambda: [*chain(*self._idle.values()), *self._condemned])

    @property
    def idle_bytes(self) -> int:
        """Bytes of the idle slots."""
        idle = self._idle
        return under(self._lock, lambda: sum(size * len(same) for size, same in idle.items()))

    def give_back_idle(self, *, reclaim: bool = True) -> None:
        """Unmake every idle slot, for others to have the memory: at once, if it is to `reclaim`.

        Waits for the device work that still uses them.
        """
        under(self._making, functools.partial(self._unmake_idle, reclaim=reclaim))

    def _unmake_idle(self, *, reclaim: bool = True) -> None:
        under(self._lock, self._condemn_idle)
        self._unmake_condemned()
        if reclaim:
            self._reclaim()

    def _condemn_idle(self) -> None:
        for nbytes, idle in self._idle.items():
            self.bytes_counted -= nbytes * len(idle)
            self._condemned += idle
        self._idle.clear()

    def _unmake_condemned(self) -> None:
        condemned = under(self._lock, self._take_condemned)
        for slot in condemned:
            self._passed(slot)
            if slot.memory is not None:
                self._unmake(slot.memory)
                slot.memory = None
                self.unmade += 1
                self.bytes_held -= slot.nbytes

    def _take_condemned(self) -> list[Slot]:
        condemned, self._condemned = self._condemned, []
        return condemned

    def recount(self, in_use: Iterable[Slot]) -> None:
        """These slots are in use, and no others: who took or gave one was cut short."""
        under(self._making, lambda: under(self._lock, lambda: self._recount(list(in_use))))

    def _recount(self, in_use: list[Slot]) -> None:
        slots = [*in_use, *(slot for same in self._idle.values() for slot in same)]
        self.bytes_counted = sum(slot.nbytes for slot in slots)
        there = [slot for slot in [*slots, *self._condemned] if slot.memory is not None]
        self.bytes_held = sum(slot.nbytes for slot in there)
        self._condemn_until_it_fits()

    def close(self) -> None:
        """Unmake every idle slot. What is still in use goes with its last view."""
        under(self._lock, self._condemn_idle)
        under(self._making, self._unmake_condemned)
        self._close()


class RegisteredArena(Arena):
    """Slots in page-locked memory, which outlasts the device work that is pending on a slot even if
    the arena is dropped."""

    def __init__(self, budget: int | None, memory: RegisteredMemory) -> None:
        super().__init__(budget, memory.make, close=memory.close)
        self.when_left = memory.leave
        self._memory = memory

    def _made(self, slot: Slot) -> torch.Tensor:
        memory = super()._made(slot)
        self._memory.keep_for(memory, slot)
        slot.slab = self._memory.slab_of(memory)
        return memory

    def _give(self, slot: Slot, keep: bool) -> None:
        super()._give(slot, keep and not (slot.slab is not None and slot.slab.unlocked))

    def is_to_lock(self, slot: Slot) -> bool:
        assert slot.memory is not None
        return self._memory.is_to_lock(slot.memory)

    def lock(self, slot: Slot) -> None:
        assert slot.memory is not None
        self._memory.lock(slot.memory)

    def bytes_there(self) -> int:
        return self._memory.used()


def host_arena(budget: int | None, device: torch.device) -> Arena:
    """Host memory for transfers to `device`: page-locked if the device wants that.

    Accelerators whose module has a `cudart`, as torch.cuda, register memory that is mapped here.
    For others, torch page-locks.
    """
    if device.type == "cpu":
        pages = RecycledPages(budget)
        arena = Arena(budget, pages.allocate, close=pages.close, reclaim=pages.give_back)
        arena.when_left = pages.leave
        return arena
    module = torch.get_device_module(device)
    if hasattr(module, "cudart"):
        return RegisteredArena(budget, RegisteredMemory(module, device, budget))
    return Arena(budget, pinned_memory)


def device_arena(budget: int | None, device: torch.device, stream: Any) -> Arena:
    """Memory of an accelerator, allocated on the stream that fills it.

    The stream waits for what still uses memory that goes, and nobody else: who gets that memory
    next is on the same stream.
    """

    @torch.inference_mode(mode=False)  # it is used again outside of what its first user is in
    def make(nbytes: int) -> torch.Tensor:
        return on(stream, lambda: torch.empty(nbytes, dtype=torch.uint8, device=device))

    def passed(slot: Slot) -> None:
        for event in slot.look():
            stream.wait_event(event)

    # Unmade memory is kept by torch for the stream on which it was allocated.
    return Arena(budget, make, passed=passed, reclaim=functools.partial(empty_cache, device))
