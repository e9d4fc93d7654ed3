"""Conformance tests for schedules.

Subclass `ScheduleConformance`, say how to make one, and run pytest.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod

import pytest

from tierstore.plan.schedule import LearnedOrder


class ScheduleConformance(ABC):
    """The rules of `tierstore.plan.schedule.LearnedOrder`, as tests."""

    passes = 3
    """Number of passes over a cycle that a schedule may need to learn it."""

    @abstractmethod
    def make(self) -> LearnedOrder:
        """Return a new schedule."""

    def learned(self, keys: list[str]) -> LearnedOrder:
        """Return a schedule that has seen a cycle often enough. Its first key comes next."""
        schedule = self.make()
        for key in keys * self.passes:
            schedule.advance_past(key)
        return schedule

    def test_new_schedule_expects_nothing(self) -> None:
        schedule = self.make()
        assert list(schedule.upcoming(5)) == []
        assert schedule.steps_until("a") == math.inf

    def test_unseen_key_is_not_expected(self) -> None:
        schedule = self.learned(list("abc"))
        assert schedule.steps_until("never seen") == math.inf
        assert "never seen" not in list(schedule.upcoming(9))

    @pytest.mark.parametrize("length", [2, 3, 7, 20])
    def test_cycle_is_learned(self, length: int) -> None:
        keys = [f"g{i}" for i in range(length)]
        schedule = self.learned(keys)
        assert list(schedule.upcoming(length))[: length // 2 + 1] == keys[: length // 2 + 1]
        for key in keys * 2:
            assert next(iter(schedule.upcoming(1))) == key
            schedule.advance_past(key)

    @pytest.mark.parametrize("seed", range(10))
    def test_earlier_keys_have_fewer_steps(self, seed: int) -> None:
        rng = random.Random(seed)
        keys = [f"g{i}" for i in range(rng.randint(3, 12))]
        rng.shuffle(keys)
        schedule = self.learned(keys)
        done = rng.randrange(len(keys))
        for key in keys[:done]:
            schedule.advance_past(key)
        order = keys[done:] + keys[:done]
        steps = [schedule.steps_until(key) for key in order]
        assert steps == sorted(steps)
        assert len(set(steps)) == len(steps)
        assert steps[0] >= 1

    def test_upcoming_returns_at_most_count_keys(self) -> None:
        schedule = self.learned(list("abcdef"))
        for count in range(8):
            assert len(list(schedule.upcoming(count))) <= count

    def test_reading_the_schedule_changes_nothing(self) -> None:
        schedule = self.learned(list("abcd"))
        expected = list(schedule.upcoming(4))
        next(iter(schedule.upcoming(4)))
        schedule.steps_until("b")
        assert list(schedule.upcoming(4)) == expected

    def test_keys_expected_by_the_caller_come_first_in_order(self) -> None:
        schedule = self.learned(list("abcdef"))
        schedule.known.prefetch(["e", "new", "b"])
        assert list(schedule.upcoming(6))[:3] == ["e", "new", "b"]
        steps = [schedule.steps_until(key) for key in ("e", "new", "b")]
        assert steps == sorted(steps)
        assert steps[-1] < math.inf

    def test_expected_key_is_consumed_once(self) -> None:
        schedule = self.learned(list("abc"))
        schedule.known.prefetch(["new", "other"])
        schedule.advance_past("new")
        assert next(iter(schedule.upcoming(1))) == "other"
        schedule.advance_past("other")
        assert "other" not in list(schedule.upcoming(1))

    def test_key_no_longer_expected_is_not_upcoming(self) -> None:
        schedule = self.learned(list("abc"))
        schedule.known.prefetch(["new", "other"])
        schedule.known.cancel_prefetch("new")
        assert next(iter(schedule.upcoming(1))) == "other"
        assert schedule.steps_until("new") == math.inf
        schedule.known.cancel_prefetch("never seen")
        schedule.known.cancel_prefetch("other")
        assert list(schedule.upcoming(3)) == list(self.learned(list("abc")).upcoming(3))

    def test_forgotten_key_is_not_upcoming(self) -> None:
        schedule = self.learned(list("abc"))
        schedule.known.prefetch(["new", "other"])
        schedule.known.forget("new")
        assert next(iter(schedule.upcoming(1))) == "other"
        schedule.known.forget("never seen")

    def test_many_forgotten_keys_leave_the_cycle_learned(self) -> None:
        """A store that runs for a long time sees more keys than memory can hold."""
        schedule = self.make()
        for number in range(2000):
            schedule.known.introduce(f"once{number}")
            schedule.advance_past(f"once{number}")
            schedule.known.forget(f"once{number}")
        keys = list("abcd")
        for key in keys * (self.passes + 1):
            schedule.advance_past(key)
        assert next(iter(schedule.upcoming(1))) == "a"

    @pytest.mark.parametrize("seed", range(10))
    def test_random_history_raises_nothing(self, seed: int) -> None:
        rng = random.Random(seed)
        schedule = self.make()
        names = [f"g{i}" for i in range(6)]
        for _ in range(300):
            acts = [
                "advance",
                "advance",
                "advance",
                "prefetch",
                "cancel_prefetch",
                "introduce",
                "forget",
            ]
            act = rng.choice(acts)
            if act == "prefetch":
                schedule.known.prefetch(rng.sample(names, rng.randrange(4)))
            else:
                method = {"advance": schedule.advance_past}.get(act) or getattr(schedule.known, act)
                method(rng.choice(names))
            assert set(schedule.upcoming(4)) <= set(names)
            assert all(schedule.steps_until(name) > 0 for name in names)
