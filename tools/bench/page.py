"""The output of a benchmark: the machine, tables, and claims that are held or missed."""

from __future__ import annotations

import math
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

_BEGIN, _END = "<!-- measured: begin -->", "<!-- measured: end -->"


@dataclass(frozen=True)
class Claim:
    """A value and its claimed bounds."""

    text: str
    value: float
    at_least: float = float("-inf")
    at_most: float = float("inf")

    @property
    def held(self) -> bool:
        """True if the value is within the bounds."""
        return self.at_least <= self.value <= self.at_most

    def verdict(self) -> str:
        """Return the verdict, the claim, its value and its bounds as one line."""
        bounds = [("at least", self.at_least), ("at most", self.at_most)]
        claimed = [f"{word} {bound:g}" for word, bound in bounds if math.isfinite(bound)]
        verdict = "held" if self.held else "MISSED"
        return f"{verdict}: {self.text} ({self.value:.3g}); {', '.join(claimed)}"


class Page:
    """Prints paragraphs and tables, and collects them for a Markdown page."""

    def __init__(self, title: str, directory: Path, packages: Iterable[str]) -> None:
        self._title = title.splitlines()[0].rstrip(".")
        self._parts: list[str] = []
        self.text("\n".join(f"- {line}" for line in describe(directory, packages)))
        self.text(f"```sh\n{_command()}\n```")

    def text(self, text: str) -> None:
        """Add a paragraph."""
        print(f"{text.strip()}\n", flush=True)
        self._parts.append(text.strip())

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Add a table."""
        self.text(table(columns, rows))

    def compare(
        self,
        first: str | Sequence[str],
        found: Mapping[Any, Any],
        columns: Mapping[str, Callable[[Any], object]],
    ) -> None:
        """Add a table with a row for each result.

        `columns` maps each title to the function that formats its cell. A tuple as the key of a
        result fills several columns, whose titles are `first`.
        """
        titles = [first] if isinstance(first, str) else list(first)
        rows = [
            [*(name if isinstance(name, tuple) else (name,)), *(c(one) for c in columns.values())]
            for name, one in found.items()
        ]
        self.table([*titles, *columns], rows)

    def claims(self, claims: Iterable[Claim]) -> None:
        """Add the verdicts."""
        self.text("\n".join(f"- {claim.verdict()}" for claim in claims))

    def write(self, page: Path | None) -> None:
        """Write everything to a page, if one is given."""
        if page is not None:
            publish(page, self._title, "\n\n".join(self._parts))


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format a Markdown table with aligned columns."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(text) for text in column) for column in zip(columns, *cells, strict=True)]

    def line(texts: Sequence[str]) -> str:
        padded = (text.ljust(width) for text, width in zip(texts, widths, strict=True))
        return f"| {' | '.join(padded)} |"

    rule = f"|{'|'.join('-' * (width + 2) for width in widths)}|"
    return "\n".join([line(columns), rule, *map(line, cells)])


def publish(path: str | Path, title: str, measured: str) -> None:
    """Write measurements to a page, between two marks. The prose around them is kept."""
    page = Path(path)
    text = page.read_text() if page.exists() else f"# {title}\n\n{_BEGIN}\n{_END}\n"
    before, _, rest = text.partition(_BEGIN)
    after = rest.partition(_END)[2]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(f"{before}{_BEGIN}\n{measured.strip()}\n{_END}{after}")


def describe(directory: Path, packages: Iterable[str] = ()) -> list[str]:
    """Describe the machine in lines: cores, memory, the file system of `directory`, versions."""
    from tierstore.system.machine import direct_reads, file_system_of, huge_pages

    memory, place = psutil.virtual_memory().total / 2**30, str(directory)
    models = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model n")]
    processor = models[0].partition(":")[2].strip() if models else platform.machine()
    versions = []
    for package in packages:
        with suppress(metadata.PackageNotFoundError):  # a peer that is not installed
            versions.append(f"{package} {metadata.version(package)}")
    return [
        f"{len(os.sched_getaffinity(0))} cores ({processor}), {memory:.1f} GiB of RAM, "
        f"load {os.getloadavg()[0]:.1f} at the start",
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        f"{file_system_of(place)}, direct reads: {direct_reads(place)}, huge pages: {huge_pages()}",
        *([", ".join(versions)] if versions else []),
    ]


def _command() -> str:
    """Return the command line without the paths of folders and pages."""
    words = sys.argv[1:]
    hidden = [i for i, word in enumerate(words) if word in ("--dir", "--markdown")]
    shown = [w for i, w in enumerate(words) if i not in hidden and i - 1 not in hidden]
    return shlex.join(["python", "-m", "tools.bench", *shown])
