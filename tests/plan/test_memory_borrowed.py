"""Memory that no copy takes: it is in the books, there is room for it, and nobody is stuck."""

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
    """Now and then, somebody borrows memory, more or less of it, or gives it back."""

    def __init__(self, seed: int, policy: str) -> None:
        self.seen: Counter[str] = Counter()
        super().__init__(seed, policy)

    def look(self) -> None:
        if self.random.random() < 0.4:
            memory = [tier for tier in self.world.books.tiers if not tier.persistent]
            self.borrow(self.random.choice(memory), self.random.choice(SIZES))
        super().look()

    def borrow(self, tier: Tier, nbytes: int) -> None:
        planner = self.world.planner
        before = planner.borrowed[tier]
        borrowed = self.world.borrow(tier, nbytes)
        if borrowed and nbytes > before:
            dropped = any(isinstance(told, Drop) for told in self.world.told[-1])
            self.seen["made room" if dropped else "had room"] += 1
        self.seen["there was no room"] += not borrowed
        self.seen["gave back"] += nbytes < before
        assert borrowed or nbytes > before, "it takes no room to give some back"

    def give_back(self) -> None:
        for tier, nbytes in self.world.books.borrowed.items():
            if nbytes:
                self.borrow(tier, 0)


@pytest.mark.parametrize("policy", ["next-use", "lru"])
def test_every_promise_holds_in_random_histories(policy: str) -> None:
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
    """Groups of 4 bytes that were used on the device, one after the other."""
    world = World({Tier.DEVICE: budget, Tier.HOST: 100, Tier.DISK: None})
    keys = [world.register(4) for _ in range(count)]
    for key in keys:
        use(world, key)
    return world, keys


def test_copies_that_nobody_uses_make_room() -> None:
    world, _ = filled(3, 12)
    assert world.planner.used[Tier.DEVICE] == 12
    assert world.borrow(Tier.DEVICE, 8)
    assert world.planner.used[Tier.DEVICE] == 12
    assert world.planner.peak[Tier.DEVICE] == 12


def test_nothing_is_borrowed_where_copies_are_in_use() -> None:
    world, keys = filled(3, 12)
    leases = [world.demand(key, Access.READ) for key in keys]
    for waiter in leases:
        assert waiter is not None
        assert world.wake(waiter)
    assert not world.borrow(Tier.DEVICE, 4)
    assert world.planner.borrowed[Tier.DEVICE] == 0


def test_only_copy_of_a_group_does_not_go() -> None:
    world = World({Tier.HOST: 12, Tier.DISK: None})
    key = world.claim(8)
    assert key is not None
    assert world.fill(key)
    assert not world.borrow(Tier.HOST, 8)
    assert Tier.HOST in world.planner.residence(key)
    assert world.borrow(Tier.HOST, 4)


def test_waiter_proceeds_when_memory_is_returned() -> None:
    world, keys = filled(3, 12)
    assert world.borrow(Tier.DEVICE, 12)
    waiter = world.demand(keys[0])
    assert waiter is not None
    land_all(world)
    assert not world.wake(waiter)
    assert world.planner.error_of(keys[0]) is None, "it does not wait for ever"
    assert world.borrow(Tier.DEVICE, 0)
    land_all(world)
    assert world.wake(waiter)
