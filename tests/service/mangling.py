"""Messages of every kind, and streams of them, changed at random or on purpose.

A change is made to the bytes of the stream (as by failing memory), to the head of a message, to the
order of messages, or to the body of one with a matching head: that fault shows only to the parser
of the body.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence

import msgspec

from tierstore.wire import messages as m
from tierstore.wire.framing import HEAD

_encode = msgspec.msgpack.Encoder().encode

FILE = m.File("/a/model.safetensors", (1, 2, 1 << 20, (4, 0), (5, 0)), "0123456789abcdef", True)
GROUP = m.Group(
    8192,
    [m.Piece(0, 4096, 4096, 0), m.Piece(0, 65536, 100, 4096)],
    [m.Shift(0, 300, 40)],
    [m.Checksum("w", 0, 4096, "0" * 16)],
)
ROW = m.WorkerRow(7, "python", 1.5, 3, 1, 4096, 0, 0.0, 2.5, 9, 8, 4096)
TENSOR = m.TensorRow("w", "F32", [3, 4], [4, 1], 0)
PARTS: dict[str, str | int | None] = {"text": "no room", "key": "w", "nbytes": 9, "budget": None}

OF_WORKERS: list[m.Message] = [
    m.Hello(m.VERSION, "wörker"),
    m.Open([FILE, FILE]),
    m.Register(1, [GROUP, GROUP]),
    m.Lease(2, 0),
    m.Release(2),
    m.Lease(3, 1 << 40),
    m.Cancel(3),
    m.Find(4, "weights/" + "0" * 32),
    m.Upload(5, "weights/" + "a" * 32, [TENSOR], 48),
    m.Part(5, bytes(range(48))),
    m.Ping(),
    m.Status(6),
    m.Forget(0),
    m.CloseFile(0),
]
OF_SERVICES: list[m.Message] = [
    m.Welcome(m.VERSION, "/served", 1 << 30, 1 << 34, 1 << 29),
    m.Registered(1, [0, 1, 2]),
    m.Leased(2, 4096, 8192),
    m.Found(4, True),
    m.Done(5),
    m.Failed(6, "BudgetError", PARTS),
    m.Allowance(1 << 20),
    m.Reclaim(),
    m.Pong(),
    m.Report(7, 1, "/served", "/s", 1.5, {"HOST": (1, 2), "DISK": (0, None)}, 3, 4, 5, [ROW, ROW]),
    m.Refused("the service ends"),
]


def bodies_of(sent: Sequence[m.Message]) -> list[bytes]:
    """Return the messages, each without its head."""
    return [_encode(message) for message in sent]


def stream_of(bodies: Sequence[bytes], first: int = 0) -> bytes:
    """Return a stream of these bodies with matching heads; `first` numbers the first message."""
    heads = (HEAD.pack(len(b), first + i, zlib.crc32(b)) for i, b in enumerate(bodies))
    return b"".join(head + body for head, body in zip(heads, bodies, strict=True))


# Bytes --------------------------------------------------------------------------------------------


def _flip(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _insert(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data) + 1)
    return data[:at] + chance.randbytes(chance.choice((1, 2, 5, 40))) + data[at:]


def _remove(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data))
    return data[:at] + data[at + chance.choice((1, 2, 5, 40)) :]


def _double(data: bytes, chance: random.Random) -> bytes:
    at, end = sorted((chance.randrange(len(data)), chance.randrange(len(data) + 1)))
    return data[:end] + data[at:end] + data[end:]


def _cut(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data))]


NUMBERS = [
    b"\xcf" + b"\xff" * 8,  # the largest number
    b"\xd3\x80" + b"\0" * 7,  # the smallest
    b"\xcb\x7f\xf8" + b"\0" * 6,  # NaN
    b"\xc0",  # nil
    b"\xc3",  # true
    b"\x90",  # an empty array
    b"\x80",
    b"\xa0",
    b"\xdd\xff\xff\xff\xff",  # arrays, maps, texts and bytes with huge claimed lengths
    b"\xdd\x00\x0f\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xc7\x05\x01abcde",  # an extension
    b"\xa3\xff\xfe\xfd",  # invalid UTF-8
    b"\xa5\n\x1b[2J",
    b"\x91" * 2000,  # nested arrays
]


def _swap_value(data: bytes, chance: random.Random) -> bytes:
    """Replace a byte, which often is a whole value."""
    at = chance.randrange(len(data))
    return data[:at] + chance.choice(NUMBERS) + data[at + 1 :]


BYTES: list[Callable[[bytes, random.Random], bytes]] = [_flip, _insert, _remove, _double, _cut]
BODY = [*BYTES, _swap_value, _swap_value]


# Streams ------------------------------------------------------------------------------------------


def mangled(bodies: Sequence[bytes], chance: random.Random) -> bytes:
    """Return a stream of these messages with one random change."""
    at = chance.randrange(len(bodies))
    before, body, after = list(bodies[:at]), bodies[at], list(bodies[at + 1 :])
    kind = chance.randrange(8)
    if kind == 0:  # the stream
        return chance.choice(BYTES)(stream_of(bodies), chance)
    if kind == 1:  # a head, with the right checksum of its message
        length = chance.choice((0, 1, len(body) - 1, len(body) + 1, m.MAX_MESSAGE, 0xFFFFFFFF))
        number = chance.choice((at, at, at + 1, 0, 0xFFFFFFFF))
        head = HEAD.pack(length, number, zlib.crc32(body))
        return stream_of(before) + head + body + stream_of(after, at + 1)
    if kind == 2:  # the set and order of messages, correctly numbered
        what = chance.randrange(3)
        if what == 0:
            return stream_of([*before, *after])
        if what == 1:
            return stream_of([*before, body, body, *after])
        return stream_of(chance.sample(list(bodies), len(bodies)))
    changed = body  # all others: the content of a message
    for _ in range(chance.choice((1, 1, 2, 4))):
        changed = chance.choice(BODY)(changed or b"\0", chance)
    return stream_of([*before, changed, *after])
