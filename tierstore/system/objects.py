"""Finds and reads object files, without a lock and without writing.

`tierstore-inspect` uses only this. Directory contents are untrusted: links are not
followed, and anything that is not a regular file is detected by its directory entry or its status
before it is opened.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import operator
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tierstore.errors import (
    CorruptDataError,
    InvalidHeaderError,
    TierStoreError,
    TransferError,
)
from tierstore.model.header import LENGTH_BYTES, check_text, header_length
from tierstore.model.header_reader import HeaderReader
from tierstore.model.objects import MAX_KEY_BYTES, StoredObject
from tierstore.model.sizes import PAGE
from tierstore.system.files import close_quietly, read_fully, transfer_error, transfer_errors

STORE_FORMAT = 1
MARKER, LOCK, OBJECTS, TEMPORARY = "STORE.json", "LOCK", "objects", "tmp"
MAX_MARKER_BYTES = 65536
PROCESS_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors that concern the reading process, not the file."""
OBJECT_NAME = re.compile(r"[0-9a-f]{32}\.safetensors")
_FETCHING_THREADS = 8
_AT_ONCE = 16
"""Headers that one thread fetches before it returns them."""
SHARD_NAME = re.compile(r"[0-9a-f]{2}")
READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def object_name(key: str) -> str:
    """Return the path of the object file of `key`, relative to `objects/`."""
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    return f"{name[:2]}/{name}.safetensors"


def check_key(key: object) -> str:
    """Return the key if it is valid: text of 1 to 1,024 bytes of UTF-8. Raises ValueError."""
    text = check_text(key, "a key")
    length = len(text.encode())
    if not 1 <= length <= MAX_KEY_BYTES:
        raise ValueError(
            f"a key has 1 to {MAX_KEY_BYTES} bytes of UTF-8, this one has {length}: use another key"
        )
    return text


# Tuples: creating them takes a quarter of the time, and a directory may have 100,000 of each.


class FoundObject(NamedTuple):
    """An object file: its contents, or the error that prevents reading them."""

    path: str
    stored: StoredObject | None
    error: TransferError | None = None


def _header_bytes(descriptor: int, path: str, size: int, first: bytes) -> bytes:
    """Return the header of an open file of `size` bytes, without its length field.

    `first` has the first bytes of the file, up to a page; they usually contain the whole header.
    """
    length = header_length(first[:LENGTH_BYTES], size, path)
    raw = first[LENGTH_BYTES : LENGTH_BYTES + length]
    if len(raw) < length:
        raw = read_fully(descriptor, length, LENGTH_BYTES)
    if len(raw) != length:
        raise InvalidHeaderError(f"{path} ends inside its header: save it again", path=path)
    return raw


class FetchedHeader(NamedTuple):
    """The raw header of an object file, or the error that prevents reading it.

    `status` is the file's status; None if it could not be opened.
    """

    path: str
    status: os.stat_result | None
    raw: bytes
    error: OSError | TransferError | None = None

    def found(self, reader: HeaderReader) -> FoundObject:
        """Parse the header. Errors of the file are returned in the result, not raised.

        Raises FileNotFoundError if the file has just vanished, and TransferError if this process
        cannot open any file, which says nothing about this one.
        """
        path, error = self.path, self.error
        if error is None:
            try:
                return FoundObject(path, self._stored(reader))
            except TransferError as invalid:
                return FoundObject(path, None, invalid)
        if isinstance(error, TransferError):
            return FoundObject(path, None, error)
        if isinstance(error, FileNotFoundError):
            raise error
        failed = transfer_error(error, "opening", key=None, path=path)
        if error.errno in PROCESS_ERRORS:
            raise failed from error
        return FoundObject(path, None, failed)

    def _stored(self, reader: HeaderReader) -> StoredObject:
        path = self.path
        assert self.status is not None, "a header without an error has a status"
        stored = reader.read(self.raw, self.status.st_size, path)
        if not path.endswith(os.sep + object_name(stored.key)):
            raise CorruptDataError(
                f"{path} has key {stored.key!r}, whose file has another name: it was copied or "
                "renamed; remove it",
                key=stored.key,
                path=path,
            )
        return stored


def fetch_header(path: str, dir_fd: int | None = None, name: str | None = None) -> FetchedHeader:
    """Read the header of one object file. Never raises a system error."""
    name = name or path
    try:
        status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except OSError as error:
        return FetchedHeader(path, None, b"", error)
    if not stat.S_ISREG(status.st_mode):
        return FetchedHeader(path, None, b"", _no_file(path))
    return _fetch(path, dir_fd, name)


_Read = Callable[[int, int, int], bytes]


def _fetch(path: str, dir_fd: int | None, name: str, read: _Read = read_fully) -> FetchedHeader:
    """Read the header of a file that was regular when its entry was read."""
    descriptor = status = None
    try:
        descriptor = os.open(name, READ, dir_fd=dir_fd)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _no_file(path)
        size = status.st_size
        first = read(descriptor, min(PAGE, size), 0)
        return FetchedHeader(path, status, _header_bytes(descriptor, path, size, first))
    except (OSError, TransferError) as error:
        return FetchedHeader(path, status, b"", error)
    finally:
        if descriptor is not None:
            close_quietly(descriptor)


