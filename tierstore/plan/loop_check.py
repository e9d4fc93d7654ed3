"""Verifies the plan of a loop, independently of the planner. For tests.

`verify` executes a plan for some passes as its follower would, using only the plan's rules and a
model of each tier's memory, which knows the bytes of each group by address. The rules do not say
when a copy is made: as soon as it may be, or when something waits for it. So the plan is executed
with every combination of early and late tiers. A missing wait shows in one of them: the copy that
should wait is early, and the one that it should wait for is late.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product

from tierstore.model.tiers import Tier
from tierstore.plan.loop_plan import LoopPlan, Resident, TierPlan

PASSES = 3
"""Passes to execute. The first starts with empty rings; the second must end like the third."""


def verify(plan: LoopPlan, budgets: Mapping[Tier, int | None]) -> None:
    """Assert the invariants of a plan.

    - Each tier is within its budget (bytes; None: no limit), and each address within its tier.
    - Each group of a step is complete at its planned address from the step's beginning to its end.
    - The source of each copy is complete, and the bytes that it overwrites were used.
    - No copy waits for something that waits for it.
    - The memory of each tier has the same contents at the end of each pass.
    - A group that stays on the fastest tier for good is on no other tier.

    Raises AssertionError.
    """
    for tier in plan.tiers:
        budget = budgets[tier.tier]
        _require(budget is None or tier.nbytes <= budget, f"{tier.tier} is above its budget")
        spans = [(copy.target, copy.nbytes) for copy in tier.copies]
        spans += [(resident.address, resident.nbytes) for resident in tier.start]
        inside = all(start >= 0 and start + nbytes <= tier.nbytes for start, nbytes in spans)
        _require(inside, f"an address is outside {tier.tier}")
        _require_order(tier)
    _require_one_copy(plan.tiers)
    for eager in product((False, True), repeat=len(plan.tiers)):
        _Walk(plan, eager).run()


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise AssertionError(problem)


def _require_order(tier: TierPlan) -> None:
    """Require that `released` agrees with the copies, and that copies wait in order."""
    afters, users = [copy.after for copy in tier.copies], len(tier.released)
    two = [*afters, *(after + users for after in afters)]
    _require(all(a <= b for a, b in pairwise(two)), f"a copy to {tier.tier} overtakes another")
    released = tuple(sum(after <= user for after in two) for user in range(users))
    _require(released == tier.released, f"`released` of {tier.tier} disagrees with its copies")


def _require_one_copy(tiers: Sequence[TierPlan]) -> None:
    """Require that a group which stays on the fastest tier is on no other."""
    stays: set[int] = set()
    for tier in tiers:
        started, copied = {r.group for r in tier.start}, {copy.group for copy in tier.copies}
        _require(
            not stays & (started | copied), f"{tier.tier} has a group that stays on a faster tier"
        )
        if tier is tiers[0]:
            stays = started - copied


def _tile_by_tile(tier: TierPlan) -> Iterator[Resident]:
    """Yield the contents at the start of a pass, in the tiles that other passes copy."""
    tiles: dict[int, set[tuple[int, int]]] = {}
    for copy in tier.copies:
        tiles.setdefault(copy.group, set()).add((copy.offset, copy.nbytes))
    for each in tier.start:
        for offset, nbytes in tiles.get(each.group, {(each.offset, each.nbytes)}):
            yield Resident(each.group, offset, nbytes, each.address + offset - each.offset)


class _Memory:
    """Model of one tier's memory: the bytes of each group, by address."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._unused: set[int] = set()  # starts of spans that were not used yet
        self.spans: list[tuple[int, int, int, int]] = []  # start, stop, group, offset

    def write(self, start: int, nbytes: int, group: int, offset: int) -> bool:
        """Write bytes of a group. Every span they touch is invalid afterwards.

        Returns whether all of those spans had been used.
        """
        first = bisect_left(self._starts, start)
        if first and self.spans[first - 1][1] > start:
            first -= 1
        last = bisect_left(self._starts, start + nbytes)
        unused = self._unused.intersection(self._starts[first:last])
        self._unused -= unused
        self._starts[first:last] = [start]
        self.spans[first:last] = [(start, start + nbytes, group, offset)]
        self._unused.add(start)
        return not unused

    def use(self, start: int, nbytes: int, group: int, offset: int) -> bool:
        """Mark these bytes as used. Returns `has`."""
        first, last = bisect_left(self._starts, start), bisect_left(self._starts, start + nbytes)
        self._unused.difference_update(self._starts[first:last])
        return self.has(start, nbytes, group, offset)

    def has(self, start: int, nbytes: int, group: int, offset: int) -> bool:
        """Return whether these bytes of a group are all at this address."""
        number = max(bisect_left(self._starts, start + 1) - 1, 0)
        here, stop = start, start + nbytes
        for first, last, of, at in self.spans[number:]:
            if here >= stop:
                break
            if not first <= here < last or of != group or at + here - first != offset:
                return False
            offset += last - here
            here = last
        return here >= stop


