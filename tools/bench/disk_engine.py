"""The store's disk engine without a planner, for `disk.py` and `optimizer.py`.

Groups pass through the components of a store: `DiskReader`, `Spill` and `ObjectDirectory`, with
`Workers`, a `FileTable` and an arena of recycled host memory.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from tierstore.model.groups import (
    Block,
    Extent,
    FileTensor,
    GroupId,
    GroupSpec,
    Packing,
    Source,
    TensorSpec,
    contiguous_stride,
    group_of,
    pack,
    place,
)
from tierstore.model.header import digest, parse_header
from tierstore.system.file_table import FileTable
from tierstore.system.files import DISK_THREADS
from tierstore.tiers.arena import Slot, host_arena
from tierstore.tiers.directory import ObjectDirectory
from tierstore.tiers.entry import GroupEntry
from tierstore.tiers.reading import DiskReader
from tierstore.tiers.spill import Spill
from tierstore.tiers.workers import EARLY, Workers

T = TypeVar("T")

AT_ONCE = 4
"""Groups in flight, as many as in a store with enough memory for prefetching."""


class Engine:
    """Reads or writes all groups in one pass."""

    def __init__(self, directory: Path) -> None:
        self.directory = ObjectDirectory(directory)
        self.spill = Spill(str(directory))
        self._files = FileTable(str(directory))
        self._workers = Workers(DISK_THREADS, "disk")
        self._arena = host_arena(None, torch.device("cpu"))

    def each(
        self, items: Iterable[T], job: Callable[[T], Callable[[], object]], at_once: int = AT_ONCE
    ) -> None:
        """Run a job for each item on the workers, in order, `at_once` jobs at a time.

        `job` itself is called on this thread. Raises the first error.
        """
        room, errors = threading.Semaphore(at_once), list[BaseException]()

        def run(work: Callable[[], object]) -> None:
            try:
                work()
            except BaseException as error:  # a job must not raise
                errors.append(error)
            room.release()

        for item in items:
            room.acquire()
            self._workers.submit(EARLY, functools.partial(run, job(item)))
        for _ in range(at_once):
            room.acquire()
        if errors:
            raise errors[0]

    def reading(
        self,
        verify: str,
        arrived: Callable[[GroupEntry, Slot], object] = lambda entry, slot: None,
    ) -> Callable[[GroupEntry], Callable[[], None]]:
        """Create jobs for `each` that read a group into a slot, which later jobs reuse."""
        reader = DiskReader(self._files, self._workers, verify)

        def job(entry: GroupEntry) -> Callable[[], None]:
            slot = self._arena.take(entry.spec.nbytes)
            assert entry.source is not None
            entry.source = replace(entry.source)  # a new source, so checksums count as unverified

            def read() -> None:
                try:
                    self._arena.fill(slot)
                    reader.read(entry, slot.bytes())
                    arrived(entry, slot)
                finally:
                    self._arena.release(slot)

            return read

        return job

    def checkpoint(self, path: Path, largest: int) -> list[GroupEntry]:
        """Return the tensors of a safetensors file as groups of up to `largest` bytes."""
        raw = path.open("rb").read(8)
        raw = path.open("rb").read(8 + int.from_bytes(raw, "little"))[8:]
        header = parse_header(raw, path.stat().st_size, str(path))
        entries = []
        for found in header.entries:
            begin = header.data_start + found.begin
            for name, at, nbytes in pieces(found.name, found.end - found.begin, largest):
                extent = Extent(str(path), begin + at, nbytes)
                placed = place([FileTensor(name, "U8", (nbytes,), extent)])
                spec = group_of(name, placed.specs, placed.end)
                source = Source(placed.segments, placed.moves)
                entries.append(GroupEntry(GroupId(name, 0), spec, source))
        return entries

    def filled(self, spec: GroupSpec, seed: int) -> Slot:
        """Return a slot full of random bytes."""
        slot = self._arena.take(spec.nbytes)
        generator = torch.Generator().manual_seed(seed)
        self._arena.fill(slot).view(torch.int64).random_(generator=generator)
        return slot

    def spill_all(self, slots: Iterable[Slot]) -> list[int]:
        """Spill every group. Return the offsets to free."""
        offsets: list[int] = []

        def save(slot: Slot) -> None:
            offsets.append(self.spill.save(slot.bytes(), self._workers.run_parallel)[0])

        self.each(slots, lambda slot: functools.partial(save, slot))
        return offsets

    def store_all(self, packing: Packing, slots: Iterable[Slot]) -> None:
        """Store every group durably under its own key."""

        def save(number: int, slot: Slot) -> None:
            staged = self.directory.stage(
                f"group {number}",
                packing,
                slot.bytes(),
                single=False,
                run_parallel=self._workers.run_parallel,
            )
            self.directory.commit(staged)

        self.each(enumerate(slots), lambda item: functools.partial(save, *item))

    def remove_all(self) -> None:
        """Remove all durable groups."""
        for found in self.directory.objects():
            self.directory.remove(found.key)

    def give(self, slots: Iterable[Slot]) -> None:
        """Return slots."""
        for slot in slots:
            self._arena.release(slot)

    def stored(self) -> list[GroupEntry]:
        """Return the durable groups."""
        return [
            GroupEntry(GroupId(o.key, 0), o.spec(), o.source(self.directory.path_of(o.key)))
            for o in self.directory.objects()
        ]

    def close(self) -> None:
        self._workers.stop()
        for part in (self._arena, self._files, self.spill, self.directory):
            part.close()


def pieces(name: str, nbytes: int, largest: int) -> Iterator[tuple[str, int, int]]:
    """Split a tensor into pieces that are read at once: names, offsets and bytes."""
    for at in range(0, nbytes, largest):
        yield f"{name}, from {at}", at, min(largest, nbytes - at)


def one_tensor(nbytes: int) -> tuple[GroupSpec, Packing]:
    """Return a group of one tensor, and its packing."""
    shape = (nbytes // 2,)
    tensor = TensorSpec("weight", "BF16", shape, contiguous_stride(shape), 0)
    packing = pack([Block("weight", "BF16", shape, nbytes, (tensor,))])
    return group_of("weight", packing.specs(), packing.nbytes), packing


def digest_of(slot: Slot, source: Source) -> str:
    """Return the checksum of the group's own bytes in a slot."""
    (segment,) = source.segments
    return digest(slot.bytes()[segment.at : segment.at + segment.extent.nbytes])
