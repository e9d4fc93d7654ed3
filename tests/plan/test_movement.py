"""The next move of each group, by hand: what comes when, what goes, and what waits for what."""

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

# Hopes -------------------------------------------------------------------------------------------


def test_hopes_are_fetched_in_order_while_there_is_room() -> None:
    planner = planner_of(80)
    for key in "abc":
        register(planner, key, 5)
    planner.expect(["c", "a", "b"])
    assert told(planner) == ["c: DISK to HOST", "a: DISK to HOST", "b: DISK to HOST"]


def test_a_hope_goes_on_to_the_device_and_no_further_than_it_was_hoped_for() -> None:
    for top, last in ((None, ["a: HOST to DEVICE"]), (DEVICE, ["a: HOST to DEVICE"]), (HOST, [])):
        planner = planner_of(10, 10)
        register(planner, "a", 5)
        planner.expect(["a"], top)
        assert told(planner) == ["a: DISK to HOST"]
        planner.arrive("a", DISK, HOST)
        assert told(planner) == last


def test_what_is_needed_is_fetched_before_what_is_hoped_for() -> None:
    """The room that a demand waits for is not for hopes; when it has its room, they go on."""
    planner = planner_of(20, 10)
    lend(planner, "lent", 8)
    bring(planner, "a", 5)
    register(planner, "hope", 2)
    planner.demand("a")
    planner.expect(["hope"])
    assert told(planner) == [], "there would be room for the hope"
    planner.release("lent", Access.READ)
    assert told(planner) == ["lent leaves DEVICE", "a: HOST to DEVICE!", "hope: DISK to HOST"]


def test_a_hope_waits_for_what_is_lent_and_comes_when_that_is_given_back() -> None:
    planner = planner_of(5)
    bring(planner, "lent", 5)
    planner.demand("lent")
    assert planner.lease("lent", Access.READ)
    register(planner, "a", 5)
    planner.expect(["a"])
    assert told(planner) == []
    planner.release("lent", Access.READ)
    assert told(planner) == ["lent leaves HOST", "a: DISK to HOST"]


def test_a_hope_comes_when_what_is_held_is_given_back() -> None:
    planner = planner_of(5)
    hold(planner, "held", 5)
    register(planner, "a", 5)
    planner.expect(["a"])
    assert told(planner) == []
    planner.release_on_host("held")
    assert told(planner) == ["held leaves HOST", "a: DISK to HOST"]


def test_a_hope_comes_when_what_was_in_its_way_is_saved() -> None:
    planner = planner_of(5)
    put(planner, "a", 5)
    planner.save("a")
    register(planner, "b", 5)
    planner.expect(["b"])
    assert told(planner) == ["a: HOST to DISK!"]
    planner.arrive("a", HOST, DISK)
    assert told(planner) == ["a leaves HOST", "b: DISK to HOST"]


def test_a_hope_comes_when_another_has_failed() -> None:
    planner = planner_of(20)
    lend(planner, "lent", 15)
    for key in "ab":
        register(planner, key, 5)
    planner.expect(["a", "b"])
    assert told(planner) == ["a: DISK to HOST"]
    planner.fail("a", DISK, HOST, OSError())
    assert told(planner) == ["a leaves HOST", "b: DISK to HOST"], "it is not tried again"


@pytest.mark.parametrize(("host", "device"), [(40, 5), (5, 40)])
def test_what_does_not_fit_on_every_tier_is_not_fetched(host: int, device: int) -> None:
    for size, comes in ((5, True), (6, False)):
        planner = planner_of(host, device)
        register(planner, "a", size)
        planner.expect(["a"])
        assert told(planner) == (["a: DISK to HOST"] if comes else [])


def test_what_does_not_fit_on_the_device_is_passed_over() -> None:
    planner = planner_of(40, 5)
    for key, size in (("a", 6), ("b", 5)):
        register(planner, key, size)
    planner.expect(["a", "b"])
    assert told(planner) == ["b: DISK to HOST"]


@pytest.mark.parametrize("is_demanded", [True, False])
def test_hopes_go_on_while_a_put_is_being_filled(is_demanded: bool) -> None:
    planner = planner_of(10, 10)
    planner.claim("put", 5, use_order=UseOrder.ANNOUNCED)
    if is_demanded:
        planner.demand("put")
    register(planner, "a", 5)
    planner.expect(["a"])
    assert told(planner) == ["put gets room on HOST", "a: DISK to HOST"]
    planner.arrive("a", DISK, HOST)
    assert told(planner) == ["a: HOST to DEVICE"]


