"""Groups of tensors, how they lie packed in memory, and where their bytes lie in files.

A *group* is what moves together. In memory it is one packed run of bytes in which every tensor
has an offset. `pack` lays out tensors that came from memory: each at a multiple of 256 bytes, as
devices want it (and so at a multiple of 64, as CPU allocations have it: the last bits of a matrix
product depend on that). What comes from a file keeps its offset modulo the page instead, as a
memory map of the file would have it, so a direct read needs no copy (`place`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from tierstore.model.sizes import PAGE, round_up, slot_bytes

ALIGNMENT = 256


class GroupId(NamedTuple):
    """One generation of a group: what is put under a key again is another group, and the one that
    it replaces lives on for as long as somebody uses it. A `str` is always a user's key.
    """

    key: str
    generation: int

    def __str__(self) -> str:
        return self.key


NO_GROUP = GroupId("", -1)
"""Stands where there is none."""

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
"""Bytes per element of each dtype, under the names that the safetensors format gives them. An
element is one of torch: two numbers of four bits are one."""

PACKED = {"F4": 2}
"""How many numbers torch has in one element, where the format counts each in the last dimension."""

NOT_IN_TORCH = ("F6_E2M3", "F6_E3M2")
"""Dtypes that the format has, and torch has not."""


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
        """Bytes from the first element to the last, gaps of the stride included."""
        return span(self.dtype, self.shape, self.stride)

    def moved(self, by: int) -> TensorSpec:
        """The same tensor, so many bytes further on."""
        if not by:
            return self
        return TensorSpec(self.name, self.dtype, self.shape, self.stride, self.offset + by)

    def renamed(self, old: str, new: str) -> TensorSpec:
        """The same tensor, with `new` for `old` in its name."""
        name = self.name.replace(old, new)
        return TensorSpec(name, self.dtype, self.shape, self.stride, self.offset)


def span(dtype: str, shape: Sequence[int], stride: Sequence[int]) -> int:
    """Bytes of storage between the first and the last element, both included."""
    if 0 in shape:
        return 0
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return (last + 1) * DTYPE_SIZES[dtype]


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The stride, in elements, of a C-contiguous tensor of this shape."""
    stride = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


@dataclass(frozen=True, slots=True)
class ByteRun:
    """Bytes that go from the host to the device in one piece."""

    host_offset: int
    device_offset: int
    nbytes: int


@dataclass(frozen=True)
class GroupSpec:
    """What moves together: `nbytes` is what one copy takes on any tier, the size of its slot."""

    key: str
    tensors: tuple[TensorSpec, ...]
    nbytes: int

    @cached_property
    def bytes_of_tensors(self) -> tuple[int, ...]:
        """The bytes of each tensor."""
        return tuple(t.nbytes for t in self.tensors)

    @cached_property
    def simple(self) -> bool:
        """Whether every tensor has bytes of its own, all of them, in C order."""
        return len(_covered(self.tensors)) == len(self.tensors) and all(
            t.nbytes and t.stride == contiguous_stride(t.shape) for t in self.tensors
        )

    @cached_property
    def runs(self) -> tuple[ByteRun, ...]:
        """How the packed bytes go to a device: few pieces, every tensor at 256 bytes there."""
        return _device_runs(self.tensors)

    @cached_property
    def device_offsets(self) -> dict[str, int]:
        """Where each tensor starts in the device's copy, in bytes."""
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
        # Where dtypes meet, the first tensor's start may be none that the largest can have.
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
    """The byte ranges that tensors cover, in order, overlapping (tied) tensors sharing one."""
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
    """A group of `nbytes` packed bytes on the host, in a slot that fits on every tier."""
    tensors = tuple(tensors)
    return GroupSpec(key, tensors, _slot_nbytes(tensors, nbytes))


def _slot_nbytes(tensors: Sequence[TensorSpec], nbytes: int) -> int:
    runs = _device_runs(tensors)
    on_device = runs[-1].device_offset + runs[-1].nbytes if runs else 0
    return slot_bytes(max(nbytes, on_device, 1))


@dataclass(frozen=True, slots=True)
class Extent:
    """Where bytes lie in a file: `nbytes` bytes from byte `offset` of `path`."""

    path: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Segment:
    """An extent and the offset in the packed group at which its bytes are read."""

    extent: Extent
    at: int


@dataclass(frozen=True, slots=True)
class Move:
    """Bytes to move inside the packed group once it is read: files are dense, memory aligned."""

    src: int
    dst: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Check:
    """What the xxh3_64 checksum of some bytes of the packed group must be."""

    name: str
    offset: int
    nbytes: int
    digest: str


