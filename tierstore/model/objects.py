"""What an object file says about the group it holds: the header's metadata, decoded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tierstore.model.errors import CorruptDataError
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
    group_of,
    lay_out,
    span,
)
from tierstore.model.header import FORMAT, FORMAT_KEY, KEY, SUM_PREFIX, VIEWS, Header

SINGLE = "tierstore.single"
"""Metadata mark of a group that was put as one tensor, not as a dict."""


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
        return group_of(key or self.key, self.packing.specs(), self.packing.nbytes)

    def source(self, path: str, base: int = 0) -> Source:
        """How to read the object from the file `path` into offset `base` of a packed group."""
        blocks = zip(self.packing.blocks, self.packing.offsets, self.digests, strict=True)
        checks = tuple(Check(b.name, base + at, b.nbytes, found) for b, at, found in blocks)
        if not self.packing.dense_nbytes:
            return Source((), (), checks)
        extent = Extent(path, self.data_start, self.packing.dense_nbytes)
        return Source((Segment(extent, base),), self.packing.moves(base), checks)


def decode_object(header: Header, path: str) -> StoredObject:
    """Read what an object file's (valid) header says.

    Raises CorruptDataError if it is no object file of a format that this version knows.
    """
    metadata = header.metadata
    key = metadata.get(KEY)
    if key is None or metadata.get(FORMAT_KEY) != FORMAT:
        raise CorruptDataError(
            f"{path} is no object file of format {FORMAT} (it says "
            f"{metadata.get(FORMAT_KEY)!r}): move it out of the store's directory",
            key=key,
            path=path,
            expected=FORMAT,
            found=metadata.get(FORMAT_KEY),
        )
    try:
        views = _views(metadata.get(VIEWS, "{}"))
        blocks = [
            Block(e.name, e.dtype, e.shape, e.end - e.begin, tuple(views.get(e.name, ())))
            for e in header.entries
        ]
        _check_views(blocks, views)
        packing = lay_out(blocks)
        digests = tuple(metadata[SUM_PREFIX + block.name] for block in packing.blocks)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise CorruptDataError(
            f"{path} has damaged metadata for key {key!r} ({error}): remove it with "
            "tierstore-inspect rm, and put the group again",
            key=key,
            path=path,
        ) from error
    return StoredObject(key, packing, digests, header.data_start, SINGLE in metadata)


def _views(text: str) -> dict[str, list[TensorSpec]]:
    by_block: dict[str, list[TensorSpec]] = {}
    for name, value in json.loads(text).items():
        block, dtype, shape, stride, offset = value
        by_block.setdefault(block, []).append(
            TensorSpec(name, dtype, _sizes(shape), _sizes(stride), *_sizes([offset]))
        )
    return by_block


def _sizes(values: Any) -> tuple[int, ...]:
    if not all(type(v) is int and 0 <= v < 2**63 for v in values):
        raise ValueError("a shape, stride or offset is no size")
    return tuple(values)


def _check_views(blocks: list[Block], views: dict[str, list[TensorSpec]]) -> None:
    sizes = {block.name: block.nbytes for block in blocks}
    for name, tensors in views.items():
        for tensor in tensors:
            if len(tensor.shape) != len(tensor.stride) or tensor.dtype not in DTYPE_SIZES:
                raise ValueError(f"tensor {tensor.name!r} is described wrongly")
            last = tensor.offset + span(tensor.dtype, tensor.shape, tensor.stride)
            if last > sizes[name]:
                raise ValueError(f"tensor {tensor.name!r} reaches past its block")
