"""Copies to an accelerator: queued on a stream of their own."""

from __future__ import annotations

from collections.abc import Callable

from tierstore.model.tiers import Tier
from tierstore.tiers.device_tier import DeviceTier, copy_runs
from tierstore.tiers.entry import GroupEntry
from tierstore.tiers.hop import Copied
from tierstore.tiers.streams import is_captured, on
from tierstore.tiers.workers import Workers


class HostToDevice:
    """Copies groups from host memory to an accelerator.

    That takes microseconds, so whoever needs a copy queues it: to have another thread do it would
    cost two wake-ups and as many waits for the GIL. Nothing here waits for the device.
    """

    src = Tier.HOST
    dst = Tier.DEVICE

    def __init__(self, device: DeviceTier, workers: Workers) -> None:
        self.workers = workers
        self.times = device.times
        self._device = device

    def only_queues(self, entry: GroupEntry) -> bool:
        """Not from pageable memory: a driver copies that while its caller waits. And what is queued
        by a thread whose work is captured may be refused."""
        src = entry.slots.get(self.src)
        pinned = src is not None and src.memory is not None and src.memory.is_pinned()
        return pinned and not is_captured(self._device.device)

    def copy(self, entry: GroupEntry, ending: Callable[[], None]) -> Copied:
        src, dst, up = entry.slots[self.src], entry.slots[self.dst], self._device.up
        memory = self._device.arena.fill(dst)
        for event in [*src.look(), *dst.pending]:  # a put may still be filling the source
            up.wait_event(event)
        dst.pending.clear()
        began = self.times.mark(up)
        try:
            on(up, lambda: copy_runs(entry.spec, src.memory, memory, up=True))
        finally:  # if one of them failed, those before it still read the source
            ended = self.times.mark(up)
            src.pending.append(ended.event)
        entry.arrival = ended.event
        return Copied(entry.spec.nbytes, (began, ended))
