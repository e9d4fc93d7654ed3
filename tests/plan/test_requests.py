"""Single steps of the planner: notifications, learning and expectations."""

from __future__ import annotations

import pytest

from tests.plan.driver import driver_of
from tests.plan.in_words import (
    DEVICE,
    DISK,
    HOST,
    ByName,
    bring,
    hold,
    lend,
    planner_of,
    put,
    raise_up,
    register,
    told,
)
from tierstore.errors import BudgetError
from tierstore.model.tiers import Access, HostAccess, UseOrder
from tierstore.plan.policy import FarthestNextUse, RankingPolicy
from tierstore.plan.schedule import LearnedOrder


def test_put_above_the_budget_raises() -> None:
    planner = planner_of(10, 20)
    with pytest.raises(BudgetError, match="raise ram_budget to at least 11 bytes"):
        planner.claim("a", 11)
    assert "a" not in planner


@pytest.mark.parametrize(("host", "device"), [(5, 40), (40, 5)])
def test_request_too_large_for_a_tier_on_its_way_raises(host: int, device: int) -> None:
    planner = planner_of(host, device)
    register(planner, "a", 6)
    with pytest.raises(BudgetError, match="to at least 6 bytes"):
        planner.demand("a")


@pytest.mark.parametrize("announced", [True, False])
def test_registered_groups_unscheduled_are_expected_in_order(
    announced: bool,
) -> None:
    planner = planner_of(100)
    for key in "abc":
        if announced:
            planner.register(key, 5, use_order=UseOrder.PREFETCHED)
        else:
            planner.register(key, 5)
    planner.demand("a")
    planner.arrive("a", DISK, HOST)
    assert planner.lease("a", Access.READ)
    words = told(planner)
    assert words[:1] == ["a: DISK to HOST!"]
    assert ("b: DISK to HOST" in words) == (not announced)


def test_oversized_prefetch_does_not_block_others() -> None:
    planner = planner_of(40)
    register(planner, "too large", 41)
    planner.expect(["too large"])
    for key in "ab":
        planner.register(key, 5)
    planner.demand("a")
    planner.arrive("a", DISK, HOST)
    assert planner.lease("a", Access.READ)
    assert told(planner) == ["a: DISK to HOST!", "b: DISK to HOST"]


def test_unlimited_tier_accepts_any_size() -> None:
    planner = driver_of({HOST: None, DEVICE: 5, DISK: None}, ByName(), LearnedOrder())
    register(planner, "a", 5)
    planner.expect(["a"])
    assert told(planner) == ["a: DISK to HOST"]


def test_put_groups_without_schedule_count_as_seen() -> None:
    for announced in (True, False):
        schedule = LearnedOrder()
        planner = driver_of(
            {HOST: 100, DISK: None}, RankingPolicy(FarthestNextUse(schedule)), schedule
        )
        for key in "abab":
            planner.claim(key, 5, use_order=UseOrder.PREFETCHED if announced else UseOrder.LEARNED)
            planner.fill(key)
            planner.demand(key)
            assert planner.lease(key, Access.TAKE)
            planner.release(key, Access.TAKE)
        assert (schedule.steps_until("a") < 3) == (not announced)


def test_next_prefetch_starts_with_the_last_bytes_before() -> None:
    """Queue more than 32 MiB: they take space too early; less leaves the disk idle in between."""
    planner = planner_of(1000 << 20)
    for key in "abc":
        planner.register(key, 30 << 20)
    planner.demand("a")
    planner.arrive("a", DISK, HOST)
    assert planner.lease("a", Access.READ)
    assert told(planner) == ["a: DISK to HOST!", "b: DISK to HOST"]
    planner.ending("b", DISK, HOST)
    assert told(planner) == ["c: DISK to HOST"]


@pytest.mark.parametrize("permanent", [True, False])
def test_waiting_is_only_for_returnable_space(permanent: bool) -> None:
    """Lease one group twice; the first lease is released at once."""
    planner = planner_of(10)
    bring(planner, "lent", 6)
    for _ in range(2):
        planner.demand("lent")
        assert planner.lease("lent", Access.READ, permanent=permanent)
    planner.release("lent", Access.READ, permanent=permanent)
    told(planner)
    planner.claim("a", 5, use_order=UseOrder.PREFETCHED)
    error = planner.error_of("a")
    assert isinstance(error, BudgetError) == permanent
    if isinstance(error, BudgetError):
        assert (error.tier, error.budget, error.nbytes) == ("HOST", 10, 5)
    planner.release("lent", Access.READ, permanent=permanent)
    assert told(planner) == ([] if permanent else ["lent leaves HOST", "a gets room on HOST"])


@pytest.mark.parametrize("device", [None, 10])
def test_blocked_by_permanent_leases_names_the_tier(
    device: int | None,
) -> None:
    planner = planner_of(100, device) if device else planner_of(10)
    if device:
        raise_up(planner, "kept", 6)
    else:
        bring(planner, "kept", 6)
        planner.demand("kept")
    assert planner.lease("kept", Access.READ, permanent=True)
    register(planner, "a", 5)
    planner.demand("a")
    error = planner.error_of("a")
    assert isinstance(error, BudgetError)
    tier, name = ("DEVICE", "device_budget") if device else ("HOST", "ram_budget")
    assert (error.tier, error.budget, error.nbytes) == (tier, 10, 5)
    assert "6 bytes are in use there permanently" in str(error)
    assert f"raise {name} to at least 11 bytes" in str(error)