class _Walk:
    """One execution of a plan. Copies into `eager` tiers are made as soon as they may be."""

    def __init__(self, plan: LoopPlan, eager: Sequence[bool]) -> None:
        self._plan = plan
        self._eager = eager
        self._steps = 0  # that have ended
        self._ended = [0] * len(plan.tiers)  # copies
        self._memory = [_Memory() for _ in plan.tiers]
        for memory, tier in zip(self._memory, plan.tiers, strict=True):
            for each in _tile_by_tile(tier):
                memory.write(each.address, each.nbytes, each.group, each.offset)
            whole = (memory.has(r.address, r.nbytes, r.group, r.offset) for r in tier.start)
            _require(all(whole), f"the start contents of {tier.tier} overlap")

    def run(self) -> None:
        """Execute some passes."""
        books = []
        for number in range(PASSES):
            for step in range(len(self._plan.steps)):
                self._step(number, step)
            for memory, tier in zip(self._memory, self._plan.tiers, strict=True):
                there = (memory.has(r.address, r.nbytes, r.group, r.offset) for r in tier.start)
                as_begun = any(self._eager) or all(there)  # otherwise copies may have run ahead
                _require(as_begun, f"a pass does not end with the start contents of {tier.tier}")
            ahead = [
                ended - (number + 1) * len(tier.copies)
                for ended, tier in zip(self._ended, self._plan.tiers, strict=True)
            ]
            books.append((ahead, [list(memory.spans) for memory in self._memory]))
        _require(books[-1] == books[-2], "a pass does not end like the previous one")

    def _step(self, passed: int, number: int) -> None:
        planned, step = self._plan.steps[number], self._plan.loop.steps[number]
        self._run_ahead()
        self._wait(0, passed * len(self._plan.top.copies) + planned.arrivals)
        self._check_groups(number, "begins")
        self._run_ahead()
        self._check_groups(number, "computes")
        self._steps += 1
        _require(len(planned.addresses) == len(step.groups), "a group has no address")

    def _check_groups(self, number: int, when: str) -> None:
        loop, step = self._plan.loop, self._plan.loop.steps[number]
        for group, address in zip(step.groups, self._plan.steps[number].addresses, strict=True):
            whole = self._memory[0].use(address, loop.sizes[group], group, 0)
            _require(whole, f"group {group} is not resident when step {step.unit!r} {when}")

    def _run_ahead(self) -> None:
        """Make all copies into eager tiers that may be made."""
        moved = True
        while moved:
            moved = False
            for level, tier in enumerate(self._plan.tiers):
                limit = (PASSES + 2) * len(tier.copies)
                while self._eager[level] and self._ended[level] < limit and self._may(level):
                    self._make(level)
                    moved = True

    def _wait(self, level: int, count: int) -> None:
        """Make copies until `count` copies into a tier have ended."""
        while self._ended[level] < count:
            if self._may(level):
                self._make(level)
                self._run_ahead()
                continue
            ready, below = self._next(level)[2], level + 1
            late = ready is not None and self._ended[below] <= ready
            _require(late, f"a copy to {self._plan.tiers[level].tier} waits for ever")
            self._wait(below, 1 + (ready or 0))

    def _next(self, level: int) -> tuple[int, int, int | None]:
        """Return the next copy's number in its pass, and the user and copy that it waits for.

        The latter two are counted from the first pass.
        """
        tier = self._plan.tiers[level]
        passed, number = divmod(self._ended[level], len(tier.copies))
        copy = tier.copies[number]
        ready = copy.source_ready
        if ready is not None:
            ready += passed * len(self._plan.tiers[level + 1].copies)
        return number, passed * len(tier.released) + copy.after, ready

    def _may(self, level: int) -> bool:
        _, after, ready = self._next(level)
        used = self._ended[level - 1] if level else self._steps
        return after < used and (ready is None or self._ended[level + 1] > ready)

    def _make(self, level: int) -> None:
        tier = self._plan.tiers[level]
        copy = tier.copies[self._next(level)[0]]
        if level + 1 < len(self._plan.tiers):
            _require(copy.source is not None, f"a copy to {tier.tier} skips a tier")
        if copy.source is not None:
            source = self._memory[level + 1]
            whole = source.use(copy.source, copy.nbytes, copy.group, copy.offset)
            _require(whole, f"a copy of group {copy.group} to {tier.tier} reads other bytes")
        used = self._memory[level].write(copy.target, copy.nbytes, copy.group, copy.offset)
        _require(used, f"a copy of group {copy.group} to {tier.tier} overwrites bytes not used yet")
        self._ended[level] += 1
