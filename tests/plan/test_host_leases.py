"""Host leases: requests, the order of grants, and their effect on learning."""

from __future__ import annotations

import pytest

from tests.histories.machine import Holder, World, land_all
from tests.plan.driver import Driver, driver_of
from tierstore.errors import BudgetError
from tierstore.model.groups import GroupId
from tierstore.model.moves import Copy, Drop, Reserve
from tierstore.model.tiers import Access, HostAccess, Tier, UseOrder
from tierstore.plan.policy import policy_named
from tierstore.plan.schedule import LearnedOrder

TWO = {Tier.HOST: 20, Tier.DISK: None}
THREE = {Tier.DEVICE: 20, Tier.HOST: 20, Tier.DISK: None}
BOTH = pytest.mark.parametrize("budgets", [TWO, THREE])

Budgets = dict[Tier, int | None]


def fetched(world: World, key: GroupId, purpose: HostAccess) -> Holder:
    fetcher = world.fetch(key, purpose)
    assert fetcher is not None
    return fetcher


def held(world: World, key: GroupId, purpose: HostAccess) -> Holder:
    fetcher = fetched(world, key, purpose)
    land_all(world)
    assert world.hold(fetcher)
    assert fetcher in world.holders
    return fetcher


def with_planner(
    budgets: Budgets, policy: str = "next-use", **groups: int
) -> tuple[Driver, LearnedOrder]:
    schedule = LearnedOrder()
    planner = driver_of(budgets, policy_named(policy, schedule), schedule)
    for key, nbytes in groups.items():
        planner.register(key, nbytes)
    return planner, schedule


def hold(planner: Driver, key: str, purpose: HostAccess = HostAccess.READ) -> None:
    """Lease a group in host memory that is there or arrives at once."""
    planner.demand_on_host(key, purpose)
    for instruction in planner.instructions():
        if isinstance(instruction, Copy):
            planner.arrive(instruction.group, instruction.src, instruction.dst)
    assert planner.lease_on_host(key, purpose)


# Requests ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("budgets", [TWO, THREE | {Tier.DEVICE: 30}])
def test_host_lease_above_budget_raises_with_advice(budgets: Budgets) -> None:
    planner, _ = with_planner(budgets, a=21)
    with pytest.raises(BudgetError, match="raise ram_budget to at least 21 bytes") as caught:
        planner.demand_on_host("a", HostAccess.READ)
    error = caught.value
    assert (error.key, error.tier, error.nbytes, error.budget) == ("a", "HOST", 21, 20)
    assert planner.instructions() == []


def test_device_lease_above_budget_gives_other_advice() -> None:
    planner, _ = with_planner({Tier.DEVICE: 20, Tier.HOST: None, Tier.DISK: None}, a=21)
    with pytest.raises(BudgetError, match="raise device_budget to at least 21 bytes"):
        planner.demand("a")
    planner.demand_on_host("a", HostAccess.READ)
    assert planner.instructions() == [Copy("a", 21, Tier.DISK, Tier.HOST, urgent=True)]


@BOTH
def test_host_lease_that_just_fits_is_fetched(budgets: Budgets) -> None:
    planner, _ = with_planner(budgets, a=20)
    planner.demand_on_host("a", HostAccess.READ)
    assert planner.instructions() == [Copy("a", 20, Tier.DISK, Tier.HOST, urgent=True)]


@BOTH
def test_host_leases_to_read_are_granted_one_by_one(budgets: Budgets) -> None:
    world = World(budgets)
    key = world.register(5)
    first, second = (fetched(world, key, HostAccess.READ) for _ in range(2))
    land_all(world)
    assert world.hold(first)
    assert not world.hold(second), "one at a time"
    world.let_go(first)
    blocker = world.claim(20)
    assert blocker is not None and not world.fill(blocker), "the second still wants it there"
    assert world.hold(second)
    world.let_go(second)
    assert world.fill(blocker)
    world.finish()


@BOTH
def test_host_lease_of_group_being_flushed_is_granted(budgets: Budgets) -> None:
    world = World(budgets)
    key = world.register(5)
    holder = held(world, key, HostAccess.READ)
    world.put_away(key)
    assert world.planner.residence(key) == (Tier.HOST, Tier.DISK), "it is leased in host memory"
    again = fetched(world, key, HostAccess.READ)
    world.let_go(holder)
    assert world.hold(again), "it was kept for the second lease"
    assert len([i for i in world.books.followed if isinstance(i, Copy)]) == 1
    world.finish()


