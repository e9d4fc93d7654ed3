"""The lines of a part: measurements, goals, and the file of results.

A line is measured by a function that returns figures: plain numbers by name. Its goals are bounds
on single figures, so that each verdict can be checked against the data in the file.
"""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

Figures = Mapping[str, float]

HOLDS, MISSED, MEASURED = "holds", "missed", "measured"
NOT_RUN = "not run: "
NOT_REACHED = NOT_RUN + "not reached"
TIME = NOT_RUN + "time"


class Unavailable(Exception):
    """Raised if a line cannot be measured on this machine. The message names the reason."""


class Postponed(Exception):
    """Raised if a line must be measured in another run.

    The first line of the message is the reason; the rest is output.
    """


class Failed(Exception):
    """Raised if a line failed but has figures. The message says how it failed."""

    def __init__(self, text: str, figures: Figures) -> None:
        super().__init__(text)
        self.figures = figures


@dataclass(frozen=True)
class Goal:
    """Inclusive bounds of a figure."""

    figure: str
    at_least: float = -math.inf
    at_most: float = math.inf

    def met(self, figures: Figures) -> bool:
        """Return True if the figure is within bounds; NaN never is. Raises KeyError if missing."""
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
    """A measurement.

    `seconds` is its approximate duration on an H100. `peer` marks code of another library, whose
    errors do not count as missed. If a line `poisons` its process, the next one gets a new process.
    """

    name: str
    about: str
    measure: Callable[[], Figures]
    goals: Sequence[Goal] = ()
    peer: bool = False
    seconds: float = 5.0
    poisons: bool = False

    @property
    def limit(self) -> float:
        """Seconds after which the line is considered hung."""
        return 3 * self.seconds + 30


@dataclass(frozen=True)
class Group:
    """Related lines."""

    name: str
    lines: Sequence[Line]


@dataclass
class Entry:
    """The result of a line. Unless it is `done`, a later run measures the line again."""

    group: str
    name: str
    about: str
    goals: list[str]
    verdict: str = NOT_REACHED
    figures: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""
    done: bool = False


def verdict(goals: Sequence[Goal], figures: Figures) -> str:
    """Judge figures by goals."""
    if not goals:
        return MEASURED
    missing = [goal.figure for goal in goals if goal.figure not in figures]
    if missing:
        return f"{NOT_RUN}needs a line that was not measured, for {', '.join(missing)}"
    return HOLDS if all(goal.met(figures) for goal in goals) else MISSED


class Report:
    """The file of a part's results, rewritten atomically with each change.

    Results of earlier runs are kept. `about` is the rest of the document; that of the first run is
    kept.
    """

    def __init__(self, path: Path, groups: Sequence[Group], about: Mapping[str, Any]) -> None:
        self.path = path
        self.lines = [line for group in groups for line in group.lines]
        self.entries = {
            line.name: Entry(group.name, line.name, line.about, [str(goal) for goal in line.goals])
            for group in groups
            for line in group.lines
        }
        self.remarks: list[str] = []
        self._about = dict(about)
        if path.exists():
            found = json.loads(path.read_text())
            lines, self.remarks = found.pop("lines"), found.pop("remarks")
            self._about |= found
            done = {line["name"]: Entry(**line) for line in lines if line["done"]}
            self.entries |= {name: done[name] for name in done.keys() & self.entries}
        self._write()

    @property
    def left(self) -> list[Line]:
        """Return the lines without a result."""
        return [line for line in self.lines if not self.entries[line.name].done]

    @property
    def figures(self) -> dict[str, Figures]:
        """Return the figures of finished lines, by name."""
        return {name: entry.figures for name, entry in self.entries.items() if entry.done}

    @property
    def missed(self) -> bool:
        """True if a line was missed or a process ended abnormally."""
        entries = self.entries.values()
        return bool(self.remarks) or any(entry.verdict == MISSED for entry in entries)

    def remark(self, text: str) -> None:
        """Add a remark about the whole part."""
        self.remarks.append(text)
        self._write()

    def note(self, name: str, verdict: str, **changes: Any) -> None:
        """Change the entry of a line, and print it."""
        entry = replace(self.entries[name], verdict=verdict, **changes)
        self.entries[name] = entry
        self._write()
        print(
            f"{entry.group} / {name}: {verdict} {format_figures(entry.figures)}{entry.error}",
            flush=True,
        )

    def ended(self, line: Line, why: str) -> None:
        """Record that the process died while it measured a line, which is a result."""
        found = f"{NOT_RUN}{why}" if line.peer else MISSED
        self.note(line.name, found, error=f"{why}\n", done=True)

    def _write(self) -> None:
        document = self._about | {
            "seconds": round(sum(entry.seconds for entry in self.entries.values()), 1),
            "remarks": self.remarks,
            "lines": [asdict(entry) for entry in self.entries.values()],
        }
        draft = self.path.with_name(self.path.name + ".draft")
        draft.write_text(json.dumps(document, indent=1) + "\n")
        draft.replace(self.path)


def attempt(line: Line) -> dict[str, Any]:
    """Measure a line. Return the changes to its entry."""
    figures: Figures = {}
    error, done = "", True
    try:
        figures = dict(line.measure())
        found = verdict(line.goals, figures)
    except Unavailable as reason:
        found = f"{NOT_RUN}{reason}"
    except Postponed as reason:
        why, _, error = str(reason).partition("\n")
        found, done = f"{NOT_RUN}{why}", False
    except Failed as failure:
        figures, error, found = dict(failure.figures), str(failure), MISSED
    except Exception as failure:
        error = traceback.format_exc(limit=-8)
        found = f"{NOT_RUN}{first_line(failure)}" if line.peer else MISSED
    return {"verdict": found, "figures": figures, "error": error, "done": done}


def format_figures(figures: Figures) -> str:
    """Format figures on one line."""
    return ", ".join(f"{name} {value:.4g}" for name, value in figures.items())


def first_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its message."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 200 else f"{text[:200]}…"
