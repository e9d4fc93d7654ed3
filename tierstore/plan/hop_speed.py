"""The bandwidth between neighbouring tiers, and the bytes that may be in flight at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tierstore.model import shares

IN_FLIGHT = 32 << 20
"""Bytes in flight that keep a hop busy while none of its copies are ending.

More would only occupy space earlier.
"""
PREFETCHED_TIMES = 2
"""Multiplier of the bytes that may be in flight for groups that the caller prefetches."""

_REMEMBERED = 0.8


@dataclass(slots=True)
class HopSpeed:
    """One hop between neighbouring tiers: its copies in flight, and its measured bandwidth.

    `ending` of its `copies` are moving their last bytes, so the next copy may begin.
    """

    copies: int = 0
    ending: int = 0
    nbytes: int = 0
    free_at: float = 0.0
    _bytes: float = 0.0
    _seconds: float = 0.0

    def begin(self, nbytes: int) -> None:
        """Count a copy that was instructed."""
        self.copies += 1
        self.nbytes += nbytes

    def end(self, nbytes: int) -> None:
        """Count a copy that ended. Its time is passed to `measure`, now or later."""
        self.copies -= 1
        self.nbytes -= nbytes

    def measure(self, nbytes: int, began: float, ended: float, *, counts: bool = True) -> None:
        """Record that bytes moved between two times. `counts` is False if the copy failed."""
        # Copies share the hop: each takes the time since the previous one ended.
        seconds = ended - max(began, self.free_at)
        self.free_at = ended
        if counts and seconds > 0:
            self._bytes = _REMEMBERED * self._bytes + nbytes
            self._seconds = _REMEMBERED * self._seconds + seconds

    def most_bytes(self, budget: int | None, *, prefetched: bool) -> float:
        """Return the bytes that several copies to a tier of `budget` may have in flight.

        The limit is higher if the caller `prefetched` the next one.
        """
        share = math.inf if budget is None else budget // shares.IN_FLIGHT
        if prefetched:
            return PREFETCHED_TIMES * share
        return share if self.ending == self.copies else min(IN_FLIGHT, share)

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second; None before the first measurement."""
        return self._bytes / self._seconds if self._seconds else None
