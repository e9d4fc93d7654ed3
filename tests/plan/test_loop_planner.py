"""The plan of a loop is right for any loop and budgets, and near the optimum."""

from __future__ import annotations

import itertools
import math

import pytest

from tests.lanes import by_lane
from tests.plan.loops import (
    SPEED,
    drawn,
    on_host,
    plain,
    there_and_back,
    with_device,
)
from tierstore.model.sizes import PAGE
from tierstore.model.tiers import Tier
from tierstore.plan.loop_check import verify
from tierstore.plan.loop_plan import Loop, LoopPlan, Step
from tierstore.plan.loop_planner import plan_loop
from tierstore.plan.loop_tiers import ring_offsets
from tierstore.plan.loop_timing import PlanClock, seconds_per_pass

PAGES = plain([[4, 4, 4]] * 12)
"""12 units of 3 groups of 4 pages: 144 pages."""


def planned(loop: Loop, budgets: dict[Tier, int | None], tile: int = 2 * PAGE) -> LoopPlan:
    """Return a plan after checking its promises."""
    plan = plan_loop(loop, budgets, SPEED, tile)
    assert plan is not None
    verify(plan, budgets)
    return plan


def test_plans_of_random_loops_keep_their_promises() -> None:
    kinds = set()
    for seed in range(by_lane(40, 400, 4000)):
        case = drawn(seed)
        plan = case.plan()
        if plan is not None:
            verify(plan, case.budgets)
            kinds.add((len(plan.tiers), *(bool(tier.copies) for tier in plan.tiers)))
    assert len(kinds) == 5, "the loops lack a kind: two or three tiers, with or without copies"


def test_plan_that_fits_moves_nothing() -> None:
    plan = planned(PAGES, with_device(144, 1))
    assert [tier.copies for tier in plan.tiers] == [(), ()]
    assert plan.top.nbytes == 144 * PAGE
    assert plan.tiers[1].nbytes == 0, "groups that stay on the device have no copy in host memory"
    assert seconds_per_pass(plan, [1.0, 1.0]) == pytest.approx(PAGES.seconds)


@pytest.mark.parametrize("pages", [1, 11])
def test_plan_of_a_unit_above_the_budget_is_none(pages: int) -> None:
    assert plan_loop(PAGES, with_device(pages, 200), SPEED, PAGE) is None


def test_plan_reads_missing_bytes_and_a_ring() -> None:
    """Fill all memory except the rings when the disk is the bottleneck."""
    plan = planned(PAGES, with_device(60, 40))
    rings = 2 * 12 + 4 * 2  # two units, and four tiles
    assert 44 * PAGE <= plan.bytes_read <= (44 + rings) * PAGE
    uploaded = {copy.group for copy in plan.top.copies}
    assert not uploaded & {resident.group for resident in plan.top.start}


def test_plan_without_a_device_reads_into_host_memory() -> None:
    plan = planned(PAGES, on_host(80))
    assert [tier.tier for tier in plan.tiers] == [Tier.HOST]
    assert (144 - 80) * PAGE <= plan.bytes_read <= (144 - 80 + 2 * 12) * PAGE
    assert all(copy.source is None for copy in plan.top.copies)


