"""Run the checks for a change.

    tools/check.py [--full | --rest | --long | --changed | --device cuda]

- No option: format, lint, types, layers, and the default lane of tests. Takes minutes.
- `--full`: the same checks and the full lane of tests, required for merging. It also requires that
  tests cover every branch of the guarded modules (tools/coverage_gate.py). Before that, in separate
  environments if their packages can be installed: builds the documentation site (tools/docs.py),
  builds, installs and uses the package (tools/package.py), runs tests marked `floor` with the
  oldest torch (tools/floor.py), and runs the tests of quantised models with the quantisation
  libraries (tools/quantised.py).
- `--rest`: the part of `--full` that a passed run without an option did not cover (.ci/run). Skips
  format, lint, types, layers, and tests that would run as before.
- `--long`: every test, with each search at full length; also runs tests marked `floor` with the
  newest Python (tools/newest.py). Takes hours; run it before a release.
- `--changed`: the same checks, and the tests of the default lane that mirror the files that differ
  from the branch `main` (on `main`: from the last commit). Takes seconds.
- `--device cuda`: the same checks, and the tests of the default lane that use an accelerator, on
  that device (tests/devices.py). Takes two minutes on 16 cores.

tests/lanes.py assigns tests to lanes. Checks run in a fixed order, cheapest first. pytest runs
last, in several processes, so the last line of output is pytest's summary. A failing check does
not stop the following ones.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.environments import NOT_INSTALLED

ROOT = Path(__file__).resolve().parent.parent

# Use the tools of the running interpreter's environment, not those on PATH.
PROGRAMS = Path(sys.executable).parent

STEPS: dict[str, list[str]] = {
    "ruff format": ["ruff", "format", "--check", "."],
    "ruff check": ["ruff", "check", "."],
    "mypy": ["mypy"],
    "lint-imports": ["lint-imports", "--no-cache", "--no-logo"],
}

ELSEWHERE = {
    "oldest torch": "tools/floor.py",
    "package": "tools/package.py",
    "quantised models": "tools/quantised.py",
    "docs site": "tools/docs.py",
}
"""Checks that run in separate environments, the longest first.

