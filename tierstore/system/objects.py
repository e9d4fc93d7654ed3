"""Finding and reading object files: no lock, no write. `tierstore-inspect` needs no more than this.

Nothing that lies in a directory is trusted: links are not followed, and whatever is no regular file
is told from its status before it is opened.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tierstore.model.errors import (
    CorruptDataError,
    InvalidHeaderError,
    TierStoreError,
    TransferError,
)
from tierstore.model.header import (
    HEADER_SUM,
    LENGTH_BYTES,
    check_text,
    digest,
    header_is_intact,
    header_length,
    parse_header,
)
from tierstore.model.objects import MAX_KEY_BYTES, StoredObject, decode_object
from tierstore.model.sizes import PAGE
from tierstore.system.files import close_quietly, read_fully, transfer_error, transfer_errors

STORE_FORMAT = 1
MARKER, LOCK, OBJECTS, TEMPORARY = "STORE.json", "LOCK", "objects", "tmp"
MAX_MARKER_BYTES = 65536
OF_THE_PROCESS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of whoever looks, not of what is looked at."""
OBJECT_NAME = re.compile(r"[0-9a-f]{32}\.safetensors")
_FETCHING_THREADS = 8
_AT_ONCE = 16
"""Headers that one thread fetches before it says so."""

SHARD_NAME = re.compile(r"[0-9a-f]{2}")
READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def object_name(key: str) -> str:
    """Where the object of `key` lies below `objects/`."""
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    return f"{name[:2]}/{name}.safetensors"


def check_key(key: object) -> str:
    """A key as it may be used: any text of 1 to 1,024 bytes of UTF-8."""
    text = check_text(key, "a key")
    length = len(text.encode())
    if not 1 <= length <= MAX_KEY_BYTES:
        raise ValueError(
            f"a key has 1 to {MAX_KEY_BYTES} bytes of UTF-8, this one {length}: use another key"
        )
    return text


@dataclass(frozen=True)
class FoundObject:
    """An object file: what it holds, or the error that says why that cannot be told."""

    path: str
    nbytes: int
    modified: float
    stored: StoredObject | None
    error: TransferError | None = None


def _header_bytes(descriptor: int, path: str, size: int) -> bytes:
    """The header of an open file of `size` bytes, without its length: as a rule, in one read."""
    first = read_fully(descriptor, min(PAGE, size), 0)
    length = header_length(first[:LENGTH_BYTES], size, path)
    raw = first[LENGTH_BYTES : LENGTH_BYTES + length]
    if len(raw) < length:
        raw = read_fully(descriptor, length, LENGTH_BYTES)
    if len(raw) != length:
        raise InvalidHeaderError(f"{path} ends inside its header: save it again", path=path)
    return raw


@dataclass(frozen=True, slots=True)
class FetchedHeader:
    """The header of an object file as it lies there, or why it could not be read."""

    path: str
    nbytes: int
    modified: float
    raw: bytes
    error: OSError | TransferError | None = None

    def found(self) -> FoundObject:
        """What the object file holds. Errors of the file are told in the result, not raised.

        Raises FileNotFoundError if it has just vanished, and TransferError if this process could
        not look into any file: that says nothing about this one.
        """
        path = self.path
        try:
            if self.error is not None:
                raise self.error
            return FoundObject(path, self.nbytes, self.modified, self._stored())
        except FileNotFoundError:
            raise
        except OSError as error:
            failed = transfer_error(error, "opening", key=None, path=path)
            if error.errno in OF_THE_PROCESS:
                raise failed from error
            return FoundObject(path, self.nbytes, self.modified, None, failed)
        except TransferError as error:
            return FoundObject(path, self.nbytes, self.modified, None, error)

    def _stored(self) -> StoredObject:
        path = self.path
        header = parse_header(self.raw, self.nbytes, path)
        stored = decode_object(header, path)
        if not header_is_intact(self.raw, header):
            raise CorruptDataError(
                f"{path} (key {stored.key!r}) has a header that does not match its checksum: "
                "remove it with tierstore-inspect rm, and put the group again",
                key=stored.key,
                path=path,
                expected=header.metadata.get(HEADER_SUM),
                found=digest(self.raw),
            )
        if not path.endswith(os.sep + object_name(stored.key)):
            raise CorruptDataError(
                f"{path} says it has key {stored.key!r}, whose file has another name: it was "
                "copied or renamed; remove it",
                key=stored.key,
                path=path,
            )
        return stored


