"""Budgets to try: how several are typed, and the units in which all sizes are told after it.

`plan` and `replay` have the same option, `--ram`, any number of times. What somebody typed is shown
as it was typed, and every other size in units of the same kind: powers of 1000 after `130MB`, of
1024 after `128MiB`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import click

from tierstore.cli import options, words
from tierstore.model.sizes import is_auto, ram_bytes
from tierstore.model.tiers import Tier

Budgets = dict[Tier, int | None]

COMFORTABLE = 3
"""So many of the largest groups should have room: one in use, one arriving, one beside."""

_BINARY = re.compile(r"[kmgt]ib\s*$", re.IGNORECASE)
_DECIMAL = re.compile(r"[kmgt]b\s*$", re.IGNORECASE)


@dataclass(frozen=True)
class Budget:
    """A budget as it was typed, and its bytes: whole pages, as a store has them."""

    text: str
    nbytes: int

    @property
    def units(self) -> words.Units | None:
        """The units in which it was typed; None if in none, as `50%` and `auto`."""
        if _BINARY.search(self.text):
            return words.Units.BINARY
        return words.Units.DECIMAL if _DECIMAL.search(self.text) else None

    def shown(self, units: words.Units) -> str:
        """What was typed, and how much that is where it does not say so itself."""
        return self.text if self.units else f"{self.text} ({words.size(self.nbytes, units)})"


def ram(text: str) -> Budget:
    """`ram_budget` as a store takes it. `auto` is the same rule, for this machine as it is now."""
    text = text.strip()
    nbytes = ram_bytes(text) if is_auto(text) else options.parsed(text)
    return Budget(text, options.whole_pages(nbytes, text))


def device(text: str) -> Budget:
    """`device_budget`, in bytes only: nobody knows here how much memory the device has."""
    if is_auto(text):
        raise click.BadParameter(
            "'auto' is half of what is free on the accelerator when the store opens, and this "
            "command does not ask it. Write bytes: half of the free memory that `nvidia-smi` "
            "shows, such as 12GB."
        )
    return Budget(text.strip(), options.whole_pages(options.bytes_only(text), text))


ram_option = click.option(
    "--ram",
    "rams",
    type=ram,
    metavar="SIZE",
    multiple=True,
    help="A ram_budget to try: 8GB, 8GiB, 50% of the memory of this machine, or auto. May be given "
    "several times.",
)


def units_typed(budgets: Iterable[Budget | None]) -> words.Units | None:
    """The units of the first budget that has some."""
    return next((budget.units for budget in budgets if budget and budget.units), None)


def by_tier(ram_budget: int, device_budget: int | None) -> Budgets:
    """Bytes by tier. Without an accelerator, host memory is where weights are used."""
    budgets: Budgets = {Tier.HOST: ram_budget, Tier.DISK: None}
    return budgets if device_budget is None else {Tier.DEVICE: device_budget, **budgets}
