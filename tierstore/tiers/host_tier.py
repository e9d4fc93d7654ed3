"""Copies in host memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

import torch

from tierstore.errors import BudgetError
from tierstore.model.groups import GroupSpec
from tierstore.model.sizes import PAGE
from tierstore.model.tiers import Tier
from tierstore.observe.device_times import Mark
from tierstore.observe.journal import Journal, Span, hop
from tierstore.system.mapping import TooManyMapsError
from tierstore.system.views import view_all
from tierstore.tiers.arena import Arena, Slot
from tierstore.tiers.device_tier import DeviceTier, add_all, copy_all
from tierstore.tiers.driver import MemoryTier
from tierstore.tiers.entry import GroupEntry, SharedGroup
from tierstore.tiers.workers import EARLY, Job, SerialExecutor, Workers

UP, DOWN = hop(Tier.HOST, Tier.DEVICE), hop(Tier.DEVICE, Tier.HOST)


class HostTier(MemoryTier):
    """Slots in host memory, from `arena`: page-locked for `device`, if there is one.

    Callers put groups here and lease them here for updates. `serial` does the accounting; the
    threads in `makers` allocate memory, which is slow where it is page-locked.
    """

    tier = Tier.HOST
    alignment = PAGE

    def __init__(
        self,
        arena: Arena,
        device: DeviceTier | None,
        journal: Journal,
        serial: SerialExecutor,
        makers: Workers,
    ) -> None:
        super().__init__(arena, _offsets)
        self._device = device
        self._journal = journal
        self._serial = serial
        self._makers = makers

    def reserve(self, entry: GroupEntry, *, for_caller: bool = False) -> None:
        super().reserve(entry)
        if for_caller and self._device is None:  # page-locking is too slow for `serial`
            with suppress(MemoryError, OSError, BudgetError):  # raised again when it is filled
                self.memory_of(entry)

    # Overridden by `LeasedHostTier`, where a service holds groups -------------------------------

    connected = False
    """True if groups that are registered are leased from a service."""

    budget_name = "ram_budget"
    """The option by which users set the budget of registered groups."""

    def weight_budget(self, budget: int | None) -> int | None:
        """Return the budget for registered groups in bytes, given the budget of this tier."""
        return budget

    def offer(self, groups: Sequence[SharedGroup]) -> None:
        """Register groups with the service, before they are registered here. May block."""

    def set_shared(self, entry: GroupEntry, of: SharedGroup) -> None:
        """Use the service's copies for a group."""
        raise AssertionError("this store is not connected to a service")

    def is_shared(self, entry: GroupEntry) -> bool:
        """Return whether copies of a group here belong to the service.

        They count against its allowance, and are read-only.
        """
        return False

    def preserve_for_readers(self, entries: Iterable[GroupEntry]) -> None:
        """Preserve the bytes of leased groups after the store is closed."""

    # Memory ------------------------------------------------------------------------------------

    def memory_of(self, entry: GroupEntry) -> torch.Tensor:
        """Return the memory reserved for a group, allocated and page-locked if necessary.

        May wait for device work. Raises BudgetError if the process has too many memory maps, or
        OSError.
        """
        return self._memory_by(self.arena.fill, entry)

    def provide(self, entry: GroupEntry) -> list[Job]:
        """Allocate the memory reserved for a group if necessary, to read into it.

        Returns jobs to run in parallel with the read, on any thread: page-locking it, if it is not
        locked. May block, and raises as `memory_of`.
        """
        self._memory_by(self.arena.provide, entry)
        slot = entry.slots[self.tier]
        lock = functools.partial(self.arena.lock, slot)
        return [lock] if self.arena.needs_lock(slot) else []

    def _memory_by(self, make: Callable[[Slot], torch.Tensor], entry: GroupEntry) -> torch.Tensor:
        try:
            return make(entry.slots[self.tier])
        except TooManyMapsError as error:
            budget = self.capacity or entry.spec.nbytes
            advice = str(error.strerror)
            raise BudgetError(
                entry.group.key, self.tier.name, entry.spec.nbytes, budget, advice
            ) from error

    def take(self, entry: GroupEntry) -> torch.Tensor:
        """Return carved-out memory, which holds no copy. The planner has ensured capacity.

        May block, and raises as `memory_of`.
        """
        self._serial.submit(functools.partial(self.carve_out, entry))
        return self._memory_for_caller(entry)[1]

    def return_carved_out_soon(self, entry: GroupEntry) -> None:
        """Return carved-out memory. Does not block."""
        self._serial.submit(functools.partial(self.return_carved_out, entry))

    def free_idle(self) -> None:
        """Free memory without a group, once earlier drops are accounted for."""
        free = functools.partial(self._makers.submit, EARLY, self.arena.free_idle)
        self._serial.submit(free)

    def collect_detached(self) -> None:
        self._serial.submit(self.detached.collect)

    def view_for_caller(self, entry: GroupEntry) -> dict[str, torch.Tensor]:
        """Return a caller's own tensors of a group's copy, or of the memory reserved for one.

        The caller may write to them. Waits until no device work uses the memory.
        """
        slot, memory = self._memory_for_caller(entry)
        slot.while_locked(lambda: setattr(slot, "exposed", True))
        slot.wait()
        return view_all(entry.spec, memory, _offsets(entry.spec))

    def fill(
        self, entry: GroupEntry, blocks: Mapping[str, torch.Tensor], *, behind: bool = False
    ) -> torch.Event | None:
        """Copy a group's blocks (uint8, any device) into the memory reserved for it.

        The device copies blocks that are on the store's device, in order with the current stream;
        this does not wait, and returns an event that completes when they are copied. With `behind`,
        the copy runs in parallel to later work of the current stream, so the caller must neither
        change nor free the blocks before the event. Returns None if the blocks are already copied.
        """
        assert entry.packing is not None
        slot, memory = self._memory_for_caller(entry)
        pairs = [
            (memory[at : at + block.nbytes], blocks[block.name])
            for block, at in zip(entry.packing.blocks, entry.packing.offsets, strict=True)
        ]
        device = self._device
        if device is None or any(source.device != device.device for _, source in pairs):
            slot.wait()
            for target, source in pairs:
                target.copy_(source)
            return None
        nbytes = sum(source.nbytes for _, source in pairs)
        return self._timed(entry, nbytes, [DOWN], device.fill(slot, pairs, behind=behind))

    def fill_part(
        self, entry: GroupEntry, target: torch.Tensor, source: torch.Tensor, *, add: bool
    ) -> torch.Event | None:
        """Copy `source` to `target`, or add it to `target`.

        `target` is a tensor of a group that the caller may change now, in its memory or in a map of
        its file. Returns as `fill` does with `behind`.
        """
        slot, device = entry.slots.get(self.tier), self._device
        if slot is not None and device is not None and source.device == device.device:
            move, hops = (add_all, [UP, DOWN]) if add else (copy_all, [DOWN])
            marks = device.fill(slot, [(target, source)], behind=True, move=move)
            return self._timed(entry, source.nbytes, hops, marks)
        if slot is not None:
            slot.wait()
        if source.device.type != "cpu":  # to a map: the group has no slot in memory
            span = Span(DOWN, entry.group.key, source.nbytes)
            self._journal.begin(span)
            source = source.cpu()
            self._journal.count(span.kind, span.nbytes)
            self._journal.end(span)
        target.add_(source) if add else target.copy_(source)
        return None

    def _timed(
        self, entry: GroupEntry, nbytes: int, kinds: list[str], marks: tuple[Mark, Mark]
    ) -> torch.Event:
        """Record bytes that the device moves between two marks. Returns the event of the end."""
        assert self._device is not None
        for kind in kinds:
            span = Span(kind, entry.group.key, nbytes)
            self._journal.count(kind, nbytes)
            self._device.times.notify(functools.partial(self._journal.end_between, span), *marks)
        return marks[1].event

    def _memory_for_caller(self, entry: GroupEntry) -> tuple[Slot, torch.Tensor]:
        """Return the slot and memory of a group for a caller; a store's thread allocates it."""
        self._serial.drain()  # a recorded slot may be about to be dropped
        slot = entry.slots[self.tier]
        if slot.memory is not None and not self.arena.needs_lock(slot):
            return slot, slot.memory
        make = functools.partial(self.memory_of, entry)
        return slot, self._serial.submit_to(self._makers, make).wait()


def _offsets(spec: GroupSpec) -> dict[str, int]:
    return {tensor.name: tensor.offset for tensor in spec.tensors}
