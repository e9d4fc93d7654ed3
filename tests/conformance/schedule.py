"""What every schedule must do. Subclass `ScheduleConformance`, say how to make one, run pytest."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod

import pytest

from tierstore.plan.schedule import LearnedOrder


class ScheduleConformance(ABC):
    """The rules of `tierstore.plan.schedule.LearnedOrder`, as tests."""

    passes = 3
    """How many passes over a cycle a schedule may need to learn it."""

    @abstractmethod
    def make(self) -> LearnedOrder:
        """A fresh schedule."""

    def learned(self, keys: list[str]) -> LearnedOrder:
        """A schedule that has seen a cycle often enough. Its first key comes next."""
        schedule = self.make()
        for key in keys * self.passes:
            schedule.advance_past(key)
        return schedule

    def test_nothing_is_expected_at_first(self) -> None:
        schedule = self.make()
        assert list(schedule.upcoming(5)) == []
        assert schedule.steps_until("a") == math.inf

    def test_what_was_never_seen_is_not_expected(self) -> None:
        schedule = self.learned(list("abc"))
        assert schedule.steps_until("never seen") == math.inf
        assert "never seen" not in list(schedule.upcoming(9))

    @pytest.mark.parametrize("length", [2, 3, 7, 20])
    def test_a_cycle_is_learned(self, length: int) -> None:
        keys = [f"g{i}" for i in range(length)]
        schedule = self.learned(keys)
        assert list(schedule.upcoming(length))[: length // 2 + 1] == keys[: length // 2 + 1]
        for key in keys * 2:
            assert next(iter(schedule.upcoming(1))) == key
            schedule.advance_past(key)

    @pytest.mark.parametrize("seed", range(10))
    def test_what_comes_sooner_has_fewer_steps(self, seed: int) -> None:
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

    def test_no_more_is_told_than_was_asked_for(self) -> None:
        schedule = self.learned(list("abcdef"))
        for count in range(8):
            assert len(list(schedule.upcoming(count))) <= count

    def test_asking_changes_nothing(self) -> None:
        schedule = self.learned(list("abcd"))
        expected = list(schedule.upcoming(4))
        next(iter(schedule.upcoming(4)))
        schedule.steps_until("b")
        assert list(schedule.upcoming(4)) == expected

    def test_what_the_caller_expects_comes_first_and_in_order(self) -> None:
        schedule = self.learned(list("abcdef"))
        schedule.known.expect(["e", "new", "b"])
        assert list(schedule.upcoming(6))[:3] == ["e", "new", "b"]
        steps = [schedule.steps_until(key) for key in ("e", "new", "b")]
        assert steps == sorted(steps)
        assert steps[-1] < math.inf

    def test_an_expectation_is_met_once(self) -> None:
        schedule = self.learned(list("abc"))
        schedule.known.expect(["new", "other"])
        schedule.advance_past("new")
        assert next(iter(schedule.upcoming(1))) == "other"
        schedule.advance_past("other")
        assert "other" not in list(schedule.upcoming(1))

    def test_what_is_expected_no_more_is_not_waited_for(self) -> None:
        schedule = self.learned(list("abc"))
        schedule.known.expect(["new", "other"])
        schedule.known.expect_not("new")
        assert next(iter(schedule.upcoming(1))) == "other"
        assert schedule.steps_until("new") == math.inf
        schedule.known.expect_not("never seen")
        schedule.known.expect_not("other")
        assert list(schedule.upcoming(3)) == list(self.learned(list("abc")).upcoming(3))

    def test_what_is_forgotten_is_not_waited_for(self) -> None:
        schedule = self.learned(list("abc"))
        schedule.known.expect(["new", "other"])
        schedule.known.forget("new")
        assert next(iter(schedule.upcoming(1))) == "other"
        schedule.known.forget("never seen")

    def test_keys_come_and_go(self) -> None:
        """A store that lives long sees more keys than any memory holds."""
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
    def test_any_history_is_survived(self, seed: int) -> None:
        rng = random.Random(seed)
        schedule = self.make()
        names = [f"g{i}" for i in range(6)]
        for _ in range(300):
            acts = ["advance", "advance", "advance", "expect", "expect_not", "introduce", "forget"]
            act = rng.choice(acts)
            if act == "expect":
                schedule.known.expect(rng.sample(names, rng.randrange(4)))
            else:
                method = {"advance": schedule.advance_past}.get(act) or getattr(schedule.known, act)
                method(rng.choice(names))
            assert set(schedule.upcoming(4)) <= set(names)
            assert all(schedule.steps_until(name) > 0 for name in names)
