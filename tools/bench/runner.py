"""Common code of benchmarks: folders, rounds in which all sides take turns, medians, ratios.

A benchmark is a module with `PACKAGES`, whose versions its page lists, and `measure(bench)`, which
yields claims. It may have `ROUNDS` (of a full run), `PRETEND = True` if it needs the tests' pretend
accelerator, and `options(parser)`.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tierstore.progress import bar
from tools.bench import machine
from tools.bench.page import Page

T = TypeVar("T")
Run = dict[str, Any]
"""The figures of one run, by name."""


@dataclass(frozen=True)
class Bench:
    """The folders, rounds and page of a benchmark. `scratch` is deleted at the end."""

    scratch: Path
    directory: Path
    rounds: int
    page: Page
    options: argparse.Namespace

    @property
    def small(self) -> bool:
        """True for a trial run, without meaningful figures."""
        return bool(self.options.small)

    @property
    def kept(self) -> Path:
        """Folder of models, which a later run with the same `--dir` reuses."""
        place = self.directory / ("small" if self.small else "full")
        place.mkdir(parents=True, exist_ok=True)
        return place

    def turns(self, sides: Mapping[Any, Callable[[], T]], *, cold: bool = False) -> dict[Any, Any]:
        """Run every side once per round; with `cold`, drop the page cache before each run."""
        return interleave(sides, self.rounds, before=self.drop_cache if cold else lambda: None)

    def drop_cache(self) -> None:
        """Drop the page cache, except in a trial, since it slows down the whole machine."""
        if not self.small:
            machine.drop_page_cache()


def interleave(
    sides: Mapping[Any, Callable[[], T]],
    rounds: int,
    *,
    before: Callable[[], object] = lambda: None,
) -> dict[Any, list[T]]:
    """Run every side once per round, in a different order each round, to spread any drift evenly.

    `before` runs before each. Returns the results of each side in round order.
    """
    order = random.Random(0)
    results: dict[Any, list[T]] = {name: [] for name in sides}
    names = [name for _ in range(rounds) for name in order.sample(list(sides), len(sides))]
    for name in bar(names, "Measuring", "runs"):
        before()
        results[name].append(sides[name]())
    return results


def median(values: Iterable[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def ratios(values: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Divide each value by the reference of its own round."""
    return [value / other for value, other in zip(values, reference, strict=True)]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Format the median, and the range in parentheses: `0.98 (0.95 to 1.02)`."""
    low, high = min(values), max(values)
    return f"{median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


# Columns for `Page.compare`: cells made of the runs of a side.


def column(runs: Sequence[Run], figure: str) -> list[Any]:
    """Return one figure of all runs."""
    return [run[figure] for run in runs]


def ranged(figure: str, digits: int = 2, scale: float = 1.0) -> Callable[[Sequence[Run]], str]:
    """Make a column with the median and the range of a figure."""
    return lambda runs: spread([scale * run[figure] for run in runs], digits)


def middle(figure: str, digits: int = 2, scale: float = 1.0) -> Callable[[Sequence[Run]], str]:
    """Make a column with the median of a figure."""
    return lambda runs: f"{scale * median(column(runs, figure)):,.{digits}f}"


def most(figure: str, scale: float = 1.0) -> Callable[[Sequence[Run]], str]:
    """Make a column with the largest value of a figure, as a whole number."""
    return lambda runs: f"{scale * max(column(runs, figure)):,.0f}"


def value(figure: str, digits: int = 0, scale: float = 1.0) -> Callable[[Run], str]:
    """Make a column with a figure of a single run."""
    return lambda run: f"{scale * run[figure]:,.{digits}f}"
