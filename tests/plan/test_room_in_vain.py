"""A failed search for space is not repeated for every other request of that size.

With dozens of callers that wait for space, each step of the store would search for each of them.
The result for one holds for the others until a copy is dropped, or is about to be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.histories.machine import Kind, play
from tests.lanes import by_lane
from tests.plan.driver import Driver
from tierstore.model.groups import GroupId
from tierstore.model.tiers import Access, Tier
from tierstore.plan.planner import Planner
from tierstore.plan.policy import LeastRecentlyUsed, Policy, RankingPolicy
from tierstore.plan.schedule import LearnedOrder

PAGE = 4096
SEEDS = by_lane(20, 60)
STEPS = 60


class Nothing(dict[Any, Any]):
    """A dictionary that stores nothing."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


def forgetful(
    budgets: Mapping[Tier, int | None], policy: Policy, schedule: LearnedOrder
) -> Planner:
    """Return a planner that searches again for every request."""
    planner = Planner(budgets, policy, schedule)
    Driver(planner).table.blocked_sizes = Nothing()
    return planner


@pytest.mark.parametrize("policy", ["next-use", "lru"])
def test_search_skipping_changes_no_decision(policy: str) -> None:
    blocked_sizes = 0
    for seed in range(SEEDS):
        remembering = play(seed, policy, STEPS)
        forgetting = play(seed, policy, STEPS, forgetful)
        assert remembering.books.followed == forgetting.books.followed, f"seed {seed}"
        blocked_sizes += len(remembering.errors)
    assert blocked_sizes > 0


class Counted(RankingPolicy):
    """Counts the queries for victims."""

    times = 0

    def victims(self, tier: Tier, rival: GroupId | None) -> Iterator[GroupId]:
        self.times += 1
        return super().victims(tier, rival)


class Asked:
    """A planner with `full` leased pages, and its policy's number of queries for victims."""

    def __init__(self, full: int, budget: int, planner: Kind = Planner) -> None:
        self.policy = Counted(LeastRecentlyUsed())
        budgets = {Tier.HOST: budget * PAGE, Tier.DISK: None}
        self.planner = Driver(planner(budgets, self.policy, LearnedOrder()))
        for number in range(full):
            key = f"lent {number}"
            self.planner.claim(key, PAGE)
            self.planner.fill(key)
            assert self.planner.lease(key, Access.READ)

    def asked_by(self, pages: list[int]) -> int:
        """Return the number of searches in one step while puts of these sizes, in pages, wait."""
        for number, size in enumerate(pages):
            self.planner.claim(f"put {number}", size * PAGE)
        self.policy.times = 0
        self.planner.expect([])  # any step: it polls all of them
        return self.policy.times


def test_searches_for_equal_or_larger_sizes_run_once() -> None:
    assert Asked(8, 8).asked_by([2] * 30) == 1
    assert Asked(8, 8).asked_by([1, 2, 3, 4] * 8) == 1
    assert Asked(8, 8).asked_by([4, 3, 2, 1] * 8) == 4  # a smaller request may find space
    assert Asked(8, 8, forgetful).asked_by([2] * 30) == 30


def test_searches_with_space_on_the_way_run_once() -> None:
    """Evict a group to disk: requests that need no more evict no other group."""
    for planner, expected in ((Planner, 1), (forgetful, 31)):
        scene = Asked(6, 8, planner)
        scene.planner.claim("leaves", 2 * PAGE)
        scene.planner.fill("leaves")
        scene.planner.claim("waits", 2 * PAGE)
        assert [type(i).__name__ for i in scene.planner.instructions()][-1] == "Copy"
        assert scene.asked_by([2, 1] * 15) == expected