@pytest.mark.parametrize("want", ["demand", "fetch", "claim"])
def test_hopes_leave_the_room_alone_that_somebody_waits_for_in_host_memory(want: str) -> None:
    planner = planner_of(10, 80)
    hold(planner, "held", 8)
    for key, nbytes in (("a", 5), ("hope", 2)):
        register(planner, key, nbytes)
    if want == "demand":
        planner.demand("a")
    elif want == "fetch":
        planner.demand_on_host("a", HostAccess.READ)
    else:
        planner.claim("put", 5, use_order=UseOrder.ANNOUNCED)
    planner.expect(["hope"])
    assert told(planner) == []
    planner.release_on_host("held")
    expected = "put gets room on HOST" if want == "claim" else "a: DISK to HOST!"
    assert told(planner)[:2] == ["held leaves HOST", expected]


def test_hopes_go_on_as_soon_as_a_put_has_its_room() -> None:
    planner = planner_of(10)
    bring(planner, "lent", 10)
    planner.demand("lent")
    assert planner.lease("lent", Access.READ)
    planner.claim("put", 5, use_order=UseOrder.ANNOUNCED)
    register(planner, "a", 5)
    planner.expect(["a"])
    assert told(planner) == []
    planner.release("lent", Access.READ)
    assert told(planner) == ["lent leaves HOST", "put gets room on HOST", "a: DISK to HOST"]


def test_hopes_go_on_while_what_is_demanded_is_on_its_way_there_or_cannot_come() -> None:
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


def test_hopes_that_nobody_has_used_yet_take_half_of_the_room_at_most() -> None:
    planner = planner_of(20, 80)
    for key in "abc":
        register(planner, key, 5)
    for key in "ab":
        planner.expect([key], HOST)
        planner.arrive(key, DISK, HOST)
        planner.offload(key)  # it is not expected any more
    told(planner)
    planner.expect(["c"], HOST)
    assert told(planner) == []
    planner.demand("a")
    planner.arrive("a", HOST, DEVICE)
    assert planner.lease("a", Access.READ)
    assert told(planner) == ["a: HOST to DEVICE!", "c: DISK to HOST"]


@pytest.mark.parametrize("purpose", HostAccess)
def test_hopes_go_on_while_something_is_fetched(purpose: HostAccess) -> None:
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
    """Counts how often it is asked what comes."""

    asked = 0

    def ahead(self, count: int) -> Numbers:
        self.asked += 1
        return super().ahead(count)


@pytest.mark.parametrize("waits_for", ["nothing", "a put", "a demand"])
def test_nothing_is_looked_for_where_nothing_has_changed(waits_for: str) -> None:
    """Looking ahead costs most of a step."""
    schedule = Counted()
    planner = driver_of({DEVICE: 10, HOST: 10, DISK: None}, ByName(), schedule)
    register(planner, "a", 5)
    register(planner, "hope", 5)
    if waits_for == "a put":
        planner.claim("put", 5, use_order=UseOrder.ANNOUNCED)
    elif waits_for == "a demand":
        planner.demand("a")
    schedule.asked = 0
    planner.expect(["hope"])
    assert schedule.asked >= 2, "for host memory, and for the device"
    schedule.asked = 0
    planner.withdraw("nobody")
    assert schedule.asked == 0


# On the way up -----------------------------------------------------------------------------------


def test_what_came_half_way_goes_on_before_its_place_is_needed_again() -> None:
    planner = planner_of(5, 80)
    for key in "ab":
        register(planner, key, 5)
    planner.expect(["a"])
    planner.demand("b")
    assert told(planner) == ["a: DISK to HOST"]
    assert planner.used[DEVICE] == 5, "room for b is set aside"
    planner.arrive("a", DISK, HOST)
    assert told(planner) == ["a: HOST to DEVICE"]
    planner.arrive("a", HOST, DEVICE)
    assert told(planner) == ["a leaves HOST", "b: DISK to HOST!"]


def wants_room_on_the_device(planner: Driver) -> None:
    register(planner, "large", 100)
    planner.demand("large")


def wants_to_put(planner: Driver) -> None:
    planner.claim("large", 100, use_order=UseOrder.ANNOUNCED)


def wants_to_hold(planner: Driver) -> None:
    register(planner, "large", 100)
    planner.demand_on_host("large", HostAccess.READ)


def wants_to_save(planner: Driver) -> None:
    planner.save("changed")


def wants_to_offload(planner: Driver) -> None:
    planner.offload("changed")


WANTS = [wants_room_on_the_device, wants_to_put, wants_to_hold, wants_to_save, wants_to_offload]


