"""The directory of a store, and the object files that are its durable part.

    disk_dir/            only for its owner (0700)
      STORE.json         what format this is; written once
      LOCK               held with flock by the one live store; never removed
      objects/ab/<32 hex digits>.safetensors
                         one group each, named by the sha256 of its key
      tmp/               files being written; emptied when the directory is opened

One rename is one commit: a file is written under a temporary name, synced, renamed, and the
directory is synced. Whatever dies in between, a reader finds the old group or the new one. Nothing
else needs to agree with anything, so there is no manifest. Keys are data; names come from hashes.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import socket
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tierstore.model.errors import (
    CorruptDataError,
    InvalidHeaderError,
    StoreLockedError,
    TierStoreError,
    TransferError,
)
from tierstore.model.groups import Packing
from tierstore.model.header import (
    LENGTH_BYTES,
    Header,
    build_header,
    digest,
    header_is_intact,
    header_length,
    parse_header,
)
from tierstore.model.objects import SINGLE, StoredObject, decode_object
from tierstore.model.sizes import PAGE
from tierstore.transfer.disk import transfer_error, write_all

STORE_FORMAT = 1
MARKER, LOCK, OBJECTS, TEMPORARY = "STORE.json", "LOCK", "objects", "tmp"
MAX_KEY_BYTES = 1024
_OBJECT_NAME = re.compile(r"[0-9a-f]{32}\.safetensors")
_SHARD_NAME = re.compile(r"[0-9a-f]{2}")
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def object_name(key: str) -> str:
    """Where the object of `key` lies below `objects/`."""
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    return f"{name[:2]}/{name}.safetensors"


def check_key(key: object) -> str:
    """A key as it may be used: any text of 1 to 1,024 bytes of UTF-8."""
    if not isinstance(key, str):
        raise TypeError(f"a key is a str, not {type(key).__name__}: pass text")
    try:
        length = len(key.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"{key!r} cannot be written as UTF-8: use another key") from error
    if not 1 <= length <= MAX_KEY_BYTES:
        raise ValueError(
            f"a key has 1 to {MAX_KEY_BYTES} bytes of UTF-8, this one {length}: use another key"
        )
    return key


# Reading: no lock, no write. tierstore-inspect needs no more than this. -------------------------


@dataclass(frozen=True)
class FoundObject:
    """An object file: what it holds, or the error that says why that cannot be told."""

    path: str
    nbytes: int
    modified: float
    stored: StoredObject | None
    error: TransferError | None = None


def read_header(descriptor: int, path: str) -> tuple[Header, bytes]:
    """Read and validate the safetensors header of an open file."""
    size = os.fstat(descriptor).st_size
    prefix = os.pread(descriptor, LENGTH_BYTES, 0)
    length = header_length(prefix, size, path)
    raw = os.pread(descriptor, length, LENGTH_BYTES)
    if len(raw) != length:
        raise InvalidHeaderError(f"{path} ends inside its header: save it again", path=path)
    return parse_header(raw, size, path), raw


def read_object(path: str, dir_fd: int | None = None, name: str | None = None) -> FoundObject:
    """Look into one object file. Errors of the file are told in the result, not raised.

    Raises FileNotFoundError if it has just vanished.
    """
    descriptor = None
    nbytes, modified = 0, 0.0
    try:
        descriptor = os.open(name or path, _READ, dir_fd=dir_fd)
        status = os.fstat(descriptor)
        nbytes, modified = status.st_size, status.st_mtime
        if not stat.S_ISREG(status.st_mode):
            raise CorruptDataError(f"{path} is no regular file: remove it", path=path)
        header, raw = read_header(descriptor, path)
        stored = decode_object(header, path)
        if not header_is_intact(raw, header):
            raise CorruptDataError(
                f"{path} (key {stored.key!r}) has a header that does not match its checksum: "
                "remove it with tierstore-inspect rm, and put the group again",
                key=stored.key,
                path=path,
                expected=header.metadata.get("tierstore.header_xxh3"),
                found=digest(raw),
            )
        if object_name(stored.key).rpartition("/")[2] != os.path.basename(path):
            raise CorruptDataError(
                f"{path} says it holds key {stored.key!r}, whose file has another name: it was "
                "copied or renamed; remove it",
                key=stored.key,
                path=path,
            )
        return FoundObject(path, nbytes, modified, stored)
    except FileNotFoundError:
        raise
    except OSError as error:
        failed = transfer_error(error, "opening", key=None, path=path)
        return FoundObject(path, nbytes, modified, None, failed)
    except TransferError as error:
        return FoundObject(path, nbytes, modified, None, error)
    finally:
        if descriptor is not None:
            os.close(descriptor)


def find_objects(disk_dir: str | Path) -> Iterator[FoundObject]:
    """Every object file of a directory, in the order of names. Links are not followed."""
    root = os.path.join(disk_dir, OBJECTS)
    for shard in _names(root, None, _SHARD_NAME):
        try:
            shard_fd = os.open(os.path.join(root, shard), _READ | os.O_DIRECTORY)
        except OSError:
            continue
        try:
            for name in _names(root, shard_fd, _OBJECT_NAME):
                try:
                    yield read_object(os.path.join(root, shard, name), shard_fd, name)
                except FileNotFoundError:
                    continue  # replaced or removed while we looked
        finally:
            os.close(shard_fd)


def _names(root: str, descriptor: int | None, pattern: re.Pattern[str]) -> list[str]:
    try:
        names = os.listdir(root if descriptor is None else descriptor)
    except OSError:
        return []
    return sorted(name for name in names if pattern.fullmatch(name))


def read_marker(disk_dir: str | Path) -> dict[str, object] | None:
    """What STORE.json says; None if the directory is no store.

    Raises TierStoreError if it is damaged or of a newer format.
    """
    path = os.path.join(disk_dir, MARKER)
    try:
        descriptor = os.open(path, _READ)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        raw = file.read(65536)
    try:
        marker = json.loads(raw)
        version = marker["format"]
    except (ValueError, TypeError, KeyError) as error:
        raise TierStoreError(f"{path} is damaged: use an empty disk_dir") from error
    if version != STORE_FORMAT:
        raise TierStoreError(
            f"{path} says format {version!r}, this version of tierstore knows {STORE_FORMAT}: "
            "upgrade tierstore, or use another disk_dir"
        )
    return dict(marker)


# Writing: only under the lock. -------------------------------------------------------------------


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
    """

    def __init__(self, disk_dir: str | Path) -> None:
        self.path = os.path.abspath(disk_dir)
        with self._explained("opening", None):
            os.makedirs(self.path, mode=0o700, exist_ok=True)
            read_marker(self.path)
            self._lock = _lock(self.path)
            try:
                self._prepare()
            except BaseException:
                os.close(self._lock)
                raise
        self.damaged: dict[str, TransferError] = {}

    @contextmanager
    def _explained(self, doing: str, key: str | None) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise transfer_error(error, doing, key=key, path=self.path) from error

    def _prepare(self) -> None:
        for name in (OBJECTS, TEMPORARY):
            try:
                os.mkdir(os.path.join(self.path, name), mode=0o700)
            except FileExistsError:
                pass
        self._objects = self._open_directory(OBJECTS)
        self._temporary = self._open_directory(TEMPORARY)
        for name in os.listdir(self._temporary):
            os.unlink(name, dir_fd=self._temporary)
        if read_marker(self.path) is None:
            self._write_marker()
        _sync_directory(self.path)

    def _open_directory(self, name: str) -> int:
        return os.open(os.path.join(self.path, name), _READ | os.O_DIRECTORY)

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
        for found in find_objects(self.path):
            if found.stored is not None:
                intact.append(found.stored)
            elif found.error is not None:
                shard = os.path.basename(os.path.dirname(found.path))
                self.damaged[f"{shard}/{os.path.basename(found.path)}"] = found.error
        return intact

    def path_of(self, key: str) -> str:
        """The path of the object file of `key`."""
        return os.path.join(self.path, OBJECTS, object_name(key))

    def stage(self, key: str, packing: Packing, data: memoryview, *, single: bool) -> Staged:
        """Write a group to a temporary file and sync it. It counts from `commit` on.

        `data` holds the packed group in page-aligned memory. Raises DiskFullError or
        TransferError; nothing has changed then.
        """
        blocks = zip(packing.blocks, packing.offsets, strict=True)
        digests = tuple(digest(data[at : at + block.nbytes]) for block, at in blocks)
        header = build_header(key, packing, digests, {SINGLE: "1"} if single else None)
        temporary = f"object-{os.urandom(8).hex()}"
        stored = StoredObject(key, packing, digests, len(header), single)
        staged = Staged(temporary, stored)
        try:
            with self._explained("writing to", key):
                self._write_file(temporary, header, packing, data)
        except BaseException:
            self.abandon(staged)
            raise
        return staged

    def commit(self, staged: Staged) -> StoredObject:
        """Make a staged group the object of its key: when this returns, it survives a power cut.

        An object of the same key is replaced at once or not at all.
        """
        key = staged.stored.key
        name = object_name(key)
        shard, _, leaf = name.partition("/")
        try:
            with self._explained("writing to", key), self._shard(shard) as descriptor:
                os.rename(
                    staged.temporary, leaf, src_dir_fd=self._temporary, dst_dir_fd=descriptor
                )
                os.fsync(descriptor)
        except BaseException:
            self.abandon(staged)
            raise
        self.damaged.pop(name, None)
        return staged.stored

    def abandon(self, staged: Staged) -> None:
        """Remove a staged group that will not be committed."""
        try:
            os.unlink(staged.temporary, dir_fd=self._temporary)
        except OSError:
            pass  # never made, or renamed already; opening the directory cleans up what remains

    def write(self, key: str, packing: Packing, data: memoryview, *, single: bool) -> StoredObject:
        """Stage and commit."""
        return self.commit(self.stage(key, packing, data, single=single))

    def _write_file(self, name: str, header: bytes, packing: Packing, data: memoryview) -> None:
        descriptor = self._new_file(name)
        try:
            total = len(header) + packing.dense_nbytes
            os.posix_fallocate(descriptor, 0, total)  # so that a full disk is known at once
            straight = _straight_part(packing)
            self._write_directly(name, data[:straight], len(header))
            write_all(descriptor, memoryview(header), 0)
            for block, at, dense in zip(
                packing.blocks, packing.offsets, packing.dense, strict=True
            ):
                done = min(max(straight - dense, 0), block.nbytes)
                part = data[at + done : at + block.nbytes]
                write_all(descriptor, part, len(header) + dense + done)
            # A failed fsync must never be repeated on the same file: the second one would succeed.
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _write_directly(self, name: str, data: memoryview, offset: int) -> None:
        flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            descriptor = os.open(name, flags | os.O_DIRECT, dir_fd=self._temporary)
        except OSError:
            descriptor = os.open(name, flags, dir_fd=self._temporary)
        try:
            write_all(descriptor, data, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            os.close(descriptor)
            descriptor = os.open(name, flags, dir_fd=self._temporary)
            write_all(descriptor, data, offset)
        finally:
            os.close(descriptor)

    @contextmanager
    def _shard(self, shard: str) -> Iterator[int]:
        try:
            os.mkdir(shard, mode=0o700, dir_fd=self._objects)
            os.fsync(self._objects)
        except FileExistsError:
            pass
        descriptor = os.open(shard, _READ | os.O_DIRECTORY, dir_fd=self._objects)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def remove(self, key: str) -> None:
        """Remove the object of `key` for good."""
        shard, _, leaf = object_name(key).partition("/")
        with self._explained("removing from", key), self._shard(shard) as descriptor:
            os.unlink(leaf, dir_fd=descriptor)
            os.fsync(descriptor)

    def close(self) -> None:
        """Give the lock back."""
        for descriptor in (self._objects, self._temporary, self._lock):
            os.close(descriptor)


def _straight_part(packing: Packing) -> int:
    """Bytes at the start that lie in the file as in memory, in whole pages."""
    end = 0
    for block, at, dense in zip(packing.blocks, packing.offsets, packing.dense, strict=True):
        if at != dense:
            break
        end = at + block.nbytes
    return end // PAGE * PAGE


def _sync_directory(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lock(disk_dir: str) -> int:
    flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(os.path.join(disk_dir, LOCK), flags, 0o600)
    if not _try_lock(descriptor):
        owner = describe_owner(descriptor)
        os.close(descriptor)
        raise StoreLockedError(
            f"{disk_dir} is in use by another live store ({owner}): close that one, share it "
            "between pipelines, or choose another disk_dir"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
    return descriptor


def _try_lock(descriptor: int) -> bool:
    """Take the lock, bearing with somebody who only looks whether it is held (`is_locked`)."""
    for _ in range(5):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.02)
    return False


def describe_owner(descriptor: int) -> str:
    """Who wrote the LOCK file, for a message."""
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {int(owner['pid'])} on {str(owner['host'])!r}"
    except (OSError, ValueError, KeyError, TypeError):
        return "an unknown process"


def is_locked(disk_dir: str | Path) -> str | None:
    """Who holds the directory's lock now; None if nobody does. Changes nothing."""
    try:
        descriptor = os.open(os.path.join(disk_dir, LOCK), _READ)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return describe_owner(descriptor)
    finally:
        os.close(descriptor)
