"""What an object file says about the group it holds: the header's metadata, decoded."""

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
    header_is_intact,
    header_length,
    parse_header,
    shown,
)
from tierstore.model.scanning import READ_AT_ONCE, TEXT, Scanner

MAX_KEY_BYTES = 1024

SINGLE = "tierstore.single"
"""Metadata mark of a group that was put as one tensor, not as a dict."""

_LAYOUT = re.compile(
    rb'\[%b,"([A-Z0-9_]+)",\[((?:%b(?:,%b){0,63})?)\],\[((?:%b(?:,%b){0,63})?)\],(%b)\]'
    % (TEXT, *(rb"(?:0|[1-9][0-9]{0,18})",) * 5)
)
_VIEW = re.compile(rb'"([^"\\\x00-\x1f]*+)":' + _LAYOUT.pattern)
_USUAL_VIEWS = re.compile(rb"\{%b(?:,%b){0,63}+\}" % (_VIEW.pattern, _VIEW.pattern))
"""Views as they are written, of few tensors: read faster."""

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
        """The group that holds exactly this object."""
        packing = self.packing
        return GroupSpec(key or self.key, packing.tensors, packing.slot_nbytes)

    def source(self, path: str, base: int = 0) -> Source:
        """How to read the object from the file `path` into offset `base` of a packed group."""
        blocks = zip(self.packing.blocks, self.packing.offsets, self.digests, strict=True)
        checks = tuple(Check(b.name, base + at, b.nbytes, found) for b, at, found in blocks)
        if not self.packing.dense_nbytes:
            return Source((), (), checks)
        extent = Extent(path, self.data_start, self.packing.dense_nbytes)
        return Source((Segment(extent, base),), self.packing.moves(base), checks)


def header_of(key: str, packing: Packing, digests: Iterable[str], *, single: bool) -> bytes:
    """The bytes before the data of the object file of a group."""
    return build_header(key, packing, digests, {SINGLE: "1"} if single else None)


def refuse_unreadable(key: str, packing: Packing, *, single: bool) -> None:
    """Raise ValueError if a file of this group would break one of the rules by which it is read.

    To write it would be to lose it: more tensors or longer names than a header may have, sizes that
    no other reader of safetensors takes.
    """
    raw = header_of(key, packing, [NO_SUM] * len(packing.blocks), single=single)
    name, size = f"the file of group {shown(key)}", len(raw) + packing.dense_nbytes
    try:
        header_length(raw[:LENGTH_BYTES], size, name)
        decode_object(parse_header(raw[LENGTH_BYTES:], size, name), name)
    except TransferError as error:
        raise ValueError(
            f"group {shown(key)} could not be read again once it was on disk: put fewer tensors "
            f"into a group, with shorter names, or of other shapes ({error})"
        ) from error


def decode_object(header: Header, path: str) -> StoredObject:
    """Read what an object file's (valid) header says.

    Raises CorruptDataError if it is no object file of a format that this version knows.
    """
    metadata = header.metadata
    key = metadata.get(KEY)
    if key is None or metadata.get(FORMAT_KEY) != FORMAT:
        raise CorruptDataError(
            f"{path} is no object file of format {FORMAT} (it says "
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
    """Read what the header `raw` (without its length) of an object file of `file_size` bytes says.

    Raises InvalidHeaderError, TransferError or CorruptDataError, which say what is wrong with it.
    """
    header = parse_header(raw, file_size, path)
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
    return stored


def _views(text: str) -> dict[str, list[TensorSpec]]:
    """The tensors that look at each block, exactly as `build_header` writes them."""
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
            _damaged(f"tensor {shown(name)} is described wrongly")
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
    """What the tensors say must be possible, and must be what the file says of their blocks."""
    if views.keys() != {block.name for block in blocks}:
        _damaged("a tensor looks at no block, or no tensor at a block")
    for block in blocks:
        for tensor in block.views:
            _check_view(tensor, block.nbytes)
        first, alone = block.views[0], len(block.views) == 1
        if block_of(block.views, block.nbytes) != block or (alone and first.offset):
            _damaged(f"block {shown(block.name)} is not what its tensors are")


def _check_view(tensor: TensorSpec, nbytes: int) -> None:
    itemsize = DTYPE_SIZES.get(tensor.dtype)
    if itemsize is None or len(tensor.shape) != len(tensor.stride):
        _damaged(f"tensor {shown(tensor.name)} is described wrongly")
    sizes = (*tensor.shape, *tensor.stride, tensor.offset)
    if max(sizes) >= 2**63 or prod(filter(None, tensor.shape)) * itemsize >= 2**63:
        _damaged(f"tensor {shown(tensor.name)} is larger than any can be")
    if tensor.offset % itemsize:
        _damaged(f"tensor {shown(tensor.name)} lies where none of its dtype can")
    if tensor.offset + tensor.nbytes > nbytes:
        _damaged(f"tensor {shown(tensor.name)} reaches past its block")
