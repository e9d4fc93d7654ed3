"""How long each test takes, so that the default lane stays quick.

`python tools/durations.py [--full]` runs a lane in two processes, one for each core, and writes
`tests/durations.json`: for each test function that took a second or more, the seconds of its
slowest case, with its setup. Run it on a machine that does nothing else. A test that took more
than `MOST` seconds is measured again, alone, and counts with what it took then.

As a pytest plugin, which `tools/check.py` loads, it names after a run of the default lane each test
that was never measured and took more than `MOST` seconds. Only measured times are judged, by
tests/architecture/test_lanes.py: a busy machine makes any test slow, so that a run by itself proves
nothing.
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
JUDGED = "tests/architecture/test_lanes.py::test_no_test_of_the_default_lane_is_slow"
"""The test that looks at the file. It is not run while the file is made anew."""
MOST = 5.0
"""Seconds that a test of the default lane may take."""
KEPT = 1.0
"""Seconds from which on the file has a test."""

Seconds = dict[str, float]


def measured(lane: str) -> Seconds:
    """What the file says of a lane: seconds by test function."""
    return dict(json.loads(FILE.read_text())[lane]["tests"]) if FILE.exists() else {}


def too_slow(tests: Mapping[str, float]) -> list[str]:
    """A line for each test that takes longer than the default lane allows, the slowest first."""
    slow = sorted((seconds, name) for name, seconds in tests.items() if seconds > MOST)
    return [f"{name} takes {seconds:.1f} s, more than {MOST:g}" for seconds, name in reversed(slow)]


class Recorder:
    """As a pytest plugin: how long each case took, all its phases together."""

    def __init__(self) -> None:
        self.cases: Seconds = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.cases[report.nodeid] += report.duration

    def functions(self) -> Seconds:
        """The slowest case of each test function."""
        found: Seconds = {}
        for case, seconds in self.cases.items():
            function = case.partition("[")[0]
            found[function] = max(seconds, found.get(function, 0.0))
        return found


class Notice(Recorder):
    """Names each slow test that the file does not know."""

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
    parser.add_argument("--full", action="store_true", help="those of the full lane")
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
    """How long those take that were too slow beside others, each by itself."""
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
