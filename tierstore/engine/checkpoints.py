"""Read the headers of safetensors checkpoints.

A checkpoint is a `.safetensors` file; a directory with one or several of them, or with an
`*.index.json` that maps tensors to shards; or such an index, under any name. No tensor is read or
copied: the result is the location of each tensor in the files. A checkpoint may also be in an
object store, given by its URL: see `tierstore.engine.remote_checkpoints`.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

import aiofiles

from tierstore.engine.checkpoint_file import CheckpointFile as CheckpointFile
from tierstore.engine.remote_checkpoints import remote_checkpoint
from tierstore.errors import InvalidHeaderError, TransferError
from tierstore.model.groups import Extent, FileTensor
from tierstore.model.header import LENGTH_BYTES, Header, header_length, parse_header
from tierstore.model.scanning import Scanner
from tierstore.model.weight_files import MAX_INDEX_BYTES
from tierstore.progress import bar
from tierstore.system.files import FileStamp, transfer_error
from tierstore.tiers.object_store import is_url as is_url

MAX_INDEXED = 400_000
MAX_SHARDS = 10_000


def read_checkpoint(path: str | os.PathLike[str]) -> list[CheckpointFile]:
    """Return the files of the checkpoint at `path` with all their tensors.

    Raises TransferError if a file cannot be read, InvalidHeaderError if a header or the index is
    malformed, ValueError if two files have a tensor of the same name.
    """
    if is_url(path):
        return _check_unique_names(remote_checkpoint(path, indexed))
    return _check_unique_names([read_file(name) for name in _with_bar(path)])


async def aread_checkpoint(path: str | os.PathLike[str]) -> list[CheckpointFile]:
    """Async `read_checkpoint`. Never accesses files on the event loop's thread."""
    if is_url(path):
        return await asyncio.to_thread(read_checkpoint, path)
    return _check_unique_names([await aread_file(name) for name in _with_bar(path)])


def _with_bar(path: str | os.PathLike[str]) -> Iterable[str]:
    return bar(checkpoint_files(path), "Reading headers", "files")


def checkpoint_files(path: str | os.PathLike[str]) -> list[str]:
    """Return the safetensors files of a checkpoint: absolute paths, links resolved.

    Raises TransferError if there are none, or if the directory cannot be read.
    """
    try:
        return _files_of(Path(path))
    except OSError as error:
        raise transfer_error(error, "reading", key=None, path=os.fspath(path)) from error


def _files_of(place: Path) -> list[str]:
    if place.is_file():
        if place.suffix != ".json":
            return [os.path.realpath(place)]
        names = _indexed(place)
        if "safetensors" not in place.name:  # it may list torch pickles
            names = names if all(name.suffix == ".safetensors" for name in names) else []
    else:
        indexes = [i for i in sorted(place.glob("*.index.json")) if "safetensors" in i.name]
        if len(indexes) > 1:
            raise ValueError(
                f"{place} has {len(indexes)} index files: pass the path of one of them"
            )
        names = _indexed(indexes[0]) if indexes else sorted(place.glob("*.safetensors"))
    if not names:
        if not place.exists():
            raise TransferError(
                f"there is no file or directory {place}: pass the path of a safetensors "
                "checkpoint, or its URL",
                path=str(place),
            )
        raise TransferError(
            f"{place} has no safetensors checkpoint: pass a .safetensors file or a directory "
            "with one (torch pickles are not supported: convert them with safetensors)",
            path=str(place),
        )
    return [os.path.realpath(name) for name in names]


def _indexed(index: Path) -> list[Path]:
    def fail(reason: str) -> NoReturn:
        raise InvalidHeaderError(f"{index}: {reason}; download or save it again", path=str(index))

    try:
        with open(index, "rb", opener=_open_nonblocking) as file:
            if _stat_regular(file.fileno(), str(index)).st_size > MAX_INDEX_BYTES:
                fail("the index is too large to be one")
            raw = file.read(MAX_INDEX_BYTES)
    except OSError as error:
        raise transfer_error(error, "reading", key=None, path=str(index)) from error
    return [index.parent / name for name in indexed(raw, str(index))]


