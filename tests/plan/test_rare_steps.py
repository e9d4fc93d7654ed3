"""Single steps of the planner that random histories seldom or never take."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.histories.machine import World, land_all
from tests.plan.driver import Driver, driver_of
from tests.plan.scans import Scan
from tierstore.errors import BudgetError
from tierstore.model.events import Ending, HostWithdrawn, MemoryReleased, SpillAdvised
from tierstore.model.groups import GroupId
from tierstore.model.moves import Copy
from tierstore.model.tiers import Access, HostAccess, Tier
from tierstore.plan.policy import FarthestNextUse, RankingPolicy
from tierstore.plan.records import State
from tierstore.plan.schedule import LearnedOrder

TWO = {Tier.HOST: 20, Tier.DISK: None}
THREE = {Tier.DEVICE: 20, Tier.HOST: 20, Tier.DISK: None}


def put(world: World, nbytes: int) -> GroupId:
    key = world.claim(nbytes)
    assert key is not None and world.fill(key)
    return key


def use(world: World, key: GroupId) -> None:
    waiter = world.demand(key)
    assert waiter is not None
    land_all(world)
    assert world.wake(waiter)
    world.release(waiter)
    land_all(world)


# Puts under way ----------------------------------------------------------------------------------


@pytest.mark.parametrize("budgets", [TWO, THREE])
def test_demand_during_a_put_waits_for_it(budgets: dict[Tier, int | None]) -> None:
    world = World(budgets)
    key = world.claim(5)
    assert key is not None
    waiter = world.demand(key)
    assert waiter is not None
    assert not world.books.moving, "no bytes can move yet"
    assert not world.wake(waiter)
    assert world.fill(key)
    land_all(world)
    assert world.wake(waiter)
    world.finish()


def test_host_lease_during_a_put_waits_until_it_is_there() -> None:
    world = World({Tier.HOST: 10, Tier.DISK: None})
    other = world.demand(world.register(8))
    assert other is not None
    land_all(world)
    assert world.wake(other)
    key = world.claim(5)
    assert key is not None
    holder = world.fetch(key)
    assert holder is not None
    assert not world.hold(holder)
    world.release(other)
    assert world.fill(key)
    assert world.hold(holder)
    world.finish()


def test_save_during_a_put_is_done_on_arrival() -> None:
    world = World(TWO)
    key = world.claim(5)
    assert key is not None
    saver = world.save(key)
    assert not world.books.moving, "no bytes can be saved yet"
    assert world.fill(key)
    land_all(world)
    assert world.look_saved(saver)
    assert world.planner.residence(key) == (Tier.HOST, Tier.DISK)
    world.finish()


# Host leases -------------------------------------------------------------------------------------


def test_host_lease_of_discarded_group_can_be_withdrawn() -> None:
    world = World(TWO)
    key = world.register(5)
    holder = world.fetch(key)
    assert holder is not None
    world.discard(key)
    told = world.planner.handle(HostWithdrawn(key, holder.purpose), world.now)
    assert told == [], "no instruction is needed: no request is left"
    world.planner.check()
    land_all(world)
    assert world.hold(holder), "the request must end: the group is gone"
    assert isinstance(world.errors[-1][1], KeyError)
    world.finish()


@pytest.mark.parametrize("budgets", [TWO, THREE])
def test_copy_is_arriving_until_it_is_there(budgets: dict[Tier, int | None]) -> None:
    world = World(budgets)
    key = world.register(5)
    assert not world.planner.arriving(key)
    waiter = world.demand(key)
    assert waiter is not None
    while world.books.moving:
        assert world.planner.arriving(key)
        world.deliver(world.books.moving[0])
    assert not world.planner.arriving(key)
    assert world.wake(waiter)
    world.finish()


def test_copy_moving_to_disk_is_not_arriving() -> None:
    world = World(TWO)
    key = put(world, 5)
    world.save(key)
    assert [move.dst for move in world.books.moving] == [Tier.DISK]
    assert not world.planner.arriving(key)
    world.finish()


@pytest.mark.parametrize("budgets", [TWO, THREE])
def test_flush_of_the_only_copy_keeps_it(budgets: dict[Tier, int | None]) -> None:
    world = World(budgets)
    key = put(world, 5)
    world.step(MemoryReleased(key))
    land_all(world)
    assert world.planner.residence(key), "its only copy is gone"
    use(world, key)
    world.finish()


# Spills in advance -------------------------------------------------------------------------------


def spill(world: World, key: GroupId) -> int:
    """Advise a spill. Returns the bytes to be written."""
    before = len(world.books.followed)
    world.step(SpillAdvised(key))
    return sum(i.nbytes for i in world.books.followed[before:] if isinstance(i, Copy))


def test_save_ahead_writes_once_and_keeps_the_copy() -> None:
    world = World(TWO)
    key = put(world, 5)
    assert spill(world, key) == 5
    assert [(m.src, m.dst, m.urgent) for m in world.books.moving] == [(Tier.HOST, Tier.DISK, False)]
    assert spill(world, key) == 0, "it is being written already"
    land_all(world)
    assert world.planner.residence(key) == (Tier.HOST, Tier.DISK)
    assert spill(world, key) == 0, "it is written already"
    world.finish()


def test_save_ahead_without_disk_space_saves_nothing() -> None:
    world = World({Tier.HOST: 20, Tier.DISK: 4})
    key = put(world, 5)
    assert spill(world, key) == 0
    assert not world.books.moving
    world.finish()


def test_save_ahead_of_absent_group_does_nothing() -> None:
    world = World(TWO)
    claimed = world.claim(5)
    assert claimed is not None
    assert spill(world, claimed) == 0, "its caller is still filling it"
    assert world.fill(claimed)
    waiter = world.demand(claimed)
    assert waiter is not None and world.wake(waiter)
    world.discard(claimed)
    assert spill(world, claimed) == 0, "it was discarded"
    world.finish()


def test_save_ahead_failure_is_silent() -> None:
    world = World(TWO)
    key = put(world, 5)
    spill(world, key)
    world.fail(world.books.moving[0])
    assert world.planner.error_of(key) is None
    use(world, key)
    world.finish()


# Sticky groups -----------------------------------------------------------------------------------


def kept_after(policy: str, kept: Sequence[str], uses: Sequence[str]) -> Scan:
    scan = Scan([10] * 6, {Tier.HOST: 30, Tier.DISK: None}, policy)
    for key in kept:
        scan.planner.make_sticky(key)
    for key in uses:
        scan.use(key)
    return scan


@pytest.mark.parametrize("policy", ["next-use", "lru"])
def test_sticky_group_goes_last(policy: str) -> None:
    scan = kept_after(policy, ["g0"], ["g0", "g1", "g2", "g3", "g4", "g5", "g1"])
    assert Tier.HOST in scan.planner.residence("g0")
    without = kept_after(policy, [], ["g0", "g1", "g2", "g3", "g4", "g5", "g1"])
    assert Tier.HOST not in without.planner.residence("g0"), "the control"


@pytest.mark.parametrize("policy", ["next-use", "lru"])
def test_sticky_group_goes_when_nothing_else_may(policy: str) -> None:
    scan = kept_after(policy, ["g0", "g1", "g2"], ["g0", "g1", "g2"])
    assert scan.read_by(["g3"]) >= 10, "it was used without being resident"


def test_prefetch_replaces_sticky_group_only_if_sticky() -> None:
    for same in (True, False):
        scan = kept_after("lru", ["g0", "g1", "g2"], ["g0", "g1", "g2"])
        if same:
            scan.planner.make_sticky("g3")
        scan.planner.expect(["g3"])
        copies = [i.group for i in scan.planner.instructions() if isinstance(i, Copy)]
        assert copies == (["g3"] if same else [])


# Reports and queries -----------------------------------------------------------------------------


def test_copy_reported_ending_twice_ends_once() -> None:
    world = World(TWO)
    key = world.register(5)
    world.demand(key)
    hop = Driver(world.planner).prefetcher.hops[Tier.DISK, Tier.HOST]
    for _ in range(2):
        world.step(Ending(key, Tier.DISK, Tier.HOST))
        assert (hop.copies, hop.ending) == (1, 1)
    land_all(world)
    assert (hop.copies, hop.ending) == (0, 0)
    world.finish()


def test_all_resident_once_every_group_is_on_the_fastest_tier() -> None:
    world = World(TWO)
    first, second = world.register(5), world.register(6)
    assert not world.planner.all_there()
    use(world, first)
    use(world, second)
    assert world.planner.all_there()
    world.register(1)
    assert not world.planner.all_there()
    world.finish()


def test_two_demands_for_a_group_are_met_one_by_one() -> None:
    world = World(TWO)
    key = world.register(5)
    waiters = [world.demand(key), world.demand(key)]
    land_all(world)
    first, second = waiters
    assert first is not None and second is not None
    world.give_up(first)
    blocker = world.demand(world.register(20))
    assert blocker is not None
    assert Tier.HOST in world.planner.residence(key), "the second still waits for it"
    assert world.wake(second)
    world.release(second)
    land_all(world)
    assert world.wake(blocker)
    world.finish()


@pytest.mark.parametrize("leases", [0, 1])
def test_blocked_request_fails_only_when_nothing_can_be_freed(leases: int) -> None:
    world = World({Tier.HOST: 10, Tier.DISK: None})
    kept = world.fetch(world.register(6), HostAccess.PERMANENT)
    assert kept is not None
    land_all(world)
    assert world.hold(kept)
    lent = world.demand(world.register(2)) if leases else None
    land_all(world)
    if lent is not None:
        assert world.wake(lent)
    waiter = world.demand(world.register(5))
    assert waiter is not None
    assert world.wake(waiter) == (not leases)
    if lent is not None:
        world.release(lent)
        assert world.wake(waiter)
    assert "6 bytes are in use there permanently" in str(world.errors[-1][1])
    world.finish()


def test_blocked_update_names_the_group_without_space() -> None:
    """Pass it through host memory, where permanent leases hold too much."""
    world = World({Tier.DEVICE: 8, Tier.HOST: 8, Tier.DISK: None})
    changed, small = world.register(8), world.register(1)
    lent = world.demand(changed, Access.UPDATE)
    land_all(world)
    land_all(world)
    assert lent is not None and world.wake(lent)
    kept = world.fetch(small, HostAccess.PERMANENT)
    land_all(world)
    assert kept is not None and world.hold(kept)
    waiter = world.demand(small)
    world.release(lent)
    assert waiter is not None and world.wake(waiter)
    error = world.errors[-1][1]
    assert isinstance(error, BudgetError) and (error.tier, error.budget) == ("HOST", 8)
    assert "1 bytes are in use there permanently, which leaves no space for group 'file 1'" in str(
        error
    )
    assert "raise ram_budget" in str(error)
    world.finish()


def test_group_reports_tier_progress_and_backing_file() -> None:
    schedule = LearnedOrder()
    planner = driver_of(TWO, RankingPolicy(FarthestNextUse(schedule)), schedule)
    planner.register("a", 5)
    planner.register("b", 5, backing=False)
    assert [planner.backed(key) for key in "ab"] == [True, False]
    assert planner.used == {Tier.HOST: 0, Tier.DISK: 5}, "a checkpoint takes no space of the budget"
    assert planner.state_of("a") is None
    planner.demand("a")
    assert planner.state_of("a") is State.ARRIVING
    assert not planner.idle()
    planner.arrive("a", Tier.DISK, Tier.HOST)
    assert planner.state_of("a") is State.PRESENT
    assert planner.idle()
    assert planner.lease("a", Access.UPDATE)
    assert not planner.backed("a"), "its file does not have the new values"
    assert "a" in planner and "c" not in planner
    planner.discard("b")
    assert "b" not in planner


# Space for new values ----------------------------------------------------------------------------


@pytest.mark.parametrize("budgets", [TWO, THREE])
def test_update_reservation_cannot_be_leased_by_others(
    budgets: dict[Tier, int | None],
) -> None:
    world = World(budgets)
    key = world.register(5)
    renewing = world.fetch(key, HostAccess.RENEW)
    assert renewing is not None
    assert not world.books.moving, "the old values are not wanted"
    assert world.planner.used[Tier.HOST] == 5
    assert not world.planner.host_leasable(key, HostAccess.READ)
    world.withdraw_fetch(renewing)
    assert world.planner.used[Tier.HOST] == 0, "the space was not freed"
    world.finish()


def test_update_of_absent_values_is_granted() -> None:
    world = World(TWO)
    key = world.register(5)
    renewing = world.fetch(key, HostAccess.RENEW)
    assert renewing is not None
    assert world.hold(renewing)
    assert world.planner.residence(key) == (Tier.HOST,), "the disk has only the old values"
    assert not world.planner.backed(key)
    world.let_go(renewing)
    use(world, key)
    assert not [i for i in world.books.followed if isinstance(i, Copy)]
    world.finish()


def test_permanent_host_lease_is_reported() -> None:
    world = World(TWO)
    key = world.register(5)
    for purpose in (HostAccess.READ, HostAccess.UPDATE, HostAccess.PERMANENT):
        holder = world.fetch(key, purpose)
        assert holder is not None
        land_all(world)
        assert not world.planner.leased_permanently(key)
        assert world.hold(holder)
        assert world.planner.leased_permanently(key) == (purpose is HostAccess.PERMANENT)
        world.let_go(holder)
    assert not world.planner.leased_permanently(key)
    world.finish()


def test_save_waits_for_an_updater() -> None:
    world = World(TWO)
    key = put(world, 5)
    waiter = world.demand(key, Access.UPDATE)
    assert waiter is not None and world.wake(waiter)
    saver = world.save(key)
    assert world.planner.saving(key)
    assert not world.books.moving, "it would save half of the update"
    world.release(waiter)
    land_all(world)
    assert not world.planner.saving(key)
    assert world.look_saved(saver)
    world.finish()
