"""Finding and reading object files: no lock, no write. `tierstore-inspect` needs no more than this.

Nothing that lies in a directory is trusted: links are not followed, and whatever is no regular file
is told from its status before it is opened.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
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
    Header,
    check_text,
    digest,
    header_is_intact,
    header_length,
    parse_header,
)
from tierstore.model.objects import StoredObject, decode_object
from tierstore.transfer.disk import transfer_error

STORE_FORMAT = 1
MARKER, LOCK, OBJECTS, TEMPORARY = "STORE.json", "LOCK", "objects", "tmp"
MAX_KEY_BYTES = 1024
OBJECT_NAME = re.compile(r"[0-9a-f]{32}\.safetensors")
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
        status = os.stat(name or path, dir_fd=dir_fd, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            raise CorruptDataError(f"{path} is no regular file: remove it", path=path)
        descriptor = os.open(name or path, READ, dir_fd=dir_fd)
        status = os.fstat(descriptor)
        nbytes, modified = status.st_size, status.st_mtime
        header, raw = read_header(descriptor, path)
        stored = decode_object(header, path)
        if not header_is_intact(raw, header):
            raise CorruptDataError(
                f"{path} (key {stored.key!r}) has a header that does not match its checksum: "
                "remove it with tierstore-inspect rm, and put the group again",
                key=stored.key,
                path=path,
                expected=header.metadata.get(HEADER_SUM),
                found=digest(raw),
            )
        if os.path.join(*Path(path).parts[-2:]) != object_name(stored.key):
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


def intact_object(path: str) -> StoredObject:
    """What one object file holds. Raises the error that was found in it."""
    found = read_object(path)
    if found.stored is None:
        raise found.error or CorruptDataError(f"{path} cannot be read: remove it", path=path)
    return found.stored


def find_objects(disk_dir: str | Path) -> Iterator[FoundObject]:
    """Every object file of a directory, in the order of names. Links are not followed."""
    root = os.path.join(disk_dir, OBJECTS)
    for shard in _names(root, None, SHARD_NAME):
        directory = _open_directory(shard, root)
        if directory is None:
            continue
        try:
            for name in _names(shard, directory, OBJECT_NAME):
                try:
                    yield read_object(os.path.join(root, shard, name), directory, name)
                except FileNotFoundError:
                    continue  # replaced or removed while we looked
        finally:
            os.close(directory)


def _names(name: str, directory: int | None, pattern: re.Pattern[str]) -> list[str]:
    opened = _open_directory(name, None) if directory is None else directory
    if opened is None:
        return []
    try:
        return sorted(found for found in os.listdir(opened) if pattern.fullmatch(found))
    finally:
        if directory is None:
            os.close(opened)


def _open_directory(name: str, parent: str | None) -> int | None:
    """A directory, not followed through a link; None if it is none or cannot be opened."""
    try:
        path = name if parent is None else os.path.join(parent, name)
        return os.open(path, READ | os.O_DIRECTORY)
    except OSError:
        return None


def read_marker(disk_dir: str | Path) -> dict[str, object] | None:
    """What STORE.json says; None if the directory is no store.

    Raises TierStoreError if it is damaged or of a newer format.
    """
    path = os.path.join(disk_dir, MARKER)
    try:
        descriptor = os.open(path, READ)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        raw = file.read(65536)
    try:
        marker = json.loads(raw)
        version = marker["format"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise TierStoreError(f"{path} is damaged: use an empty disk_dir") from error
    if version != STORE_FORMAT:
        raise TierStoreError(
            f"{path} says format {version!r}, this version of tierstore knows {STORE_FORMAT}: "
            "upgrade tierstore, or use another disk_dir"
        )
    return dict(marker)
