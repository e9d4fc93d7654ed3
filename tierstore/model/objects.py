"""Object files: decodes the description of a group from the header's metadata."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import NoReturn

from tierstore.errors import CorruptDataError, TransferError
from tierstore.model.groups import (
    DTYPE_SIZES,
    Block,
    Check,
    Extent,
    GroupSpec,
    Packing,
    Segment,
    Source,
    TensorSpec,
    block_of,
    lay_out,
)
from tierstore.model.header import (
    FORMAT,
    FORMAT_KEY,
    HEADER_SUM,
    KEY,
    LENGTH_BYTES,
    MAX_TENSORS,
    NO_SUM,
    SUM_PREFIX,
    VIEWS,
    Header,
    build_header,
    digest,
    header_length,
    header_matches_checksum,
    parse_header,
    shown,
)
from tierstore.model.scanning import READ_AT_ONCE, TEXT, Scanner

MAX_KEY_BYTES = 1024

SINGLE = "tierstore.single"
"""Metadata key that marks a group put as a single tensor, not as a dict."""

_LAYOUT = re.compile(
    rb'\[%b,"([A-Z0-9_]+)",\[((?:%b(?:,%b){0,63})?)\],\[((?:%b(?:,%b){0,63})?)\],(%b)\]'
    % (TEXT, *(rb"(?:0|[1-9][0-9]{0,18})",) * 5)
)
_VIEW = re.compile(rb'"([^"\\\x00-\x1f]*+)":' + _LAYOUT.pattern)
_USUAL_VIEWS = re.compile(rb"\{%b(?:,%b){0,63}+\}" % (_VIEW.pattern, _VIEW.pattern))
"""Fast path: the views of up to 65 tensors, as tierstore writes them."""

_DIGEST = re.compile("[0-9a-f]{16}")


@dataclass(frozen=True)
class StoredObject:
    """A group in an object file: its packing in memory and the checksum of each block."""

    key: str
    packing: Packing
    digests: tuple[str, ...]
    data_start: int
    single: bool

    def spec(self, key: str | None = None) -> GroupSpec:
        """Return a group that consists of this object."""
        packing = self.packing
        return GroupSpec(key or self.key, packing.tensors, packing.slot_nbytes)

    def source(self, path: str, base: int = 0) -> Source:
        """Return a source that reads the file `path` to offset `base` of a packed group."""
        blocks = zip(self.packing.blocks, self.packing.offsets, self.digests, strict=True)
        checks = tuple(Check(b.name, base + at, b.nbytes, found) for b, at, found in blocks)
        if not self.packing.dense_nbytes:
            return Source((), (), checks)
        extent = Extent(path, self.data_start, self.packing.dense_nbytes)
        return Source((Segment(extent, base),), self.packing.moves(base), checks)


def header_of(key: str, packing: Packing, digests: Iterable[str], *, single: bool) -> bytes:
    """Return the bytes before the data of the object file of a group."""
    return build_header(key, packing, digests, {SINGLE: "1"} if single else None)


def check_readable(key: str, packing: Packing, *, single: bool) -> None:
    """Raise ValueError if an object file of this group could not be read back.

    It would have more tensors or longer names than a header may have, or sizes that other
    safetensors readers reject.
    """
    raw = header_of(key, packing, [NO_SUM] * len(packing.blocks), single=single)
    name, size = f"the file of group {shown(key)}", len(raw) + packing.dense_nbytes
    try:
        header_length(raw[:LENGTH_BYTES], size, name)
        decode_object(parse_header(raw[LENGTH_BYTES:], size, name), name)
    except TransferError as error:
        raise ValueError(
            f"group {shown(key)} could not be read back from disk: put fewer tensors into the "
            f"group, or use shorter names or other shapes ({error})"
        ) from error


def decode_object(header: Header, path: str) -> StoredObject:
    """Decode the (valid) header of an object file.

    Raises CorruptDataError if it is not an object file of a format that this version supports.
    """
    metadata = header.metadata
    key = metadata.get(KEY)
    if key is None or metadata.get(FORMAT_KEY) != FORMAT:
        raise CorruptDataError(
            f"{path} is not an object file of format {FORMAT} (its format is "
            f"{shown(str(metadata.get(FORMAT_KEY)))}): move it out of the store's directory",
            key=key,
            path=path,
            expected=FORMAT,
            found=metadata.get(FORMAT_KEY),
        )
    try:
        if not 1 <= len(key.encode()) <= MAX_KEY_BYTES:
            _damaged(f"a key has 1 to {MAX_KEY_BYTES} bytes")
        views = _views(metadata.get(VIEWS, ""))
        blocks = [
            Block(e.name, e.dtype, e.shape, e.end - e.begin, tuple(views.get(e.name, ())))
            for e in header.entries
        ]
        _check_views(blocks, views)
        packing = lay_out(blocks)
        digests = tuple(_checksum(metadata, block) for block in packing.blocks)
    except ValueError as error:
        raise CorruptDataError(
            f"{path} has damaged metadata for key {shown(key)} ({error}): remove it with "
            "tierstore-inspect rm, and put the group again",
            key=key,
            path=path,
        ) from error
    return StoredObject(key, packing, digests, header.data_start, SINGLE in metadata)


def read_header(raw: bytes, file_size: int, path: str) -> StoredObject:
    """Decode and verify the header `raw` (without its length) of an object file.

    `file_size` is in bytes. Raises InvalidHeaderError, TransferError or CorruptDataError.
    """
    header = parse_header(raw, file_size, path)
    stored = decode_object(header, path)
    if not header_matches_checksum(raw, header):
        raise CorruptDataError(
            f"{path} (key {stored.key!r}) has a header that does not match its checksum: "
            "remove it with tierstore-inspect rm, and put the group again",
            key=stored.key,
            path=path,
            expected=header.metadata.get(HEADER_SUM),
            found=digest(raw),
        )
    return stored


def _views(text: str) -> dict[str, list[TensorSpec]]:
    """Parse the tensors of each block, exactly as `build_header` writes them."""
    raw = text.encode()
    by_block: dict[str, list[TensorSpec]] = {}
    if len(raw) <= READ_AT_ONCE and b"\\" not in raw and _USUAL_VIEWS.fullmatch(raw):
        rows = _VIEW.findall(raw)
        if len({name for name, *_ in rows}) == len(rows):
            for name, block, *layout in rows:
                tensor = _tensor(name.decode(), *layout)
                by_block.setdefault(block.decode(), []).append(tensor)
            return by_block
    scanner = Scanner(raw, _damaged)
    for name in scanner.members(MAX_TENSORS):
        found = scanner.match(_LAYOUT)
        if found is None:
            _damaged(f"tensor {shown(name)} has an invalid description")
        tensor = _tensor(name, *found.group(2, 3, 4, 5))
        by_block.setdefault(scanner.decoded(*found.span(1)), []).append(tensor)
    scanner.end()
    return by_block


def _tensor(name: str, dtype: bytes, shape: bytes, stride: bytes, offset: bytes) -> TensorSpec:
    return TensorSpec(name, dtype.decode(), _sizes(shape), _sizes(stride), int(offset))


def _sizes(row: bytes) -> tuple[int, ...]:
    return tuple(map(int, row.split(b","))) if row else ()


def _checksum(metadata: Mapping[str, str], block: Block) -> str:
    found = metadata.get(SUM_PREFIX + block.name, "")
    if _DIGEST.fullmatch(found) is None:
        _damaged(f"block {shown(block.name)} has no checksum")
    return found


def _damaged(why: str) -> NoReturn:
    raise ValueError(why)


def _check_views(blocks: list[Block], views: Mapping[str, object]) -> None:
    """Check that tensors lie within their blocks and match the blocks in the file."""
    if views.keys() != {block.name for block in blocks}:
        _damaged("a tensor has no block, or a block has no tensor")
    for block in blocks:
        for tensor in block.views:
            _check_view(tensor, block.nbytes)
        first, alone = block.views[0], len(block.views) == 1
        if block_of(block.views, block.nbytes) != block or (alone and first.offset):
            _damaged(f"block {shown(block.name)} does not match its tensors")


def _check_view(tensor: TensorSpec, nbytes: int) -> None:
    itemsize = DTYPE_SIZES.get(tensor.dtype)
    if itemsize is None or len(tensor.shape) != len(tensor.stride):
        _damaged(f"tensor {shown(tensor.name)} has an invalid description")
    sizes = (*tensor.shape, *tensor.stride, tensor.offset)
    if max(sizes) >= 2**63 or prod(filter(None, tensor.shape)) * itemsize >= 2**63:
        _damaged(f"tensor {shown(tensor.name)} is too large")
    if tensor.offset % itemsize:
        _damaged(f"tensor {shown(tensor.name)} is misaligned for its dtype")
    if tensor.offset + tensor.nbytes > nbytes:
        _damaged(f"tensor {shown(tensor.name)} extends past the end of its block")
