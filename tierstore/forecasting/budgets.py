"""Budgets to try."""

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
    """A budget as it was written, and its bytes: whole pages, as a store has them.

    It is shown as it was written, and other sizes in units of the same kind: powers of 1000 after
    `130MB`, of 1024 after `128MiB`.
    """

    text: str
    nbytes: int

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Parse a `ram_budget` as a store does; `auto` is the store's rule, for this machine."""
        nbytes = ram_bytes(text) if is_auto(text) else parse_size(text)
        return cls(text.strip(), nbytes // PAGE * PAGE)

    @classmethod
    def at_least(cls, nbytes: int, units: Units = Units.DECIMAL) -> Budget:
        """Return a round budget of at least so many bytes."""
        return cls.parse(at_least(nbytes, units))

    @property
    def units(self) -> Units | None:
        """The units in which it was written; None for `50%` and `auto`."""
        if _BINARY.search(self.text):
            return Units.BINARY
        return Units.DECIMAL if _DECIMAL.search(self.text) else None

    def shown(self, units: Units) -> str:
        """Return the text, with the bytes if it does not say them itself."""
        return self.text if self.units else f"{self.text} ({size(self.nbytes, units)})"


def by_tier(ram_budget: int, device_budget: int | None) -> Budgets:
    """Return bytes by tier. Without an accelerator, weights are used in host memory."""
    budgets: Budgets = {Tier.HOST: ram_budget, Tier.DISK: None}
    return budgets if device_budget is None else {Tier.DEVICE: device_budget, **budgets}
