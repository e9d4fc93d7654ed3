"""The hops beside an accelerator, and from host memory to disk. The one from disk: `reading.py`."""

from __future__ import annotations

from collections.abc import Callable

from tierstore.model.tiers import Tier
from tierstore.observe.device_times import Mark
from tierstore.system.streams import entered, is_captured, on
from tierstore.tiers.device_tier import DeviceTier, copy_runs
from tierstore.tiers.disk_tier import DiskTier
from tierstore.tiers.entry import GroupEntry
from tierstore.tiers.hop import Copied
from tierstore.tiers.host_tier import HostTier
from tierstore.tiers.workers import Workers


class HostToDisk:
    """Writes groups from host memory to the store's directory."""

    src = Tier.HOST
    dst = Tier.DISK
    times = None

    def __init__(self, disk: DiskTier) -> None:
        self.workers = disk.workers
        self._disk = disk

    def copy(self, entry: GroupEntry, ending: Callable[[], None]) -> Copied:
        slot = entry.slots[self.src]
        slot.wait()
        self._disk.save(entry, slot.bytes())
        return Copied(entry.spec.nbytes)


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

        def queue() -> Mark:
            try:
                on(up, lambda: copy_runs(entry.spec, src.memory, memory, up=True))
            finally:  # if one of them failed, those before it still read the source
                ended = self.times.mark(up)
                src.pending.append(ended.event)
            return ended

        ended = src.while_locked(queue)
        dst.arrival = ended.event
        return Copied(entry.spec.nbytes, (began, ended))


class DeviceToHost:
    """Copies groups from an accelerator to host memory, and waits for it."""

    src = Tier.DEVICE
    dst = Tier.HOST

    def __init__(self, device: DeviceTier, host: HostTier, workers: Workers) -> None:
        self.workers = workers
        self.times = device.times
        self._device = device
        self._host = host

    def copy(self, entry: GroupEntry, ending: Callable[[], None]) -> Copied:
        src, dst, down = entry.slots[self.src], entry.slots[self.dst], self._device.down
        memory = self._host.memory_of(entry)
        dst.wait()
        for event in [*src.pending, src.arrival]:
            if event is not None:
                down.wait_event(event)
        began = self.times.mark(down)

        def queue() -> Mark:
            try:
                with entered(down):
                    copy_runs(entry.spec, memory, src.memory, up=False)
            finally:
                ended = self.times.mark(down)
                dst.pending.append(ended.event)
            return ended

        try:
            ended = dst.while_locked(queue)
        finally:
            # Host memory has arrived when the bytes are there: a save to disk may read them next.
            # And if a part failed, those before it still write there.
            dst.wait()
        return Copied(entry.spec.nbytes, (began, ended))
