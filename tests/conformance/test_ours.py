"""Our own policies and schedule keep the rules, and the rules catch those that do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.conformance.policy import PolicyConformance
from tests.conformance.schedule import ScheduleConformance
from tierstore.model.tiers import Tier
from tierstore.plan.policy import FarthestNextUse, LeastRecentlyUsed, Policy
from tierstore.plan.schedule import LearnedOrder, Schedule


class TestLeastRecentlyUsed(PolicyConformance):
    def make(self, schedule: Schedule) -> Policy:
        return LeastRecentlyUsed()


class TestFarthestNextUse(PolicyConformance):
    def make(self, schedule: Schedule) -> Policy:
        return FarthestNextUse(schedule)


class TestLearnedOrder(ScheduleConformance):
    def make(self) -> Schedule:
        return LearnedOrder()


class TestLearnedOrderWithAShortMemory(ScheduleConformance):
    def make(self) -> Schedule:
        return LearnedOrder(memory=70)


# Controls ----------------------------------------------------------------------------------------


class RefusesRoom(LeastRecentlyUsed):
    """Gives a demand no room beyond what it would give a prefetch: a deadlock."""

    def victims(self, tier: Tier, rival: str | None) -> Iterator[str]:
        return iter(list(super().victims(tier, rival))[1:])


class NeverEnds(LeastRecentlyUsed):
    def victims(self, tier: Tier, rival: str | None) -> Iterator[str]:
        while found := list(super().victims(tier, rival)):
            yield from found


class PushesItselfOut(LeastRecentlyUsed):
    def victims(self, tier: Tier, rival: str | None) -> Iterator[str]:
        return super().victims(tier, None)


class KeepsWhatIsGone(LeastRecentlyUsed):
    def dropped(self, key: str, tier: Tier) -> None:
        pass


class LooksAsItGoes(LeastRecentlyUsed):
    def victims(self, tier: Tier, rival: str | None) -> Iterator[str]:
        return (key for key, row in self._row.items() if self._is_on(tier, row) and key != rival)


@pytest.mark.parametrize(
    "fault", [RefusesRoom, NeverEnds, PushesItselfOut, KeepsWhatIsGone, LooksAsItGoes]
)
def test_a_policy_that_breaks_a_rule_is_caught(fault: type[LeastRecentlyUsed]) -> None:
    class Suite(PolicyConformance):
        def make(self, schedule: Schedule) -> Policy:
            return fault()

    assert failures(Suite())


class KnowsNothing(LearnedOrder):
    def advance_past(self, key: str) -> None:
        pass


class TellsTooMuch(LearnedOrder):
    def upcoming(self, count: int) -> Iterator[str]:
        return super().upcoming(count + 5)


class CountsBackwards(LearnedOrder):
    def steps_until(self, key: str) -> float:
        return 100 - super().steps_until(key)


class ForgetsNobody(LearnedOrder):
    def forget(self, key: str) -> None:
        pass


class WaitsInVain(LearnedOrder):
    def expect_not(self, key: str) -> None:
        pass


@pytest.mark.parametrize(
    "fault", [KnowsNothing, TellsTooMuch, CountsBackwards, ForgetsNobody, WaitsInVain]
)
def test_a_schedule_that_breaks_a_rule_is_caught(fault: type[LearnedOrder]) -> None:
    class Suite(ScheduleConformance):
        def make(self) -> Schedule:
            return fault()

    assert failures(Suite())


def failures(suite: PolicyConformance | ScheduleConformance) -> list[str]:
    """The tests of a suite that fail; those with parameters get their first value."""
    failed = []
    for name in dir(suite):
        if not name.startswith("test_"):
            continue
        test: Callable[..., None] = getattr(suite, name)
        marks = getattr(test, "pytestmark", [])
        arguments = [next(iter(mark.args[1])) for mark in marks]
        try:
            test(*arguments)
        except (AssertionError, RuntimeError, StopIteration):
            failed.append(name)
    return failed