def _no_file(path: str) -> CorruptDataError:
    return CorruptDataError(f"{path} is not a regular file: remove it", path=path)


class _NotCachedError(Exception):
    """A page is not in the page cache, or the system does not report it."""


def _read_cached(descriptor: int, nbytes: int, offset: int) -> bytes:
    """Read as `read_fully` from the page cache alone. Raises _NotCachedError otherwise."""
    buffer = bytearray(nbytes)
    try:
        got = os.preadv(descriptor, [buffer], offset, os.RWF_NOWAIT)
    except OSError as error:
        raise _NotCachedError from error
    return bytes(buffer) if got == nbytes else read_fully(descriptor, nbytes, offset)


def read_object(path: str, dir_fd: int | None = None, name: str | None = None) -> FoundObject:
    """Read one object file's header. Returns and raises as `FetchedHeader.found`."""
    return fetch_header(path, dir_fd, name).found(HeaderReader())


def fetch_headers(
    directory: int, path: str, entries: Iterable[os.DirEntry[str]], pool: ThreadPoolExecutor
) -> Iterator[FetchedHeader]:
    """Yield the headers of `entries` of an open directory that lies at `path`, in order.

    Headers are read on this thread while the page cache has them: more threads would only contend
    for the interpreter's lock. The pool fetches the first header that is not cached and all later
    ones, which keeps several requests in flight.
    """
    left = iter(entries)
    for entry in left:
        try:
            fetched = _fetch_entry(directory, path, entry, _read_cached)
        except _NotCachedError:
            yield from _fetch_at_once(directory, path, [entry, *left], pool)
            return
        yield fetched


def _fetch_entry(
    directory: int, path: str, entry: os.DirEntry[str], read: _Read = read_fully
) -> FetchedHeader:
    name = entry.name
    path = f"{path}/{name}"
    if is_regular(entry):
        return _fetch(path, directory, name, read)
    return fetch_header(path, directory, name)


def is_regular(entry: os.DirEntry[str]) -> bool:
    """Return whether a directory entry is a regular file. False if unknown; never raises."""
    try:
        return entry.is_file(follow_symlinks=False)
    except OSError:  # some file systems report the type only in the status
        return False


def _fetch_at_once(
    directory: int, path: str, entries: Sequence[os.DirEntry[str]], pool: ThreadPoolExecutor
) -> Iterator[FetchedHeader]:
    def fetch(part: Sequence[os.DirEntry[str]]) -> list[FetchedHeader]:
        return [_fetch_entry(directory, path, entry) for entry in part]

    if len(entries) <= _AT_ONCE:
        yield from fetch(entries)
        return
    parts = [entries[i : i + _AT_ONCE] for i in range(0, len(entries), _AT_ONCE)]
    for fetched in pool.map(fetch, parts):
        yield from fetched


def header_threads() -> ThreadPoolExecutor:
    """Return a pool for `fetch_headers`, whose threads start on demand."""
    return ThreadPoolExecutor(_FETCHING_THREADS, "tierstore-headers")


def read_valid_object(path: str) -> StoredObject:
    """Return the contents of one object file. Raises the error found in it."""
    found = read_object(path)
    if found.stored is None:
        raise found.error or CorruptDataError(f"{path} cannot be read: remove it", path=path)
    return found.stored


def find_objects(disk_dir: str | Path) -> Iterator[FoundObject]:
    """Yield every object file of a directory, in the order of names. Links are not followed.

    Raises TransferError if a part of it cannot be listed: existing objects must not seem to be
    missing.
    """
    root = os.path.join(disk_dir, OBJECTS)
    reader = HeaderReader()
    with header_threads() as pool, _listed(root, SHARD_NAME) as (shards, _):
        for shard in shards:
            path = os.path.join(root, shard.name)
            with _listed(path, OBJECT_NAME) as (objects, directory):
                for fetched in fetch_headers(directory, path, objects, pool):
                    with contextlib.suppress(FileNotFoundError):  # replaced or removed meanwhile
                        yield fetched.found(reader)


def entries_of(directory: int) -> list[os.DirEntry[str]]:
    """List the entries of an open directory in the order of names. Raises OSError."""
    with os.scandir(directory) as entries:
        return sorted(entries, key=operator.attrgetter("name"))


@contextlib.contextmanager
def _listed(path: str, pattern: re.Pattern[str]) -> Iterator[tuple[list[os.DirEntry[str]], int]]:
    """Yield the matching entries of a directory, in the order of names, and its descriptor.

    The descriptor is open inside the block. Yields no entries if the path is not a directory, or a
    link to one. Raises TransferError.
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
            entries = entries_of(directory)
        yield [entry for entry in entries if pattern.fullmatch(entry.name)], directory
    finally:
        close_quietly(directory)


def read_marker(disk_dir: str | Path) -> dict[str, object] | None:
    """Return the contents of STORE.json; None if the directory is not a store.

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
            f"{path} has format {version!r:.100}{needs}, but this version of tierstore reads "
            f"format {STORE_FORMAT}: upgrade tierstore, or use another disk_dir"
        )
    return dict(marker)
