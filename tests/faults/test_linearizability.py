"""The checker of histories finds an order exactly where there is one."""

from __future__ import annotations

import itertools
import random
from math import inf

import pytest

from tests.faults.linearizability import (
    History,
    Operation,
    Some,
    Undecided,
    Value,
    assert_linearizable,
    lent,
    order,
)


def put(begin: int, end: float, value: int, *, maybe: bool = False) -> Operation:
    return Operation(begin, end, Some.ANY, value, maybe=maybe)


def get(begin: int, end: int, value: int | None) -> Operation:
    return Operation(begin, end, value, Some.SAME)


def update(begin: int, end: int, old: int, new: int) -> Operation:
    return Operation(begin, end, old, new)


def discard(begin: int, end: int) -> Operation:
    return Operation(begin, end, Some.GROUP, None)


def seen(begin: int, end: int) -> Operation:
    return Operation(begin, end, Some.GROUP, Some.SAME)


def lend(begin: int, end: int, value: int) -> Operation:
    return Operation(begin, end, value, lent(value))


def give_back(begin: int, end: int, value: int, left: int | None) -> Operation:
    return Operation(begin, end, Some.ANY, left, only=lent(value))


SOUND: dict[str, tuple[int | None, list[Operation]]] = {
    "nothing happens": (None, []),
    "one after the other": (None, [put(0, 1, 5), get(2, 3, 5), discard(4, 5), get(6, 7, None)]),
    "a get beside a put finds the old": (1, [put(0, 5, 2), get(1, 2, 1), get(6, 7, 2)]),
    "a get beside a put finds the new": (1, [put(0, 5, 2), get(1, 2, 2), get(3, 4, 2)]),
    "two puts at once, either first": (None, [put(0, 9, 1), put(1, 8, 2), get(10, 11, 1)]),
    "the put that began later comes first": (
        None,
        [put(0, 9, 1), put(1, 8, 2), get(2, 3, 2), get(4, 5, 1)],
    ),
    "updates in a row": (1, [update(0, 9, 2, 3), update(1, 8, 1, 2), get(10, 11, 3)]),
    "an update is lost to a put beside it": (1, [update(0, 9, 1, 2), put(3, 4, 3), get(5, 6, 3)]),
    "taken by one of two": (1, [Operation(0, 9, 1, None), get(0, 9, None)]),
    "put again after a discard beside it": (1, [discard(0, 9), put(1, 8, 2), get(10, 11, 2)]),
    "a put cut short has happened": (1, [put(0, inf, 2, maybe=True), get(5, 6, 2)]),
    "a put cut short happens later": (
        1,
        [put(0, inf, 2, maybe=True), get(5, 6, 1), put(7, 8, 3), get(9, 10, 3), get(11, 12, 2)],
    ),
    "a put cut short never happens": (1, [put(0, inf, 2, maybe=True), get(5, 6, 1)]),
    "the same value is put twice": (None, [put(0, 1, 5), discard(2, 3), put(4, 5, 5), seen(6, 7)]),
    "lent, changed, found": (1, [lend(0, 1, 1), seen(2, 3), give_back(4, 5, 1, 2), get(6, 7, 2)]),
    "lent and discarded meanwhile": (
        1,
        [lend(0, 1, 1), discard(2, 3), get(4, 5, None), give_back(6, 7, 1, 2), get(8, 9, None)],
    ),
    "lent to be taken, and replaced meanwhile": (
        1,
        [lend(0, 1, 1), put(2, 3, 2), give_back(4, 5, 1, None), get(6, 7, 2)],
    ),
}

