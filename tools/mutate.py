"""Seed small faults into the modules that decide and that keep bytes, and see who notices.

`python -m tools.mutate DIRECTORY [--share 0.3] [--seed 1] [MODULE ...]` copies the tree into
DIRECTORY and works there only. It first runs the tests below once, and notes which test runs which
line. Then it runs, for each mutant, the tests that run its lines, quickest first, until one fails
or takes far too long. `results.jsonl` there gets a line for each mutant; who starts again with the
same directory goes on where it stopped. It ends with a table, and the mutants that nobody noticed.

One process starts, collects the tests and never runs any. Each mutant gets a fork of it, in which
the code of one function is replaced. A mutant outside of functions gets a process from scratch.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
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
    "planner policy prefetch records requests retention schedule transfer_events use_history"
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

Times = dict[str, float]
Runners = dict[str, dict[int, list[str]]]


class Session:
    """As a pytest plugin: what to do with the tests once they are collected."""

    def __init__(self, work: Callable[[Mapping[str, pytest.Item]], None]) -> None:
        self._work = work

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._work({item.nodeid: item for item in session.items})
        return True


class FirstFailure:
    """As a pytest plugin, in a fork: ends it with exit status 1 at the first failure."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            Path("output").write_text(report.nodeid)
            os._exit(1)


def run_items(items: Sequence[pytest.Item]) -> None:
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.ihook.pytest_runtest_protocol(item=item, nextitem=following)


def with_items(tests: Sequence[str], work: Callable[[Mapping[str, pytest.Item]], None]) -> None:
    quiet = ["-q", "-p", "no:cacheprovider", "-p", "no:terminalreporter", "--basetemp=basetemp"]
    pytest.main([*quiet, *tests], plugins=[Session(work)])


# Who runs what -----------------------------------------------------------------------------------


def note_lines(tests: Sequence[str], into: Path) -> None:
    """Run the tests once; write how long each takes, and which lines it runs."""

    def work(items: Mapping[str, pytest.Item]) -> None:
        times: Times = {}
        for item in items.values():
            measured.switch_context(item.nodeid)
            began = time.monotonic()
            run_items([item])
            times[item.nodeid] = time.monotonic() - began
        measured.stop()
        data = measured.get_data()
        lines = {
            os.path.relpath(name): {
                line: [c for c in contexts if c]
                for line, contexts in data.contexts_by_lineno(name).items()
            }
            for name in data.measured_files()
        }
        into.write_text(json.dumps({"times": times, "lines": lines}))

    class Tell:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                print(f"without any mutant, {report.nodeid} fails:\n{report.longreprtext}")
                os._exit(1)

    measured = coverage.Coverage(data_file=None, include=list(TARGETS), config_file=False)
    measured.start()
    quiet = ["-q", "-p", "no:cacheprovider", "-p", "no:terminalreporter", "--basetemp=basetemp"]
    pytest.main([*quiet, *tests], plugins=[Session(work), Tell()])


def who_runs(
    mutant: Mutant, times: Times, lines: Runners, successes: Mapping[str, int]
) -> list[str]:
    """The tests that run the lines of a mutant, as many as the time allows.

    Those that noticed others before come first, then the quickest.
    """
    by_line = lines.get(mutant.path, {})
    if mutant.function:
        at = range(mutant.line, max(mutant.line, mutant.last_line) + 1)
    else:  # outside of functions: whoever runs anything of the module
        at = range(10**6)
    found = {test for line, tests in by_line.items() if int(line) in at for test in tests}
    chosen, spent = [], 0.0
    for test in sorted(found, key=lambda test: (-successes[test], times[test])):
        spent += times[test]
        if spent > LONGEST and chosen:
            break
        chosen.append(test)
    return chosen


# One mutant --------------------------------------------------------------------------------------


def functions_of(owner: Any, module: str) -> Iterator[types.FunctionType]:
    """The plain functions of a module or class, out of whatever wraps them."""
    for value in list(vars(owner).values()):
        if isinstance(value, type) and value.__module__ == module:
            yield from functions_of(value, module)
        for name in ("fget", "__func__", "func", "__wrapped__"):
            value = getattr(value, name, value)
        if isinstance(value, types.FunctionType) and value.__module__ == module:
            yield value


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from codes_of(constant)


def replace_function(mutant: Mutant, source: str) -> bool:
    """Put the mutant's code into the function that is there. False if it is not to be found."""
    module = import_module(mutant.path.removesuffix(".py").replace("/", "."))
    compiled = compile(mutated(source, mutant), mutant.path, "exec")
    new = [code for code in codes_of(compiled) if code.co_qualname == mutant.function]
    there = [f for f in functions_of(module, module.__name__) if f.__qualname__ == mutant.function]
    if len(new) != 1 or not there or new[0].co_freevars != there[0].__code__.co_freevars:
        return False
    for function in there:
        function.__code__ = new[0]
    return True


def in_a_fork(mutant: Mutant, source: str, items: Sequence[pytest.Item], limit: float) -> str:
    output = Path("output")
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        os.setpgid(0, 0)
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        try:
            if not replace_function(mutant, source):
                os._exit(3)
            items[0].config.pluginmanager.register(FirstFailure())
            run_items(items)
        except BaseException:
            os._exit(1)
        os._exit(0)
    return wait_for(child, limit)


