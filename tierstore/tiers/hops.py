"""The hops to and from an accelerator, and from host memory to disk. See also `reading.py`."""

from __future__ import annotations

from collections.abc import Callable

from tierstore.model.tiers import Tier
from tierstore.observe.device_times import Mark
from tierstore.system.streams import is_captured, run_on, stream_context
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

    Queueing a copy takes microseconds, so the caller that needs it does that itself: handing it to
    another thread would cost two wake-ups and as many waits for the GIL. Nothing here waits for the
    device.
    """

    src = Tier.HOST
    dst = Tier.DEVICE

    def __init__(self, device: DeviceTier, workers: Workers) -> None:
        self.workers = workers
        self.times = device.times
        self._device = device

    def only_queues(self, entry: GroupEntry) -> bool:
        """Return whether the host memory is page-locked and this thread captures no graph.

        Drivers copy pageable memory synchronously, and may reject work that a capturing thread
        queues.
        """
        src = entry.slots.get(self.src)
        pinned = src is not None and src.memory is not None and src.memory.is_pinned()
        return pinned and not is_captured(self._device.device)

    def copy(self, entry: GroupEntry, ending: Callable[[], None]) -> Copied:
        src, dst, up = entry.slots[self.src], entry.slots[self.dst], self._device.up
        memory = self._device.arena.fill(dst)
        for event in [*src.poll(), *dst.pending]:  # a put may still fill the source
            up.wait_event(event)
        dst.pending.clear()
        began = self.times.mark(up)

        def queue() -> Mark:
            try:
                run_on(up, lambda: copy_runs(entry.spec, src.memory, memory, up=True))
            finally:  # if a run failed, earlier ones still read the source
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
                with stream_context(down):
                    copy_runs(entry.spec, memory, src.memory, up=False)
            finally:
                ended = self.times.mark(down)
                dst.pending.append(ended.event)
            return ended

        try:
            ended = dst.while_locked(queue)
        finally:
            # A copy in host memory has arrived once its bytes are there: a save to disk may read
            # them next. And if a run failed, earlier ones still write there.
            dst.wait()
        return Copied(entry.spec.nbytes, (began, ended))
