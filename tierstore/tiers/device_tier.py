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
from tierstore.system.streams import run_on
from tierstore.tiers.arena import Slot, Spans, device_arena
from tierstore.tiers.driver import MemoryTier
from tierstore.tiers.entry import GroupEntry

CopyPairs = list[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of (target, source): parts of host slots, and device tensors."""


def copy_all(pairs: CopyPairs) -> None:
    """Copy each source to its target."""
    for target, source in pairs:
        target.copy_(source, non_blocking=True)


def add_all(pairs: CopyPairs) -> None:
    """Add each source to its target, on the device, without using the CPU or blocking.

    Temporarily takes as much device memory as the tensor itself.
    """
    for target, source in pairs:
        total = target.to(source.device, non_blocking=True).add_(source)
        target.copy_(total, non_blocking=True)


class DeviceTier(MemoryTier):
    """Slots in the memory of `device`, never more than `budget` bytes (None: no limit).

    Callers do its accounting, as part of a step of the store. `up` and `down` are the streams for
    copies to and from the device; `times` measures when queued work was done. Only `rebuild` waits
    for the device.
    """

    tier = Tier.DEVICE
    alignment = ALIGNMENT

    def __init__(self, device: torch.device, budget: int | None) -> None:
        self.device = device
        self.up, self.down = torch.Stream(device), torch.Stream(device)
        super().__init__(device_arena(budget, device, self.up), lambda spec: spec.device_offsets)
        self.times = DeviceTimes(device, self.up)

    def used_on(self, entry: GroupEntry, mark: Mark) -> None:
        """Record that a lease has ended; device work up to `mark` still uses the group's copy.

        Its memory is not reused before that work is done. While views remain, the stream's later
        work also delays the reuse.
        """
        slot = entry.slots[self.tier]
        pending = slot.pending
        pending[:] = [old for old in pending if not old.query()]
        pending.append(mark.event)
        slot.stream = mark.stream
        if slot.views is not None and slot.views.are_in_use():
            self._extend_use(slot)

    @staticmethod
    def _extend_use(slot: Slot) -> None:
        """Mark a slot with views but without a lease as used in the last lease's stream."""
        if slot.stream is not None:
            slot.streams.add(slot.stream)

    def drop(self, entry: GroupEntry) -> None:
        slot = entry.slots.get(self.tier)
        if slot is not None and slot.arrival is not None:
            slot.pending.append(slot.arrival)
            slot.arrival = None
        self._drop(entry, functools.partial(self._release, keep=not entry.mutable))

    def free_idle(self) -> None:
        """Release memory without a group to this process, where torch caches it."""
        self.arena.free_idle(reclaim=False)

    def detach(self, slot: Slot, spans: Spans) -> None:
        self._extend_use(slot)
        super().detach(slot, spans)

    def free_detached(self, slot: Slot) -> None:
        self._order_after_late_uses(slot)
        super().free_detached(slot)

    def _release(self, slot: Slot, *, keep: bool) -> None:
        self._order_after_late_uses(slot)
        self.arena.release(slot, keep=keep)

    def _order_after_late_uses(self, slot: Slot) -> None:
        """Add events for work that was queued through views that are now gone."""
        while slot.streams:
            slot.pending.append(self.times.mark(slot.streams.pop()).event)

    def fill(
        self,
        slot: Slot,
        pairs: CopyPairs,
        *,
        behind: bool,
        move: Callable[[CopyPairs], None] = copy_all,
    ) -> tuple[Mark, Mark]:
        """Queue copies from device tensors into parts of a host slot, by `move`.

        The copies are ordered with the current stream; with `behind`, they start after its current
        work and run in parallel to its later work. Readers of the slot wait for its pending events.
        Returns the marks of start and end.
        """
        stream = torch.accelerator.current_stream(self.device)
        if behind:
            self.down.wait_event(self.times.mark(stream).event)
            stream = self.down
        for event in slot.poll():  # of the slot's earlier users
            stream.wait_event(event)
        began = self.times.mark(stream)
        return began, slot.while_locked(lambda: self._queue(slot, stream, lambda: move(pairs)))

    def _queue(self, slot: Slot, stream: torch.Stream, move: Callable[[], None]) -> Mark:
        """Queue `move`, which writes to a host slot. Returns the mark of its end."""
        try:
            run_on(stream, move)
            ended = self.times.mark(stream)
            slot.pending.append(ended.event)
        except BaseException:
            stream.synchronize()  # the slot may be reused next
            raise
        return ended

    def rebuild(self, entries: Collection[GroupEntry], coming: Set[Any]) -> None:
        """Find out which slots are in use, after a change was interrupted.

        Only this method waits for the whole device: work queued there may use slots that are
        recorded nowhere.
        """
        with suppress(RuntimeError):  # a lost device raises again when it is used
            torch.accelerator.synchronize(self.device)
        in_use = []
        for entry in entries:
            if entry.arrival is None and entry.group not in coming:
                entry.slots.pop(self.tier, None)
            slot = entry.slots.get(self.tier)
            if slot is not None:
                in_use.append(slot)
        in_use += [entry.slots[self.tier] for entry in self.carved_out if self.holds(entry)]
        self.arena.recount(in_use)


def copy_runs(
    spec: GroupSpec, host: torch.Tensor | None, device: torch.Tensor | None, *, up: bool
) -> None:
    """Copy each run of a group's bytes between its slots, `up` to the device or down."""
    assert host is not None
    assert device is not None
    for here, there in parts_of(spec, host, device):
        target, source = (there, here) if up else (here, there)
        target.copy_(source, non_blocking=True)


def parts_of(
    spec: GroupSpec, host: torch.Tensor, device: torch.Tensor, offset: int = 0
) -> CopyPairs:
    """Return each run of a group's bytes, as parts of host and device memory.

    `host` has the group's bytes from `offset` on, maybe not all of them; `device` is its whole slot
    there.
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
    """Return a range of a slot's memory, or the memory itself if the range covers it."""
    whole = offset == 0 and nbytes == memory.numel()
    return memory if whole else memory[offset : offset + nbytes]
