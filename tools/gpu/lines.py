"""The lines of a run: what is measured, what it should be, and what came of it.

A line is measured by a function that gives figures, plain numbers by name. Its goals are bounds on
single figures, so that what a verdict says is in the data, and in the file that is written.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Figures = Mapping[str, float]

HOLDS, MISSED, MEASURED = "holds", "missed", "measured"
NOT_RUN = "not run: "
NOT_REACHED = NOT_RUN + "not reached"
ENDED = NOT_RUN + "the process ended meanwhile"
TIME = NOT_RUN + "time"


class Unavailable(Exception):
    """What a line needs is not here. The message says what."""


@dataclass(frozen=True)
class Goal:
    """A figure should be within these bounds, which belong to what is allowed."""

    figure: str
    at_least: float = -math.inf
    at_most: float = math.inf

    def met(self, figures: Figures) -> bool:
        """Whether it is. Not a number is within no bounds. Raises KeyError without the figure."""
        return self.at_least <= figures[self.figure] <= self.at_most

    def __str__(self) -> str:
        bounds = []
        if self.at_least > -math.inf:
            bounds.append(f"at least {self.at_least:g}")
        if self.at_most < math.inf:
            bounds.append(f"at most {self.at_most:g}")
        return f"{self.figure} {' and '.join(bounds)}"


@dataclass(frozen=True)
class Line:
    """Something to measure. `peer` says that it is another library's code that runs."""

    name: str
    about: str
    measure: Callable[[], Figures]
    goals: Sequence[Goal] = ()
    peer: bool = False


@dataclass(frozen=True)
class Group:
    """Lines that belong together. If it is `decisive`, a line that is missed ends the run."""

    name: str
    lines: Sequence[Line]
    decisive: bool = False


@dataclass
class Entry:
    """What came of a line."""

    group: str
    name: str
    about: str
    goals: list[str]
    verdict: str = NOT_REACHED
    figures: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""


def verdict(goals: Sequence[Goal], figures: Figures) -> str:
    """What figures say of goals."""
    if not goals:
        return MEASURED
    missing = [goal.figure for goal in goals if goal.figure not in figures]
    if missing:
        return f"{NOT_RUN}needs a line that was not measured, for {', '.join(missing)}"
    return HOLDS if all(goal.met(figures) for goal in goals) else MISSED


class Run:
    """Measures lines one by one, and keeps a file of what came of them.

    After `seconds` it stops the process, wherever it is, with what it has: `tidy` is called, then
    `leave` with the exit status.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        out: Path,
        about: Mapping[str, Any],
        seconds: float,
        *,
        tidy: Callable[[], object] = lambda: None,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self._groups = groups
        self._out = out
        self._about = about
        self._seconds = seconds
        self._tidy = tidy
        self._leave = leave
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._over = False
        self.entries = [
            Entry(group.name, line.name, line.about, [str(goal) for goal in line.goals])
            for group in groups
            for line in group.lines
        ]

    @property
    def status(self) -> int:
        """The exit status: 1 if anything was missed."""
        return int(any(entry.verdict == MISSED for entry in self.entries))

    def run(self) -> int:
        """Measure all lines. Returns the exit status."""
        timer = threading.Timer(self._seconds, self._out_of_time)
        timer.daemon = True
        timer.start()
        try:
            self._measure_all()
        finally:
            timer.cancel()
        return self.status

    def _measure_all(self) -> None:
        entries = iter(self.entries)
        stopped = ""
        for group in self._groups:
            missed = False
            for line in group.lines:
                entry = next(entries)
                if stopped:
                    self._note(entry, f"{NOT_RUN}{stopped} was missed")
                    continue
                self._note(entry, ENDED)
                self._measure(line, entry)
                missed |= entry.verdict == MISSED
            if missed and group.decisive:
                stopped = group.name

    def _measure(self, line: Line, entry: Entry) -> None:
        began, error, figures = time.monotonic(), "", {}
        try:
            figures = dict(line.measure())
            found = verdict(line.goals, figures)
        except Unavailable as reason:
            found = f"{NOT_RUN}{reason}"
        except Exception as failure:
            error = traceback.format_exc(limit=-8)
            found = f"{NOT_RUN}{first_line(failure)}" if line.peer else MISSED
        with self._lock:
            entry.figures, entry.error = figures, error
            entry.seconds = round(time.monotonic() - began, 3)
        self._note(entry, found)
        print(f"{entry.group} / {entry.name}: {found} {told(figures)}{error}", flush=True)

    def _note(self, entry: Entry, found: str) -> None:
        with self._lock:
            if self._over:
                return
            entry.verdict = found
            self._write()

    def _out_of_time(self) -> None:
        with self._lock:
            self._over = True
            for entry in self.entries:
                if entry.verdict in (ENDED, NOT_REACHED):
                    entry.verdict = TIME
            self._write()
        self._tidy()
        self._leave(self.status)

    def _write(self) -> None:
        document = {
            **self._about,
            "seconds": round(time.monotonic() - self._began, 1),
            "lines": [asdict(entry) for entry in self.entries],
        }
        draft = self._out.with_name(self._out.name + ".draft")
        draft.write_text(json.dumps(document, indent=1) + "\n")
        draft.replace(self._out)


def told(figures: Figures) -> str:
    """Figures in one line."""
    return ", ".join(f"{name} {value:.4g}" for name, value in figures.items())


def first_line(error: BaseException) -> str:
    """What kind of error it is, and the beginning of what it says."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 200 else f"{text[:200]}…"


def chosen(groups: Sequence[Group], names: Sequence[str]) -> list[Group]:
    """The groups and lines with these names; all, if there are no names.

    Raises ValueError for a name of nothing.
    """
    if not names:
        return list(groups)
    known = {group.name for group in groups} | {line.name for g in groups for line in g.lines}
    if unknown := sorted(set(names) - known):
        raise ValueError(f"there is no group or line {unknown}; there are {sorted(known)}")
    return [
        Group(group.name, lines, group.decisive)
        for group in groups
        if (lines := [x for x in group.lines if group.name in names or x.name in names])
    ]
