"""A follower of random plans, with memory in which every byte is checked."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from tests.lanes import by_lane
from tests.plan.loops import Case, drawn
from tests.plan.test_loop_check import (
    freed_a_step_early,
    one_arrival_less,
    read_not_awaited,
    ring_slot_freed_early,
)
from tierstore.model.sizes import PAGE
from tierstore.plan.loop_follower import LoopFollower
from tierstore.plan.loop_plan import LoopPlan

UNIT = PAGE // 4
"""Bytes that one element of the memory below stands for."""


class Machine:
    """Tiers as arrays, and copies that take random times.

    The value of an element is its group and its place in the group. A copy under way has destroyed
    its target; it reads its source when it ends.
    """

    def __init__(self, plan: LoopPlan, chance: random.Random) -> None:
        self.follower = LoopFollower(plan)
        self.plan = plan
        self.memory = [np.full(tier.nbytes // UNIT, -1) for tier in plan.tiers]
        self.under_way: list[list[int]] = [[] for _ in plan.tiers]
        self._chance = chance
        for memory, tier in zip(self.memory, plan.tiers, strict=True):
            for each in tier.start:
                memory[each.address // UNIT :][: each.nbytes // UNIT] = self.value(
                    each.group, each.offset, each.nbytes
                )

    @staticmethod
    def value(group: int, offset: int, nbytes: int) -> np.ndarray:
        return group * 1_000_000 + np.arange(offset // UNIT, (offset + nbytes) // UNIT)

    def begin_copy(self, level: int) -> bool:
        copy = self.follower.next_copy(level)
        if copy is None:
            return False
        self.under_way[level].append(self.follower.begun[level])
        self.follower.copy_begun(level)
        self.memory[level][copy.target // UNIT :][: copy.nbytes // UNIT] = -1
        return True

    def end_copy(self, level: int) -> bool:
        if not self.under_way[level]:
            return False
        tier = self.plan.tiers[level]
        copy = tier.copies[self.under_way[level].pop(0) % len(tier.copies)]
        value = self.value(copy.group, copy.offset, copy.nbytes)
        if copy.source is not None:
            value = self.memory[level + 1][copy.source // UNIT :][: copy.nbytes // UNIT].copy()
        self.memory[level][copy.target // UNIT :][: copy.nbytes // UNIT] = value
        self.follower.copy_ended(level)
        return True

    def run_step(self) -> bool:
        """Run the next step if possible. Asserts that its groups are there, before and after."""
        follower = self.follower
        if follower.ended[0] < follower.arrivals:
            return False
        number = follower.steps % len(self.plan.steps)
        step, planned = self.plan.loop.steps[number], self.plan.steps[number]
        for _ in range(2):
            for group, address in zip(step.groups, planned.addresses, strict=True):
                nbytes = self.plan.loop.sizes[group]
                found = self.memory[0][address // UNIT :][: nbytes // UNIT]
                assert (found == self.value(group, 0, nbytes)).all(), f"group {group} is absent"
            self.do_something(5)
        follower.step_ended()
        return True

    def do_something(self, times: int) -> None:
        for _ in range(times):
            level = self._chance.randrange(len(self.memory))
            self._chance.choice([self.begin_copy, self.end_copy])(level)

    def run(self, steps: int) -> None:
        stuck = 0
        while self.follower.steps < steps:
            before = (self.follower.steps, *self.follower.begun, *self.follower.ended)
            self.do_something(self._chance.randrange(8))
            self.run_step()
            after = (self.follower.steps, *self.follower.begun, *self.follower.ended)
            stuck = stuck + 1 if before == after else 0
            assert stuck < 1000, "no copy may begin after the end"


def plans(count: int) -> list[tuple[int, Case, LoopPlan]]:
    found = [(seed, case, case.plan()) for seed in range(count) for case in [drawn(seed)]]
    return [(seed, case, plan) for seed, case, plan in found if plan is not None]


def test_follower_in_any_interleaving_finds_every_group() -> None:
    moved = 0
    for seed, _, plan in plans(by_lane(60, 400, 5000)):
        machine = Machine(plan, random.Random(seed))
        machine.run(4 * len(plan.steps))
        moved += machine.follower.begun[0]
    assert moved > 1000


def test_follower_reads_ahead_into_the_next_pass() -> None:
    """Begin copies of the next pass as soon as their space is free."""
    ahead = 0
    for _, _, plan in plans(60):
        machine = Machine(plan, random.Random(0))
        while machine.follower.steps < len(plan.steps):
            while any([machine.begin_copy(level) for level in range(len(plan.tiers))]) or any(
                [machine.end_copy(level) for level in range(len(plan.tiers))]
            ):
                pass
            machine.run_step()
        ahead += machine.follower.begun[0] > len(plan.top.copies)
    assert ahead > 10


@pytest.mark.parametrize(
    "mutant", [freed_a_step_early, one_arrival_less, read_not_awaited, ring_slot_freed_early]
)
def test_follower_of_a_broken_plan_reports_it(
    mutant: Callable[[LoopPlan], LoopPlan | None],
) -> None:
    """Check the control: the machine notices a wrong plan."""
    noticed = 0
    for seed, _, plan in plans(60):
        if len(plan.tiers) == 2 and all(tier.copies for tier in plan.tiers):
            broken = mutant(plan)
            assert broken is not None
            try:
                Machine(broken, random.Random(seed)).run(4 * len(plan.steps))
            except AssertionError:
                noticed += 1
    assert noticed > 3
