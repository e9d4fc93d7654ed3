"""Sizes are formatted in the units in which they were given, and as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.model.formatting import Units, ago, at_least, moment, shorten, size, units_of
from tierstore.model.sizes import PAGE, parse_size

UNITS = pytest.mark.parametrize("units", Units)


@UNITS
@given(nbytes=st.integers(1, 1 << 55))
def test_format_size_is_read_back_as_hardly_more(nbytes: int, units: Units) -> None:
    assert nbytes <= parse_size(at_least(nbytes, units)) <= nbytes * 1.01 + 1


WRITTEN = [
    "1MB",
    "1.5GB",
    "8GB",
    "20MB",
    "24GB",
    "100KB",
    "130MB",
    "200GB",
    "1TB",
    "512GB",
    "1000MB",
]


@pytest.mark.parametrize("text", [*WRITTEN, *(text.replace("B", "iB") for text in WRITTEN)])
def test_budget_units_are_recovered(text: str) -> None:
    """Round to whole pages, as a store does."""
    budget = parse_size(text) // PAGE * PAGE
    assert units_of(budget) is (Units.BINARY if text.endswith("iB") else Units.DECIMAL)


@pytest.mark.parametrize(
    ("nbytes", "decimal", "binary"),
    [
        (0, "0 B", "0 B"),
        (999, "999 B", "999 B"),
        (1000, "1.0 KB", "1000 B"),
        (999_949, "999.9 KB", "976.5 KiB"),
        (999_960, "1.0 MB", "976.5 KiB"),
        (8 << 30, "8.6 GB", "8.0 GiB"),
        (10**21, "1000.0 EB", "867.4 EiB"),
    ],
)
def test_size_is_formatted_for_people(nbytes: int, decimal: str, binary: str) -> None:
    assert (size(nbytes, Units.DECIMAL), size(nbytes)) == (decimal, binary)


@pytest.mark.parametrize(
    ("past", "text"),
    [
        (59, "just now"),
        (60, "1 minute ago"),
        (3599, "59 minutes ago"),
        (86400, "1 day ago"),
        (13 * 86400, "1 week ago"),
        (40 * 86400, "1 month ago"),
        (800 * 86400, "2 years ago"),
        (-1, moment(5e9 + 1)),
    ],
)
def test_ago_formats_an_age(past: float, text: str) -> None:
    assert ago(5e9 - past, now=5e9) == text
    assert ago(1e300) == "?"


def test_shorten_counts_wide_letters_twice() -> None:
    assert shorten("界" * 9, 9) == "界界…界界"
    assert shorten("a\u0301" * 9, 9) == "a\u0301" * 9
