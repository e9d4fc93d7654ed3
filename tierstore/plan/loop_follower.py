"""Where the follower of a loop's plan stands: what the next step waits for, which copies may begin.

It keeps counts and decides nothing: the three rules of `tierstore.plan.loop_plan` turn counts into
answers. Whoever has the memory tells it of each step that ends and of each copy that begins or
ends, in that order for each tier. Steps and copies are counted from when the plan was entered, so
number k of a tier with n copies is copy k % n of pass k // n.

A follower may be left at any point. `intact` then tells which bytes are where: what was there and
no copy has begun to overwrite.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from tierstore.plan.loop_plan import LoopPlan, PlannedStep, Resident, Step, TierPlan, TileCopy


class LoopFollower:
    """The counts of a plan that is being followed. It needs a lock where several threads use it.

    `steps` have ended. `begun` and `ended` have, for each tier of the plan, the copies into it of
    which that is true.
    """

    def __init__(self, plan: LoopPlan) -> None:
        self.plan = plan
        self.steps = 0
        self.begun = [0] * len(plan.tiers)
        self.ended = [0] * len(plan.tiers)
        self._arrivals = [step.arrivals for step in plan.steps]
        self._copies_up = len(plan.top.copies)
        self._initial = [_released_by_the_pass_before(tier) for tier in plan.tiers]

    # Steps -------------------------------------------------------------------------------------

    @property
    def step(self) -> Step:
        """The step that comes next."""
        return self.plan.loop.steps[self.steps % len(self.plan.steps)]

    @property
    def planned(self) -> PlannedStep:
        """Where the groups of that step are."""
        return self.plan.steps[self.steps % len(self.plan.steps)]

    @property
    def arrivals(self) -> int:
        """Copies into the fastest tier that have to end before that step computes."""
        passed, number = divmod(self.steps, len(self._arrivals))
        return passed * self._copies_up + self._arrivals[number]

    def step_ended(self) -> None:
        """That step is over: on a device, all its work is queued, and an event marks its end."""
        self.steps += 1

    # Copies ------------------------------------------------------------------------------------

    def next_copy(self, level: int) -> TileCopy | None:
        """The next copy into a tier, if it may begin now; it begins with `copy_begun`."""
        number = self.begun[level]
        if number >= self.released(level):
            return None
        passed, number = divmod(number, len(self.plan.tiers[level].copies))
        copy = self.plan.tiers[level].copies[number]
        if copy.source_ready is not None:
            below = self.plan.tiers[level + 1]
            if self.ended[level + 1] <= passed * len(below.copies) + copy.source_ready:
                return None
        return copy

    def released(self, level: int) -> int:
        """Copies into a tier that may have begun by now, as far as what they overwrite goes."""
        tier = self.plan.tiers[level]
        if not tier.copies:
            return 0
        passed, user = divmod(self.ended[level - 1] if level else self.steps, len(tier.released))
        released = tier.released[user - 1] if user else self._initial[level]
        return passed * len(tier.copies) + released

    def copy_begun(self, level: int) -> None:
        """The copy that `next_copy` told begins: its target is broken from now on."""
        self.begun[level] += 1

    def copy_ended(self, level: int) -> None:
        """The first of the copies into a tier that are under way has ended."""
        self.ended[level] += 1

    # What is where -----------------------------------------------------------------------------

    def intact(self, level: int) -> list[Resident]:
        """The bytes that are whole on a tier, by address. Copies under way have broken what they
        overwrite, and are not there yet."""
        tier = self.plan.tiers[level]
        found = _Spans(tier.start)
        number, count = self._first_that_matters(level), len(tier.copies)
        while number < self.begun[level]:
            copy = tier.copies[number % count]
            there = number < self.ended[level]
            found.write(Resident(copy.group, copy.offset, copy.nbytes, copy.target), there=there)
            number += 1
        return found.residents()

    def _first_that_matters(self, level: int) -> int:
        """Every pass of copies writes to the same addresses: what the last two have left is all."""
        count = len(self.plan.tiers[level].copies)
        return max(self.begun[level] // count - 2, 0) * count if count else 0


def _released_by_the_pass_before(tier: TierPlan) -> int:
    """Copies of a pass that wait for nobody in it."""
    return tier.released[-1] - len(tier.copies) if tier.released else len(tier.copies)


class _Spans:
    """Bytes of groups by address, none of which overlap."""

    def __init__(self, start: tuple[Resident, ...]) -> None:
        self._found = sorted(start, key=lambda each: each.address)
        self._addresses = [each.address for each in self._found]

    def write(self, new: Resident, *, there: bool) -> None:
        """Bytes arrive, or are about to: others that they touch are broken, and cut."""
        stop = new.address + new.nbytes
        first = bisect_left(self._addresses, new.address)
        if first and _end(self._found[first - 1]) > new.address:
            first -= 1
        last = bisect_left(self._addresses, stop)
        parts = [*_outside(self._found[first:last], new.address, stop), *([new] if there else [])]
        self._found[first:last] = sorted(parts, key=lambda each: each.address)
        self._addresses[first:last] = [
            each.address for each in self._found[first : first + len(parts)]
        ]

    def residents(self) -> list[Resident]:
        return self._found


def _end(resident: Resident) -> int:
    return resident.address + resident.nbytes


def _outside(residents: list[Resident], start: int, stop: int) -> Iterator[Resident]:
    """The parts of residents that are not within these addresses."""
    for each in residents:
        if each.address < start:
            yield Resident(each.group, each.offset, start - each.address, each.address)
        if _end(each) > stop:
            gone = stop - each.address
            yield Resident(each.group, each.offset + gone, each.nbytes - gone, stop)
