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
    """Slots in host memory, those of `arena`: page-locked for `device`, if there is one.

    This is where callers put groups and hold them to change them. Its books are kept by `serial`;
    `makers` are threads that make memory, which takes long where it has to be page-locked.
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
        if for_caller and self._device is None:  # page-locking takes too long for `serial`
            with suppress(MemoryError, OSError, BudgetError):  # who fills it tries again, is told
                self.memory_of(entry)

    # Where a service lends memory, `LeasedHostTier` answers otherwise ---------------------------

    connected = False
    """Whether a service lends memory for the groups that are registered."""

    budget_name = "ram_budget"
    """How users set the bytes for what is registered."""

    def weight_budget(self, budget: int | None) -> int | None:
        """Bytes for what is registered, if the budget of this tier is `budget`."""
        return budget

    def offer(self, groups: Sequence[SharedGroup]) -> None:
        """Have a service know groups that are about to be registered. May wait."""

    def know_lent(self, entry: GroupEntry, of: SharedGroup) -> None:
        """The copies of a group are going to be those of a service."""
        raise AssertionError("no service lends memory to this store")

    def lends(self, entry: GroupEntry) -> bool:
        """Whether copies of a group here are another process's, and count against what it allows:
        nobody changes them."""
        return False

    def keep_for_readers(self, entries: Iterable[GroupEntry]) -> None:
        """The store is closed, and there are leases of these, which go on seeing the bytes."""

    # Memory ------------------------------------------------------------------------------------

    def memory_of(self, entry: GroupEntry) -> torch.Tensor:
        """The memory of the room for a group, made and page-locked if it must be. May wait for
        device work.

        Raises BudgetError if the process has too many memory maps for it, or OSError.
        """
        return self._memory_by(self.arena.fill, entry)

    def provide(self, entry: GroupEntry) -> list[Job]:
        """Make the memory of the room for a group if it must be made, to read into it.

        Returns what is to be done beside that, on any thread: to page-lock it, if it is not locked.
        May wait, and raises, as `memory_of`.
        """
        self._memory_by(self.arena.provide, entry)
        slot = entry.slots[self.tier]
        lock = functools.partial(self.arena.lock, slot)
        return [lock] if self.arena.is_to_lock(slot) else []

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
        """Memory that is no copy's, for who borrows it; the planner has made room. May wait, and
        raises, as `memory_of`."""
        self._serial.give(functools.partial(self.borrow, entry))
        return self._room(entry)[1]

    def give_back_soon(self, entry: GroupEntry) -> None:
        """It comes back. Waits for nothing."""
        self._serial.give(functools.partial(self.give_back, entry))

    def give_back_idle(self) -> None:
        """Give memory back that no group has, once what was dropped before is in the books."""
        give_back = functools.partial(self._makers.submit, EARLY, self.arena.give_back_idle)
        self._serial.give(give_back)

    def collect_left(self) -> None:
        self._serial.give(self.left.collect)

    def view_for_caller(self, entry: GroupEntry) -> dict[str, torch.Tensor]:
        """The tensors of a group's copy, or of the room for one, for somebody who may write to
        them: nobody else is given the same tensors. Waits for the device to be done with it."""
        slot, memory = self._room(entry)
        slot.while_locked(lambda: setattr(slot, "exposed", True))
        slot.wait()
        return view_all(entry.spec, memory, _offsets(entry.spec))

    def fill(
        self, entry: GroupEntry, blocks: Mapping[str, torch.Tensor], *, behind: bool = False
    ) -> torch.Event | None:
        """Copy a group's blocks (uint8, any device) into the room that was reserved for it.

        What comes from the store's device is copied by the device, in order with the current
        stream; nobody waits for that here, and an event is returned that has passed when it is
        done. With `behind`, that goes on beside what the current stream does next: then the caller
        must neither change nor let go of the blocks before the event. None: they are copied.
        """
        assert entry.packing is not None
        slot, memory = self._room(entry)
        places = [
            (memory[at : at + block.nbytes], blocks[block.name])
            for block, at in zip(entry.packing.blocks, entry.packing.offsets, strict=True)
        ]
        device = self._device
        if device is None or any(source.device != device.device for _, source in places):
            slot.wait()
            for target, source in places:
                target.copy_(source)
            return None
        nbytes = sum(source.nbytes for _, source in places)
        return self._timed(entry, nbytes, [DOWN], device.fill(slot, places, behind=behind))

    def fill_part(
        self, entry: GroupEntry, target: torch.Tensor, source: torch.Tensor, *, add: bool
    ) -> torch.Event | None:
        """Copy `source` to `target`, or add it to what is there.

        `target` is a tensor of a group that the caller may change now, in its memory or in a map of
        its file. What is returned means the same as for `fill`, with `behind`.
        """
        slot, device = entry.slots.get(self.tier), self._device
        if slot is not None and device is not None and source.device == device.device:
            move, hops = (add_all, [UP, DOWN]) if add else (copy_all, [DOWN])
            marks = device.fill(slot, [(target, source)], behind=True, move=move)
            return self._timed(entry, source.nbytes, hops, marks)
        if slot is not None:
            slot.wait()
        if source.device.type != "cpu":  # to a map: there is no room for the group in memory
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
        """Count what the device moves between two marks. Returns the event that ends it."""
        assert self._device is not None
        for kind in kinds:
            span = Span(kind, entry.group.key, nbytes)
            self._journal.count(kind, nbytes)
            self._device.times.tell(functools.partial(self._journal.end_between, span), *marks)
        return marks[1].event

    def _room(self, entry: GroupEntry) -> tuple[Slot, torch.Tensor]:
        """The memory of a group, for a caller: made by a thread of ours."""
        self._serial.catch_up()  # a slot that is in the books may be about to be dropped
        slot = entry.slots[self.tier]
        if slot.memory is not None and not self.arena.is_to_lock(slot):
            return slot, slot.memory
        make = functools.partial(self.memory_of, entry)
        return slot, self._serial.ask_on(self._makers, make).wait()


def _offsets(spec: GroupSpec) -> dict[str, int]:
    return {tensor.name: tensor.offset for tensor in spec.tensors}
