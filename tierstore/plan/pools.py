"""Pools: space with a budget.

Each tier is a pool. Host memory has a second one for shared groups, whose copies are in another
process's memory. That process sets their limit, and may change it at any time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tierstore.model.tiers import Tier

LARGER_ARENA = "start tierstore-serve with a larger --ram"
"""Advice if shared groups lack space."""


@dataclass(eq=False, slots=True)
class Pool:
    """Space on `tier`: `used` bytes of at most `limit` (None for no limit).

    The limit may fall below the bytes in use. Then there is no space, and idle copies are dropped.
    """

    tier: Tier
    limit: int | None
    shared: bool = False
    used: int = 0

    def advice(self, nbytes: int | None = None) -> str:
        """Return how to get more space (a limit of at least `nbytes` bytes)."""
        if self.shared:
            return LARGER_ARENA
        option = "ram_budget" if self.tier is Tier.HOST else f"{self.tier.name.lower()}_budget"
        if nbytes is None:
            return f"raise {option}"
        return f"raise {option} to at least {nbytes:,} bytes, or use smaller groups"

    def has_space(self, nbytes: int) -> bool:
        """Return whether `nbytes` more bytes are within the limit."""
        return self.limit is None or self.used + nbytes <= self.limit

    def over_limit(self) -> bool:
        """Return whether more bytes are used than the limit allows."""
        return self.limit is not None and self.used > self.limit


@dataclass(eq=False, slots=True)
class Sizes:
    """The size of each tier, for predictions.

    If there are `shared` groups (by number), the `allowed` bytes of them are added to the budget of
    `host`. The limits themselves remain separate: see `Pool`.
    """

    budgets: Mapping[Tier, int | None]
    host: Tier
    allowed: int = 0
    shared: set[int] = field(default_factory=set)

    def of(self, tier: Tier) -> int | None:
        """Return the bytes of `tier`; None for no limit."""
        budget = self.budgets[tier]
        if budget is None or not self.shared or tier is not self.host:
            return budget
        return budget + self.allowed
