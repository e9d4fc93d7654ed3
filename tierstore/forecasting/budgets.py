"""Budgets as typed by a user, and in bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tierstore.model.formatting import Units, at_least, size
from tierstore.model.sizes import PAGE, is_auto, parse_size, ram_bytes
from tierstore.model.tiers import Tier

Budgets = dict[Tier, int | None]

_BINARY = re.compile(r"[kmgt]ib\s*$", re.IGNORECASE)
_DECIMAL = re.compile(r"[kmgt]b\s*$", re.IGNORECASE)


@dataclass(frozen=True)
class Budget:
    """A budget: the text as typed, and its bytes in whole pages, as in a store.

    The text determines the units of other sizes in the output: powers of 1000 for `130MB`, of 1024
    for `128MiB`.
    """

    text: str
    nbytes: int

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Parse a `ram_budget` as a store does; `auto` is evaluated on this machine."""
        nbytes = ram_bytes(text) if is_auto(text) else parse_size(text)
        return cls(text.strip(), nbytes // PAGE * PAGE)

    @classmethod
    def at_least(cls, nbytes: int, units: Units = Units.DECIMAL) -> Budget:
        """Return a round budget of at least `nbytes` bytes."""
        return cls.parse(at_least(nbytes, units))

    @property
    def units(self) -> Units | None:
        """Units of the text; None for `50%` and `auto`."""
        if _BINARY.search(self.text):
            return Units.BINARY
        return Units.DECIMAL if _DECIMAL.search(self.text) else None

    def formatted(self, units: Units) -> str:
        """Return the text, followed by the size if the text has no units."""
        return self.text if self.units else f"{self.text} ({size(self.nbytes, units)})"


def by_tier(ram_budget: int, device_budget: int | None) -> Budgets:
    """Return bytes by tier. Without an accelerator, weights are used in host memory."""
    budgets: Budgets = {Tier.HOST: ram_budget, Tier.DISK: None}
    return budgets if device_budget is None else {Tier.DEVICE: device_budget, **budgets}