@pytest.mark.parametrize("want", WANTS, ids=lambda want: want.__name__)
def test_hopes_go_last_while_somebody_waits(want: Callable[[Planner], None]) -> None:
    """As in the test before, but then the place is needed by one who has waited."""
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


def test_room_on_the_device_is_kept_while_its_bytes_are_half_way() -> None:
    """Whoever asks again meanwhile finds it there. Then nobody does, and it is given up."""
    planner = planner_of(5, 5)
    register(planner, "a", 5)
    planner.demand("a")
    planner.withdraw("a")
    assert planner.used[DEVICE] == 5
    planner.arrive("a", DISK, HOST)
    assert told(planner) == ["a: DISK to HOST!"]
    assert planner.used[DEVICE] == 0


def test_room_on_the_device_is_kept_for_who_waits_for_room_below() -> None:
    planner = planner_of(10, 10)
    hold(planner, "held", 10)
    register(planner, "a", 10)
    planner.demand("a")
    assert told(planner) == []
    assert planner.used[DEVICE] == 10
    planner.release_on_host("held")
    assert told(planner) == ["held leaves HOST", "a: DISK to HOST!"]


def test_room_on_the_device_is_given_up_when_its_bytes_cannot_be_read() -> None:
    planner = planner_of(5, 5)
    register(planner, "a", 5)
    planner.demand("a")
    planner.fail("a", DISK, HOST, OSError())
    assert planner.used == {DEVICE: 0, HOST: 0, DISK: 0}
    assert told(planner) == ["a: DISK to HOST!", "a leaves HOST"]


def test_room_to_renew_a_group_is_not_given_up_for_others() -> None:
    planner = planner_of(10)
    for key in "ab":
        register(planner, key, 6)
    planner.demand_on_host("a", HostAccess.RENEW)
    planner.demand("b")
    assert told(planner) == []
    assert planner.lease_on_host("a", HostAccess.RENEW)
    assert told(planner) == ["a gets room on HOST", "a leaves DISK"]


def test_who_is_told_that_there_is_no_room_gets_none_later() -> None:
    planner = planner_of(10)
    hold(planner, "held", 5, HostAccess.PERMANENT)
    planner.claim("a", 6, use_order=UseOrder.ANNOUNCED)
    assert isinstance(planner.error_of("a"), BudgetError)
    planner.release_on_host("held")
    assert not planner.granted("a")
    assert told(planner) == []
    planner.withdraw("a")
    assert told(planner) == ["a is gone"]


# On the way down ---------------------------------------------------------------------------------


def test_an_offload_gives_up_room_that_nothing_is_on_its_way_to() -> None:
    planner = planner_of(5, 5)
    register(planner, "a", 5)
    planner.demand("a")
    planner.withdraw("a")
    planner.offload("a")
    assert planner.used[DEVICE] == 0


@pytest.mark.parametrize("device", [None, 5])
def test_what_is_offloaded_while_it_is_changed_leaves_afterwards(device: int | None) -> None:
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


def test_what_is_offloaded_while_it_is_saved_makes_room_for_others() -> None:
    planner = planner_of(10)
    for key in "ab":
        put(planner, key, 5)
    planner.save("a")
    planner.offload("a")
    planner.claim("c", 5, use_order=UseOrder.ANNOUNCED)
    assert told(planner) == ["a: HOST to DISK!"], "b need not be saved as well"
    planner.arrive("a", HOST, DISK)
    assert told(planner) == ["a leaves HOST", "c gets room on HOST"]


@pytest.mark.parametrize("again", ["demand", "prefetch", "fetch"])
def test_what_is_wanted_again_stays_in_host_memory(again: str) -> None:
    """It had to make room for others there, and is being saved."""
    planner = planner_of(5, 5)
    put(planner, "a", 5)
    planner.claim("b", 5, use_order=UseOrder.ANNOUNCED)
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


def test_what_is_wanted_again_is_not_offloaded_any_more() -> None:
    planner = planner_of(5, 5)
    change(planner, "a", 5)
    hold(planner, "held", 5)
    planner.release("a", Access.UPDATE)
    planner.offload("a")
    told(planner)
    planner.expect(["a"])
    planner.release_on_host("held")
    assert told(planner) == []


def test_a_save_takes_the_lowest_copy_one_tier_down() -> None:
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


def test_saving_ahead_is_not_urgent_and_asks_for_no_more_than_there_is() -> None:
    planner = planner_of(10, disk=5)
    for key, words in (("a", ["a: HOST to DISK"]), ("b", [])):
        put(planner, key, 5)
        told(planner)
        planner.advise_spill(key)
        assert told(planner) == words
