"""Options that say how much memory there is, and how fast things are."""

from __future__ import annotations

import math

import click

from tierstore.model.sizes import PAGE, parse_size
from tierstore.model.tiers import Tier

Budgets = dict[Tier, int | None]


def ram(text: str) -> int:
    """`ram_budget` as a store takes it: bytes in whole pages."""
    return _whole_pages(_size(text), text)


def device(text: str) -> int:
    """`device_budget`, in bytes only: nobody knows here how much memory the device has."""
    if "%" in text:
        raise click.BadParameter(f"{text!r}: a share of what? Write bytes, such as 12GB.")
    return _whole_pages(_size(text), text)


def speed(text: str) -> float:
    """Bytes per second, from a text like `3GB/s`."""
    size, _, unit = text.partition("/")
    if unit.strip().lower() != "s":
        raise click.BadParameter(f"{text!r} is no speed: write it like 3GB/s.")
    try:
        return float(_size(size))
    except OverflowError as error:
        raise click.BadParameter(f"{text:.20}... is no speed that a disk can have.") from error


def seconds(text: str) -> float:
    """A time that is over some day, in seconds."""
    try:
        found = float(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is no number of seconds.") from error
    if not 0 <= found < math.inf:
        raise click.BadParameter(f"{text!r}: write seconds, such as 1.5.")
    return found


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from error


def _whole_pages(nbytes: int, text: str) -> int:
    if nbytes < PAGE:
        raise click.BadParameter(f"{text!r} is less than one page of {PAGE} bytes.")
    return nbytes // PAGE * PAGE


def budgets_of(ram: int, device: int | None) -> Budgets:
    """Bytes by tier. Without an accelerator, host memory is where weights are used."""
    budgets: Budgets = {Tier.HOST: ram, Tier.DISK: None}
    return budgets if device is None else {Tier.DEVICE: device, **budgets}


ram_help = "The store's ram_budget: 8GB, 8GiB, or 50% of the memory of this machine."
device_help = "The store's device_budget. Left out: everything is computed on the CPU."