def fetch_header(path: str, dir_fd: int | None = None, name: str | None = None) -> FetchedHeader:
    """Read the header of one object file. Never raises an error of the system."""
    descriptor = None
    nbytes, modified = 0, 0.0
    try:
        descriptor = _descriptor(path, dir_fd, name)
        status = os.fstat(descriptor)
        nbytes, modified = status.st_size, status.st_mtime
        return FetchedHeader(path, nbytes, modified, _header_bytes(descriptor, path, nbytes))
    except (OSError, TransferError) as error:
        return FetchedHeader(path, nbytes, modified, b"", error)
    finally:
        if descriptor is not None:
            close_quietly(descriptor)


def _descriptor(path: str, dir_fd: int | None, name: str | None) -> int:
    """The object file, opened if it is a regular one."""
    status = os.stat(name or path, dir_fd=dir_fd, follow_symlinks=False)
    if not stat.S_ISREG(status.st_mode):
        raise CorruptDataError(f"{path} is no regular file: remove it", path=path)
    return os.open(name or path, READ, dir_fd=dir_fd)


def read_object(path: str, dir_fd: int | None = None, name: str | None = None) -> FoundObject:
    """Look into one object file. Returns and raises what `FetchedHeader.found` does."""
    return fetch_header(path, dir_fd, name).found()


def fetch_headers(
    directory: int, path: str, names: Sequence[str], pool: ThreadPoolExecutor
) -> Iterator[FetchedHeader]:
    """The headers of files in an open directory that lies at `path`, in the order of `names`.

    The disk has many requests at once: the time is that of a header only where all are in the page
    cache.
    """

    def fetch(part: Sequence[str]) -> list[FetchedHeader]:
        return [fetch_header(f"{path}/{name}", directory, name) for name in part]

    if len(names) <= _AT_ONCE:
        yield from fetch(names)
        return
    parts = [names[i : i + _AT_ONCE] for i in range(0, len(names), _AT_ONCE)]
    for fetched in pool.map(fetch, parts):
        yield from fetched


def fetching() -> ThreadPoolExecutor:
    """Threads for `fetch_headers`; those that are needed start when they are."""
    return ThreadPoolExecutor(_FETCHING_THREADS, "tierstore-headers")


def intact_object(path: str) -> StoredObject:
    """What one object file holds. Raises the error that was found in it."""
    found = read_object(path)
    if found.stored is None:
        raise found.error or CorruptDataError(f"{path} cannot be read: remove it", path=path)
    return found.stored


def find_objects(disk_dir: str | Path) -> Iterator[FoundObject]:
    """Every object file of a directory, in the order of names. Links are not followed.

    Raises TransferError if a part of it cannot be listed: what is there must not seem to be gone.
    """
    root = os.path.join(disk_dir, OBJECTS)
    with fetching() as pool, _listed(root, SHARD_NAME) as (shards, _):
        for shard in shards:
            path = os.path.join(root, shard)
            with _listed(path, OBJECT_NAME) as (names, directory):
                for fetched in fetch_headers(directory, path, names, pool):
                    with contextlib.suppress(FileNotFoundError):  # replaced or removed meanwhile
                        yield fetched.found()


@contextlib.contextmanager
def _listed(path: str, pattern: re.Pattern[str]) -> Iterator[tuple[list[str], int]]:
    """The names in a directory, in order, and the directory, which is open inside.

    No names if it is none, or a link to one. Raises TransferError.
    """
    try:
        directory = os.open(path, READ | os.O_DIRECTORY)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise transfer_error(error, "listing", key=None, path=path) from error
        yield [], -1
        return
    try:
        with transfer_errors("listing", path=path):
            names = sorted(filter(pattern.fullmatch, os.listdir(directory)))
        yield names, directory
    finally:
        close_quietly(directory)


def read_marker(disk_dir: str | Path) -> dict[str, object] | None:
    """What STORE.json says; None if the directory is no store.

    Raises TierStoreError if it is damaged or of a newer format.
    """
    path = os.path.join(disk_dir, MARKER)
    try:
        descriptor = os.open(path, READ)
    except FileNotFoundError:
        return None
    try:
        raw = read_fully(descriptor, MAX_MARKER_BYTES, 0)
    finally:
        close_quietly(descriptor)
    try:
        marker = json.loads(raw)
        version, requires = marker["format"], marker.get("requires", [])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise TierStoreError(f"{path} is damaged: use an empty disk_dir") from error
    if type(version) is not int or version != STORE_FORMAT or requires != []:
        needs = f" and needs {requires!r:.100}" if requires != [] else ""
        raise TierStoreError(
            f"{path} says format {version!r:.100}{needs}, this version of tierstore knows format "
            f"{STORE_FORMAT}: upgrade tierstore, or use another disk_dir"
        )
    return dict(marker)
