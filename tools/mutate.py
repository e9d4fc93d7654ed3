"""Seed small faults into the modules that decide and that keep bytes, and see who notices.

`python -m tools.mutate DIRECTORY [--share 0.3] [--seed 1] [MODULE ...]` copies the tree into
DIRECTORY and works there only. It first runs the tests below once, and notes which test runs which
line. Then it runs, for each mutant (tools/mutants.py), the tests that run its lines, quickest
first, until one fails or takes far too long. `results.jsonl` there gets a line for each mutant; the
same command goes on where it stopped. It ends with a table, and the mutants that nobody noticed.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import coverage
import pytest

from tools.mutants import Mutant, mutants_of, mutated

ROOT = Path(__file__).resolve().parent.parent

RANDOM = "tests/histories/test_planner_histories.py::test_every_promise_holds_in_random_histories"
HISTORIES = ["tests/histories/test_known_faults.py", f"{RANDOM}[next-use]", f"{RANDOM}[lru]"]
PLAN = ["tests/plan", "tests/conformance", *HISTORIES, "tests/simulation/test_simulation.py"]
# Others of these let a process die at each of its system calls: too slow for thousands of mutants.
DIRECTORY = [
    f"tests/tiers/test_directory.py::test_{name}"
    for name in (
        "what_a_commit_says_would_survive_a_power_cut",
        "the_object_is_a_safetensors_file_whose_data_begins_at_a_page",
        "the_last_of_two_puts_stays",
        "several_threads_commit_at_once",
        "nobody_else_may_look",
        "a_link_in_the_place_of_a_part_is_not_followed",
        "links_below_objects_are_not_followed",
        "what_is_not_ours_is_left_alone",
        "a_directory_of_another_format_is_refused_and_left_as_it_is",
        "one_live_store_holds_the_directory",
        "a_damaged_object_is_told_and_costs_its_own_key_only",
    )
]
FILES = [
    *DIRECTORY,
    "tests/system/test_files.py",
    "tests/system/test_file_table.py",
    "tests/system/test_locks.py",
    "tests/system/test_objects.py",
    "tests/system/test_writing.py",
    "tests/model/test_header.py",
    "tests/model/test_limits.py",
    "tests/model/test_scanning.py",
    "tests/model/test_stored_objects.py",
    "tests/store/test_checkpoint_files.py",
]
FILE_MODULES = (
    "model/header model/objects model/scanning engine/checkpoints "
    "tiers/directory system/files system/file_table system/locking system/objects"
)
PLAN_MODULES = (
    "copies eviction fallback_orders hint_events known_events lease_events movement "
    "planner policy prefetch records requests schedule transfer_events use_history"
)
TARGETS: dict[str, list[str]] = {
    **{f"tierstore/plan/{name}.py": PLAN for name in PLAN_MODULES.split()},
    **{f"tierstore/{name}.py": FILES for name in FILE_MODULES.split()},
}
COPIED = ["tierstore", "tests", "tools", "docs", "pyproject.toml", "README.md"]
LONGEST = 60.0
"""Seconds of tests for one mutant; the slowest of those that could notice it are left out."""
MEMORY = 8 << 30
KILLED, SURVIVED, SLOW, UNTESTED = "killed", "survived", "too slow", "untested"
QUIET = ["-q", "-x", "-p", "no:cacheprovider", "--basetemp=basetemp"]

Result = dict[str, Any]


class Contexts:
    """As a pytest plugin: notes how long each test takes, and which lines it runs."""

    def __init__(self) -> None:
        self.times: dict[str, float] = {}
        self.coverage = coverage.Coverage(data_file=None, include=list(TARGETS), config_file=False)
        self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self.coverage.switch_context(item.nodeid)
        began = time.monotonic()
        try:
            return (yield)
        finally:
            self.times[item.nodeid] = time.monotonic() - began

    def lines(self) -> dict[str, dict[int, list[str]]]:
        """Return the tests of each line of each file."""
        self.coverage.stop()
        data = self.coverage.get_data()
        return {
            os.path.relpath(name): {
                line: [context for context in contexts if context]
                for line, contexts in data.contexts_by_lineno(name).items()
            }
            for name in data.measured_files()
        }


def note_lines(tests: Sequence[str], into: Path) -> None:
    """Run the tests once. Ends the process if one fails."""
    contexts = Contexts()
    if status := pytest.main([*QUIET, *tests], plugins=[contexts]):
        sys.exit(f"without any mutant, pytest ends with {status!r}")
    into.write_text(json.dumps({"times": contexts.times, "lines": contexts.lines()}))


def tests_of(mutant: Mutant, noted: Any, successes: Mapping[str, int]) -> list[str]:
    """Return the tests that run the lines of a mutant, as many as the time allows.

    Those that noticed others before come first, then the quickest. Outside of functions, every test
    that runs anything of the module counts.
    """
    last = max(mutant.line, mutant.last_line)
    at = range(mutant.line, last + 1) if mutant.function else range(10**6)
    lines, times = noted["lines"].get(mutant.path, {}), noted["times"]
    found = {test for line, tests in lines.items() if int(line) in at for test in tests}
    chosen, spent = [], 0.0
    for test in sorted(found, key=lambda test: (-successes[test], times[test])):
        spent += times[test]
        if spent > LONGEST and chosen:
            break
        chosen.append(test)
    return chosen


def judge(mutant: Mutant, noted: Any, successes: Counter[str]) -> Result:
    """Run the tests of a mutant, in a process whose module has the fault."""
    tests = tests_of(mutant, noted, successes)
    path, began, status, by = Path(mutant.path), time.monotonic(), UNTESTED, ""
    if tests:
        source = path.read_text()
        path.write_text(ast.unparse(mutated(source, mutant)))
        try:
            done = subprocess.run(
                [sys.executable, "-B", "-m", "pytest", *QUIET, *tests],
                timeout=30.0 + 3.0 * sum(noted["times"][test] for test in tests),
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY)),
                check=False,
                capture_output=True,
                text=True,
            )
            status = KILLED if done.returncode else SURVIVED
            by = next((test for test in tests if f"FAILED {test}" in done.stdout), "")
        except subprocess.TimeoutExpired:
            status = SLOW
        finally:
            path.write_text(source)
    successes[by] += by != ""
    seconds = round(time.monotonic() - began, 2)
    return asdict(mutant) | {"status": status, "seconds": seconds, "tests": len(tests), "by": by}


def run_all(mutants: Sequence[Mutant], noted: Any, results: Path) -> None:
    """Judge the mutants that have no result yet."""
    names = ("path", "place", "choice", "before", "after")
    done = [[result[name] for name in names] for result in read(results)]
    successes: Counter[str] = Counter()
    with results.open("a") as file:
        for mutant in mutants:
            if [getattr(mutant, name) for name in names] not in done:
                print(json.dumps(judge(mutant, noted, successes)), file=file, flush=True)


def read(results: Path) -> list[Result]:
    """Return the results so far."""
    lines = results.read_text().splitlines() if results.exists() else []
    return [json.loads(line) for line in lines]


def report(results: Sequence[Result]) -> None:
    """Print how many mutants of each module were noticed, and those that were not."""
    for path in sorted({r["path"] for r in results}):
        seen = Counter(r["status"] for r in results if r["path"] == path)
        noticed = seen[KILLED] + seen[SLOW]
        print(f"{path}: {noticed} of {seen.total()} ({noticed / seen.total():.1%})")
    for result in results:
        if result["status"] in (SURVIVED, UNTESTED):
            where = f"{result['path']}:{result['line']}"
            print(f"{where} {result['status']}: {result['before']}  ->  {result['after']}")


def copy_tree(directory: Path) -> None:
    """Copy the tree as it is now, unless there is a copy already."""
    if directory.exists():
        return
    directory.mkdir(parents=True)
    for name in COPIED:
        source, target = ROOT / name, directory / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)


def main() -> None:
    parser = argparse.ArgumentParser(description="Seed small faults and see who notices.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("modules", nargs="*", help="those with this in their path; or else all")
    parser.add_argument("--share", type=float, default=1.0, help="of the mutants, drawn at random")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only-report", action="store_true")
    options = parser.parse_args()
    wanted = options.modules or [""]
    modules = [path for path in TARGETS if any(part in path for part in wanted)]
    results = options.directory.absolute() / "results.jsonl"
    if not options.only_report:
        copy_tree(options.directory)
        os.chdir(options.directory)
        noted = Path("noted.json").absolute()
        if not noted.exists():
            child = os.fork()  # what the tests import is of the copy, and stays there
            if child == 0:
                sys.path.insert(0, os.getcwd())
                note_lines(sorted({test for path in modules for test in TARGETS[path]}), noted)
                os._exit(0)
            os.waitpid(child, 0)
        every = [m for path in modules for m in mutants_of(path, Path(path).read_text())]
        # In random order: a run that is stopped early has a fair sample, too.
        chosen = random.Random(options.seed).sample(every, round(options.share * len(every)))
        run_all(chosen, json.loads(noted.read_text()), results)
    report(read(results))


if __name__ == "__main__":
    main()
