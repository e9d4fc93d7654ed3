"""Memory of one tier, cut into slots that are made once and used again.

A slot has exactly the size of the group it holds, so nothing is lost to fragments or size classes,
and what the budget counts is what is really taken (and, with an accelerator, really page-locked).
A slot given back waits for the next group of its size; when another size needs the room, idle
slots are unmade first. Host slots lie in 2 MiB pages, which direct reads want: into 4 KiB pages a
disk delivers about half of its speed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from tierstore.transfer.pages import RecycledPages
from tierstore.transfer.pinned import RegisteredMemory, pinned_memory
from tierstore.transfer.streams import entered


@dataclass(eq=False)
class Slot:
    """Room for one group. `memory` (uint8, `nbytes` long) is there from `Arena.fill` on.

    `pending` are events of device work that still uses the memory: whoever writes to it, or
    unmakes it, waits for them first. A slot that was given back before it had any memory is not
    `wanted`: it never gets some.
    """

    nbytes: int
    memory: torch.Tensor | None = None
    wanted: bool = True
    pending: list[torch.Event] = field(default_factory=list)

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
    slots before. `bytes_held` and `peak_held` count memory that exists; `made` and `unmade`, how
    often it was made and unmade, which takes long where memory has to be page-locked.
    """

    def __init__(
        self,
        budget: int | None,
        make: Callable[[int], torch.Tensor],
        unmake: Callable[[torch.Tensor], None] = lambda memory: None,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._budget = budget
        self._make = make
        self._unmake = unmake
        self._close = close
        self._idle: dict[int, deque[Slot]] = {}  # by size, the one given back first in front
        self._condemned: list[Slot] = []
        self._counted = 0  # bytes of slots that are in use or idle
        self._forgotten = 0  # bytes of slots that are held no more, not yet subtracted
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self.bytes_held = 0
        self.peak_held = 0
        self.made = self.unmade = 0

    def take(self, nbytes: int) -> Slot:
        """A slot of `nbytes` bytes. The planner has made sure that the budget allows it."""
        with self._lock:
            same = self._idle.get(nbytes)
            if same:
                return same.popleft()  # device work is longest over where it was given first
            self._counted += nbytes
            self._condemn_until_it_fits()
            return Slot(nbytes)

    def _condemn_until_it_fits(self) -> None:
        if self._budget is None:
            return
        for nbytes in sorted(self._idle, reverse=True):
            idle = self._idle[nbytes]
            while idle and self._counted > self._budget:
                self._condemned.append(idle.popleft())
                self._counted -= nbytes

    def give(self, slot: Slot, *, keep: bool = True) -> None:
        """The slot is free again. Its memory goes at the next `fill`, unless it is to `keep`."""
        with self._lock:
            if keep and slot.memory is not None:
                self._idle.setdefault(slot.nbytes, deque()).append(slot)
                return
            slot.wanted = False
            self._counted -= slot.nbytes
            self._condemned.append(slot)  # even with no memory yet: somebody may be at making it

    def forget(self, slot: Slot) -> None:
        """Somebody else has the slot's memory from now on. It goes with the last view of it."""
        with self._lock:
            self._counted -= slot.nbytes
            self._forgotten += slot.nbytes

    def fill(self, slot: Slot) -> torch.Tensor:
        """The slot's memory, made if it must be. May wait for device work.

        Raises RuntimeError if the slot was given back: whoever asked for it was interrupted.
        """
        if slot.memory is None:
            with self._making:
                self._unmake_condemned()
                if not slot.wanted:
                    raise RuntimeError("this room was given back before it was filled")
                slot.memory = self._make(slot.nbytes)
                self.made += 1
                self.bytes_held += slot.nbytes
                self.peak_held = max(self.peak_held, self.bytes_held)
        return slot.memory

    def _unmake_condemned(self) -> None:
        with self._lock:
            condemned, self._condemned = self._condemned, []
            forgotten, self._forgotten = self._forgotten, 0
        self.bytes_held -= forgotten
        for slot in condemned:
            slot.wait()
            if slot.memory is not None:
                self._unmake(slot.memory)
                slot.memory = None
                self.unmade += 1
                self.bytes_held -= slot.nbytes

    def close(self) -> None:
        """Unmake every idle slot. What is still in use goes with its last view."""
        with self._lock:
            for nbytes, idle in self._idle.items():
                self._counted -= nbytes * len(idle)
                self._condemned += idle
            self._idle.clear()
        with self._making:
            self._unmake_condemned()
            self._close()


def host_arena(budget: int | None, device: torch.device) -> Arena:
    """Host memory for transfers to `device`: page-locked if the device wants that."""
    if device.type == "cpu":
        pages = RecycledPages(budget)
        return Arena(budget, pages.allocate, close=pages.close)
    if device.type == "cuda":
        registered = RegisteredMemory()
        return Arena(budget, registered.make, registered.unmake)
    return Arena(budget, pinned_memory)


def device_arena(budget: int | None, device: torch.device, stream: Any) -> Arena:
    """Memory of an accelerator, allocated on the stream that fills it."""

    def make(nbytes: int) -> torch.Tensor:
        with entered(stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=device)

    return Arena(budget, make)