def test_withdrawn_puts_space_goes_to_a_prefetch() -> None:
    planner = planner_of(10)
    put(planner, "a", 5)
    planner.claim("b", 5, use_order=UseOrder.PREFETCHED)
    assert told(planner) == ["b gets room on HOST"]
    assert not planner.idle()
    planner.withdraw("b")
    assert told(planner) == ["b leaves HOST", "b is gone"]
    assert planner.idle() and planner.used[HOST] == 5


def test_blocked_requests_fail_largest_first() -> None:
    planner = planner_of(10, 10)
    hold(planner, "held", 5, HostAccess.PERMANENT)
    lend(planner, "lent", 1)
    for key, nbytes in (("large", 8), ("small", 4)):
        register(planner, key, nbytes)
        planner.demand(key)
    assert told(planner) == []
    planner.release("lent", Access.READ)
    assert told(planner) == ["small: DISK to HOST!"]
    error = planner.error_of("large")
    assert isinstance(error, BudgetError) and planner.error_of("small") is None
    assert (error.tier, error.budget, error.nbytes) == ("HOST", 10, 8)
    assert "5 bytes are in use there permanently" in str(error)


@pytest.mark.parametrize("want", ["demand", "fetch"])
@pytest.mark.parametrize("others", [0, 1])
def test_blocked_request_is_spared_while_a_waiter_wakes(want: str, others: int) -> None:
    """Wake one of two waiters: it finds its group, and may free its space."""
    planner = planner_of(10)
    hold(planner, "held", 4, HostAccess.PERMANENT)
    bring(planner, "awaited", 6)
    if want == "demand":
        planner.demand("awaited")
    else:
        planner.demand_on_host("awaited", HostAccess.READ)
    for number in range(others):
        register(planner, f"other {number}", 6)
        planner.demand_on_host(f"other {number}", HostAccess.READ)
        assert planner.error_of(f"other {number}") is None
    planner.claim("a", 6, use_order=UseOrder.PREFETCHED)
    assert planner.error_of("a") is None
    if others:
        return
    if want == "demand":
        planner.withdraw("awaited")
    else:
        planner.withdraw_on_host("awaited", HostAccess.READ)
    assert told(planner) == ["awaited leaves HOST", "a gets room on HOST"]


@pytest.mark.parametrize("want", ["demand", "fetch", "claim"])
def test_permanently_held_demand_lets_others_fail(want: str) -> None:
    planner = planner_of(10)
    hold(planner, "held", 6, HostAccess.PERMANENT)
    planner.demand_on_host("held", HostAccess.UPDATE)
    if want == "claim":
        planner.claim("a", 5, use_order=UseOrder.PREFETCHED)
    else:
        register(planner, "a", 5)
        if want == "demand":
            planner.demand("a")
        else:
            planner.demand_on_host("a", HostAccess.READ)
    assert isinstance(planner.error_of("a"), BudgetError)


def test_save_without_disk_space_raises() -> None:
    planner = planner_of(10, disk=4)
    put(planner, "a", 5)
    planner.save("a")
    error = planner.error_of("a")
    assert isinstance(error, BudgetError) and not planner.saving("a")
    assert (error.tier, error.budget, error.nbytes) == ("DISK", 4, 5)
    planner.report_error("a")
    assert planner.error_of("a") is None
    planner.demand("a")
    assert planner.lease("a", Access.READ)


def test_discard_frees_space_at_once() -> None:
    planner = planner_of(10, disk=0)
    lend(planner, "lent", 4)
    put(planner, "a", 6)
    planner.claim("b", 6, use_order=UseOrder.PREFETCHED)
    assert told(planner) == [], "the disk takes nothing, but the lease may be released"
    planner.discard("a")
    assert told(planner) == ["a leaves HOST", "a is gone", "b gets room on HOST"]


def test_save_failure_raises_and_can_be_retried() -> None:
    planner = planner_of(10)
    put(planner, "a", 5)
    planner.save("a")
    error = OSError()
    planner.fail("a", HOST, DISK, error)
    assert planner.error_of("a") is error and not planner.saving("a")
    assert told(planner) == ["a: HOST to DISK!", "a leaves DISK"]
    planner.save("a")
    assert planner.error_of("a") is None
    assert told(planner) == ["a: HOST to DISK!"]


def test_discard_during_a_take_removes_once() -> None:
    schedule = LearnedOrder()
    planner = driver_of({HOST: 10, DISK: None}, RankingPolicy(FarthestNextUse(schedule)), schedule)
    put(planner, "a", 5)
    planner.expect(["a"])
    assert schedule.steps_until("a") == 1
    planner.demand("a")
    assert planner.lease("a", Access.TAKE)
    schedule.known.prefetch(["a"])
    planner.discard("a")
    assert schedule.steps_until("a") == float("inf")
    assert told(planner) == []
    planner.release("a", Access.TAKE)
    assert told(planner) == ["a leaves HOST", "a is gone"]


def test_reserved_space_is_freed_with_its_group() -> None:
    planner = planner_of(5, 5)
    register(planner, "a", 5)
    planner.demand("a")
    assert planner.used[DEVICE] == 5
    planner.discard("a")
    assert told(planner) == ["a: DISK to HOST!"], "it is still being read"
    assert planner.used[DEVICE] == 0
    planner.arrive("a", DISK, HOST)
    assert told(planner) == ["a leaves DISK", "a leaves HOST", "a is gone"]


def test_offload_cancels_the_prefetch() -> None:
    planner = planner_of(10)
    lend(planner, "lent", 10)
    register(planner, "a", 5)
    planner.expect(["a"])
    planner.offload("a")
    planner.release("lent", Access.READ)
    assert told(planner) == []
