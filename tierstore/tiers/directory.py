"""The directory of a store, and the object files that are its durable part.

`docs/how-it-works.md` shows what lies in it. One rename is one commit: a file is written under a
temporary name, synced, renamed, and the directory is synced. Whatever dies in between, a reader
finds the old group or the new one. Keys are data; names come from hashes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tierstore.errors import TierStoreError, TransferError
from tierstore.model.groups import Block, Packing
from tierstore.model.header import NO_SUM, digest
from tierstore.model.objects import StoredObject, header_of, refuse_unreadable
from tierstore.model.sizes import PAGE
from tierstore.progress import bar
from tierstore.system.files import (
    WRITE_BLOCK,
    OpenForWriting,
    close_quietly,
    parts,
    sync_names,
    transfer_errors,
    write_all,
)
from tierstore.system.locking import give_back, take_lock
from tierstore.system.objects import (
    LOCK,
    MARKER,
    OBJECTS,
    READ,
    SHARD_NAME,
    STORE_FORMAT,
    TEMPORARY,
    find_objects,
    object_name,
    read_marker,
)
from tierstore.system.private import make_directories
from tierstore.tiers.workers import Job, RunParallel, one_by_one

logger = logging.getLogger("tierstore.tiers")

# The names that tierstore gives files for a while. What has another name is not ours: it is never
# opened, and never removed.
TEMPORARY_NAME = re.compile(r"(object|marker)-[0-9a-f]{16}")
SPILL_NAME = re.compile(r"\.spill-[0-9]+-[0-9a-f]{16}")
"""A spill file has a name for a moment, where the file system knows no files without."""


@dataclass(frozen=True)
class Staged:
    """A group that is on disk under a temporary name."""

    temporary: str
    stored: StoredObject


class ObjectDirectory:
    """The directory of one live store, held under its lock.

    `damaged` maps an object's name to the error that was found in it when the directory was
    opened. Raises StoreLockedError, TransferError (no permission, no room) or TierStoreError (a
    newer format) when it cannot be opened, and changes nothing then.

    What is not `lasting` may be lost, or be something else, after a power cut: nothing waits for
    the disk to have it, and who reads it compares checksums.
    """

    def __init__(self, disk_dir: str | Path, *, lasting: bool = True) -> None:
        self.path = os.path.abspath(disk_dir)
        self._lasting = lasting
        self._explained = functools.partial(transfer_errors, path=self.path)
        with self._explained("opening"), contextlib.ExitStack() as undo:
            _make_directory(self.path)
            _refuse_what_others_may_change(self.path)
            read_marker(self.path)
            self._lock, was_closed = take_lock(self.path)
            undo.callback(give_back, self._lock)
            self._prepare(undo)
            if not was_closed:
                self._sync_everything()
            self._opened = undo.pop_all()
        self.damaged: dict[str, TransferError] = {}
        self.strays: set[str] = set()  # temporary files of no use
        self._shards: set[str] = set()  # those that would survive a power cut
        self._in_doubt = False  # whether there are names that might not survive one

    def _prepare(self, undo: contextlib.ExitStack) -> None:
        is_new = read_marker(self.path) is None
        if is_new:
            _warn_of_others(self.path)
        for name in (OBJECTS, TEMPORARY):
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.join(self.path, name), mode=0o700)
        self._objects, self._temporary = (
            undo.enter_context(_open_directory(os.path.join(self.path, name)))
            for name in (OBJECTS, TEMPORARY)
        )
        self._clean_up()
        if is_new:
            self._write_marker()
        _sync_directory(self.path)

    def _sync_everything(self) -> None:
        """See that every name lasts: somebody may have died between a rename and its sync."""
        for shard in filter(SHARD_NAME.fullmatch, os.listdir(self._objects)):
            with contextlib.suppress(NotADirectoryError):
                _sync_directory(os.path.join(self.path, OBJECTS, shard))
        sync_names(self._objects)

    def _clean_up(self) -> None:
        """Remove what a killed process left half-written."""
        for name in filter(TEMPORARY_NAME.fullmatch, os.listdir(self._temporary)):
            with contextlib.suppress(OSError):  # not ours after all, such as a directory
                os.unlink(name, dir_fd=self._temporary)
        for name in filter(SPILL_NAME.fullmatch, os.listdir(self.path)):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self.path, name))

    def _write_marker(self) -> None:
        marker = {"format": STORE_FORMAT, "uuid": str(uuid.uuid4()), "created_by": "tierstore"}
        name = f"marker-{os.urandom(8).hex()}"
        descriptor = self._new_file(name)
        try:
            write_all(descriptor, memoryview(json.dumps(marker).encode()), 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(name, os.path.join(self.path, MARKER), src_dir_fd=self._temporary)

    def _new_file(self, name: str) -> int:
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(name, flags, 0o600, dir_fd=self._temporary)

    def objects(self) -> list[StoredObject]:
        """Every intact object; the others are in `damaged` afterwards."""
        intact = []
        for found in bar(find_objects(self.path), "Looking at what is stored", "groups"):
            if found.stored is not None:
                intact.append(found.stored)
            else:
                assert found.error is not None  # which says why it could not be read
                shard = os.path.basename(os.path.dirname(found.path))
                self.damaged[f"{shard}/{os.path.basename(found.path)}"] = found.error
        return intact

    def path_of(self, key: str) -> str:
        """The path of the object file of `key`."""
        return f"{self.path}/{OBJECTS}/{object_name(key)}"

    def stage(
        self,
        key: str,
        packing: Packing,
        data: memoryview,
        *,
        single: bool,
        run_parallel: RunParallel = one_by_one,
    ) -> Staged:
        """Write a group to a temporary file and sync it. It counts from `commit` on.

        `data` holds the packed group in page-aligned memory. `run_parallel` does the parts of the
        work, such as `Workers.run_parallel`. Raises DiskFullError or TransferError; nothing has
        changed then.
        """
        try:
            refuse_unreadable(key, packing, single=single)  # before what is there is replaced
        except ValueError as error:
            raise TransferError(str(error), key=key, path=self.path) from error
        writing = _Writing(key, packing, data, single)
        temporary = f"object-{os.urandom(8).hex()}"
        try:
            with self._explained("writing to", key=key):
                self._write_file(temporary, writing, run_parallel)
        except BaseException:
            self._remove_temporary(temporary)
            raise
        return Staged(temporary, writing.stored())

    def commit(self, staged: Staged) -> StoredObject:
        """Make a staged group the object of its key: when this returns, it survives a power cut.

        An object of the same key is replaced at once or not at all.
        """
        key = staged.stored.key
        name = object_name(key)
        shard, _, leaf = name.partition("/")
        try:
            with self._explained("writing to", key=key), self._shard(shard) as descriptor:
                os.rename(staged.temporary, leaf, src_dir_fd=self._temporary, dst_dir_fd=descriptor)
                self._sync(descriptor)
        except BaseException:
            self.abandon(staged)
            raise
        self.damaged.pop(name, None)
        return staged.stored

    def abandon(self, staged: Staged) -> None:
        """Remove a staged group that will not be committed."""
        self._remove_temporary(staged.temporary)

    def _remove_temporary(self, name: str) -> None:
        self.strays.add(name)
        self.remove_strays()

    def remove_strays(self) -> None:
        """Remove temporary files of no use. If one stays, the next call or opening tries again."""
        for name in tuple(self.strays):
            with contextlib.suppress(OSError):
                with contextlib.suppress(FileNotFoundError):  # not there yet, or renamed already
                    os.unlink(name, dir_fd=self._temporary)
                self.strays.discard(name)

    def write(self, key: str, packing: Packing, data: memoryview, *, single: bool) -> StoredObject:
        """Stage and commit."""
        return self.commit(self.stage(key, packing, data, single=single))

    def _write_file(self, name: str, writing: _Writing, run_parallel: RunParallel) -> None:
        file = OpenForWriting(self._new_file(name), name, self._temporary)
        try:
            os.posix_fallocate(file.cached, 0, writing.nbytes)  # a full disk is known at once
            run_parallel(writing.jobs(file))
            writing.finish(file.cached)
            # A failed fsync must never be repeated on the same file: the second one would succeed.
            if self._lasting:
                os.fsync(file.cached)
        finally:
            file.close()

    @contextmanager
    def _shard(self, shard: str) -> Iterator[int]:
        if shard not in self._shards:
            with contextlib.suppress(FileExistsError):
                os.mkdir(shard, mode=0o700, dir_fd=self._objects)
            self._sync(self._objects)  # who made it may have died before this
            self._shards.add(shard)
        with _open_directory(shard, self._objects) as descriptor:
            yield descriptor

    def remove(self, key: str) -> None:
        """Remove the object of `key` for good."""
        shard, _, leaf = object_name(key).partition("/")
        with self._explained("removing from", key=key), self._shard(shard) as descriptor:
            with contextlib.suppress(FileNotFoundError):  # somebody else was faster
                os.unlink(leaf, dir_fd=descriptor)
            self._sync(descriptor)

    def _sync(self, descriptor: int) -> None:
        if not self._lasting:
            return
        try:
            sync_names(descriptor)
        except BaseException:
            self._in_doubt = True
            raise

    def close(self) -> None:
        """Give the lock back."""
        if not self._in_doubt:
            with contextlib.suppress(OSError):
                os.ftruncate(self._lock, 0)  # the next one need not see to the names
        self._opened.close()


class _Writing:
    """A group on its way into a file.

    All but its end lies in the file as in memory: that part goes straight from there, past the page
    cache, while the checksums are computed. The end, which has odd sizes, and the header, which
    holds the checksums, follow.
    """

    def __init__(self, key: str, packing: Packing, data: memoryview, single: bool) -> None:
        self._key = key
        self._packing = packing
        self._data = data
        self._single = single
        self._digests: tuple[str, ...] = (NO_SUM,) * len(packing.blocks)
        self._start = len(self._header())  # whatever the checksums are, they are as long
        self.nbytes = self._start + packing.dense_nbytes

    def _header(self) -> bytes:
        return header_of(self._key, self._packing, self._digests, single=self._single)

    def _blocks(self) -> Iterator[tuple[Block, int, int]]:
        """Each block, and where it lies in memory and in the file's data."""
        packing = self._packing
        return zip(packing.blocks, packing.offsets, packing.dense, strict=True)

    def _straight(self) -> int:
        """Bytes at the start that lie in the file as in memory, in whole pages."""
        end = 0
        for block, at, dense in self._blocks():
            if at != dense:
                break
            end = at + block.nbytes
        return end // PAGE * PAGE

    def jobs(self, file: OpenForWriting) -> Iterator[Job]:
        """What may be done at the same time."""
        yield self._compute_digests
        for offset, length in parts(self._straight(), WRITE_BLOCK):
            part = self._data[offset : offset + length]
            yield functools.partial(file.write, part, self._start + offset)

    def _compute_digests(self) -> None:
        self._digests = tuple(
            digest(self._data[at : at + block.nbytes]) for block, at, _ in self._blocks()
        )

    def finish(self, descriptor: int) -> None:
        """Write what the jobs have not, once they are done."""
        straight = self._straight()
        for block, at, dense in self._blocks():
            done = min(max(straight - dense, 0), block.nbytes)
            part = self._data[at + done : at + block.nbytes]
            write_all(descriptor, part, self._start + dense + done)
        header = self._header()
        assert len(header) == self._start
        write_all(descriptor, memoryview(header), 0)

    def stored(self) -> StoredObject:
        """What the file holds."""
        return StoredObject(self._key, self._packing, self._digests, self._start, self._single)


