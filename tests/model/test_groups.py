"""Layouts of tensors in files, in a packed group on the host, and on the device."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tierstore.model.groups import (
    ALIGNMENT,
    DTYPE_SIZES,
    Block,
    Extent,
    FileTensor,
    GroupId,
    GroupSpec,
    Move,
    TensorSpec,
    contiguous_stride,
    group_of,
    pack,
    packing_of,
    place,
    span,
)
from tierstore.model.sizes import PAGE

DTYPES = sorted(DTYPE_SIZES)
Range = tuple[int, int]


def assert_disjoint(ranges: Iterable[Range]) -> None:
    ordered = sorted(r for r in ranges if r[0] < r[1])
    for (_, stop), (start, _) in pairwise(ordered):
        assert stop <= start, f"byte {start} is used twice"


def apply(moves: Iterable[Move], memory: bytearray) -> None:
    """Apply moves as a driver does, one after another."""
    for move in moves:
        memory[move.dst : move.dst + move.nbytes] = memory[move.src : move.src + move.nbytes]


def random_bytes(nbytes: int) -> bytes:
    return random.Random(nbytes).randbytes(nbytes)


# Placing tensors of files ------------------------------------------------------------------------

GAPS = st.sampled_from([0, 0, 0, 1, 3, 8, 100, PAGE - 1, PAGE, 3 * PAGE])
ROWS = st.tuples(
    st.sampled_from(["a.st", "b.st"]), GAPS, st.sampled_from(DTYPES), st.integers(0, 900)
)


@st.composite
def file_tensors(draw: st.DrawFn) -> list[FileTensor]:
    """Draw tensors that do not overlap, in two files, in any order."""
    ends = {"a.st": 8, "b.st": PAGE + 5}
    tensors = []
    for i, (path, gap, dtype, count) in enumerate(draw(st.lists(ROWS, max_size=8))):
        start = ends[path] + gap
        nbytes = count * DTYPE_SIZES[dtype]
        ends[path] = start + nbytes
        tensors.append(FileTensor(f"t{i}", dtype, (count,), Extent(path, start, nbytes)))
    return draw(st.permutations(tensors))


@given(file_tensors(), st.integers(0, 3))
def test_layout_keeps_the_offset_modulo_the_page(tensors: list[FileTensor], pages: int) -> None:
    base = pages * PAGE
    placed = place(tensors, base)
    moved = {move.dst for move in placed.moves}
    extents = {tensor.name: tensor.extent for tensor in tensors}
    assert sorted(spec.name for spec in placed.specs) == sorted(extents)
    for segment in placed.segments:
        assert segment.at % PAGE == segment.extent.offset % PAGE
    for spec in placed.specs:
        size = DTYPE_SIZES[spec.dtype]
        assert spec.offset % size == 0
        if spec.nbytes and spec.offset not in moved:
            assert spec.offset % PAGE == extents[spec.name].offset % PAGE
        # Only tensors that cannot be viewed in place are moved, and no other bytes.
        if spec.offset in moved:
            assert extents[spec.name].offset % size != 0
            assert spec.offset % ALIGNMENT == 0


@given(file_tensors(), st.integers(0, 3))
def test_layout_uses_no_byte_twice(tensors: list[FileTensor], pages: int) -> None:
    base = pages * PAGE
    placed = place(tensors, base)
    read = [(s.at, s.at + s.extent.nbytes) for s in placed.segments]
    written = [(move.dst, move.dst + move.nbytes) for move in placed.moves]
    assert_disjoint(read + written)
    assert_disjoint((spec.offset, spec.offset + spec.nbytes) for spec in placed.specs)
    assert placed.end % PAGE == 0
    assert all(base <= start and stop <= placed.end for start, stop in read + written)


@given(file_tensors())
def test_layout_reads_neighbours_in_one_piece(tensors: list[FileTensor]) -> None:
    extents = sorted(
        (s.extent.path, s.extent.offset, s.extent.nbytes) for s in place(tensors).segments
    )
    for (path, start, nbytes), (other, following, _) in pairwise(extents):
        assert path != other or following - (start + nbytes) >= PAGE


@given(file_tensors())
def test_layout_reads_and_moves_give_the_files_bytes(tensors: list[FileTensor]) -> None:
    ends = [t.extent.offset + t.extent.nbytes for t in tensors]
    files = {
        "a.st": random_bytes(max(ends, default=0)),
        "b.st": random_bytes(max(ends, default=0) + 1),
    }
    placed = place(tensors)
    memory = bytearray(placed.end)
    for segment in placed.segments:
        extent = segment.extent
        memory[segment.at : segment.at + extent.nbytes] = files[extent.path][
            extent.offset : extent.offset + extent.nbytes
        ]
    apply(placed.moves, memory)
    extents = {tensor.name: tensor.extent for tensor in tensors}
    for spec in placed.specs:
        extent = extents[spec.name]
        expected = files[extent.path][extent.offset : extent.offset + extent.nbytes]
        assert memory[spec.offset : spec.offset + spec.nbytes] == expected


# On the device -----------------------------------------------------------------------------------


def on_device(group: GroupSpec, host: bytes) -> bytearray:
    memory = bytearray(group.nbytes)
    for run in group.runs:
        piece = host[run.host_offset : run.host_offset + run.nbytes]
        memory[run.device_offset : run.device_offset + run.nbytes] = piece
    return memory


def assert_right_on_device(group: GroupSpec) -> None:
    host = random_bytes(group.nbytes)
    device = on_device(group, host)
    offsets = group.device_offsets
    for tensor in group.tensors:
        here, there = tensor.offset, offsets[tensor.name]
        assert there % ALIGNMENT == 0, f"{tensor.name} is at {there} on the device"
        assert device[there : there + tensor.nbytes] == host[here : here + tensor.nbytes]
    assert_disjoint((r.device_offset, r.device_offset + r.nbytes) for r in group.runs)


@given(file_tensors())
def test_tensors_of_a_file_are_aligned_on_the_device(tensors: list[FileTensor]) -> None:
    placed = place(tensors)
    group = group_of("g", placed.specs, placed.end)
    assert group.nbytes % PAGE == 0
    assert group.nbytes >= max(placed.end, 1)
    assert_right_on_device(group)


def test_tensors_at_multiples_of_256_go_in_one_piece() -> None:
    specs = [TensorSpec(f"t{i}", "U8", (200,), (1,), 256 * i) for i in range(10)]
    assert len(group_of("g", specs, 2560).runs) == 1


def test_tensors_a_page_apart_leave_the_gap_out() -> None:
    specs = [TensorSpec(f"t{i}", "U8", (256,), (1,), 2 * PAGE * i) for i in range(3)]
    runs = group_of("g", specs, 6 * PAGE).runs
    assert [(r.device_offset, r.nbytes) for r in runs] == [(0, 256), (256, 256), (512, 256)]


def test_tied_tensors_stay_tied_on_the_device() -> None:
    whole = TensorSpec("whole", "F32", (100,), (1,), 300)
    row = TensorSpec("row", "F32", (10,), (1,), 300 + 4 * 20)
    group = group_of("g", [row, whole], 1000)
    assert group.device_offsets["row"] - group.device_offsets["whole"] == 80
    assert len(group.runs) == 1


# Packing tensors of memory -----------------------------------------------------------------------


@st.composite
def packed_blocks(draw: st.DrawFn) -> list[Block]:
    rows = draw(st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 700)), max_size=10))
    return [block(f"b{i}", dtype, count) for i, (dtype, count) in enumerate(rows)]


def block(name: str, dtype: str, count: int) -> Block:
    spec = TensorSpec(name, dtype, (count,), (1,), 0)
    return Block(name, dtype, (count,), count * DTYPE_SIZES[dtype], (spec,))


@given(packed_blocks(), st.integers(0, 2))
def test_pack_aligns_and_uses_no_byte_twice(blocks: list[Block], pages: int) -> None:
    packing = pack(blocks)
    base = pages * PAGE
    assert sorted(b.name for b in packing.blocks) == sorted(b.name for b in blocks)
    assert all(offset % ALIGNMENT == 0 for offset in packing.offsets)
    assert_disjoint(ranges_of(packing.offsets, packing.blocks))
    assert packing.nbytes >= max(
        (stop for _, stop in ranges_of(packing.offsets, packing.blocks)), default=0
    )
    for spec, offset in zip(packing.specs(base), packing.offsets, strict=True):
        assert spec.offset == base + offset
    assert_right_on_device(group_of("g", packing.specs(), packing.nbytes))


def ranges_of(offsets: Sequence[int], blocks: Sequence[Block]) -> list[Range]:
    return [(at, at + b.nbytes) for at, b in zip(offsets, blocks, strict=True)]


@given(packed_blocks())
def test_packed_file_is_dense(blocks: list[Block]) -> None:
    packing = pack(blocks)
    here = 0
    for start, stop in ranges_of(packing.dense, packing.blocks):
        assert start == here
        here = stop
    assert packing.dense_nbytes == here == sum(b.nbytes for b in blocks)


@given(packed_blocks(), st.integers(0, 2))
def test_moves_spread_the_file_to_the_aligned_offsets(blocks: list[Block], pages: int) -> None:
    packing = pack(blocks)
    base = pages * PAGE
    file = random_bytes(packing.dense_nbytes)
    memory = bytearray(base + packing.nbytes)
    memory[base : base + len(file)] = file
    apply(packing.moves(base), memory)
    rows = zip(packing.blocks, packing.offsets, packing.dense, strict=True)
    for b, offset, dense in rows:
        assert memory[base + offset : base + offset + b.nbytes] == file[dense : dense + b.nbytes]


def test_moves_out_of_order_corrupt_bytes() -> None:
    """Check the control: first block first, a move overwrites bytes that the next one needs."""
    packing = pack([block(f"b{i}", "U8", 257) for i in range(3)])
    file = random_bytes(packing.dense_nbytes)
    memory = bytearray(packing.nbytes)
    memory[: len(file)] = file
    apply(reversed(packing.moves()), memory)
    last = packing.offsets[-1]
    assert memory[last : last + 257] != file[packing.dense[-1] :]


def test_unpadded_blocks_come_first_and_are_not_moved() -> None:
    packing = pack([block("odd", "U8", 7), block("even", "F32", 64), block("wide", "F64", 64)])
    assert [b.name for b in packing.blocks] == ["wide", "even", "odd"]
    assert packing.moves() == ()


def test_tied_views_of_a_block_keep_their_offsets() -> None:
    whole = TensorSpec("whole", "F32", (10, 10), (10, 1), 0)
    column = TensorSpec("column", "F32", (10,), (10,), 12)
    tied = Block("whole", "F32", (100,), 400, (whole, column))
    packing = pack([block("other", "U8", 3), tied])
    specs = {spec.name: spec for spec in packing.specs(PAGE)}
    assert specs["column"].offset - specs["whole"].offset == 12
    assert specs["column"].nbytes == (9 * 10 + 1) * 4


# Small cases -------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 6), max_size=4), st.sampled_from(DTYPES))
def test_contiguous_tensor_spans_its_elements(shape: list[int], dtype: str) -> None:
    elements = 1
    for size in shape:
        elements *= size
    assert span(dtype, shape, contiguous_stride(shape)) == elements * DTYPE_SIZES[dtype]


@given(st.text(), st.integers(0, 10**9))
def test_replacement_group_is_unequal_with_the_same_key(key: str, generation: int) -> None:
    old, new = GroupId(key, generation), GroupId(key, generation + 1)
    assert old != new and str(old) == str(new) == key
    assert old == GroupId(key, generation) and hash(old) == hash(GroupId(key, generation))


# Writing a group from an existing layout ----------------------------------------------------------


def test_tied_tensors_of_several_dtypes_are_each_viewable() -> None:
    """Begin their block earlier if the larger dtype cannot begin at the first offset."""
    spec = group_of(
        "k",
        [
            TensorSpec("bytes", "U8", (19,), (1,), 257),
            TensorSpec("floats", "F32", (5,), (1,), 260),
            TensorSpec("alone", "F64", (2,), (1,), 512),
        ],
        PAGE,
    )
    packing = packing_of(spec)
    assert [block.nbytes for block in packing.blocks] == [24, 16]
    for block in packing.blocks:
        for view in block.views:
            assert view.offset % DTYPE_SIZES[view.dtype] == 0
            assert view.offset + view.nbytes <= block.nbytes
    by_name = {t.name: t.offset for t in packing.specs()}
    assert by_name == {t.name: t.offset for t in spec.tensors}
