"""Facts of a plan: its hops, its bytes, and the groups missing before the first pass."""

from __future__ import annotations

import pytest

from tests.plan.loops import SPEED, TO_DEVICE, TO_HOST, on_host, plain, with_device
from tierstore.model.sizes import PAGE
from tierstore.model.tiers import Tier
from tierstore.plan.loop_plan import Loop, LoopPlan, Step
from tierstore.plan.loop_planner import plan_loop

LOOP = plain([[4, 3, 5]] * 12)


@pytest.fixture(scope="module")
def plan() -> LoopPlan:
    found = plan_loop(LOOP, with_device(60, 60), SPEED, 2 * PAGE)
    assert found is not None
    return found


def test_hops_lead_from_disk_to_the_fastest_tier(plan: LoopPlan) -> None:
    assert plan.ways == [TO_DEVICE, TO_HOST]
    alone = plan_loop(LOOP, on_host(60), SPEED, PAGE)
    assert alone is not None
    assert alone.ways == [TO_HOST]


def test_pass_bytes_are_those_of_its_copies(plan: LoopPlan) -> None:
    assert plan.top.moved == sum(copy.nbytes for copy in plan.tiers[0].copies)
    assert plan.bytes_read == sum(copy.nbytes for copy in plan.tiers[1].copies)
    started = sum(each.nbytes for each in plan.top.start)
    assert plan.top.moved + started == sum(LOOP.sizes), "each group is used once"


def test_missing_with_no_copy_is_everything(plan: LoopPlan) -> None:
    on_device, in_host = (sum(each.nbytes for each in tier.start) for tier in plan.tiers)
    assert on_device > 0 < in_host
    missing = plan.missing({})
    assert missing == {TO_DEVICE: on_device, TO_HOST: on_device + in_host}


def test_missing_excludes_resident_groups(plan: LoopPlan) -> None:
    groups = range(len(LOOP.sizes))
    on_device, in_host = (sum(each.nbytes for each in tier.start) for tier in plan.tiers)
    everywhere = {group: (Tier.DEVICE, Tier.HOST) for group in groups}
    assert plan.missing(everywhere) == {TO_DEVICE: 0, TO_HOST: 0}
    only_host = {group: (Tier.HOST,) for group in groups}
    assert plan.missing(only_host) == {TO_DEVICE: on_device, TO_HOST: 0}
    only_device = {group: (Tier.DEVICE,) for group in groups}
    assert plan.missing(only_device) == {TO_DEVICE: 0, TO_HOST: in_host}, "nothing is copied back"


def test_tiled_groups_are_those_of_several_tiles(plan: LoopPlan) -> None:
    copied = {copy.group for tier in plan.tiers for copy in tier.copies}
    assert plan.tiled_groups == copied, "tiles have two pages"
    whole = plan_loop(LOOP, with_device(60, 60), SPEED, 5 * PAGE)
    assert whole is not None
    assert not whole.tiled_groups


def test_plan_retimed_moves_the_same_bytes(plan: LoopPlan) -> None:
    seconds = [0.1 * number for number in range(12)]
    timed = plan.timed(seconds)
    assert [step.seconds for step in timed.loop.steps] == seconds
    assert timed.loop.seconds == pytest.approx(6.6)
    assert (timed.steps, timed.tiers) == (plan.steps, plan.tiers)
    assert timed.timed([step.seconds for step in LOOP.steps]) == plan


def test_loop_counts_its_seconds_and_bytes() -> None:
    assert LOOP.seconds == pytest.approx(12 * 0.05)
    assert LOOP.nbytes(range(3)) == 12 * PAGE


def test_loop_of_unknown_groups_raises() -> None:
    with pytest.raises(ValueError, match="'a' names a group"):
        Loop((Step("a", (1,), 0.0),), (PAGE,))
    with pytest.raises(ValueError, match="'b' names a group"):
        Loop((Step("b", (0, 0), 0.0),), (PAGE,))
