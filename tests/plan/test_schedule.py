"""The learned order: what it predicts, when it is trusted, and what it forgets."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence

import pytest

from tests.plan.scans import cycle, forward_backward, prompts, two_experts
from tierstore.plan.schedule import PATIENCE, LearnedOrder


def learned(uses: Iterable[str], memory: int = 1024) -> LearnedOrder:
    order = LearnedOrder(memory)
    for key in uses:
        order.advance_past(key)
    return order


def right_predictions(order: LearnedOrder, uses: Sequence[str]) -> list[bool]:
    """For each use, whether it was what the order expected next."""
    answers = []
    for key in uses:
        answers.append(next(order.upcoming(1), None) == key)
        order.advance_past(key)
    return answers


def test_a_cycle_is_expected_again() -> None:
    order = learned(cycle(5, 2))
    assert order.trusted
    assert list(order.upcoming(5)) == ["g0", "g1", "g2", "g3", "g4"]
    assert [order.steps_until(f"g{i}") for i in range(5)] == [1, 2, 3, 4, 5]
    assert order.steps_until("never seen") == math.inf


def test_a_cycle_is_known_as_soon_as_its_first_key_returns() -> None:
    order = learned([*cycle(5, 1), "g0"])
    assert order.trusted
    # What followed g0 was g1..g4, and then g0.
    assert list(order.upcoming(9)) == ["g1", "g2", "g3", "g4", "g0"]


def test_the_switch_between_two_experts_is_expected() -> None:
    blocks, steps = 5, 8
    run = two_experts(1, blocks, steps)
    order = learned(run + run[: blocks * steps])
    assert next(order.upcoming(1)) == "low0"
    assert order.steps_until("low0") == 1
    assert order.steps_until("high0") == blocks * steps + 1


def test_every_use_of_a_third_run_of_two_experts_is_expected() -> None:
    run = two_experts(1, blocks=5, steps=8)
    assert all(right_predictions(learned(run * 2), run))


def test_forward_and_backward_are_told_apart() -> None:
    order = learned([*forward_backward(4, 2), "g0", "g1"])
    assert next(order.upcoming(1)) == "g2"
    for key in ("g2", "g3", "g3", "g2", "g1"):
        order.advance_past(key)
    assert next(order.upcoming(1)) == "g0"


def test_uses_of_one_key_in_a_row_count_once() -> None:
    once, twice = learned(["a", "b", "c", "a"]), learned(["a", "b", "b", "c", "c", "c", "a"])
    assert list(once.upcoming(9)) == list(twice.upcoming(9)) == ["b", "c", "a"]


def test_a_pipeline_with_several_prompts() -> None:
    prompt = prompts(1, encoder=3, blocks=4, steps=6)
    assert all(right_predictions(learned(prompt * 2), prompt * 2))


def test_it_recovers_from_a_permuted_order_within_one_pass() -> None:
    keys = [f"g{i}" for i in range(20)]
    order = learned(keys * 4)
    shuffled = random.Random(3).sample(keys, len(keys))
    first, second = right_predictions(order, shuffled), right_predictions(order, shuffled)
    assert sum(first) < 5, "the permutation is too much like the old order to test anything"
    assert not all(second[:5]), "nothing was lost, so nothing can have recovered"
    assert all(second[10:])
    assert order.trusted
    assert all(right_predictions(order, shuffled))


@pytest.mark.parametrize("memory", [7, 16, 31])
def test_a_cycle_stays_known_when_the_memory_overflows(memory: int) -> None:
    order = learned(cycle(5, 2), memory)
    assert all(right_predictions(order, cycle(5, 100)))


def test_what_left_the_memory_is_not_expected_any_more() -> None:
    order = learned([*cycle(5, 3, "old"), *cycle(5, 20, "new")], memory=16)
    assert order.trusted
    assert order.steps_until("old0") == math.inf
    assert order.steps_until("new0") == 1
    # Nothing that is long gone leaves a trace in what is kept, however many keys come and go.
    for i in range(500):
        order.advance_past(f"passing {i}")
    assert right_predictions(order, cycle(5, 4))[-5:] == [True] * 5


def test_random_uses_are_not_trusted_and_ranked_by_rate() -> None:
    rnd = random.Random(1)
    keys = [f"g{i}" for i in range(50)]
    uses = rnd.choices(keys, [20 if key == "g7" else 1 for key in keys], k=2000)
    order = learned(uses, memory=4096)
    assert not order.trusted
    assert not order.learning
    assert list(order.upcoming(4)) == []
    assert min(keys, key=order.steps_until) == "g7"
    assert order.steps_until("never seen") == math.inf


def test_expected_keys_come_first_and_in_order() -> None:
    order = learned(cycle(5, 2))
    order.expect(["g3", "other"])
    assert list(order.upcoming(3)) == ["g3", "other", "g0", "g1", "g2"]
    assert (order.steps_until("g3"), order.steps_until("other")) == (1, 2)
    order.advance_past("g3")
    assert order.steps_until("other") == 1


def test_a_change_of_mind_is_forgotten_after_a_while() -> None:
    order = learned(cycle(5, 2))
    order.expect(["other"])
    for key in cycle(5, PATIENCE // 5):
        order.advance_past(key)
    assert order.steps_until("other") == 1  # not yet: 60 of 64 uses are over
    for key in cycle(5, 2):
        order.advance_past(key)
    assert order.steps_until("other") == math.inf
    assert "other" not in list(order.upcoming(5))


def test_the_order_of_registration_is_a_hint_on_the_first_pass_only() -> None:
    order = LearnedOrder()
    for key in "abcde":
        order.introduce(key)
    order.advance_past("b")
    assert order.learning
    assert list(order.upcoming(2)) == ["c", "d"]
    assert order.steps_until("c") == math.inf, "a hint is no reason to evict anything"
    for key in "edcbae":
        order.advance_past(key)
    assert next(order.upcoming(1)) == "d"


def test_nothing_is_expected_before_the_first_use() -> None:
    order = LearnedOrder()
    order.introduce("a")
    assert list(order.upcoming(3)) == []


def test_a_forgotten_key_is_not_waited_for() -> None:
    order = learned(["a", "b"])
    order.expect(["a"])
    order.forget("a")
    assert list(order.upcoming(3)) == []
