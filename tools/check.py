"""Run the checks that guard a change: `tools/check.py [--full | --rest | --long | --changed |
--device cuda]`.

- Without an option: format, lint, types, layers, and the default lane of tests. Minutes.
- `--full`: the same checks, and the full lane of tests; what lands has passed it. It watches, too,
  that no branch of the code that decides and of the code that keeps bytes goes without a test.
  Before, in environments of their own, if these can be had: the site of the documentation is built,
  and the package, which is installed and used (tools/docs.py, tools/package.py); tests marked
  `floor` run with the oldest torch (tools/floor.py), and those of quantised models with the
  libraries that quantise (tools/quantised.py).
- `--rest`: what `--full` adds to a run without an option, for whom that has just passed (.ci/run).
  Format, lint, types and layers are not looked at again, nor does a test run that ran before as it
  would now. The two together are `--full`.
- `--long`: every test, with each search at full length; tests marked `floor` run with the newest
  Python, too (tools/newest.py). Hours, before a release.
- `--changed`: the same checks, and those tests of the default lane that mirror the files that
  differ from the branch `main` (on `main`: from the last commit). Seconds, while one works.

- `--device cuda`: the same checks, and those tests of the default lane that use an accelerator, on
  this one (tests/devices.py). Two minutes on 16 cores.

tests/lanes.py says what belongs to which lane. The checks run in a fixed order, cheapest first, and
pytest runs last, so that the last line printed is pytest's own summary. A failing check does not
hide the ones after it. The tests run in several processes at once.
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

# The tools come from the environment of the running interpreter, whatever PATH holds.
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
"""What is checked in environments of its own. Two at a time: these fetch packages for minutes, and
most of them use one core. The longest come first."""

BEFORE_RELEASE = {
    "newest Python": "tools/newest.py",
    "quantised models": "tools/quantised.py --long",
}
"""The same in the long lane, instead of or besides those."""

# Each process begins with its share of the tests, in their order, so that what several neighbours
# need is mostly made once; whichever is done first then takes over what another has not begun.
AT_ONCE = "--dist=worksteal"

# The default lane waits for disks, processes and other threads for a quarter of its time, so that
# three processes are quicker on two cores. The others have tests that want memory or the machine.
# The gates add no test: they look at tests that run anyway (see their docstrings).
LANES: dict[str, list[str]] = {
    "default": ["--numprocesses=3", "-p", "durations"],
    "full": ["--numprocesses=2", "--full", "-p", "coverage_gate"],
    "rest": ["--numprocesses=2", "--full", "--rest", "-p", "coverage_gate"],
    "long": ["--numprocesses=2", "--long"],
}

MOST_AT_ONCE = 16
"""Processes that share one device: each takes some of its memory for itself."""


def on_device(device: str) -> list[str]:
    """The tests that use an accelerator, on this one. How long each takes is another matter."""
    processes = min(os.cpu_count() or 1, MOST_AT_ONCE)
    return [f"--numprocesses={processes}", f"--device={device}", "-m", "accelerator"]


@dataclass
class Tally:
    """What has been checked so far; as a pytest plugin, it reports just above the summary line."""

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
    """The same for a check that runs beside another: what it printed comes when it has ended."""
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
    print(f"\n{text}", flush=True)  # in one call, so that the other's comes before or after it
    return done.returncode


def run_elsewhere(
    tally: Tally, run: Callable[[str, list[str]], int] = run_quietly, lane: str = "full"
) -> None:
    """Checks in other environments; where one is not to be had, the summary says so."""
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


# What a change concerns --------------------------------------------------------------------------


def changed_files() -> list[str]:
    """What differs from where this branch left `main`, and what git does not know yet."""
    base = git("merge-base", "HEAD", "main") or ["HEAD"]
    return sorted(
        {*git("diff", "--name-only", base[0]), *git("ls-files", "-o", "--exclude-standard")}
    )


def git(*words: str) -> list[str]:
    command = ["git", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.split("\n")[:-1]


def tests_of(files: Iterable[str], root: Path = ROOT) -> list[str]:
    """The tests that mirror these files, as paths for pytest.

    A test stands for itself, and what tests share for the tests of its folder. `tierstore/a/b.py`
    is mirrored by `tests/b`, or by `tests/a/test_b*.py`, or by `tests/a`, whichever there is; a
    module of the package itself by `tests/store`. Documents are mirrored by `tests/docs`, what
    measures by `tests/bench`, other tools by `tests/architecture`. Whatever else it is has no tests
    of its own.
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
    parser = argparse.ArgumentParser(description="Run the checks that guard a change.")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--full", action="store_true", help="run the full lane (40 minutes)")
    choice.add_argument(
        "--rest", action="store_true", help="what --full adds to a run that has just passed"
    )
    choice.add_argument("--long", action="store_true", help="run each search at length (hours)")
    choice.add_argument(
        "--changed", action="store_true", help="only the tests that mirror the changed files"
    )
    choice.add_argument(
        "--device", metavar="TYPE", help="the tests that use an accelerator, on this one: cuda"
    )
    chosen = parser.parse_args()
    os.chdir(ROOT)  # each tool finds pyproject.toml, and so what to look at, from here
    lane = next((name for name in LANES if getattr(chosen, name, False)), "default")
    tests = tests_of(changed_files()) if chosen.changed else []
    if chosen.changed and not tests:
        print("no test mirrors what was changed: only format, lint, types and layers are checked")
        return 1 if any([run_step(*step) for step in STEPS.items()]) else 0
    words = on_device(chosen.device) if chosen.device else LANES[lane]
    return 0 if run_all(lane, [*words, *tests]) else 1


if __name__ == "__main__":
    sys.exit(main())
