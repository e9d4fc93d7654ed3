"""Memory that no group uses, freed once a model is gone."""

from __future__ import annotations

from collections.abc import Iterable

from tierstore.model.moves import Copy, Instruction, Reserve
from tierstore.tiers.assembly import StoreTiers


class IdleMemory:
    """Frees slots without a group, from `free` on until a group needs memory again.

    While models run, slots are reused, because allocation is slow: host memory has to be
    page-locked, and the device may have to finish work first. When a model is gone, no group will
    reuse its slots. All methods are parts of transactions.
    """

    def __init__(self, tiers: StoreTiers) -> None:
        self._tiers = [tier for tier in (tiers.device, tiers.host) if tier is not None]
        self.wanted = True

    def free(self) -> None:
        """Free memory without a group, now and after each eviction, until a group needs memory."""
        self.wanted = False
        for tier in self._tiers:
            tier.free_idle()

    def collect(self) -> None:
        """Free memory that outlived its group because of views, once those are gone."""
        for tier in self._tiers:
            if tier.detached.slots:
                tier.collect_detached()

    def note(self, instructions: Iterable[Instruction]) -> None:
        """Resume keeping memory for reuse if these instructions need any."""
        self.wanted = any(isinstance(each, Copy | Reserve) for each in instructions)
