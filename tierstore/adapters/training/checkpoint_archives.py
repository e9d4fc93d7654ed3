"""Archives of `torch.save`, read only if they take no more than they have bytes.

Such an archive is a zip file of a pickle and of storages. torch reads records that are deflated,
and storages that are shorter than the pickle says, without looking: here both are refused, and the
pickle is looked at as a description first (see `checkpoint_pickles`).
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from typing import IO, Any

import torch

from tierstore.adapters.training.checkpoint_pickles import (
    FREE,
    MAX_PICKLE_BYTES,
    NODES_EACH,
    Made,
    Named,
    Stored,
    UnpicklingError,
    containers,
    described,
)
from tierstore.torch_private import dtypes_of_storages

ARCHIVE = b"PK\x03\x04"
_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_MANY = 0xFFFFFFFF
_EXPANDED = 1 << 20
"""Elements of which a tensor may show more than its storage has: those of a small one, expanded."""


@dataclass(frozen=True, slots=True)
class _Record:
    offset: int
    nbytes: int


def loaded_value(source: Any) -> Any:
    """What `torch.save` has written, on the CPU. Raises whatever comes for anything else."""
    if source.read(len(ARCHIVE)) != ARCHIVE:
        raise ValueError("it is no archive of torch.save")
    check_archive(source)
    source.seek(0)
    return torch.load(source, map_location="cpu", weights_only=True)


def check_archive(source: IO[bytes]) -> None:
    """See that a value of `torch.save` takes no more to load than it has bytes.

    Raises UnpicklingError otherwise, and for what `torch.save` does not write.
    """
    try:
        records = _records(source)
        prefix = next(iter(records), "").partition("/")[0]
        raw = _content(source, records[f"{prefix}/data.pkl"])
    except (struct.error, KeyError, UnicodeDecodeError) as error:
        raise UnpicklingError(f"it is no archive of torch.save: {error!r:.100}") from error
    root = described(raw)
    for node in containers(root, FREE + NODES_EACH * len(raw)):
        if type(node) is Stored:
            _elements(node, records, prefix)
        elif type(node) is Made:
            _check_call(node, records, prefix)


def _check_call(call: Made, records: dict[str, _Record], prefix: str) -> None:
    arguments = call.arguments
    if type(arguments) is not tuple or not arguments:
        return
    if type(call.function) is Named and call.function.name.endswith(".bytearray"):
        if type(arguments[0]) is int:
            raise UnpicklingError("it makes bytes that are not in it")
    elif type(arguments[0]) is Stored:
        sizes = arguments[2] if len(arguments) > 2 else ()
        if type(sizes) is Made:  # a torch.Size
            sizes = sizes.arguments[0] if sizes.arguments else ()
        if type(sizes) is not tuple or not all(type(size) is int for size in sizes):
            raise UnpicklingError("a tensor in it has no shape")
        if math.prod(sizes) > _elements(arguments[0], records, prefix) + _EXPANDED:
            raise UnpicklingError("a tensor in it has more elements than were saved")


def _elements(stored: Stored, records: dict[str, _Record], prefix: str) -> int:
    """The elements of a storage, all of which have to be in the archive."""
    where = stored.where
    if type(where) is not tuple or len(where) != 5 or type(where[1]) is not Named:
        raise UnpicklingError("it has a storage of an unknown kind")
    _, kind, key, _, count = where
    record = records.get(f"{prefix}/data/{key}") if type(key) is str else None
    if record is None or type(count) is not int:
        raise UnpicklingError("a storage in it is nowhere")
    if count * _itemsize(kind.name) != record.nbytes:
        raise UnpicklingError("a storage in it is not as long as it says")
    return count


def _itemsize(kind: str) -> int:
    name = kind.rpartition(".")[2]
    dtype = torch.uint8 if name == "UntypedStorage" else dtypes_of_storages().get(name)
    if dtype is None:
        raise UnpicklingError(f"it has a storage of the kind {kind:.100}")
    return dtype.itemsize


def _read_at(source: IO[bytes], offset: int, nbytes: int) -> bytes:
    source.seek(offset)
    parts = []
    while nbytes and (part := source.read(nbytes)):
        parts.append(part)
        nbytes -= len(part)
    return b"".join(parts)


def _content(source: IO[bytes], record: _Record) -> bytes:
    """The bytes of a record, which are after a head of their own."""
    if record.nbytes > MAX_PICKLE_BYTES:
        raise UnpicklingError(f"a pickle of {record.nbytes:,} bytes is too long")
    head = _LOCAL.unpack(_read_at(source, record.offset, _LOCAL.size))
    start = record.offset + _LOCAL.size + head[-2] + head[-1]
    return _read_at(source, start, record.nbytes)


def _records(source: IO[bytes]) -> dict[str, _Record]:
    """What is in an archive, by names, of which each is there once, and stored as it is.

    An archive is read from its end, and readers differ where it is not as all write it: so each
    number that is there twice has to be the same, and nothing may be in between.
    """
    size = source.seek(0, os.SEEK_END)
    tail = _read_at(source, max(size - _END.size, 0), _END.size)
    mark, *disks, here, count, nbytes, start, comment = _END.unpack(tail)
    end = size - _END.size
    _expect(mark == b"PK\x05\x06" and not any(disks) and here == count and not comment)
    before = _read_at(source, max(end - _LOCATOR.size, 0), _LOCATOR.size)
    if before[:4] == b"PK\x06\x07":
        end -= _LOCATOR.size + _END_64.size
        _expect(end >= 0)
        _expect(_LOCATOR.unpack(before)[1:] == (0, end, 1))
        mark, length, _, _, *disks, here, all_of, large, far = _END_64.unpack(
            _read_at(source, end, _END_64.size)
        )
        _expect(mark == b"PK\x06\x06" and length == _END_64.size - 12 and not any(disks))
        _expect(here == all_of and count in (all_of, 0xFFFF))
        _expect(nbytes in (large, _MANY) and start in (far, _MANY))
        count, nbytes, start = all_of, large, far
    _expect(start + nbytes == end and count * _ENTRY.size <= nbytes)
    directory = _read_at(source, start, nbytes)
    found: dict[str, _Record] = {}
    at = 0
    for _ in range(count):
        name, record, at = _entry(directory, at)
        _expect(record.offset + _LOCAL.size + record.nbytes <= start)
        found[name] = record
    _expect(at == nbytes)
    _expect(len({name.lower() for name in found}) == count)  # some readers know no capitals
    _expect(sum(record.nbytes for record in found.values()) <= start)
    return found


def _entry(directory: bytes, at: int) -> tuple[str, _Record, int]:
    """One record: its name, itself, and where the next one is described."""
    fields = _ENTRY.unpack_from(directory, at)
    mark, _, _, flags, method = fields[:5]
    packed, nbytes, named, more, comment = fields[8:13]
    offset = fields[-1]
    _expect(mark == b"PK\x01\x02" and not method and not flags & 1 and not comment)
    at += _ENTRY.size
    name = directory[at : at + named].decode()
    at += named
    if _MANY in (packed, nbytes, offset):
        large = _large_numbers(directory[at : at + more])
        nbytes, packed, offset = (
            int.from_bytes(large.pop(0), "little") if each == _MANY and large else each
            for each in (nbytes, packed, offset)
        )
    _expect(packed == nbytes)
    return name, _Record(offset, nbytes), at + more


def _large_numbers(extra: bytes) -> list[bytes]:
    """The numbers of eight bytes in what is said more of a record."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            found = extra[at + 4 : at + 4 + length]
            return [found[i : i + 8] for i in range(0, len(found), 8)]
        at += 4 + length
    return []


def _expect(fulfilled: bool) -> None:
    if not fulfilled:
        raise UnpicklingError("it is no archive as torch.save writes it")
