"""Mutation testing of the planner and of the modules that store bytes.

`python -m tools.mutate DIRECTORY [--share 0.3] [--seed 1] [MODULE ...]` copies the tree into
DIRECTORY and works only there. It runs the tests below once, recording the lines that each runs.
Then, for each mutant (tools/mutants.py), it runs the tests that cover its lines, quickest first,
until one fails or takes far too long. Each result is a line of `results.jsonl`; running the same
command again resumes. At the end, it prints a table and the surviving mutants.
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

RANDOM = "tests/histories/test_planner_histories.py::test_random_histories_keep_every_promise"
HISTORIES = ["tests/histories/test_known_faults.py", f"{RANDOM}[next-use]", f"{RANDOM}[lru]"]
PLAN = ["tests/plan", "tests/conformance", *HISTORIES, "tests/simulation/test_simulation.py"]
# The other fault tests kill a process at each system call: too slow for thousands of mutants.
DIRECTORY = [
    f"tests/tiers/test_directory.py::test_{name}"
    for name in (
        "commit_report_matches_a_power_cut",
        "object_is_a_safetensors_file_with_page_aligned_data",
        "two_puts_keep_the_last",
        "concurrent_commits_succeed",
        "directory_is_private_to_its_user",
        "symlinked_part_is_not_followed",
        "links_below_objects_are_not_followed",
        "foreign_files_are_left_alone",
        "directory_of_another_format_raises_and_is_kept",
        "directory_has_one_live_store",
        "damaged_object_costs_its_own_key_only",
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
    "copies eviction fallback_orders hint_events registration_events lease_events movement "
    "planner policy prefetch records requests schedule transfer_events use_history"
)
TARGETS: dict[str, list[str]] = {
    **{f"tierstore/plan/{name}.py": PLAN for name in PLAN_MODULES.split()},
    **{f"tierstore/{name}.py": FILES for name in FILE_MODULES.split()},
}
COPIED = ["tierstore", "tests", "tools", "docs", "pyproject.toml", "README.md"]
LONGEST = 60.0
"""Time limit of the tests for one mutant, in seconds; slower tests are left out."""
MEMORY = 8 << 30
KILLED, SURVIVED, SLOW, UNTESTED = "killed", "survived", "too slow", "untested"
QUIET = ["-q", "-x", "-p", "no:cacheprovider", "--basetemp=basetemp"]

Result = dict[str, Any]


class Contexts:
    """A pytest plugin that records the duration and the covered lines of each test."""

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
        sys.exit(f"without any mutant, pytest exits with {status!r}")
    into.write_text(json.dumps({"times": contexts.times, "lines": contexts.lines()}))


def tests_of(mutant: Mutant, noted: Any, successes: Mapping[str, int]) -> list[str]:
    """Return the tests that cover the lines of a mutant, as many as the time limit allows.

    Tests that detected other mutants come first, then the quickest. For a mutant outside functions,
    all tests that cover any line of the module count.
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
    """Run the tests of a mutant in a process whose module has the fault."""
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
    """Print the detected share of each module's mutants, and the surviving mutants."""
    for path in sorted({r["path"] for r in results}):
        seen = Counter(r["status"] for r in results if r["path"] == path)
        noticed = seen[KILLED] + seen[SLOW]
        print(f"{path}: {noticed} of {seen.total()} ({noticed / seen.total():.1%})")
    for result in results:
        if result["status"] in (SURVIVED, UNTESTED):
            where = f"{result['path']}:{result['line']}"
            print(f"{where} {result['status']}: {result['before']}  ->  {result['after']}")


def copy_tree(directory: Path) -> None:
    """Copy the current tree, unless there is a copy already."""
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
    parser = argparse.ArgumentParser(description="Mutation testing.")
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "modules", nargs="*", help="modules whose path contains this (default: all)"
    )
    parser.add_argument(
        "--share",
        type=float,
        default=1.0,
        help="random share of the mutants to test (default: 1.0)",
    )
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
            child = os.fork()  # imports of the copied modules stay in the child
            if child == 0:
                sys.path.insert(0, os.getcwd())
                note_lines(sorted({test for path in modules for test in TARGETS[path]}), noted)
                os._exit(0)
            os.waitpid(child, 0)
        every = [m for path in modules for m in mutants_of(path, Path(path).read_text())]
        # In random order, so that an interrupted run is a fair sample.
        chosen = random.Random(options.seed).sample(every, round(options.share * len(every)))
        run_all(chosen, json.loads(noted.read_text()), results)
    report(read(results))


if __name__ == "__main__":
    main()
