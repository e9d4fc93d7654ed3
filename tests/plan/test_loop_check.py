"""Plans with one fault each: `verify` must notice every one.

Each fault is put into the plans of many loops. It may be harmless in some of them (a wait may be
longer than needed), but where inspection by hand shows harm, it is noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.lanes import by_lane
from tests.plan.loops import SPEED, Case, drawn, plain, there_and_back, with_device
from tierstore.model.sizes import PAGE
from tierstore.model.tiers import Tier
from tierstore.plan.loop_check import verify
from tierstore.plan.loop_plan import LoopPlan, PlannedStep, TierPlan, TileCopy
from tierstore.plan.loop_planner import plan_loop

Mutant = Callable[[LoopPlan], LoopPlan | None]


def with_tier(plan: LoopPlan, level: int, tier: TierPlan) -> LoopPlan:
    return replace(plan, tiers=(*plan.tiers[:level], tier, *plan.tiers[level + 1 :]))


def with_copies(
    plan: LoopPlan, level: int, change: Callable[[int, TileCopy], TileCopy]
) -> LoopPlan:
    """Return the plan with other copies, and a matching or given `released`."""
    tier = plan.tiers[level]
    copies = tuple(change(number, copy) for number, copy in enumerate(tier.copies))
    afters = [copy.after for copy in copies]
    users = len(tier.released)
    released = tuple(
        sum(after <= user for after in afters) + sum(after + users <= user for after in afters)
        for user in range(users)
    )
    return with_tier(plan, level, replace(tier, copies=copies, released=released))


def with_steps(plan: LoopPlan, change: Callable[[int, PlannedStep], PlannedStep]) -> LoopPlan:
    steps = tuple(change(number, step) for number, step in enumerate(plan.steps))
    return replace(plan, steps=steps)


def one_arrival_less(plan: LoopPlan) -> LoopPlan | None:
    """Make a step not wait for the last of its tiles."""
    return with_steps(plan, lambda _, step: replace(step, arrivals=max(step.arrivals - 1, 0)))


def freed_a_step_early(plan: LoopPlan) -> LoopPlan | None:
    """Make a copy reuse its space one step too early."""
    return with_copies(plan, 0, lambda _, copy: replace(copy, after=copy.after - 1))


def event_of_the_pass_before(plan: LoopPlan) -> LoopPlan | None:
    """Make a copy wait for the right step of the wrong pass."""
    steps = len(plan.steps)
    return with_copies(plan, 0, lambda _, copy: replace(copy, after=copy.after - steps))


def event_of_the_pass_after(plan: LoopPlan) -> LoopPlan | None:
    """Make a copy wait for a step that waits for the copy."""
    steps = len(plan.steps)
    return with_copies(plan, 0, lambda _, copy: replace(copy, after=copy.after + steps))


def ring_slot_freed_early(plan: LoopPlan) -> LoopPlan | None:
    """Let a read overwrite a tile in host memory that has not moved up yet."""
    return with_copies(plan, 1, lambda _, copy: replace(copy, after=copy.after - 1))


def read_not_awaited(plan: LoopPlan) -> LoopPlan | None:
    """Make a copy to the device not wait for the disk."""
    return with_copies(plan, 0, lambda _, copy: replace(copy, source_ready=None))


def read_of_the_pass_before(plan: LoopPlan) -> LoopPlan | None:
    """Make a copy to the device wait for the disk's read of the previous pass."""
    reads = len(plan.tiers[1].copies)

    def change(_: int, copy: TileCopy) -> TileCopy:
        ready = copy.source_ready
        return copy if ready is None else replace(copy, source_ready=ready - reads)

    return with_copies(plan, 0, change)


def address_off_by_a_page(plan: LoopPlan) -> LoopPlan | None:
    """Make a step look for its groups in the wrong place."""
    return with_steps(
        plan, lambda _, step: replace(step, addresses=tuple(a + PAGE for a in step.addresses))
    )


def source_off_by_a_page(plan: LoopPlan) -> LoopPlan | None:
    """Make a copy to the device read from the wrong place."""

    def change(_: int, copy: TileCopy) -> TileCopy:
        return copy if copy.source is None else replace(copy, source=copy.source + PAGE)

    return with_copies(plan, 0, change)


def last_copy_left_out(plan: LoopPlan) -> LoopPlan | None:
    """Make a pass fetch a tile less than its steps use."""
    tier = plan.top
    last = len(tier.copies) - 1
    released = tuple(min(count, last) for count in tier.released)
    return with_tier(plan, 0, replace(tier, copies=tier.copies[:-1], released=released))


def resident_left_out(plan: LoopPlan) -> LoopPlan | None:
    """Omit a group that must be resident before the first pass."""
    return with_tier(plan, 0, replace(plan.top, start=plan.top.start[1:]))


