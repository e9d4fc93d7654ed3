"""Figures that pages tell were measured.

Tables of a guide have the figures of the benchmark pages that they lead to. A benchmark page that
leads to files in `docs/benchmarks/data`, which `tools/gpu` wrote, has the figures of those files;
under the heading "Not in the files" it tells others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
GUIDES = {name: DOCS / "guides" / f"{name}.md" for name in ("which-offload", "on-a-gpu")}

MEASURED = re.compile(r"\]\((\.\./benchmarks/[^)#]+)\)")
NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?!\w)")


# Guides: the figures of benchmark pages ----------------------------------------------------------


def sections(text: str) -> dict[str, str]:
    """The sections that lead to a measurement, by their headings."""
    parts = [part.partition("\n") for part in text.split("\n## ")[1:]]
    return {heading: body for heading, _, body in parts if MEASURED.search(body)}


def rows_of(text: str) -> list[str]:
    """The lines of all tables, their heads included."""
    return [line for line in text.splitlines() if line.startswith("|")]


def invented(section: str) -> list[str]:
    """The numbers of a section's tables that its measurements do not have."""
    pages = {(DOCS / "guides" / path).resolve() for path in MEASURED.findall(section)}
    known = set(NUMBER.findall("\n".join(page.read_text(encoding="utf-8") for page in pages)))
    numbers = NUMBER.findall("\n".join(rows_of(section)))
    return [number for number in numbers if number not in known]


SECTIONS = {
    f"{guide}: {heading}": body
    for guide, page in GUIDES.items()
    for heading, body in sections(page.read_text(encoding="utf-8")).items()
}


def test_all_guides_with_figures_are_checked() -> None:
    assert len(SECTIONS) == 11


@pytest.mark.parametrize("heading", SECTIONS)
def test_each_figure_of_a_guide_is_on_its_benchmark_page(heading: str) -> None:
    assert invented(SECTIONS[heading]) == []


@pytest.mark.parametrize(
    ("heading", "figure", "other"),
    [
        ("which-offload: Text, token by token", "0.572", "0.571999"),
        ("on-a-gpu: What was measured", "5.17", "1.17"),
    ],
)
def test_an_invented_figure_of_a_guide_is_noticed(heading: str, figure: str, other: str) -> None:
    """The control."""
    section = SECTIONS[heading]
    assert invented(section.replace(figure, other)) == [other] * section.count(figure) != []


# Benchmark pages: the figures of their files -----------------------------------------------------

DATA = re.compile(r"\]\((data/[^)#]+)\)")
TOLD = "\n## Not in the files\n"
UNREAD = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)]*\)", re.DOTALL)
"""Code, and where links lead: what they say is no figure."""

Lines = Mapping[str, set[float]]


def numbers_in(found: Any) -> Iterator[float]:
    """All numbers of a JSON document, also those in its texts and names."""
    match found:
        case dict():
            for key, value in found.items():
                yield from (float(number) for number in re.findall(r"\d+", key))
                yield from numbers_in(value)
        case list():
            for value in found:
                yield from numbers_in(value)
        case str():
            yield from (float(number.replace(",", "")) for number in NUMBER.findall(found))
        case int() | float():
            yield float(found)


def lines_of(file: Path) -> tuple[Lines, set[float]]:
    """The numbers of a result: those of each line by the line's name, and all of them.

    A profile is text, in which a headline such as `==== 64 x 1024` begins a line.
    """
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".json":
        document = json.loads(text)
        lines = {line["name"]: set(numbers_in(line)) for line in document["lines"]}
        return lines, set(numbers_in(document))
    parts = [part.partition("\n") for part in text.split("==== ")[1:]]
    return {name: set(numbers_in([name, body])) for name, _, body in parts}, set(numbers_in(text))


def unknown(text: str, known: set[float]) -> list[str]:
    """The numbers of a text that are no number of `known`, rounded as the text has it."""
    found = []
    for number in NUMBER.findall(text):
        plain = number.replace(",", "")
        digits = len(plain.partition(".")[2])
        if all(f"{abs(value):.{digits}f}" != plain for value in known):
            found.append(number)
    return found


