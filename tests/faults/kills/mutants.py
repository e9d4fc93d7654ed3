"""Ways to do it worse. The same kills that find nothing wrong with the store find each of them."""

from __future__ import annotations

import os
from collections.abc import Callable

from tierstore.store import TierStore
from tierstore.system.files import OpenForWriting
from tierstore.system.objects import object_name
from tierstore.tiers.directory import ObjectDirectory, Staged, _Writing
from tierstore.tiers.disk_tier import DiskTier
from tierstore.tiers.workers import RunParallel, one_by_one

# mypy: disable-error-code="method-assign,assignment"


def write_in_place() -> None:
    """A group is written over the one that it replaces: no temporary file, no rename."""

    def stage(
        self: ObjectDirectory,
        key: str,
        packing: object,
        data: memoryview,
        *,
        single: bool,
        run_parallel: RunParallel = one_by_one,
    ) -> Staged:
        writing = _Writing(key, packing, data, single)  # type: ignore[arg-type]
        with self._shard(object_name(key).partition("/")[0]):
            path = self.path_of(key)
        file = OpenForWriting(os.open(path, os.O_CREAT | os.O_RDWR, 0o600), path)
        os.ftruncate(file.cached, writing.nbytes)
        run_parallel(writing.jobs(file))
        writing.finish(file.cached)
        file.close()
        return Staged("", writing.stored())

    ObjectDirectory.stage = stage
    ObjectDirectory.commit = lambda self, staged: staged.stored


def remove_before_the_rename() -> None:
    """For a moment there is neither the old group nor the new one."""
    usual = ObjectDirectory.commit

    def commit(self: ObjectDirectory, staged: Staged) -> object:
        self.remove(staged.stored.key)
        return usual(self, staged)

    ObjectDirectory.commit = commit


def never_clean_up() -> None:
    """Opening leaves what a killed process left half-written."""
    ObjectDirectory._clean_up = lambda self: None


def flush_nothing() -> None:
    """A flush is acknowledged before anything is on disk."""
    TierStore.flush = lambda self: None


def remove_nothing() -> None:
    """Files stay when their groups are discarded, taken or replaced by what does not last."""
    DiskTier._remove = lambda self, key, order, durable: None


def write_elsewhere() -> None:
    """A file is made beside the store's directory."""
    usual = ObjectDirectory._new_file

    def new_file(self: ObjectDirectory, name: str) -> int:
        os.close(os.open(f"{self.path}.{name}", os.O_CREAT | os.O_WRONLY, 0o600))
        return usual(self, name)

    ObjectDirectory._new_file = new_file


MUTANTS: dict[str, Callable[[], None]] = {
    mutant.__name__.replace("_", " "): mutant
    for mutant in (
        write_in_place,
        remove_before_the_rename,
        never_clean_up,
        flush_nothing,
        remove_nothing,
        write_elsewhere,
    )
}
