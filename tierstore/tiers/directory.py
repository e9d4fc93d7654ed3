"""The directory of a store, with the object files that are its durable part.

`docs/how-it-works.md` shows its layout. One rename is one commit: a file is written under a
temporary name, synced and renamed, and the directory is synced. A reader finds the old group or the
new one, wherever a crash happens. Keys are data; names are derived from hashes.
"""

from __future__ import annotations

import contextlib
import errno
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
from tierstore.model.objects import StoredObject, check_readable, header_of
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
from tierstore.system.locking import release_lock, take_lock
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
from tierstore.tiers.workers import Job, RunParallel, run_serially

logger = logging.getLogger("tierstore.tiers")

# Temporary names that tierstore uses. Files with other names are not ours: they are never opened or
# removed.
TEMPORARY_NAME = re.compile(r"(object|marker)-[0-9a-f]{16}")
SPILL_NAME = re.compile(r"\.spill-[0-9]+-[0-9a-f]{16}")
"""Temporary name of a spill file, on file systems without unnamed files."""


@dataclass(frozen=True)
class Staged:
    """A group that is on disk under a temporary name."""

    temporary: str
    stored: StoredObject


class ObjectDirectory:
    """The directory of one live store, held under its lock.

    `damaged` maps the name of an object to the error that was found in it when the directory was
    opened. If it cannot be opened, raises StoreLockedError, TransferError (no permission, no
    space) or TierStoreError (a newer format), and leaves it unchanged.

    Without `durable`, a power cut may lose or damage files: nothing is synced, and readers compare
    checksums.
    """

    def __init__(self, disk_dir: str | Path, *, durable: bool = True) -> None:
        self.path = os.path.abspath(disk_dir)
        self._durable = durable
        self._explained = functools.partial(transfer_errors, path=self.path)
        with self._explained("opening"), contextlib.ExitStack() as undo:
            _make_directory(self.path)
            _check_ownership(self.path)
            read_marker(self.path)
            self._lock, was_closed = take_lock(self.path)
            undo.callback(release_lock, self._lock)
            self._prepare(undo)
            if not was_closed:
                self._sync_all_names()
            self._opened = undo.pop_all()
        self.damaged: dict[str, TransferError] = {}
        self.orphans: set[str] = set()  # temporary files that are not needed
        self._shards: set[str] = set()  # synced: they would survive a power cut
        self._in_doubt = False  # True after a failed sync: some names may not survive one

    def _prepare(self, undo: contextlib.ExitStack) -> None:
        is_new = read_marker(self.path) is None
        if is_new:
            _warn_of_other_files(self.path)
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

    def _sync_all_names(self) -> None:
        """Sync every name, in case a process died between a rename and its sync."""
        for shard in filter(SHARD_NAME.fullmatch, os.listdir(self._objects)):
            with contextlib.suppress(NotADirectoryError):
                _sync_directory(os.path.join(self.path, OBJECTS, shard))
        sync_names(self._objects)

    def _clean_up(self) -> None:
        """Delete temporary files left by crashed processes."""
        for name in filter(TEMPORARY_NAME.fullmatch, os.listdir(self._temporary)):
            with contextlib.suppress(OSError):  # not a file of ours, such as a directory
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
        """Return every valid object; the others are in `damaged` afterwards."""
        intact = []
        for found in bar(find_objects(self.path), "Reading stored groups", "groups"):
            if found.stored is not None:
                intact.append(found.stored)
            else:
                assert found.error is not None
                shard = os.path.basename(os.path.dirname(found.path))
                self.damaged[f"{shard}/{os.path.basename(found.path)}"] = found.error
        return intact

    def path_of(self, key: str) -> str:
        """Return the path of the object file of `key`."""
        return f"{self.path}/{OBJECTS}/{object_name(key)}"

    def stage(
        self,
        key: str,
        packing: Packing,
        data: memoryview,
        *,
        single: bool,
        run_parallel: RunParallel = run_serially,
    ) -> Staged:
        """Write a group to a temporary file and sync it. `commit` makes it visible.

        `data` holds the packed group in page-aligned memory. `run_parallel` runs the parts of the
        work, such as `Workers.run_parallel`. Raises DiskFullError or TransferError, which leave
        the directory unchanged.
        """
        try:
            check_readable(key, packing, single=single)  # before the old object is replaced
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
        """Make a staged group the object of its key. On return, it survives a power cut.

        An object of the same key is replaced atomically.
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
        self.orphans.add(name)
        self.remove_orphans()

    def remove_orphans(self) -> None:
        """Remove unused temporary files. The next call or opening retries failed removals."""
        for name in tuple(self.orphans):
            with contextlib.suppress(OSError):
                with contextlib.suppress(FileNotFoundError):  # not created, or renamed
                    os.unlink(name, dir_fd=self._temporary)
                self.orphans.discard(name)

    def write(self, key: str, packing: Packing, data: memoryview, *, single: bool) -> StoredObject:
        """Stage and commit a group."""
        return self.commit(self.stage(key, packing, data, single=single))

    def _write_file(self, name: str, writing: _Writing, run_parallel: RunParallel) -> None:
        file = OpenForWriting(self._new_file(name), name, self._temporary)
        try:
            os.posix_fallocate(file.cached, 0, writing.nbytes)  # detect a full disk early
            run_parallel(writing.jobs(file))
            writing.finish(file.cached)
            # Never retry a failed fsync on the same file: the second call would report success.
            if self._durable:
                os.fsync(file.cached)
        finally:
            file.close()

    @contextmanager
    def _shard(self, shard: str) -> Iterator[int]:
        if shard not in self._shards:
            with contextlib.suppress(FileExistsError):
                os.mkdir(shard, mode=0o700, dir_fd=self._objects)
            self._sync(self._objects)  # its creator may have died before syncing it
            self._shards.add(shard)
        with _open_directory(shard, self._objects) as descriptor:
            yield descriptor

    def remove(self, key: str) -> None:
        """Remove the object of `key` durably."""
        shard, _, leaf = object_name(key).partition("/")
        with self._explained("removing from", key=key), self._shard(shard) as descriptor:
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                os.unlink(leaf, dir_fd=descriptor)
            self._sync(descriptor)

    def _sync(self, descriptor: int) -> None:
        if not self._durable:
            return
        try:
            sync_names(descriptor)
        except BaseException:
            self._in_doubt = True
            raise

    def close(self) -> None:
        """Release the lock."""
        if not self._in_doubt:
            with contextlib.suppress(OSError):
                os.ftruncate(self._lock, 0)  # the next owner need not sync the names
        self._opened.close()


class _Writing:
    """A group that is being written to a file.

    Everything except its end has the same layout in the file as in memory, and is written directly
    from memory, past the page cache, while the checksums are computed. The end, whose sizes are not
    aligned, and the header, which contains the checksums, are written last.
    """

    def __init__(self, key: str, packing: Packing, data: memoryview, single: bool) -> None:
        self._key = key
        self._packing = packing
        self._data = data
        self._single = single
        self._digests: tuple[str, ...] = (NO_SUM,) * len(packing.blocks)
        self._start = len(self._header())  # all checksums have the same length
        self.nbytes = self._start + packing.dense_nbytes

    def _header(self) -> bytes:
        return header_of(self._key, self._packing, self._digests, single=self._single)

    def _blocks(self) -> Iterator[tuple[Block, int, int]]:
        """Yield each block, with its offsets in memory and in the file's data."""
        packing = self._packing
        return zip(packing.blocks, packing.offsets, packing.dense, strict=True)

    def _direct_length(self) -> int:
        """Return the bytes at the start with the same layout in file and memory, in whole pages."""
        end = 0
        for block, at, dense in self._blocks():
            if at != dense:
                break
            end = at + block.nbytes
        return end // PAGE * PAGE

    def jobs(self, file: OpenForWriting) -> Iterator[Job]:
        """Yield the jobs that may run in parallel."""
        yield self._compute_digests
        for offset, length in parts(self._direct_length(), WRITE_BLOCK):
            part = self._data[offset : offset + length]
            yield functools.partial(file.write, part, self._start + offset)

    def _compute_digests(self) -> None:
        self._digests = tuple(
            digest(self._data[at : at + block.nbytes]) for block, at, _ in self._blocks()
        )

    def finish(self, descriptor: int) -> None:
        """Write the rest, once the jobs are done."""
        direct = self._direct_length()
        for block, at, dense in self._blocks():
            done = min(max(direct - dense, 0), block.nbytes)
            part = self._data[at + done : at + block.nbytes]
            write_all(descriptor, part, self._start + dense + done)
        header = self._header()
        assert len(header) == self._start
        write_all(descriptor, memoryview(header), 0)

    def stored(self) -> StoredObject:
        """Return the description of the written object."""
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