def indexed(raw: bytes, path: str) -> list[str]:
    """Return the sorted names of the files that an index lists.

    `raw` is its content, and `path` its location, for errors. Raises InvalidHeaderError.
    """

    def fail(reason: str) -> NoReturn:
        raise InvalidHeaderError(f"{path}: {reason}; download or save it again", path=path)

    if len(raw) > MAX_INDEX_BYTES:
        fail("the index is too large to be one")
    scanner = Scanner(raw, lambda reason: fail(f"the index is malformed: {reason}"))
    names = _shards(scanner, fail)
    scanner.end()
    if names is None:
        fail("the index is malformed: it has no weight_map")
    if not all(map(_is_file_name, names)):
        fail("the index names files outside its directory")
    return sorted(names)


def _shards(scanner: Scanner, fail: Callable[[str], NoReturn]) -> set[str] | None:
    """Return the files that an index names, in its `weight_map` or at its top level."""
    names: set[str] | None = None
    bare: set[str] | None = set()
    for member in scanner.members(MAX_INDEXED):
        if member == "weight_map":
            names = set()
            for _ in scanner.members(MAX_INDEXED):
                _add(names, scanner, fail)
        elif bare is not None and scanner.peek(b'"'):
            _add(bare, scanner, fail)
        else:
            bare = None
            scanner.skip()
    return (bare or None) if names is None else names


def _add(names: set[str], scanner: Scanner, fail: Callable[[str], NoReturn]) -> None:
    names.add(scanner.text())
    if len(names) > MAX_SHARDS:
        fail(f"the index names more than {MAX_SHARDS} files")


def _is_file_name(name: str) -> bool:
    return name not in ("", ".", "..") and "\0" not in name and os.path.basename(name) == name


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # opening a pipe must not block


def _stat_regular(descriptor: int, path: str) -> os.stat_result:
    """Return the status of an open file. Raises TransferError if it is not a regular file."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise TransferError(f"{path} is not a regular file: pass a checkpoint", path=path)
    return status


def _read_error(error: OSError, path: str) -> TransferError:
    if isinstance(error, FileNotFoundError):
        return TransferError(
            f"there is no file {path}, which the checkpoint needs: download or save it again",
            path=path,
        )
    return transfer_error(error, "reading", key=None, path=path)


def read_file(path: str) -> CheckpointFile:
    """Read and validate the header of one safetensors file."""
    try:
        with open(path, "rb", opener=_open_nonblocking) as file:
            stamp = FileStamp.of(_stat_regular(file.fileno(), path))
            length = header_length(file.read(LENGTH_BYTES), stamp.size, path)
            raw = file.read(length)
    except OSError as error:
        raise _read_error(error, path) from error
    return _checkpoint_file(path, stamp, parse_header(raw, stamp.size, path))


async def aread_file(path: str) -> CheckpointFile:
    """Async `read_file`."""
    try:
        async with aiofiles.open(path, "rb", opener=_open_nonblocking) as file:
            stamp = FileStamp.of(_stat_regular(file.fileno(), path))
            length = header_length(await file.read(LENGTH_BYTES), stamp.size, path)
            raw = await file.read(length)
    except OSError as error:
        raise _read_error(error, path) from error
    return _checkpoint_file(path, stamp, parse_header(raw, stamp.size, path))


def _checkpoint_file(path: str, stamp: FileStamp, header: Header) -> CheckpointFile:
    tensors = tuple(
        FileTensor(
            entry.name,
            entry.dtype,
            entry.shape,
            Extent(path, header.data_start + entry.begin, entry.end - entry.begin),
        )
        for entry in header.entries
    )
    return CheckpointFile(path, stamp, header.digest, tensors, header.metadata)


def _check_unique_names(files: list[CheckpointFile]) -> list[CheckpointFile]:
    seen: dict[str, str] = {}
    for file in files:
        for tensor in file.tensors:
            if tensor.name in seen:
                raise ValueError(
                    f"{seen[tensor.name]} and {file.path} both have a tensor {tensor.name!r}: "
                    "register them one by one, under different prefixes"
                )
            seen[tensor.name] = file.path
    return files
