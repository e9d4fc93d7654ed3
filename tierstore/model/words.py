"""Text for people: sizes, and names that may hold anything."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence


class Units(enum.Enum):
    """How sizes are told: in powers of 1000, as they are mostly written, or in powers of 1024."""

    DECIMAL = (1000, ("KB", "MB", "GB", "TB", "PB", "EB"))
    BINARY = (1024, ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB"))


_MIB = 1 << 20
_PAGE = 4096
"""Bytes. Budgets are rounded down to whole pages."""


def size(nbytes: float, units: Units = Units.BINARY) -> str:
    """Bytes for people.

    >>> size(1023), size(1536), size(8 << 30)
    ('1023 B', '1.5 KiB', '8.0 GiB')
    >>> size(999, Units.DECIMAL), size(129_998_848, Units.DECIMAL)
    ('999 B', '130.0 MB')
    """
    base, names = units.value
    if nbytes < base:
        return f"{nbytes:.0f} B"
    value, unit = nbytes / base, 0
    while value >= base - 0.05 and unit < len(names) - 1:
        value, unit = value / base, unit + 1
    return f"{value:.1f} {names[unit]}"


def at_least(nbytes: int, units: Units = Units.DECIMAL) -> str:
    """A size as one writes it (see `parse_size`): at least so many bytes, in three digits.

    >>> at_least(1_052_672), at_least(507_010_000), at_least(1 << 30, Units.BINARY)
    ('1.06MB', '508MB', '1GiB')
    """
    base, names = units.value
    scale, unit = 1, "B"
    for name in names[:4]:  # a budget is written in nothing larger
        if nbytes >= scale * base:
            scale, unit = scale * base, name
    step = 1 if nbytes < 10 * scale else 10 if nbytes < 100 * scale else 100
    whole, rest = divmod(-(-nbytes * 100 // (scale * step)) * step, 100)
    return f"{whole}.{rest:02}".rstrip("0").rstrip(".") + unit


def units_of(budget: int) -> Units:
    """The units in which somebody wrote a budget: those in which it takes fewer digits.

    >>> [units_of(n).name for n in (19_996_672, 598_016, 128 << 20, 24 << 30, 10_312_466_432)]
    ['DECIMAL', 'DECIMAL', 'BINARY', 'BINARY', 'DECIMAL']
    """
    places = len(str(budget))
    decimal = next(
        digits
        for digits in range(1, places + 1)
        if (budget + _PAGE - 1) // 10 ** (places - digits) * 10 ** (places - digits) >= budget
    )
    value = budget
    while value and value % 1024 == 0:
        value //= 1024
    is_binary = budget % _MIB == 0 or budget < _MIB  # else it is nobody's but auto's
    return Units.BINARY if is_binary and len(str(value)) <= decimal else Units.DECIMAL


def units_of_tiers(budgets: Mapping[str, int | None]) -> Units:
    """The units for whatever is told of a store with these budgets, by the names of its tiers."""
    return units_of(budgets.get("HOST") or 0)


def count(number: int, noun: str) -> str:
    """A number and its noun.

    >>> count(1, "group"), count(2, "group")
    ('1 group', '2 groups')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def first_of(names: Sequence[str]) -> str:
    """A few of some names, and how many there are.

    >>> first_of(["a"]), first_of(list("abcde"))
    ("'a'", "'a', 'b', 'c' and 2 more")
    """
    told = ", ".join(map(repr, names[:3]))
    return f"{told} and {len(names) - 3} more" if len(names) > 3 else told


def printable(text: str) -> str:
    """The text with everything escaped that could steer a terminal or hide: controls, direction.

    >>> print(printable("red \\x1b[31m"))
    red \\x1b[31m
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )
