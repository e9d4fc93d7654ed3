"""The header of a safetensors file: read strictly, written so that the data can be read directly.

A file is eight bytes of header length (little-endian), the header (JSON), then the data. What is
read is believed only if every rule holds: unique names, known dtypes, whole numbers, byte ranges
that match the shapes and cover the file exactly. Whatever passes here loads in safetensors too.

What is written has its data at a multiple of 4096 bytes (the header is padded with spaces), and a
checksum of the header among its metadata: 39 % of single flipped bits in a header would pass the
structural rules.
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
MAX_RANK = 64  # what torch can have
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
"""A tensor as everybody writes it, up to eight dimensions and sizes below 2**63: read faster."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: `begin` and `end` are byte offsets from the start of the data. `shape`
    counts elements as torch does."""

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
    """Text as a header can hold it. Raises TypeError or ValueError."""
    if not isinstance(value, str):
        raise TypeError(f"{what} is a str, not {type(value).__name__}: pass text")
    if not _encodable(value):
        raise ValueError(f"{what}, {value!r}, cannot be written as UTF-8: use another")
    return value


def digest(data: bytes | bytearray | memoryview) -> str:
    """The xxh3_64 checksum as 16 hex digits. It guards against rot and bugs, not against people."""
    return xxhash.xxh3_64_hexdigest(data)


def header_length(prefix: bytes, file_size: int, path: str) -> int:
    """The length that a file's first eight bytes announce, if it can be true."""
    if len(prefix) < LENGTH_BYTES:
        raise InvalidHeaderError(
            f"{path} is too short ({file_size} bytes) to be a safetensors file: "
            "download or save it again",
            path=path,
        )
    length = int.from_bytes(prefix, "little")
    if not 2 <= length <= min(MAX_HEADER_BYTES, file_size - LENGTH_BYTES):
        raise InvalidHeaderError(
            f"{path} announces a header of {length} bytes, but the file has {file_size} bytes and "
            f"a header at most {MAX_HEADER_BYTES}: download or save it again",
            path=path,
        )
    return length


def parse_header(raw: bytes, file_size: int, path: str, *, most: int = MAX_TENSORS) -> Header:
    """Validate the header bytes `raw` (without the length) of a file of `file_size` bytes.

    It may list `most` tensors. Raises InvalidHeaderError, naming the file and the rule that is
    broken, and TransferError for a dtype that is none of torch's.
    """

    def refuse(why: str) -> NoReturn:
        raise InvalidHeaderError(
            f"{path} has a malformed safetensors header: {why}; download or save it again",
            path=path,
        )

    if raw[:1] != b"{":
        refuse("it does not begin with '{'")
    scanner = Scanner(raw, refuse)
    metadata: dict[str, str] = {}
    entries = []
    for name in scanner.members(most + 1):
        if name == "__metadata__":
            metadata = _metadata(scanner, refuse)
        else:
            entries.append(_entry(name, scanner, path, refuse))
    scanner.end()
    if len(entries) > most:
        refuse(f"it lists more than {most} tensors")
    entries.sort(key=lambda e: (e.begin, e.end))
    data_start = LENGTH_BYTES + len(raw)
    _check_cover(entries, file_size - data_start, refuse)
    return Header(tuple(entries), metadata, data_start, digest(raw))


