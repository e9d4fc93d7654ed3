"""Headers: others read ours; safetensors accepts all that we accept; bit flips are noticed."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.files import with_flipped_bit
from tierstore.errors import CorruptDataError, InvalidHeaderError, TransferError
from tierstore.model import groups
from tierstore.model.groups import DTYPE_SIZES, Block, Packing, TensorSpec, contiguous_stride, pack
from tierstore.model.header import (
    FORMAT,
    KEY,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    Header,
    build_header,
    digest,
    header_length,
    header_matches_checksum,
    parse_header,
)
from tierstore.model.objects import decode_object
from tierstore.model.sizes import PAGE

DTYPES = sorted(DTYPE_SIZES)
MUTANTS = 20_000


def block_of(name: str, dtype: str, shape: tuple[int, ...]) -> Block:
    nbytes = math.prod(shape) * DTYPE_SIZES[dtype]
    spec = TensorSpec(name, dtype, shape, contiguous_stride(shape), 0)
    return groups.block_of([spec], nbytes)


def object_file(key: str, blocks: list[Block]) -> tuple[bytes, Packing, bytes]:
    """Return a whole object file, its packing, and its data alone."""
    packing = pack(blocks)
    data = random.Random(len(key)).randbytes(packing.dense_nbytes)
    pieces = [data[at : at + b.nbytes] for at, b in zip(packing.dense, packing.blocks, strict=True)]
    head = build_header(key, packing, [digest(piece) for piece in pieces])
    return head + data, packing, data


def parse_file(raw: bytes) -> tuple[Header, bytes]:
    length = header_length(raw[:LENGTH_BYTES], len(raw), "m.st")
    body = raw[LENGTH_BYTES : LENGTH_BYTES + length]
    return parse_header(body, len(raw), "m.st"), body


NAMES = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=8)
BLOCKS = st.lists(
    st.tuples(NAMES, st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)),
    max_size=6,
    unique_by=lambda row: row[0],
).map(lambda rows: [block_of(name, dtype, tuple(shape)) for name, dtype, shape in rows])


@given(NAMES, BLOCKS)
def test_header_built_is_parsed_back(key: str, blocks: list[Block]) -> None:
    raw, packing, data = object_file(key, blocks)
    header, body = parse_file(raw)
    assert header.data_start % PAGE == 0
    assert raw[header.data_start :] == data
    assert header_matches_checksum(body, header)
    stored = decode_object(header, "m.st")
    assert (stored.key, stored.packing) == (key, packing)
    for b, at, found in zip(packing.blocks, packing.dense, stored.digests, strict=True):
        assert found == digest(data[at : at + b.nbytes])


@given(NAMES, BLOCKS)
def test_header_built_loads_in_safetensors(key: str, blocks: list[Block]) -> None:
    raw, packing, data = object_file(key, blocks)
    loaded = dict(safetensors.deserialize(raw))
    assert loaded.keys() == {b.name for b in blocks}
    for b, at in zip(packing.blocks, packing.dense, strict=True):
        found = loaded[b.name]
        shape = (*b.shape[:-1], 2 * b.shape[-1]) if b.dtype == "F4" else b.shape
        assert (found["dtype"], tuple(found["shape"])) == (b.dtype, shape)
        assert bytes(found["data"]) == data[at : at + b.nbytes]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_accepted_dtype_is_one_of_safetensors(dtype: str) -> None:
    raw, _, _ = object_file("k", [block_of("t", dtype, (3,))])
    assert accepts(raw)


# Malformed headers --------------------------------------------------------------------------------


def entry(
    begin: int, end: int, dtype: str = "U8", shape: list[int] | None = None
) -> dict[str, Any]:
    shape = [end - begin] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def refused(document: Any, data_bytes: int) -> str:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    with pytest.raises(InvalidHeaderError) as caught:
        parse_header(body, LENGTH_BYTES + len(body) + data_bytes, "m.st")
    assert caught.value.path == "m.st"
    return str(caught.value)


def test_broken_rule_is_named() -> None:
    assert "gap" in refused({"a": entry(0, 4), "b": entry(5, 8)}, 8)
    assert "overlaps" in refused({"a": entry(0, 4), "b": entry(3, 8)}, 8)
    assert "the file has 9 bytes" in refused({"a": entry(0, 8)}, 9)
    assert "dtype 'F31'" in refused({"a": entry(0, 8, "F31")}, 8)
    assert "match its shape" in refused({"a": entry(0, 8, "F32", [3])}, 8)
    assert "exactly dtype" in refused({"a": {"dtype": "U8", "shape": [1]}}, 1)
    assert "no valid shape" in refused({"a": entry(0, 1, shape=[True])}, 1)
    assert "no valid data_offsets" in refused({"a": entry(0, 8) | {"data_offsets": [0, 8.0]}}, 8)
    assert "twice" in refused(b'{"__metadata__":{"a":"","a":""}}', 0)
    twice = json.dumps({"a": entry(0, 0)})[:-1]
    assert "twice" in refused(f"{twice},{twice[1:]}}}".encode(), 0)
    assert "exactly dtype" in refused(b'{"a":NaN}', 0)
    assert "not a string" in refused({"a": entry(0, 1) | {"dtype": ["U8"]}}, 1)
    assert "begin with" in refused(b' {"a":1}', 0)
    assert "not valid JSON" in refused(b'{"a"', 0)
    assert "not valid JSON" in refused(b'{"a":{"dtype":"U8","shape" [1]}}', 0)
    assert "unknown escape" in refused(b'{"\\x00":{}}', 0)
    assert "extra data" in refused(b"{}}", 0)
    assert "exactly dtype" in refused(b"{" + b'"a":{' * 100_000, 0)
    assert len(refused({"a" * 10_000: []}, 0)) < 1000, "the message is too long"
    assert "strings to strings" in refused({"__metadata__": {"a": 1}}, 0)
    assert "not valid UTF-8" in refused(b'{"__metadata__":{"a":"\\ud800"}}', 0)
    assert "match its shape" in refused({"a": entry(0, 0, shape=[2**62, 2**62, 0])}, 0)


@pytest.mark.parametrize("length", [0, 1, 93, MAX_HEADER_BYTES + 1, 2**63, 2**64 - 1])
def test_impossible_length_raises(length: int) -> None:
    with pytest.raises(InvalidHeaderError, match=f"declares a header of {length} bytes"):
        header_length(length.to_bytes(8, "little"), 100, "m.st")


@pytest.mark.parametrize("length", [2, 92])
def test_possible_length_is_accepted(length: int) -> None:
    assert header_length(length.to_bytes(8, "little"), 100, "m.st") == length


# Mutants: safetensors loads whatever is accepted here ---------------------------------------------


def accepts(raw: bytes) -> bool:
    try:
        safetensors.deserialize(raw)
    except safetensors.SafetensorError:
        return False
    return True


ODD = [0, 1, -1, 8, 2**31, 2**63 - 1, 2**63, 2**64, 1.0, 1e3, True, None, "8", "", [], {}, [0, 8]]


def edit(document: dict[str, Any], rnd: random.Random) -> None:
    """Make one change to a random place of the document."""
    holder, place = rnd.choice(list(places(document)))
    action = rnd.randrange(4)
    if action == 0 and isinstance(holder, dict):
        holder[rnd.choice(["extra", "dtype", "t1", "__metadata__", "\ud800", ""])] = holder[place]
    elif action == 1:
        del holder[place]
    elif action == 2 and type(holder[place]) is int:
        holder[place] += rnd.choice([-8, -4, -1, 1, 4, 8])
    elif place == "dtype":
        holder[place] = rnd.choice([*DTYPES, "F4", "u8", "F32 "])
    else:
        holder[place] = rnd.choice(ODD)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = value if isinstance(value, dict) else range(len(value))
    for key in list(keys):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from places(value[key])


def plain_document() -> dict[str, Any]:
    return {
        "__metadata__": {"format": "pt"},
        "t1": entry(0, 8, "F32", [2]),
        "t2": entry(8, 16, "U8", [2, 4]),
        "t3": entry(16, 16, "F64", [0, 4]),
        "t4": entry(16, 24, "I64", []),
    }


def written(document: dict[str, Any], *, ascii_only: bool = True) -> bytes:
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=ascii_only)
    return text.encode("utf-8", "surrogatepass")


def structured(rnd: random.Random) -> bytes:
    """Return the document with changed values, as valid JSON."""
    document = plain_document()
    for _ in range(rnd.choice([0, 1, 1, 1, 2, 3])):
        edit(document, rnd)
    return written(document, ascii_only=rnd.random() < 0.9)


PLAIN = written(plain_document())
TOKENS = [
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b" ",
    b"\\",
    b"0",
    b"-",
    b"1e1",
    b"\xff",
    b"\x00",
]


def scrambled(rnd: random.Random) -> bytes:
    """Return the text with some bytes replaced, removed or inserted."""
    body = bytearray(PLAIN)
    for _ in range(rnd.randint(1, 2)):
        at = rnd.randrange(len(body))
        count = rnd.choice([0, 1, 1, 1, 4])
        body[at : at + count] = rnd.choice([b"", rnd.choice(TOKENS), rnd.randbytes(1)])
    return bytes(body)


@pytest.mark.parametrize("mutate", [structured, scrambled])
def test_accepted_headers_load_in_safetensors(
    mutate: Callable[[random.Random], bytes],
) -> None:
    rnd = random.Random(7)
    passed = 0
    for _ in range(MUTANTS // 2):
        body = mutate(rnd)
        raw = len(body).to_bytes(LENGTH_BYTES, "little") + body + bytes(24)
        try:
            parse_file(raw)
        except TransferError:
            continue
        passed += 1
        assert accepts(raw), body
    assert MUTANTS // 100 < passed < MUTANTS // 2 * 0.9, "all accepted or all rejected"


# Bit rot: every flipped bit is noticed ------------------------------------------------------------


def real_file() -> bytes:
    blocks = [block_of("weight", "BF16", (16, 8)), block_of("bias", "F32", (16,))]
    return object_file("blocks.7", blocks)[0]


def notices(raw: bytes, *, by_checksum: bool) -> bool:
    """Return whether a reader rejects the file, with or without the header's checksum."""
    try:
        header, body = parse_file(raw)
        decode_object(header, "m.st")
    except CorruptDataError:
        return True
    return by_checksum and not header_matches_checksum(body, header)


