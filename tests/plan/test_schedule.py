"""The learned order: its predictions, when it is trusted, and what it forgets."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from tests.plan.scans import cycle, forward_backward, prompts, two_experts
from tierstore.plan.known_keys import PATIENCE
from tierstore.plan.schedule import LearnedOrder


def learned(uses: Iterable[str], memory: int = 1024) -> LearnedOrder:
    order = LearnedOrder(memory)
    for key in uses:
        order.advance_past(key)
    return order


def right_predictions(order: LearnedOrder, uses: Sequence[str]) -> list[bool]:
    """Return, for each use, whether the order expected it next."""
    answers = []
    for key in uses:
        answers.append(next(order.upcoming(1), None) == key)
        order.advance_past(key)
    return answers


def test_cycle_is_expected_again() -> None:
    order = learned(cycle(5, 2))
    assert order.trusted
    assert list(order.upcoming(5)) == ["g0", "g1", "g2", "g3", "g4"]
    assert [order.steps_until(f"g{i}") for i in range(5)] == [1, 2, 3, 4, 5]
    assert order.steps_until("never seen") == math.inf


def test_cycle_is_known_once_its_first_key_returns() -> None:
    order = learned([*cycle(5, 1), "g0"])
    assert order.trusted
    # g1..g4 followed g0, and then g0.
    assert list(order.upcoming(9)) == ["g1", "g2", "g3", "g4", "g0"]


def test_switch_between_two_experts_is_expected() -> None:
    blocks, steps = 5, 8
    run = two_experts(1, blocks, steps)
    order = learned(run + run[: blocks * steps])
    assert next(order.upcoming(1)) == "low0"
    assert order.steps_until("low0") == 1
    assert order.steps_until("high0") == blocks * steps + 1


def test_third_run_of_two_experts_is_fully_expected() -> None:
    run = two_experts(1, blocks=5, steps=8)
    assert all(right_predictions(learned(run * 2), run))


@pytest.mark.parametrize(("keys", "passes"), [(2, 60), (5, 30), (57, 12)])
def test_loop_interrupted_once_expects_no_interruption(keys: int, passes: int) -> None:
    """Expect the interruption only once the loop is as long as the last time."""
    order = learned([*cycle(keys, passes), "other"])
    # Uses after an interruption are new, and so is the fact that they do not repeat at once.
    right = right_predictions(order, [*cycle(keys, passes), "other"])
    assert right.count(False) <= 3
    assert all(right[2 * keys :])
    longer = right_predictions(order, cycle(keys, passes + 5))
    assert longer.count(False) <= 3


def test_prompts_of_two_lengths_are_told_apart_early() -> None:
    """Expect the shorter of two until it would end, then recognise the longer one."""
    short, long = prompts(1, 3, 6, steps=10), prompts(1, 3, 6, steps=16)
    order = learned([*long, *short])
    assert right_predictions(order, long).count(False) <= 3


def test_loop_starting_with_a_repeated_key_keeps_it() -> None:
    loop = ["a", "b", "a", *cycle(5, 1)]
    order = learned(["text", *loop, "a"])
    # After either use of "a": their contexts differ from each other, and both from this one.
    assert list(order.upcoming(2)) == ["g0", "g1"]
    assert [order.steps_until(key) for key in ("a", "b", "g0", "g1")] == [2, 1, 1, 2]
    order.advance_past("b")  # so the first one matched
    assert list(order.upcoming(3)) == ["a", "g0", "g1"]
    assert [order.steps_until(key) for key in ("a", "g0", "b")] == [1, 2, 8]
    assert not any(order.steps_until(key) == math.inf for key in loop)


def test_two_matching_positions_expect_together_until_one_fails() -> None:
    order = learned([*"pabcx", *"qabcy", *"rab"])
    assert [order.steps_until(key) for key in "cxyq"] == [1, 2, 2, 3]
    order.advance_past("c")
    assert [order.steps_until(key) for key in "xyr"] == [1, 1, 2]
    order.advance_past("y")
    assert order.steps_until("x") == math.inf
    assert [order.steps_until(key) for key in "ra"] == [1, 2]


def test_forward_and_backward_are_told_apart() -> None:
    order = learned([*forward_backward(4, 2), "g0", "g1"])
    assert next(order.upcoming(1)) == "g2"
    for key in ("g2", "g3", "g3", "g2", "g1"):
        order.advance_past(key)
    assert next(order.upcoming(1)) == "g0"


def test_consecutive_uses_of_a_key_count_once() -> None:
    once, twice = learned(["a", "b", "c", "a"]), learned(["a", "b", "b", "c", "c", "c", "a"])
    assert list(once.upcoming(9)) == list(twice.upcoming(9)) == ["b", "c", "a"]


def test_pipeline_with_several_prompts_is_expected() -> None:
    prompt = prompts(1, encoder=3, blocks=4, steps=6)
    assert all(right_predictions(learned(prompt * 2), prompt * 2))


def test_permuted_order_is_relearned_within_a_pass() -> None:
    keys = [f"g{i}" for i in range(20)]
    order = learned(keys * 4)
    shuffled = random.Random(3).sample(keys, len(keys))
    first, second = right_predictions(order, shuffled), right_predictions(order, shuffled)
    assert sum(first) < 5, "the permutation is too similar to the old order"
    assert not all(second[:5]), "the old order was not unlearned"
    assert all(second[10:])
    assert order.trusted
    assert all(right_predictions(order, shuffled))


@pytest.mark.parametrize("memory", [7, 16, 31])
def test_cycle_stays_known_when_history_overflows(memory: int) -> None:
    order = learned(cycle(5, 2), memory)
    assert all(right_predictions(order, cycle(5, 100)))


def test_key_outside_the_history_is_not_expected() -> None:
    order = learned([*cycle(5, 3, "old"), *cycle(5, 20, "new")], memory=16)
    assert order.trusted
    assert order.steps_until("old0") == math.inf
    assert order.steps_until("new0") == 1
    # Keys forgotten long ago leave no trace, however many keys are added and forgotten.
    for i in range(500):
        order.advance_past(f"passing {i}")
    assert right_predictions(order, cycle(5, 4))[-5:] == [True] * 5


def test_random_uses_are_untrusted_and_ranked_by_rate() -> None:
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
    order.known.prefetch(["g3", "other"])
    assert list(order.upcoming(3)) == ["g3", "other", "g0", "g1", "g2"]
    assert (order.steps_until("g3"), order.steps_until("other")) == (1, 2)
    order.advance_past("g3")
    assert order.steps_until("other") == 1


def test_expectation_is_forgotten_after_a_while() -> None:
    order = learned(cycle(5, 2))
    order.known.prefetch(["other"])
    for key in cycle(5, PATIENCE // 5):
        order.advance_past(key)
    assert order.steps_until("other") == 1  # not yet: 60 of 64 uses are over
    for key in cycle(5, 2):
        order.advance_past(key)
    assert order.steps_until("other") == math.inf
    assert "other" not in list(order.upcoming(5))


def test_registration_order_is_a_hint_on_the_first_pass() -> None:
    order = LearnedOrder()
    for key in "abcde":
        order.known.introduce(key)
    order.advance_past("b")
    assert order.learning
    assert list(order.upcoming(2)) == ["c", "d"]
    assert order.steps_until("c") == math.inf, "a hint does not justify an eviction"
    for key in "edcbae":
        order.advance_past(key)
    assert next(order.upcoming(1)) == "d"


def test_schedule_before_first_use_expects_nothing() -> None:
    order = LearnedOrder()
    order.known.introduce("a")
    assert list(order.upcoming(3)) == []


def test_forgotten_key_is_not_expected() -> None:
    order = learned(["a", "b"])
    order.known.prefetch(["a"])
    order.known.forget("a")
    assert list(order.upcoming(3)) == []


def test_expected_key_times_out_after_64_uses_plus_2_per_key() -> None:
    """Give later expectations longer timeouts, because they are met out of order, too."""
    order = LearnedOrder()
    order.known.prefetch(["first", "second", "third"])
    for _ in range(32):
        order.note_unordered_use("something else")  # reported by the caller ...
        order.advance_past("something else")  # ... or not: both are uses
    left = {64: ["first", "second", "third"], 65: ["second", "third"], 66: ["second", "third"]}
    left |= {67: ["third"], 68: ["third"], 69: []}
    for number, names in left.items():
        assert list(order.upcoming(0)) == names, number
        assert order.known.prefetched_count() == len(names)
        order.note_unordered_use("something else")


def test_expectation_repeated_restarts_its_timeout_as_last() -> None:
    order = LearnedOrder()
    order.known.prefetch(["a", "b"])
    for _ in range(10):
        order.note_unordered_use("something else")
    order.known.prefetch(["a"])
    assert list(order.upcoming(0)) == ["b", "a"]
    for _ in range(66):  # 64, and 2 for the one before it
        order.note_unordered_use("something else")
    assert list(order.upcoming(0)) == ["a"]
    order.note_unordered_use("something else")
    assert list(order.upcoming(0)) == []


def test_registration_order_expects_four_keys() -> None:
    """Expect few keys, because a wrong hint costs reads, and at most as many as requested."""
    order = LearnedOrder()
    for key in "abcdefgh":
        order.known.introduce(key)
    assert list(order.upcoming(9)) == []
    order.advance_past("b")
    assert list(order.upcoming(9)) == ["c", "d", "e", "f"]
    assert list(order.upcoming(2)) == ["c", "d"]
    assert list(order.upcoming(0)) == []
    order.advance_past("g")
    assert list(order.upcoming(9)) == ["h"]
    order.advance_past("nobody registered this")
    assert list(order.upcoming(9)) == []


def test_key_registered_again_comes_last() -> None:
    order = LearnedOrder()
    for key in "abcdef":
        order.known.introduce(key)
    for key in "cf":
        order.known.introduce(key)
    for key in "bd":
        order.known.forget(key)
    order.advance_past("a")
    assert list(order.upcoming(9)) == ["e", "c", "f"]
    order.known.forget("f")
    order.known.introduce("last")
    assert list(order.upcoming(9)) == ["e", "c", "last"]


def test_registration_order_does_not_affect_ranks() -> None:
    order = LearnedOrder()
    for key in "ab":
        order.known.introduce(key)
    order.advance_past("a")
    assert (
        order.ranks(np.array([order.known.number(key) for key in "ab"])).tolist() == [math.inf] * 2
    )


def test_trust_is_lost_with_the_thirteenth_wrong_prediction() -> None:
    """Count the first for a tenth, and later ones, which are guesses, for half of that.

    0.9 * 0.95 ** 11 is 0.51, and 0.9 * 0.95 ** 12 is 0.49, less than a half.
    """
    order = learned(cycle(9, 4))
    latest = "g8"
    for number in range(13):
        assert order.trusted, number
        foretold = next(order.upcoming(1))
        latest = next(k for k in cycle(9, 1) if k not in (foretold, latest))
        order.advance_past(latest)
    assert (order.trusted, order.learning) == (False, False)
    assert list(order.upcoming(9)) == []


def test_correct_predictions_without_trust_count() -> None:
    """Lose trust at 0.9 * 0.95 ** 12, which is 0.49; one right prediction makes it 0.54."""
    order = learned([*cycle(9, 4)])
    latest = ""
    for _ in range(12):
        foretold = next(order.upcoming(1))
        latest = next(k for k in ("g1", "g3", "g0", "g2") if k not in (foretold, latest))
        order.advance_past(latest)
    order.advance_past("g6")
    assert list(order.upcoming(1)) == [], "thirteen predictions in a row were wrong"
    order.advance_past("g7")  # as always after g6
    assert list(order.upcoming(1)) == ["g8"]


def test_history_of_16384_uses_keeps_the_newest_8192() -> None:
    order = LearnedOrder()
    for number in range(2 * 8192):
        order.advance_past(f"g{number}")
    order.advance_past("one too many")
    order.advance_past("g8191")
    assert list(order.upcoming(2)) == []
    order.advance_past("g8192")
    assert list(order.upcoming(2)) == ["g8193", "g8194"]


def test_history_holds_two_passes_of_registered_keys() -> None:
    keys = [f"g{i}" for i in range(10)]
    small, grown = LearnedOrder(memory=4), LearnedOrder(memory=4)
    for key in keys:
        grown.known.introduce(key)
    assert not any(right_predictions(small, keys * 10))
    assert all(right_predictions(grown, keys * 10)[11:])


@pytest.mark.parametrize("memory", range(2, 9))
def test_loop_longer_than_history_is_expected_exactly_or_not(memory: int) -> None:
    """Repeat most keys only after they are forgotten: then no prediction is possible."""
    for length in range(memory + 1, 2 * memory + 1):
        order = LearnedOrder(memory)
        for key in cycle(length, 20):
            assert next(order.upcoming(1), key) == key
            order.advance_past(key)


def test_key_used_every_tenth_time_is_expected_in_ten_uses() -> None:
    rnd = random.Random(2)
    keys = [f"g{i}" for i in range(64)]
    steps = []
    order = LearnedOrder()
    for _ in range(4000):
        order.advance_past("often" if rnd.random() < 0.1 else rnd.choice(keys))
        if not order.trusted and not order.learning:
            steps.append(order.steps_until("often"))
    assert len(steps) > 1000
    assert 5 < sorted(steps)[len(steps) // 2] < 20


def test_expected_keys_scaled_farther_still_come_first() -> None:
    order = learned(cycle(5, 3))
    order.known.prefetch(["g3", "g1", "g4"])
    numbers = np.array([order.known.number(f"g{i}") for i in range(5)])
    ranks = order.ranks(numbers)
    twice = order.farther(ranks, 2.0)
    assert twice[3] == ranks[1], "one use ahead, counted twice, is two uses ahead"
    assert twice[1] - ranks[1] == 2 and twice[4] - ranks[4] == 3
    assert max(twice[[1, 3, 4]]) < min(ranks[[0, 2]])
    assert (twice[[0, 2]] - ranks[[0, 2]]).tolist() == [1, 3]


def test_index_is_reused_only_when_its_key_is_gone() -> None:
    order = learned("aba")
    numbers = {key: order.known.number(key) for key in "abc"}
    order.known.forget("b")  # it is still in the history
    order.known.forget("c")
    assert order.known.number("d") == numbers["c"]
    assert order.known.number("e") not in numbers.values()
    assert list(order.upcoming(1)) == ["b"]
    assert order.known.number("b") == numbers["b"]


@pytest.mark.parametrize("known", [16, 32, 64])
def test_one_key_above_capacity_is_not_expected(known: int) -> None:
    order = learned(cycle(known, 2))
    assert order.steps_until("g0") == 1
    number = order.known.number("one more")
    assert order.steps_until("one more") == math.inf
    ranks = order.ranks(np.array([number, order.known.number("g1")]))
    assert np.isinf(ranks).tolist() == [True, False]


def test_rate_decay_slows_with_more_keys() -> None:
    """With four keys, rates decay to 1 / e in 4 uses; with five, in 8."""
    order = learned([*"bdacacbcdbabcacbdadbcdadacabad"])
    assert (order.trusted, order.learning) == (False, False)
    numbers = np.array([order.known.number(key) for key in "abcd"])
    epoch, before = order.epoch, order.ranks(numbers)
    order.known.number("e")
    after = order.ranks(numbers)
    assert order.epoch > epoch
    assert before.argsort().tolist() == after.argsort().tolist()
    assert 0 < max(after) - min(after) < max(before) - min(before)


def test_longest_run_may_begin_with_the_first_use() -> None:
    """Follow x, a with z once, long ago, and y, a with other keys ten times."""
    order = learned([*"xaz", *"ya" * 10, *"xb", *"xa"])
    assert list(order.upcoming(1)) == ["z"]


def test_expecting_and_forgetting_notify_the_ranking() -> None:
    order = LearnedOrder()
    for key in "abab":
        order.advance_past(key)
    seen = {order.epoch}
    for change in (
        lambda: order.known.prefetch(["a"]),
        lambda: order.known.prefetch(["b", "a"]),
        lambda: order.known.cancel_prefetch("b"),
        lambda: order.known.forget("a"),
    ):
        change()
        assert order.epoch not in seen
        seen.add(order.epoch)


def test_expected_keys_rank_by_position() -> None:
    order = LearnedOrder()
    numbers = np.array([order.known.number(key) for key in "abc"], dtype=np.int64)
    order.known.prefetch(["c", "a"])
    ranks = order.ranks(numbers)
    assert ranks[2] < ranks[0] < ranks[1]
    assert ranks[0] - ranks[2] == 1


def test_farther_ranks_grow_with_the_factor() -> None:
    """Rank with several orders: whatever the ranks mean, a larger factor means earlier eviction."""
    random_uses = random.Random(1).choices([f"g{number}" for number in range(50)], k=2000)
    unknown, learning, cycle = LearnedOrder(4096), LearnedOrder(), LearnedOrder()
    for key in random_uses:
        unknown.advance_past(key)
    for key in "abcabcabc":
        cycle.advance_past(key)
    for order, key in ((unknown, "g1"), (cycle, "b")):
        ranks = order.ranks(np.array([order.known.number(key)], dtype=np.int64))
        assert order.farther(ranks, 2.0)[0] > ranks[0] > order.farther(ranks, 0.5)[0]
    assert learning.learning


def test_single_order_is_one_stream_that_spares_nothing() -> None:
    order = LearnedOrder()
    for key in "abcabc":
        order.advance_past(key)
    [(place, numbers)] = order.streams(2)
    assert (place, numbers.tolist()) == (0, order.ahead(2).tolist())
    assert not order.spared(numbers).any()
