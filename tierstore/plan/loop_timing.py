"""Times the passes of a loop plan on a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence

from tierstore.plan.loop_plan import LoopPlan, TierPlan


class PlanClock:
    """Simulates a plan pass by pass. Times are seconds since the first step could begin.

    `bandwidth` has the bytes per second of copies into each tier of the plan; None: they take no
    time. Copies into one tier run one after the other, as on a busy disk or link.
    """

    def __init__(self, plan: LoopPlan, bandwidth: Sequence[float | None]) -> None:
        self.plan = plan
        self.stalled = 0.0
        self._step_ends: list[float] = []
        self._channels = [
            _CopyQueue(tier, speed) for tier, speed in zip(plan.tiers, bandwidth, strict=True)
        ]

    def run_pass(self) -> float:
        """Simulate one more pass. Returns the time at which it ends."""
        plan, top, ends = self.plan, self._channels[0], self._step_ends
        before = len(ends) // len(plan.steps) * len(plan.top.copies)
        for step, planned in zip(plan.loop.steps, plan.steps, strict=True):
            now = ends[-1] if ends else 0.0
            self._copy_up_to(0, before + planned.arrivals)
            ready = max(now, top.ends[before + planned.arrivals - 1]) if planned.arrivals else now
            self.stalled += ready - now
            ends.append(ready + step.seconds)
        return ends[-1]

    def _copy_up_to(self, level: int, count: int) -> None:
        """Simulate the first `count` copies into a tier, each as early as possible."""
        channel = self._channels[level]
        users = self._channels[level - 1] if level else None
        use_ends, uses = (
            (self._step_ends, len(self.plan.steps))
            if users is None
            else (users.ends, len(users.tier.copies))
        )
        below = self._channels[level + 1] if level + 1 < len(self._channels) else None
        copies = channel.tier.copies
        while len(channel.ends) < count:
            passed, number = divmod(len(channel.ends), len(copies))
            copy = copies[number]
            after = passed * uses + copy.after
            begin = use_ends[after] if after >= 0 else 0.0
            if channel.ends:
                begin = max(begin, channel.ends[-1])
            if below is not None and copy.source_ready is not None:
                ready = passed * len(below.tier.copies) + copy.source_ready
                if ready >= 0:
                    self._copy_up_to(level + 1, ready + 1)
                    begin = max(begin, below.ends[ready])
            channel.ends.append(begin + copy.nbytes * channel.seconds_per_byte)


class _CopyQueue:
    """The copies into one tier, with the times at which they ended so far."""

    def __init__(self, tier: TierPlan, bandwidth: float | None) -> None:
        self.tier = tier
        self.seconds_per_byte = 1 / bandwidth if bandwidth else 0.0
        self.ends: list[float] = []


def seconds_per_pass(
    plan: LoopPlan, bandwidth: Sequence[float | None], *, warm_up: int = 2, passes: int = 2
) -> float:
    """Return the mean seconds of `passes` passes, after `warm_up` passes."""
    clock = PlanClock(plan, bandwidth)
    for _ in range(warm_up):
        begin = clock.run_pass()
    for _ in range(passes):
        end = clock.run_pass()
    return (end - begin) / passes
