"""Runs parts in separate processes, within the time limit.

Parts of one step run concurrently. A part gets a new process after an error and after a line that
poisons its process, so that no fault affects another line. A process is killed, with all its
children, at the deadline or when its line takes much longer than expected.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from tools.bench.apart import Apart, Ended, Killed, Late, kill
from tools.gpu.lines import NOT_RUN, TIME, Figures, Group, Line, Report, attempt

Make = Callable[..., tuple[Sequence[Group], dict[str, Figures]]]
"""Creates the lines of a part, and the figures of other lines that they refer to."""


def measured(make: Make, arguments: tuple[Any, ...]) -> Generator[Any, Any, None]:
    """Measure each line whose name is sent; None returns the names of the process's threads."""
    groups, known = make(*arguments)
    lines = {line.name: line for group in groups for line in group.lines}
    message = yield None
    while message is not None:
        name, figures = message
        known |= figures
        began = time.monotonic()
        found = attempt(lines[name])
        message = yield found | {"seconds": round(time.monotonic() - began, 3)}
    yield sorted(x.name for x in threading.enumerate() if x is not threading.main_thread())


@dataclass
class Job:
    """A part to measure, in its step. `make(*arguments)` returns its lines."""

    name: str
    step: int
    report: Report
    make: Make
    arguments: tuple[Any, ...] = ()


class Schedule:
    """Runs jobs until `ends` (monotonic). `scale` multiplies the expected seconds of lines."""

    def __init__(self, jobs: Sequence[Job], ends: float, scale: float = 1.0) -> None:
        self._jobs, self._ends, self._scale = jobs, ends, scale
        self._processes: list[Apart] = []

    def run(self) -> None:
        """Measure all lines without a result. No process of a job outlives this call."""
        for _, jobs in groupby(self._jobs, key=lambda job: job.step):
            together = list(jobs)
            with ThreadPoolExecutor(len(together)) as pool:
                try:
                    list(pool.map(self._measure, together))
                except BaseException:
                    self._ends = 0.0
                    for process in self._processes:
                        kill(process.process)
                    raise

    def _left(self) -> float:
        return self._ends - time.monotonic()

    def _measure(self, job: Job) -> None:
        process: Apart | None = None
        try:
            for line in job.report.left:
                if (need := self._scale * line.seconds) > (left := max(self._left(), 0.0)):
                    why = f"needs about {need:.0f} s, {left:.0f} s are left"
                    job.report.note(line.name, f"{TIME}: {why}")
                    continue
                process = process or self._started(job)
                if process is None:
                    return
                if not self._line(job, line, process):
                    process.__exit__()
                    process = None
            if process is not None and (threads := process.ask(None)):
                job.report.remark(f"threads left in a process at its end: {', '.join(threads)}")
        finally:
            if process is not None:
                process.__exit__()

    def _started(self, job: Job) -> Apart | None:
        process = Apart(measured, job.make, job.arguments)
        self._processes.append(process)
        try:
            process.answer(max(self._left(), 0.0))
        except (Ended, Killed) as error:
            process.__exit__()
            late = isinstance(error, Late)
            if not late:
                job.report.remark(f"the process did not start: {error}")
            why = f"{TIME}: no process has started" if late else f"{NOT_RUN}no process reaches it"
            for line in job.report.left:
                job.report.note(line.name, why)
            return None
        return process

    def _line(self, job: Job, line: Line, process: Apart) -> bool:
        """Measure a line. Return True if the process can be reused."""
        known: Mapping[str, Figures] = {
            name: found for each in self._jobs for name, found in each.report.figures.items()
        }
        left = self._left()
        process.send((line.name, known))
        try:
            found = process.answer(max(min(line.limit, left), 0.0))
        except Late:
            if left <= line.limit:
                job.report.note(line.name, f"{TIME}: it was cut")
            else:
                job.report.ended(line, "it hung")
            return False
        except (Ended, Killed):
            if self._left() <= 0:  # this schedule has killed it
                job.report.note(line.name, f"{TIME}: it was cut")
            else:
                status = process.process.returncode
                job.report.ended(line, f"the process ended with status {status}")
            return False
        job.report.note(line.name, found.pop("verdict"), **found)
        return not (found["error"] or line.poisons)
