"""Hostile files: seeds, and all kinds of changes to them.

A change acts at one level: bits and bytes, the length that a file announces, the file's end, or the
JSON, which is parsed, changed and written again (names may repeat there). The header of an object
file is then `sealed` with a new checksum, or not: bit rot does not know the checksum, an attacker
does.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import save

from tierstore.model.groups import DTYPE_SIZES
from tierstore.model.header import (
    HEADER_SUM,
    LENGTH_BYTES,
    NO_SUM,
    SUM_PREFIX,
    VIEWS,
    build_header,
    digest,
)
from tierstore.system.views import pack_tensors

KEY = "blocks.7"


@dataclass(frozen=True)
class Seed:
    """A whole file; `ours` if it is an object file of a store."""

    name: str
    raw: bytes
    ours: bool

    @property
    def head(self) -> bytes:
        """The header, without the length before it."""
        length = int.from_bytes(self.raw[:LENGTH_BYTES], "little")
        return self.raw[LENGTH_BYTES : LENGTH_BYTES + length]

    @property
    def data(self) -> bytes:
        """The bytes after the header."""
        return self.raw[LENGTH_BYTES + len(self.head) :]


@dataclass(frozen=True)
class Mutant:
    """A changed file, and the change. `sealed`: its header's checksum was updated."""

    seed: Seed
    raw: bytes
    done: str
    sealed: bool = False


def file_of(head: bytes, data: bytes) -> bytes:
    return len(head).to_bytes(LENGTH_BYTES, "little") + head + data


def object_file(key: str, tensors: dict[str, torch.Tensor]) -> bytes:
    """An object file as a store writes it."""
    packing, sources = pack_tensors(key, tensors)
    data = [sources[block.name].numpy().tobytes() for block in packing.blocks]
    return build_header(key, packing, map(digest, data)) + b"".join(data)


def tensors() -> dict[str, torch.Tensor]:
    return {
        "weight": torch.arange(24, dtype=torch.bfloat16).reshape(4, 6),
        "bias": torch.arange(5, dtype=torch.float64),
        "none": torch.empty(3, 0, dtype=torch.int32),
        "one": torch.tensor(True),
    }


def seeds() -> list[Seed]:
    whole = torch.arange(64, dtype=torch.uint8)
    tied = {
        "part": whole[1:20],
        "other": whole[4:24].view(torch.float32),
        "turned": torch.arange(12.0).reshape(3, 4).T,
        "spread": torch.ones(1).expand(5),
        "Größe/漢字": torch.ones(2, dtype=torch.int16),
    }
    plain = save(tensors(), {"format": "pt", "quoted": 'a "b"\n'})
    length = int.from_bytes(plain[:LENGTH_BYTES], "little")
    head, data = plain[LENGTH_BYTES : LENGTH_BYTES + length], plain[LENGTH_BYTES + length :]
    return [
        Seed("of others", plain, ours=False),
        Seed("of others, its data at an odd place", file_of(head + b" ", data), ours=False),
        Seed("of others, one tensor", save({"a": torch.ones(3)}), ours=False),
        Seed("of others, empty", save({}), ours=False),
        Seed("an object", object_file(KEY, tensors()), ours=True),
        Seed("an object, tied", object_file(KEY, tied), ours=True),
        Seed("an object, empty", object_file(KEY, {}), ours=True),
    ]


# JSON in which names may repeat ------------------------------------------------------------------


class Members(list[tuple[Any, Any]]):
    """The members of a JSON object in their order; names may repeat."""


class Literal(str):
    """Text that is written verbatim."""

    __slots__ = ()


def parsed(text: str | bytes) -> Any:
    return json.loads(text, object_pairs_hook=Members)


def written(value: Any, *, ascii_only: bool = True) -> str:
    if isinstance(value, Literal):
        return str(value)
    if isinstance(value, Members):
        rows = (
            f"{written(k, ascii_only=ascii_only)}:{written(v, ascii_only=ascii_only)}"
            for k, v in value
        )
        return "{" + ",".join(rows) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(written(each, ascii_only=ascii_only) for each in value) + "]"
    return json.dumps(value, ensure_ascii=ascii_only)


Place = tuple[Any, int]


def places(value: Any) -> Iterator[Place]:
    """Yield the place of every value of a document, as a container and an index."""
    if isinstance(value, list):
        for i, each in enumerate(value):
            yield value, i
            yield from places(each[1] if isinstance(value, Members) else each)


def value_at(place: Place) -> Any:
    found = place[0][place[1]]
    return found[1] if isinstance(place[0], Members) else found


def put_at(place: Place, value: Any) -> None:
    holder, i = place
    holder[i] = (holder[i][0], value) if isinstance(holder, Members) else value


