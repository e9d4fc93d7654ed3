"""A persistent tier below the disk.

Its groups move up hop by hop, and groups for which the disk has no space move there.
"""

from __future__ import annotations

import pytest

from tests.plan.driver import Driver, driver_of
from tests.plan.in_words import DEVICE, DISK, HOST, ByName, put, told
from tierstore.errors import BudgetError
from tierstore.model.tiers import Access, HostAccess, Tier, UseOrder
from tierstore.plan.schedule import LearnedOrder

REMOTE = Tier(3, "REMOTE", persistent=True)


def four_tiers(*, host: int = 20, disk: int | None = 20, remote: int | None = None) -> Driver:
    budgets = {DEVICE: 20, HOST: host, DISK: disk, REMOTE: remote}
    return driver_of(budgets, ByName(), LearnedOrder())


def register(
    planner: Driver, name: str, nbytes: int, tier: Tier = REMOTE, *, backing: bool = True
) -> None:
    planner.register(name, nbytes, backing=backing, use_order=UseOrder.PREFETCHED, tier=tier)


def fetch_to_disk(planner: Driver, name: str) -> None:
    planner.expect([name], DISK)
    assert told(planner)[-1] == f"{name}: REMOTE to DISK"
    planner.arrive(name, REMOTE, DISK)
    assert told(planner) == []


# Up ----------------------------------------------------------------------------------------------


def test_demand_moves_up_hop_by_hop() -> None:
    planner = four_tiers()
    register(planner, "a", 5)
    assert planner.residence("a") == (REMOTE,) and planner.saved("a") and planner.backed("a")
    assert planner.used == {DEVICE: 0, HOST: 0, DISK: 0, REMOTE: 0}, "the user's bytes are free"
    planner.demand("a")
    for src, dst in ((REMOTE, DISK), (DISK, HOST), (HOST, DEVICE)):
        assert planner.used[DEVICE] == 5, "space is reserved before the first hop"
        assert told(planner) == [f"a: {src} to {dst}!"]
        assert not planner.leasable("a", Access.READ)
        planner.arrive("a", src, dst)
    assert told(planner) == []
    assert planner.lease("a", Access.READ)
    assert planner.residence("a") == (DEVICE, HOST, DISK, REMOTE)
    assert planner.used == {DEVICE: 5, HOST: 5, DISK: 5, REMOTE: 0}


def test_demand_for_host_memory_passes_through_the_disk() -> None:
    planner = four_tiers()
    register(planner, "a", 5)
    planner.demand_on_host("a", HostAccess.UPDATE)
    for src, dst in ((REMOTE, DISK), (DISK, HOST)):
        assert told(planner) == [f"a: {src} to {dst}!"]
        planner.arrive("a", src, dst)
    assert planner.lease_on_host("a", HostAccess.UPDATE)
    assert sorted(told(planner)) == ["a leaves DISK", "a leaves REMOTE"]
    assert planner.residence("a") == (HOST,)
    assert not planner.saved("a") and not planner.backed("a")


def test_put_needs_nothing_from_lower_tiers() -> None:
    planner = four_tiers()
    register(planner, "a", 5)
    planner.demand_on_host("a", HostAccess.RENEW)
    assert told(planner) == []
    assert planner.lease_on_host("a", HostAccess.RENEW)
    assert told(planner) == ["a gets room on HOST", "a leaves REMOTE"]


@pytest.mark.parametrize(
    ("highest", "hops"),
    [
        (DISK, [(REMOTE, DISK)]),
        (HOST, [(REMOTE, DISK), (DISK, HOST)]),
        (None, [(REMOTE, DISK), (DISK, HOST), (HOST, DEVICE)]),
    ],
)
def test_prefetch_rises_no_higher_than_asked(
    highest: Tier | None, hops: list[tuple[Tier, Tier]]
) -> None:
    planner = four_tiers()
    register(planner, "a", 5)
    planner.expect(["a"], highest)
    for src, dst in hops:
        assert told(planner) == [f"a: {src} to {dst}"]
        planner.arrive("a", src, dst)
    assert told(planner) == []


def test_hop_failure_is_reported_and_retried_on_new_demand() -> None:
    planner = four_tiers()
    register(planner, "a", 5)
    planner.demand("a")
    error = OSError()
    planner.fail("a", REMOTE, DISK, error)
    assert told(planner) == ["a: REMOTE to DISK!", "a leaves DISK"]
    assert planner.error_of("a") is error
    assert planner.used == {DEVICE: 0, HOST: 0, DISK: 0, REMOTE: 0}
    planner.withdraw("a")
    planner.demand("a")
    assert told(planner) == ["a: REMOTE to DISK!"]


# Sizes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("want", ["demand", "demand_on_host"])
def test_group_above_disk_budget_cannot_pass_through_disk(want: str) -> None:
    planner = four_tiers(disk=5)
    register(planner, "a", 6)
    with pytest.raises(BudgetError, match="raise disk_budget to at least 6 bytes") as caught:
        planner.demand("a") if want == "demand" else planner.demand_on_host("a", HostAccess.READ)
    assert (caught.value.tier, caught.value.budget) == ("DISK", 5)
    assert told(planner) == [] and planner.waited_for() == set()
    planner.expect(["a"])
    assert told(planner) == [], "nor is it fetched early"


@pytest.mark.parametrize("ahead", [True, False])
def test_checkpoint_on_disk_needs_no_disk_budget(ahead: bool) -> None:
    planner = four_tiers(disk=5)
    register(planner, "a", 6, DISK)
    if ahead:
        planner.expect(["a"])
    else:
        planner.demand("a")
    assert told(planner) == ["a: DISK to HOST" + "!" * (not ahead)]
    assert planner.used[DISK] == 0


