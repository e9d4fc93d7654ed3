"""Measure a GPU: `python -m tools.gpu --minutes N`. See `tools/gpu/__init__.py`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from tools.gpu.bench import Bench, found_device, hardware
from tools.gpu.lines import Report
from tools.gpu.parts import PARTS, Part, lines_of
from tools.gpu.schedule import Job, Schedule

TIDYING = 10.0
"""Seconds reserved for deleting files at the end."""
SCALE = {False: 1.0, True: 0.1}
"""Approximate duration of lines in a trial, as a share of a real run's."""
SAME = ("name", "commit", "versions")
"""Fields that must be equal for a run to resume another."""


def job_of(part: Part, bench: Bench, out: Path, about: dict[str, Any]) -> Job:
    """Return the job of a part."""
    report = Report(out / f"{part.name}.json", part.groups(bench), {"command": part.page, **about})
    words = part.name, str(bench.device), bench.small, bench.place, bench.ends
    return Job(part.name, part.step, report, lines_of, words)


def check_same(about: dict[str, Any], out: Path) -> None:
    """Raise ValueError if existing results are from another machine, version or kind of run."""

    def of(document: dict[str, Any]) -> list[Any]:
        return [document["small"], *(document["hardware"].get(name) for name in SAME)]

    for path in sorted(out.glob("*.json")):
        if of(json.loads(path.read_text())) != of(about):
            raise ValueError(
                f"{path} is from another machine, commit or kind of run: choose another --out"
            )


def main(words: Sequence[str] | None = None) -> int:
    """Run the benchmarks, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=12.0, help="time limit in minutes (default: 12)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("gpu"), help="directory for results (default: gpu)"
    )
    parser.add_argument("--device", default="cuda", help="device, or pretend (default: cuda)")
    parser.add_argument("--dir", type=Path, help="directory for weights and stores")
    parser.add_argument("--small", action="store_true", help="small sizes, for a trial run")
    names = [part.name for part in PARTS]
    parser.add_argument("--only", action="append", choices=names, help="run only this part")
    options = parser.parse_args(words)
    passed = time.time() - psutil.Process().create_time()  # importing torch takes seconds
    ends = time.monotonic() - passed + 60 * options.minutes - TIDYING
    try:
        device = found_device(options.device)
        options.out.mkdir(parents=True, exist_ok=True)
        about = {
            "small": options.small,
            "began": time.strftime("%Y-%m-%d %H:%M:%S"),
            "hardware": hardware(device),
        }
        check_same(about, options.out)
        place = tempfile.TemporaryDirectory(
            prefix="tierstore-gpu-", dir=options.dir, ignore_cleanup_errors=True
        )
    except (ValueError, OSError) as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with place as name:
        bench = Bench(device, options.small, Path(name), ends)
        chosen = [part for part in PARTS if part.name in (options.only or names)]
        jobs = [job_of(part, bench, options.out, about) for part in chosen]
        Schedule(jobs, ends, SCALE[options.small]).run()
    entries = [entry for job in jobs for entry in job.report.entries.values()]
    done = sum(entry.done for entry in entries)
    print(f"{done} of {len(entries)} lines are done; the same command with the same --out resumes")
    return int(any(job.report.missed for job in jobs))


if __name__ == "__main__":
    sys.exit(main())