def test_plan_spreads_fetches_evenly() -> None:
    """Check that no unit fetches a group more than another."""
    plan = planned(PAGES, with_device(84, 200))
    fetched = [0] * 12
    for group in {copy.group for copy in plan.top.copies}:
        fetched[group // 3] += 1
    assert max(fetched) - min(fetched) <= 1


def test_plan_of_long_steps_fetches_during_them() -> None:
    """Fetch more during the long steps, because copies move while a step computes."""
    steps = [Step(s.unit, s.groups, 0.4 if n % 2 else 0.02) for n, s in enumerate(PAGES.steps)]
    plan = planned(Loop(tuple(steps), PAGES.sizes), with_device(100, 200))
    of_long = sum(copy.group // 3 % 2 for copy in plan.top.copies)
    assert of_long > 0.7 * len(plan.top.copies)


def test_backward_pass_reuses_the_last_groups_of_forward() -> None:
    loop = there_and_back(PAGES)
    plan = planned(loop, with_device(40, 200))
    least = 2 * (144 - 40) * PAGE
    assert least <= plan.top.moved <= least + 2 * 24 * PAGE, "beside a ring of two units"


def test_phases_that_fit_alone_read_once_each() -> None:
    """Plan two models, four passes each, where memory has space for one and a half."""
    half = len(PAGES.steps) // 2
    steps = (*PAGES.steps[:half] * 4, *PAGES.steps[half:] * 4)
    plan = planned(Loop(steps, PAGES.sizes), on_host(108))
    assert plan.bytes_read <= 2 * 72 * PAGE, "not in each of the eight passes"
    assert plan.bytes_read >= (144 - 108) * PAGE


def test_group_shared_by_neighbours_is_fetched_once() -> None:
    shared = (Step("a", (0, 1), 0.1), Step("b", (1, 2), 0.1), Step("c", (3,), 0.1))
    plan = planned(Loop(shared, (4 * PAGE,) * 4), with_device(9, 20), tile=PAGE)
    copied = [copy.group for copy in plan.top.copies]
    assert copied.count(1) in (0, 4)


def test_group_in_host_memory_stays_whole() -> None:
    plan = planned(PAGES, with_device(60, 60), tile=PAGE)
    assert plan.tiers[1].start
    for tier in plan.tiers:
        assert all((each.offset, each.nbytes) == (0, 4 * PAGE) for each in tier.start)


def test_large_groups_pass_through_a_small_ring() -> None:
    """Keep only tiles of them in host memory, on their way to the device."""
    plan = planned(plain([[9]] * 8), with_device(45, 4), tile=PAGE)
    assert plan.top.copies
    assert plan.tiers[1].nbytes <= 4 * PAGE


@pytest.mark.parametrize("seconds", [0.0, 0.001, 0.05, 1.0])
def test_rings_leave_half_of_each_budget(seconds: float) -> None:
    """Check this even where larger rings would balance more."""
    steps = [Step(s.unit, s.groups, seconds * (n % 4)) for n, s in enumerate(PAGES.steps)]
    for device, host in [(60, 40), (80, 20), (100, 44)]:
        plan = planned(Loop(tuple(steps), PAGES.sizes), with_device(device, host))
        for tier, budget in zip(plan.tiers, (device, host), strict=True):
            ring = tier.nbytes - sum(each.nbytes for each in tier.start)
            assert ring <= budget * PAGE // 2


def test_group_without_tiles_moves_whole() -> None:
    loop, budgets = plain([[9]] * 8), with_device(20, 10)
    whole = set(range(0, 8, 2))
    plan = plan_loop(loop, budgets, SPEED, PAGE, whole)
    assert plan is not None
    verify(plan, budgets)
    for tier in plan.tiers:
        assert {copy.nbytes for copy in tier.copies if copy.group in whole} == {9 * PAGE}
        assert {copy.nbytes for copy in tier.copies if copy.group not in whole} == {PAGE}
    assert plan_loop(loop, with_device(20, 4), SPEED, PAGE, whole) is None


def test_plan_without_speeds_is_made() -> None:
    plan = plan_loop(PAGES, with_device(60, 40), {}, 2 * PAGE)
    assert plan is not None
    verify(plan, with_device(60, 40))


def test_plan_is_deterministic() -> None:
    plans = [plan_loop(PAGES, with_device(60, 40), SPEED, PAGE) for _ in range(2)]
    assert plans[0] == plans[1]


def test_released_copies_have_free_space() -> None:
    """Let copies run ahead into the next pass, and never by more than the ring."""
    plan = planned(PAGES, with_device(60, 200))
    released, count = plan.top.released, len(plan.top.copies)
    assert all(a <= b for a, b in itertools.pairwise(released))
    assert count < released[-1] <= 2 * count
    assert released[-1] - count == released[len(plan.steps) - 1] - count
    for step, planned_step in enumerate(plan.steps):
        assert released[step - 1] >= planned_step.arrivals or step == 0


# --- rings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "room", "offsets"),
    [
        ([], 0, []),
        ([5], 4, None),
        ([5, 5], 10, [0, 5]),
        ([5, 5, 5], 10, [0, 5, 0]),
        ([2] * 6, 10, [0, 2, 4, 0, 2, 4]),
        ([9, 1, 9, 1], 10, [0, 9, 0, 9]),
    ],
)
def test_ring_turns_in_even_rounds(sizes: list[int], room: int, offsets: list[int] | None) -> None:
    assert ring_offsets(sizes, room) == offsets


# --- the clock ------------------------------------------------------------------------------------


def test_plan_clock_is_that_of_its_slowest_part() -> None:
    """Pass one unit at a time through memory: reading and computing take turns."""
    loop = plain([[4]] * 3, seconds=1.0)
    plan = planned(loop, on_host(4), tile=PAGE)
    clock = PlanClock(plan, [4.0 * PAGE])
    assert [clock.run_pass() for _ in range(3)] == [6.0, 12.0, 18.0]
    assert clock.stalled == 9.0


def test_plan_clock_hides_reads_behind_compute() -> None:
    loop = plain([[4]] * 8, seconds=1.0)
    plan = planned(loop, on_host(24), tile=PAGE)
    assert seconds_per_pass(plan, [4.0 * PAGE]) == pytest.approx(8.0)
    assert seconds_per_pass(plan, [math.inf]) == pytest.approx(8.0)
    assert seconds_per_pass(plan, [PAGE / 1.0]) >= plan.bytes_read / PAGE
