"""Reads of groups into host memory."""

from __future__ import annotations

from collections.abc import Callable

from tierstore.model.tiers import Tier
from tierstore.tiers.disk import transfer_error
from tierstore.tiers.entry import GroupEntry
from tierstore.tiers.hop import Copied
from tierstore.tiers.host_tier import HostTier
from tierstore.tiers.reading import DiskReader


class DiskToHost:
    """Reads groups from files into host memory, on several threads."""

    src = Tier.DISK
    dst = Tier.HOST
    times = None

    def __init__(self, reader: DiskReader, host: HostTier) -> None:
        self.workers = reader.workers
        self._reader = reader
        self._host = host

    def copy(self, entry: GroupEntry, ending: Callable[[], None]) -> Copied:
        slot = entry.slots[self.dst]
        try:
            self._host.arena.fill(slot)
        except OSError as error:
            key = entry.key.key
            raise transfer_error(error, "reading", key=key, path=f"group {key!r}") from error
        slot.wait()
        return Copied(self._reader.read(entry, slot.bytes(), ending))
