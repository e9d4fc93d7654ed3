"""What an object file may say of its tensors: exactly what their blocks are."""

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
    """The header of an object with both blocks, in which some views say something else."""
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


def test_what_is_written_is_read_back() -> None:
    stored = decoded()
    assert stored.packing == packed()
    assert stored.digests == tuple(digest(b.name.encode()) for b in packed().blocks)
    assert stored.key == KEY and not stored.single
    assert stored.spec().key == KEY and stored.spec("other").key == "other"


def test_the_source_reads_all_of_the_data_and_checks_each_block() -> None:
    stored = decoded()
    source = stored.source("m.st", base=4096)
    [segment] = source.segments
    assert (segment.extent.path, segment.extent.offset) == ("m.st", stored.data_start)
    assert (segment.extent.nbytes, segment.at) == (packed().dense_nbytes, 4096)
    assert [(c.nbytes, c.offset) for c in source.checks] == [
        (24, 4096 + at) for at in packed().offsets
    ]


def test_a_tensor_that_reaches_past_its_block_is_refused() -> None:
    assert "reaches past its block" in refused(tail=["t", "F32", [4], [1], 12])
    assert "reaches past its block" in refused(tail=["t", "F32", [2], [3], 12])


def test_a_tensor_that_no_machine_could_hold_is_refused() -> None:
    large = 2**63
    assert "larger than any can be" in refused(tail=["t", "F32", [large], [0], 0])
    assert "larger than any can be" in refused(tail=["t", "F32", [2**31, 2**30], [0, 0], 0])
    assert "larger than any can be" in refused(tail=["t", "F32", [0], [large], 0])


def test_a_tensor_lies_where_its_dtype_can() -> None:
    assert "lies where none of its dtype can" in refused(tail=["t", "F32", [2], [1], 13])


def test_a_tensor_of_another_rank_or_dtype_is_refused() -> None:
    assert "described wrongly" in refused(tail=["t", "F31", [3], [1], 12])
    assert "described wrongly" in refused(tail=["t", "F32", [3], [1, 1], 12])


def test_a_block_is_what_its_only_tensor_is() -> None:
    assert "is not what its tensors are" in refused(w=["w", "F32", [3, 2], [2, 1], 0])
    assert "is not what its tensors are" in refused(w=["w", "F32", [2, 2], [2, 1], 0])


def test_every_block_is_looked_at_and_every_tensor_looks_at_one() -> None:
    assert "looks at no block" in refused(w=["t", "F32", [2, 3], [3, 1], 0])
    assert "looks at no block" in refused(more=["nothing", "F32", [1], [1], 0])


NAMES = ("w", "a.b", "\u00e9", 'say "w"', "back\\slash", "two\nlines")


@pytest.mark.parametrize("count", [1, 6, 64, 65])
def test_views_read_at_once_are_those_read_one_by_one(
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


def test_views_of_one_name_are_refused_also_at_once() -> None:
    found = header()
    text = found.metadata["tierstore.views"]
    twice = text[:-1] + "," + text[1:]
    changed = Header(found.entries, {**found.metadata, "tierstore.views": twice}, 0, "")
    with pytest.raises(CorruptDataError, match="a name occurs twice"):
        decode_object(changed, "m.st")
