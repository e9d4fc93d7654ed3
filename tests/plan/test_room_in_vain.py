"""Who looks for room in vain is not followed by everybody else who wants as much.

With dozens of callers that wait for room, each step of the store would look for room for each of
them. What was found out for one holds for others until something goes, or is about to.
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
    """What is noted here is not kept."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


def forgetful(
    budgets: Mapping[Tier, int | None], policy: Policy, schedule: LearnedOrder
) -> Planner:
    """A planner that finds out everything anew."""
    planner = Planner(budgets, policy, schedule)
    Driver(planner).table.in_vain = Nothing()
    return planner


@pytest.mark.parametrize("policy", ["next-use", "lru"])
def test_it_makes_no_difference_to_what_is_done(policy: str) -> None:
    in_vain = 0
    for seed in range(SEEDS):
        remembering = play(seed, policy, STEPS)
        forgetting = play(seed, policy, STEPS, forgetful)
        assert remembering.books.followed == forgetting.books.followed, f"seed {seed}"
        in_vain += len(remembering.errors)
    assert in_vain > 0


class Counted(RankingPolicy):
    """Counts how often it is asked for victims."""

    times = 0

    def victims(self, tier: Tier, rival: GroupId | None) -> Iterator[GroupId]:
        self.times += 1
        return super().victims(tier, rival)


class Asked:
    """A planner of which `full` pages are lent, and how often its policy was asked for victims."""

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
        """How often it is asked in one step, when so many puts of so many pages wait."""
        for number, size in enumerate(pages):
            self.planner.claim(f"put {number}", size * PAGE)
        self.policy.times = 0
        self.planner.expect([])  # any step: it looks again for all
        return self.policy.times


def test_of_many_who_want_as_much_or_more_one_looks() -> None:
    assert Asked(8, 8).asked_by([2] * 30) == 1
    assert Asked(8, 8).asked_by([1, 2, 3, 4] * 8) == 1
    assert Asked(8, 8).asked_by([4, 3, 2, 1] * 8) == 4  # who wants less may find it
    assert Asked(8, 8, forgetful).asked_by([2] * 30) == 30


def test_of_many_whose_room_is_on_its_way_one_looks() -> None:
    """A group leaves for the disk: nobody else has to be sent away for whom that is enough."""
    for planner, expected in ((Planner, 1), (forgetful, 31)):
        scene = Asked(6, 8, planner)
        scene.planner.claim("leaves", 2 * PAGE)
        scene.planner.fill("leaves")
        scene.planner.claim("waits", 2 * PAGE)
        assert [type(i).__name__ for i in scene.planner.instructions()][-1] == "Copy"
        assert scene.asked_by([2, 1] * 15) == expected
