"""Conformance tests for policies. Subclass `PolicyConformance`, and run pytest.

class TestMyPolicy(PolicyConformance):
    def make(self, schedule):
        return MyPolicy(schedule)
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import islice

import pytest

from tierstore.model.groups import GroupId
from tierstore.model.tiers import TIERS, Tier
from tierstore.plan.policy import Policy
from tierstore.plan.schedule import LearnedOrder

ENOUGH = 10_000
"""More victims than any test has copies: a policy that yields this many never ends."""


class Shelf:
    """The set of existing copies, tracked beside the policy."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.on: dict[Tier, set[GroupId]] = {tier: set() for tier in TIERS.values()}

    def admit(self, key: GroupId, tier: Tier) -> None:
        self.policy.admitted(key, tier)
        self.on[tier].add(key)

    def drop(self, key: GroupId, tier: Tier) -> None:
        self.policy.dropped(key, tier)
        self.on[tier].discard(key)

    def victims(self, tier: Tier, rival: GroupId | None = None) -> list[GroupId]:
        """Return the policy's victims in its order."""
        found = []
        for key in self.policy.victims(tier, rival):
            found.append(key)
            assert len(found) < ENOUGH, "the victims have no end"
        return found

    def check(self) -> None:
        """Check all invariants."""
        for tier, keys in self.on.items():
            everybody = self.victims(tier)
            assert len(everybody) == len(set(everybody)), "a copy is a victim twice"
            assert set(everybody) == keys, "required space is denied or missing"
            for rival in [*sorted(keys)[:2], GroupId("new rival", 1)]:
                some = self.victims(tier, rival)
                assert rival not in some, "a prefetch would evict itself"
                assert len(some) == len(set(some))
                assert set(some) <= keys


class PolicyConformance(ABC):
    """The rules of `tierstore.plan.policy.Policy`, as tests."""

    @abstractmethod
    def make(self, schedule: LearnedOrder) -> Policy:
        """Return a new policy that may rank by `schedule`."""

    def shelf(self) -> tuple[Shelf, LearnedOrder]:
        schedule = LearnedOrder(memory=32)
        return Shelf(self.make(schedule)), schedule

    def keys(self, names: str) -> list[GroupId]:
        return [GroupId(name, 1) for name in names]

    def test_new_policy_has_no_victims(self) -> None:
        shelf, _ = self.shelf()
        shelf.check()

    def test_every_copy_on_a_tier_is_eventually_a_victim(self) -> None:
        shelf, _ = self.shelf()
        for number, key in enumerate(self.keys("abcdef")):
            for tier in list(TIERS.values())[: number % 3 + 1]:
                shelf.admit(key, tier)
            shelf.check()

    def test_dropped_copy_is_no_victim_and_may_be_admitted_again(self) -> None:
        shelf, _ = self.shelf()
        a, b = self.keys("ab")
        for key in (a, b):
            shelf.admit(key, Tier.HOST)
            shelf.admit(key, Tier.DEVICE)
        shelf.drop(a, Tier.DEVICE)
        shelf.check()
        shelf.drop(a, Tier.HOST)
        shelf.check()
        shelf.admit(a, Tier.HOST)
        shelf.check()

    def test_copy_admitted_twice_is_one_victim(self) -> None:
        shelf, _ = self.shelf()
        (key,) = self.keys("a")
        for _ in range(3):
            shelf.admit(key, Tier.HOST)
        shelf.check()
        shelf.drop(key, Tier.HOST)
        shelf.check()

    def test_victims_may_be_dropped_during_iteration(self) -> None:
        shelf, _ = self.shelf()
        for key in self.keys("abcdef"):
            shelf.admit(key, Tier.HOST)
        victims = islice(shelf.policy.victims(Tier.HOST, None), ENOUGH)
        for count, victim in enumerate(victims):
            if count < 3:
                shelf.drop(victim, Tier.HOST)
        shelf.check()
        assert len(shelf.on[Tier.HOST]) == 3

    def test_reading_victims_changes_nothing(self) -> None:
        shelf, schedule = self.shelf()
        for key in self.keys("abcdef"):
            shelf.admit(key, Tier.HOST)
            shelf.policy.used(key)
            schedule.advance_past(key.key)
        first = shelf.victims(Tier.HOST)
        rival = self.keys("c")[0]
        for _ in range(3):
            some: Iterator[GroupId] = shelf.policy.victims(Tier.HOST, rival)
            next(some, None)
            assert shelf.victims(Tier.HOST) == first

    def test_versions_of_one_group_are_separate_victims(self) -> None:
        shelf, _ = self.shelf()
        old, new = GroupId("a", 1), GroupId("a", 2)
        shelf.admit(old, Tier.HOST)
        shelf.admit(new, Tier.HOST)
        shelf.policy.used(new)
        shelf.check()
        shelf.drop(old, Tier.HOST)
        assert shelf.victims(Tier.HOST) == [new]

    @pytest.mark.parametrize("seed", range(20))
    def test_random_histories_keep_the_rules(self, seed: int) -> None:
        rng = random.Random(seed)
        shelf, schedule = self.shelf()
        names = "abcdefgh"
        for name in names:
            schedule.known.introduce(name)
        for _ in range(150):
            key = GroupId(rng.choice(names), rng.randrange(2))
            tier = rng.choice(list(TIERS.values()))
            if key in shelf.on[tier] and rng.random() < 0.4:
                shelf.drop(key, tier)
            elif rng.random() < 0.5:
                shelf.admit(key, tier)
            elif any(key in keys for keys in shelf.on.values()):
                shelf.policy.used(key)
                schedule.advance_past(key.key)
            if rng.random() < 0.1:
                schedule.known.prefetch(rng.sample(names, 2))
            if rng.random() < 0.05:
                schedule.known.forget(rng.choice(names))
            shelf.check()
