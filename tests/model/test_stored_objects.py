"""The tensors of an object file must match its blocks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tierstore.errors import CorruptDataError
from tierstore.model import objects
from tierstore.model.groups import Block, Packing, TensorSpec, pack
from tierstore.model.header import LENGTH_BYTES, Header, build_header, digest, parse_header
from tierstore.model.objects import StoredObject, decode_object

KEY = "blocks.7"


def spec(name: str, shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> TensorSpec:
    return TensorSpec(name, "F32", shape, stride, offset)


WHOLE = Block("w", "F32", (2, 3), 24, (spec("w", (2, 3), (3, 1)),))
TIED = Block("t", "U8", (24,), 24, (spec("t", (2, 3), (3, 1)), spec("tail", (3,), (1,), 12)))


def packed() -> Packing:
    return pack([WHOLE, TIED])


def header(**views: list[Any]) -> Header:
    """Return the header of an object with both blocks, in which some views are changed."""
    packing = packed()
    raw = build_header(KEY, packing, [digest(b.name.encode()) for b in packing.blocks])
    document = json.loads(raw[LENGTH_BYTES:])
    found = json.loads(document["__metadata__"]["tierstore.views"])
    found.update(views)
    text = json.dumps(found, separators=(",", ":"))
    document["__metadata__"]["tierstore.views"] = text
    body = json.dumps(document).encode()
    return parse_header(body, LENGTH_BYTES + len(body) + packing.dense_nbytes, "m.st")


def decoded(**views: list[Any]) -> StoredObject:
    return decode_object(header(**views), "m.st")


def refused(**views: list[Any]) -> str:
    with pytest.raises(CorruptDataError) as error:
        decoded(**views)
    assert (error.value.key, error.value.path) == (KEY, "m.st")
    return str(error.value)


def test_object_written_is_read_back() -> None:
    stored = decoded()
    assert stored.packing == packed()
    assert stored.digests == tuple(digest(b.name.encode()) for b in packed().blocks)
    assert stored.key == KEY and not stored.single
    assert stored.spec().key == KEY and stored.spec("other").key == "other"


def test_object_source_reads_everything_and_checks_each_block() -> None:
    stored = decoded()
    source = stored.source("m.st", base=4096)
    [segment] = source.segments
    assert (segment.extent.path, segment.extent.offset) == ("m.st", stored.data_start)
    assert (segment.extent.nbytes, segment.at) == (packed().dense_nbytes, 4096)
    assert [(c.nbytes, c.offset) for c in source.checks] == [
        (24, 4096 + at) for at in packed().offsets
    ]


def test_tensor_beyond_its_block_raises() -> None:
    assert "extends past the end of its block" in refused(tail=["t", "F32", [4], [1], 12])
    assert "extends past the end of its block" in refused(tail=["t", "F32", [2], [3], 12])


def test_tensor_too_large_for_any_machine_raises() -> None:
    large = 2**63
    assert "is too large" in refused(tail=["t", "F32", [large], [0], 0])
    assert "is too large" in refused(tail=["t", "F32", [2**31, 2**30], [0, 0], 0])
    assert "is too large" in refused(tail=["t", "F32", [0], [large], 0])


def test_tensor_offset_is_aligned_for_its_dtype() -> None:
    assert "is misaligned for its dtype" in refused(tail=["t", "F32", [2], [1], 13])


def test_tensor_of_another_rank_or_dtype_raises() -> None:
    assert "has an invalid description" in refused(tail=["t", "F31", [3], [1], 12])
    assert "has an invalid description" in refused(tail=["t", "F32", [3], [1, 1], 12])


def test_block_equals_its_only_tensor() -> None:
    assert "does not match its tensors" in refused(w=["w", "F32", [3, 2], [2, 1], 0])
    assert "does not match its tensors" in refused(w=["w", "F32", [2, 2], [2, 1], 0])


def test_every_block_is_read_and_tensors_view_one() -> None:
    assert "has no block" in refused(w=["t", "F32", [2, 3], [3, 1], 0])
    assert "has no block" in refused(more=["nothing", "F32", [1], [1], 0])


NAMES = ("w", "a.b", "\u00e9", 'say "w"', "back\\slash", "two\nlines")


@pytest.mark.parametrize("count", [1, 6, 64, 65])
def test_views_read_at_once_equal_those_read_singly(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for first in range(len(NAMES)):
        names = [f"{NAMES[(first + i) % 6]}{i // 6 or ''}" for i in range(count)]
        packing = pack(Block(n, "F32", (2, 3), 24, (spec(n, (2, 3), (3, 1)),)) for n in names)
        raw = build_header(KEY, packing, [digest(name.encode()) for name in names])
        found = parse_header(raw[8:], len(raw) + packing.dense_nbytes, "m.st")
        at_once = decode_object(found, "m.st")
        assert at_once.packing == packing
        with monkeypatch.context() as patch:
            patch.setattr(objects, "READ_AT_ONCE", 0)
            assert decode_object(found, "m.st") == at_once


def test_views_of_one_name_raise_also_at_once() -> None:
    found = header()
    text = found.metadata["tierstore.views"]
    twice = text[:-1] + "," + text[1:]
    changed = Header(found.entries, {**found.metadata, "tierstore.views": twice}, 0, "")
    with pytest.raises(CorruptDataError, match="a name occurs twice"):
        decode_object(changed, "m.st")
