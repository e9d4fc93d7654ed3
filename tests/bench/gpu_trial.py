"""Parts for a schedule of tools.gpu, without torch, and the program of their processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tools.gpu.lines import Figures, Goal, Group, Line, Postponed, Report, measure
from tools.gpu.schedule import Job, die_with

STEPS = {"one": 1, "beside": 1, "two": 2, "three": 3}
"""The parts."""
KINDS = ("first", "second")
"""The lines of each."""
HANGS, DIES, POISONS = "HANGS", "DIES", "POISONS"
"""In the environment: names of lines."""


def names() -> list[str]:
    """All lines, in the order in which they are measured but for those side by side."""
    return [f"{part} {kind}" for part in STEPS for kind in KINDS]


def behaviour(name: str, place: Path, known: Mapping[str, Figures]) -> Callable[[], Figures]:
    """How a line is measured: it writes its name to `log`, and then does what it is told to."""

    def measured() -> Figures:
        with (place / "log").open("a") as log:
            log.write(f"{name} {os.getpid()}\n")
        if name == os.environ.get(HANGS):
            sleeper = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            (place / "hangs").write_text(str(sleeper.pid))
            time.sleep(1000)
        if name == os.environ.get(DIES):
            os.abort()
        if name == "two second" and "one second" not in known:
            raise Postponed("needs the line 'one second'")
        return {"seconds": 1.5}

    return measured


def groups(part: str, place: Path, known: Mapping[str, Figures]) -> list[Group]:
    """The lines of a part."""
    lines = [
        Line(
            f"{part} {kind}",
            "",
            behaviour(f"{part} {kind}", place, known),
            [Goal("seconds", at_most=2)],
            seconds=1,
            poisons=f"{part} {kind}" == os.environ.get(POISONS),
        )
        for kind in KINDS
    ]
    return [Group(part, lines)]


def report(part: str, place: Path, known: Mapping[str, Figures]) -> Report:
    return Report(place / f"{part}.json", groups(part, place, known), {"command": "trial"})


def job(part: str, place: Path) -> Job:
    """A job whose processes are this file."""
    words = [sys.executable, __file__, part, str(place), str(os.getpid())]
    return Job(part, STEPS[part], report(part, place, {}), words)


def main(part: str, place: Path) -> None:
    known: dict[str, Figures] = {}
    for other in STEPS:
        entries = report(other, place, {}).entries.values()
        known |= {entry.name: entry.figures for entry in entries if entry.done}
    ours = Report(place / f"{part}.json", groups(part, place, known), {})
    measure(ours, known, time.monotonic() + 1000)


if __name__ == "__main__":
    die_with(int(sys.argv[3]))
    main(sys.argv[1], Path(sys.argv[2]))
