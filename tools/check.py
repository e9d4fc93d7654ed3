"""Run every check that guards a change: `python tools/check.py [--fast]`.

The checks run in a fixed order, cheapest first, and pytest runs last, so that the last line
printed is pytest's own summary. It runs the tests in two processes at once, and watches that no
branch of the code that decides and of the code that keeps bytes goes without a test. A failing
check does not hide the ones after it, except with `--fast`, which stops at the first failure and
leaves out the tests marked slow, and that watch.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# The tools come from the environment of the running interpreter, whatever PATH holds.
PROGRAMS = Path(sys.executable).parent

STEPS: dict[str, list[str]] = {
    "ruff format": ["ruff", "format", "--check", "."],
    "ruff check": ["ruff", "check", "."],
    "mypy": ["mypy"],
    "lint-imports": ["lint-imports", "--no-cache", "--no-logo"],
}

# Each process begins with half of the tests, in their order, so that what several neighbours need
# is mostly made once; whichever is done first then takes over what the other has not begun.
TWO_AT_ONCE = ["--numprocesses=2", "--dist=worksteal"]


@dataclass
class Tally:
    """What has been checked so far; as a pytest plugin, it reports just above the summary line."""

    started: float = field(default_factory=time.monotonic)
    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def record(self, name: str, succeeded: bool) -> None:
        (self.passed if succeeded else self.failed).append(name)

    def lines(self) -> list[str]:
        seconds = time.monotonic() - self.started
        lines = [f"passed: {', '.join(self.passed) or 'none'}"]
        if self.failed:
            lines.append(f"FAILED: {', '.join(self.failed)}")
        return [*lines, f"total time: {seconds:.1f} s"]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("tools/check.py")
        for line in self.lines():
            terminalreporter.write_line(line)


def heading(name: str) -> None:
    print(f"\n===== {name} =====", flush=True)


def run_step(name: str, command: list[str]) -> bool:
    heading(name)
    program, *arguments = command
    started = time.monotonic()
    status = subprocess.run([PROGRAMS / program, *arguments], check=False).returncode
    outcome = "passed" if status == 0 else f"FAILED with exit status {status}"
    print(f"{name} {outcome} in {time.monotonic() - started:.1f} s", flush=True)
    return status == 0


def run_tests(tally: Tally, fast: bool) -> bool:
    heading("pytest")
    # The gate adds no test: it watches some of those that run anyway (see tools/coverage_gate.py).
    how = ["-m", "not slow", "--exitfirst"] if fast else ["-p", "coverage_gate"]
    return pytest.main([*TWO_AT_ONCE, *how], plugins=[tally]) == pytest.ExitCode.OK


def run_all(fast: bool) -> bool:
    tally = Tally()
    for name, command in STEPS.items():
        succeeded = run_step(name, command)
        tally.record(name, succeeded)
        if fast and not succeeded:
            print("\n" + "\n".join(tally.lines()))
            return False
    return run_tests(tally, fast) and not tally.failed


def main() -> int:
    parser = argparse.ArgumentParser(description="Run every check that guards a change.")
    parser.add_argument(
        "--fast",
        action="store_true",
        help="leave out the tests marked slow and stop at the first failure",
    )
    arguments = parser.parse_args()
    os.chdir(ROOT)  # each tool finds pyproject.toml, and so what to look at, from here
    return 0 if run_all(arguments.fast) else 1


if __name__ == "__main__":
    sys.exit(main())