def _check_ownership(path: str) -> None:
    status = os.stat(path)
    if status.st_uid != os.geteuid() and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise TierStoreError(
            f"{path} belongs to another user, and others may write to it and replace its files: "
            "choose a directory in it, or another disk_dir"
        )


def _path_blocked_error(path: str) -> TransferError:
    """Return the error for a directory that cannot be created because a file has its name."""
    there = path
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    what = "a file" if os.path.isfile(there) else "not a directory"
    return TransferError(
        f"{path} cannot be a store's directory: {there} is {what}; pass another disk_dir", path=path
    )


def _warn_of_other_files(path: str) -> None:
    """Warn if the directory has other contents, such as a model."""
    others = sorted(set(os.listdir(path)) - {LOCK, OBJECTS, TEMPORARY})
    if others:
        logger.warning(
            "%s was not a store, and has other contents, such as %r: they are left as they are, "
            "but a disk_dir for the store alone is easier to maintain",
            path,
            others[0],
        )


def _make_directory(path: str) -> None:
    """Create a directory and its missing parents, and sync their names."""
    made = [path]
    while not os.path.exists(above := os.path.dirname(made[-1])):
        made.append(above)
    found = os.path.exists(path)
    try:
        make_directories(path)
    except (FileExistsError, NotADirectoryError) as error:
        raise _path_blocked_error(path) from error
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        raise TransferError(
            f"cannot create {path} ({error.strerror}): choose another disk_dir", path=path
        ) from error
    for each in made:
        # The creator of an existing directory may have died before syncing it. Syncing may fail
        # for a directory that is not ours.
        with contextlib.suppress(OSError if found else PermissionError):
            _sync_directory(os.path.dirname(each))
