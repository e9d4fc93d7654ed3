"""Text for people: sizes, and names that may hold anything."""

from __future__ import annotations

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def size(nbytes: float) -> str:
    """Bytes in units of 1024.

    >>> size(1023), size(1536), size(8 << 30)
    ('1023 B', '1.5 KiB', '8.0 GiB')
    """
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    value, unit = nbytes / 1024, 0
    while value >= 1023.95 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}"


def count(number: int, noun: str) -> str:
    """A number and its noun.

    >>> count(1, "group"), count(2, "group")
    ('1 group', '2 groups')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


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
