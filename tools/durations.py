"""Measure the duration of each test, to keep the default lane quick.

`python tools/durations.py [--full]` runs a lane in two processes and writes `tests/durations.json`:
for each test function of a second or more, the seconds of its slowest case, including setup. Run it
on an idle machine. A test of more than `MOST` seconds is measured again, alone, and that time
counts.

As a pytest plugin, which `tools/check.py` loads, it lists unmeasured tests that took more than
`MOST` seconds in a run of the default lane. Only measured times fail a check (in
tests/architecture/test_lanes.py), because any test is slow on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "tests" / "durations.json"
JUDGED = "tests/architecture/test_lanes.py::test_default_lane_has_no_slow_test"
"""The test that reads the file. It does not run while the file is being rewritten."""
MOST = 5.0
"""Longest test of the default lane, in seconds."""
KEPT = 1.0
"""Seconds. Shorter tests are not recorded in the file."""

Seconds = dict[str, float]


def measured(lane: str) -> Seconds:
    """Return the recorded seconds of a lane, by test function."""
    return dict(json.loads(FILE.read_text())[lane]["tests"]) if FILE.exists() else {}


def too_slow(tests: Mapping[str, float]) -> list[str]:
    """Return a line for each test that exceeds the limit of the default lane, slowest first."""
    slow = sorted((seconds, name) for name, seconds in tests.items() if seconds > MOST)
    return [f"{name} takes {seconds:.1f} s, more than {MOST:g}" for seconds, name in reversed(slow)]


class Recorder:
    """A pytest plugin that records the duration of each case, over all its phases."""

    def __init__(self) -> None:
        self.cases: Seconds = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.cases[report.nodeid] += report.duration

    def functions(self) -> Seconds:
        """Return the seconds of the slowest case of each test function."""
        found: Seconds = {}
        for case, seconds in self.cases.items():
            function = case.partition("[")[0]
            found[function] = max(seconds, found.get(function, 0.0))
        return found


class Notice(Recorder):
    """Lists slow tests that are not in the file."""

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        known = measured("default")
        slow = too_slow({n: s for n, s in self.functions().items() if n not in known})
        if slow:
            terminalreporter.section("tools/durations.py: slow, and never measured")
            for line in slow:
                terminalreporter.write_line(line)
            terminalreporter.write_line(
                "Measure on a quiet machine: python tools/durations.py. Mark a slow test as "
                "`full`, with its reason, or make it quicker."
            )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Notice(), "durations-notice")


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure how long each test takes.")
    parser.add_argument("--full", action="store_true", help="measure the full lane")
    full = parser.parse_args().full
    os.chdir(ROOT)
    recorder, started = Recorder(), time.monotonic()
    options = ["--numprocesses=2", "--dist=worksteal", f"--deselect={JUDGED}"]
    options += ["--full"] if full else []
    status = pytest.main(options, plugins=[recorder])
    if status != pytest.ExitCode.OK:
        print(f"nothing was written to {FILE}: the tests failed", file=sys.stderr)
        return int(status)
    seconds, found = time.monotonic() - started, recorder.functions()
    write("full" if full else "default", seconds, recorder, found | alone(found, options[2:]))
    return 0


def alone(found: Seconds, options: list[str]) -> Seconds:
    """Measure again, alone, the tests that were too slow in parallel. Return their seconds."""
    slow = [name for name, seconds in found.items() if seconds > MOST]
    recorder = Recorder()
    if slow:
        pytest.main(["--quiet", *options, *slow], plugins=[recorder])
    return recorder.functions()


def write(lane: str, seconds: float, recorder: Recorder, functions: Seconds) -> None:
    lanes: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    tests = {name: round(took, 1) for name, took in sorted(functions.items()) if took >= KEPT}
    lanes[lane] = {
        "measured": f"{date.today()}, {os.cpu_count()} cores, {platform.machine()}",
        "seconds": round(seconds),
        "cases": len(recorder.cases),
        "tests": tests,
    }
    FILE.write_text(json.dumps(lanes, indent=1) + "\n")
    print(f"wrote {FILE.relative_to(ROOT)}: {len(tests)} tests, {lanes[lane]['seconds']} s in all")


if __name__ == "__main__":
    sys.exit(main())
