"""Our own policies and schedule keep the rules, and the rules catch those that do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.conformance.policy import PolicyConformance
from tests.conformance.schedule import ScheduleConformance
from tierstore.model.groups import GroupId
from tierstore.model.tiers import TIERS, Tier
from tierstore.plan.known_keys import KnownKeys
from tierstore.plan.policy import FarthestNextUse, LeastRecentlyUsed, Policy, RankingPolicy
from tierstore.plan.schedule import LearnedOrder


class TestLeastRecentlyUsed(PolicyConformance):
    def make(self, schedule: LearnedOrder) -> Policy:
        return RankingPolicy(LeastRecentlyUsed())


class TestFarthestNextUse(PolicyConformance):
    def make(self, schedule: LearnedOrder) -> Policy:
        return RankingPolicy(FarthestNextUse(schedule))


class TestLearnedOrder(ScheduleConformance):
    def make(self) -> LearnedOrder:
        return LearnedOrder()


class TestLearnedOrderWithAShortMemory(ScheduleConformance):
    def make(self) -> LearnedOrder:
        return LearnedOrder(memory=70)


# Controls ----------------------------------------------------------------------------------------


class Faulty:
    """A correct policy, for subclasses to break."""

    def __init__(self) -> None:
        self.right: Policy = RankingPolicy(LeastRecentlyUsed())

    def admitted(self, group: GroupId, tier: Tier) -> None:
        self.right.admitted(group, tier)

    def used(self, group: GroupId) -> None:
        self.right.used(group)

    def dropped(self, group: GroupId, tier: Tier) -> None:
        self.right.dropped(group, tier)

    def victims(self, tier: Tier, rival: GroupId | None) -> Iterator[GroupId]:
        return self.right.victims(tier, rival)


class DeniesSpace(Faulty):
    """Denies a demand the space that it would deny a prefetch: a deadlock."""

    def victims(self, tier: Tier, rival: GroupId | None) -> Iterator[GroupId]:
        return iter(list(super().victims(tier, rival))[1:])


class NeverEnds(Faulty):
    def victims(self, tier: Tier, rival: GroupId | None) -> Iterator[GroupId]:
        while found := list(super().victims(tier, rival)):
            yield from found


class PushesItselfOut(Faulty):
    def victims(self, tier: Tier, rival: GroupId | None) -> Iterator[GroupId]:
        return super().victims(tier, None)


class KeepsDroppedCopies(Faulty):
    def dropped(self, group: GroupId, tier: Tier) -> None:
        pass


class IteratesLive(Faulty):
    """Iterates over a set that may change meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.there: dict[Tier, dict[GroupId, None]] = {tier: {} for tier in TIERS.values()}

    def admitted(self, group: GroupId, tier: Tier) -> None:
        self.there[tier][group] = None

    def dropped(self, group: GroupId, tier: Tier) -> None:
        self.there[tier].pop(group, None)

    def victims(self, tier: Tier, rival: GroupId | None) -> Iterator[GroupId]:
        return (group for group in self.there[tier] if group != rival)


@pytest.mark.parametrize(
    ("fault", "caught"),
    [
        (DeniesSpace, "test_every_copy_on_a_tier_is_eventually_a_victim"),
        (NeverEnds, "test_every_copy_on_a_tier_is_eventually_a_victim"),
        (PushesItselfOut, "test_every_copy_on_a_tier_is_eventually_a_victim"),
        (KeepsDroppedCopies, "test_dropped_copy_is_no_victim_and_may_be_admitted_again"),
        (IteratesLive, "test_victims_may_be_dropped_during_iteration"),
    ],
)
def test_policy_that_breaks_a_rule_fails(fault: type[Faulty], caught: str) -> None:
    class Suite(PolicyConformance):
        def make(self, schedule: LearnedOrder) -> Policy:
            return fault()

    class RightSuite(PolicyConformance):
        def make(self, schedule: LearnedOrder) -> Policy:
            return Faulty()

    assert caught in failures(Suite())
    assert not failures(RightSuite())


class KnowsNothing(LearnedOrder):
    def advance_past(self, key: str) -> None:
        pass


class ReturnsTooMuch(LearnedOrder):
    def upcoming(self, count: int) -> Iterator[str]:
        return super().upcoming(count + 5)


class CountsBackwards(LearnedOrder):
    def steps_until(self, key: str) -> float:
        return 100 - super().steps_until(key)


class KeepsKeys(KnownKeys):
    def forget(self, key: str) -> None:
        pass


class ForgetsNothing(LearnedOrder):
    def __init__(self) -> None:
        super().__init__(known=KeepsKeys())


class Waits(KnownKeys):
    def cancel_prefetch(self, key: str) -> None:
        pass


class WaitsForever(LearnedOrder):
    def __init__(self) -> None:
        super().__init__(known=Waits())


@pytest.mark.parametrize(
    "fault", [KnowsNothing, ReturnsTooMuch, CountsBackwards, ForgetsNothing, WaitsForever]
)
def test_schedule_that_breaks_a_rule_fails(fault: type[LearnedOrder]) -> None:
    class Suite(ScheduleConformance):
        def make(self) -> LearnedOrder:
            return fault()

    assert failures(Suite())


def failures(suite: PolicyConformance | ScheduleConformance) -> list[str]:
    """Return the failing tests of a suite; those with parameters get their first value."""
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