def residents_overlap(plan: LoopPlan) -> LoopPlan | None:
    """Give two resident groups a page in common."""
    first, second, *others = plan.top.start
    second = replace(second, address=first.address + first.nbytes - PAGE)
    return with_tier(plan, 0, replace(plan.top, start=(first, second, *others)))


def resident_in_both_memories(plan: LoopPlan) -> LoopPlan | None:
    """Give host memory a copy of a group that stays on the device permanently."""
    extra = replace(plan.top.start[0], address=plan.tiers[1].start[-1].address)
    return with_tier(plan, 1, replace(plan.tiers[1], start=(*plan.tiers[1].start[:-1], extra)))


def copies_in_another_order(plan: LoopPlan) -> LoopPlan | None:
    """Move the first copy of a pass to its end."""
    tier = plan.top
    return with_tier(plan, 0, replace(tier, copies=(*tier.copies[1:], tier.copies[0])))


def released_too_early(plan: LoopPlan) -> LoopPlan | None:
    """Make the released counts disagree with the copies."""
    released = tuple(count + 1 for count in plan.top.released)
    return with_tier(plan, 0, replace(plan.top, released=released))


def ring_a_tile_too_large(plan: LoopPlan) -> LoopPlan | None:
    """Make the device's ring exceed its budget by a tile."""
    return with_tier(plan, 0, replace(plan.top, nbytes=plan.top.nbytes + 3 * TILE))


def address_outside(plan: LoopPlan) -> LoopPlan | None:
    """Write a copy outside the range that the plan declares."""
    return with_tier(plan, 0, replace(plan.top, nbytes=plan.top.nbytes - PAGE))


TILE = 2 * PAGE
MUTANTS = [
    one_arrival_less,
    freed_a_step_early,
    event_of_the_pass_before,
    event_of_the_pass_after,
    ring_slot_freed_early,
    read_not_awaited,
    read_of_the_pass_before,
    address_off_by_a_page,
    source_off_by_a_page,
    last_copy_left_out,
    resident_left_out,
    residents_overlap,
    resident_in_both_memories,
    copies_in_another_order,
    released_too_early,
    ring_a_tile_too_large,
    address_outside,
]

LOOPS = {
    "plain": plain([[4, 3, 5]] * 12),
    "training": there_and_back(plain([[4, 3, 5]] * 12)),
}
BUDGETS = with_device(60, 40)


def planned(name: str) -> LoopPlan:
    plan = plan_loop(LOOPS[name], BUDGETS, SPEED, TILE)
    assert plan is not None
    return plan


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
@pytest.mark.parametrize("name", LOOPS)
def test_verify_seeded_fault_raises(name: str, mutant: Mutant) -> None:
    plan = planned(name)
    verify(plan, BUDGETS)
    faulty = mutant(plan)
    assert faulty is not None
    assert faulty != plan
    with pytest.raises(AssertionError):
        verify(faulty, BUDGETS)


SINGLE = [one_arrival_less, freed_a_step_early, ring_slot_freed_early, read_not_awaited]
"""Faults that are noticed wherever each occurs alone."""


@pytest.mark.parametrize("level", [0, 1])
def test_verify_one_wait_too_short_raises(level: int) -> None:
    """Shorten each wait that is already minimal by one user."""
    plan = planned("plain")
    copies = plan.tiers[level].copies
    noticed = 0
    for number, copy in enumerate(copies):
        before = copies[number - 1].after - (0 if number else len(plan.tiers[level].released))
        if copy.after == before:
            continue  # it waits several times in a row for the same user

        def change(here: int, each: TileCopy, number: int = number) -> TileCopy:
            return replace(each, after=each.after - 1) if here == number else each

        with pytest.raises(AssertionError):
            verify(with_copies(plan, level, change), BUDGETS)
        noticed += 1
    assert noticed > 3


def test_verify_budget_too_small_raises() -> None:
    """Give each tier a tile less than the plan takes."""
    plan = planned("plain")
    for tier in plan.tiers:
        budgets: dict[Tier, int | None] = {**BUDGETS, tier.tier: tier.nbytes}
        verify(plan, budgets)
        with pytest.raises(AssertionError, match="above its budget"):
            verify(plan, {**budgets, tier.tier: tier.nbytes - TILE})


@pytest.mark.parametrize(
    "mutant",
    [one_arrival_less, event_of_the_pass_after, address_off_by_a_page],
    ids=lambda mutant: str(mutant.__name__),
)
def test_verify_faults_in_random_loops_raise(mutant: Mutant) -> None:
    noticed = 0
    for seed in range(by_lane(15, 150)):
        case: Case = drawn(seed)
        plan = case.plan()
        if plan is None or not plan.top.copies:
            continue
        faulty = mutant(plan)
        assert faulty is not None
        with pytest.raises(AssertionError):
            verify(faulty, case.budgets)
        noticed += 1
    assert noticed > 3
