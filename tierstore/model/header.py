"""Reads and writes the header of safetensors files.

A file consists of the header length (eight bytes, little-endian), the header (JSON) and the data.
Reading is strict: names must be unique, dtypes known, numbers whole, and byte ranges must match the
shapes and cover the file exactly. Every header that is accepted here also loads in safetensors.

Written files have their data at a multiple of 4096 bytes, for direct reads (the header is padded
with spaces), and a checksum of the header in its metadata: 39 % of single flipped bits in a header
would pass the structural rules.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

import xxhash

from tierstore.errors import InvalidHeaderError, TransferError
from tierstore.model.groups import DTYPE_SIZES, NOT_IN_TORCH, PACKED, Packing
from tierstore.model.scanning import Scanner
from tierstore.model.sizes import PAGE, round_up

MAX_HEADER_BYTES = 16 << 20
MAX_TENSORS = 100_000
MAX_RANK = 64  # torch's limit
LENGTH_BYTES = 8
MAX_METADATA = MAX_TENSORS + 1000  # an object file has one checksum for each tensor, and a few
LONGEST_SHOWN = 200  # characters of a name in a message

FORMAT = "1"
KEY = "tierstore.key"
FORMAT_KEY = "tierstore.format"
HEADER_SUM = "tierstore.header_xxh3"
SUM_PREFIX = "tierstore.xxh3/"
VIEWS = "tierstore.views"
NO_SUM = "0" * 16

_USUAL = re.compile(
    rb'\{"dtype": ?"([A-Z0-9_]+)", ?"shape": ?\[((?:%b(?:, ?%b){0,7})?)\], ?'
    rb'"data_offsets": ?\[(%b), ?(%b)\]\}' % ((rb"(?:0|[1-9][0-9]{0,17})",) * 4)
)
"""Fast path: an entry in the usual order of fields, up to eight dimensions, sizes below 2**63."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file.

    `begin` and `end` are byte offsets from the start of the data. `shape` counts torch elements.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """A header that passed every rule. `data_start` is the file offset of the data, in bytes."""

    entries: tuple[Entry, ...]
    metadata: Mapping[str, str]
    data_start: int
    digest: str


def check_text(value: object, what: str) -> str:
    """Return `value` if it is text that UTF-8 can encode. Raises TypeError or ValueError."""
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a str, not {type(value).__name__}")
    if not _encodable(value):
        raise ValueError(f"{what}, {value!r}, cannot be written as UTF-8: use another")
    return value


def digest(data: bytes | bytearray | memoryview) -> str:
    """Return the xxh3_64 checksum as 16 hex digits. It detects bit rot and bugs, not tampering."""
    return xxhash.xxh3_64_hexdigest(data)


def header_length(prefix: bytes, file_size: int, path: str) -> int:
    """Return the header length from a file's first eight bytes.

    Raises InvalidHeaderError if the file is too short for it.
    """
    if len(prefix) < LENGTH_BYTES:
        raise InvalidHeaderError(
            f"{path} is too short ({file_size} bytes) to be a safetensors file: "
            "download or save it again",
            path=path,
        )
    length = int.from_bytes(prefix, "little")
    if not 2 <= length <= min(MAX_HEADER_BYTES, file_size - LENGTH_BYTES):
        raise InvalidHeaderError(
            f"{path} declares a header of {length} bytes, but the file has {file_size} bytes and a "
            f"header may have at most {MAX_HEADER_BYTES}: download or save it again",
            path=path,
        )
    return length


def parse_header(raw: bytes, file_size: int, path: str, *, most: int = MAX_TENSORS) -> Header:
    """Validate the header bytes `raw` (without the length) of a file of `file_size` bytes.

    It may list up to `most` tensors. Raises InvalidHeaderError, which names the file and the broken
    rule, and TransferError for a dtype that torch does not have.
    """

    def fail(why: str) -> NoReturn:
        raise InvalidHeaderError(
            f"{path} has a malformed safetensors header: {why}; download or save it again",
            path=path,
        )

    if raw[:1] != b"{":
        fail("it does not begin with '{'")
    scanner = Scanner(raw, fail)
    metadata: dict[str, str] = {}
    entries = []
    for name in scanner.members(most + 1):
        if name == "__metadata__":
            metadata = _metadata(scanner, fail)
        else:
            entries.append(_entry(name, scanner, path, fail))
    scanner.end()
    if len(entries) > most:
        fail(f"it lists more than {most} tensors")
    entries.sort(key=lambda e: (e.begin, e.end))
    data_start = LENGTH_BYTES + len(raw)
    _check_cover(entries, file_size - data_start, fail)
    return Header(tuple(entries), metadata, data_start, digest(raw))