@dataclass(frozen=True)
class Source:
    """How a group's bytes are had from files, which stay for as long as anybody has this: `keeps`
    are references to them."""

    segments: tuple[Segment, ...]
    moves: tuple[Move, ...] = ()
    checks: tuple[Check, ...] = field(default=(), repr=False)
    keeps: tuple[object, ...] = field(default=(), repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes to read, without the rounding to pages."""
        return sum(segment.extent.nbytes for segment in self.segments)

    @property
    def paths(self) -> set[str]:
        """The files that it reads."""
        return {segment.extent.path for segment in self.segments}


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor that lies in a file as its contiguous bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    extent: Extent


@dataclass(frozen=True)
class Placement:
    """Where tensors that are read straight from files lie in a group, up to byte `end`."""

    specs: tuple[TensorSpec, ...]
    segments: tuple[Segment, ...]
    moves: tuple[Move, ...]
    end: int


def place(tensors: Sequence[FileTensor], base: int = 0) -> Placement:
    """Lay out tensors that are read straight from files, from offset `base` (a page multiple) on.

    Neighbours in a file (less than a page apart) are read as one segment. Each tensor sits at its
    file offset modulo the page, but for those that a file holds at an offset that is no multiple
    of the item size: no tensor may look at such memory, so they are moved behind the rest.
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
    """The tensor from byte `offset` of a group on."""
    stride = contiguous_stride(tensor.shape)
    return TensorSpec(tensor.name, tensor.dtype, tensor.shape, stride, offset)


def file_ranges(
    tensors: Sequence[FileTensor],
) -> list[tuple[str, int, int, list[FileTensor]]]:
    """Neighbours in a file (less than a page apart) together: path, start, end, and those."""
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
    """A run of storage that one or more tensors look at; the unit an object file stores.

    `view` lists the tensors: (name, dtype, shape, stride, offset in bytes inside the block).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    views: tuple[TensorSpec, ...]

    def renamed(self, old: str, new: str) -> Block:
        """The same block, with `new` for `old` in its name and those of its tensors."""
        views = tuple([view.renamed(old, new) for view in self.views])
        return Block(self.name.replace(old, new), self.dtype, self.shape, self.nbytes, views)


@dataclass(frozen=True)
class Packing:
    """Where each block lies in memory (`offsets`, aligned) and in its file (`dense`)."""

    blocks: tuple[Block, ...]
    offsets: tuple[int, ...]
    dense: tuple[int, ...]
    nbytes: int

    @property
    def dense_nbytes(self) -> int:
        """Bytes of the file's data."""
        return self.dense[-1] + self.blocks[-1].nbytes if self.blocks else 0

    @cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Every tensor of a group that holds the packing and nothing else."""
        return tuple(self.specs())

    @cached_property
    def slot_nbytes(self) -> int:
        """Bytes of a slot for such a group, on any tier."""
        return _slot_nbytes(self.tensors, self.nbytes)

    def specs(self, base: int = 0) -> list[TensorSpec]:
        """Every tensor of every block, at its offset in a group that has the packing at `base`."""
        return [
            view.moved(base + offset)
            for block, offset in zip(self.blocks, self.offsets, strict=True)
            for view in block.views
        ]

    def renamed(self, old: str, new: str) -> Packing:
        """The same layout, with `new` for `old` in the names of the blocks and tensors."""
        blocks = tuple([block.renamed(old, new) for block in self.blocks])
        renamed = Packing(blocks, self.offsets, self.dense, self.nbytes)
        renamed.__dict__["slot_nbytes"] = self.slot_nbytes  # whatever the names are
        return renamed

    def moves(self, base: int = 0) -> tuple[Move, ...]:
        """What spreads the file's dense bytes to the aligned offsets: last block first."""
        rows = zip(self.blocks, self.offsets, self.dense, strict=True)
        spread = [Move(base + d, base + o, b.nbytes) for b, o, d in rows if o != d and b.nbytes]
        return tuple(reversed(spread))


def pack(blocks: Iterable[Block]) -> Packing:
    """Lay blocks out in memory: each at a multiple of 256 bytes.

    Blocks that need no padding come first, so that all but the odd ones at the end lie in the
    file as they lie in memory and are read and written without a copy.
    """
    return lay_out(sorted(blocks, key=lambda b: (b.nbytes % ALIGNMENT != 0, -DTYPE_SIZES[b.dtype])))


def lay_out(blocks: Sequence[Block]) -> Packing:
    """Lay blocks out in the order given, each at a multiple of 256 bytes."""
    offsets, dense = [], []
    here = file_here = 0
    for block in blocks:
        offsets.append(here)
        dense.append(file_here)
        here = round_up(here + block.nbytes, ALIGNMENT)
        file_here += block.nbytes
    return Packing(tuple(blocks), tuple(offsets), tuple(dense), here)


def packing_of(spec: GroupSpec) -> Packing:
    """How to write a group as an object file from the layout that it has now."""
    blocks, offsets, dense = [], [], []
    file_here = 0
    for start, stop, members in _covered(spec.tensors):
        # Where dtypes meet, the first tensor's start may be none that the largest can have.
        start -= start % max(DTYPE_SIZES[member.dtype] for member in members)
        blocks.append(
            block_of([replace(t, offset=t.offset - start) for t in members], stop - start)
        )
        offsets.append(start)
        dense.append(file_here)
        file_here += stop - start
    return Packing(tuple(blocks), tuple(offsets), tuple(dense), spec.nbytes)


def block_of(views: Sequence[TensorSpec], nbytes: int) -> Block:
    """The block that these tensors (offsets inside the block) look at.

    A single contiguous tensor is shown in the file as itself; strided or tied ones as a row of
    bytes, so that no reader takes them for what they are not.
    """
    first = views[0]
    as_itself = first.stride == contiguous_stride(first.shape)
    as_itself &= first.dtype not in PACKED or bool(first.shape)  # half a byte is no tensor
    # A file cannot have a tensor called __metadata__, nor two of the same name.
    name = first.name + "_" * first.name.startswith("__metadata__")
    if len(views) == 1 and as_itself:
        return Block(name, first.dtype, first.shape, nbytes, tuple(views))
    return Block(name, "U8", (nbytes,), nbytes, tuple(views))