def test_host_lease_withdrawn_takes_its_error_along() -> None:
    world = World(TWO)
    key = world.register(5)
    fetcher = fetched(world, key, HostAccess.READ)
    world.fail(world.books.moving[0])
    assert world.planner.error_of(key) is not None
    world.withdraw_fetch(fetcher)
    assert world.planner.error_of(key) is None
    held(world, key, HostAccess.READ)
    world.finish()


def test_host_lease_never_requested_withdraws_nothing() -> None:
    planner, _ = with_planner(TWO, a=5)
    planner.demand("a")
    planner.fail("a", Tier.DISK, Tier.HOST, OSError())
    planner.withdraw_on_host("a", HostAccess.READ)
    assert planner.error_of("a") is not None, "the demand has not got the error yet"


# Space for new values ----------------------------------------------------------------------------


@BOTH
def test_update_reservation_stays_while_an_updater_waits(budgets: Budgets) -> None:
    world = World(budgets)
    key = world.register(5)
    first, second = (fetched(world, key, HostAccess.RENEW) for _ in range(2))
    world.withdraw_fetch(first)
    assert not world.books.moving
    assert world.planner.used[Tier.HOST] == 5
    assert world.hold(second)
    world.finish()


@BOTH
def test_reservation_with_only_readers_left_loads_old_values(budgets: Budgets) -> None:
    world = World(budgets)
    key = world.register(5)
    renewing, looking = fetched(world, key, HostAccess.RENEW), fetched(world, key, HostAccess.READ)
    assert not world.books.moving, "the space is reserved for new values"
    world.withdraw_fetch(renewing)
    assert [(m.src, m.dst) for m in world.books.moving] == [(Tier.DISK, Tier.HOST)]
    land_all(world)
    assert world.hold(looking)
    world.finish()


def test_host_lease_withdrawn_drops_no_copy() -> None:
    world = World(TWO)
    key = world.register(5)
    looking = fetched(world, key, HostAccess.READ)
    world.withdraw_fetch(looking)
    assert world.planner.arriving(key), "the copy need not be dropped"
    land_all(world)
    world.withdraw_fetch(fetched(world, key, HostAccess.READ))
    assert world.planner.residence(key) == (Tier.HOST, Tier.DISK)
    world.finish()


@BOTH
def test_update_reservation_is_counted_as_a_copy(budgets: Budgets) -> None:
    planner, _ = with_planner(budgets, policy="lru", a=5)
    planner.demand_on_host("a", HostAccess.RENEW)
    assert planner.instructions() == [], "the updater may still wait for another lease"
    assert not planner.lease_on_host("a", HostAccess.PERMANENT), "it has no values yet"
    assert planner.lease_on_host("a", HostAccess.RENEW)
    assert planner.instructions() == [Reserve("a", 5, Tier.HOST), Drop("a", 5, Tier.DISK)]
    assert planner.residence("a") == (Tier.HOST,) and not planner.backed("a")
    planner.release_on_host("a")
    planner.claim("b", 20)
    assert planner.instructions() == [Copy("a", 5, Tier.HOST, Tier.DISK, urgent=True)], "a victim"
    planner.check()


# Leases ------------------------------------------------------------------------------------------


def test_leased_moving_or_absent_group_is_not_host_leased() -> None:
    planner, _ = with_planner(THREE, a=5)
    assert not planner.lease_on_host("a", HostAccess.READ), "it is not resident"
    planner.demand("a")
    planner.demand_on_host("a", HostAccess.READ)
    assert not planner.lease_on_host("a", HostAccess.READ), "it is on its way"
    planner.arrive("a", Tier.DISK, Tier.HOST)
    assert not planner.lease_on_host("a", HostAccess.READ), "it is on its way further up"
    planner.arrive("a", Tier.HOST, Tier.DEVICE)
    assert planner.lease("a", Access.READ)
    assert not planner.lease_on_host("a", HostAccess.READ), "it is leased"
    planner.release("a", Access.READ)
    assert planner.lease_on_host("a", HostAccess.READ)
    assert not planner.lease_on_host("a", HostAccess.READ), "it already has a host lease"


