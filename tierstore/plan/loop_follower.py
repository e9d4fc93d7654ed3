"""Where the follower of a loop's plan stands: what the next step waits for, which copies may begin.

It keeps counts and decides nothing: the three rules of `tierstore.plan.loop_plan` turn counts into
answers. Whoever has the memory tells it of each step that ends and of each copy that begins or
ends, in that order for each tier. Steps and copies are counted from when the plan was entered, so
number k of a tier with n copies is copy k % n of pass k // n.
"""

from __future__ import annotations

from tierstore.plan.loop_plan import LoopPlan, TierPlan, TileCopy


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
    def arrivals(self) -> int:
        """Copies into the fastest tier that have to end before the next step computes."""
        passed, number = divmod(self.steps, len(self._arrivals))
        return passed * self._copies_up + self._arrivals[number]

    def step_ended(self) -> None:
        """The next step is over: a device has all its work queued, and an event marks its end."""
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


def _released_by_the_pass_before(tier: TierPlan) -> int:
    """Copies of a pass that wait for nobody in it."""
    return tier.released[-1] - len(tier.copies) if tier.released else len(tier.copies)
