"""The next move of each group, worked out by hand: fetches, evictions, and their causes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.plan.driver import Driver, driver_of
from tests.plan.in_words import (
    DEVICE,
    DISK,
    HOST,
    ByName,
    bring,
    change,
    hold,
    lend,
    planner_of,
    put,
    register,
    told,
)
from tierstore.errors import BudgetError
from tierstore.model.tiers import Access, HostAccess, Tier, UseOrder
from tierstore.plan.matching import Numbers
from tierstore.plan.planner import Planner
from tierstore.plan.schedule import LearnedOrder

# Prefetches --------------------------------------------------------------------------------------


def test_prefetches_are_fetched_in_order_while_space_is_free() -> None:
    planner = planner_of(80)
    for key in "abc":
        register(planner, key, 5)
    planner.expect(["c", "a", "b"])
    assert told(planner) == ["c: DISK to HOST", "a: DISK to HOST", "b: DISK to HOST"]


def test_prefetch_stops_at_its_requested_tier() -> None:
    for top, last in ((None, ["a: HOST to DEVICE"]), (DEVICE, ["a: HOST to DEVICE"]), (HOST, [])):
        planner = planner_of(10, 10)
        register(planner, "a", 5)
        planner.expect(["a"], top)
        assert told(planner) == ["a: DISK to HOST"]
        planner.arrive("a", DISK, HOST)
        assert told(planner) == last


def test_demand_is_fetched_before_prefetches() -> None:
    """Prefetches do not take the space that a demand waits for; once it has space, they resume."""
    planner = planner_of(20, 10)
    lend(planner, "lent", 8)
    bring(planner, "a", 5)
    register(planner, "hope", 2)
    planner.demand("a")
    planner.expect(["hope"])
    assert told(planner) == [], "the prefetch took space, which a demand waits for"
    planner.release("lent", Access.READ)
    assert told(planner) == ["lent leaves DEVICE", "a: HOST to DEVICE!", "hope: DISK to HOST"]


def test_prefetch_waits_for_a_lease_to_be_released() -> None:
    planner = planner_of(5)
    bring(planner, "lent", 5)
    planner.demand("lent")
    assert planner.lease("lent", Access.READ)
    register(planner, "a", 5)
    planner.expect(["a"])
    assert told(planner) == []
    planner.release("lent", Access.READ)
    assert told(planner) == ["lent leaves HOST", "a: DISK to HOST"]


def test_prefetch_resumes_after_a_host_lease_ends() -> None:
    planner = planner_of(5)
    hold(planner, "held", 5)
    register(planner, "a", 5)
    planner.expect(["a"])
    assert told(planner) == []
    planner.release_on_host("held")
    assert told(planner) == ["held leaves HOST", "a: DISK to HOST"]


def test_prefetch_resumes_after_a_save() -> None:
    planner = planner_of(5)
    put(planner, "a", 5)
    planner.save("a")
    register(planner, "b", 5)
    planner.expect(["b"])
    assert told(planner) == ["a: HOST to DISK!"]
    planner.arrive("a", HOST, DISK)
    assert told(planner) == ["a leaves HOST", "b: DISK to HOST"]


def test_prefetch_resumes_after_another_failed() -> None:
    planner = planner_of(20)
    lend(planner, "lent", 15)
    for key in "ab":
        register(planner, key, 5)
    planner.expect(["a", "b"])
    assert told(planner) == ["a: DISK to HOST"]
    planner.fail("a", DISK, HOST, OSError())
    assert told(planner) == ["a leaves HOST", "b: DISK to HOST"], "a failed prefetch is not retried"


@pytest.mark.parametrize(("host", "device"), [(40, 5), (5, 40)])
def test_prefetch_above_one_tiers_budget_is_skipped(host: int, device: int) -> None:
    for size, comes in ((5, True), (6, False)):
        planner = planner_of(host, device)
        register(planner, "a", size)
        planner.expect(["a"])
        assert told(planner) == (["a: DISK to HOST"] if comes else [])


def test_prefetch_above_the_device_budget_delays_no_other() -> None:
    planner = planner_of(40, 5)
    for key, size in (("a", 6), ("b", 5)):
        register(planner, key, size)
    planner.expect(["a", "b"])
    assert told(planner) == ["b: DISK to HOST"]


@pytest.mark.parametrize("is_demanded", [True, False])
def test_prefetch_continues_while_a_put_is_filled(is_demanded: bool) -> None:
    planner = planner_of(10, 10)
    planner.claim("put", 5, use_order=UseOrder.PREFETCHED)
    if is_demanded:
        planner.demand("put")
    register(planner, "a", 5)
    planner.expect(["a"])
    assert told(planner) == ["put gets room on HOST", "a: DISK to HOST"]
    planner.arrive("a", DISK, HOST)
    assert told(planner) == ["a: HOST to DEVICE"]


@pytest.mark.parametrize("want", ["demand", "fetch", "claim"])
def test_prefetch_leaves_host_space_to_waiters(want: str) -> None:
    planner = planner_of(10, 80)
    hold(planner, "held", 8)
    for key, nbytes in (("a", 5), ("hope", 2)):
        register(planner, key, nbytes)
    if want == "demand":
        planner.demand("a")
    elif want == "fetch":
        planner.demand_on_host("a", HostAccess.READ)
    else:
        planner.claim("put", 5, use_order=UseOrder.PREFETCHED)
    planner.expect(["hope"])
    assert told(planner) == []
    planner.release_on_host("held")
    expected = "put gets room on HOST" if want == "claim" else "a: DISK to HOST!"
    assert told(planner)[:2] == ["held leaves HOST", expected]


def test_prefetch_resumes_once_a_put_has_its_space() -> None:
    planner = planner_of(10)
    bring(planner, "lent", 10)
    planner.demand("lent")
    assert planner.lease("lent", Access.READ)
    planner.claim("put", 5, use_order=UseOrder.PREFETCHED)
    register(planner, "a", 5)
    planner.expect(["a"])
    assert told(planner) == []
    planner.release("lent", Access.READ)
    assert told(planner) == ["lent leaves HOST", "put gets room on HOST", "a: DISK to HOST"]


def test_prefetch_continues_while_demands_move_or_are_blocked() -> None:
    planner = planner_of(80, 80)
    for key in "abcdef":
        register(planner, key, 5)
    planner.demand("a")
    planner.expect(["b"], HOST)
    assert told(planner) == ["a: DISK to HOST!", "b: DISK to HOST"]
    planner.arrive("a", DISK, HOST)
    planner.expect(["c"], HOST)
    assert told(planner) == ["a: HOST to DEVICE!", "c: DISK to HOST"]
    planner.arrive("a", HOST, DEVICE)
    planner.expect(["d"], HOST)
    assert told(planner) == ["d: DISK to HOST"]
    planner.demand("e")
    planner.fail("e", DISK, HOST, OSError())
    planner.expect(["f"], HOST)
    assert told(planner) == ["e: DISK to HOST!", "e leaves HOST", "f: DISK to HOST"]


def test_prefetched_unused_copies_take_half_the_budget_at_most() -> None:
    planner = planner_of(20, 80)
    for key in "abc":
        register(planner, key, 5)
    for key in "ab":
        planner.expect([key], HOST)
        planner.arrive(key, DISK, HOST)
        planner.offload(key)  # it is no longer expected
    told(planner)
    planner.expect(["c"], HOST)
    assert told(planner) == []
    planner.demand("a")
    planner.arrive("a", HOST, DEVICE)
    assert planner.lease("a", Access.READ)
    assert told(planner) == ["a: HOST to DEVICE!", "c: DISK to HOST"]


@pytest.mark.parametrize("purpose", HostAccess)
def test_prefetch_continues_during_a_fetch(purpose: HostAccess) -> None:
    planner = planner_of(80)
    for key in ("wanted", "hope", "next"):
        register(planner, key, 5)
    planner.expect(["hope"])
    told(planner)
    planner.demand_on_host("wanted", purpose)
    assert told(planner) == ([] if purpose is HostAccess.RENEW else ["wanted: DISK to HOST!"])
    planner.expect(["next"])
    assert told(planner) == ["next: DISK to HOST"]


class Counted(LearnedOrder):
    """Counts the queries for upcoming uses."""

    asked = 0

    def ahead(self, count: int) -> Numbers:
        self.asked += 1
        return super().ahead(count)


@pytest.mark.parametrize("waits_for", ["nothing", "a put", "a demand"])
def test_prefetch_search_without_changes_is_skipped(waits_for: str) -> None:
    """Check this because looking ahead costs most of a step."""
    schedule = Counted()
    planner = driver_of({DEVICE: 10, HOST: 10, DISK: None}, ByName(), schedule)
    register(planner, "a", 5)
    register(planner, "hope", 5)
    if waits_for == "a put":
        planner.claim("put", 5, use_order=UseOrder.PREFETCHED)
    elif waits_for == "a demand":
        planner.demand("a")
    schedule.asked = 0
    planner.expect(["hope"])
    assert schedule.asked >= 2, "for host memory, and for the device"
    schedule.asked = 0
    planner.withdraw("nobody")
    assert schedule.asked == 0


# On the way up -----------------------------------------------------------------------------------


def test_prefetch_half_way_proceeds_before_its_slot_is_needed() -> None:
    planner = planner_of(5, 80)
    for key in "ab":
        register(planner, key, 5)
    planner.expect(["a"])
    planner.demand("b")
    assert told(planner) == ["a: DISK to HOST"]
    assert planner.used[DEVICE] == 5, "space for b is reserved"
    planner.arrive("a", DISK, HOST)
    assert told(planner) == ["a: HOST to DEVICE"]
    planner.arrive("a", HOST, DEVICE)
    assert told(planner) == ["a leaves HOST", "b: DISK to HOST!"]


def requests_device_space(planner: Driver) -> None:
    register(planner, "large", 100)
    planner.demand("large")


def wants_to_put(planner: Driver) -> None:
    planner.claim("large", 100, use_order=UseOrder.PREFETCHED)


def wants_to_hold(planner: Driver) -> None:
    register(planner, "large", 100)
    planner.demand_on_host("large", HostAccess.READ)


def wants_to_save(planner: Driver) -> None:
    planner.save("changed")


def wants_to_offload(planner: Driver) -> None:
    planner.offload("changed")


WANTS = [requests_device_space, wants_to_put, wants_to_hold, wants_to_save, wants_to_offload]


@pytest.mark.parametrize("want", WANTS, ids=lambda want: want.__name__)
def test_prefetch_half_way_is_dropped_for_a_waiter(want: Callable[[Planner], None]) -> None:
    """Do as in the previous test, but with a caller that already waits for the slot."""
    planner = planner_of(100, 100)
    change(planner, "changed", 1)
    hold(planner, "held", 95)
    for key in "ab":
        register(planner, key, 5)
    planner.expect(["a"])
    planner.release("changed", Access.UPDATE)
    told(planner)
    want(planner)
    planner.demand("b")
    assert told(planner) == []
    planner.arrive("a", DISK, HOST)
    assert told(planner)[0] == "a leaves HOST"


def test_device_space_is_kept_while_its_bytes_are_half_way() -> None:
    """Repeat the request, which finds the space reserved. Without it, the copy is evicted."""
    planner = planner_of(5, 5)
    register(planner, "a", 5)
    planner.demand("a")
    planner.withdraw("a")
    assert planner.used[DEVICE] == 5
    planner.arrive("a", DISK, HOST)
    assert told(planner) == ["a: DISK to HOST!"]
    assert planner.used[DEVICE] == 0


def test_device_space_is_kept_for_waiters_on_lower_tiers() -> None:
    planner = planner_of(10, 10)
    hold(planner, "held", 10)
    register(planner, "a", 10)
    planner.demand("a")
    assert told(planner) == []
    assert planner.used[DEVICE] == 10
    planner.release_on_host("held")
    assert told(planner) == ["held leaves HOST", "a: DISK to HOST!"]


def test_device_space_is_freed_when_its_read_fails() -> None:
    planner = planner_of(5, 5)
    register(planner, "a", 5)
    planner.demand("a")
    planner.fail("a", DISK, HOST, OSError())
    assert planner.used == {DEVICE: 0, HOST: 0, DISK: 0}
    assert told(planner) == ["a: DISK to HOST!", "a leaves HOST"]


def test_renewal_space_is_not_given_to_others() -> None:
    planner = planner_of(10)
    for key in "ab":
        register(planner, key, 6)
    planner.demand_on_host("a", HostAccess.RENEW)
    planner.demand("b")
    assert told(planner) == []
    assert planner.lease_on_host("a", HostAccess.RENEW)
    assert told(planner) == ["a gets room on HOST", "a leaves DISK"]


def test_request_failed_for_space_gets_none_later() -> None:
    planner = planner_of(10)
    hold(planner, "held", 5, HostAccess.PERMANENT)
    planner.claim("a", 6, use_order=UseOrder.PREFETCHED)
    assert isinstance(planner.error_of("a"), BudgetError)
    planner.release_on_host("held")
    assert not planner.granted("a")
    assert told(planner) == []
    planner.withdraw("a")
    assert told(planner) == ["a is gone"]


# On the way down ---------------------------------------------------------------------------------


def test_offload_frees_space_with_nothing_on_the_way() -> None:
    planner = planner_of(5, 5)
    register(planner, "a", 5)
    planner.demand("a")
    planner.withdraw("a")
    planner.offload("a")
    assert planner.used[DEVICE] == 0


@pytest.mark.parametrize("device", [None, 5])
def test_offload_during_an_update_leaves_afterwards(device: int | None) -> None:
    planner = planner_of(5, device)
    bring(planner, "a", 5)
    planner.demand("a")
    if device is not None:
        planner.arrive("a", HOST, DEVICE)
    assert planner.lease("a", Access.UPDATE)
    told(planner)
    planner.offload("a")
    assert told(planner) == []
    planner.release("a", Access.UPDATE)
    src, dst = (HOST, DISK) if device is None else (DEVICE, HOST)
    assert told(planner) == [f"a: {src.name} to {dst.name}!"]
    planner.arrive("a", src, dst)
    assert told(planner) == [f"a leaves {src.name}"]


def test_offload_during_a_save_frees_space() -> None:
    planner = planner_of(10)
    for key in "ab":
        put(planner, key, 5)
    planner.save("a")
    planner.offload("a")
    planner.claim("c", 5, use_order=UseOrder.PREFETCHED)
    assert told(planner) == ["a: HOST to DISK!"], "b need not be saved as well"
    planner.arrive("a", HOST, DISK)
    assert told(planner) == ["a leaves HOST", "c gets room on HOST"]


@pytest.mark.parametrize("again", ["demand", "prefetch", "fetch"])
def test_evicted_group_requested_again_keeps_its_host_copy(again: str) -> None:
    """Save a group because a put needs its space, and request it again."""
    planner = planner_of(5, 5)
    put(planner, "a", 5)
    planner.claim("b", 5, use_order=UseOrder.PREFETCHED)
    assert told(planner) == ["a: HOST to DISK!"]
    planner.withdraw("b")
    if again == "demand":
        planner.demand("a")
    elif again == "prefetch":
        planner.expect(["a"])
    else:
        planner.demand_on_host("a", HostAccess.READ)
    assert Tier.HOST in planner.residence("a")
    planner.arrive("a", HOST, DISK)
    assert planner.residence("a") == (HOST, DISK)


def test_offload_is_cancelled_by_a_prefetch() -> None:
    planner = planner_of(5, 5)
    change(planner, "a", 5)
    hold(planner, "held", 5)
    planner.release("a", Access.UPDATE)
    planner.offload("a")
    told(planner)
    planner.expect(["a"])
    planner.release_on_host("held")
    assert told(planner) == []


def test_save_copies_the_lowest_copy_one_tier_down() -> None:
    planner = planner_of(10, 10)
    change(planner, "a", 5)
    planner.release("a", Access.UPDATE)
    told(planner)
    planner.save("a")
    assert told(planner) == ["a: DEVICE to HOST!"]
    planner.arrive("a", DEVICE, HOST)
    assert told(planner) == ["a: HOST to DISK!"]
    planner.arrive("a", HOST, DISK)
    assert planner.residence("a") == (DEVICE, HOST, DISK)


def test_save_ahead_is_not_urgent_and_takes_free_space_only() -> None:
    planner = planner_of(10, disk=5)
    for key, words in (("a", ["a: HOST to DISK"]), ("b", [])):
        put(planner, key, 5)
        told(planner)
        planner.advise_spill(key)
        assert told(planner) == words
