"""The reader parses similar headers once, and reads exactly what parsing would."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.lanes import by_lane
from tierstore.errors import TransferError
from tierstore.model import header_reader
from tierstore.model.groups import Block, Packing, TensorSpec, block_of, pack
from tierstore.model.header import HEADER_SUM, LENGTH_BYTES, NO_SUM, digest
from tierstore.model.header_reader import HeaderReader
from tierstore.model.objects import StoredObject, header_of, read_header

USUAL_KEYS = [f"k{i}" for i in range(20)]
ODD_KEYS = [
    *("F32", "25", "1", "0", "tierstore", "tierstore.views", "single", "dtype", "shape", "xxh3/"),
    *("__metadata__", "__metadata__x", "__meta", "data__", "é", "\x7f", 'a"b', "a\\b", "n", "u"),
    *("?~?", "?", ",", ":", " ", "{", "}", "]", "0123456789abcdef", "w", "weight", "k", "kk"),
]


def tensor(name: str, size: int = 25, offset: int = 0, stride: int = 1) -> TensorSpec:
    return TensorSpec(name, "F32", (size,), (stride,), offset)


def alone(name: str, size: int = 25) -> Block:
    return block_of([tensor(name, size)], 4 * size)


LAYOUTS: dict[str, Callable[[str], list[Block]]] = {
    "named by its key": lambda key: [alone(key)],
    "named below its key": lambda key: [alone(f"{key}.weight", 8), alone(f"{key}.bias", 2)],
    "named alike": lambda key: [alone("weight", 8), alone("bias", 3)],
    "tied": lambda key: [block_of([tensor(key), tensor(f"{key}'", 5, 8)], 100)],
    "strided": lambda key: [block_of([tensor(key, 13, stride=2)], 100)],
    "with escapes": lambda key: [alone(f'n\n"{key}\\'), alone(f"\\{key}", 0)],
    "named as metadata": lambda key: [alone(f"__meta{key}"), alone(f"__metadata__{key}", 2)],
    "empty": lambda key: [],
}


def packed(layout: str, key: str) -> Packing:
    return pack(LAYOUTS[layout](key))


def header(layout: str, key: str, *, single: bool = True) -> bytes:
    """Return the header of such a group, without its length. Checksums differ by key."""
    packing = packed(layout, key)
    digests = [digest(f"{key}/{block.name}".encode()) for block in packing.blocks]
    return header_of(key, packing, digests, single=single)[LENGTH_BYTES:]


def size_of(raw: bytes, layout: str, key: str) -> int:
    return LENGTH_BYTES + len(raw) + packed(layout, key).dense_nbytes


def outcome(read: Callable[[bytes, int, str], StoredObject], raw: bytes, size: int) -> Any:
    try:
        return read(raw, size, "m.st")
    except TransferError as error:
        return type(error), str(error), error.key


def assert_read_as_parsed(reader: HeaderReader, raw: bytes, size: int) -> bool:
    """Compare the reader with the parser. Returns whether the header could be read."""
    expected = outcome(read_header, raw, size)
    found = outcome(reader.read, raw, size)
    assert found == expected, raw.rstrip()
    if not isinstance(found, StoredObject):
        return False
    assert found.spec() == expected.spec() and found.packing.moves() == expected.packing.moves()
    return True


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return the headers that were parsed."""
    found = []

    def parse(raw: bytes, size: int, path: str) -> StoredObject:
        found.append(raw)
        return read_header(raw, size, path)

    monkeypatch.setattr(header_reader, "read_header", parse)
    return found


@pytest.mark.parametrize(
    "layout", ["named by its key", "named below its key", "named alike", "tied"]
)
def test_headers_of_one_layout_are_parsed_twice(layout: str, parsed: list[bytes]) -> None:
    reader = HeaderReader()
    for key in USUAL_KEYS:
        raw = header(layout, key)
        stored = reader.read(raw, size_of(raw, layout, key), "m.st")
        assert (stored.key, stored.packing) == (key, packed(layout, key))
    assert len(parsed) == 2, "only the second header shows that the layout repeats"


def test_headers_of_many_layouts_are_all_parsed(parsed: list[bytes]) -> None:
    reader = HeaderReader()
    for size, key in enumerate(USUAL_KEYS):
        packing = pack([alone(key, size)])
        raw = header_of(key, packing, [NO_SUM], single=True)[LENGTH_BYTES:]
        reader.read(raw, LENGTH_BYTES + len(raw) + packing.dense_nbytes, "m.st")
    assert len(parsed) == len(USUAL_KEYS)


