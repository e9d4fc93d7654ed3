"""Saves of groups that are in host memory."""

from __future__ import annotations

from collections.abc import Callable

from tierstore.model.tiers import Tier
from tierstore.tiers.disk_tier import DiskTier
from tierstore.tiers.entry import GroupEntry
from tierstore.tiers.hop import Copied


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
