"""Text for people: sizes, times, and names that may hold anything."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from tierstore.model.words import Units as Units
from tierstore.model.words import at_least as at_least
from tierstore.model.words import count as count
from tierstore.model.words import printable as printable
from tierstore.model.words import size as size
from tierstore.model.words import units_of as units_of
from tierstore.model.words import units_of_tiers as units_of_tiers


def moment(seconds: float) -> str:
    """A file's time as local time. A damaged file system may claim times that no calendar has."""
    try:
        return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):
        return "?"


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
