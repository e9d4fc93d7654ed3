"""The store's own disk engine, as a store drives it, for `disk.py`.

Groups go through the parts that a store is made of: `Reading`, `Spill`, `ObjectDirectory`, with
`Workers`, a `FileTable` and an arena of recycled host memory. Only the planner is left out.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
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
"""Groups on their way at once. A store has as many where prefetch has room for them."""


class Engine:
    """One pass over all groups, in one direction or the other."""

    def __init__(self, directory: Path) -> None:
        self.directory = ObjectDirectory(directory)
        self.spill = Spill(str(directory))
        self._files = FileTable(str(directory))
        self._workers = Workers(DISK_THREADS, "disk")
        self._arena = host_arena(None, torch.device("cpu"))

    def checkpoint(self, path: Path, largest: int) -> list[GroupEntry]:
        """The tensors of a safetensors file, in pieces of so many bytes, each a group by itself."""
        raw = path.open("rb").read(8)
        raw = path.open("rb").read(8 + int.from_bytes(raw, "little"))[8:]
        header = parse_header(raw, path.stat().st_size, str(path))
        entries = []
        for found in header.entries:
            begin = header.data_start + found.begin
            for name, at, nbytes in pieces(found.name, found.end - found.begin, largest):
                extent = Extent(str(path), begin + at, nbytes)
                entries.append(_entry_of(FileTensor(name, "U8", (nbytes,), extent)))
        return entries

    def read(
        self,
        entries: Iterable[GroupEntry],
        verify: str,
        arrived: Callable[[GroupEntry, Slot], object] = lambda entry, slot: None,
    ) -> None:
        """Read every group into a slot that is used again for later ones."""
        reader = DiskReader(self._files, self._workers, verify)
        errors: list[BaseException] = []

        def begin(entry: GroupEntry, over: Callable[[], None]) -> None:
            slot = self._arena.take(entry.spec.nbytes)
            entry.verified = False

            def read() -> None:
                try:
                    self._arena.fill(slot)
                    reader.read(entry, slot.bytes())
                    arrived(entry, slot)
                except BaseException as error:  # a job must not raise
                    errors.append(error)
                self._arena.give(slot)
                over()

            self._workers.submit(EARLY, read)

        _several_at_once(entries, begin)
        if errors:
            raise errors[0]

    def fill(self, spec: GroupSpec, seed: int) -> Slot:
        """A slot full of random bytes."""
        slot = self._arena.take(spec.nbytes)
        generator = torch.Generator().manual_seed(seed)
        memory = self._arena.fill(slot)
        memory.view(torch.int64).random_(generator=generator)
        return slot

    def spill_all(self, slots: Iterable[Slot]) -> list[int]:
        """Spill every group. Returns the offsets to give back."""
        offsets: list[int] = []

        def save(slot: Slot) -> None:
            offsets.append(self.spill.save(slot.bytes(), self._workers.run_parallel)[0])

        self._on_workers(slots, save)
        return offsets

    def store_all(self, packing: Packing, slots: Iterable[Slot]) -> None:
        """Make every group durable under a key of its own."""

        def save(numbered: tuple[int, Slot]) -> None:
            number, slot = numbered
            together = self._workers.run_parallel
            self.directory.commit(
                self.directory.stage(
                    f"group {number}", packing, slot.bytes(), single=False, run_parallel=together
                )
            )

        self._on_workers(enumerate(slots), save)

    def remove_all(self) -> None:
        """Remove what is durable."""
        for found in self.directory.objects():
            self.directory.remove(found.key)

    def give(self, slots: Iterable[Slot]) -> None:
        """The slots are free again."""
        for slot in slots:
            self._arena.give(slot)

    def stored(self) -> list[GroupEntry]:
        """The groups that are durable."""
        found = self.directory.objects()
        return [
            GroupEntry(GroupId(o.key, 0), o.spec(), o.source(self.directory.path_of(o.key)))
            for o in found
        ]

    def _on_workers(self, items: Iterable[T], save: Callable[[T], None]) -> None:
        errors: list[BaseException] = []

        def job(item: T, over: Callable[[], None]) -> None:
            try:
                save(item)
            except BaseException as error:  # a job must not raise
                errors.append(error)
            over()

        def begin(item: T, over: Callable[[], None]) -> None:
            self._workers.submit(EARLY, functools.partial(job, item, over))

        _several_at_once(items, begin)
        if errors:
            raise errors[0]

    def close(self) -> None:
        self._workers.stop()
        self._arena.close()
        self._files.close()
        self.spill.close()
        self.directory.close()


def pieces(name: str, nbytes: int, largest: int) -> Iterator[tuple[str, int, int]]:
    """What is read of a tensor at once: names, where they begin, and bytes."""
    for at in range(0, nbytes, largest):
        yield f"{name}, from {at}", at, min(largest, nbytes - at)


def _entry_of(tensor: FileTensor) -> GroupEntry:
    placed = place([tensor])
    spec = group_of(tensor.name, placed.specs, placed.end)
    return GroupEntry(GroupId(tensor.name, 0), spec, Source(placed.segments, placed.moves))


def _several_at_once(items: Iterable[T], begin: Callable[[T, Callable[[], None]], None]) -> None:
    """Begin the items in order, a few at once: the next one when one is over."""
    room = threading.Semaphore(AT_ONCE)
    for item in items:
        room.acquire()
        begin(item, room.release)
    for _ in range(AT_ONCE):
        room.acquire()


def one_tensor(nbytes: int) -> tuple[GroupSpec, Packing]:
    """A group of one tensor, and how it is packed."""
    shape = (nbytes // 2,)
    tensor = TensorSpec("weight", "BF16", shape, contiguous_stride(shape), 0)
    packing = pack([Block("weight", "BF16", shape, nbytes, (tensor,))])
    return group_of("weight", packing.specs(), packing.nbytes), packing


def digest_of(slot: Slot, source: Source) -> str:
    """The checksum of the group's own bytes in a slot."""
    (segment,) = source.segments
    return digest(slot.bytes()[segment.at : segment.at + segment.extent.nbytes])
