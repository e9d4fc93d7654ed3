"""Groups of tensors: their layout in memory, and the location of their bytes in files.

A *group* is the unit of transfer. In memory it is one packed run of bytes, in which every tensor
has an offset. `pack` lays out tensors from memory, each at a multiple of 256 bytes, as devices
require (which is also a multiple of 64, the alignment of CPU allocations: the last bits of a matrix
product depend on it). Tensors from a file keep their file offset modulo the page instead, as in a
memory map of the file, so a direct read needs no copy (`place`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from tierstore.model.sizes import PAGE, round_up, slot_bytes

ALIGNMENT = 256


class GroupId(NamedTuple):
    """One generation of a group.

    Putting a key again creates another generation; the replaced one lives on while it is leased.
    Throughout the code, a plain `str` is a user's key.
    """

    key: str
    generation: int

    def __str__(self) -> str:
        return self.key


NO_GROUP = GroupId("", -1)
"""Placeholder for no group."""

DTYPE_SIZES = {
    "BOOL": 1,
    "F4": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2": 1,
    "F8_E5M2FNUZ": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
    "C64": 8,
}
"""Bytes per torch element of each dtype, by its safetensors name.

Two 4-bit numbers are one element.
"""

PACKED = {"F4": 2}
"""Numbers per torch element, for dtypes whose numbers safetensors counts individually."""

NOT_IN_TORCH = ("F6_E2M3", "F6_E3M2")
"""Dtypes of the safetensors format that torch does not have."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a group.

    `dtype` is a safetensors name, `shape` and `stride` count elements, `offset` is in bytes from
    the start of the packed group. Two tensors may overlap: they are tied.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to the last, including gaps between strided elements."""
        return span(self.dtype, self.shape, self.stride)

    def moved(self, by: int) -> TensorSpec:
        """Return the tensor, with `by` bytes added to its offset."""
        if not by:
            return self
        return TensorSpec(self.name, self.dtype, self.shape, self.stride, self.offset + by)

    def renamed(self, old: str, new: str) -> TensorSpec:
        """Return the tensor, with `old` replaced by `new` in its name."""
        name = self.name.replace(old, new)
        return TensorSpec(name, self.dtype, self.shape, self.stride, self.offset)


def span(dtype: str, shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the bytes of storage from the first to the last element, inclusive."""
    if 0 in shape:
        return 0
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return (last + 1) * DTYPE_SIZES[dtype]


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the stride, in elements, of a C-contiguous tensor of this shape."""
    stride = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


@dataclass(frozen=True, slots=True)
class ByteRun:
    """Contiguous bytes that are copied from the host to the device in one call."""

    host_offset: int
    device_offset: int
    nbytes: int


@dataclass(frozen=True)
class GroupSpec:
    """A unit of transfer. `nbytes` is the size of its slot, the same on every tier."""

    key: str
    tensors: tuple[TensorSpec, ...]
    nbytes: int

    @cached_property
    def bytes_of_tensors(self) -> tuple[int, ...]:
        """Bytes of each tensor."""
        return tuple(t.nbytes for t in self.tensors)

    @cached_property
    def simple(self) -> bool:
        """True if all tensors are nonempty, C-contiguous and do not overlap."""
        return len(_covered(self.tensors)) == len(self.tensors) and all(
            t.nbytes and t.stride == contiguous_stride(t.shape) for t in self.tensors
        )

    @cached_property
    def runs(self) -> tuple[ByteRun, ...]:
        """The copies that bring the group to a device, where tensors are aligned to 256 bytes."""
        return _device_runs(self.tensors)

    @cached_property
    def device_offsets(self) -> dict[str, int]:
        """Byte offset of each tensor in the copy on the device."""
        offsets = {}
        for tensor in self.tensors:
            if tensor.nbytes == 0:
                offsets[tensor.name] = 0
                continue
            run = next(r for r in self.runs if 0 <= tensor.offset - r.host_offset < r.nbytes)
            offsets[tensor.name] = tensor.offset - run.host_offset + run.device_offset
        return offsets


def _device_runs(tensors: Iterable[TensorSpec]) -> tuple[ByteRun, ...]:
    runs: list[ByteRun] = []
    end = 0
    for start, stop, members in _covered(t for t in tensors if t.nbytes):
        # If dtypes mix, the first tensor's offset may be misaligned for the largest item size.
        start -= start % max(DTYPE_SIZES[member.dtype] for member in members)
        if runs and start - end < PAGE and (start - runs[-1].host_offset) % ALIGNMENT == 0:
            last = runs.pop()
            runs.append(ByteRun(last.host_offset, last.device_offset, stop - last.host_offset))
        else:
            where = round_up(runs[-1].device_offset + runs[-1].nbytes, ALIGNMENT) if runs else 0
            runs.append(ByteRun(start, where, stop - start))
        end = stop
    return tuple(runs)


def _covered(tensors: Iterable[TensorSpec]) -> list[tuple[int, int, list[TensorSpec]]]:
    """Return the byte ranges that tensors cover, in order. Overlapping (tied) tensors share one."""
    covered: list[tuple[int, int, list[TensorSpec]]] = []
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        start, stop = tensor.offset, tensor.offset + tensor.nbytes
        if covered and start < covered[-1][1]:
            first, last, members = covered[-1]
            covered[-1] = (first, max(stop, last), [*members, tensor])
        else:
            covered.append((start, stop, [tensor]))
    return covered


def group_of(key: str, tensors: Iterable[TensorSpec], nbytes: int) -> GroupSpec:
    """Return a group of `nbytes` packed bytes on the host, in a slot that fits on every tier."""
    tensors = tuple(tensors)
    return GroupSpec(key, tensors, _slot_nbytes(tensors, nbytes))


def _slot_nbytes(tensors: Sequence[TensorSpec], nbytes: int) -> int:
    runs = _device_runs(tensors)
    on_device = runs[-1].device_offset + runs[-1].nbytes if runs else 0
    return slot_bytes(max(nbytes, on_device, 1))


@dataclass(frozen=True, slots=True)
class Extent:
    """A byte range in a file: `nbytes` bytes from byte `offset` of `path`."""

    path: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Segment:
    """An extent, and the offset in the packed group at which its bytes go."""

    extent: Extent
    at: int


@dataclass(frozen=True, slots=True)
class Move:
    """Bytes to move within a packed group after reading: files are dense, memory is aligned."""

    src: int
    dst: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Check:
    """The expected xxh3_64 checksum of a byte range of the packed group."""

    name: str
    offset: int
    nbytes: int
    digest: str


@dataclass(frozen=True)
class Source:
    """The reads, moves and checks that load a group from files.

    `keeps` holds references that keep the files alive as long as the source.
    """

    segments: tuple[Segment, ...]
    moves: tuple[Move, ...] = ()
    checks: tuple[Check, ...] = field(default=(), repr=False)
    keeps: tuple[object, ...] = field(default=(), repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes to read, before rounding to pages."""
        return sum(segment.extent.nbytes for segment in self.segments)

    @property
    def paths(self) -> set[str]:
        """The files that it reads."""
        return {segment.extent.path for segment in self.segments}


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor stored contiguously in a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    extent: Extent


