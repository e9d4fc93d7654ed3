"""What "Which offload when" says was measured stands on the page of the measurement."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guides" / "which-offload.md"

MEASURED = re.compile(r"\]\((\.\./benchmarks/[^)#]+)\)")
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")


def sections(text: str) -> dict[str, str]:
    """The sections that lead to a measurement, by their headings."""
    parts = [part.partition("\n") for part in text.split("\n## ")[1:]]
    return {heading: body for heading, _, body in parts if MEASURED.search(body)}


def invented(section: str) -> list[str]:
    """The numbers of a section's table that its measurement does not have."""
    pages = [(PAGE.parent / path).read_text(encoding="utf-8") for path in MEASURED.findall(section)]
    known = set(NUMBER.findall("\n".join(pages)))
    rows = "\n".join(line for line in section.splitlines() if line.startswith("|"))
    return [number for number in NUMBER.findall(rows) if number not in known]


SECTIONS = sections(PAGE.read_text(encoding="utf-8"))


def test_all_of_them_are_looked_at() -> None:
    assert len(SECTIONS) == 9


@pytest.mark.parametrize("heading", SECTIONS)
def test_each_figure_was_measured(heading: str) -> None:
    assert invented(SECTIONS[heading]) == []


def test_a_figure_that_was_not_is_noticed() -> None:
    """The control."""
    section = SECTIONS["Text, token by token"]
    assert invented(section.replace("**0.572**", "**0.571999**")) == ["0.571999"]