@pytest.mark.parametrize("purpose", HostAccess)
def test_read_host_lease_keeps_other_copies_valid(purpose: HostAccess) -> None:
    planner, _ = with_planner(THREE, a=5)
    hold(planner, "a", purpose)
    looks = purpose is HostAccess.READ
    assert planner.residence("a") == ((Tier.HOST, Tier.DISK) if looks else (Tier.HOST,))
    assert planner.backed("a") == looks
    planner.release_on_host("a")
    assert planner.residence("a") == ((Tier.HOST, Tier.DISK) if looks else (Tier.HOST,))
    planner.check()


@pytest.mark.parametrize(
    ("purpose", "waits"), [(HostAccess.UPDATE, True), (HostAccess.PERMANENT, False)]
)
def test_permanent_host_lease_makes_demand_fail_at_once(purpose: HostAccess, waits: bool) -> None:
    planner, _ = with_planner({Tier.HOST: 20, Tier.DISK: 0}, a=18)
    hold(planner, "a", purpose)
    planner.register("b", 2)
    planner.claim("c", 5)
    assert (planner.error_of("c") is None) == waits
    planner.release_on_host("a")
    hold(planner, "b")
    planner.claim("d", 5)
    assert planner.error_of("d") is None, "b will be released, and is counted right"
    planner.release_on_host("b")
    assert planner.error_of("d") is not None


def test_demand_for_permanently_held_group_lets_others_fail() -> None:
    """The demand can never be met, so no request should wait for it."""
    planner, _ = with_planner({Tier.HOST: 20, Tier.DISK: 0}, a=18)
    hold(planner, "a", HostAccess.PERMANENT)
    planner.demand_on_host("a", HostAccess.READ)
    planner.claim("c", 5)
    assert planner.error_of("c") is not None


def test_device_copy_of_permanently_held_group_is_leased() -> None:
    planner, _ = with_planner({Tier.DEVICE: 20, Tier.HOST: 20, Tier.DISK: 0}, a=18)
    hold(planner, "a", HostAccess.PERMANENT)
    planner.demand("a")
    planner.arrive("a", Tier.HOST, Tier.DEVICE)
    planner.claim("c", 5)
    assert planner.error_of("c") is None, "the waiter for a is about to wake up"
    assert planner.lease("a", Access.READ)
    assert planner.error_of("c") is None, "the waiter has a now"
    planner.release("a", Access.READ)
    assert planner.error_of("c") is not None


def test_host_leased_group_is_not_evicted_until_released() -> None:
    planner, _ = with_planner(TWO, a=15, b=10)
    hold(planner, "a")
    planner.demand("b")
    assert planner.instructions() == [], "a has a host lease"
    planner.release_on_host("a")
    assert planner.instructions() == [
        Drop("a", 15, Tier.HOST),
        Copy("b", 10, Tier.DISK, Tier.HOST, urgent=True),
    ]


def test_prefetch_without_space_resumes_after_release() -> None:
    planner, _ = with_planner(TWO, a=15, b=10)
    hold(planner, "a")
    planner.expect(["b"])
    assert planner.instructions() == []
    planner.release_on_host("a")
    assert planner.instructions() == [
        Drop("a", 15, Tier.HOST),
        Copy("b", 10, Tier.DISK, Tier.HOST, urgent=False),
    ]


# Learning ----------------------------------------------------------------------------------------


def test_host_lease_counts_as_a_use() -> None:
    planner, schedule = with_planner(TWO, policy="lru", a=5, b=5, c=5)
    for key in "abca":
        hold(planner, key)
        planner.release_on_host(key)
    planner.claim("d", 20)
    assert [i.group for i in planner.instructions() if isinstance(i, Drop)] == ["b", "c", "a"]
    assert [schedule.steps_until(key) for key in "bca"] == [1, 2, 3], (
        "host leases are learned like other uses"
    )


def test_compute_time_after_host_lease_is_measured() -> None:
    now, schedule = [0.0], LearnedOrder()
    planner = driver_of(TWO, policy_named("lru", schedule), schedule, lambda: now[0])
    for key in "ab":
        planner.register(key, 5)
    hold(planner, "a")
    planner.release_on_host("a")
    now[0] = 4.0
    planner.demand("b")
    hold(planner, "a")
    assert planner.computing_seconds("a") == 4.0


