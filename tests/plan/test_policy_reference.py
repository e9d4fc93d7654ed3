"""Policies against a slow reference that sorts by their descriptions.

The reference keeps sets and evaluates every copy each time. It asks the schedule only how many uses
ahead a group is expected.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest

from tierstore.model.groups import GroupId
from tierstore.model.tiers import TIERS, Tier
from tierstore.plan.matching import Numbers
from tierstore.plan.policy import (
    CopyRows,
    FarthestNextUse,
    LeastRecentlyUsed,
    Policy,
    RankingPolicy,
)
from tierstore.plan.schedule import LearnedOrder, Ranks

Value = tuple[int, bool, float, int]
"""A rank; the copy with the largest is evicted first.

Its parts: whether another copy stays elsewhere, whether the group is unexpected, the distance of
its next use, and the time since its last.
"""


class Reference:
    """Ranks by age, as "lru" does; or by the next use, if there is a schedule."""

    def __init__(self, schedule: LearnedOrder | None, tiers: Sequence[Tier]) -> None:
        self.schedule = schedule
        self.on: dict[Tier, set[GroupId]] = {tier: set() for tier in tiers}
        self.touched: dict[GroupId, int] = {}
        self.clock = 0
        self.seen: set[GroupId] = set()
        self.below = {tier for tier in tiers if tier > Tier.DISK}

    def admitted(self, key: GroupId, tier: Tier) -> None:
        self.on[tier].add(key)
        self.touch(key)

    def used(self, key: GroupId) -> None:
        if key in set().union(*self.on.values()):
            self.seen.add(key)
            self.touch(key)

    def touch(self, key: GroupId) -> None:
        self.clock += 1
        self.touched[key] = self.clock

    def dropped(self, key: GroupId, tier: Tier) -> None:
        self.on[tier].discard(key)
        if key not in set().union(*self.on.values()):
            self.seen.discard(key)

    def away(self, key: GroupId) -> float:
        """Return the uses until its next one; without a schedule, the uses since the last."""
        if self.schedule is None:
            return self.clock - self.touched[key]
        return self.schedule.steps_until(key.key)

    def value(self, key: GroupId, times: float = 1.0, settled: bool = False) -> Value:
        away, age = self.away(key), self.clock - self.touched[key]
        if math.isinf(away):
            return settled, True, times, age
        return settled, False, float(f"{times * away:.9g}"), age

    def is_below(self, key: GroupId) -> bool:
        """Return whether the disk is only a cache of it."""
        return any(key in self.on[tier] for tier in self.below)

    def settled(self, key: GroupId, on: Tier = Tier.DEVICE) -> bool:
        """Return whether it is settled on a tier; the three copies missed least are not."""
        staying = sorted(self.on[on], key=self.value)[:-3]
        saved = any(key in groups for tier, groups in self.on.items() if tier.persistent)
        return key in staying and saved

    def allowed(self, key: GroupId, rival: GroupId | None) -> bool:
        """Return whether a prefetch may take its space.

        Never from sticky groups, nor from those that are needed within three times as many uses, if
        that is known.
        """
        if rival is None or key == rival:
            return rival is None
        if self.schedule is None or self.schedule.learning:
            return True
        return self.away(key) > 3 * self.schedule.steps_until(rival.key)

    def cached(self, keys: Sequence[GroupId], rival: GroupId | None) -> dict[GroupId, Value]:
        """Return a rank for a disk that is a cache.

        Groups in memory go first; without an order, unused ones go last, and for no prefetch.
        """
        learning = self.schedule is not None and self.schedule.learning
        found = {}
        for key in keys:
            needed = learning and key not in self.seen
            again = self.settled(key, Tier.HOST) and self.is_below(key)
            if not (needed and rival is not None):
                _, *value = self.value(key)
                found[key] = (again - needed, *value)
        return found

    def victims(self, tier: Tier, rival: GroupId | None) -> dict[GroupId, Value]:
        keys = [key for key in self.on[tier] if self.allowed(key, rival)]
        if tier is Tier.DEVICE:
            return {k: self.value(k, 4.0 if k in self.on[Tier.HOST] else 1.0) for k in keys}
        if tier is Tier.DISK and self.below:
            return self.cached(keys, rival)
        if tier.persistent:
            return {key: self.value(key) for key in keys}
        found = {}
        for key in keys:
            cached = key in self.on[Tier.DISK] and self.is_below(key)
            found[key] = self.value(key, 4.0 if cached else 1.0, self.settled(key))
        return found


class Pair:
    """A policy and its reference, which get the same events, and counts of the cases compared."""

    def __init__(self, policy: Policy, schedule: LearnedOrder, reference: Reference) -> None:
        self.policy, self.reference, self.schedule = policy, reference, schedule
        self.tiers = list(reference.on)
        self.seen: Counter[str] = Counter()

    def admit(self, key: GroupId, tier: Tier) -> None:
        self.policy.admitted(key, tier)
        self.reference.admitted(key, tier)

    def drop(self, key: GroupId, tier: Tier) -> None:
        self.policy.dropped(key, tier)
        self.reference.dropped(key, tier)

    def use(self, key: GroupId) -> None:
        self.policy.used(key)
        self.reference.used(key)
        self.schedule.advance_past(key.key)

    def compare(self, tier: Tier, rival: GroupId | None) -> None:
        expected = self.reference.victims(tier, rival)
        found = list(self.policy.victims(tier, rival))
        assert sorted(found) == sorted(expected)
        values = [expected[key] for key in found]
        # Either of two equal ranks may go first.
        assert all(self._in_order(a, b) for a, b in pairwise(values)), found
        unexpected = [value for value in values if value[1]]
        assert unexpected == sorted(unexpected, reverse=True), "least recently used is not first"
        self._note(values, tier, rival)

    def _in_order(self, first: Value, second: Value) -> bool:
        if first[:2] == second[:2] == (True, False) and not self.schedule.trusted:
            # The ranks of settled copies are logarithms with a large offset, so the nearest are a
            # 64th apart.
            return first[2] >= math.exp(-1 / 64) * second[2]
        return first[:3] >= second[:3]

    def _note(self, values: Sequence[Value], tier: Tier, rival: GroupId | None) -> None:
        some = 0 < len(values) < len(self.reference.on[tier])
        state = "learning" if self.schedule.learning else "guessing"
        self.seen["trusted" if self.schedule.trusted else state] += 1
        self.seen["many"] += len(values) > 8
        self.seen["a prefetch gets some"] += rival is not None and some
        self.seen["some are settled"] += any(v[0] for v in values) and not all(v[0] for v in values)
        self.seen["not expected"] += any(v[1] for v in values)


NAMES = [f"g{i}" for i in range(24)]


def play(pair: Pair, seed: int) -> None:
    """Play a loop that is learned, disturbed and left, while copies are added and dropped."""
    rng = random.Random(seed)
    loop = rng.sample(NAMES, rng.randint(5, 20))
    for name in rng.sample(NAMES, len(NAMES)):
        pair.admit(GroupId(name, 1), rng.choice(pair.tiers))
    for turn in range(9):
        if turn % 3 == 2:
            order = [rng.choice(NAMES) for _ in range(25)]
        else:
            order = [rng.choice(NAMES) if rng.random() < 0.03 else name for name in loop]
        for name in order:
            key = GroupId(name, 1)
            act = rng.choice([pair.admit, pair.admit, pair.drop])
            act(GroupId(rng.choice(NAMES), 1), rng.choice(pair.tiers))
            pair.use(key)
            if rng.random() < 0.3:
                rival = GroupId(rng.choice([*NAMES, "nobody"]), 1)
                pair.compare(rng.choice(pair.tiers), rng.choice([None, rival]))
        if turn == 4:
            come_and_go(pair, 150)


def come_and_go(pair: Pair, times: int) -> None:
    """Admit and drop versions of one group in turn, far more than exist at any time."""
    for version in range(times):
        pair.admit(GroupId("passing", version), Tier.DEVICE)
        pair.drop(GroupId("passing", version), Tier.DEVICE)
        if version % 10 == 9:  # discarding their rows leaves all ranks unchanged
            for tier in pair.tiers:
                pair.compare(tier, None)


THREE = tuple(TIERS.values())
FOUR = (*THREE, Tier(3, "REMOTE", persistent=True))


def by_next_use(tiers: Sequence[Tier] = THREE) -> Pair:
    schedule = LearnedOrder()
    policy = RankingPolicy(FarthestNextUse(schedule), tiers)
    return Pair(policy, schedule, Reference(schedule, tiers))


def by_age(tiers: Sequence[Tier]) -> Pair:
    policy = RankingPolicy(LeastRecentlyUsed(), tiers)
    return Pair(policy, LearnedOrder(), Reference(None, tiers))


SEEDS = range(8)


@pytest.mark.parametrize("tiers", [THREE, FOUR], ids=["three", "four"])
@pytest.mark.parametrize("seed", SEEDS)
def test_next_use_ranks_match_the_reference(seed: int, tiers: Sequence[Tier]) -> None:
    pair = by_next_use(tiers)
    play(pair, seed)
    for what in ("many", "trusted", "guessing", "a prefetch gets some", "some are settled"):
        assert pair.seen[what] >= 3, what


def test_next_use_while_learning_ranks_by_age() -> None:
    pair = by_next_use()
    rng = random.Random(1)
    for name in NAMES:
        pair.admit(GroupId(name, 1), rng.choice([Tier.HOST, Tier.DEVICE]))
        pair.use(GroupId(name, 1))
        for tier in pair.tiers:
            pair.compare(tier, None)
            pair.compare(tier, GroupId("g3", 1))
    assert pair.seen["learning"] == 6 * len(NAMES)
    assert pair.seen["not expected"] >= 50


@pytest.mark.parametrize("tiers", [THREE, FOUR], ids=["three", "four"])
@pytest.mark.parametrize("seed", SEEDS)
def test_lru_ranks_match_the_reference(seed: int, tiers: Sequence[Tier]) -> None:
    pair = by_age(tiers)
    play(pair, seed)
    for what in ("many", "some are settled"):
        assert pair.seen[what] >= 3, what


# Beyond the ranking ------------------------------------------------------------------------------


class Measuring(LeastRecentlyUsed):
    """Records the largest number of rows, and the capacity."""

    most_rows = most_room = 0

    def ranks(self, rows: CopyRows) -> Ranks:
        self.most_rows = max(self.most_rows, len(rows))
        self.most_room = max(self.most_room, len(rows.touched))
        return super().ranks(rows)


def test_stale_rows_are_discarded_once_too_many() -> None:
    """The limit is the number of copies plus 64, however long the run."""
    order, here = Measuring(), 10
    policy = RankingPolicy(order)
    for number in range(here):
        policy.admitted(GroupId("stays", number), Tier.HOST)
    for number in range(1000):
        policy.admitted(GroupId("passes", number), Tier.HOST)
        assert len(list(policy.victims(Tier.HOST, None))) == here + 1
        policy.dropped(GroupId("passes", number), Tier.HOST)
    assert order.most_rows == here + (here + 64) + 1
    assert order.most_room < 2 * order.most_rows
    assert len(list(policy.victims(Tier.HOST, None))) == here


def test_iteration_over_discarded_rows_continues() -> None:
    policy = RankingPolicy(LeastRecentlyUsed())
    stay = [GroupId("stays", number) for number in range(20)]
    for group in stay:
        policy.admitted(group, Tier.HOST)
    victims = policy.victims(Tier.HOST, None)
    found = [next(victims)]
    for number in range(200):
        policy.admitted(GroupId("passes", number), Tier.HOST)
        policy.dropped(GroupId("passes", number), Tier.HOST)
    assert [*found, *victims] == stay


class Counting(LearnedOrder):
    """Counts the ranks requested."""

    asked = 0

    def ranks(self, numbers: Numbers) -> Ranks:
        self.asked += len(numbers)
        return super().ranks(numbers)


def test_expected_uses_cost_one_rank_each() -> None:
    schedule = Counting()
    policy = RankingPolicy(FarthestNextUse(schedule))
    keys = [GroupId(name, 1) for name in NAMES]
    for key in keys:
        policy.admitted(key, Tier.HOST)
    for key in keys * 2:
        schedule.advance_past(key.key)
    next(policy.victims(Tier.HOST, None))
    for key in keys:
        schedule.asked = 0
        policy.used(key)
        schedule.advance_past(key.key)
        for _ in range(2):
            next(policy.victims(Tier.HOST, None))
        assert schedule.asked == 1
