"""Measure a GPU: `python -m tools.gpu --minutes N`. See `tools/gpu/__init__.py`."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from tools.gpu.bench import Bench, found_device, hardware
from tools.gpu.lines import Report, measure
from tools.gpu.parts import PARTS, Part
from tools.gpu.schedule import Job, Schedule, die_with

TIDYING = 10.0
"""Seconds kept for deleting files at the end."""
SCALE = {False: 1.0, True: 0.1}
"""Trials take about so much of the time of real lines."""
SAME = ("name", "commit", "versions")
"""What two runs must have in common to be one."""


def job_of(part: Part, bench: Bench, out: Path, about: dict[str, Any], ends: float) -> Job:
    """The job of a part. Its processes are this module with `--part`."""
    words = [sys.executable, "-m", "tools.gpu", "--part", part.name, "--parent", str(os.getpid())]
    words += ["--device", str(bench.device), "--out", str(out), "--dir", str(bench.place)]
    words += ["--ends", repr(ends), *["--small"] * bench.small]
    report = Report(out / f"{part.name}.json", part.groups(bench), {"command": part.page, **about})
    return Job(part.name, part.step, report, words)


def work(part: Part, bench: Bench, out: Path, ends: float) -> None:
    """Measure the lines of a part that are left, in a process for that."""
    report = Report(out / f"{part.name}.json", part.groups(bench), {})
    measure(report, bench.figures, ends, scale=SCALE[bench.small])
    left = sorted(x.name for x in threading.enumerate() if x is not threading.main_thread())
    if left:
        report.remark(f"threads of a process that ends: {', '.join(left)}")


def results(out: Path) -> dict[str, Any]:
    """The documents of a directory, by file name."""
    return {path.name: json.loads(path.read_text()) for path in sorted(out.glob("*.json"))}


def known(documents: dict[str, Any]) -> dict[str, Any]:
    """The figures of all lines that are done."""
    lines = (line for document in documents.values() for line in document["lines"])
    return {line["name"]: line["figures"] for line in lines if line["done"]}


def check_same(documents: dict[str, Any], about: dict[str, Any], out: Path) -> None:
    """Raises ValueError if results come from another machine, version, or kind of run."""

    def of(document: dict[str, Any]) -> list[Any]:
        return [document["small"], *(document["hardware"].get(name) for name in SAME)]

    for name, document in documents.items():
        if of(document) != of(about):
            raise ValueError(
                f"{out / name} is of another machine, commit, or kind of run: name another --out"
            )


def main(words: Sequence[str] | None = None) -> int:
    """Run with these words, or those of the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu", description=__doc__)
    parser.add_argument("--minutes", type=float, default=12.0, help="when to end (12)")
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="directory of results (gpu)")
    parser.add_argument("--device", default="cuda", help="the device (cuda), or: pretend")
    parser.add_argument("--dir", type=Path, help="where weights and stores have their files")
    parser.add_argument("--small", action="store_true", help="small sizes: does it run?")
    names = [part.name for part in PARTS]
    parser.add_argument("--only", action="append", choices=names, help="measure this part")
    for internal in ("--part", "--parent", "--ends"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    passed = time.time() - psutil.Process().create_time()  # importing torch takes seconds
    ends = time.monotonic() - passed + 60 * options.minutes - TIDYING
    if options.part:
        die_with(int(options.parent))
    try:
        device = found_device(options.device)
        if options.part:
            bench = Bench(device, options.small, options.dir, float(options.ends))
            bench.figures |= known(results(options.out))
            work(PARTS[names.index(options.part)], bench, options.out, bench.ends)
            return 0
        options.out.mkdir(parents=True, exist_ok=True)
        about = {
            "small": options.small,
            "began": time.strftime("%Y-%m-%d %H:%M:%S"),
            "hardware": hardware(device),
        }
        check_same(results(options.out), about, options.out)
        place = Path(tempfile.mkdtemp(prefix="tierstore-gpu-", dir=options.dir))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        bench = Bench(device, options.small, place, ends)
        chosen = [part for part in PARTS if part.name in (options.only or names)]
        jobs = [job_of(part, bench, options.out.resolve(), about, ends) for part in chosen]
        Schedule(jobs, ends).run()
    finally:
        shutil.rmtree(place, ignore_errors=True)
    counts = [
        (sum(e.done for e in job.report.entries.values()), len(job.report.lines)) for job in jobs
    ]
    done, there = (sum(column) for column in zip(*counts, strict=True))
    print(f"{done} of {there} lines are done; the same command with the same --out goes on")
    return int(any(job.report.missed for job in jobs))


if __name__ == "__main__":
    sys.exit(main())