def _metadata(scanner: Scanner, fail: Callable[[str], NoReturn]) -> dict[str, str]:
    if not scanner.peek(b"{"):
        fail("__metadata__ must map strings to strings")
    usual = scanner.texts(MAX_METADATA)
    if usual is not None:
        return usual
    found = {}
    for name in scanner.members(MAX_METADATA):
        if not scanner.peek(b'"'):
            fail("__metadata__ must map strings to strings")
        found[name] = scanner.text()
    return found


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def shown(text: str) -> str:
    """Quote and shorten a name from a file, for a message."""
    return repr(text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…")


def _entry(name: str, scanner: Scanner, path: str, fail: Callable[[str], NoReturn]) -> Entry:
    usual = scanner.match(_USUAL)
    if usual is not None:
        dtype, begin, end = usual[1].decode(), int(usual[3]), int(usual[4])
        shape = tuple(map(int, usual[2].split(b","))) if usual[2] else ()
    else:
        dtype, shape, (begin, end) = _fields(name, scanner, fail)
    if dtype in NOT_IN_TORCH:
        raise _unsupported(name, path, f"the dtype {dtype}, which torch does not have")
    if dtype not in DTYPE_SIZES:
        fail(f"tensor {shown(name)} has the dtype {shown(dtype)}, which is not supported")
    # The product of the sizes before a zero must not overflow either: safetensors rejects that.
    overflows = _overflows(shape)
    if dtype in PACKED:
        if not shape or shape[-1] % PACKED[dtype]:
            why = f"the dtype {dtype} and the shape {list(shape)}, whose last dimension must be a"
            raise _unsupported(name, path, f"{why} multiple of {PACKED[dtype]}")
        shape = (*shape[:-1], shape[-1] // PACKED[dtype])
    if overflows or end - begin != prod(shape) * DTYPE_SIZES[dtype]:
        fail(f"tensor {shown(name)} has a byte range that does not match its shape")
    return Entry(name, dtype, shape, begin, end)


def _unsupported(name: str, path: str, what: str) -> TransferError:
    return TransferError(
        f"{path} has a tensor {shown(name)} of {what}. That is not supported: convert the "
        "checkpoint to a dtype of torch",
        path=path,
    )


def _shape_in_file(dtype: str, shape: Sequence[int]) -> list[int]:
    """Return a shape in numbers, as the format counts it, not in torch elements."""
    packed = PACKED.get(dtype, 1)
    return list(shape) if packed == 1 else [*shape[:-1], shape[-1] * packed]


def _fields(
    name: str, scanner: Scanner, fail: Callable[[str], NoReturn]
) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    dtype, shape, offsets = None, None, None
    members = scanner.members(3) if scanner.peek(b"{") else ()
    for field in members:
        if field == "dtype":
            dtype = _dtype(name, scanner, fail)
        elif field == "shape":
            shape = scanner.numbers(MAX_RANK)
            if shape is None:
                fail(f"tensor {shown(name)} has no valid shape")
        elif field == "data_offsets":
            offsets = scanner.numbers(2)
            if offsets is None or len(offsets) != 2:
                fail(f"tensor {shown(name)} has no valid data_offsets")
        else:
            break
    if dtype is None or shape is None or offsets is None:
        fail(f"tensor {shown(name)} must have exactly dtype, shape and data_offsets")
    return dtype, shape, offsets


def _dtype(name: str, scanner: Scanner, fail: Callable[[str], NoReturn]) -> str:
    if not scanner.peek(b'"'):
        fail(f"tensor {shown(name)} has a dtype that is not a string")
    return scanner.text()


def _overflows(shape: Iterable[int]) -> bool:
    product = 1
    for size in shape:
        product *= size
        if product >= 2**60:
            return True
    return False


def _check_cover(entries: list[Entry], data_bytes: int, fail: Callable[[str], NoReturn]) -> None:
    here = 0
    for entry in entries:
        if entry.begin != here:
            fail(f"tensor {shown(entry.name)} overlaps another or leaves a gap before it")
        here = entry.end
    if here != data_bytes:
        fail(f"its tensors take {here} bytes, the file has {data_bytes} bytes of data")


def build_header(
    key: str, packing: Packing, digests: Iterable[str], extra: Mapping[str, str] | None = None
) -> bytes:
    """Return the bytes before the data of an object file: length, header, padding to a page.

    `digests` are the checksums of the packing's blocks, in order. The tensors are described under
    `tierstore.views`, as a JSON object `{name: [block, dtype, shape, stride, offset in bytes]}`.
    """
    metadata = {FORMAT_KEY: FORMAT, KEY: key, HEADER_SUM: NO_SUM, **(extra or {})}
    tensors: dict[str, Any] = {}
    views: dict[str, Any] = {}
    for block, begin, checksum in zip(packing.blocks, packing.dense, digests, strict=True):
        tensors[block.name] = {
            "dtype": block.dtype,
            "shape": _shape_in_file(block.dtype, block.shape),
            "data_offsets": [begin, begin + block.nbytes],
        }
        metadata[SUM_PREFIX + block.name] = checksum
        for view in block.views:
            views[view.name] = [block.name, view.dtype, view.shape, view.stride, view.offset]
    metadata[VIEWS] = json.dumps(views, separators=(",", ":"))
    document = {"__metadata__": metadata, **tensors}
    body = _padded(document)
    metadata[HEADER_SUM] = digest(body)
    body = _padded(document)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def _padded(document: Mapping[str, Any]) -> bytes:
    body = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    return body.ljust(round_up(LENGTH_BYTES + len(body), PAGE) - LENGTH_BYTES)


def header_matches_checksum(raw: bytes, header: Header) -> bool:
    """Return True if an object file's header matches the checksum in its metadata."""
    return has_header_sum(raw, header.metadata.get(HEADER_SUM, ""))


def has_header_sum(raw: bytes, claimed: str) -> bool:
    """Return True if the checksum of a header, without itself, is `claimed`."""
    if len(claimed) != len(NO_SUM) or not claimed.isalnum():
        return False
    field = f'"{HEADER_SUM}":"{claimed}"'.encode()
    blank = f'"{HEADER_SUM}":"{NO_SUM}"'.encode()
    return raw.count(field) == 1 and digest(raw.replace(field, blank)) == claimed
