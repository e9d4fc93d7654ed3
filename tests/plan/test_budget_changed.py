"""The device budget may change: every promise holds at once, and no request is blocked."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.histories.machine import History, World, land_all, use
from tests.lanes import by_lane
from tests.plan.driver import Driver
from tierstore.model.events import BudgetChanged
from tierstore.model.groups import GroupId
from tierstore.model.tiers import Access, Tier
from tierstore.plan.records import State

HISTORIES = by_lane(8, 60, 2000)
SIZES = (4, 12, 20, 40, 60)


class Resizing(History):
    """Changes the device's budget now and then."""

    seen: Counter[str]

    def _budgets(self) -> dict[Tier, int | None]:
        self.seen = Counter()
        return {**super()._budgets(), Tier.DEVICE: self.random.choice([12, 20, 40])}

    def look(self) -> None:
        if self.random.random() < 0.25:
            resize(self.world, self.random.choice(SIZES), self.seen)
        super().look()


def resize(world: World, nbytes: int, seen: Counter[str]) -> None:
    planner, books = world.planner, world.books
    before, used = planner.budgets[Tier.DEVICE], planner.used[Tier.DEVICE]
    assert before is not None
    books.budgets[Tier.DEVICE] = max(before, nbytes)
    world.step(BudgetChanged(nbytes))
    after = planner.budgets[Tier.DEVICE]
    assert after is not None
    books.budgets[Tier.DEVICE] = world._budgets_given[Tier.DEVICE] = after
    inside = Driver(planner)
    groups = inside.table.groups.values()
    largest = max((group.nbytes for group in groups), default=0)
    assert after >= max(nbytes, min(largest, before))
    if after > max(nbytes, min(largest, before)):  # the remaining copies cannot leave
        assert nbytes < used
        assert all(
            inside.table.in_use(group, Tier.DEVICE)
            or group.copies[Tier.DEVICE].state is State.RESERVED
            or not group.valid_elsewhere(Tier.DEVICE)
            or group.copies[Tier.DEVICE].unwanted
            or group in inside.table.promised
            or inside.requests.is_waited_for(group, Tier.DEVICE)
            for group in groups
            if Tier.DEVICE in group.copies
        )
        seen["in use"] += 1
    seen["larger" if after > before else "smaller" if after < before else "the same"] += 1
    seen["made room"] += planner.used[Tier.DEVICE] < used


@pytest.mark.parametrize("policy", ["next-use", "lru"])
def test_budget_change_in_random_histories_keeps_every_promise(policy: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(HISTORIES):
        history = Resizing(seed, policy)
        try:
            history.play(50)
            history.world.finish()
        except Exception as error:
            error.add_note(f"the seed is {seed}")
            raise
        seen += history.seen
    assert all(seen[what] > 1 for what in ("larger", "smaller", "in use", "made room")), seen


def filled(count: int, budget: int) -> tuple[World, list[GroupId]]:
    """Return groups of 4 bytes, as many on the device as fit, the first ones used last."""
    world = World({Tier.DEVICE: budget, Tier.HOST: 100, Tier.DISK: None})
    keys = [world.register(4) for _ in range(count)]
    for key in reversed(keys):
        use(world, key)
    return world, keys


def on_device(world: World, keys: list[GroupId]) -> int:
    land_all(world)
    return sum(Tier.DEVICE in world.planner.residence(key) for key in keys)


def test_budget_raised_keeps_more_copies() -> None:
    world, keys = filled(10, 12)
    assert on_device(world, keys) == 3
    resize(world, 40, Counter())
    for key in keys:
        use(world, key)
    assert on_device(world, keys) == 10


def test_budget_lowered_keeps_leased_groups() -> None:
    world, keys = filled(3, 12)
    leases = [world.demand(key, Access.READ) for key in keys[:2]]
    for waiter in leases:
        assert waiter is not None
        assert world.wake(waiter)
    resize(world, 4, Counter())
    assert world.planner.budgets[Tier.DEVICE] == 8
    assert on_device(world, keys) == 2
    for waiter in leases:
        assert waiter is not None
        world.release(waiter)
    resize(world, 1, Counter())
    assert world.planner.budgets[Tier.DEVICE] == 4, "space for one group is left"
    assert on_device(world, keys) == 1
    use(world, keys[2])
