"""The interface of a tier, and the base class of tiers in memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from typing import Any, Protocol, runtime_checkable

import torch

from tierstore.model.groups import GroupSpec
from tierstore.model.tiers import Tier
from tierstore.tiers.arena import Arena, Slot, Spans
from tierstore.tiers.entry import GroupEntry
from tierstore.tiers.slot_views import DetachedSlot, DetachedSlots, SlotViews, Token, spans_of


class TierDriver(Protocol):
    """The copies of groups on one tier, and the memory that they take.

    The planner manages capacity and has ensured that it suffices; a driver only does accounting.
    `reserve`, `drop` and `holds` never block and never fail. One thread of the store calls them at
    a time; slow work (allocating memory, writing, returning space to a file system) is left to the
    threads that copy, or to the driver's own threads. The state of a copy may be kept in the entry
    (`slots`, `source`) or in the driver, by `entry.group`.

    `tests/conformance/drivers.py` has the rules as tests.
    """

    @property
    def tier(self) -> Tier:
        """The tier that this driver manages."""

    @property
    def capacity(self) -> int | None:
        """Maximum bytes of all copies together; None for no limit."""

    @property
    def alignment(self) -> int:
        """Copies begin at multiples of this many bytes."""

    @property
    def peak_bytes(self) -> int | None:
        """Maximum bytes of memory allocated at once; None if only the planner counts."""

    def holds(self, entry: GroupEntry) -> bool:
        """Return whether there is a copy of the group, complete or not, or memory for one."""

    def reserve(self, entry: GroupEntry, *, for_caller: bool = False) -> None:
        """Reserve memory for a copy that a hop will make, or, `for_caller`, for a waiting caller.

        The memory need not exist yet: the hop allocates it, and fails if that fails.
        """

    def view(self, entry: GroupEntry) -> dict[str, torch.Tensor]:
        """Return the tensors of a copy that has arrived, over its memory.

        They may be cached until the copy is dropped. Raises RuntimeError where copies cannot be
        read in place.
        """

    def drop(self, entry: GroupEntry) -> None:
        """Free the memory of a copy, whether or not its bytes have arrived.

        Remaining users (a leaked lease, device work) still see its bytes or older ones, never
        unmapped addresses.
        """

    def close(self, entries: Iterable[GroupEntry]) -> None:
        """Free everything. `entries` are all groups. Called once no thread copies any longer."""


@runtime_checkable
class WaitingDriver(TierDriver, Protocol):
    """A tier whose copies come from another process or a server, which may block copies."""

    def stop_waiting(self) -> None:
        """Fail pending and future waits at once, because the store is closing.

        Existing copies stay until `close`.
        """


@runtime_checkable
class CallersDriver(TierDriver, Protocol):
    """A tier whose accounting is done by callers, as part of a step of the store.

    This lets a caller that needs a copy queue it at once. An interrupt may come between any two
    instructions; the next call after it is `rebuild`.
    """

    def rebuild(self, entries: Collection[GroupEntry], coming: Set[Any]) -> None:
        """Find out which copies exist, after a change was interrupted.

        `coming` are the keys of groups that a hop is copying here. For others, a copy that was not
        completely queued does not count.
        """


class MemoryTier:
    """A tier whose copies are slots of `arena`, with the tensors of a group at `offsets`.

    If views remain when a group is dropped, its slot is detached: it belongs to them from then on.
    """

    tier: Tier

    def __init__(self, arena: Arena, offsets: Callable[[GroupSpec], Mapping[str, int]]) -> None:
        self.arena = arena
        self._offsets = offsets
        self.detached = DetachedSlots()
        self.carved_out: set[GroupEntry] = set()  # placeholders for memory that holds no copy
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
        self.detached.collect()
        entry.slots[self.tier] = self.arena.take(entry.spec.nbytes)

    def view(self, entry: GroupEntry) -> dict[str, torch.Tensor]:
        slot = entry.slots[self.tier]
        return slot.while_locked(lambda: self._view(entry, slot))

    def _view(self, entry: GroupEntry, slot: Slot) -> dict[str, torch.Tensor]:
        if slot.views is None:
            assert slot.memory is not None
            offsets, reused = self._offsets(entry.spec), self.detached.storages_of(entry.group)
            slot.views = SlotViews(entry.spec, slot.memory, offsets, reused)
        return slot.views.tensors

    def views_over(self, entry: GroupEntry, memory: torch.Tensor, token: Token) -> SlotViews:
        """Return the tensors of a group over `memory`, which `token` keeps, instead of a slot."""
        return SlotViews(entry.spec, memory, self._offsets(entry.spec), {}, token)

    def writable_view(self, entry: GroupEntry) -> dict[str, torch.Tensor]:
        """Return the tensors for a caller that changes the group: none is over detached memory."""
        self.detached.forget(entry.group)
        slot = entry.slots[self.tier]
        if slot.views is not None and slot.views.reused and slot.memory is not None:
            offsets = self._offsets(entry.spec)
            slot.views = slot.views.over_slot(entry.spec, slot.memory, offsets)
        return self.view(entry)

    def drop(self, entry: GroupEntry) -> None:
        self._drop(entry, self.arena.release)

    def _drop(self, entry: GroupEntry, release: Callable[[Slot], None]) -> None:
        """Release a slot by `release`: now, or after its last view is dropped."""
        self.detached.collect()
        slot = entry.slots.pop(self.tier)
        live = slot.end_views()
        if live is None or self._closed:  # a closed tier reuses nothing
            release(slot)
            return
        self.detach(slot, spans_of(entry.spec, self._offsets(entry.spec), live))
        end = functools.partial(self.free_detached, slot)
        self.detached.add(DetachedSlot(slot, entry.group, live, end), self.tier.name)

    def carve_out(self, entry: GroupEntry) -> None:
        """Reserve memory that holds no copy, until `return_carved_out`.

        The planner has ensured the capacity.
        """
        self.carved_out.add(entry)
        self.reserve(entry)

    def return_carved_out(self, entry: GroupEntry) -> None:
        """Return carved-out memory."""
        if entry in self.carved_out and self.holds(entry):
            self.drop(entry)
        self.carved_out.discard(entry)

    def collect_detached(self) -> None:
        """Free detached slots whose views are gone."""
        self.detached.collect()

    def detach(self, slot: Slot, spans: Spans) -> None:
        """Transfer a slot to its remaining views, which use the parts in `spans`."""
        self.arena.detach(slot, spans)

    def free_detached(self, slot: Slot) -> None:
        """Free a detached slot, whose capacity may have been reused."""
        self.arena.free_detached(slot)

    def close(self, entries: Iterable[GroupEntry]) -> None:
        self._closed = True
        for entry in [*entries, *self.carved_out]:
            if self.holds(entry):
                self.drop(entry)  # open leases keep their memory
        self.detached.close()
        self.arena.close()
