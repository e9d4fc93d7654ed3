"""Text for people: sizes, times, and names that may hold anything."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from datetime import datetime

from tierstore.model.words import Units as Units
from tierstore.model.words import at_least as at_least
from tierstore.model.words import count as count
from tierstore.model.words import printable as printable
from tierstore.model.words import size as size
from tierstore.model.words import units_of as units_of
from tierstore.model.words import units_of_tiers as units_of_tiers

_AGES = 100 * 365 * 86400
"""Seconds: what seems older has a time that is wrong."""


def moment(seconds: float) -> str:
    """A file's time as local time. A damaged file system may claim times that no calendar has."""
    try:
        return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):
        return "?"


_UNITS = ((365 * 86400, "year"), (30 * 86400, "month"), (7 * 86400, "week"), (86400, "day"),
    (3600, "hour"), (60, "minute"))  # fmt: skip


def ago(seconds: float, now: float | None = None) -> str:
    """How long a moment (in seconds since 1970) is past; what is not past has its date."""
    past = (time.time() if now is None else now) - seconds
    if not 0 <= past < _AGES:
        return moment(seconds)
    for length, unit in _UNITS:
        if past >= length:
            return f"{count(int(past // length), unit)} ago"
    return "just now"


def decimals(numbers: Iterable[float]) -> int:
    """How many decimals the numbers of a column get: three digits of the smallest but zero.

    >>> decimals([0.3, 0.301]), decimals([12.0, 0.0]), decimals([350.0]), decimals([0.06, 1e-9])
    (3, 1, 0, 4)
    """
    smallest = min((number for number in numbers if number), default=100.0)
    return min(max(2 - math.floor(math.log10(smallest)), 0), 4)


def shorten(text: str, width: int, ellipsis: str = "…", measure: Callable[[str], int] = len) -> str:
    """At most `width` columns: what is too much goes from the middle, as both ends tell keys apart.

    >>> shorten("transformer.layers.11.attention", 15)
    'transfo…tention'
    """
    if measure(text) <= width:
        return text
    room = max(width - measure(ellipsis), 0)
    head = _fitting(text, room - room // 2, measure)
    tail = _fitting(text[::-1], room // 2, measure)[::-1]
    return f"{head}{ellipsis}{tail}"


def _fitting(text: str, width: int, measure: Callable[[str], int]) -> str:
    end = used = 0
    for character in text:
        used += measure(character)
        if used > width:
            break
        end += 1
    return text[:end]
