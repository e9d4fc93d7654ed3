"""Memory outside of any copy is accounted for, gets its space, and blocks no request."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.histories.machine import History, World, land_all, use
from tests.lanes import by_lane
from tierstore.model.groups import GroupId
from tierstore.model.moves import Drop
from tierstore.model.tiers import Access, Tier

HISTORIES = by_lane(20, 120, 2000)
SIZES = (0, 1, 2, 4, 8)


class Borrowing(History):
    """Now and then takes memory outside of copies, changes the amount, or returns it."""

    def __init__(self, seed: int, policy: str) -> None:
        self.seen: Counter[str] = Counter()
        super().__init__(seed, policy)

    def look(self) -> None:
        if self.random.random() < 0.4:
            memory = [tier for tier in self.world.books.tiers if not tier.persistent]
            self.carve_out(self.random.choice(memory), self.random.choice(SIZES))
        super().look()

    def carve_out(self, tier: Tier, nbytes: int) -> None:
        planner = self.world.planner
        before = planner.carved_out[tier]
        carved_out = self.world.carve_out(tier, nbytes)
        if carved_out and nbytes > before:
            dropped = any(isinstance(told, Drop) for told in self.world.told[-1])
            self.seen["made room" if dropped else "had room"] += 1
        self.seen["there was no room"] += not carved_out
        self.seen["gave back"] += nbytes < before
        assert carved_out or nbytes > before, "returning memory needs no space"

    def give_back(self) -> None:
        for tier, nbytes in self.world.books.carved_out.items():
            if nbytes:
                self.carve_out(tier, 0)


@pytest.mark.parametrize("policy", ["next-use", "lru"])
def test_memory_lease_in_random_histories_keeps_every_promise(policy: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(HISTORIES):
        history = Borrowing(seed, policy)
        try:
            history.play(50)
            history.give_back()
            history.world.finish()
        except Exception as error:
            error.add_note(f"the seed is {seed}")
            raise
        seen += history.seen
    wanted = "had room", "made room", "there was no room", "gave back"
    assert all(seen[what] > 1 for what in wanted), seen


def filled(count: int, budget: int) -> tuple[World, list[GroupId]]:
    """Return groups of 4 bytes that were used on the device, one after another."""
    world = World({Tier.DEVICE: budget, Tier.HOST: 100, Tier.DISK: None})
    keys = [world.register(4) for _ in range(count)]
    for key in keys:
        use(world, key)
    return world, keys


def test_memory_lease_evicts_unused_copies() -> None:
    world, _ = filled(3, 12)
    assert world.planner.used[Tier.DEVICE] == 12
    assert world.carve_out(Tier.DEVICE, 8)
    assert world.planner.used[Tier.DEVICE] == 12
    assert world.planner.peak[Tier.DEVICE] == 12


def test_memory_lease_with_copies_in_use_gets_nothing() -> None:
    world, keys = filled(3, 12)
    leases = [world.demand(key, Access.READ) for key in keys]
    for waiter in leases:
        assert waiter is not None
        assert world.wake(waiter)
    assert not world.carve_out(Tier.DEVICE, 4)
    assert world.planner.carved_out[Tier.DEVICE] == 0


def test_memory_lease_keeps_the_only_copy() -> None:
    world = World({Tier.HOST: 12, Tier.DISK: None})
    key = world.claim(8)
    assert key is not None
    assert world.fill(key)
    assert not world.carve_out(Tier.HOST, 8)
    assert Tier.HOST in world.planner.residence(key)
    assert world.carve_out(Tier.HOST, 4)


def test_waiter_proceeds_when_memory_is_returned() -> None:
    world, keys = filled(3, 12)
    assert world.carve_out(Tier.DEVICE, 12)
    waiter = world.demand(keys[0])
    assert waiter is not None
    land_all(world)
    assert not world.wake(waiter)
    assert world.planner.error_of(keys[0]) is None, (
        "the demand failed although memory may be returned"
    )
    assert world.carve_out(Tier.DEVICE, 0)
    land_all(world)
    assert world.wake(waiter)
