"""The planner's answers: waiters, leases and residents; and hits without a demand."""

from __future__ import annotations

import pytest

from tests.plan.driver import Driver, driver_of, group_of
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
    register,
    told,
)
from tierstore.model.tiers import Access, HostAccess, UseOrder
from tierstore.plan.schedule import LearnedOrder


def ids(*names: str) -> set[object]:
    return {group_of(name) for name in names}


# Hits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("demanded", [True, False])
def test_hit_teaches_as_much_as_a_demanded_lease(demanded: bool) -> None:
    """Check uses that compute for three seconds, and the order of two groups."""
    now, schedule = 0.0, LearnedOrder()
    planner = driver_of({HOST: 20, DISK: None}, ByName(), schedule, lambda: now)
    for name in "ab":
        planner.claim(name, 5)
        planner.fill(name)
    for name in "abab":
        if demanded:
            planner.demand(name)
        assert planner.lease(name, Access.READ, demanded=demanded)
        planner.release(name, Access.READ)
        now += 3.0
    assert [planner.computing_seconds(name) for name in "ab"] == [3.0, 3.0]
    assert [schedule.steps_until(name) for name in "ab"] == [1, 2]
    assert planner.waited_for() == set()


def test_hit_meets_no_other_owners_demand() -> None:
    planner = planner_of(10)
    bring(planner, "a", 10)
    planner.demand("a")
    assert planner.lease("a", Access.READ, demanded=False)
    planner.release("a", Access.READ)
    assert planner.waited_for() == ids("a")
    planner.claim("b", 10, use_order=UseOrder.PREFETCHED)
    assert told(planner) == [], "another caller still waits for a"
    assert planner.lease("a", Access.READ)
    assert planner.waited_for() == ids("b")
    planner.release("a", Access.READ)
    assert told(planner) == ["a leaves HOST", "b gets room on HOST"]


@pytest.mark.parametrize("demanded", [True, False])
def test_hit_keeps_a_copy_about_to_leave(demanded: bool) -> None:
    planner = planner_of(10)
    put(planner, "a", 5)
    planner.offload("a")
    assert told(planner) == ["a: HOST to DISK!"]
    if demanded:
        planner.demand("a")
    assert planner.lease("a", Access.READ, demanded=demanded)
    planner.release("a", Access.READ)
    planner.arrive("a", HOST, DISK)
    assert told(planner) == []
    assert planner.residence("a") == (HOST, DISK)


def test_copy_about_to_leave_without_a_hit_leaves() -> None:
    """Check the control of the previous test."""
    planner = planner_of(10)
    put(planner, "a", 5)
    planner.offload("a")
    planner.arrive("a", HOST, DISK)
    assert told(planner) == ["a: HOST to DISK!", "a leaves HOST"]


# Waiters -----------------------------------------------------------------------------------------


def test_waiting_covers_every_request() -> None:
    planner = planner_of(10, 20)
    hold(planner, "held", 10)
    for name in "ab":
        register(planner, name, 5)
    assert planner.waited_for() == set()
    planner.demand("a")
    planner.demand_on_host("b", HostAccess.READ)
    planner.claim("c", 5, use_order=UseOrder.PREFETCHED)
    planner.expect(["a"])  # a prefetch has no waiter
    assert planner.waited_for() == ids("a", "b", "c")
    planner.withdraw_on_host("b", HostAccess.READ)
    planner.withdraw("c")
    assert planner.waited_for() == ids("a")
    planner.withdraw("a")
    assert planner.waited_for() == set()


def test_save_waiter_waits_until_the_save_is_done() -> None:
    planner = planner_of(10)
    put(planner, "a", 5)
    planner.save("a")
    assert planner.waited_for() == ids("a")
    planner.arrive("a", HOST, DISK)
    assert planner.waited_for() == set()


def test_reserved_space_is_awaited_until_its_bytes_are_half_way() -> None:
    planner = planner_of(10, 10)
    register(planner, "a", 5)
    planner.demand("a")
    planner.withdraw("a")
    assert planner.waited_for() == ids("a"), "a repeated request finds the space reserved"
    planner.arrive("a", DISK, HOST)
    assert planner.waited_for() == set()


# Residents ---------------------------------------------------------------------------------------


def test_group_exists_until_its_last_copy_is_gone() -> None:
    planner = planner_of(10)
    assert planner.groups() == planner.leased() == set()
    lend(planner, "lent", 5)
    register(planner, "a", 5)
    assert planner.groups() == ids("lent", "a")
    assert planner.leased() == ids("lent")
    planner.discard("lent")
    assert "lent" not in planner and planner.groups() == ids("lent", "a")
    planner.release("lent", Access.READ)
    assert planner.groups() == ids("a") and planner.leased() == set()


def test_host_leased_group_counts_as_leased() -> None:
    planner = planner_of(10)
    hold(planner, "a", 5, HostAccess.PERMANENT)
    assert planner.leased() == ids("a")
    planner.release_on_host("a")
    assert planner.leased() == set()


def test_sizes_and_times_are_as_reported() -> None:
    planner = planner_of(10, 20)
    assert planner.bandwidth(DISK, HOST) is None
    planner.measure_transfer(DISK, HOST, 6, 0.0, 2.0)
    assert planner.bandwidth(DISK, HOST) == 3.0
    assert planner.bandwidth(HOST, DEVICE) is None
    register(planner, "a", 5)
    assert planner.computing_seconds("a") == 0.0


# Hints -------------------------------------------------------------------------------------------


def fetched(planner: Driver) -> list[str]:
    """Return the groups fetched one after another, as each arrives."""
    order = []
    while words := told(planner):
        for word in words:
            name = word.split(":")[0]
            order.append(name)
            planner.arrive(name, DISK, HOST)
    return order


def test_expectation_latest_wins() -> None:
    for expected, order in ((["ab"], "ab"), (["ab", "b"], "ab"), (["ab", "a"], "ba")):
        planner = planner_of(20)
        hold(planner, "held", 20)
        for name in "ab":
            register(planner, name, 5)
        for names in expected:
            planner.expect(names)
        planner.release_on_host("held")
        assert told(planner)[0] == "held leaves HOST"
        assert planner.arriving(order[0]), f"{order[0]} must be fetched next"


def test_expectation_repeated_is_fetched_once() -> None:
    planner = planner_of(80)
    for name in "ab":
        register(planner, name, 5)
    planner.expect("aba")
    assert sorted(fetched(planner)) == ["a", "b"]


def test_discarded_group_is_not_expected() -> None:
    schedule = LearnedOrder()
    planner = driver_of({HOST: 20, DISK: None}, ByName(), schedule)
    lend(planner, "gone", 5)
    planner.discard("gone")
    assert told(planner) == ["gone leaves DISK"]
    register(planner, "a", 5)
    planner.expect(["gone", "a"])
    assert schedule.known.prefetched_count() == 1
    assert fetched(planner) == ["a"]


def test_unknown_group_is_not_expected() -> None:
    schedule = LearnedOrder()
    planner = driver_of({HOST: 20, DISK: None}, ByName(), schedule)
    register(planner, "a", 5)
    with pytest.raises(KeyError):
        planner.expect(["a", "nobody"])
    assert schedule.known.prefetched_count() == 0, "a failed call changes nothing"
    assert told(planner) == []
