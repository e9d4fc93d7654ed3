"""Requests, their moves, and their speed, checked after every step of random histories.

`tests/histories` checks that nothing forbidden happens. These tests check progress: free space is
used, and the bookkeeping agrees with the copies.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping

import pytest

from tests.histories.machine import REMOTE, History, World
from tests.plan.driver import Driver
from tierstore.model import events
from tierstore.model.groups import GroupId
from tierstore.model.moves import Copy, Drop
from tierstore.model.tiers import HostAccess, Tier
from tierstore.plan.policy import LeastRecentlyUsed, RankingPolicy
from tierstore.plan.records import GroupRecord, State

HISTORIES = 60
STEPS = 50
FULL = (39, 57)
"""Seeds of `tests/histories/test_four_tiers.py` that fill a disk between two tiers."""


class Told(RankingPolicy):
    """Records the copies that are complete according to its events."""

    def __init__(self, tiers: Collection[Tier]) -> None:
        super().__init__(LeastRecentlyUsed(), tiers)
        self.there: dict[Tier, set[GroupId]] = {tier: set() for tier in tiers}

    def admitted(self, group: GroupId, tier: Tier) -> None:
        assert group not in self.there[tier], "the same copy was admitted twice"
        self.there[tier].add(group)
        super().admitted(group, tier)

    def dropped(self, group: GroupId, tier: Tier) -> None:
        self.there[tier].remove(group)
        super().dropped(group, tier)


class Watched(World):
    """Checks after each step with requests that every possible move was made."""

    def __init__(self, budgets: Mapping[Tier, int | None]) -> None:
        self.budgets = budgets
        self.ending: list[Copy] = []
        self.given_up: set[Tier] = set()
        self.steps = 0
        super().__init__(budgets, self._new_policy)

    def _new_policy(self, _schedule: object) -> Told:
        self.admitted, self.ending = Told(sorted(self.budgets)), []
        return self.admitted

    @property
    def inside(self) -> Driver:
        return Driver(self.planner)

    def step(self, event: events.Event) -> None:
        before = len(self.books.followed)
        super().step(event)
        self._check_hops()
        self._check_bookkeeping()
        new = self.books.followed[before:]
        self.given_up = {i.tier for i in new if isinstance(i, Drop)}
        for copy in (i for i in new if isinstance(i, Copy)):
            self._look_at(copy, ahead=isinstance(event, events.SpillAdvised))
        if not isinstance(event, events.Registered | events.ErrorReported):  # no request pursued
            self._check_blocked()
        self.steps += 1
        going = [copy for copy in self.books.moving if not self._ends(copy)]
        if going and self.steps % 3 == 0:
            self.ending.append(going[self.steps % len(going)])
            copy = self.ending[-1]
            self.step(events.Ending(copy.group, copy.src, copy.dst))

    def _ends(self, copy: Copy) -> bool:
        return any(copy is other for other in self.ending)

    def _check_hops(self) -> None:
        for way, hop in self.inside.prefetcher.hops.items():
            on_it = [copy for copy in self.books.moving if (copy.src, copy.dst) == way]
            ends = [copy for copy in on_it if self._ends(copy)]
            assert (hop.copies, hop.ending) == (len(on_it), len(ends)), way
            assert hop.nbytes == sum(copy.nbytes for copy in on_it), way

    def _check_bookkeeping(self) -> None:
        groups = self.inside.table.groups.values()
        newest = [group for group in groups if group.number >= 0]
        self.planner.check()
        top = self.books.top
        assert self.planner.all_there() == all(top in group.copies for group in newest)
        for tier in self.books.tiers:
            there = {group.id for group in groups if group.present(tier)}
            assert self.admitted.there[tier] == there, f"the policy disagrees: {tier.name}"

    def _look_at(self, copy: Copy, *, ahead: bool) -> None:
        """Check that a new copy is urgent exactly if a request waits for it."""
        if copy.dst > copy.src:
            assert copy.urgent != ahead, copy
            return
        group, requests = self.inside.record(copy.group), self.inside.requests
        waits = group in requests.demands
        waits |= copy.dst >= self.books.host and group in requests.host_demands
        assert copy.urgent == waits, copy

    def _check_blocked(self) -> None:
        requests, table, host = self.inside.requests, self.inside.table, self.books.host
        for group in requests.offloads:
            wanted = group in requests.demands or group in requests.host_demands
            there = wanted or group.present(self.books.top)
            assert there, f"{group.id} is not resident, so it cannot be offloaded"
        for group in requests.demands:
            self._check_waiter(group, self.books.top, is_pulled=True)
        for group in requests.host_demands:
            self._check_waiter(group, host, is_pulled=False)
        for group in requests.claims:
            had = group.error or group.copies or not self._has_room(group, host)
            assert had, f"{group.id} waits"
        for group in requests.saves:
            tiers = [tier for tier in self.books.tiers if group.present(tier)]
            if tiers and not group.exclusive:
                below = table.below[max(tiers)]
                had = below in group.copies or not self._has_room(group, below)
                assert had, f"{group.id} is not saved"

    def _check_waiter(self, group: GroupRecord, goal: Tier, *, is_pulled: bool) -> None:
        """Check that its bytes are on their way, or that the next tier has no space for them."""
        there = [tier for tier in self.books.tiers if group.present(tier)]
        if group.error or not there or min(there) <= goal:
            return
        if not is_pulled and group.exclusive:
            return
        requests, top = self.inside.requests, self.books.top
        renewed = set(requests.host_demands.get(group, [])) == {HostAccess.RENEW}
        if goal not in group.copies and (is_pulled or renewed):
            assert not self._has_room(group, goal), f"{group.id} waits although there is space"
            return
        above = self.inside.table.above[min(there)]
        next_one = group.copies.get(above)
        if next_one is None:
            only_space = renewed and not is_pulled
            had = only_space or not self._has_room(group, above)
            assert had, f"{group.id} waits half-way although there is space"
        elif next_one.state is State.RESERVED:
            pulled = group in requests.demands and top in group.copies
            assert renewed and not pulled, f"{group.id} is forgotten"

    def _has_room(self, group: GroupRecord, tier: Tier) -> bool:
        """Return whether `tier` has space for it, or would after dropping clean copies."""
        budget, used = self.planner.budgets[tier], self.planner.used[tier]
        if budget is None or tier in self.given_up:
            return budget is None  # other evictions may just have used some
        groups = self.inside.table.groups.values()
        leaving = any(tier in g.copies and g.copies[tier].unwanted for g in groups)
        # The policy chooses the victim, and whether it is dropped or saved.
        may_go = [] if leaving else [g for g in groups if self._may_go(g, tier)]
        return used + group.cost(tier) - sum(g.cost(tier) for g in may_go) <= budget

    def _may_go(self, group: GroupRecord, tier: Tier) -> bool:
        requests, top, host = self.inside.requests, self.books.top, self.books.host
        if tier is self.books.tiers[-1] or tier is group.backing:
            return False
        if not group.present(tier) or not group.valid_elsewhere(tier):
            return False
        copy = group.copies[tier]
        if copy.readers or copy.unwanted:
            return False
        on_its_way = top in group.copies and not group.present(top)
        lent = (tier is top and group.leases > 0) or (tier is host and bool(group.host_lease))
        return not (lent or requests.is_waited_for(group, tier) or on_its_way)


class WatchedHistory(History):
    def __init__(self, seed: int, *, remote: bool) -> None:
        self.random = random.Random(seed)
        budgets = self._budgets()
        if remote:
            budgets[REMOTE] = self.random.choice([None, None, 24, 48])
        self.world = Watched(budgets)
        for _ in range(self.random.randint(2, 8)):
            self.register()


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("first", range(0, HISTORIES, 20))
def test_watched_random_histories_do_everything_possible(first: int, remote: bool) -> None:
    for seed in set(range(first, first + 20)).difference(FULL if remote else ()):
        history = WatchedHistory(seed, remote=remote)
        history.play(STEPS)
        history.world.finish()
