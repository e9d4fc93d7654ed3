"""Random loops, small enough to check by hand, and budgets for them."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tierstore.model.sizes import PAGE
from tierstore.model.tiers import Tier
from tierstore.plan.loop_plan import Loop, LoopPlan, Step
from tierstore.plan.loop_planner import plan_loop

TO_HOST = (Tier.DISK, Tier.HOST)
TO_DEVICE = (Tier.HOST, Tier.DEVICE)
SPEED = {TO_HOST: 100.0 * PAGE, TO_DEVICE: 400.0 * PAGE}
"""Bytes per second."""


@dataclass(frozen=True)
class Case:
    """A loop, the budgets it is planned for, and the bytes of a tile."""

    loop: Loop
    budgets: dict[Tier, int | None]
    tile: int

    def plan(self) -> LoopPlan | None:
        """Return its plan, if there is one."""
        return plan_loop(self.loop, self.budgets, SPEED, self.tile)


def on_host(pages: int) -> dict[Tier, int | None]:
    return {Tier.HOST: pages * PAGE, Tier.DISK: None}


def with_device(device: int, host: int) -> dict[Tier, int | None]:
    return {Tier.DEVICE: device * PAGE, **on_host(host)}


def plain(pages: list[list[int]], seconds: float = 0.05) -> Loop:
    """Return a loop of units; each has its own groups, with these numbers of pages."""
    sizes = [PAGE * nbytes for unit in pages for nbytes in unit]
    steps, first = [], 0
    for number, unit in enumerate(pages):
        steps.append(Step(f"u{number}", tuple(range(first, first + len(unit))), seconds))
        first += len(unit)
    return Loop(tuple(steps), tuple(sizes))


def there_and_back(loop: Loop) -> Loop:
    """Return a forward and a backward pass."""
    return Loop((*loop.steps, *reversed(loop.steps)), loop.sizes)


def in_phases(loop: Loop, times: int) -> Loop:
    """Return `times` passes of the first half of a loop, then as many of the second."""
    half = len(loop.steps) // 2
    steps = [*loop.steps[:half] * times, *loop.steps[half:] * times]
    return Loop(tuple(steps), loop.sizes)


def any_order(loop: Loop, chance: random.Random) -> Loop:
    """Return its units in random order, some repeated, and some that also use groups of others."""
    steps = list(chance.choices(loop.steps, k=chance.randint(1, 2 * len(loop.steps))))
    found = []
    for step in steps:
        other = chance.choice(loop.steps).groups if chance.random() < 0.3 else ()
        groups = tuple(dict.fromkeys((*step.groups, *other)))
        found.append(Step(step.unit, groups, chance.choice([0.0, 0.01, 0.3])))
    return Loop(tuple(found), loop.sizes)


def drawn(seed: int) -> Case:
    """Return a loop of one of several kinds, with budgets from too small to ample."""
    chance = random.Random(seed)
    units = [
        [chance.randint(1, 9) for _ in range(chance.randint(1, 4))]
        for _ in range(chance.randint(1, 9))
    ]
    loop = plain(units, chance.choice([0.0, 0.01, 0.1, 1.0]))
    kind = chance.choice(["plain", "training", "phases", "any"])
    if kind == "training":
        loop = there_and_back(loop)
    elif kind == "phases" and len(units) > 1:
        loop = in_phases(loop, chance.randint(2, 4))
    elif kind == "any":
        loop = any_order(loop, chance)
    pages = sum(loop.sizes) // PAGE
    largest = max(loop.nbytes(step.groups) for step in loop.steps) // PAGE
    budgets = on_host(chance.randint(largest, pages + 5))
    if chance.random() < 0.8:
        budgets = with_device(chance.randint(largest, pages + 5), chance.randint(1, pages + 5))
    return Case(loop, budgets, PAGE * chance.choice([1, 2, 4]))