UNSOUND: dict[str, tuple[int | None, list[Operation]]] = {
    "a stale read": (1, [put(0, 1, 2), get(2, 3, 1)]),
    "a stale read beside another put": (1, [put(0, 1, 2), put(2, 9, 3), get(3, 4, 1)]),
    "the new value and then the old one": (1, [put(0, 9, 2), get(1, 2, 2), get(3, 4, 1)]),
    "two see two puts in two orders": (
        None,
        [put(0, 1, 1), put(0, 1, 2), get(2, 3, 1), get(4, 5, 2)],
    ),
    "a lost update": (1, [update(0, 9, 1, 2), update(1, 8, 1, 3)]),
    "an update that is gone afterwards": (1, [update(0, 1, 1, 2), get(2, 3, 1)]),
    "taken twice": (1, [Operation(0, 9, 1, None), Operation(1, 8, 1, None)]),
    "a value that nobody wrote": (1, [put(0, 9, 2), get(1, 2, 7)]),
    "a value from the future": (1, [get(0, 1, 2), put(2, 3, 2)]),
    "a discarded group is back": (1, [discard(0, 1), get(2, 3, 1)]),
    "a group is gone that nobody discarded": (1, [get(0, 1, None)]),
    "a key is seen after it was discarded": (1, [discard(0, 1), seen(2, 3)]),
    "a discard of nothing": (None, [discard(0, 1)]),
    "a put is lost": (1, [put(0, 1, 2), get(2, 3, 2), put(4, 5, 3), get(6, 7, 2)]),
    "a put cut short comes and goes": (1, [put(0, inf, 2, maybe=True), get(1, 2, 2), get(3, 4, 1)]),
    "a put cut short happens twice": (
        1,
        [put(0, inf, 2, maybe=True), get(1, 2, 2), put(3, 4, 3), get(5, 6, 3), get(7, 8, 2)],
    ),
    "found while it is lent": (1, [lend(0, 1, 1), get(2, 3, 1), give_back(4, 5, 1, 2)]),
    "lent twice": (
        1,
        [lend(0, 1, 1), lend(2, 3, 1), give_back(4, 5, 1, None), give_back(4, 5, 1, None)],
    ),
    "not known while it is lent": (1, [lend(0, 1, 1), get(2, 3, None), give_back(4, 5, 1, 2)]),
    "what was given back is not found": (1, [lend(0, 1, 1), give_back(2, 3, 1, 2), get(4, 5, 1)]),
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_history_has_an_order(name: str) -> None:
    start, operations = SOUND[name]
    found = order(start, operations)
    assert found is not None
    assert_explains(found, start, operations)
    assert_linearizable("key", start, operations)


@pytest.mark.parametrize("name", UNSOUND)
def test_unsound_history_has_none(name: str) -> None:
    start, operations = UNSOUND[name]
    assert order(start, operations) is None
    with pytest.raises(AssertionError, match="key: no order"):
        assert_linearizable("key", start, operations)


def assert_explains(found: list[Operation], start: int | None, given: list[Operation]) -> None:
    """Check the definition, word for word."""
    assert len(set(map(id, found))) == len(found)
    assert {id(op) for op in given if not op.maybe} <= set(map(id, found)) <= set(map(id, given))
    value: int | None = start
    for i, op in enumerate(found):
        assert op.fits(value)
        assert all(later.end >= op.begin for later in found[i + 1 :])
        value = op.after(value)


def by_trying(start: int | None, operations: list[Operation]) -> bool:
    """Return whether any order fits, by trying all."""
    sure = [op for op in operations if not op.maybe]
    perhaps = [op for op in operations if op.maybe]
    for count in range(len(perhaps) + 1):
        for some in itertools.combinations(perhaps, count):
            for found in itertools.permutations([*sure, *some]):
                try:
                    assert_explains(list(found), start, operations)
                except AssertionError:
                    continue
                return True
    return False


def random_operation(rng: random.Random) -> Operation:
    begin = rng.randrange(12)
    end = begin + rng.randrange(1, 8)
    found: Value = rng.choice([Some.ANY, Some.GROUP, None, 1, 2, 3])
    left: Value = rng.choice([Some.SAME, Some.SAME, None, 1, 2, 3])
    maybe = rng.random() < 0.2
    only = rng.choice([Some.ANY, Some.ANY, Some.ANY, 1, 2])
    return Operation(begin, inf if maybe else end, found, left, maybe=maybe, only=only)


def test_checker_agrees_with_trying_every_order() -> None:
    verdicts = []
    for seed in range(500):
        rng = random.Random(seed)
        operations = [random_operation(rng) for _ in range(rng.randint(1, 5))]
        start = rng.choice([None, 1, 2])
        found = order(start, operations)
        assert (found is not None) == by_trying(start, operations), f"seed {seed}"
        if found is not None:
            assert_explains(found, start, operations)
        verdicts.append(found is not None)
    assert 60 < sum(verdicts) < 440


def test_checker_calls_undecided_histories_unsound() -> None:
    puts = [put(i, 1000, i) for i in range(40)]
    with pytest.raises(Undecided):
        order(None, [*puts, get(2000, 2001, 99)], limit=1000)


def test_history_is_split_at_idle_moments() -> None:
    history = History()
    begin = history.now()
    history.add("key", begin, Some.ANY, 5, "one")
    begin = history.now()
    history.add_cut("key", begin, 6, "two")
    assert len(history) == 2
    [(key, operations)] = history.settle({"key": 6}).items()
    assert key == "key"
    assert_linearizable(key, None, operations)
    assert len(history) == 0
    [(_, later)] = history.settle({"key": 5}).items()
    with pytest.raises(AssertionError, match="6"):
        assert_linearizable("key", 6, later)
