"""Copies leave the fastest tier when other users want its memory."""

from __future__ import annotations

import pytest

from tests.histories.machine import History
from tests.lanes import by_lane
from tests.plan.in_words import (
    DEVICE,
    DISK,
    HOST,
    change,
    lend,
    planner_of,
    raise_up,
    register,
    told,
)
from tierstore.model.events import DeviceVacated
from tierstore.model.tiers import Access


def test_vacated_device_unused_copies_leave_and_return_on_demand() -> None:
    planner = planner_of(100, 50)
    lend(planner, "lent", 5)
    for key in "ab":
        raise_up(planner, key, 10)
        assert planner.lease(key, Access.READ)
        planner.release(key, Access.READ)
    assert planner.spare_bytes() == 20
    planner.vacate()
    assert told(planner) == ["a leaves DEVICE", "b leaves DEVICE"]
    assert planner.spare_bytes() == 0
    assert planner.used[DEVICE] == 5
    planner.demand("a")
    assert told(planner) == ["a: HOST to DEVICE!"]


def test_vacated_device_only_copy_stays() -> None:
    planner = planner_of(100, 50)
    change(planner, "a", 10)
    planner.release("a", Access.UPDATE)
    assert planner.spare_bytes() == 0
    planner.vacate()
    assert told(planner) == []


def test_vacated_device_demanded_copy_stays() -> None:
    planner = planner_of(100, 50)
    raise_up(planner, "a", 10)
    planner.vacate()
    assert told(planner) == []
    assert planner.lease("a", Access.READ)


def test_vacated_device_prefetches_nothing_before_next_use() -> None:
    planner = planner_of(100, 20)
    lend(planner, "a", 12)
    raise_up(planner, "b", 4)
    planner.withdraw("b")
    register(planner, "hope", 5)
    planner.expect(["b", "hope"])  # later keys take no space from earlier ones
    assert told(planner) == ["hope: DISK to HOST"]
    planner.arrive("hope", DISK, HOST)
    assert told(planner) == []
    planner.vacate()
    assert told(planner) == ["b leaves DEVICE"]
    planner.release("a", Access.READ)
    assert told(planner) == ["b: HOST to DEVICE"]


@pytest.mark.parametrize("policy", ["next-use", "lru"])
def test_vacating_in_random_histories_keeps_every_promise(policy: str) -> None:
    vacated = 0
    for seed in range(by_lane(30, 300, 3000)):
        history = History(seed, policy)
        for _ in range(10):
            history.play(5)
            planner = history.world.planner
            spare = planner.spare_bytes()
            history.world.step(DeviceVacated())
            vacated += spare
        history.world.finish()
    assert vacated, "nothing was freed"
