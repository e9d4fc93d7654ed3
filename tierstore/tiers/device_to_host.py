"""Copies from an accelerator back to host memory."""

from __future__ import annotations

from collections.abc import Callable

from tierstore.model.tiers import Tier
from tierstore.tiers.device_tier import DeviceTier, copy_runs
from tierstore.tiers.entry import GroupEntry
from tierstore.tiers.hop import Copied
from tierstore.tiers.host_tier import HostTier
from tierstore.tiers.streams import entered
from tierstore.tiers.workers import Workers


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
        memory = self._host.arena.fill(dst)
        dst.wait()
        for event in [*src.pending, entry.arrival]:
            if event is not None:
                down.wait_event(event)
        began = self.times.mark(down)
        with entered(down):
            copy_runs(entry.spec, memory, src.memory, up=False)
        # Host memory has arrived when the bytes are there: a save to disk may read them next.
        ended = self.times.mark(down)
        ended.event.synchronize()
        return Copied(entry.spec.nbytes, (began, ended))
