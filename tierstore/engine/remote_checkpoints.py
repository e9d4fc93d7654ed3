"""Read the headers of checkpoints in an object store, with range requests.

Some object stores cannot list a directory (`https://`). There, the usual names of checkpoint files
are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from tierstore.engine.checkpoint_file import CheckpointFile
from tierstore.errors import InvalidHeaderError, TransferError
from tierstore.model.groups import Extent, FileTensor
from tierstore.model.header import LENGTH_BYTES, Header, header_length, parse_header, shown
from tierstore.model.weight_files import (
    INDEX_SUFFIX,
    MAX_INDEX_BYTES,
    SUFFIX,
    USUAL_NAMES,
)
from tierstore.progress import bar
from tierstore.tiers.object_store import RemoteDirectory, RemoteObject, split

FIRST_READ = 256 << 10
"""Bytes of the first read of a file. Most headers fit."""
HEADERS_AT_ONCE = 8


def remote_checkpoint(url: str, shards: Callable[[bytes, str], list[str]]) -> list[CheckpointFile]:
    """Return the files of the checkpoint at a URL with all their tensors.

    `shards` returns the file names in an index, given its content and URL. Raises TransferError or
    InvalidHeaderError.
    """
    objects = list(_objects_of(url, shards))
    with ThreadPoolExecutor(HEADERS_AT_ONCE) as pool:
        return list(bar(pool.map(_read_file, objects), f"Reading headers of {url}", "files"))


def _objects_of(url: str, shards: Callable[[bytes, str], list[str]]) -> Iterator[RemoteObject]:
    if url.endswith((SUFFIX, ".json")):
        parent, name = split(url)
        directory = RemoteDirectory(parent)
        yield from _named(directory, [name], shards)
        return
    directory = RemoteDirectory(url)
    names = directory.names()
    if names is None:
        tried = [name + suffix for suffix in (INDEX_SUFFIX, SUFFIX) for name in USUAL_NAMES]
        names = next(([name] for name in tried if directory.find(name) is not None), [])
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    if len(indexes) > 1:
        raise ValueError(f"{url} has {len(indexes)} index files: pass the URL of one of them")
    files = indexes or [name for name in names if name.endswith(SUFFIX)]
    if not files:
        raise TransferError(
            f"{url} has no safetensors checkpoint: pass the URL of a .safetensors file, of an "
            "index, or of their common prefix",
            path=url,
        )
    yield from _named(directory, files, shards)


def _named(
    directory: RemoteDirectory, names: Iterable[str], shards: Callable[[bytes, str], list[str]]
) -> Iterator[RemoteObject]:
    """Yield the objects with these names; for an index, yield the objects that it lists."""
    for name in names:
        found = _find(directory, name)
        if not name.endswith(".json"):
            yield found
            continue
        listed = shards(_content(found), found.url)
        for shard in listed:
            if not shard.endswith(SUFFIX):  # another index could lead to endless recursion
                raise InvalidHeaderError(
                    f"{found.url}: the index names {shown(shard)}, which is not a {SUFFIX} file; "
                    "upload it again",
                    path=found.url,
                )
        yield from (_find(directory, shard) for shard in listed)


def _find(directory: RemoteDirectory, name: str) -> RemoteObject:
    found = directory.find(name)
    if found is None:
        raise TransferError(
            f"{directory.url}/{name} does not exist: check the URL, or upload the file",
            path=f"{directory.url}/{name}",
        )
    return found


def _content(index: RemoteObject) -> bytes:
    """Return the content of an index. Raises InvalidHeaderError if it is too large."""
    nbytes = index.stamp.size
    if nbytes > MAX_INDEX_BYTES:
        raise InvalidHeaderError(
            f"{index.url} has {nbytes:,} bytes, but an index has at most {MAX_INDEX_BYTES:,}: "
            "check the URL, or upload it again",
            path=index.url,
        )
    return bytes(index.read(0, nbytes))


def _read_file(found: RemoteObject) -> CheckpointFile:
    size, url = found.stamp.size, found.url
    if size < LENGTH_BYTES:
        header_length(b"", size, url)
    first = bytes(found.read(0, min(FIRST_READ, size)))
    length = header_length(first[:LENGTH_BYTES], size, url)
    end = LENGTH_BYTES + length
    if len(first) < end:
        first += bytes(found.read(len(first), end))
    header = parse_header(first[LENGTH_BYTES:end], size, url)
    tensors = _tensors(url, header)
    return CheckpointFile(url, found.stamp, header.digest, tensors, header.metadata, found)


def _tensors(url: str, header: Header) -> tuple[FileTensor, ...]:
    return tuple(
        FileTensor(
            e.name, e.dtype, e.shape, Extent(url, header.data_start + e.begin, e.end - e.begin)
        )
        for e in header.entries
    )
