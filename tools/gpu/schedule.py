"""The order in which parts are measured, each in processes of its own, within the time there is.

Parts of one step run side by side. A part gets a fresh process whenever one has ended with lines
left, by a fault or on purpose, so that no fault ends another line. A process is killed, with all
that it has started, at the end of the time, or when its line takes much longer than it should.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import psutil

from tools.gpu.lines import NOT_RUN, TIME, Report

ROOT = Path(__file__).resolve().parents[2]
START = 10.0
"""Seconds that a process needs before its first line: it imports torch, and asks for the device."""


def environment() -> dict[str, str]:
    """Return the environment for Python processes: the repository comes first on PYTHONPATH.

    The rest of that path stays: torch itself may have been found there.
    """
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def die_with(parent: int) -> None:
    """End this process when its parent does, however that ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit("the process that started this one has ended")


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a session, its group, and all others that it has started."""
    started: list[psutil.Process] = []
    if process.returncode is None:  # otherwise its number may be another's
        with suppress(psutil.NoSuchProcess):
            started = psutil.Process(process.pid).children(recursive=True)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for each in started:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


@dataclass
class Job:
    """A part to measure: steps come one after the other; `words` start a process for its lines."""

    name: str
    step: int
    report: Report
    words: Sequence[str]
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    left: int = field(default=0, init=False)
    """Lines left when the process was started."""
    written: tuple[int, float] = field(default=(0, 0.0), init=False)
    """The time of the file, and the clock's time when that was seen first."""


class Schedule:
    """Measures jobs until `clock` says `ends`."""

    def __init__(
        self, jobs: Sequence[Job], ends: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._jobs = jobs
        self._ends = ends
        self._clock = clock

    def run(self) -> None:
        """Measure what is left. No process of a job outlives this call."""
        for job in self._jobs:
            job.report.start_over()
        for _, jobs in groupby(self._jobs, key=lambda job: job.step):
            running: list[Job] = []
            try:
                running += filter(self._starts, jobs)
                while running:
                    time.sleep(0.05)
                    running = list(filter(self._goes_on, running))
            finally:
                for job in self._jobs:
                    if job.process is not None:
                        kill(job.process)

    def _starts(self, job: Job) -> bool:
        """Start a process for the lines that are left. Returns False if it needs none."""
        job.process = None
        job.left = len(job.report.left)
        if job.left and self._clock() + START > self._ends:
            self._skip(job, f"{TIME}: the others took it")
        elif job.left:
            job.process = subprocess.Popen(
                job.words, cwd=ROOT, env=environment(), start_new_session=True
            )
            job.written = (0, self._clock())
        return job.process is not None

    def _goes_on(self, job: Job) -> bool:
        """Look after a process. Returns False once nothing of its job is left."""
        assert job.process is not None
        status = job.process.poll()
        late = self._clock() >= self._ends
        if status is None and not late and not self._hangs(job):
            return True
        kill(job.process)
        job.report.read()
        line = job.report.running
        if status is None and late:
            if line is not None:
                job.report.note(line.name, f"{TIME}: it was cut")
            self._skip(job, f"{TIME}: it ended before")
        elif line is not None:
            why = "it hung" if status is None else f"the process ended with status {status}"
            job.report.ended(line, why)
        elif status:
            self._remark(job, status)
        return self._starts(job)

    def _hangs(self, job: Job) -> bool:
        """Whether a line takes much longer than it should, since the file has told of it."""
        with suppress(FileNotFoundError):
            written = job.report.path.stat().st_mtime_ns
            if written != job.written[0]:
                job.written = (written, self._clock())
                job.report.read()
        line = job.report.running
        return line is not None and self._clock() - job.written[1] > line.limit

    def _remark(self, job: Job, status: int) -> None:
        job.report.remark(f"a process ended with status {status} between lines")
        if len(job.report.left) == job.left:
            self._skip(job, f"{NOT_RUN}no process reaches it")

    def _skip(self, job: Job, why: str) -> None:
        for line in job.report.left:
            job.report.note(line.name, why)
            print(f"{job.name} / {line.name}: {why}", flush=True)