NUMBERS = (
    [0, 1, -1, 2, 7, 8, 2**31 - 1, 2**31, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 10**30]
    + [0.0, 1.0, 8.0, -0.0, 1e3, 1.5, True, False, None]
    + [Literal(text) for text in ("NaN", "Infinity", "-Infinity", "1e999", "-0", "00", "08", "0x8")]
    + [
        Literal(text)
        for text in ("1" + "0" * 400, "8.", ".8", "+8", "8e0", "1_0", "9" * 5000, "\u0668")
    ]
)
TEXTS = [
    *("", "a", "__metadata__", "../../a", "/etc/passwd", "a\0b", "\x1b[31m", "\ud800", "\udcff"),
    *("x" * 5000, "\u202e", "A", "\uff41", "\xe9", "e\u0301", "tierstore.key", "1", "[]", "{}"),
]
WRONG = [*NUMBERS, *TEXTS, [], [[]], Members(), Members([("a", 1)]), [0, 0], [1] * 70, [2**40] * 3]
WRONG += [Literal("[" * 2000 + "]" * 2000), Literal("[" * 100_000), Literal('{"a":' * 3000)]
DTYPES = [*DTYPE_SIZES, "F4", "F8", "f32", "F32 ", "", "F16\0", "C128", "F6_E2M3", "E8M0"]
EXTRA = ["dtype", "shape", "data_offsets", "extra", "", "weight", "__metadata__", "dtype\u0000"]


def edit(document: Any, rnd: random.Random) -> str:
    """Make one change to a random place of a document. Returns its name."""
    found = list(places(document))
    if not found:
        document.append((rnd.choice(EXTRA), copy.deepcopy(rnd.choice(WRONG))))
        return "add"
    act = rnd.choice(ACTS)
    act(rnd.choice(found), rnd)
    return act.__name__.strip("_")


def _replace(place: Place, rnd: random.Random) -> None:
    put_at(place, copy.deepcopy(rnd.choice(WRONG)))


def _count(place: Place, rnd: random.Random) -> None:
    """Replace a number, mostly by one near it."""
    value = value_at(place)
    numbers = value if isinstance(value, list) and not isinstance(value, Members) else None
    if type(value) is int:
        put_at(place, value + rnd.choice([-8, -4, -2, -1, 1, 2, 4, 8]))
    elif numbers and type(numbers[0]) is int:
        i = rnd.randrange(len(numbers))
        numbers[i] = rnd.choice([*NUMBERS, *[i * 4 for i in range(20)]])


def _remove(place: Place, rnd: random.Random) -> None:
    del place[0][place[1]]


def _repeat(place: Place, rnd: random.Random) -> None:
    holder, i = place
    holder.insert(rnd.randrange(len(holder) + 1), copy.deepcopy(holder[i]))


def _add(place: Place, rnd: random.Random) -> None:
    holder, i = place
    name, value = rnd.choice(EXTRA + TEXTS), copy.deepcopy(rnd.choice([*WRONG, value_at(place)]))
    holder.insert(i, (name, value) if isinstance(holder, Members) else value)


def _rename(place: Place, rnd: random.Random) -> None:
    holder, i = place
    if isinstance(holder, Members):
        others = [name for name, _ in holder]
        holder[i] = (rnd.choice([*EXTRA, *TEXTS, *others]), holder[i][1])


def _exchange(place: Place, rnd: random.Random) -> None:
    rnd.shuffle(place[0])


def _dtype(place: Place, rnd: random.Random) -> None:
    put_at(place, rnd.choice(DTYPES))


def _shift(place: Place, rnd: random.Random) -> None:
    """Move a range of bytes: a hole, or an overlap."""
    value = value_at(place)
    if isinstance(value, list) and len(value) == 2 and all(type(each) is int for each in value):
        by = rnd.choice([-16, -8, -1, 1, 8, 16, 2**40])
        put_at(place, [each + by for each in value])


def _huge(place: Place, rnd: random.Random) -> None:
    """Insert sizes whose product overflows; with a zero among them the product is zero."""
    value = value_at(place)
    if isinstance(value, list) and not isinstance(value, Members):
        put_at(place, [2 ** rnd.choice([31, 40, 62]) for _ in range(3)] + value)


ACTS = [_replace, _count, _remove, _repeat, _add, _rename, _exchange, _dtype, _shift, _huge]


# Mutants ------------------------------------------------------------------------------------------


def mutants(rnd: random.Random, count: int) -> Iterator[Mutant]:
    """Return `count` mutants over all seeds, each by a change of another kind."""
    kinds: list[Callable[[Seed, random.Random], Mutant]] = [
        *(bits, splice, lie, cut),
        *(structure, structure, structure, structure, views, digests),
    ]
    known = seeds()
    for number in range(count):
        yield kinds[number % len(kinds)](rnd.choice(known), rnd)


def bits(seed: Seed, rnd: random.Random) -> Mutant:
    raw = bytearray(seed.raw)
    text = LENGTH_BYTES + len(seed.head.rstrip())
    for _ in range(rnd.choice([1, 1, 2, 8])):
        raw[rnd.randrange(rnd.choice([text, len(raw)]))] ^= 1 << rnd.randrange(8)
    return Mutant(seed, bytes(raw), "flip bits")


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
TOKENS += [
    b"\\ud800",
    b"\\u0000",
    b"\xed\xa0\x80",
    b"\xc0\xaf",
    b"\xf4\x90\x80\x80",
    b"\xef\xbb\xbf",
]


