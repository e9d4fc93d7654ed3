"""A stream yields the messages that were sent, or raises a protocol error."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence
from typing import Any, get_args

import msgspec
import pytest

from tests.lanes import by_lane
from tests.service.mangling import OF_SERVICES, OF_WORKERS, bodies_of, mangled, stream_of
from tierstore.wire import messages as m
from tierstore.wire.framing import Incoming, Outgoing, ProtocolError

MIB = 1 << 20
SIDES = [
    pytest.param(m.FromWorker, OF_WORKERS, id="worker"),
    pytest.param(m.FromService, OF_SERVICES, id="service"),
]


def received(data: bytes, kinds: Any, sizes: Sequence[int] = ()) -> list[m.Message]:
    """Return the messages of a stream that arrives in pieces of these sizes, then as a whole."""
    incoming = Incoming[m.Message](kinds)
    found, at = [], 0
    for size in [*sizes, len(data)]:
        found += incoming.feed(data[at : at + size])
        at += size
    return found


@pytest.mark.parametrize(("kinds", "sent"), SIDES)
def test_messages_of_every_kind_survive_every_split(kinds: Any, sent: list[m.Message]):
    assert {type(message) for message in sent} == set(get_args(kinds))
    outgoing = Outgoing()
    data = b"".join(outgoing.encode(message) for message in sent)
    assert data == stream_of(bodies_of(sent))
    for at in range(len(data)):
        assert received(data, kinds, [at]) == sent
    for size in (1, 2, 3, 11, 12, 13):
        assert received(data, kinds, [size] * (len(data) // size)) == sent
    chance = random.Random(3)
    for _ in range(200):
        sizes = [chance.randrange(90) for _ in range(40)]
        assert received(data, kinds, sizes) == sent


def test_unfinished_message_is_recognised():
    data = stream_of(bodies_of(OF_WORKERS[:2]))
    incoming = Incoming[m.Message](m.FromWorker)
    assert not incoming.unfinished
    assert list(incoming.feed(data[:-1])) == OF_WORKERS[:1]
    assert incoming.unfinished
    assert list(incoming.feed(data[-1:])) == OF_WORKERS[1:2]
    assert not incoming.unfinished


def test_message_too_long_is_not_sent():
    tensors = [m.TensorRow("w" * 4000, "U8", [1], [1], 0)] * 300
    with pytest.raises(ValueError, match="longer than"):
        Outgoing().encode(m.Upload(0, "weights/x", tensors, 1))


LONGEST = {
    "pieces": [0, [[1 << 20, [[0, 0, 1, 0]] * 34_000, [], []] for _ in range(5)]],
    "shifts": [0, [[1 << 20, [], [[0, 0, 1]] * 260_000, []]]],
    "checksums": [0, [[1 << 20, [], [], [["a", 0, 1, "b"]] * 140_000]]],
}


@pytest.mark.parametrize("what", LONGEST)
def test_longest_message_takes_little_memory(what: str):
    body = msgspec.msgpack.encode(["Register", *LONGEST[what]])
    assert 0.8 * m.MAX_MESSAGE < len(body) <= m.MAX_MESSAGE
    data = stream_of([body])
    found, peak = peak_of(lambda: received(data, m.FromWorker))
    assert isinstance(found[0], m.Register)
    assert peak < 16 * MIB  # a row of four bytes is an object of dozens


def peak_of(action: Any) -> tuple[Any, int]:
    """Return a call's result, and its peak memory in bytes."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        result = action()
        return result, tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("kinds", "sent"), SIDES)
def test_mutated_message_is_parsed_or_a_protocol_error(kinds: Any, sent: list[m.Message]):
    chance = random.Random(41)
    bodies = bodies_of(sent)
    known = tuple(get_args(kinds))
    outcomes = {"messages": 0, "nonsense": 0}

    def attack(data: bytes) -> None:
        sizes = [chance.randrange(400) for _ in range(4)]
        try:
            found = received(data, kinds, sizes)
        except ProtocolError as error:
            assert str(error)
            outcomes["nonsense"] += 1
        else:
            assert all(isinstance(message, known) for message in found)
            outcomes["messages"] += 1

    attacks = by_lane(1000, 5000, 25_000)
    for _ in range(attacks):
        attack(mangled(bodies, chance))
    assert outcomes["nonsense"] > attacks / 3  # most changes are not harmless
    assert outcomes["messages"] > attacks / 50  # and not all fail at the first check
    _, peak = peak_of(
        lambda: [attack(mangled(bodies, chance)) for _ in range(by_lane(100, 500, 2000))]
    )
    assert peak < 16 * MIB
