"""Who stays, against a slow reference.

The reference counts in whole numbers, and searches rates by counting steps. The inputs are such
that floats are exact, too: whole seconds add up to a power of two.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from tierstore.plan.retention import RoundWalk, Visits, even_load, visits

# --- what one visit is ----------------------------------------------------------------------------


def reference_visits(
    order: Sequence[int], size: Sequence[int], seconds: Sequence[float], near: int
) -> Visits:
    """For each use: how many bytes of visits began since the latest use of the same group?"""
    begins: list[bool] = []
    for use, number in enumerate(order):
        earlier = [u for u in range(use) if order[u] == number]
        between = range(earlier[-1] + 1, use) if earlier else ()
        begins.append(not earlier or sum(size[order[u]] for u in between if begins[u]) > near)
    starts = [use for use, begun in enumerate(begins) if begun]
    found = Visits(
        [order[s] for s in starts], [size[order[s]] for s in starts], [0.0] * len(starts)
    )
    for use, computing in enumerate(seconds):
        latest = max(i for i, s in enumerate(starts) if s <= use and order[s] == order[use])
        found.seconds[latest if begins[use] else len([s for s in starts if s <= use]) - 1] += (
            computing
        )
    return found


def test_visits_are_what_the_reference_says() -> None:
    rng = random.Random(1)
    merged = 0
    for _ in range(300):
        groups, length = rng.randint(1, 6), rng.randint(0, 14)
        size = [rng.randint(1, 5) for _ in range(groups)]
        order = rng.choices(range(groups), k=length)
        seconds = [float(rng.randint(0, 3)) for _ in order]
        near = rng.randint(0, 12)
        arrays = (np.array(order, dtype=np.int64), np.array([size[n] for n in order], dtype=int))
        found = visits(*arrays, np.array(seconds), near)
        assert found == reference_visits(order, size, seconds, near)
        merged += len(found.order) < length
    assert merged > 100, "hardly any use belonged to an earlier visit"


# --- who stays ------------------------------------------------------------------------------------

STEPS = 2**10
"""Ten halvings tell so many rates from each other, ..."""
FASTEST = 8
"""... up to so many times what an even load needs on average."""


def in_debt(
    loop: Visits, per_second: int, unit: int, ahead: int, always: set[int], may: set[int]
) -> tuple[set[int], int]:
    """Who stays, and its bytes: whose read would get the disk further behind than it may run ahead.

    What a read adds to the debt, computing pays off; a byte is so many units of it. The second of
    two rounds counts.
    """
    size = dict(zip(loop.order, loop.nbytes, strict=True))
    debt, most, staying = 0, ahead * unit, set[int]()
    for _ in ("the round before", "the round"):
        staying = set()
        for number, seconds in zip(loop.order, loop.seconds, strict=True):
            then = debt + size[number] * unit
            if number in may and then > most:
                staying.add(number)
            if number not in staying | always:
                debt = min(then, most)
            debt = max(debt - per_second * int(seconds), 0)
    return staying, sum(size[number] for number in staying)


def reference_load(
    loop: Visits, room: int, ahead: int, steps: int = STEPS
) -> tuple[set[int], int] | None:
    times, size = Counter(loop.order), dict(zip(loop.order, loop.nbytes, strict=True))
    computing = int(sum(loop.seconds))
    if computing == 0 or sum(size.values()) <= room:
        return None
    level = max(times.values())  # those that are visited more often all fit
    while sum(size[n] for n in times if times[n] >= level) <= room:
        level -= 1
    always = {n for n in times if times[n] > level}
    may = {n for n in times if times[n] == level}
    left = room - sum(size[n] for n in always)
    missed = sum(size[n] * times[n] for n in times if n not in always) - left * level

    def at(step: int) -> tuple[set[int], int]:
        return in_debt(loop, FASTEST * missed * step, computing * steps, ahead, always, may)

    too_slow, enough = 0, steps
    while enough - too_slow > 1:
        middle = (too_slow + enough) // 2
        if at(middle)[1] > left:
            too_slow = middle
        else:
            enough = middle
    return always | (at(enough)[0] if enough < steps else set()), missed


def any_loop(rng: random.Random) -> Visits:
    """A few groups, visited once or more often; or nothing is computed."""
    groups = rng.randint(2, 9)
    size = [rng.randint(1, 9) for _ in range(groups)]
    often = rng.choice([[1], [1, 2], [1, 1, 3]])
    order = [n for n in range(groups) for _ in range(rng.choice(often))]
    rng.shuffle(order)
    weights = [rng.choice([0, 1, 1, 5]) for _ in order]
    seconds = [0.0] * len(order)
    for place in rng.choices(range(len(order)), [w + 0.01 for w in weights], k=32):
        seconds[place] += 1.0
    if rng.random() < 0.05:
        seconds = [0.0] * len(order)
    return Visits(order, [size[n] for n in order], seconds)


def test_who_stays_is_what_the_reference_says() -> None:
    rng, seen = random.Random(2), Counter[str]()
    for _ in range(400):
        loop = any_loop(rng)
        total = sum(dict(zip(loop.order, loop.nbytes, strict=True)).values())
        room, ahead = rng.randint(0, total), rng.choice([1, 2, 3]) * max(loop.nbytes) - 1
        expected, found = reference_load(loop, room, ahead), even_load(loop, room=room, ahead=ahead)
        if expected is None or found is None:
            assert expected is None and found is None
            seen["nothing to choose"] += 1
            continue
        assert (set(found.staying), found.missed) == expected
        assert len(found.staying) == len(set(found.staying)), "somebody stays twice"
        size = dict(zip(loop.order, loop.nbytes, strict=True))
        assert sum(size[number] for number in found.staying) <= room
        seen["somebody" if found.staying else "nobody"] += 1
        seen["some always"] += len(set(Counter(loop.order).values())) > 1
    assert min(seen[what] for what in ("nothing to choose", "nobody", "some always")) > 10, seen
    assert seen["somebody"] > 200, seen


def long_loop(rng: random.Random) -> tuple[Visits, int, int]:
    """So many groups that rates near each other differ; how much room, and how far ahead."""
    nbytes = [rng.randint(1, 99) for _ in range(30)]
    seconds = [0.0] * 30
    for place in rng.choices(range(30), [rng.choice([1, 1, 5, 20]) for _ in nbytes], k=4096):
        seconds[place] += 1.0
    room = rng.randint(sum(nbytes) // 4, 3 * sum(nbytes) // 4)
    return Visits(list(range(30)), nbytes, seconds), room, rng.choice([1, 2, 3]) * max(nbytes)


def test_the_rate_is_found_by_ten_halvings() -> None:
    rng, finer = random.Random(3), 0
    for _ in range(30):
        loop, room, ahead = long_loop(rng)
        found = even_load(loop, room=room, ahead=ahead)
        assert found is not None
        assert (set(found.staying), found.missed) == reference_load(loop, room, ahead)
        finer += reference_load(loop, room, ahead, 2 * STEPS) != reference_load(loop, room, ahead)
    assert finer > 2, "an eleventh halving would not be noticed"


def test_the_unit_of_time_does_not_matter() -> None:
    rng = random.Random(4)
    for _ in range(10):
        loop, room, ahead = long_loop(rng)
        for unit in (2.0**-20, 2.0**20):
            seconds = [seconds * unit for seconds in loop.seconds]
            same = Visits(loop.order, loop.nbytes, seconds)
            assert even_load(same, room=room, ahead=ahead) == even_load(
                loop, room=room, ahead=ahead
            )


@pytest.mark.parametrize(
    ("rate", "staying"),
    [(1.0, {1, 3}), (2.0, set())],
)
def test_an_account_that_is_filled_fast_enough_lets_everybody_stream(
    rate: float, staying: set[int]
) -> None:
    # Each group has 4 bytes and 2 seconds. The account has 5 at first: 0 leaves 1, which grows to
    # 3, and 1 stays; it grows to 5 meanwhile. Twice as fast, it is full again for each group.
    walk = RoundWalk(Visits([0, 1, 2, 3], [4] * 4, [2.0] * 4), set(), {0, 1, 2, 3})
    assert walk.staying(rate, 5.0) == (staying, 4 * len(staying))


def test_a_choice_is_not_changed_afterwards() -> None:
    """The choice of one round is compared with that of the next one."""
    loop = Visits([0, 1], [1, 1], [1.0, 1.0])
    chosen = even_load(loop, room=1, ahead=1)
    for value, name in ((loop, "order"), (chosen, "missed"), (RoundWalk(loop, set(), {0}), "loop")):
        with pytest.raises(FrozenInstanceError):
            setattr(value, name, None)


def test_seconds_are_told_of_every_visit() -> None:
    with pytest.raises(ValueError, match="shorter"):
        even_load(Visits([0, 1], [1, 1], [1.0]), room=1, ahead=1)