@contextmanager
def _open_directory(path: str, dir_fd: int | None = None) -> Iterator[int]:
    descriptor = os.open(path, READ | os.O_DIRECTORY, dir_fd=dir_fd)
    try:
        yield descriptor
    finally:
        close_quietly(descriptor)


def _sync_directory(path: str) -> None:
    with _open_directory(path) as descriptor:
        sync_names(descriptor)


def _refuse_what_others_may_change(path: str) -> None:
    status = os.stat(path)
    if status.st_uid != os.geteuid() and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise TierStoreError(
            f"{path} belongs to somebody else, and others may write to it, who could replace what "
            "lies there: choose a directory in it, or another disk_dir"
        )


def _in_the_way(path: str) -> TransferError:
    """What to tell of a directory that cannot be made, as something else has a name of its path."""
    there = path
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    what = "a file" if os.path.isfile(there) else "no directory"
    return TransferError(
        f"{path} cannot be a store's directory: {there} is {what}; pass another disk_dir", path=path
    )


def _warn_of_others(path: str) -> None:
    """Tell who has named a directory of something else, such as that of the model."""
    others = sorted(set(os.listdir(path)) - {LOCK, OBJECTS, TEMPORARY})
    if others:
        logger.warning(
            "%s was no store, and has other things, such as %r: they are left as they are, but a "
            "disk_dir that is for the store alone is easier to look after",
            path,
            others[0],
        )


def _make_directory(path: str) -> None:
    """Make a directory, and those above it that are missing, and see that their names last."""
    made = [path]
    while not os.path.exists(above := os.path.dirname(made[-1])):
        made.append(above)
    found = os.path.exists(path)
    try:
        make_directories(path)
    except (FileExistsError, NotADirectoryError) as error:
        raise _in_the_way(path) from error
    for each in made:
        # Who made a directory that was found may have died before this. Of one that is not ours,
        # it need not be possible.
        with contextlib.suppress(OSError if found else PermissionError):
            _sync_directory(os.path.dirname(each))
