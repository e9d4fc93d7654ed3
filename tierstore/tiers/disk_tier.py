"""Copies on disk: objects that last, spilled groups that do not, and checkpoints of others."""

from __future__ import annotations

import functools
import time
from collections.abc import Collection, Iterable
from typing import Protocol
from weakref import WeakKeyDictionary

import torch

from tierstore.errors import DiskFullError, TierStoreError
from tierstore.model.groups import packing_of
from tierstore.model.locks import RLock, guarded
from tierstore.model.sizes import PAGE
from tierstore.model.tiers import Tier
from tierstore.system.file_table import FileTable
from tierstore.system.views import show_one
from tierstore.tiers.directory import ObjectDirectory, Staged
from tierstore.tiers.entry import GroupEntry
from tierstore.tiers.spill import Spill
from tierstore.tiers.workers import URGENT, Future, Job, SerialExecutor, Workers


class RemovableFile(Protocol):
    """A file that a copy is in, until it is removed."""

    def remove(self) -> None:
        """Remove the file, on a thread that may wait. Never raises."""


class DiskTier:
    """The object files and the spill of one store, and the checkpoints that it reads.

    Of the versions of a key, the newest that was to be saved or removed decides what its file is,
    whichever is faster. `names` are the keys of which there is any version. Files are written and
    removed by `workers`, so that none of it is cut short; the books of what is where are kept by
    `serial`. `spill` is there once it was needed, and `fetched` has the files of copies that can be
    fetched again. A copy is where the entry's `source` says; room is taken when it is written.
    """

    tier = Tier.DISK
    alignment = PAGE
    peak_bytes = None

    def __init__(
        self,
        budget: int | None,
        directory: ObjectDirectory,
        files: FileTable,
        names: Collection[str],
        serial: SerialExecutor,
        workers: Workers,
    ) -> None:
        self.capacity = budget
        self.files = files
        self.workers = workers
        self._directory = directory
        self._names = names
        self._serial = serial
        self.spill: Spill | None = None
        self.fetched = WeakKeyDictionary[GroupEntry, RemovableFile]()
        self.spilled_at = WeakKeyDictionary[GroupEntry, int]()  # offsets, but of mutable groups
        self._committed: dict[str, int] = {}  # key -> newest version that is on disk, or removed
        self._written: set[str] = set()  # keys that have an object file
        self._undead: dict[str, tuple[int, bool]] = {}  # files that could not be removed
        self._removing: dict[int, str] = {}  # what is being removed now, by the order of removals
        self._lock = RLock()

    def holds(self, entry: GroupEntry) -> bool:
        return entry.source is not None

    def reserve(self, entry: GroupEntry, *, for_caller: bool = False) -> None:
        """Who writes takes the room: only the file system knows whether there is any."""

    def view(self, entry: GroupEntry) -> dict[str, torch.Tensor]:
        """The tensors of a settled group's copy: shared maps, each with its own memory.

        What is written to them is in the file. Raises TransferError where the file system knows no
        such maps.
        """
        if entry.spill_extent is None or self.spill is None:
            raise RuntimeError(f"group {entry.group.key!r} was never saved")
        shown = memoryview(self.spill.show(entry.spill_extent))
        return {spec.name: show_one(spec, shown) for spec in entry.spec.tensors}

    def drop(self, entry: GroupEntry) -> None:
        """An object file stays until its key is written anew or removed; but not what was fetched
        from an object store, and can be again."""
        entry.source, entry.files = None, {}
        if entry.backing is self.tier:
            entry.backing = None
        fetched = self.fetched.pop(entry, None)
        if fetched is not None:
            self.workers.submit(URGENT, fetched.remove)
        spilled_at = self.spilled_at.pop(entry, None)
        if spilled_at is not None and self.spill is not None:
            room = functools.partial(self.spill.give_back, spilled_at, entry.spec.nbytes)
            self.workers.submit(URGENT, room)

    def close(self, entries: Iterable[GroupEntry]) -> None:
        """Files stay, and are another store's to find."""
        self.files.close()
        if self.spill is not None:
            self.spill.close()
            self.spill = None

    def idle_for(self) -> float:
        """For how many seconds the disk has begun and ended nothing."""
        return time.monotonic() - self.workers.busy_since

    # Writing, on a thread of the disk's --------------------------------------------------------

    def save(self, entry: GroupEntry, data: memoryview) -> None:
        """Write a group's packed bytes (page-aligned memory) as it is to be written, and note where
        they are. Raises DiskFullError or TransferError."""
        if entry.durable:
            self._save_object(entry, data)
        else:
            self._save_spilled(entry, data)

    def _save_spilled(self, entry: GroupEntry, data: memoryview) -> None:
        spill = self._the_spill()
        if entry.mutable:
            entry.spill_extent = entry.spill_extent or spill.take_extent(entry.spec.nbytes)
            entry.source = spill.save_in(entry.spill_extent, data, self.workers.run_parallel)
            return
        spilled_at, source = spill.save(data, self.workers.run_parallel)
        self.spilled_at[entry] = spilled_at
        entry.source = source

    @guarded
    def _the_spill(self) -> Spill:
        if self.spill is None:
            self.spill = Spill(self._directory.path)
        return self.spill

    def _save_object(self, entry: GroupEntry, data: memoryview) -> None:
        key = entry.group.key
        packing = entry.packing or packing_of(entry.spec)
        stage = functools.partial(self._directory.stage, key, packing, data, single=entry.single)
        try:
            staged = stage(run_parallel=self.workers.run_parallel)
        except DiskFullError:
            if self.spill is None or not self.spill.trim():
                raise
            staged = stage(run_parallel=self.workers.run_parallel)  # there is more room now
        self._commit(key, entry.order, staged)
        entry.source = staged.stored.source(self._directory.path_of(key))

    @guarded
    def _commit(self, key: str, order: int, staged: Staged) -> None:
        if self._committed.get(key, -1) > order:
            self._directory.abandon(staged)  # a newer version, or its removal, was faster
            return
        self._written.add(key)  # also if it fails: the name may be there, but not for sure
        self._directory.commit(staged)
        self._committed[key] = order
        self.files.forget(self._directory.path_of(key))

    @guarded
    def _remove(self, key: str, order: int, durable: bool) -> None:
        """Remove the object file of `key`, and see that no version up to `order` is written.

        Raises TransferError; then it is left.
        """
        self._undead.pop(key, None)
        if self._committed.get(key, -1) > order:
            return  # a newer one was written meanwhile
        if durable and key in self._names:
            self._committed[key] = order
        if key not in self._written:
            return
        try:
            self._directory.remove(key)
        except TierStoreError:
            self._undead[key] = order, durable
            raise
        self._written.discard(key)
        self.files.forget(self._directory.path_of(key))
        self._forget_what_nobody_writes()

    def _forget_what_nobody_writes(self) -> None:
        """An order matters while an older version may be written, or a file is there."""
        if len(self._committed) > 2 * len(self._names) + 64:
            orders = self._committed.items()
            there = self._written, self._names
            self._committed = {k: n for k, n in orders if any(k in known for known in there)}

    # For callers -------------------------------------------------------------------------------

    def add_file(self, key: str) -> None:
        """The directory has an object file of `key`."""
        self._written.add(key)

    def write(self, entry: GroupEntry, data: memoryview) -> None:
        """`save` for a caller, who waits for it. The group is settled, and durable."""
        self._serial.ask_on(self.workers, functools.partial(self.save, entry, data)).wait()

    def create(self, entry: GroupEntry) -> None:
        """Let the copy of a settled group be whatever lies in its place. Waits for the disk.

        Raises DiskFullError or TransferError.
        """
        self._serial.ask_on(self.workers, functools.partial(self._place, entry)).wait()

    def _place(self, entry: GroupEntry) -> None:
        spill = self._the_spill()
        entry.spill_extent = spill.take_extent(entry.spec.nbytes)
        entry.source = spill.source_of(entry.spill_extent)

    def remove(self, key: str, order: int, durable: bool) -> Future[None] | None:
        """Begin to remove the file of `key`, and see that no version up to `order` is written.

        None: there is nothing. A failure is told to who waits for the answer, and to who flushes.
        """
        if not durable and key not in self._written:
            return None

        def remove() -> None:
            try:
                self._remove(key, order, durable)
            finally:
                del self._removing[order]

        begin = functools.partial(self._removing.__setitem__, order, key)
        return self._serial.ask_on(self.workers, remove, begin)

    def removing(self) -> set[str]:
        """The keys whose object files are being removed."""
        self._serial.catch_up()
        return set(list(self._removing.values()))

    def is_left(self, key: str) -> bool:
        """Whether the object file of `key` could not be removed."""
        return key in self._undead

    def remove_leftovers(self) -> list[BaseException]:
        """Try again to remove what could not be removed. Returns what went wrong."""
        again: list[Job] = [
            functools.partial(self._remove, key, *left) for key, left in self._undead.items()
        ]
        if self._directory.strays:
            again.append(self._directory.remove_strays)
        errors: list[BaseException] = []
        for remove in again:
            try:
                self._serial.ask_on(self.workers, remove).wait()
            except TierStoreError as error:
                errors.append(error)
        return errors
