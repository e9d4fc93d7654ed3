"""Copies on disk: durable objects, spilled groups, and registered checkpoints."""

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
from tierstore.system.views import tensor_over
from tierstore.tiers.directory import ObjectDirectory, Staged
from tierstore.tiers.entry import GroupEntry
from tierstore.tiers.spill import Spill
from tierstore.tiers.workers import URGENT, Future, Job, SerialExecutor, Workers


class RemovableFile(Protocol):
    """A file that holds a copy, until it is removed."""

    def remove(self) -> None:
        """Remove the file, on a thread that may block. Never raises."""


class DiskTier:
    """The object files and the spill of one store, and the checkpoints that it reads.

    Among the saves and removals of a key, the newest decides the state of its file, whichever
    finishes first. `names` are the keys with any version. `workers` write and remove files, and no
    interrupt reaches them; `serial` does the accounting. `spill` is created on demand, and
    `fetched` has the files of copies that can be fetched again. The entry's `source` locates a
    copy; writing it takes the disk space.
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
        self.spilled_at = WeakKeyDictionary[GroupEntry, int]()  # offsets, except mutable groups
        self._committed: dict[str, int] = {}  # key -> order of the newest save or removal
        self._written: set[str] = set()  # keys that have an object file
        # Failed removals, by key: order and durability.
        self._pending_deletes: dict[str, tuple[int, bool]] = {}
        self._removing: dict[int, str] = {}  # key by the order of its removal in progress
        self._lock = RLock()

    def holds(self, entry: GroupEntry) -> bool:
        return entry.source is not None

    def reserve(self, entry: GroupEntry, *, for_caller: bool = False) -> None:
        """Do nothing: a write allocates space, and only the file system knows how much is free."""

    def view(self, entry: GroupEntry) -> dict[str, torch.Tensor]:
        """Return the tensors of a settled group's copy: shared maps, each with its own memory.

        Writes to them go to the file. Raises TransferError where the file system does not support
        such maps.
        """
        if entry.spill_extent is None or self.spill is None:
            raise RuntimeError(f"group {entry.group.key!r} was never saved")
        shown = memoryview(self.spill.map_extent(entry.spill_extent))
        return {spec.name: tensor_over(spec, shown) for spec in entry.spec.tensors}

    def drop(self, entry: GroupEntry) -> None:
        """Drop a copy. An object file stays until its key is rewritten or removed.

        A file that was fetched from an object store is removed, because it can be fetched again.
        """
        entry.source, entry.files = None, {}
        if entry.backing is self.tier:
            entry.backing = None
        fetched = self.fetched.pop(entry, None)
        if fetched is not None:
            self.workers.submit(URGENT, fetched.remove)
        spilled_at = self.spilled_at.pop(entry, None)
        if spilled_at is not None and self.spill is not None:
            release = functools.partial(self.spill.release, spilled_at, entry.spec.nbytes)
            self.workers.submit(URGENT, release)

    def close(self, entries: Iterable[GroupEntry]) -> None:
        """Close all files. Object files stay for the next store."""
        self.files.close()
        if self.spill is not None:
            self.spill.close()
            self.spill = None

    def idle_for(self) -> float:
        """Return the seconds since the disk last began or finished a job."""
        return time.monotonic() - self.workers.busy_since

    # Writing, on a thread of the disk ----------------------------------------------------------

    def save(self, entry: GroupEntry, data: memoryview) -> None:
        """Write a group's packed bytes (page-aligned memory), and record where they are.

        Raises DiskFullError or TransferError.
        """
        if entry.durable:
            self._save_object(entry, data)
        else:
            self._save_spilled(entry, data)

    def _save_spilled(self, entry: GroupEntry, data: memoryview) -> None:
        spill = self._get_spill()
        if entry.mutable:
            entry.spill_extent = entry.spill_extent or spill.take_extent(entry.spec.nbytes)
            entry.source = spill.save_in(entry.spill_extent, data, self.workers.run_parallel)
            return
        spilled_at, source = spill.save(data, self.workers.run_parallel)
        self.spilled_at[entry] = spilled_at
        entry.source = source

    @guarded
    def _get_spill(self) -> Spill:
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
            staged = stage(run_parallel=self.workers.run_parallel)  # after freeing space
        self._commit(key, entry.order, staged)
        entry.source = staged.stored.source(self._directory.path_of(key))

    @guarded
    def _commit(self, key: str, order: int, staged: Staged) -> None:
        if self._committed.get(key, -1) > order:
            self._directory.abandon(staged)  # superseded by a newer version, or a removal
            return
        self._written.add(key)  # even if commit fails: the name may exist
        self._directory.commit(staged)
        self._committed[key] = order
        self.files.forget(self._directory.path_of(key))

    @guarded
    def _remove(self, key: str, order: int, durable: bool) -> None:
        """Remove the object file of `key`, and prevent writes of versions up to `order`.

        Raises TransferError, and keeps the removal pending.
        """
        self._pending_deletes.pop(key, None)
        if self._committed.get(key, -1) > order:
            return  # superseded by a newer version
        if durable and key in self._names:
            self._committed[key] = order
        if key not in self._written:
            return
        try:
            self._directory.remove(key)
        except TierStoreError:
            self._pending_deletes[key] = order, durable
            raise
        self._written.discard(key)
        self.files.forget(self._directory.path_of(key))
        self._prune_versions()

    def _prune_versions(self) -> None:
        """Forget the orders of keys that have neither a file nor any version."""
        if len(self._committed) > 2 * len(self._names) + 64:
            orders = self._committed.items()
            there = self._written, self._names
            self._committed = {k: n for k, n in orders if any(k in known for known in there)}

    # For callers -------------------------------------------------------------------------------

    def add_file(self, key: str) -> None:
        """Record that the directory has an object file of `key`."""
        self._written.add(key)

    def write(self, entry: GroupEntry, data: memoryview) -> None:
        """Call `save` and wait for it. The group is settled and durable."""
        self._serial.submit_to(self.workers, functools.partial(self.save, entry, data)).wait()

    def create(self, entry: GroupEntry) -> None:
        """Create the copy of a settled group with undefined contents. Waits for the disk.

        Raises DiskFullError or TransferError.
        """
        self._serial.submit_to(self.workers, functools.partial(self._reserve_extent, entry)).wait()

    def _reserve_extent(self, entry: GroupEntry) -> None:
        spill = self._get_spill()
        entry.spill_extent = spill.take_extent(entry.spec.nbytes)
        entry.source = spill.source_of(entry.spill_extent)

    def remove(self, key: str, order: int, durable: bool) -> Future[None] | None:
        """Start removing the file of `key`, and prevent writes of versions up to `order`.

        Returns None if there is nothing to remove. A failure is raised by `wait`, and by the next
        flush.
        """
        if not durable and key not in self._written:
            return None

        def remove() -> None:
            try:
                self._remove(key, order, durable)
            finally:
                del self._removing[order]

        begin = functools.partial(self._removing.__setitem__, order, key)
        return self._serial.submit_to(self.workers, remove, begin)

    def removing(self) -> set[str]:
        """Return the keys whose object files are being removed."""
        self._serial.drain()
        return set(list(self._removing.values()))

    def is_delete_pending(self, key: str) -> bool:
        """Return whether the object file of `key` could not be removed and awaits a retry."""
        return key in self._pending_deletes

    def retry_deletes(self) -> list[BaseException]:
        """Retry failed removals. Returns the errors."""
        again: list[Job] = [
            functools.partial(self._remove, key, *left)
            for key, left in self._pending_deletes.items()
        ]
        if self._directory.orphans:
            again.append(self._directory.remove_orphans)
        errors: list[BaseException] = []
        for remove in again:
            try:
                self._serial.submit_to(self.workers, remove).wait()
            except TierStoreError as error:
                errors.append(error)
        return errors
