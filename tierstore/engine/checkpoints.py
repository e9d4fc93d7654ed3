"""Safetensors checkpoints by reference: their headers, and the files that belong together.

A checkpoint is one `.safetensors` file, or a directory with one, with several, or with an
`*.index.json` that says which shard holds which tensor, or such an index, whatever its name.
Nothing is copied: what comes back are the tensors' places in the files. All of it may lie in an
object store, by its URL: see `tierstore.engine.remote_checkpoints`.
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
    """The files of the checkpoint at `path` with all their tensors.

    Raises TransferError if a file cannot be read, InvalidHeaderError if a header or the index is
    malformed, ValueError if two files hold a tensor of the same name.
    """
    if is_url(path):
        return _without_repeats(remote_checkpoint(path, indexed))
    return _without_repeats([read_file(name) for name in _with_bar(path)])


async def aread_checkpoint(path: str | os.PathLike[str]) -> list[CheckpointFile]:
    """`read_checkpoint` for coroutines: no file access on the event loop's thread."""
    if is_url(path):
        return await asyncio.to_thread(read_checkpoint, path)
    return _without_repeats([await aread_file(name) for name in _with_bar(path)])


def _with_bar(path: str | os.PathLike[str]) -> Iterable[str]:
    return bar(checkpoint_files(path), "Reading headers", "files")


def checkpoint_files(path: str | os.PathLike[str]) -> list[str]:
    """The safetensors files of a checkpoint: absolute paths, links resolved.

    Raises TransferError if it has none, or if that cannot be told.
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
        if "safetensors" not in place.name:  # it may be of torch pickles
            names = names if all(name.suffix == ".safetensors" for name in names) else []
    else:
        indexes = [i for i in sorted(place.glob("*.index.json")) if "safetensors" in i.name]
        if len(indexes) > 1:
            raise ValueError(f"{place} has {len(indexes)} index files: pass the one that is meant")
        names = _indexed(indexes[0]) if indexes else sorted(place.glob("*.safetensors"))
    if not names:
        raise TransferError(
            f"{place} has no safetensors checkpoint: pass a .safetensors file or a directory "
            "with one (torch pickles are not supported: convert them with safetensors)",
            path=str(place),
        )
    return [os.path.realpath(name) for name in names]


def _indexed(index: Path) -> list[Path]:
    def refuse(why: str) -> NoReturn:
        raise InvalidHeaderError(f"{index}: {why}; download or save it again", path=str(index))

    try:
        with open(index, "rb", opener=_open_at_once) as file:
            if _regular(file.fileno(), str(index)).st_size > MAX_INDEX_BYTES:
                refuse("the index is too large to be one")
            raw = file.read(MAX_INDEX_BYTES)
    except OSError as error:
        raise transfer_error(error, "reading", key=None, path=str(index)) from error
    return [index.parent / name for name in indexed(raw, str(index))]


def indexed(raw: bytes, path: str) -> list[str]:
    """The names of the files that an index (its bytes, and where it lies) lists, sorted.

    Raises InvalidHeaderError.
    """

    def refuse(why: str) -> NoReturn:
        raise InvalidHeaderError(f"{path}: {why}; download or save it again", path=path)

    if len(raw) > MAX_INDEX_BYTES:
        refuse("the index is too large to be one")
    scanner = Scanner(raw, lambda why: refuse(f"the index is malformed: {why}"))
    names = _shards(scanner, refuse)
    scanner.end()
    if names is None:
        refuse("the index is malformed: it has no weight_map")
    if not all(map(_is_file_name, names)):
        refuse("the index names files outside its directory")
    return sorted(names)


def _shards(scanner: Scanner, refuse: Callable[[str], NoReturn]) -> set[str] | None:
    """The files that an index names, in its `weight_map` or by being the map itself."""
    names: set[str] | None = None
    bare: set[str] | None = set()
    for member in scanner.members(MAX_INDEXED):
        if member == "weight_map":
            names = set()
            for _ in scanner.members(MAX_INDEXED):
                _add(names, scanner, refuse)
        elif bare is not None and scanner.sees(b'"'):
            _add(bare, scanner, refuse)
        else:
            bare = None
            scanner.skip()
    return (bare or None) if names is None else names


def _add(names: set[str], scanner: Scanner, refuse: Callable[[str], NoReturn]) -> None:
    names.add(scanner.text())
    if len(names) > MAX_SHARDS:
        refuse(f"the index names more than {MAX_SHARDS} files")


def _is_file_name(name: str) -> bool:
    return name not in ("", ".", "..") and "\0" not in name and os.path.basename(name) == name


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe in its place shall keep nobody waiting


def _regular(descriptor: int, path: str) -> os.stat_result:
    """The status of an open file, if it is a regular one."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise TransferError(f"{path} is no regular file: pass a checkpoint", path=path)
    return status


def read_file(path: str) -> CheckpointFile:
    """One safetensors file, its header validated."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            stamp = FileStamp.of(_regular(file.fileno(), path))
            length = header_length(file.read(LENGTH_BYTES), stamp.size, path)
            raw = file.read(length)
    except OSError as error:
        raise transfer_error(error, "reading", key=None, path=path) from error
    return _checkpoint_file(path, stamp, parse_header(raw, stamp.size, path))


async def aread_file(path: str) -> CheckpointFile:
    """`read_file` for coroutines."""
    try:
        async with aiofiles.open(path, "rb", opener=_open_at_once) as file:
            stamp = FileStamp.of(_regular(file.fileno(), path))
            length = header_length(await file.read(LENGTH_BYTES), stamp.size, path)
            raw = await file.read(length)
    except OSError as error:
        raise transfer_error(error, "reading", key=None, path=path) from error
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


def _without_repeats(files: list[CheckpointFile]) -> list[CheckpointFile]:
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
