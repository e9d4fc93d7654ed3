"""How fast bytes move between neighbouring tiers, and how many may be on their way at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tierstore.model import shares

IN_FLIGHT = 32 << 20
"""Bytes on their way over one hop that keep it busy, while none of its copies are ending. More
would only take room earlier."""
NAMED_TIMES = 2
"""How many times as many bytes may be on their way of what the caller itself says comes."""

_REMEMBERED = 0.8


@dataclass(slots=True)
class HopSpeed:
    """One way between neighbouring tiers: what moves on it now, and how fast it was.

    Of its `copies`, some are `ending`: their last bytes move, and there is room for the next.
    """

    copies: int = 0
    ending: int = 0
    nbytes: int = 0
    free_at: float = 0.0
    _bytes: float = 0.0
    _seconds: float = 0.0

    def begin(self, nbytes: int) -> None:
        """A copy was instructed."""
        self.copies += 1
        self.nbytes += nbytes

    def end(self, nbytes: int) -> None:
        """A copy is over. `measure` says how long it took, now or later."""
        self.copies -= 1
        self.nbytes -= nbytes

    def measure(self, nbytes: int, began: float, ended: float, *, counts: bool = True) -> None:
        """So many bytes moved between these times. It `counts` unless they moved in vain."""
        # Copies share the hop: what one took is the time since the one before was done.
        seconds = ended - max(began, self.free_at)
        self.free_at = ended
        if counts and seconds > 0:
            self._bytes = _REMEMBERED * self._bytes + nbytes
            self._seconds = _REMEMBERED * self._seconds + seconds

    def most_bytes(self, budget: int | None, *, named: bool) -> float:
        """Bytes that may be on their way to a tier of `budget` at once, if there are several
        copies; more if the next one is `named` by the caller."""
        share = math.inf if budget is None else budget // shares.IN_FLIGHT
        if named:
            return NAMED_TIMES * share
        return share if self.ending == self.copies else min(IN_FLIGHT, share)

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second; None before the first measurement."""
        return self._bytes / self._seconds if self._seconds else None
