"""Copies: the space they take, their progress, and their speed."""

from __future__ import annotations

import pytest

from tests.plan.driver import driver_of
from tests.plan.in_words import DEVICE, DISK, HOST, ByName, planner_of, put, register, told
from tierstore.model.tiers import UseOrder
from tierstore.plan.schedule import LearnedOrder


def test_planner_new_holds_nothing_and_plans_nothing() -> None:
    planner = planner_of(10, 10, 10)
    assert planner.used == planner.peak == {DEVICE: 0, HOST: 0, DISK: 0}
    assert planner.idle()
    assert told(planner) == []


def test_largest_in_memory_excludes_groups_on_disk() -> None:
    planner = planner_of(20)
    assert planner.table.largest_in_memory() == 0
    put(planner, "a", 5)
    put(planner, "b", 3)
    register(planner, "c", 8)
    assert planner.table.largest_in_memory() == 5
    planner.discard("a")
    assert planner.table.largest_in_memory() == 3
    planner.discard("b")
    assert planner.table.largest_in_memory() == 0


def test_peak_is_the_most_bytes_held_at_once() -> None:
    planner = planner_of(10)
    put(planner, "a", 5)
    put(planner, "b", 3)
    planner.discard("a")
    put(planner, "c", 2)
    assert (planner.used[HOST], planner.peak[HOST]) == (5, 8)
    planner.discard("c")
    put(planner, "d", 6)
    assert planner.peak[HOST] == 9


def test_hop_speed_follows_copies_over_it() -> None:
    now = 10.0
    planner = driver_of({HOST: 100, DISK: None}, ByName(), LearnedOrder(), lambda: now)

    def bandwidth() -> float | None:
        return planner.bandwidth(DISK, HOST)

    for key in "ab":
        register(planner, key, 8)
        planner.demand(key)
    now = 12.0
    planner.fail("b", DISK, HOST, OSError())
    assert bandwidth() is None, "nothing arrived"
    now = 16.0
    planner.arrive("a", DISK, HOST)
    assert bandwidth() == 8 / (16 - 12), "until 12 it shared the hop with b"
    register(planner, "c", 6)
    now = 20.0
    planner.demand("c")
    now = 22.0
    planner.arrive("c", DISK, HOST)
    assert bandwidth() == pytest.approx((0.8 * 8 + 6) / (0.8 * 4 + 2)), "it began at 20"


def test_hop_speed_with_queued_copies_is_the_assumed_one() -> None:
    now = 10.0
    planner = driver_of({DEVICE: 100, HOST: 100, DISK: None}, ByName(), LearnedOrder(), lambda: now)
    hop = planner.prefetcher.hops[HOST, DEVICE]
    for key in "ab":
        put(planner, key, 8)
        planner.demand(key)
        planner.arrive(key, HOST, DEVICE, timed=False)
        assert (hop.copies, hop.nbytes, hop.bandwidth) == (0, 0, None)
        assert planner.residence(key) == (DEVICE, HOST)
    planner.measure_transfer(HOST, DEVICE, 8, 3.0, 5.0)
    planner.measure_transfer(HOST, DEVICE, 8, 4.0, 9.0)
    assert hop.bandwidth == pytest.approx((0.8 * 8 + 8) / (0.8 * 2 + 4))


def test_device_use_of_unknown_group_is_ignored() -> None:
    planner = driver_of({HOST: 100, DISK: None}, ByName(), LearnedOrder(), timed_by_device=True)
    for key in "ab":
        put(planner, key, 8)
    planner.measure_use("a", 0.0, 0.0)
    planner.measure_use("b", 2.0, 2.0)
    planner.measure_use("gone", 5.0, 5.0)
    planner.measure_use("a", 9.0, 9.0)
    assert [planner.computing_seconds(key) for key in "ab"] == [2.0, 3.0]


@pytest.mark.parametrize("fails", [True, False])
def test_copy_finished_is_no_longer_ending(fails: bool) -> None:
    planner = planner_of(10)
    register(planner, "a", 5)
    planner.demand("a")
    planner.ending("a", DISK, HOST)
    hop = planner.prefetcher.hops[DISK, HOST]
    assert (hop.copies, hop.nbytes, hop.ending) == (1, 5, 1)
    if fails:
        planner.fail("a", DISK, HOST, OSError())
    else:
        planner.arrive("a", DISK, HOST)
    assert (hop.copies, hop.nbytes, hop.ending) == (0, 0, 0)


def test_copy_read_by_transfers_is_in_use_until_the_last_ends() -> None:
    planner = planner_of(5, 5)
    put(planner, "a", 5)
    planner.save("a")
    planner.demand("a")
    assert told(planner) == ["a: HOST to DISK!", "a: HOST to DEVICE!"]
    planner.claim("b", 5, use_order=UseOrder.PREFETCHED)
    planner.arrive("a", HOST, DISK)
    assert told(planner) == [], "another transfer still reads it"
    planner.arrive("a", HOST, DEVICE)
    assert told(planner) == ["a leaves HOST", "b gets room on HOST"]
