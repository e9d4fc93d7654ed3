"""Room with a budget of its own.

Each tier is a pool. Host memory has a second one beside it: there copies of shared groups are in
another process's memory, which allows them so many bytes, more or fewer at any time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tierstore.model.tiers import Tier

LARGER_ARENA = "start tierstore-serve with a larger --ram"
"""What makes more room for what is shared."""


@dataclass(eq=False, slots=True)
class Pool:
    """So many bytes of `tier` may be `used` as `limit` says (None: any number).

    The limit may fall below what is used: then nothing has room, and what is idle has to go.
    """

    tier: Tier
    limit: int | None
    shared: bool = False
    used: int = 0

    def advice(self, nbytes: int | None = None) -> str:
        """How to make room (for a limit of so many bytes)."""
        if self.shared:
            return LARGER_ARENA
        option = "ram_budget" if self.tier is Tier.HOST else f"{self.tier.name.lower()}_budget"
        if nbytes is None:
            return f"raise {option}"
        return f"raise {option} to at least {nbytes:,} bytes, or use smaller groups"

    def has_room(self, nbytes: int) -> bool:
        """Whether so many bytes more are within the limit."""
        return self.limit is None or self.used + nbytes <= self.limit

    def is_over(self) -> bool:
        """Whether more is used than there should be."""
        return self.limit is not None and self.used > self.limit


@dataclass(eq=False, slots=True)
class Sizes:
    """How much there is of each tier, for who foresees what should come and stay.

    Where there are `shared` groups (by number), what is `allowed` of them counts as one with the
    budget of `host`. Each has a limit of its own nevertheless: see `Pool`.
    """

    budgets: Mapping[Tier, int | None]
    host: Tier
    allowed: int = 0
    shared: set[int] = field(default_factory=set)

    def of(self, tier: Tier) -> int | None:
        """All bytes of `tier`; None for no limit."""
        budget = self.budgets[tier]
        if budget is None or not self.shared or tier is not self.host:
            return budget
        return budget + self.allowed
