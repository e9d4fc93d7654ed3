"""What a store writes into its directory: objects that last, and spilled groups that do not.

All of it runs on the threads of the disk, so that none of it is cut short.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter

import torch

from tierstore.model.errors import DiskFullError, TierStoreError
from tierstore.model.groups import name_of, packing_of
from tierstore.transfer.arena import Slot
from tierstore.transfer.cargo import Cargo
from tierstore.transfer.directory import ObjectDirectory
from tierstore.transfer.disk import FileTable
from tierstore.transfer.spill import Spill
from tierstore.transfer.views import show_one
from tierstore.transfer.workers import Job, Workers


class Saver:
    """The object files and the spill of one store.

    Of the versions of a key, the newest that was to be saved or removed decides what its file is,
    whichever is faster. `known` counts the versions that there are of each key.
    """

    def __init__(self, directory: ObjectDirectory, files: FileTable, workers: Workers) -> None:
        self.known: Counter[str] = Counter()
        self._directory = directory
        self._files = files
        self._together = workers.together
        self._spill: Spill | None = None
        self._committed: dict[str, int] = {}  # key -> newest version that is on disk, or removed
        self._written: set[str] = set()  # keys that have an object file
        self._undead: dict[str, tuple[int, bool]] = {}  # files that could not be removed
        self._lock = threading.Lock()

    def forget(self, key: str) -> None:
        """There is one version less of `key`."""
        self.known[key] -= 1
        if not self.known[key]:
            del self.known[key]
            if key not in self._written:
                self._committed.pop(key, None)

    def add_file(self, key: str) -> None:
        """The directory has an object file of `key`."""
        self._written.add(key)

    def has_file(self, key: str) -> bool:
        """Whether the directory has an object file of `key`."""
        return key in self._written

    def save(self, cargo: Cargo, slot: Slot) -> None:
        slot.wait()
        if cargo.durable:
            self._save_object(cargo, slot)
        else:
            self._save_spilled(cargo, slot)
        cargo.verified = None

    def _save_spilled(self, cargo: Cargo, slot: Slot) -> None:
        spill = self._the_spill()
        if cargo.settled:
            cargo.place = cargo.place or spill.take_place(cargo.spec.nbytes)
            cargo.source = spill.save_in(cargo.place, slot.bytes(), self._together)
            return
        saved = spill.save(slot.bytes(), self._together)
        cargo.spilled_at, cargo.source = saved

    def _the_spill(self) -> Spill:
        with self._lock:
            if self._spill is None:
                self._spill = Spill(self._directory.path)
            return self._spill

    def _save_object(self, cargo: Cargo, slot: Slot) -> None:
        key = name_of(cargo.key)
        packing = cargo.packing or packing_of(cargo.spec)
        stage = functools.partial(
            self._directory.stage, key, packing, slot.bytes(), single=cargo.single
        )
        try:
            staged = stage(together=self._together)
        except DiskFullError:
            if self._spill is None or not self._spill.trim():
                raise
            staged = stage(together=self._together)  # there is more room now
        with self._lock:
            if self._committed.get(key, -1) > cargo.order:
                self._directory.abandon(staged)  # a newer version, or its removal, was faster
            else:
                self._written.add(key)  # also if it fails: the name may be there, but not for sure
                self._directory.commit(staged)
                self._committed[key] = cargo.order
                self._files.forget(self._directory.path_of(key))
        cargo.source = staged.stored.source(self._directory.path_of(key))

    def remove(self, key: str, order: int, durable: bool) -> None:
        """Remove the object file of `key`, and see that no version up to `order` is written.

        Raises TransferError; then it is among the `leftovers`.
        """
        with self._lock:
            self._undead.pop(key, None)
            if self._committed.get(key, -1) > order:
                return  # a newer one was written meanwhile
            if durable and key in self.known:
                self._committed[key] = order
            if key not in self._written:
                return
            try:
                self._directory.remove(key)
            except TierStoreError:
                self._undead[key] = order, durable
                raise
            self._written.discard(key)
            self._files.forget(self._directory.path_of(key))

    def is_left(self, key: str) -> bool:
        """Whether the object file of `key` could not be removed."""
        return key in self._undead

    def leftovers(self) -> list[Job]:
        """What tries again to remove what could not be removed. Nothing, if there is nothing."""
        again: list[Job] = [
            functools.partial(self.remove, key, *left) for key, left in self._undead.items()
        ]
        if self._directory.strays:
            again.append(self._directory.remove_strays)
        return again

    def drop(self, cargo: Cargo) -> Job | None:
        """The group is not on disk any more. Returns what gives its room back.

        An object file stays until its key is written anew or removed.
        """
        cargo.source = None
        cargo.backed = False
        if cargo.spilled_at is None or self._spill is None:
            return None
        spilled_at, cargo.spilled_at = cargo.spilled_at, None
        return functools.partial(self._spill.give_back, spilled_at, cargo.spec.nbytes)

    def place(self, cargo: Cargo) -> None:
        """Let the copy on disk of a settled group be whatever lies in its place."""
        spill = self._the_spill()
        cargo.place = spill.take_place(cargo.spec.nbytes)
        cargo.source = spill.source_of(cargo.place)

    def show(self, cargo: Cargo) -> dict[str, torch.Tensor]:
        """The tensors of a settled group's copy on disk: shared maps, each with its own memory."""
        if cargo.place is None or self._spill is None:
            raise RuntimeError(f"group {name_of(cargo.key)!r} was never saved")
        shown = memoryview(self._spill.show(cargo.place))
        return {spec.name: show_one(spec, shown) for spec in cargo.spec.tensors}

    def close(self) -> None:
        """Give the spill back."""
        if self._spill is not None:
            self._spill.close()
            self._spill = None
