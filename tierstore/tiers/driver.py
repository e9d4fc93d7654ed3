"""What a tier has to be able to do, and what those whose copies are in memory have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from typing import Any, Protocol, runtime_checkable

import torch

from tierstore.model.groups import GroupSpec
from tierstore.model.tiers import Tier
from tierstore.tiers.arena import Arena, Slot, Spans
from tierstore.tiers.entry import GroupEntry
from tierstore.tiers.slot_views import LeftSlot, LeftSlots, SlotViews, Token, spans_of


class TierDriver(Protocol):
    """The copies of groups on one tier, and the room that they take.

    The planner counts room and has made sure that there is some; a driver only keeps books. So
    `reserve`, `drop` and `holds` never block and never fail. They are called by one thread of the
    store's at a time; what takes long (to make memory, to write, to give room back to a file
    system) is left to the threads that copy, or to threads of the driver's own. What is to be
    remembered of a copy may lie in the entry (`slots`, `source`) or in the driver, by
    `entry.group`.

    `tests/conformance/drivers.py` has the rules as tests.
    """

    @property
    def tier(self) -> Tier:
        """Which tier it is."""

    @property
    def capacity(self) -> int | None:
        """How many bytes its copies may take together; None: there is no limit."""

    @property
    def alignment(self) -> int:
        """The bytes of a copy begin at a multiple of so many bytes."""

    @property
    def peak_bytes(self) -> int | None:
        """The most bytes of memory that existed here at once; None if only the planner counts."""

    def holds(self, entry: GroupEntry) -> bool:
        """Whether there is a copy of the group, complete or not, or room for one."""

    def reserve(self, entry: GroupEntry, *, for_caller: bool = False) -> None:
        """Set room aside for a copy, which a hop is about to make; or a caller, who then waits.

        The room need not exist yet: who fills it makes it, and is told if that fails.
        """

    def view(self, entry: GroupEntry) -> dict[str, torch.Tensor]:
        """The tensors of a copy that has arrived, over the very bytes of it. May be kept and given
        again until the copy is dropped. Raises RuntimeError where it cannot be looked at."""

    def drop(self, entry: GroupEntry) -> None:
        """Give the room of a copy back, whether or not anything has come into it.

        What still uses the bytes (a lease that was lost, work of a device) goes on seeing them, or
        others that were there; never an address without memory.
        """

    def close(self, entries: Iterable[GroupEntry]) -> None:
        """Give everything back. `entries` are all groups; no thread copies any more."""


@runtime_checkable
class WaitingDriver(TierDriver, Protocol):
    """A tier whose copies come from another process, or a server: whoever copies may wait for that
    as long as it likes."""

    def stop_waiting(self) -> None:
        """The store ends: whoever waits fails at once, as does whoever would wait from now on.
        Copies that are there stay as they are until `close`."""


@runtime_checkable
class CallersDriver(TierDriver, Protocol):
    """A tier whose books are kept by callers, as part of a step of the store.

    So whoever comes to need a copy there can queue it at once. But an interrupt may come between
    any two instructions; `rebuild` is told of it before anything else is done.
    """

    def rebuild(self, entries: Collection[GroupEntry], coming: Set[Any]) -> None:
        """See which copies there are, after somebody was cut short who changed that.

        `coming` are the keys of groups that a hop is copying here. Of others, a copy that was not
        queued to the end is none.
        """


class MemoryTier:
    """A tier whose copies are slots of `arena`, with the tensors of a group at `offsets`.

    A slot at which somebody looks when its group is dropped is left to that.
    """

    tier: Tier

    def __init__(self, arena: Arena, offsets: Callable[[GroupSpec], Mapping[str, int]]) -> None:
        self.arena = arena
        self._offsets = offsets
        self.left = LeftSlots()
        self.borrowed: set[GroupEntry] = set()  # stand for memory that is no copy's
        self._closed = False

    @property
    def capacity(self) -> int | None:
        return self.arena.budget

    @property
    def peak_bytes(self) -> int:
        return self.arena.peak_held

    def holds(self, entry: GroupEntry) -> bool:
        return self.tier in entry.slots

    def reserve(self, entry: GroupEntry, *, for_caller: bool = False) -> None:
        self.left.collect()
        entry.slots[self.tier] = self.arena.take(entry.spec.nbytes)

    def view(self, entry: GroupEntry) -> dict[str, torch.Tensor]:
        slot = entry.slots[self.tier]
        return slot.while_locked(lambda: self._view(entry, slot))

    def _view(self, entry: GroupEntry, slot: Slot) -> dict[str, torch.Tensor]:
        if slot.views is None:
            assert slot.memory is not None
            offsets, again = self._offsets(entry.spec), self.left.storages_of(entry.group)
            slot.views = SlotViews(entry.spec, slot.memory, offsets, again)
        return slot.views.tensors

    def views_over(self, entry: GroupEntry, memory: torch.Tensor, token: Token) -> SlotViews:
        """The tensors of a group over `memory`, which `token` is of, and not over a slot."""
        return SlotViews(entry.spec, memory, self._offsets(entry.spec), {}, token)

    def view_to_change(self, entry: GroupEntry) -> dict[str, torch.Tensor]:
        """`view`, for who changes the group: no tensor is over memory that was left to views."""
        self.left.forget(entry.group)
        slot = entry.slots[self.tier]
        if slot.views is not None and slot.views.again and slot.memory is not None:
            offsets = self._offsets(entry.spec)
            slot.views = slot.views.over_the_slot(entry.spec, slot.memory, offsets)
        return self.view(entry)

    def drop(self, entry: GroupEntry) -> None:
        self._drop(entry, self.arena.give)

    def _drop(self, entry: GroupEntry, give: Callable[[Slot], None]) -> None:
        """Give a slot back by `give`: now, or when nobody looks at it any more."""
        self.left.collect()
        slot = entry.slots.pop(self.tier)
        looked_at = slot.end_views()
        if looked_at is None or self._closed:  # of a closed tier, nothing is used again
            give(slot)
            return
        self.leave(slot, spans_of(entry.spec, self._offsets(entry.spec), looked_at))
        end = functools.partial(self.end_left, slot)
        self.left.add(LeftSlot(slot, entry.group, looked_at, end), self.tier.name)

    def borrow(self, entry: GroupEntry) -> None:
        """Set memory aside that is no copy's; the planner has made room. It is in the books until
        `give_back`."""
        self.borrowed.add(entry)
        self.reserve(entry)

    def give_back(self, entry: GroupEntry) -> None:
        """It is not needed any more."""
        if entry in self.borrowed and self.holds(entry):
            self.drop(entry)
        self.borrowed.discard(entry)

    def collect_left(self) -> None:
        """Give back what was left to views that are gone."""
        self.left.collect()

    def leave(self, slot: Slot, spans: Spans) -> None:
        """The slot is none of the tier's from now on; somebody looks at these parts of it."""
        self.arena.leave(slot, spans)

    def end_left(self, slot: Slot) -> None:
        """Nobody looks at a slot any more that was left. Its memory goes: others may have taken the
        room that it had."""
        self.arena.unmake_left(slot)

    def close(self, entries: Iterable[GroupEntry]) -> None:
        self._closed = True
        for entry in [*entries, *self.borrowed]:
            if self.holds(entry):
                self.drop(entry)  # leases that are still out keep what they look at
        self.left.close()
        self.arena.close()