def _metadata(scanner: Scanner, refuse: Callable[[str], NoReturn]) -> dict[str, str]:
    if not scanner.sees(b"{"):
        refuse("__metadata__ must map strings to strings")
    usual = scanner.texts(MAX_METADATA)
    if usual is not None:
        return usual
    found = {}
    for name in scanner.members(MAX_METADATA):
        if not scanner.sees(b'"'):
            refuse("__metadata__ must map strings to strings")
        found[name] = scanner.text()
    return found


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def shown(text: str) -> str:
    """A name from a file, as a message shows it: quoted, and not too long."""
    return repr(text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…")


def _entry(name: str, scanner: Scanner, path: str, refuse: Callable[[str], NoReturn]) -> Entry:
    usual = scanner.match(_USUAL)
    if usual is not None:
        dtype, begin, end = usual[1].decode(), int(usual[3]), int(usual[4])
        shape = tuple(map(int, usual[2].split(b","))) if usual[2] else ()
    else:
        dtype, shape, (begin, end) = _fields(name, scanner, refuse)
    if dtype in NOT_IN_TORCH:
        raise _unsupported(name, path, f"the dtype {dtype}, which torch does not have")
    if dtype not in DTYPE_SIZES:
        refuse(f"tensor {shown(name)} has the dtype {shown(dtype)}, which is not supported")
    # The product of the sizes before a zero must not overflow either: safetensors refuses that.
    overflows = _overflows(shape)
    if dtype in PACKED:
        if not shape or shape[-1] % PACKED[dtype]:
            why = f"the dtype {dtype} and the shape {list(shape)}: torch has {PACKED[dtype]} in one"
            raise _unsupported(name, path, f"{why} element, and so their multiples only")
        shape = (*shape[:-1], shape[-1] // PACKED[dtype])
    if overflows or end - begin != prod(shape) * DTYPE_SIZES[dtype]:
        refuse(f"tensor {shown(name)} has a byte range that does not match its shape")
    return Entry(name, dtype, shape, begin, end)


def _unsupported(name: str, path: str, what: str) -> TransferError:
    return TransferError(
        f"{path} has a tensor {shown(name)} of {what}. That is not supported: convert the "
        "checkpoint to a dtype of torch",
        path=path,
    )


def _shape_in_file(dtype: str, shape: Sequence[int]) -> list[int]:
    """A shape as the format counts it."""
    packed = PACKED.get(dtype, 1)
    return list(shape) if packed == 1 else [*shape[:-1], shape[-1] * packed]


def _fields(
    name: str, scanner: Scanner, refuse: Callable[[str], NoReturn]
) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    dtype, shape, offsets = None, None, None
    members = scanner.members(3) if scanner.sees(b"{") else ()
    for field in members:
        if field == "dtype":
            dtype = _dtype(name, scanner, refuse)
        elif field == "shape":
            shape = scanner.numbers(MAX_RANK)
            if shape is None:
                refuse(f"tensor {shown(name)} has no valid shape")
        elif field == "data_offsets":
            offsets = scanner.numbers(2)
            if offsets is None or len(offsets) != 2:
                refuse(f"tensor {shown(name)} has no valid data_offsets")
        else:
            break
    if dtype is None or shape is None or offsets is None:
        refuse(f"tensor {shown(name)} must have exactly dtype, shape and data_offsets")
    return dtype, shape, offsets


def _dtype(name: str, scanner: Scanner, refuse: Callable[[str], NoReturn]) -> str:
    if not scanner.sees(b'"'):
        refuse(f"tensor {shown(name)} has a dtype that is no text")
    return scanner.text()


def _overflows(shape: Iterable[int]) -> bool:
    product = 1
    for size in shape:
        product *= size
        if product >= 2**60:
            return True
    return False


def _check_cover(entries: list[Entry], data_bytes: int, refuse: Callable[[str], NoReturn]) -> None:
    here = 0
    for entry in entries:
        if entry.begin != here:
            refuse(f"tensor {shown(entry.name)} overlaps another or leaves a gap before it")
        here = entry.end
    if here != data_bytes:
        refuse(f"its tensors take {here} bytes, the file has {data_bytes} bytes of data")


def build_header(
    key: str, packing: Packing, digests: Iterable[str], extra: Mapping[str, str] | None = None
) -> bytes:
    """The bytes before the data of an object file: length, header, padding to a page multiple.

    `digests` are the checksums of the packing's blocks, in order. Tensors that are not simply
    their block (strided, tied) are described under `tierstore.views`, as a JSON object
    `{name: [block, dtype, shape, stride, offset in bytes]}`.
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


def header_is_intact(raw: bytes, header: Header) -> bool:
    """Whether an object file's header has the checksum that it carries."""
    return has_header_sum(raw, header.metadata.get(HEADER_SUM, ""))


def has_header_sum(raw: bytes, claimed: str) -> bool:
    """Whether a header that carries the checksum `claimed` has that checksum."""
    if len(claimed) != len(NO_SUM) or not claimed.isalnum():
        return False
    field = f'"{HEADER_SUM}":"{claimed}"'.encode()
    blank = f'"{HEADER_SUM}":"{NO_SUM}"'.encode()
    return raw.count(field) == 1 and digest(raw.replace(field, blank)) == claimed
