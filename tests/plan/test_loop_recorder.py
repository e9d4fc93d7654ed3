"""Recognition of a repeating sequence of steps."""

from __future__ import annotations

import random

import pytest

from tierstore.plan.loop_recorder import LoopRecorder, as_loop

ENCODER, BLOCKS, OTHER = ["e0", "e1"], ["b0", "b1", "b2", "b3"], ["o0", "o1", "o2"]


def recorded(steps: list[str], most: int = 100) -> LoopRecorder:
    recorder = LoopRecorder(most)
    for key in steps:
        recorder.note((key,))
    return recorder


def first_told(steps: list[str]) -> tuple[int, int]:
    """Return the number of steps until a period is found, and the period."""
    recorder = LoopRecorder(100)
    for count, key in enumerate(steps, 1):
        recorder.note((key,))
        if period := recorder.period():
            return count, period
    return 0, 0


def test_period_is_found_after_two_passes() -> None:
    assert first_told(BLOCKS * 3) == (8, 4)


def test_period_is_found_from_any_start() -> None:
    assert first_told([*OTHER, *BLOCKS * 3]) == (len(OTHER) + 8, 4)


def test_period_with_unit_used_twice_is_found() -> None:
    assert first_told(["b0", "b1", "b0", "b2"] * 3) == (8, 4)


def test_period_of_nonrepeating_steps_is_none() -> None:
    assert recorded(BLOCKS).period() == 0
    assert recorded([]).period() == 0
    assert recorded([*BLOCKS, "x", *BLOCKS[1:]]).period() == 0
    chance = random.Random(0)
    assert recorded([str(chance.randrange(10**9)) for _ in range(200)]).period() == 0


def test_period_left_yields_to_a_longer_one() -> None:
    whole = [*ENCODER, *BLOCKS * 4]
    recorder = recorded(whole)
    assert recorder.period() == 4
    for key in [*ENCODER, *BLOCKS * 4]:
        recorder.note((key,))
    assert recorder.period() == 4, "as long as the period goes on"
    recorder.left(4, repeated=8)
    assert recorder.period() == len(whole)


def test_period_repeated_longer_is_found_again() -> None:
    recorder = recorded(BLOCKS * 2)
    recorder.left(4, repeated=4)
    assert recorder.period() == 0
    for key in BLOCKS * 2:
        recorder.note((key,))
    assert recorder.period() == 4


def test_steps_of_long_ago_are_forgotten() -> None:
    recorder = recorded([*OTHER, *BLOCKS * 1000], most=8)
    assert recorder.period() == 4
    for key in [f"x{n}" for n in range(9)] * 4:  # a period above the longest allowed
        recorder.note((key,))
    assert recorder.period() == 0


@pytest.mark.parametrize("seed", range(50))
def test_period_found_is_the_shortest_that_fits(seed: int) -> None:
    chance = random.Random(seed)
    steps = chance.choices("ab", k=chance.randint(1, 12)) * chance.randint(1, 4)
    fits = [p for p in range(1, len(steps) // 2 + 1) if steps[-p:] == steps[-2 * p : -p]]
    assert recorded(steps).period() == min(fits, default=0)


def test_loop_has_each_group_once() -> None:
    steps = [("a", "b"), ("b", "c"), ()]
    loop, keys = as_loop(steps, {"a": 1, "b": 2, "c": 3}, [1.25, 0.5, 0.0])
    assert keys == ["a", "b", "c"]
    assert loop.sizes == (1, 2, 3)
    assert [step.groups for step in loop.steps] == [(0, 1), (1, 2), ()]
    assert [step.seconds for step in loop.steps] == [1.25, 0.5, 0.0]


def test_period_has_the_requested_number_of_steps() -> None:
    recorder = recorded([*BLOCKS, "b3"] * 2)
    assert recorder.period() == 1, "two units in one group"
    assert recorder.period(4) == 5
    assert recorder.period(6) == 0


def test_period_across_missing_steps_is_none() -> None:
    recorder = recorded(BLOCKS)
    recorder.note_gap()
    for key in BLOCKS:
        recorder.note((key,))
    assert recorder.ends_with([(key,) for key in BLOCKS])
    assert recorder.period() == 0
    for key in BLOCKS:
        recorder.note((key,))
    assert recorder.period() == 4


def test_period_returns_its_latest_steps() -> None:
    recorder = recorded([*OTHER, *BLOCKS * 2])
    assert recorder.keys(4) == [(key,) for key in BLOCKS]
