"""The disk as a tier: the version of a key in its file, and the memory of removed keys."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tierstore.model.groups import GroupId
from tierstore.system.file_table import FileTable
from tierstore.system.views import pack_tensors, packed_spec
from tierstore.tiers.directory import ObjectDirectory
from tierstore.tiers.disk_tier import DiskTier
from tierstore.tiers.entry import GroupEntry
from tierstore.tiers.pages import fresh_memory
from tierstore.tiers.workers import SerialExecutor, Workers

LIKE = {"a": torch.zeros(1000)}


class Disk:
    """A tier, and versions of groups to save there."""

    def __init__(self, place: Path) -> None:
        self.names: Counter[str] = Counter()
        self.directory = ObjectDirectory(place)
        self.serial, self.workers = SerialExecutor(), Workers(2, "disk")
        files = FileTable(self.directory.path)
        self.tier = DiskTier(None, self.directory, files, self.names, self.serial, self.workers)

    def version(self, key: str, order: int) -> GroupEntry:
        packing, _ = pack_tensors(key, LIKE)
        self.names[key] += 1
        return GroupEntry(
            GroupId(key, order), packed_spec(key, packing, LIKE), None, packing, order=order
        )

    def save(self, entry: GroupEntry) -> None:
        memory = fresh_memory(entry.spec.nbytes).fill_(entry.order)
        self.tier.save(entry, memory.numpy().data)

    def remove(self, key: str, order: int) -> None:
        removal = self.tier.remove(key, order, True)
        assert removal is not None
        removal.wait()

    def forget(self, entry: GroupEntry) -> None:
        self.names[entry.group.key] -= 1
        if not self.names[entry.group.key]:
            del self.names[entry.group.key]

    def held(self, key: str) -> int | None:
        """Return the first byte of the file of a key."""
        path = Path(self.directory.path_of(key))
        return path.read_bytes()[-1] if path.exists() else None


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path)
    yield disk
    assert disk.serial.stop(time.monotonic() + 60)
    assert disk.workers.stop()
    disk.tier.close([])
    disk.directory.close()


def test_file_of_a_key_is_its_newest_version(disk: Disk) -> None:
    old, new = disk.version("key", 1), disk.version("key", 2)
    disk.save(new)
    disk.save(old)
    assert disk.held("key") == 2


def test_version_slower_than_its_removal_is_not_written(disk: Disk) -> None:
    old = disk.version("key", 1)
    disk.remove("key", 2)
    disk.save(old)
    assert disk.held("key") is None
    disk.save(disk.version("key", 3))
    assert disk.held("key") == 3
    disk.remove("key", 4)
    assert disk.held("key") is None
    assert disk.tier.removing() == set()


def test_removed_keys_are_forgotten(disk: Disk) -> None:
    late = disk.version("late", 1)
    disk.remove("late", 2)
    for number in range(3, 203):
        entry = disk.version(f"{number}", number)
        disk.save(entry)
        disk.remove(entry.group.key, number)
        disk.forget(entry)
    assert len(disk.tier._committed) < 80
    disk.save(late)
    assert disk.held("late") is None, "the order of a pending version was forgotten"
