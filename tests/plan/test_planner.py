"""The planner on plain names: its reads and evictions, and proof that `check` can fail."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.histories.machine import InjectedError, World
from tests.plan.driver import Driver, driver_of
from tests.plan.scans import Scan
from tierstore.errors import BudgetError
from tierstore.model.groups import GroupId
from tierstore.model.moves import Copy, Drop
from tierstore.model.tiers import Access, HostAccess, Tier
from tierstore.plan.matching import Numbers
from tierstore.plan.policy import FarthestNextUse, RankingPolicy, policy_named
from tierstore.plan.records import CopyRecord, State
from tierstore.plan.schedule import LearnedOrder

PASSES = 8
rnd = random.Random(1)
EQUAL = [100] * 20
MIXED = [rnd.randint(20, 100) for _ in range(60)]

# Bytes that fit need not be read again: sizes, host budget, device budget.
SCANS = {
    "half": (EQUAL, 1000, None),
    "a quarter": (EQUAL, 500, None),
    "most": (EQUAL, 1600, None),
    "mixed sizes, few": (MIXED, 1000, None),
    "mixed sizes, most": (MIXED, 2500, None),
    "with a device": (EQUAL, 1000, 400),
}


def budgets_of(host: int, device: int | None) -> dict[Tier, int | None]:
    budgets: dict[Tier, int | None] = {Tier.HOST: host, Tier.DISK: None}
    return budgets if device is None else budgets | {Tier.DEVICE: device}


@pytest.mark.parametrize("name", SCANS)
def test_cyclic_scan_reads_only_the_bytes_that_do_not_fit(name: str) -> None:
    sizes, host, device = SCANS[name]
    scan = Scan(sizes, budgets_of(host, device))
    read = [scan.read_by(scan.keys) for _ in range(PASSES)]
    bound = 1.05 * (sum(sizes) - host + 3 * max(sizes))
    assert bound < sum(sizes), "this bound could not fail"
    assert max(read[2:]) <= bound, read


@pytest.mark.parametrize("name", ["half", "a quarter", "most"])
def test_lru_cyclic_scan_reads_everything(name: str) -> None:
    sizes, host, device = SCANS[name]
    scan = Scan(sizes, budgets_of(host, device), "lru")
    read = [scan.read_by(scan.keys) for _ in range(PASSES)]
    assert min(read) >= sum(sizes), read


def test_scan_that_fits_is_read_once() -> None:
    scan = Scan(EQUAL, budgets_of(2000, None))
    assert [scan.read_by(scan.keys) for _ in range(3)] == [2000, 0, 0]


@pytest.mark.parametrize("name", SCANS)
def test_clean_copy_is_never_copied_down(name: str) -> None:
    sizes, host, device = SCANS[name]
    scan = Scan(sizes, budgets_of(host, device))
    scan.read_by(scan.keys * PASSES)
    assert all(dst < src for src, dst in scan.moved), scan.moved


class EvictsTheSoonest(RankingPolicy):
    """Evicts the group that is needed soonest."""

    def victims(self, tier: Tier, rival: GroupId | None) -> Iterator[GroupId]:
        return iter(list(super().victims(tier, None))[::-1])


def prefetches_and_victims(
    policy: type[RankingPolicy], patch: Callable[[Driver], None] = lambda planner: None
) -> list[tuple[float, float]]:
    """Return, for each prefetch that evicted a group, the uses until it and until its victim."""
    schedule = LearnedOrder()
    planner = driver_of(budgets_of(1000, None), policy(FarthestNextUse(schedule)), schedule)
    patch(planner)
    keys = [f"g{i}" for i in range(20)]
    for key in keys:
        planner.register(key, 100)
    pairs: list[tuple[float, float]] = []

    def carry() -> None:
        for _ in range(20):  # without its protections, a planner may never stop
            batch = planner.instructions()
            victims = [i.group for i in batch if isinstance(i, Drop)]
            hopes = [i for i in batch if isinstance(i, Copy)]
            if schedule.trusted and not any(copy.urgent for copy in hopes):
                soonest = [schedule.steps_until(copy.group) for copy in hopes]
                pairs.extend((h, schedule.steps_until(v)) for h in soonest for v in victims)
            for copy in hopes:
                planner.arrive(copy.group, copy.src, copy.dst)

    for key in keys * PASSES:
        planner.demand(key)
        carry()
        assert planner.lease(key, Access.READ)
        carry()
        planner.release(key, Access.READ)
        carry()
    return pairs


@pytest.mark.parametrize("policy", [RankingPolicy, EvictsTheSoonest])
def test_prefetch_never_evicts_a_group_needed_sooner(policy: type[RankingPolicy]) -> None:
    pairs = prefetches_and_victims(policy)
    assert len(pairs) > 20, "too few prefetches evicted a group"
    assert all(victim > hope for hope, victim in pairs)


def test_prefetch_without_protection_evicts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget_expected_keys(planner: Driver) -> None:
        next_missing = planner.prefetcher.next_missing

        def forgetful(dst: Tier, *which: Any) -> tuple[int, Numbers] | None:
            found = next_missing(dst, *which)
            return None if found is None else (found[0], found[1][:0])

        monkeypatch.setattr(planner.prefetcher, "next_missing", forgetful)

    pairs = prefetches_and_victims(EvictsTheSoonest, forget_expected_keys)
    assert any(victim <= hope for hope, victim in pairs)


def test_prefetch_failure_is_raised_once_by_the_acquire() -> None:
    world = World({Tier.HOST: 10, Tier.DISK: None})
    key = world.register(5)
    world.prefetch([key])
    world.fail(world.books.moving[0])
    assert not world.books.moving, "a failed prefetch is not retried by itself"
    waiter = world.demand(key)
    assert waiter is not None
    assert not world.books.moving, "the error must be raised first"
    assert world.wake(waiter)
    assert [type(error) for _, error in world.errors] == [InjectedError]
    again = world.demand(key)
    assert again is not None
    world.deliver(world.books.moving[0])
    assert world.wake(again)
    assert again in world.leases
    world.finish()


def test_group_failure_reaches_every_waiter() -> None:
    world = World({Tier.HOST: 10, Tier.DISK: None})
    key = world.register(5)
    waiters = [world.demand(key) for _ in range(3)]
    world.fail(world.books.moving[0])
    for waiter in waiters:
        assert waiter is not None
        assert world.wake(waiter)
    assert len(world.errors) == 3
    assert not world.leases


@pytest.mark.parametrize("device", [None, 8])
def test_request_above_the_budget_raises_with_advice(device: int | None) -> None:
    schedule = LearnedOrder()
    planner = driver_of(budgets_of(10, device), policy_named("lru", schedule), schedule)
    planner.register("weights", 11)
    with pytest.raises(BudgetError, match=r"_budget to at least 11 bytes") as caught:
        planner.demand("weights")
    error = caught.value
    expected = ("HOST", 10) if device is None else ("DEVICE", 8)
    assert (error.key, error.tier, error.budget, error.nbytes) == ("weights", *expected, 11)
    assert planner.instructions() == []
    planner.check()


def test_activations_taken_while_they_fit_are_never_written() -> None:
    world = World({Tier.HOST: 100, Tier.DISK: None})
    keys = [world.claim(10) for _ in range(10)]
    assert all(key is not None and world.fill(key) for key in keys)
    for key in reversed(keys):
        waiter = world.demand(key or "", Access.TAKE)
        assert waiter is not None
        assert world.wake(waiter)
        world.release(waiter)
    assert not [i for i in world.books.followed if isinstance(i, Copy)]
    assert not world.books.known()


def test_space_for_a_group_may_cost_its_source_copy() -> None:
    """Free space for a group by dropping its own source copy.

    It had been saved to free space for another group, which had to be saved to free space for this
    one.
    """
    world = World({Tier.DEVICE: 5, Tier.HOST: 4, Tier.DISK: None}, "lru")
    changed = put(world, 1)
    use(world, changed, Access.UPDATE)  # is only on the device
    use(world, world.register(4), Access.READ)  # is also in host memory, until the next arrives
    wanted = put(world, 4)
    world.save(wanted)
    world.deliver(world.books.moving[0])
    assert world.planner.residence(wanted) == (Tier.HOST, Tier.DISK)
    use(world, wanted, Access.READ)
    world.finish()


def put(world: World, nbytes: int) -> GroupId:
    key = world.claim(nbytes)
    assert key is not None and world.fill(key)
    return key


def use(world: World, key: GroupId, access: Access) -> None:
    waiter = world.demand(key, access)
    assert waiter is not None
    while world.books.moving:
        world.deliver(world.books.moving[0])
    assert world.wake(waiter)
    world.release(waiter)


# `check` can fail --------------------------------------------------------------------------------


def busy_planner() -> Driver:
    """Return a planner: `read` is leased, `changed` is being changed, and so on.

    `held` has a host lease, and `idle` is on both tiers.
    """
    schedule = LearnedOrder()
    planner = driver_of(budgets_of(100, None), policy_named("lru", schedule), schedule)
    for key, access in (("read", Access.READ), ("changed", Access.UPDATE), ("idle", Access.READ)):
        planner.register(key, 10)
        planner.demand(key)
        planner.arrive(key, Tier.DISK, Tier.HOST)
        assert planner.lease(key, access)
    planner.release("idle", Access.READ)
    planner.register("held", 10)
    planner.demand_on_host("held", HostAccess.PERMANENT)
    planner.arrive("held", Tier.DISK, Tier.HOST)
    assert planner.lease_on_host("held", HostAccess.PERMANENT)
    planner.check()
    return planner


def count_less(planner: Driver, nbytes: int) -> None:
    planner.used[Tier.HOST] -= nbytes
    planner.table.pools[Tier.HOST].used -= nbytes


def lose_a_copy(planner: Driver) -> None:
    planner.record("changed").copies.clear()
    count_less(planner, 10)


def miscount(planner: Driver) -> None:
    planner.used[Tier.HOST] -= 1


def shrink_the_budget(planner: Driver) -> None:
    planner.table.change_budget(Tier.HOST, 39)


def drop_the_leased(planner: Driver) -> None:
    del planner.record("read").copies[Tier.HOST]
    count_less(planner, 10)


def drop_the_held(planner: Driver) -> None:
    planner.record("held").copies = {Tier.DISK: CopyRecord(State.PRESENT)}
    planner.record("held").backing = Tier.DISK
    count_less(planner, 10)


def lend_the_held_to_a_changer(planner: Driver) -> None:
    planner.record("held").exclusive = Access.UPDATE


def keep_a_stale_copy(planner: Driver) -> None:
    planner.record("changed").backing = Tier.DISK
    planner.record("changed").copies[Tier.DISK] = CopyRecord(State.PRESENT)


def lend_beside_a_changer(planner: Driver) -> None:
    planner.record("changed").leases = 2


def forget_leases(planner: Driver) -> None:
    for name in ("read", "changed", "held"):
        record = planner.record(name)
        record.leases, record.exclusive, record.host_lease = 0, None, None


def leave_the_unwanted(planner: Driver) -> None:
    planner.record("idle").copies[Tier.HOST].unwanted = True


def leave_the_forgotten(planner: Driver) -> None:
    planner.record("idle").forgotten = True


def read_arriving_copies(planner: Driver) -> None:
    copy = planner.record("idle").copies[Tier.HOST]
    copy.state, copy.readers = State.ARRIVING, 1


BREAKAGES: dict[Callable[[Driver], None], str] = {
    lose_a_copy: "changed has no valid copy",
    miscount: "HOST: has 40 bytes in copies, counts 39",
    shrink_the_budget: "HOST: 40 over 39",
    drop_the_leased: "read is leased but not resident",
    drop_the_held: "held is leased in host memory but not resident",
    lend_the_held_to_a_changer: "held is leased in host memory while it is being changed",
    keep_a_stale_copy: "changed is being changed and has several copies",
    lend_beside_a_changer: "changed has 2 leases while it is being changed",
    forget_leases: "nothing is leased, but 2 are counted",
    leave_the_unwanted: "idle on HOST should have been dropped",
    leave_the_forgotten: "idle on DISK is forgotten",
    read_arriving_copies: "idle is read before it is complete",
}


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: breakage.__name__)
def test_invariant_check_notices_seeded_faults(breakage: Callable[[Driver], None]) -> None:
    planner = busy_planner()
    breakage(planner)
    with pytest.raises(AssertionError, match=BREAKAGES[breakage]):
        planner.check()