def unbacked(page: Path, text: str) -> list[str]:
    """The figures of a page that its files do not have.

    A row of a table begins with the name of a line, and has figures of that line.
    """
    lines: dict[str, set[float]] = {}
    everything: set[float] = set()
    for path in DATA.findall(text):
        own, known = lines_of(page.parent / path)
        lines |= own
        everything |= known
    measured = UNREAD.sub("", text.partition(TOLD)[0]).splitlines()
    found = []
    for row, following in zip(measured, [*measured[1:], ""], strict=True):
        if not row.startswith("|") or following.startswith("|---"):
            found += unknown(row, everything)
        elif named := [name for name in lines if row[2:].startswith(UNREAD.sub("", name))]:
            found += unknown(row, lines[max(named, key=len)])
        elif not row.startswith("|---"):
            found.append(f"no line has this name: {row}")
    return found


PAGES = {
    page.name: page
    for page in sorted(DOCS.glob("benchmarks/*.md"))
    if DATA.search(page.read_text(encoding="utf-8"))
}


def test_all_result_files_have_a_page() -> None:
    linked = {
        path for page in PAGES.values() for path in DATA.findall(page.read_text(encoding="utf-8"))
    }
    files = {str(path.relative_to(DOCS / "benchmarks")) for path in DOCS.glob("benchmarks/data/*")}
    assert linked == files != set()


@pytest.mark.parametrize("name", PAGES)
def test_each_figure_of_a_page_is_in_its_files(name: str) -> None:
    assert unbacked(PAGES[name], PAGES[name].read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("command", "before", "after", "found"),
    [
        ("inference", "0.337 (0.287", "1.103 (0.287", ["1.103"]),  # that of another line
        ("inference", "| 268 | 0 differing |", "| 269 | 0 differing |", ["269"]),
        ("inference", "- MISSED: all in RAM: at most 1.15", "- MISSED: at most 1.45", ["1.45"]),
        ("inference", "| 218,471 |", "| 218,472 |", ["218,472"]),
        ("correctness", "| 345 | 0 | 400 |", "| 346 | 0 | 400 |", ["346"]),
        ("correctness", "55.1 GB/s, 1.00", "55.2 GB/s, 1.00", ["55.2"]),
        (
            "correctness",
            "| closing with",
            "| ending with",
            ["no line has this name: | ending with"],
        ),
        ("training", "| 1.04 | 4.7 |", "| 1.05 | 4.7 |", ["1.05"]),
        ("training", "| 1.269 |", "| 1.269 |", []),  # nothing has changed
    ],
)
def test_a_figure_that_no_file_has_is_noticed(
    command: str, before: str, after: str, found: list[str]
) -> None:
    """The control."""
    [page] = (page for name, page in PAGES.items() if f"gpu-{command}_" in name)
    text = page.read_text(encoding="utf-8")
    assert before in text
    noticed = unbacked(page, text.replace(before, after, 1))
    assert [each[: len(start)] for each, start in zip(noticed, found, strict=True)] == found


# No page says that nothing was measured ----------------------------------------------------------

NOTHING = re.compile(
    r"\b(?:no|none|nothing|nobody|never)\b[^.;|]*?\b(?:on|of) (?:a |any |a real )GPU\b"
    r"|\b(?:of|on) a (?:real )?GPU, nothing\b"
    r"|\bno GPU\]|\bno figures of a\b|\bthere are no figures\b",
    re.IGNORECASE,
)


def denials(text: str) -> list[str]:
    """The phrases of a text that say that nothing was measured on a GPU."""
    parts = re.split(r"\n\s*\n|\n(?=\s*[-#|])", text)
    return [match[0] for part in parts for match in NOTHING.finditer(" ".join(part.split()))]


def test_no_page_says_that_no_gpu_was_measured() -> None:
    pages = [ROOT / "README.md", *DOCS.rglob("*.md"), *(ROOT / "tierstore").rglob("*.py")]
    found = {str(page): denials(page.read_text(encoding="utf-8")) for page in pages}
    assert {page: phrases for page, phrases in found.items() if phrases} == {}


@pytest.mark.parametrize(
    "text",
    [
        "**No figure here was measured on a GPU yet.**",
        "written for it; **no figures of a\nGPU yet**",
        "No figures measured on a GPU are published yet.",
        "Nothing of this was tried on a GPU yet.",
        "- Of a GPU, nothing was measured.",
        "- Nothing here is a figure of a GPU.",
        "none: [no GPU](#what-nobody-has-measured)",
        "[On a GPU](guides/on-a-gpu.md); there are no figures yet.",
    ],
)
def test_such_a_sentence_is_noticed(text: str) -> None:
    assert len(denials(text)) == 1


@pytest.mark.parametrize(
    "text", ["No figures of several GPUs.", "**Not measured**: consumer cards.", "needs no GPU"]
)
def test_what_was_not_measured_may_be_told(text: str) -> None:
    assert denials(text) == []
