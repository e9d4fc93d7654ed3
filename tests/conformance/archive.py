"""A third-party tier: below the disk, a dict in memory that answers after a delay."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tierstore.model.tiers import Tier
from tierstore.system.views import view_all
from tierstore.tiers.assembly import StoreTiers
from tierstore.tiers.driver import TierDriver
from tierstore.tiers.entry import GroupEntry
from tierstore.tiers.hop import Copied, Hop
from tierstore.tiers.pages import fresh_memory
from tierstore.tiers.workers import Workers

ARCHIVE = Tier(3, "ARCHIVE", persistent=True)
DELAY = 0.002


class Archive:
    """Copies in a dict."""

    tier = ARCHIVE
    capacity = None
    alignment = 1
    peak_bytes = None

    def __init__(self) -> None:
        self.copies: dict[Any, torch.Tensor] = {}

    def holds(self, entry: GroupEntry) -> bool:
        return entry.group in self.copies

    def reserve(self, entry: GroupEntry, *, for_caller: bool = False) -> None:
        """Reserve no memory: a dict grows."""

    def view(self, entry: GroupEntry) -> dict[str, torch.Tensor]:
        offsets = {tensor.name: tensor.offset for tensor in entry.spec.tensors}
        return view_all(entry.spec, self.copies[entry.group], offsets)

    def drop(self, entry: GroupEntry) -> None:
        self.copies.pop(entry.group, None)

    def close(self, entries: Iterable[GroupEntry]) -> None:
        self.copies.clear()


class ToArchive:
    """Reads groups from disk into the archive."""

    src, dst, times = Tier.DISK, Archive.tier, None

    def __init__(self, tiers: StoreTiers, archive: Archive, workers: Workers) -> None:
        self.workers, self._tiers, self._archive = workers, tiers, archive

    def copy(self, entry: GroupEntry, ending: Callable[[], None]) -> Copied:
        memory = fresh_memory(entry.spec.nbytes)
        nbytes = self._tiers.reader.read(entry, memory.numpy().data, ending)
        time.sleep(DELAY)
        self._archive.copies[entry.group] = memory
        return Copied(nbytes)


class FromArchive:
    """Writes groups from the archive back to disk."""

    src, dst, times = Archive.tier, Tier.DISK, None

    def __init__(self, tiers: StoreTiers, archive: Archive, workers: Workers) -> None:
        self.workers, self._tiers, self._archive = workers, tiers, archive

    def copy(self, entry: GroupEntry, ending: Callable[[], None]) -> Copied:
        time.sleep(DELAY)
        self._tiers.disk.save(entry, self._archive.copies[entry.group].numpy().data)
        return Copied(entry.spec.nbytes)


def archive(tiers: StoreTiers) -> tuple[TierDriver, list[Hop]]:
    """Return the tier, for `Settings.extra_tiers`."""
    driver, workers = Archive(), Workers(1, "archive")
    return driver, [ToArchive(tiers, driver, workers), FromArchive(tiers, driver, workers)]
