"""Room with a budget of its own.

Each tier is a pool. Host memory has a second one beside it: there copies of shared groups are in
another process's memory, which allows them so many bytes, more or fewer at any time.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierstore.model.tiers import Tier

MORE_TO_SHARE = "start tierstore-serve with a larger --ram"
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

    def has_room(self, nbytes: int) -> bool:
        """Whether so many bytes more are within the limit."""
        return self.limit is None or self.used + nbytes <= self.limit

    def is_over(self) -> bool:
        """Whether more is used than there should be."""
        return self.limit is not None and self.used > self.limit
