"""Parts for a schedule of tools.gpu, without torch."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tools.gpu.lines import Figures, Goal, Group, Line, Postponed, Report
from tools.gpu.schedule import Job

STEPS = {"one": 1, "beside": 1, "two": 2, "three": 3}
"""The parts."""
KINDS = ("first", "second")
"""The lines of each."""
HANGS, DIES, POISONS = "HANGS", "DIES", "POISONS"
"""Environment variables that hold names of lines."""


def names() -> list[str]:
    """Return all lines in the order of measurement, except those that run side by side."""
    return [f"{part} {kind}" for part in STEPS for kind in KINDS]


def behaviour(name: str, place: Path, known: dict[str, Figures]) -> Callable[[], Figures]:
    """Return a measurement that writes its name to `log`, and then acts as the environment says."""

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


def make(part: str, place: Path, seconds: float = 0.1) -> tuple[list[Group], dict[str, Figures]]:
    """Return the lines of a part, and the lines of others that it needs."""
    known: dict[str, Figures] = {}
    lines = [
        Line(
            f"{part} {kind}",
            "",
            behaviour(f"{part} {kind}", place, known),
            [Goal("seconds", at_most=2)],
            seconds=seconds,
            poisons=f"{part} {kind}" == os.environ.get(POISONS),
        )
        for kind in KINDS
    ]
    return [Group(part, lines)], known


def job(part: str, place: Path, seconds: float = 0.1) -> Job:
    """Return the job of a part, with its report file."""
    groups, _ = make(part, place, seconds)
    report = Report(place / f"{part}.json", groups, {"command": "trial"})
    return Job(part, STEPS[part], report, make, (part, place, seconds))
