"""Who waits, what moves for them, and how fast: looked at after every step of random histories.

`tests/histories` sees to what may never happen. Here is what must happen: room that can be had is
had, and the books beside the copies agree with them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.histories.machine import History, World
from tierstore.model.moves import Copy, Drop
from tierstore.model.tiers import Hold, Tier
from tierstore.plan.planner import Planner
from tierstore.plan.policy import LeastRecentlyUsed
from tierstore.plan.records import GroupRecord, State

HISTORIES = 60
STEPS = 50


class Told(LeastRecentlyUsed):
    """Writes down which complete copies there should be, after what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.there: dict[Tier, set[str]] = {tier: set() for tier in Tier}

    def admitted(self, key: str, tier: Tier) -> None:
        assert key not in self.there[tier], "it is told twice of the same copy"
        self.there[tier].add(key)
        super().admitted(key, tier)

    def dropped(self, key: str, tier: Tier) -> None:
        self.there[tier].remove(key)
        super().dropped(key, tier)


class Watched(World):
    """After every step that pursues what is wanted: was all of it done that could be done?"""

    def __init__(
        self,
        budgets: Mapping[Tier, int | None],
        policy: object = None,
        planner: type[Planner] = Planner,
    ) -> None:
        self.told = Told()
        self.ending: list[Copy] = []
        self.given_up: set[Tier] = set()
        self.steps = 0
        super().__init__(budgets, self._new_policy, planner)

    def _new_policy(self, _schedule: object) -> Told:
        self.told, self.ending = Told(), []
        return self.told

    def _step(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        before = len(self.books.followed)
        answer = super()._step(method, *args, **options)
        assert self.planner.instructions() == [], "what was told once is not told again"
        self._look_at_the_hops()
        self._look_at_the_books()
        new = self.books.followed[before:]
        self.given_up = {i.tier for i in new if isinstance(i, Drop)}
        for copy in (i for i in new if isinstance(i, Copy)):
            self._look_at(copy, ahead=method.__name__ == "spill_early")
        if method.__name__ not in ("register", "forgive"):  # these pursue nothing
            self._look_for_those_who_wait_in_vain()
        self.steps += 1
        going = [copy for copy in self.books.moving if not self._ends(copy)]
        if going and self.steps % 3 == 0:
            self.ending.append(going[self.steps % len(going)])
            copy = self.ending[-1]
            self._step(self.planner.ending, copy.key, copy.dst, copy.src)
        return answer

    def _ends(self, copy: Copy) -> bool:
        return any(copy is other for other in self.ending)

    def _look_at_the_hops(self) -> None:
        for way, hop in self.planner._foresight.hops.items():
            on_it = [copy for copy in self.books.moving if (copy.src, copy.dst) == way]
            ends = [copy for copy in on_it if self._ends(copy)]
            assert (hop.copies, hop.ending) == (len(on_it), len(ends)), way
            assert hop.nbytes == sum(copy.nbytes for copy in on_it), way

    def _look_at_the_books(self) -> None:
        foresight, groups = self.planner._foresight, self.planner._groups.values()
        newest = [group for group in groups if group.number >= 0]
        for tier in self.books.tiers[:-1]:
            numbers = {group.number for group in newest if tier in group.copies}
            assert set(foresight._held[tier].nonzero()[0].tolist()) == numbers, tier.name
        top = self.books.top
        assert self.planner.all_there() == all(top in group.copies for group in newest)
        for tier in self.books.tiers:
            there = {group.key for group in groups if group.present(tier)}
            assert self.told.there[tier] == there, f"the policy believes otherwise: {tier.name}"

    def _look_at(self, copy: Copy, *, ahead: bool) -> None:
        """Whether somebody waits for a new copy."""
        if copy.dst > copy.src:
            assert copy.urgent != ahead, copy
            return
        waits = copy.key in self.planner._demands
        waits |= copy.dst is self.books.host and copy.key in self.planner._fetches
        assert copy.urgent == waits, copy

    def _look_for_those_who_wait_in_vain(self) -> None:
        planner, host = self.planner, self.books.host
        for key in planner._offloads:
            group = planner._groups[key]
            wanted = key in planner._demands or key in planner._fetches
            assert wanted or group.present(self.books.top), f"{key} is not there to be offloaded"
        for key in planner._demands:
            self._look_at_one_who_waits(planner._groups[key], self.books.top)
        for key in planner._fetches:
            self._look_at_one_who_waits(planner._groups[key], host)
        for key in planner._claims:
            group = planner._groups[key]
            assert group.error or group.copies or not self._has_room(group, host), f"{key} waits"
        for key in planner._saves:
            group = planner._groups[key]
            there = [tier for tier in self.books.tiers if group.present(tier)]
            if there and not group.exclusive:
                below = Tier(max(there) + 1)
                had = below in group.copies or not self._has_room(group, below)
                assert had, f"{key} is not saved"

    def _look_at_one_who_waits(self, group: GroupRecord, goal: Tier) -> None:
        """Bytes are on their way, or there is no room for them on the next tier."""
        there = [tier for tier in self.books.tiers if group.present(tier)]
        if group.error or not there or min(there) <= goal:
            return
        if goal is self.books.host and group.exclusive:
            return
        if goal not in group.copies:
            assert not self._has_room(group, goal), f"{group.key} waits for room that is there"
            return
        next_one = group.copies.get(Tier(min(there) - 1))
        if next_one is None:
            room = self._has_room(group, Tier(min(there) - 1))
            assert not room, f"{group.key} waits half-way for room that is there"
        elif next_one.state is State.RESERVED:
            renewed = set(self.planner._fetches.get(group.key, [])) == {Hold.RENEW}
            pulled = group.key in self.planner._demands and self.books.top in group.copies
            assert renewed and not pulled, f"{group.key} is forgotten"

    def _has_room(self, group: GroupRecord, tier: Tier) -> bool:
        """Whether there is room for it on `tier`, or could be if clean copies were dropped."""
        budget, used = self.planner.budgets[tier], self.planner.used[tier]
        if budget is None or tier in self.given_up:
            return budget is None  # others may have dropped some of what they need just now
        groups = self.planner._groups.values()
        leaving = any(tier in g.copies and g.copies[tier].unwanted for g in groups)
        # What goes first, and whether it is dropped or saved, is the policy's choice.
        may_go = [] if leaving else [g for g in groups if self._may_go(g, tier)]
        return used + group.cost(tier) - sum(g.cost(tier) for g in may_go) <= budget

    def _may_go(self, group: GroupRecord, tier: Tier) -> bool:
        planner, top, host = self.planner, self.books.top, self.books.host
        if tier is Tier.DISK or not group.present(tier) or not group.valid_elsewhere(tier):
            return False
        copy = group.copies[tier]
        if copy.readers or copy.unwanted:
            return False
        on_its_way = top in group.copies and not group.present(top)
        lent = (tier is top and group.leases > 0) or (tier is host and group.held is not None)
        waited = (tier is top and group.key in planner._demands) or (
            tier is host and group.key in planner._fetches
        )
        return not (lent or waited or on_its_way)


class WatchedHistory(History):
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.world = Watched(self._budgets())
        for _ in range(self.random.randint(2, 8)):
            self.register()


@pytest.mark.parametrize("first", range(0, HISTORIES, 20))
def test_all_that_can_be_done_is_done_in_random_histories(first: int) -> None:
    for seed in range(first, first + 20):
        history = WatchedHistory(seed)
        history.play(STEPS)
        history.world.finish()