def test_known_layouts_are_few(parsed: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the oldest layout, and learn it again."""
    monkeypatch.setattr(header_reader, "_MOST_LAYOUTS", 2)
    reader = HeaderReader()
    layouts = ("named by its key", "named alike", "tied")
    for layout in layouts + layouts[:1]:
        before = len(parsed)
        for key in USUAL_KEYS[:5]:
            raw = header(layout, key)
            reader.read(raw, size_of(raw, layout, key), "m.st")
        assert len(parsed) - before == 2


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_reader_any_key_reads_as_parsed(layout: str, single: bool) -> None:
    for seed in range(by_lane(2, 10)):
        reader, keys = HeaderReader(), [*USUAL_KEYS[:4], *ODD_KEYS]
        random.Random(seed).shuffle(keys)
        for key in keys + keys:
            raw = header(layout, key, single=single)
            assert assert_read_as_parsed(reader, raw, size_of(raw, layout, key)), key


def test_reader_key_that_is_a_dtype_names_no_dtype() -> None:
    """Use headers with equal texts that differ where a key occurs outside names."""
    reader = HeaderReader()
    for key in ["F32", "F32", "F32", "I32", "U32"]:
        packing = pack([block_of([TensorSpec(key, key, (25,), (1,), 0)], 100)])
        raw = header_of(key, packing, [NO_SUM], single=True)[LENGTH_BYTES:]
        assert assert_read_as_parsed(reader, raw, LENGTH_BYTES + len(raw) + 100)
        assert reader.read(raw, LENGTH_BYTES + len(raw) + 100, "m.st").packing == packing


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reader_unescaped_key_reads_as_parsed(layout: str) -> None:
    """Write headers without escaping keys and without regard to reserved names."""
    reader, refused = HeaderReader(), 0
    for key in USUAL_KEYS[:4]:
        raw = header(layout, key)
        assert assert_read_as_parsed(reader, raw, size_of(raw, layout, key))
    for odd in ODD_KEYS:
        raw = header(layout, "k7")
        other = raw.rstrip().replace(b"k7", odd.encode())
        raw = summed(other.ljust(len(raw)))
        refused += not assert_read_as_parsed(reader, raw, size_of(raw, layout, "k7"))
    assert refused


def test_reader_spaces_before_a_checksum_are_read_as_parsed() -> None:
    """Put spaces there, as other writers may: the checksum is still valid."""
    reader = HeaderReader()
    for key in ["k0", "k0", "k0", "k1"]:
        raw = summed(header("named alike", key).replace(b'bias":"', b'bias": "'))
        assert assert_read_as_parsed(reader, raw, size_of(raw, "named alike", key))


def summed(raw: bytes) -> bytes:
    """Give a changed header a valid checksum: an attacker can compute one."""
    mark = f'"{HEADER_SUM}":"'.encode()
    at = raw.find(mark) + len(mark)
    if at < len(mark) or len(raw) < at + 16:
        return raw
    blank = raw[:at] + NO_SUM.encode() + raw[at + 16 :]
    return raw[:at] + digest(blank).encode() + raw[at + 16 :]


def changed(raw: bytes, key: str, rng: random.Random) -> bytes:
    """Return a header with one change, as a hostile or broken writer might make it."""
    end = raw.rfind(b"}") + 1
    at = rng.randrange(end)
    other = rng.choice([*USUAL_KEYS, *ODD_KEYS]).encode()
    way = rng.randrange(6)
    if way == 0:
        new = raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :]
    elif way == 1:
        new = raw.replace(key.encode(), other)  # everywhere, without escapes
    elif way == 2:
        new = raw.replace(key.encode(), other, rng.randrange(1, 6))
    elif way == 3:
        new = raw[:at] + rng.choice([b" ", b'"', b"\\", b",", b"0", other]) + raw[at:]
    elif way == 4:
        new = raw[:at] + raw[at + rng.randrange(1, 20) :]
    else:
        new = raw[: end + rng.randrange(3)] + rng.choice([b"", b"\n", b"}", b"x"])
    return new if rng.random() < 0.2 else summed(new)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reader_changed_header_reads_as_parsed(layout: str) -> None:
    """Check with and without a valid checksum of the header."""
    rng = random.Random(layout)
    reader = HeaderReader()
    for key in USUAL_KEYS[:3]:
        raw = header(layout, key)
        assert assert_read_as_parsed(reader, raw, size_of(raw, layout, key))
    read = 0
    for _ in range(by_lane(500, 5000, 50_000)):
        key = rng.choice(USUAL_KEYS)
        raw = changed(header(layout, key), key, rng)
        size = size_of(raw, layout, key) + (rng.random() < 0.1)
        read += assert_read_as_parsed(reader, raw, size)
    assert read > 20, "too few headers could be read"


def test_reader_header_without_its_checksum_raises(parsed: list[bytes]) -> None:
    reader = HeaderReader()
    for key in USUAL_KEYS[:5]:
        raw = header("named alike", key)
        assert assert_read_as_parsed(reader, raw, size_of(raw, "named alike", key))
    raw = header("named alike", "k9").replace(b'"k9"', b'"k8"')
    assert not assert_read_as_parsed(reader, raw, size_of(raw, "named alike", "k9"))
    raw, before = summed(raw), len(parsed)
    assert assert_read_as_parsed(reader, raw, size_of(raw, "named alike", "k9"))
    assert len(parsed) == before, "the control's layout was not known"


def test_reader_that_compares_no_checksums_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header_reader, "has_header_sum", lambda *_: True)
    with pytest.raises(AssertionError):
        test_reader_changed_header_reads_as_parsed("named alike")


def test_reader_that_remembers_any_layout_is_caught(
    parsed: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare a header with itself instead of with that of another key."""
    monkeypatch.setattr(
        header_reader, "header_of", lambda *_, **options: bytes(LENGTH_BYTES) + parsed[-1]
    )
    with pytest.raises(AssertionError):
        test_reader_key_that_is_a_dtype_names_no_dtype()