@dataclass(frozen=True)
class Placement:
    """The layout, up to byte `end` of a group, of tensors that are read directly from files."""

    specs: tuple[TensorSpec, ...]
    segments: tuple[Segment, ...]
    moves: tuple[Move, ...]
    end: int


def place(tensors: Sequence[FileTensor], base: int = 0) -> Placement:
    """Lay out tensors that are read directly from files, from offset `base` (a page multiple) on.

    Neighbours in a file (less than a page apart) are read as one segment. Each tensor keeps its
    file offset modulo the page. The exception is a tensor whose file offset is not a multiple of
    its item size: torch cannot address such memory, so it is moved behind the rest.
    """
    specs: list[TensorSpec] = []
    segments: list[Segment] = []
    here = base
    for path, start, stop, members in file_ranges(tensors):
        at = here + start % PAGE
        segments.append(Segment(Extent(path, start, stop - start), at))
        specs += [placed(tensor, at + tensor.extent.offset - start) for tensor in members]
        here = round_up(at + stop - start, PAGE)
    specs += [placed(tensor, base) for tensor in tensors if not tensor.extent.nbytes]
    moves = []
    for i, spec in enumerate(specs):
        if spec.offset % DTYPE_SIZES[spec.dtype]:
            moves.append(Move(spec.offset, here, spec.nbytes))
            specs[i] = replace(spec, offset=here)
            here = round_up(here + spec.nbytes, ALIGNMENT)
    return Placement(tuple(specs), tuple(segments), tuple(moves), round_up(here, PAGE))


def placed(tensor: FileTensor, offset: int) -> TensorSpec:
    """Return a tensor placed at byte `offset` of a group."""
    stride = contiguous_stride(tensor.shape)
    return TensorSpec(tensor.name, tensor.dtype, tensor.shape, stride, offset)


def file_ranges(
    tensors: Sequence[FileTensor],
) -> list[tuple[str, int, int, list[FileTensor]]]:
    """Merge neighbours in a file (less than a page apart) into (path, start, end, tensors)."""
    ranges: list[tuple[str, int, int, list[FileTensor]]] = []
    filled = [t for t in tensors if t.extent.nbytes]
    for tensor in sorted(filled, key=lambda t: (t.extent.path, t.extent.offset)):
        extent = tensor.extent
        stop = extent.offset + extent.nbytes
        if ranges and ranges[-1][0] == extent.path and extent.offset - ranges[-1][2] < PAGE:
            path, start, end, members = ranges[-1]
            ranges[-1] = (path, start, max(end, stop), [*members, tensor])
        else:
            ranges.append((extent.path, extent.offset, stop, [tensor]))
    return ranges


