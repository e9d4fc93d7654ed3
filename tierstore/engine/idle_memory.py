"""Memory that no group has, once a model is gone."""

from __future__ import annotations

from collections.abc import Iterable

from tierstore.model.moves import Copy, Instruction, Reserve
from tierstore.tiers.assembly import StoreTiers


class IdleMemory:
    """Slots that wait for the next group: given back from `give_back` on, until there is one.

    While models run, slots go from one group to the next, as to make memory is slow: host memory
    is page-locked, and a device may have to be waited for. When a model is gone, no group follows.
    All methods are parts of transactions.
    """

    def __init__(self, tiers: StoreTiers) -> None:
        self._tiers = [tier for tier in (tiers.device, tiers.host) if tier is not None]
        self.wanted = True

    def give_back(self) -> None:
        """Give memory back that no group has, now, and what is given up before more is wanted."""
        self.wanted = False
        for tier in self._tiers:
            tier.give_back_idle()

    def collect(self) -> None:
        """Give memory back that was left to views, once these are gone."""
        for tier in self._tiers:
            if tier.left.slots:
                tier.collect_left()

    def note(self, instructions: Iterable[Instruction]) -> None:
        """Keep memory again, if these instructions want any."""
        self.wanted = any(isinstance(each, Copy | Reserve) for each in instructions)