def wait_for(child: int, limit: float) -> str:
    until = time.monotonic() + limit
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return {0: SURVIVED, 3 << 8: "from scratch"}.get(status, KILLED)
        time.sleep(0.005)
    for stop in (lambda: os.killpg(child, signal.SIGKILL), lambda: os.kill(child, signal.SIGKILL)):
        try:
            stop()
            break
        except ProcessLookupError:
            continue
    os.waitpid(child, 0)
    return SLOW


def from_scratch(mutant: Mutant, source: str, tests: Sequence[str], limit: float) -> str:
    path = Path(mutant.path)
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    path.write_text(ast.unparse(mutated(source, mutant)))
    try:
        with Path("output").open("w") as file:
            child = subprocess.run(
                [*command, "--basetemp=basetemp", *tests],
                stdout=file,
                stderr=file,
                timeout=limit + 20,
                check=False,
            )
        return SURVIVED if child.returncode == 0 else KILLED
    except subprocess.TimeoutExpired:
        return SLOW
    finally:
        path.write_text(source)


def judge(
    mutant: Mutant,
    source: str,
    items: Mapping[str, pytest.Item],
    noted: Any,
    successes: Counter[str],
) -> Any:
    runners = who_runs(mutant, noted["times"], noted["lines"], successes)
    tests = [test for test in runners if test in items]
    began = time.monotonic()
    limit = 10.0 + 3.0 * sum(noted["times"][t] for t in tests)
    status = UNTESTED
    if tests:
        status = "from scratch"
        if mutant.function:
            status = in_a_fork(mutant, source, [items[t] for t in tests], limit)
        if status == "from scratch":
            status = from_scratch(mutant, source, tests, limit)
    seconds = round(time.monotonic() - began, 2)
    output = Path("output").read_text()
    by = output if output in items and status == KILLED else ""
    successes[by] += by != ""
    return asdict(mutant) | {"status": status, "seconds": seconds, "tests": len(tests), "by": by}


# All of them -------------------------------------------------------------------------------------


def chosen_of(modules: Sequence[str], share: float, seed: int) -> list[Mutant]:
    """A share of the mutants, in random order: whoever stops early has a fair sample, too."""
    every = [m for path in modules for m in mutants_of(path, Path(path).read_text())]
    return random.Random(seed).sample(every, round(share * len(every)))


def run_all(mutants: Sequence[Mutant], tests: Sequence[str], noted: Any, results: Path) -> None:
    done = {json.dumps(key_of(r)) for r in read(results)}
    left = [m for m in mutants if json.dumps(key_of(asdict(m))) not in done]
    sources = {path: Path(path).read_text() for path in {m.path for m in mutants}}

    def work(items: Mapping[str, pytest.Item]) -> None:
        successes: Counter[str] = Counter()
        with results.open("a") as file:
            for mutant in left:
                result = judge(mutant, sources[mutant.path], items, noted, successes)
                print(json.dumps(result), file=file, flush=True)

    with_items(tests, work)


def key_of(result: Mapping[str, Any]) -> list[Any]:
    return [result[name] for name in ("path", "place", "choice", "before", "after")]


def read(results: Path) -> list[dict[str, Any]]:
    return (
        [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    )


def report(results: Sequence[Mapping[str, Any]]) -> None:
    for path in sorted({r["path"] for r in results}):
        seen = Counter(r["status"] for r in results if r["path"] == path)
        noticed = seen[KILLED] + seen[SLOW]
        print(f"{path}: {noticed} of {seen.total()} ({noticed / seen.total():.1%})")
    for result in results:
        if result["status"] in (SURVIVED, UNTESTED):
            where = f"{result['path']}:{result['line']}"
            print(f"{where} {result['status']}: {result['before']}  ->  {result['after']}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Seed small faults and see who notices.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("modules", nargs="*", help="those with this in their path; or else all")
    parser.add_argument("--share", type=float, default=1.0, help="of the mutants, drawn at random")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only-report", action="store_true")
    arguments = parser.parse_args()
    wanted = arguments.modules or [""]
    modules = [path for path in TARGETS if any(part in path for part in wanted)]
    tests = sorted({test for path in modules for test in TARGETS[path]})
    results = arguments.directory.absolute() / "results.jsonl"
    if not arguments.only_report:
        copy_tree(arguments.directory)
        os.chdir(arguments.directory)
        sys.path.insert(0, str(arguments.directory.absolute()))
        noted = Path("noted.json").absolute()
        if not noted.exists():
            child = os.fork()
            if child == 0:
                note_lines(tests, noted)
                os._exit(0)
            os.waitpid(child, 0)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what is changed is changed back
        mutants = chosen_of(modules, arguments.share, arguments.seed)
        run_all(mutants, tests, json.loads(noted.read_text()), results)
    report(read(results))


def copy_tree(directory: Path) -> None:
    """The tree as it is now, unless it is there already."""
    if directory.exists():
        return
    directory.mkdir(parents=True)
    for name in COPIED:
        source, target = ROOT / name, directory / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)


if __name__ == "__main__":
    main()