@dataclass(frozen=True, slots=True)
class Block:
    """A run of storage that one or more tensors view; the unit that an object file stores.

    `views` are the tensors; their offsets are in bytes from the start of the block.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    views: tuple[TensorSpec, ...]

    def renamed(self, old: str, new: str) -> Block:
        """Return the block, with `old` replaced by `new` in its name and its tensors' names."""
        views = tuple([view.renamed(old, new) for view in self.views])
        return Block(self.name.replace(old, new), self.dtype, self.shape, self.nbytes, views)


@dataclass(frozen=True)
class Packing:
    """The offset of each block in memory (`offsets`, aligned) and in its file (`dense`)."""

    blocks: tuple[Block, ...]
    offsets: tuple[int, ...]
    dense: tuple[int, ...]
    nbytes: int

    @property
    def dense_nbytes(self) -> int:
        """Bytes of data in the file."""
        return self.dense[-1] + self.blocks[-1].nbytes if self.blocks else 0

    @cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors of a group that consists of this packing."""
        return tuple(self.specs())

    @cached_property
    def slot_nbytes(self) -> int:
        """Slot size, on every tier, of a group that consists of this packing."""
        return _slot_nbytes(self.tensors, self.nbytes)

    def specs(self, base: int = 0) -> list[TensorSpec]:
        """Return the tensors of all blocks, at their offsets in a group packed from `base` on."""
        return [
            view.moved(base + offset)
            for block, offset in zip(self.blocks, self.offsets, strict=True)
            for view in block.views
        ]

    def renamed(self, old: str, new: str) -> Packing:
        """Return the layout, with `old` replaced by `new` in the names of blocks and tensors."""
        blocks = tuple([block.renamed(old, new) for block in self.blocks])
        renamed = Packing(blocks, self.offsets, self.dense, self.nbytes)
        renamed.__dict__["slot_nbytes"] = self.slot_nbytes  # independent of names
        return renamed

    def moves(self, base: int = 0) -> tuple[Move, ...]:
        """Return the moves from dense file offsets to aligned memory offsets, last block first."""
        rows = zip(self.blocks, self.offsets, self.dense, strict=True)
        spread = [Move(base + d, base + o, b.nbytes) for b, o, d in rows if o != d and b.nbytes]
        return tuple(reversed(spread))


def pack(blocks: Iterable[Block]) -> Packing:
    """Lay out blocks in memory, each at a multiple of 256 bytes.

    Blocks that need no padding come first: their layout is the same in the file and in memory, so
    they are read and written without a copy.
    """
    return lay_out(sorted(blocks, key=lambda b: (b.nbytes % ALIGNMENT != 0, -DTYPE_SIZES[b.dtype])))


def lay_out(blocks: Sequence[Block]) -> Packing:
    """Lay out blocks in the given order, each at a multiple of 256 bytes."""
    offsets, dense = [], []
    here = file_here = 0
    for block in blocks:
        offsets.append(here)
        dense.append(file_here)
        here = round_up(here + block.nbytes, ALIGNMENT)
        file_here += block.nbytes
    return Packing(tuple(blocks), tuple(offsets), tuple(dense), here)


def packing_of(spec: GroupSpec) -> Packing:
    """Return a packing that writes a group to an object file from its current layout."""
    blocks, offsets, dense = [], [], []
    file_here = 0
    for start, stop, members in _covered(spec.tensors):
        # If dtypes mix, the first tensor's offset may be misaligned for the largest item size.
        start -= start % max(DTYPE_SIZES[member.dtype] for member in members)
        blocks.append(
            block_of([replace(t, offset=t.offset - start) for t in members], stop - start)
        )
        offsets.append(start)
        dense.append(file_here)
        file_here += stop - start
    return Packing(tuple(blocks), tuple(offsets), tuple(dense), spec.nbytes)


def block_of(views: Sequence[TensorSpec], nbytes: int) -> Block:
    """Return the block of these tensors, whose offsets are relative to the block.

    A single contiguous tensor is stored under its own dtype and shape. Strided or tied tensors are
    stored as raw bytes, so that other readers of the file do not misinterpret them.
    """
    first = views[0]
    plain = first.stride == contiguous_stride(first.shape)
    plain &= first.dtype not in PACKED or bool(first.shape)  # a scalar would be half a byte
    # A file cannot have a tensor called __metadata__, nor two of the same name.
    name = first.name + "_" * first.name.startswith("__metadata__")
    if len(views) == 1 and plain:
        return Block(name, first.dtype, first.shape, nbytes, tuple(views))
    return Block(name, "U8", (nbytes,), nbytes, tuple(views))
