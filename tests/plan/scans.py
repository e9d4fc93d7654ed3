"""Traces, and a carrier that delivers at once, for tests of the planner and its policies.

`python -m tests.plan.scans` reports the planner's and the policy's time per access.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from tests.plan.driver import driver_of
from tierstore.model.moves import Copy
from tierstore.model.tiers import Access, Tier
from tierstore.plan.policy import policy_named
from tierstore.plan.schedule import LearnedOrder


def cycle(groups: int, passes: int, prefix: str = "g") -> list[str]:
    """Return a scan of `groups` groups, `passes` times."""
    return [f"{prefix}{i}" for i in range(groups)] * passes


def prompts(count: int, encoder: int, blocks: int, steps: int) -> list[str]:
    """Return the keys of a text encoder, a denoising loop and a VAE, for several prompts."""
    once = [*cycle(encoder, 1, "te"), *cycle(blocks, steps, "u"), "vae"]
    return once * count


def two_experts(runs: int, blocks: int, steps: int) -> list[str]:
    """Return a loop over one expert's blocks, then over the other's."""
    return [*cycle(blocks, steps, "high"), *cycle(blocks, steps, "low")] * runs


def forward_backward(layers: int, passes: int) -> list[str]:
    """Return training passes, up and down: the last and the first layer are used twice in a row."""
    up = [f"g{i}" for i in range(layers)]
    return [*up, *reversed(up)] * passes


class Scan:
    """Uses groups one after another; every copy arrives at once. Counts bytes by move."""

    def __init__(
        self, sizes: Sequence[int], budgets: Mapping[Tier, int | None], policy: str = "next-use"
    ) -> None:
        schedule = LearnedOrder()
        self.planner = driver_of(budgets, policy_named(policy, schedule), schedule)
        self.keys = [f"g{i}" for i in range(len(sizes))]
        for key, size in zip(self.keys, sizes, strict=True):
            self.planner.register(key, size)
        self.moved: dict[tuple[Tier, Tier], int] = {}

    def use(self, key: str) -> None:
        self.planner.demand(key)
        self._carry()
        assert self.planner.lease(key, Access.READ), f"{key} is not resident"
        self._carry()
        self.planner.release(key, Access.READ)
        self._carry()

    def _carry(self) -> None:
        while copies := [i for i in self.planner.instructions() if isinstance(i, Copy)]:
            for copy in copies:
                way = (copy.src, copy.dst)
                self.moved[way] = self.moved.get(way, 0) + copy.nbytes
                self.planner.arrive(copy.group, copy.src, copy.dst)

    def read_by(self, order: Iterable[str]) -> int:
        """Return the bytes read from disk while the groups of `order` are used."""
        before = sum(n for (src, _), n in self.moved.items() if src is Tier.DISK)
        for key in order:
            self.use(key)
        return sum(n for (src, _), n in self.moved.items() if src is Tier.DISK) - before


def report_costs() -> None:
    """Print the time of an access in microseconds, with nothing to carry."""
    for policy in ("next-use", "lru"):
        for groups in (60, 300, 1000):
            scan = Scan([100] * groups, {Tier.HOST: 50 * groups, Tier.DISK: None}, policy)
            start = time.perf_counter()
            scan.read_by(scan.keys * 3)
            spent = (time.perf_counter() - start) / (3 * groups)
            print(f"{policy}, {groups} groups: {1e6 * spent:.0f} us per access")


if __name__ == "__main__":
    report_costs()
