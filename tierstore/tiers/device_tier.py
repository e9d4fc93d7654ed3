"""Copies in an accelerator's memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Set
from contextlib import suppress
from typing import Any

import torch

from tierstore.model.groups import ALIGNMENT, GroupSpec
from tierstore.model.tiers import Tier
from tierstore.observe.device_times import DeviceTimes, Mark
from tierstore.system.streams import on
from tierstore.tiers.arena import Slot, Spans, device_arena
from tierstore.tiers.driver import MemoryTier
from tierstore.tiers.entry import GroupEntry

Places = list[tuple[torch.Tensor, torch.Tensor]]
"""Parts of host slots, and the tensors of the device that go there."""


def copy_all(places: Places) -> None:
    """Copy each tensor to its place."""
    for target, source in places:
        target.copy_(source, non_blocking=True)


def add_all(places: Places) -> None:
    """Add each tensor to what its place holds, on the device: the processor is left to others, and
    nobody waits. For that moment it takes as much memory there as the tensor itself."""
    for target, source in places:
        total = target.to(source.device, non_blocking=True).add_(source)
        target.copy_(total, non_blocking=True)


class DeviceTier(MemoryTier):
    """Slots in the memory of `device`, never more than `budget` bytes (None: no limit).

    Its books are kept by callers, as part of a step of the store. `up` and `down` are the streams
    on which groups come and go; `times` tells when what was queued was done. Nothing here waits
    for the device but `rebuild`.
    """

    tier = Tier.DEVICE
    alignment = ALIGNMENT

    def __init__(self, device: torch.device, budget: int | None) -> None:
        self.device = device
        self.up, self.down = torch.Stream(device), torch.Stream(device)
        super().__init__(device_arena(budget, device, self.up), lambda spec: spec.device_offsets)
        self.times = DeviceTimes(device, self.up)

    def used_on(self, entry: GroupEntry, mark: Mark) -> None:
        """A lease ends. Device work up to `mark` uses the group's copy: its memory is not reused
        before; nor, if somebody looks at it still, before what that stream does until nobody does.
        """
        slot = entry.slots[self.tier]
        pending = slot.pending
        pending[:] = [old for old in pending if not old.query()]
        pending.append(mark.event)
        slot.stream = mark.stream
        if slot.views is not None and slot.views.are_looked_at():
            self._use_longer(slot)

    @staticmethod
    def _use_longer(slot: Slot) -> None:
        """Somebody looks at a slot that no lease is of: it is used where the last lease was."""
        if slot.stream is not None:
            slot.streams.add(slot.stream)

    def drop(self, entry: GroupEntry) -> None:
        slot = entry.slots.get(self.tier)
        if slot is not None and slot.arrival is not None:
            slot.pending.append(slot.arrival)
            slot.arrival = None
        self._drop(entry, functools.partial(self._give, keep=not entry.mutable))

    def give_back_idle(self) -> None:
        """Give memory back that no group has, to this process: torch keeps it for its own use."""
        self.arena.give_back_idle(reclaim=False)

    def leave(self, slot: Slot, spans: Spans) -> None:
        self._use_longer(slot)
        super().leave(slot, spans)

    def end_left(self, slot: Slot) -> None:
        self._await_late_uses(slot)
        super().end_left(slot)

    def _give(self, slot: Slot, *, keep: bool) -> None:
        self._await_late_uses(slot)
        self.arena.give(slot, keep=keep)

    def _await_late_uses(self, slot: Slot) -> None:
        """Nobody looks at the slot any more, but device work that was queued before may."""
        while slot.streams:
            slot.pending.append(self.times.mark(slot.streams.pop()).event)

    def fill(
        self,
        slot: Slot,
        places: Places,
        *,
        behind: bool,
        move: Callable[[Places], None] = copy_all,
    ) -> tuple[Mark, Mark]:
        """Have the device fill parts of a host slot, each from a tensor of its own, by `move`.

        In order with the current stream; or `behind` it, while that goes on. Who reads the slot
        waits for what is pending there.
        """
        stream = torch.accelerator.current_stream(self.device)
        if behind:
            self.down.wait_event(self.times.mark(stream).event)
            stream = self.down
        for event in slot.look():  # of those who had the room before
            stream.wait_event(event)
        began = self.times.mark(stream)
        return began, slot.while_locked(lambda: self._queue(slot, stream, lambda: move(places)))

    def _queue(self, slot: Slot, stream: torch.Stream, move: Callable[[], None]) -> Mark:
        """Queue what moves bytes to a host slot. Returns the mark that ends it."""
        try:
            on(stream, move)
            ended = self.times.mark(stream)
            slot.pending.append(ended.event)
        except BaseException:
            stream.synchronize()  # the room may be another's next
            raise
        return ended

    def rebuild(self, entries: Collection[GroupEntry], coming: Set[Any]) -> None:
        """See which slots are in use, after somebody was cut short who changed that.

        This is the one place that waits for the whole device: what is queued there may use slots
        that nobody knows.
        """
        with suppress(RuntimeError):  # a device that is lost is told of by what is done there
            torch.accelerator.synchronize(self.device)
        in_use = []
        for entry in entries:
            if entry.arrival is None and entry.group not in coming:
                entry.slots.pop(self.tier, None)
            slot = entry.slots.get(self.tier)
            if slot is not None:
                in_use.append(slot)
        in_use += [entry.slots[self.tier] for entry in self.borrowed if self.holds(entry)]
        self.arena.recount(in_use)


def copy_runs(
    spec: GroupSpec, host: torch.Tensor | None, device: torch.Tensor | None, *, up: bool
) -> None:
    """Copy each run of a group's bytes between its slots' memory, `up` to the device or down."""
    assert host is not None
    assert device is not None
    for here, there in parts_of(spec, host, device):
        target, source = (there, here) if up else (here, there)
        target.copy_(source, non_blocking=True)


def parts_of(spec: GroupSpec, host: torch.Tensor, device: torch.Tensor, offset: int = 0) -> Places:
    """Each run of a group's bytes, in memory of the host and of the device.

    `host` has the group's bytes from `offset` on, maybe not all of them; `device` is all of its
    slot there.
    """
    found, end = [], offset + host.numel()
    for run in spec.runs:
        start, stop = max(run.host_offset, offset), min(run.host_offset + run.nbytes, end)
        if start < stop:
            at = run.device_offset + start - run.host_offset
            found.append(
                (_part(host, start - offset, stop - start), _part(device, at, stop - start))
            )
    return found


def _part(memory: torch.Tensor, offset: int, nbytes: int) -> torch.Tensor:
    """Some bytes of a slot's memory: mostly all of them, and then no view has to be made."""
    whole = offset == 0 and nbytes == memory.numel()
    return memory if whole else memory[offset : offset + nbytes]