def splice(seed: Seed, rnd: random.Random) -> Mutant:
    """Insert, cut or replace bytes in the header; its announced length is kept."""
    head = bytearray(seed.head)
    for _ in range(rnd.randint(1, 3)):
        at = rnd.randrange(len(head.rstrip()) + 1)
        gone = rnd.choice([0, 0, 1, 1, 2, 8])
        head[at : at + gone] = rnd.choice([b"", rnd.choice(TOKENS), rnd.randbytes(1)])
    return _again(seed, bytes(head), "splice bytes", rnd)


def lie(seed: Seed, rnd: random.Random) -> Mutant:
    length = len(seed.head)
    near = [length + by for by in (-100, -8, -1, 1, 8, 100) if length + by >= 0]
    huge = [len(seed.raw), 2**24, 2**24 + 1, 10**8, 10**8 + 1, 2**31, 2**32, 2**63, 2**64 - 1]
    said = rnd.choice([*near, *huge, 0, 1, 2])
    raw = said.to_bytes(LENGTH_BYTES, "little") + seed.raw[LENGTH_BYTES:]
    return Mutant(seed, raw, f"say that the header has {said} bytes")


def cut(seed: Seed, rnd: random.Random) -> Mutant:
    where = rnd.choice([len(seed.raw), LENGTH_BYTES + len(seed.head), LENGTH_BYTES, 100])
    longer = rnd.randbytes(rnd.choice([1, 8, 4096])) if rnd.random() < 0.3 else b""
    kept = len(seed.raw) if longer else max(where - rnd.choice([0, 1, 2, 8, 64]), 0)
    return Mutant(seed, seed.raw[:kept] + longer, f"{kept} bytes, and {len(longer)} more")


def structure(seed: Seed, rnd: random.Random) -> Mutant:
    """Change the header's JSON."""
    document = parsed(seed.head)
    done = [edit(document, rnd) for _ in range(rnd.choice([1, 1, 1, 2, 3]))]
    return _from_document(seed, document, ", ".join(done), rnd)


def views(seed: Seed, rnd: random.Random) -> Mutant:
    """Change an object file's description of its tensors."""
    document = parsed(seed.head)
    metadata = _member(document, "__metadata__")
    if not seed.ours or metadata is None:
        return structure(seed, rnd)
    rows = parsed(_member(metadata, VIEWS) or "{}")
    done = [edit(rows, rnd) for _ in range(rnd.choice([1, 1, 2]))]
    text = (
        written(rows)
        if rnd.random() < 0.9
        else written(rows).replace(",", rnd.choice([", ", "", ",,"]), 1)
    )
    _set_member(metadata, VIEWS, text)
    return _from_document(seed, document, f"views: {', '.join(done)}", rnd, seal=True)


def digests(seed: Seed, rnd: random.Random) -> Mutant:
    """Change or remove checksums."""
    document = parsed(seed.head)
    metadata = _member(document, "__metadata__")
    if not seed.ours or metadata is None:
        return bits(seed, rnd)
    names = [n for n, _ in metadata if n.startswith((SUM_PREFIX, HEADER_SUM, "tierstore."))]
    name = rnd.choice(names)
    wrong = [
        "",
        "0" * 16,
        "0" * 15,
        "F" * 16,
        "f" * 16,
        "0" * 5000,
        "\ud800",
        '":"' + "0" * 13,
        1,
        None,
    ]
    _set_member(metadata, name, rnd.choice(wrong))
    return _from_document(seed, document, f"{name} changed", rnd)


def _member(members: Members, name: str) -> Any:
    return next((value for found, value in members if found == name), None)


def _set_member(members: Members, name: str, value: Any) -> None:
    i = next(i for i, (found, _) in enumerate(members) if found == name)
    members[i] = (name, value)


def _from_document(
    seed: Seed, document: Any, done: str, rnd: random.Random, seal: bool = False
) -> Mutant:
    ascii_only = rnd.random() < 0.9
    head = written(document, ascii_only=ascii_only).encode("utf-8", "surrogatepass")
    return _again(seed, head, done, rnd, seal)


def _again(seed: Seed, head: bytes, done: str, rnd: random.Random, seal: bool = False) -> Mutant:
    """Return a file with this header, padded to the seed's length; perhaps sealed."""
    head = head.ljust(len(seed.head))
    seal = seed.ours and (seal or rnd.random() < 0.5)
    return Mutant(seed, file_of(sealed(head) if seal else head, seed.data), done, seal)


def sealed(head: bytes) -> bytes:
    """Return an object file's header with the right checksum."""
    mark = f'"{HEADER_SUM}":"'.encode()
    at = head.find(mark) + len(mark)
    if at < len(mark) or head[at + len(NO_SUM) : at + len(NO_SUM) + 1] != b'"':
        return head
    blank = head[:at] + NO_SUM.encode() + head[at + len(NO_SUM) :]
    return head[:at] + digest(blank).encode() + head[at + len(NO_SUM) :]