@pytest.mark.parametrize("is_used", [True, False])
def test_host_lease_of_prefetched_group_uses_it(is_used: bool) -> None:
    """Prefetched, unused groups take half of the space at most."""
    planner, _ = with_planner({Tier.DEVICE: 80, Tier.HOST: 20, Tier.DISK: None})
    for key in "abc":
        planner.register(key, 5, use_order=UseOrder.PREFETCHED)
    for key in "ab":
        planner.expect([key], Tier.HOST)
        planner.arrive(key, Tier.DISK, Tier.HOST)
        planner.offload(key)  # it is no longer expected
    planner.instructions()
    if is_used:
        hold(planner, "a")
        planner.release_on_host("a")
    planner.expect(["c"], Tier.HOST)
    expected = [Copy("c", 5, Tier.DISK, Tier.HOST, urgent=False)]
    assert planner.instructions() == (expected if is_used else [])


def test_unscheduled_group_is_neither_learned_nor_expected() -> None:
    planner, schedule = with_planner(TWO, a=5)
    planner.register("g", 5, use_order=UseOrder.PREFETCHED)
    planner.expect(["g"])
    assert schedule.known.prefetched_count() == 1
    hold(planner, "g")
    assert schedule.known.prefetched_count() == 0, "it has arrived"
    planner.release_on_host("g")
    for _ in range(3):
        hold(planner, "a")
        planner.release_on_host("a")
        hold(planner, "g")
        planner.release_on_host("g")
    assert schedule.learning, "a use of g broke the learned order"


def test_host_lease_prefetches_the_next_group() -> None:
    planner, _ = with_planner(TWO, a=5, b=5)
    hold(planner, "a")
    assert planner.instructions() == [Copy("b", 5, Tier.DISK, Tier.HOST, urgent=False)]


# Flushing ----------------------------------------------------------------------------------------


@BOTH
def test_flush_leaves_only_the_disk_copy(budgets: Budgets) -> None:
    world = World(budgets)
    key = world.register(5)
    waiter = world.demand(key)
    land_all(world)
    assert waiter is not None and world.wake(waiter)
    world.put_away(key)
    assert world.planner.residence(key) == (world.planner.top, Tier.DISK), "it is leased"
    world.release(waiter)
    assert world.planner.residence(key) == (Tier.DISK,)
    world.finish()


@BOTH
def test_flush_of_demanded_group_is_skipped(budgets: Budgets) -> None:
    world = World(budgets)
    key = world.register(5)
    fetcher, waiter = fetched(world, key, HostAccess.READ), world.demand(key)
    assert waiter is not None
    land_all(world)
    world.put_away(key)
    assert world.planner.residence(key) == tuple(budgets)
    assert world.wake(waiter)
    world.release(waiter)
    assert Tier.HOST in world.planner.residence(key)
    assert world.hold(fetcher)
    world.finish()


def test_flush_frees_reserved_space_at_once() -> None:
    planner, _ = with_planner(THREE, a=5)
    planner.demand("a")
    assert planner.used[Tier.DEVICE] == 5
    planner.withdraw("a")
    planner.release_memory("a")
    assert planner.used[Tier.DEVICE] == 0
    planner.arrive("a", Tier.DISK, Tier.HOST)
    assert planner.residence("a") == (Tier.DISK,)
    assert planner.used[Tier.HOST] == 0


def test_flush_space_goes_to_a_waiter() -> None:
    planner, _ = with_planner({Tier.DEVICE: 15, Tier.HOST: 20, Tier.DISK: None}, a=11, b=9)
    planner.demand("a")
    planner.withdraw("a")
    planner.instructions()
    planner.demand("b")
    assert planner.instructions() == [], "a is still on its way"
    planner.release_memory("a")
    assert planner.instructions() == [Copy("b", 9, Tier.DISK, Tier.HOST, urgent=True)]


def test_flushed_group_is_not_expected() -> None:
    planner, schedule = with_planner(TWO, a=5, b=20)
    hold(planner, "b")
    planner.expect(["a"])
    assert schedule.known.prefetched_count() == 1
    planner.release_memory("a")
    assert schedule.known.prefetched_count() == 0
    planner.release_on_host("b")
    assert planner.instructions() == [], "it is no longer expected"


def test_arriving_counts_only_copies_above_the_disk() -> None:
    planner, _ = with_planner(THREE, a=5)
    planner.demand_on_host("a", HostAccess.READ)
    assert planner.arriving("a"), "one copy is resident and one is arriving"
    planner.arrive("a", Tier.DISK, Tier.HOST)
    assert not planner.arriving("a")
    planner.demand_on_host("a", HostAccess.UPDATE)
    assert planner.lease_on_host("a", HostAccess.UPDATE)
    planner.release_on_host("a")
    planner.save("a")
    assert not planner.arriving("a"), "it moves down"