Two run at a time, because they download packages for minutes and most use one core.
"""

BEFORE_RELEASE = {
    "newest Python": "tools/newest.py",
    "quantised models": "tools/quantised.py --long",
}
"""Checks in separate environments that the long lane adds or replaces."""

# Each process starts with a contiguous share of the tests, so that neighbours share fixtures. A
# process that finishes early takes over tests that another has not begun.
AT_ONCE = "--dist=worksteal"

# The default lane spends a quarter of its time waiting for disks, processes and other threads, so
# three processes are faster on two cores. The other lanes have tests that need memory or the whole
# machine. The gates add no tests: they observe tests that run anyway (see their docstrings).
LANES: dict[str, list[str]] = {
    "default": ["--numprocesses=3", "-p", "durations"],
    "full": ["--numprocesses=2", "--full", "-p", "coverage_gate"],
    "rest": ["--numprocesses=2", "--full", "--rest", "-p", "coverage_gate"],
    "long": ["--numprocesses=2", "--long"],
}

MOST_AT_ONCE = 16
"""Largest number of processes on one device: each reserves part of its memory."""


def on_device(device: str) -> list[str]:
    """Return the pytest arguments for the tests that use an accelerator, without the time gate."""
    processes = min(os.cpu_count() or 1, MOST_AT_ONCE)
    return [f"--numprocesses={processes}", f"--device={device}", "-m", "accelerator"]


@dataclass
class Tally:
    """The results so far. As a pytest plugin, it prints them just above the summary line."""

    started: float = field(default_factory=time.monotonic)
    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)

    def record(self, name: str, succeeded: bool) -> None:
        (self.passed if succeeded else self.failed).append(name)

    def lines(self) -> list[str]:
        seconds = time.monotonic() - self.started
        lines = [f"passed: {', '.join(self.passed) or 'none'}"]
        if self.failed:
            lines.append(f"FAILED: {', '.join(self.failed)}")
        if self.not_run:
            lines.append(f"NOT RUN: {', '.join(self.not_run)}")
        return [*lines, f"total time: {seconds:.1f} s"]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("tools/check.py")
        for line in self.lines():
            terminalreporter.write_line(line)


def heading(name: str) -> None:
    print(f"\n===== {name} =====", flush=True)


def run_step(name: str, command: list[str]) -> int:
    heading(name)
    program, *arguments = command
    started = time.monotonic()
    status = subprocess.run([PROGRAMS / program, *arguments], check=False).returncode
    outcome = "passed" if status == 0 else f"FAILED with exit status {status}"
    print(f"{name} {outcome} in {time.monotonic() - started:.1f} s", flush=True)
    return status


def run_quietly(name: str, command: list[str]) -> int:
    """Run a check in parallel to another, and print its output at the end."""
    program, *arguments = command
    started = time.monotonic()
    done = subprocess.run(
        [PROGRAMS / program, *arguments],
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    outcome = "passed" if done.returncode == 0 else f"FAILED with exit status {done.returncode}"
    seconds = time.monotonic() - started
    text = f"===== {name} =====\n{done.stdout}{name} {outcome} in {seconds:.1f} s"
    print(f"\n{text}", flush=True)  # one call, so that outputs do not interleave
    return done.returncode


def run_elsewhere(
    tally: Tally, run: Callable[[str, list[str]], int] = run_quietly, lane: str = "full"
) -> None:
    """Run checks in other environments. The summary lists those whose packages are missing."""
    checks = ELSEWHERE | (BEFORE_RELEASE if lane == "long" else {})
    with ThreadPoolExecutor(2) as pool:
        statuses = pool.map(lambda name: run(name, ["python", *checks[name].split()]), checks)
    for name, status in zip(checks, statuses, strict=True):
        if status == NOT_INSTALLED:
            tally.not_run.append(name)
        else:
            tally.record(name, status == 0)


def run_tests(tally: Tally, arguments: Sequence[str]) -> bool:
    heading("pytest")
    return pytest.main([AT_ONCE, *arguments], plugins=[tally]) == pytest.ExitCode.OK


# Tests of changed files --------------------------------------------------------------------------


def changed_files() -> list[str]:
    """Return the files that differ from the merge base with `main`, and untracked files."""
    base = git("merge-base", "HEAD", "main") or ["HEAD"]
    return sorted(
        {*git("diff", "--name-only", base[0]), *git("ls-files", "-o", "--exclude-standard")}
    )


def git(*words: str) -> list[str]:
    command = ["git", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.split("\n")[:-1]


def tests_of(files: Iterable[str], root: Path = ROOT) -> list[str]:
    """Return the tests that mirror these files, as paths for pytest.

    A test file mirrors itself; a shared test module is mirrored by its folder. `tierstore/a/b.py`
    is mirrored by `tests/b`, `tests/a/test_b*.py` or `tests/a`, whichever exists; a module at the
    top of the package by `tests/store`. Documents are mirrored by `tests/docs`, benchmarks by
    `tests/bench`, other tools by `tests/architecture`. Other files have no tests.
    """
    found: dict[str, None] = {}
    for name in files:
        path = Path(name)
        places = [place for place in _mirrors(path, root) if (root / place).exists()]
        found.update(dict.fromkeys(map(str, places)))
    inside = [place for place in found if any(str(p) in found for p in Path(place).parents)]
    return [place for place in found if place not in inside]


def _mirrors(path: Path, root: Path) -> list[Path]:
    tests = Path("tests")
    match path.parts:
        case ("tests", _):
            return [tests] if path.name in ("conftest.py", "lanes.py") else []
        case ("tests", *_):
            return [path if path.name.startswith("test_") else path.parent]
        case ("tierstore", *_) if (root / tests / path.stem).is_dir():
            return [tests / path.stem]
        case ("tierstore", *folders, _):
            folder = tests.joinpath(folders[-1] if folders else "store")
            named = sorted((root / folder).glob(f"test_{path.stem}*.py"))
            return [each.relative_to(root) for each in named] or [folder]
        case ("docs", *_) | ("README.md",):
            return [tests / "docs"]
        case ("tools", *_):
            measures = {"bench", "gpu"} & set(path.parts)
            return [tests / "bench"] if measures else [tests / "architecture"]
    return []


# -------------------------------------------------------------------------------------------------


def run_all(lane: str, arguments: Sequence[str]) -> bool:
    tally = Tally()
    for name, command in STEPS.items() if lane != "rest" else ():
        tally.record(name, run_step(name, command) == 0)
    if lane != "default":
        run_elsewhere(tally, lane=lane)
    return run_tests(tally, arguments) and not tally.failed


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the checks for a change.")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--full", action="store_true", help="run the full lane (40 minutes)")
    choice.add_argument(
        "--rest", action="store_true", help="run the part of --full that a passed run did not cover"
    )
    choice.add_argument("--long", action="store_true", help="run each search at length (hours)")
    choice.add_argument(
        "--changed", action="store_true", help="run only the tests that mirror changed files"
    )
    choice.add_argument(
        "--device", metavar="TYPE", help="run the tests that use an accelerator on TYPE, e.g. cuda"
    )
    chosen = parser.parse_args()
    os.chdir(ROOT)  # the tools find pyproject.toml here
    lane = next((name for name in LANES if getattr(chosen, name, False)), "default")
    tests = tests_of(changed_files()) if chosen.changed else []
    if chosen.changed and not tests:
        print("no test mirrors the changed files: checking only format, lint, types and layers")
        return 1 if any([run_step(*step) for step in STEPS.items()]) else 0
    words = on_device(chosen.device) if chosen.device else LANES[lane]
    return 0 if run_all(lane, [*words, *tests]) else 1


if __name__ == "__main__":
    sys.exit(main())
