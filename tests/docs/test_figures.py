"""Figures on pages were measured.

Tables of a guide have the figures of the benchmark pages that they link to. A benchmark page that
links to files in `docs/benchmarks/data`, which `tools/gpu` wrote, has the figures of those files;
under the heading "Not in the files" it has others.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
MEASURED = re.compile(r"\]\((\.\./benchmarks/[^)#]+)\)")
DATA = re.compile(r"\]\((data/[^)#]+)\)")
OTHER_FIGURES = "\n## Not in the files\n"
UNREAD = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)]*\)", re.DOTALL)
"""Code and link targets: their numbers are no figures."""
NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?!\w)")


# Guides: the figures of benchmark pages ----------------------------------------------------------


def invented(guide: str) -> list[str]:
    """Return the numbers of a guide's tables that the measurements of their section do not have."""
    found = []
    for section in guide.split("\n## ")[1:]:
        pages = [DOCS / "guides" / path for path in MEASURED.findall(section)]
        known = set(NUMBER.findall("\n".join(page.read_text(encoding="utf-8") for page in pages)))
        rows = [line for line in section.splitlines() if line.startswith("|") and pages]
        found += [number for number in NUMBER.findall("\n".join(rows)) if number not in known]
    return found


@pytest.mark.parametrize(
    ("guide", "figure", "other"),
    [("which-offload", "0.572", "0.571999"), ("on-a-gpu", "| 1.103: 5.17 |", "| 1.103: 1.17 |")],
)
def test_figures_of_a_guide_are_on_its_benchmark_page(guide: str, figure: str, other: str) -> None:
    text = (DOCS / "guides" / f"{guide}.md").read_text(encoding="utf-8")
    assert invented(text) == []
    assert len(invented(text.replace(figure, other))) == text.count(figure) > 0, "the control"


# Benchmark pages: the figures of their files -----------------------------------------------------


def numbers_in(text: str) -> set[float]:
    """Return all numbers of a result, also those within its names."""
    found = re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?", text)
    return {float(number.replace(",", "")) for number in found}


def lines_of(file: Path) -> dict[str, set[float]]:
    """Read a result: the numbers of each line by the line's name, and all of them by "".

    A profile is text, in which a headline such as `==== 64 x 1024` begins a line.
    """
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".json":
        lines = {line["name"]: json.dumps(line) for line in json.loads(text)["lines"]}
    else:
        lines = {part.partition("\n")[0]: part for part in text.split("==== ")[1:]}
    return {name: numbers_in(line) for name, line in lines.items()} | {"": numbers_in(text)}


def unknown(text: str, known: set[float]) -> list[str]:
    """Return the numbers of a text that are not in `known`, rounded as the text has it."""
    found = []
    for number in NUMBER.findall(text):
        plain = number.replace(",", "")
        digits = len(plain.partition(".")[2])
        if all(f"{value:.{digits}f}" != plain for value in known):
            found.append(number)
    return found


def unbacked(page: Path, text: str) -> list[str]:
    """Return the figures of a page that its files do not have.

    A row of a table begins with the name of a line, and has figures of that line.
    """
    lines: dict[str, set[float]] = {"": set()}
    for path in DATA.findall(text):
        own = lines_of(page.parent / path)
        lines |= own | {"": lines[""] | own[""]}
    measured = UNREAD.sub("", text.partition(OTHER_FIGURES)[0]).splitlines()
    found = []
    for row, following in zip(measured, [*measured[1:], ""], strict=True):
        if not row.startswith("|") or following.startswith("|---"):
            found += unknown(row, lines[""])
        elif named := [name for name in lines if name and row[2:].startswith(UNREAD.sub("", name))]:
            found += unknown(row, lines[max(named, key=len)])
        elif not row.startswith("|---"):
            found.append(f"no line has this name: {row}")
    return found


PAGES = {page: page.read_text(encoding="utf-8") for page in DOCS.glob("benchmarks/gpu-*.md")}


def test_figures_of_a_gpu_page_are_in_its_files() -> None:
    assert [each for page, text in PAGES.items() for each in unbacked(page, text)] == []
    linked = {page.parent / path for page, text in PAGES.items() for path in DATA.findall(text)}
    assert linked == set(DOCS.glob("benchmarks/data/*")) != set()


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ("0.337 (0.287", "1.103 (0.287", "1.103"),  # that of another line
        ("| 268 | 0 differing |", "| 269 | 0 differing |", "269"),
        ("- MISSED: all in RAM: at most 1.15", "- MISSED: at most 1.45", "1.45"),
        ("| 218,471 |", "| 218,472 |", "218,472"),
        ("55.1 GB/s, 1.00", "55.2 GB/s, 1.00", "55.2"),
        ("| closing with", "| ending with", "no line has this name"),
        ("| 1.04 | 4.7 |", "| 1.05 | 4.7 |", "1.05"),
    ],
)
def test_figure_without_a_file_is_reported(before: str, after: str, found: str) -> None:
    """The control."""
    [page] = (page for page, text in PAGES.items() if before in text)
    [noticed] = unbacked(page, PAGES[page].replace(before, after, 1))
    assert noticed.startswith(found)
