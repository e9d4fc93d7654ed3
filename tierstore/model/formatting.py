"""Format sizes, times and names for people."""

from __future__ import annotations

import enum
import math
import time
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime


class Units(enum.Enum):
    """Decimal units (powers of 1000) and binary units (powers of 1024)."""

    DECIMAL = (1000, ("KB", "MB", "GB", "TB", "PB", "EB"))
    BINARY = (1024, ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB"))


_MIB = 1 << 20
_PAGE = 4096
"""Bytes. Budgets are rounded down to whole pages."""


def size(nbytes: float, units: Units = Units.BINARY) -> str:
    """Format bytes.

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
    """Round a size up to three digits and format it for `parse_size`.

    >>> at_least(1_052_672), at_least(507_010_000), at_least(1 << 30, Units.BINARY)
    ('1.06MB', '508MB', '1GiB')
    """
    base, names = units.value
    scale, unit = 1, "B"
    for name in names[:4]:  # the units that `parse_size` reads
        if nbytes >= scale * base:
            scale, unit = scale * base, name
    step = 1 if nbytes < 10 * scale else 10 if nbytes < 100 * scale else 100
    whole, rest = divmod(-(-nbytes * 100 // (scale * step)) * step, 100)
    return f"{whole}.{rest:02}".rstrip("0").rstrip(".") + unit


def units_of(budget: int) -> Units:
    """Guess the units in which the user wrote a budget: those that need fewer digits.

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
    is_binary = budget % _MIB == 0 or budget < _MIB  # else it comes from "auto"
    return Units.BINARY if is_binary and len(str(value)) <= decimal else Units.DECIMAL


def units_of_tiers(budgets: Mapping[str, int | None]) -> Units:
    """Return the units for all sizes of a store with these budgets, by the names of its tiers."""
    return units_of(budgets.get("HOST") or 0)


def count(number: int, noun: str) -> str:
    """Format a number with its noun.

    >>> count(1, "group"), count(2, "group")
    ('1 group', '2 groups')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def first_of(names: Sequence[str]) -> str:
    """Format up to three names, and the number of the rest.

    >>> first_of(["a"]), first_of(list("abcde"))
    ("'a'", "'a', 'b', 'c' and 2 more")
    """
    first = ", ".join(map(repr, names[:3]))
    return f"{first} and {len(names) - 3} more" if len(names) > 3 else first


def printable(text: str) -> str:
    """Escape characters that could control a terminal or hide text, such as bidi marks.

    >>> print(printable("red \\x1b[31m"))
    red \\x1b[31m
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


_AGES = 100 * 365 * 86400
"""Seconds. A file with an older time has a wrong time."""


def moment(seconds: float) -> str:
    """Format a Unix time as local time; "?" if it is out of range, as in a damaged file."""
    try:
        return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):
        return "?"


_UNITS = ((365 * 86400, "year"), (30 * 86400, "month"), (7 * 86400, "week"), (86400, "day"),
    (3600, "hour"), (60, "minute"))  # fmt: skip


def ago(seconds: float, now: float | None = None) -> str:
    """Format the age of a Unix time. A time in the future is formatted as a date."""
    past = (time.time() if now is None else now) - seconds
    if not 0 <= past < _AGES:
        return moment(seconds)
    for length, unit in _UNITS:
        if past >= length:
            return f"{count(int(past // length), unit)} ago"
    return "just now"


def decimals(numbers: Iterable[float]) -> int:
    """Return the decimals for a column of numbers: three digits of the smallest nonzero one.

    >>> decimals([0.3, 0.301]), decimals([12.0, 0.0]), decimals([350.0]), decimals([0.06, 1e-9])
    (3, 1, 0, 4)
    """
    smallest = min((number for number in numbers if number), default=100.0)
    return min(max(2 - math.floor(math.log10(smallest)), 0), 4)


def width(text: str) -> int:
    """Return the width of a text in terminal columns: 0 for a combining mark, 2 if wide."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def shorten(text: str, columns: int, ellipsis: str = "…") -> str:
    """Shorten a text to a width by cutting its middle, since both ends of a key identify it.

    >>> shorten("transformer.layers.11.attention", 15)
    'transfo…tention'
    """
    if width(text) <= columns:
        return text
    kept = max(columns - width(ellipsis), 0)
    head, tail = text, text
    while width(head) > kept - kept // 2:
        head = head[:-1]
    while width(tail) > kept // 2:
        tail = tail[1:]
    return f"{head}{ellipsis}{tail}"