def test_flipped_bit_of_a_header_is_noticed() -> None:
    raw = real_file()
    assert not notices(raw, by_checksum=True)
    head = int.from_bytes(raw[:LENGTH_BYTES], "little") + LENGTH_BYTES
    flipped = (with_flipped_bit(raw, *divmod(bit, 8)) for bit in range(8 * head))
    missed = [bit for bit, each in enumerate(flipped) if not notices(each, by_checksum=True)]
    assert missed == []


def test_flipped_bits_without_checksum_go_unnoticed() -> None:
    raw = real_file()
    text = raw.rstrip(b"\0").index(b"}}") * 8
    flipped = (with_flipped_bit(raw, *divmod(bit, 8)) for bit in range(text))
    missed = [bit for bit, each in enumerate(flipped) if not notices(each, by_checksum=False)]
    assert len(missed) > text // 20


def test_malformed_checksum_is_ignored() -> None:
    header, body = parse_file(real_file())
    assert header_matches_checksum(body, header)
    for wrong in ("", "0" * 15, "0" * 17, '":"' + "0" * 13):
        metadata = dict(header.metadata) | {"tierstore.header_xxh3": wrong}
        assert not header_matches_checksum(body, Header(header.entries, metadata, 0, ""))


# Object files -------------------------------------------------------------------------------------


def edited_object(change: Callable[[dict[str, Any]], None]) -> Header:
    """Return a real object's header after a change that keeps it a valid safetensors header."""
    raw = real_file()
    _, body = parse_file(raw)
    document = json.loads(body)
    change(document)
    again = json.dumps(document).encode()
    data = len(raw) - LENGTH_BYTES - len(body)
    return parse_header(again, LENGTH_BYTES + len(again) + data, "m.st")


def views_of(document: dict[str, Any]) -> Any:
    return json.loads(document["__metadata__"]["tierstore.views"])


def with_views(name: str, at: int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        views = views_of(document)
        views[name][at] = value
        document["__metadata__"]["tierstore.views"] = json.dumps(views)

    return change


def without(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["__metadata__"].pop(key)


def renamed(document: dict[str, Any], name: str) -> None:
    """Rename the tensor `weight`, with the name as JSON text."""
    written = name if '"' in name else json.dumps(name)[1:-1]
    views = document["__metadata__"]["tierstore.views"].replace('{"weight":', f'{{"{written}":')
    document["__metadata__"]["tierstore.views"] = views


DAMAGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "no key": without(KEY),
    "an empty key": lambda d: d["__metadata__"].update({KEY: ""}),
    "a key that is too long": lambda d: d["__metadata__"].update({KEY: "x" * 1025}),
    "no views": without("tierstore.views"),
    "a block that no tensor looks at": lambda d: d["__metadata__"].update(
        {"tierstore.views": "{}"}
    ),
    "a checksum that is none": lambda d: d["__metadata__"].update(
        {"tierstore.xxh3/weight": "F" * 16}
    ),
    "a view of another dtype": with_views("weight", 1, "F16"),
    "a view of another shape": with_views("weight", 2, [8, 16]),
    "a view of more dimensions than there are": with_views("weight", 2, [1] * 65),
    "a stride of text": with_views("weight", 3, ["8", 1]),
    "a size that no tensor can have": with_views("weight", 2, [0, 2**63]),
    "more elements than can be counted": with_views("weight", 3, [0, 0]),
    "a name that is no UTF-8": lambda d: renamed(d, "\ud800"),
    "a name that occurs twice": lambda d: renamed(d, 'a":["bias","F32",[16],[1],0],"bias'),
    "no format": without("tierstore.format"),
    "another format": lambda d: d["__metadata__"].update({"tierstore.format": FORMAT + "0"}),
    "no checksum of a block": without("tierstore.xxh3/weight"),
    "a view of no block": with_views("weight", 0, "nothing"),
    "a view past its block": with_views("weight", 4, 4),
    "a negative offset": with_views("weight", 4, -4),
    "an unknown dtype": with_views("weight", 1, "F31"),
    "a stride of another rank": with_views("weight", 3, [1]),
    "a shape of text": with_views("weight", 2, "ab"),
    "views that are no JSON": lambda d: d["__metadata__"].update({"tierstore.views": "{"}),
    "views that are a list": lambda d: d["__metadata__"].update({"tierstore.views": "[]"}),
    "a view that is no list": lambda d: d["__metadata__"].update({"tierstore.views": '{"a":1}'}),
    "a block that is a list": with_views("weight", 0, []),
    "a dtype that is a list": with_views("weight", 1, []),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_object_with_damaged_metadata_raises(damage: str) -> None:
    header = edited_object(DAMAGES[damage])
    with pytest.raises(CorruptDataError, match=r"m\.st"):
        decode_object(header, "m.st")


def test_object_formatted_differently_is_read() -> None:
    """Check the control: other spaces and order in the JSON are not damage."""
    assert decode_object(edited_object(lambda document: None), "m.st").key == "blocks.7"


def test_tensor_misaligned_for_its_dtype_raises() -> None:
    """Reject it at once, because torch cannot view such a tensor later."""
    views = (TensorSpec("a", "U8", (9,), (1,), 0), TensorSpec("b", "F32", (2,), (1,), 1))
    raw, _, _ = object_file("k", [Block("a", "U8", (9,), 9, views)])
    with pytest.raises(CorruptDataError, match="is misaligned for its dtype"):
        decode_object(parse_file(raw)[0], "m.st")
    views = (views[0], TensorSpec("b", "F32", (1,), (1,), 4))
    raw, _, _ = object_file("k", [Block("a", "U8", (9,), 9, views)])
    assert decode_object(parse_file(raw)[0], "m.st").packing.blocks[0].views == views


def test_views_nested_too_deep_raise() -> None:
    def nest(document: dict[str, Any]) -> None:
        document["__metadata__"]["tierstore.views"] = "[" * 200_000

    with pytest.raises(CorruptDataError):
        decode_object(edited_object(nest), "m.st")