def test_group_only_in_memory_needs_no_disk_budget() -> None:
    planner = four_tiers(disk=5)
    put(planner, "a", 6)
    planner.demand("a")
    assert told(planner) == ["a: HOST to DEVICE!"]


# Down --------------------------------------------------------------------------------------------


def test_save_is_done_once_the_group_is_on_disk() -> None:
    planner = four_tiers()
    put(planner, "a", 5)
    planner.save("a")
    assert told(planner) == ["a: HOST to DISK!"]
    assert planner.saving("a") and not planner.saved("a")
    planner.arrive("a", HOST, DISK)
    assert planner.saved("a") and not planner.saving("a")
    assert told(planner) == [], "it need not move further"
    assert planner.residence("a") == (HOST, DISK)


def test_disk_drops_copies_below_it_and_saves_others() -> None:
    planner = four_tiers(disk=10)
    register(planner, "a", 5)
    fetch_to_disk(planner, "a")
    register(planner, "b", 5, DISK, backing=False)
    assert planner.used[DISK] == 10
    put(planner, "c", 5)
    planner.save("c")
    assert told(planner) == ["a leaves DISK", "c: HOST to DISK!"]
    planner.arrive("c", HOST, DISK)
    put(planner, "d", 5)
    planner.save("d")
    assert told(planner) == ["b: DISK to REMOTE!"]
    planner.arrive("b", DISK, REMOTE)
    assert told(planner) == ["b leaves DISK", "d: HOST to DISK!"]
    assert planner.residence("a") == planner.residence("b") == (REMOTE,)
    assert planner.used[REMOTE] == 5, "only the user's file of a is there"
    planner.arrive("d", HOST, DISK)
    assert planner.peak[DISK] == 10


def test_checkpoint_file_stays_on_disk() -> None:
    planner = four_tiers(disk=5)
    register(planner, "a", 5, DISK)
    put(planner, "b", 5)
    planner.save("b")
    assert told(planner) == ["b: HOST to DISK!"]
    planner.arrive("b", HOST, DISK)
    planner.release_memory("b")
    put(planner, "c", 5)
    planner.save("c")
    assert told(planner) == ["b: DISK to REMOTE!"], "evicting a would free no space"


def test_prefetch_takes_disk_space_only_from_backed_copies() -> None:
    for backing, words in ((True, ["a leaves DISK", "b: REMOTE to DISK"]), (False, [])):
        planner = four_tiers(disk=20)
        register(planner, "c", 15, DISK, backing=False)
        if backing:
            register(planner, "a", 5)
            fetch_to_disk(planner, "a")
            planner.offload("a")  # it is no longer expected
        else:
            register(planner, "a", 5, DISK, backing=False)
        register(planner, "b", 5)
        planner.expect(["b"], DISK)
        assert told(planner) == words


def test_demand_with_all_tiers_full_raises() -> None:
    planner = four_tiers(disk=5, remote=4)
    register(planner, "a", 5, DISK, backing=False)
    put(planner, "b", 5)
    planner.save("b")
    error = planner.error_of("b")
    assert isinstance(error, BudgetError) and not planner.saving("b")
    assert (error.tier, error.budget, error.nbytes) == ("DISK", 5, 5)


def test_memory_release_leaves_every_persistent_copy() -> None:
    planner = four_tiers()
    register(planner, "a", 5)
    planner.demand("a")
    for src, dst in ((REMOTE, DISK), (DISK, HOST), (HOST, DEVICE)):
        planner.arrive("a", src, dst)
    planner.withdraw("a")
    told(planner)
    planner.release_memory("a")
    assert sorted(told(planner)) == ["a leaves DEVICE", "a leaves HOST"]
    assert planner.residence("a") == (DISK, REMOTE)


def test_discard_leaves_every_tier() -> None:
    planner = four_tiers()
    register(planner, "a", 5, backing=False)
    fetch_to_disk(planner, "a")
    assert planner.used == {DEVICE: 0, HOST: 0, DISK: 5, REMOTE: 5}
    planner.discard("a")
    assert sorted(told(planner)) == ["a is gone", "a leaves DISK", "a leaves REMOTE"]
    assert planner.used == {DEVICE: 0, HOST: 0, DISK: 0, REMOTE: 0}


# Other sets of tiers -----------------------------------------------------------------------------


@pytest.mark.parametrize("tiers", [(), (HOST,), (DISK,), (DISK, REMOTE), (DEVICE, HOST)])
def test_tiers_without_memory_above_storage_raise(tiers: tuple[Tier, ...]) -> None:
    with pytest.raises(ValueError, match="memory above a persistent tier"):
        driver_of(dict.fromkeys(tiers, None), ByName(), LearnedOrder())


def test_one_memory_tier_above_one_disk_suffices() -> None:
    planner = driver_of({HOST: 10, REMOTE: None}, ByName(), LearnedOrder())
    assert planner.top is planner.host is HOST
    assert planner.tiers == (HOST, REMOTE)
    register(planner, "a", 5)
    planner.demand("a")
    assert told(planner) == ["a: REMOTE to HOST!"]
    planner.arrive("a", REMOTE, HOST)
    assert planner.lease("a", Access.UPDATE)
    assert told(planner) == ["a leaves REMOTE"]
    planner.release("a", Access.UPDATE)
    planner.save("a")
    assert told(planner) == ["a: HOST to REMOTE!"]
