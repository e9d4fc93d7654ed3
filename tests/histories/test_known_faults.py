"""Faults of this design found by simulation, each as a short history.

Every history is played twice: the planner passes it, and a planner without the protection fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.histories import mutants
from tests.histories.machine import Kind, World, land_all
from tierstore.errors import BudgetError
from tierstore.model.groups import GroupId
from tierstore.model.moves import Copy, Drop
from tierstore.model.tiers import Access, Tier
from tierstore.plan.planner import Planner
from tierstore.plan.policy import Policy, policy_named
from tierstore.plan.schedule import LearnedOrder

SMALL = {Tier.HOST: 10, Tier.DISK: None}


def put(world: World, nbytes: int) -> GroupId:
    key = world.claim(nbytes)
    assert key is not None
    assert world.fill(key), f"no space for {key}"
    return key


def use(world: World, key: GroupId, access: Access = Access.READ) -> None:
    waiter = world.demand(key, access)
    assert waiter is not None
    land_all(world)
    assert world.wake(waiter), f"{key} does not arrive"
    assert waiter in world.leases, f"{key} failed: {world.errors}"
    world.release(waiter)
    land_all(world)


def a_full_put_keeps_the_spills_it_started(planner: Kind) -> None:
    world = World({Tier.HOST: 10, Tier.DISK: 8}, planner=planner)
    a, b = put(world, 5), put(world, 5)
    third = world.claim(10)  # both would have to go; the disk takes one
    assert third is not None
    assert [(m.group, m.dst) for m in world.books.moving] == [(a, Tier.DISK)]
    land_all(world)
    assert world.fill(third)
    assert isinstance(world.errors[-1][1], BudgetError)
    assert world.planner.residence(a) == (Tier.DISK,)
    assert world.planner.residence(b) == (Tier.HOST,)
    use(world, a)
    use(world, b)
    world.finish()


def an_offload_is_taken_back_while_the_save_is_in_flight(planner: Kind) -> None:
    world = World(SMALL, planner=planner)
    key = put(world, 5)
    world.offload(key)
    assert [(m.src, m.dst) for m in world.books.moving] == [(Tier.HOST, Tier.DISK)]
    world.prefetch([key])
    land_all(world)
    assert world.planner.residence(key) == (Tier.HOST, Tier.DISK)
    dropped = [i for i in world.books.followed if isinstance(i, Drop)]
    assert not dropped, "it was dropped nevertheless and fetched again"
    world.finish()


def source_survives_eviction_for_its_copy(planner: Kind) -> None:
    world = World({Tier.DEVICE: 40, Tier.HOST: 10, Tier.DISK: None}, "lru", planner)
    hoped, wanted = world.register(10), world.register(10)
    world.prefetch([hoped])
    waiter = world.demand(wanted)
    assert waiter is not None
    # Both have space reserved on the device; the host lets one through at a time.
    assert [(m.group, m.dst) for m in world.books.moving] == [(hoped, Tier.HOST)]
    land_all(world)
    hops = [i.group for i in world.books.followed if isinstance(i, Copy) and i.dst is Tier.HOST]
    assert hops == [hoped, wanted], "a group on its way up was dropped and fetched again"
    assert world.wake(waiter)
    world.finish()


def a_demand_evicts_anything_rather_than_its_own_source(planner: Kind) -> None:
    world = World({Tier.DEVICE: 10, Tier.HOST: 20, Tier.DISK: None}, "lru", planner)
    changed = put(world, 10)
    use(world, changed, Access.UPDATE)  # only the device has it: it must leave through host memory
    source, other = put(world, 10), put(world, 10)
    for key in (source, other):
        world.save(key)
    land_all(world)
    waiter = world.demand(source)  # the least recently used on the host
    land_all(world)
    assert waiter is not None
    assert world.wake(waiter)
    read = [i for i in world.books.followed if isinstance(i, Copy) and i.src is Tier.DISK]
    assert not read, "it was in host memory, and was dropped and read again"
    world.finish()


def an_offload_during_arrival_is_not_forgotten(planner: Kind) -> None:
    world = World(SMALL, planner=planner)
    key = world.register(5)
    waiter = world.demand(key)
    assert waiter is not None
    world.give_up(waiter)
    world.offload(key)
    land_all(world)
    assert world.planner.residence(key) == (Tier.DISK,)
    world.finish()


def demanded_copy_stays_until_its_waiter_wakes(planner: Kind) -> None:
    world = World(SMALL, planner=planner)
    a, b = world.register(10), world.register(10)
    first = world.demand(a)
    land_all(world)
    second = world.demand(b)
    assert first is not None and second is not None
    assert world.planner.residence(a) == (Tier.HOST, Tier.DISK)
    assert world.wake(first)
    world.release(first)
    land_all(world)
    assert world.wake(second)
    world.finish()


class RefusesTheUnexpected:
    """Never evicts groups that are needed soon, even for a demand."""

    def __init__(self, schedule: LearnedOrder) -> None:
        self._schedule = schedule
        self._ranked = policy_named("next-use", schedule)
        self.admitted, self.used = self._ranked.admitted, self._ranked.used
        self.dropped = self._ranked.dropped

    def victims(self, tier: Tier, rival: GroupId | None) -> Iterator[GroupId]:
        ranked = self._ranked.victims(tier, rival)
        return iter([group for group in ranked if self._schedule.steps_until(group.key) > 4])


def use_out_of_order(policy: str | Callable[[LearnedOrder], Policy]) -> None:
    world = World({Tier.HOST: 20, Tier.DISK: None}, policy)
    keys = [world.register(10) for _ in range(4)]
    for key in keys * 3:
        use(world, key)
    missing = [key for key in keys if Tier.HOST not in world.planner.residence(key)]
    assert missing
    use(world, missing[-1])  # all resident groups are needed within four uses
    world.finish()


def claim_evicts_a_recent_put(planner: Kind) -> None:
    world = World({Tier.HOST: 12, Tier.DISK: None}, planner=planner)
    first, second = world.claim(8), world.claim(7)
    assert first is not None and second is not None
    assert world.fill(first)
    assert [(m.group, m.dst) for m in world.books.moving] == [(first, Tier.DISK)]
    land_all(world)
    assert world.fill(second)
    assert world.planner.residence(second) == (Tier.HOST,)
    world.finish()


def claim_gets_the_space_of_a_withdrawn_demand(planner: Kind) -> None:
    world = World({Tier.DEVICE: 12, Tier.HOST: 12, Tier.DISK: None}, planner=planner)
    waiter = world.demand(world.register(8))
    assert waiter is not None
    world.give_up(waiter)
    claim = world.claim(6)
    assert claim is not None
    land_all(world)
    assert world.fill(claim)
    assert not world.errors
    world.finish()


def prefetch_never_takes_claimed_space(planner: Kind) -> None:
    world = World({Tier.HOST: 12, Tier.DISK: 5}, planner=planner)
    hoped = world.register(2)
    put(world, 9)  # the disk has no space for it
    world.prefetch([hoped])
    claim = world.claim(12)
    assert claim is not None
    land_all(world)
    assert world.fill(claim)
    assert isinstance(world.errors[-1][1], BudgetError)
    world.finish()


FAULTS = [
    (a_full_put_keeps_the_spills_it_started, mutants.LosesInstructions),
    (an_offload_is_taken_back_while_the_save_is_in_flight, mutants.NeverChangesItsMind),
    (source_survives_eviction_for_its_copy, mutants.EvictsItsSource),
    (a_demand_evicts_anything_rather_than_its_own_source, mutants.EvictsTheSourceOfADemand),
    (an_offload_during_arrival_is_not_forgotten, mutants.LeavesTheUnwanted),
    (demanded_copy_stays_until_its_waiter_wakes, mutants.DropsBeforeTheWaiterWakes),
    (claim_evicts_a_recent_put, mutants.KeepsThePromiseOfAClaim),
    (claim_gets_the_space_of_a_withdrawn_demand, mutants.OrphansKeepTheirSpace),
    (prefetch_never_takes_claimed_space, mutants.PrefetchesTakeNeededSpace),
]
NAMES = [history.__name__ for history, _ in FAULTS]


@pytest.mark.parametrize("history", [history for history, _ in FAULTS], ids=NAMES)
def test_known_fault_history_passes(history: Callable[[Kind], None]) -> None:
    history(Planner)


@pytest.mark.parametrize(("history", "mutant"), FAULTS, ids=NAMES)
def test_known_fault_without_protection_fails(
    history: Callable[[Kind], None], mutant: type[mutants.FaultyPlanner]
) -> None:
    with pytest.raises(AssertionError):
        history(mutant)


def test_demand_out_of_schedule_order_gets_its_space() -> None:
    use_out_of_order("next-use")


def test_policy_refusing_out_of_order_demand_fails() -> None:
    with pytest.raises(AssertionError, match="though there is room"):
        use_out_of_order(RefusesTheUnexpected)
