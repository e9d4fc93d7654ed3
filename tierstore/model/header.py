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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

import xxhash

from tierstore.model.errors import InvalidHeaderError
from tierstore.model.groups import DTYPE_SIZES, Packing
from tierstore.model.sizes import PAGE, round_up

MAX_HEADER_BYTES = 16 << 20
MAX_TENSORS = 100_000
MAX_RANK = 64  # what torch can have
LENGTH_BYTES = 8

FORMAT = "1"
KEY = "tierstore.key"
FORMAT_KEY = "tierstore.format"
HEADER_SUM = "tierstore.header_xxh3"
SUM_PREFIX = "tierstore.xxh3/"
VIEWS = "tierstore.views"
NO_SUM = "0" * 16


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: `begin` and `end` are byte offsets from the start of the data."""

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


def parse_header(raw: bytes, file_size: int, path: str) -> Header:
    """Validate the header bytes `raw` (without the length) of a file of `file_size` bytes.

    Raises InvalidHeaderError, naming the file and the rule that is broken.
    """

    def refuse(why: str) -> NoReturn:
        raise InvalidHeaderError(
            f"{path} has a malformed safetensors header: {why}; download or save it again",
            path=path,
        )

    document = _load_json(raw, refuse)
    metadata = _metadata(document.pop("__metadata__", {}), refuse)
    if len(document) > MAX_TENSORS:
        refuse(f"it lists more than {MAX_TENSORS} tensors")
    entries = [_entry(name, value, refuse) for name, value in document.items()]
    entries.sort(key=lambda e: (e.begin, e.end))
    data_start = LENGTH_BYTES + len(raw)
    _check_cover(entries, file_size - data_start, refuse)
    return Header(tuple(entries), metadata, data_start, digest(raw))


def _load_json(raw: bytes, refuse: Callable[[str], NoReturn]) -> dict[str, Any]:
    if raw[:1] != b"{":
        refuse("it does not begin with '{'")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = dict(pairs)
        if len(names) != len(pairs):
            refuse("a name occurs twice")
        return names

    def constant(text: str) -> NoReturn:
        refuse(f"{text} is no JSON number")

    try:
        text = raw.decode("utf-8")
        document = json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        refuse(f"it is no JSON ({type(error).__name__})")
    if not isinstance(document, dict):
        refuse("it is no JSON object")
    return document


def _metadata(value: Any, refuse: Callable[[str], NoReturn]) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        refuse("__metadata__ must map strings to strings")
    if not all(_encodable(k) and _encodable(v) for k, v in value.items()):
        refuse("__metadata__ holds text that is no UTF-8")
    return value


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _entry(name: str, value: Any, refuse: Callable[[str], NoReturn]) -> Entry:
    if not _encodable(name):
        refuse("a tensor's name is no UTF-8")
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        refuse(f"tensor {name!r} must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_SIZES:
        refuse(f"tensor {name!r} has the dtype {dtype!r}, which is not supported")
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(map(_is_size, shape)):
        refuse(f"tensor {name!r} has no valid shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        refuse(f"tensor {name!r} has no valid data_offsets")
    begin, end = offsets
    # The product of the sizes before a zero must not overflow either: safetensors refuses that.
    if _overflows(shape) or end - begin != prod(shape) * DTYPE_SIZES[dtype]:
        refuse(f"tensor {name!r} has a byte range that does not match its shape")
    return Entry(name, dtype, tuple(shape), begin, end)


def _overflows(shape: list[int]) -> bool:
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
            refuse(f"tensor {entry.name!r} overlaps another or leaves a gap before it")
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
            "shape": list(block.shape),
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
    claimed = header.metadata.get(HEADER_SUM, "")
    if len(claimed) != len(NO_SUM) or not claimed.isalnum():
        return False
    field = f'"{HEADER_SUM}":"{claimed}"'.encode()
    blank = f'"{HEADER_SUM}":"{NO_SUM}"'.encode()
    return raw.count(field) == 1 and digest(raw.replace(field, blank)) == claimed
