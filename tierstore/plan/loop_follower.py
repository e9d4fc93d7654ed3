"""The progress of a loop plan: what the next step waits for, and which copies may begin.

The follower only keeps counts; the three rules of `tierstore.plan.loop_plan` follow from them. The
owner of the memory reports each step that ends and each copy that begins or ends, in order for each
tier. Steps and copies are counted from when the plan was entered, so number k of a tier with n
copies is copy k % n of pass k // n.
"""

from __future__ import annotations

from tierstore.plan.loop_plan import LoopPlan, TierPlan, TileCopy


class LoopFollower:
    """Counts the progress of a plan. Several threads need a lock to use it.

    `steps` is the number of steps that have ended. `begun` and `ended` have the number of copies
    into each tier that have begun and ended.
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
        """Number of copies into the fastest tier that must end before the next step computes."""
        passed, number = divmod(self.steps, len(self._arrivals))
        return passed * self._copies_up + self._arrivals[number]

    def step_ended(self) -> None:
        """Count a step as ended: on a device, its work is queued and an event follows it."""
        self.steps += 1

    # Copies ------------------------------------------------------------------------------------

    def next_copy(self, level: int) -> TileCopy | None:
        """Return the next copy into a tier, if it may begin now. Call `copy_begun` to begin it."""
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
        """Return the number of copies into a tier whose targets may already be overwritten."""
        tier = self.plan.tiers[level]
        if not tier.copies:
            return 0
        passed, user = divmod(self.ended[level - 1] if level else self.steps, len(tier.released))
        released = tier.released[user - 1] if user else self._initial[level]
        return passed * len(tier.copies) + released

    def copy_begun(self, level: int) -> None:
        """Count the copy from `next_copy` as begun: its target is invalid from now on."""
        self.begun[level] += 1

    def copy_ended(self, level: int) -> None:
        """Count the oldest copy in flight into a tier as ended."""
        self.ended[level] += 1


def _released_by_the_pass_before(tier: TierPlan) -> int:
    """Return the number of a pass's copies that wait for no user in that pass."""
    return tier.released[-1] - len(tier.copies) if tier.released else len(tier.copies)
