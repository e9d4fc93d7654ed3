"""No branch of the code that decides, and of the code that keeps bytes, goes without a test.

`python tools/coverage_gate.py` runs the tests that see to it. `tools/check.py` runs them with all
the others, and only once: as a pytest plugin, this watches what these tests run, and nothing
while the others do, which so take no longer than without. Tests run in several processes add up.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import coverage
import pytest

ROOT = Path(__file__).resolve().parent.parent

GUARDED = [
    "tierstore/engine/checkpoints.py",
    "tierstore/model/header.py",
    "tierstore/model/objects.py",
    "tierstore/model/scanning.py",
    "tierstore/plan/*.py",
    "tierstore/tiers/directory.py",
    "tierstore/system/file_table.py",
    "tierstore/system/files.py",
    "tierstore/system/locking.py",
    "tierstore/system/objects.py",
]
RANDOM = "tests/histories/test_planner_histories.py::test_every_promise_holds_in_random_histories"
WATCHED = (
    "tests/conformance/test_ours.py::Test",
    "tests/histories/test_known_faults.py",
    f"{RANDOM}[next-use]",
    "tests/model/test_header.py::test_a_checksum",
    "tests/model/test_header.py::test_an_object",
    "tests/model/test_header.py::test_the_rule",
    "tests/model/test_header.py::test_what_is_built",
    "tests/model/test_limits.py",
    "tests/model/test_scanning.py",
    "tests/model/test_stored_objects.py",
    "tests/plan/",
    "tests/store/test_checkpoint_files.py",
    "tests/store/test_every_dtype.py",
    "tests/store/test_readable_again.py",
    "tests/tiers/test_directory.py::test_a_damaged_object",
    "tests/tiers/test_directory.py::test_nobody_else_may_look",
    "tests/tiers/test_directory.py::test_one_live_store",
    "tests/tiers/test_directory.py::test_things_of_others",
    "tests/tiers/test_directory.py::test_what_is_in_the_way",
    "tests/tiers/test_directory.py::test_what_may_be_lost",
    "tests/system/test_files.py",
    "tests/system/test_file_table.py",
    "tests/system/test_locks.py",
    "tests/system/test_objects.py",
    "tests/system/test_writing.py",
)
"""How the names of the tests begin. Watching a test makes it take two or three times as long: these
are quick ones, and they suffice."""
NOTES = "TIERSTORE_COVERAGE_GATE"
"""In the environment: the directory where every process leaves what it has seen."""


class Gate:
    """Watches the tests of one process; where they were started, tells what nobody has run."""

    def __init__(self, config: pytest.Config) -> None:
        self._starts = not hasattr(config, "workerinput")
        self._told = ""
        if self._starts:
            os.environ[NOTES] = tempfile.mkdtemp(prefix="coverage-")
        self._coverage = coverage.Coverage(
            data_file=os.path.join(os.environ[NOTES], "notes"),
            data_suffix=True,
            config_file=str(ROOT / "pyproject.toml"),
        )
        self._coverage.set_option("run:source", None)
        self._coverage.set_option("run:include", [str(ROOT / name) for name in GUARDED])
        self._coverage.start()  # what runs when a module is imported counts, too

    def pytest_collection_finish(self) -> None:
        self._coverage.stop()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        if item.get_closest_marker("watched") is None:
            return (yield)
        self._coverage.start()
        try:
            return (yield)
        finally:
            self._coverage.stop()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._coverage.stop()
        self._coverage.save()
        if self._starts:
            with contextlib.suppress(coverage.exceptions.NoDataError):  # no test was there
                self._look(session)
            shutil.rmtree(os.environ.pop(NOTES))

    def _look(self, session: pytest.Session) -> None:
        table = io.StringIO()
        self._coverage.combine([os.environ[NOTES]])
        share = self._coverage.report(file=table, skip_covered=True, show_missing=True)
        self._told = table.getvalue()
        if share < 100:
            self._told += "\nFAILED: no watched test runs these lines; write one, or watch its file"
            if session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._told:
            terminalreporter.section("tools/coverage_gate.py: no branch without a test")
            terminalreporter.write_line(self._told)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--only-watched", action="store_true", help="run no other tests")


@pytest.hookimpl(tryfirst=True)  # before the lane chooses: with --rest, it keeps these
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(WATCHED):
            item.add_marker("watched")
    if config.getoption("only_watched"):
        items[:] = [item for item in items if item.nodeid.startswith(WATCHED)]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Gate(config), "coverage-gate")


def main() -> int:
    os.chdir(ROOT)
    places = sorted({name.partition("::")[0] for name in WATCHED})
    return int(
        pytest.main(["-p", "coverage_gate", "--full", "--only-watched", *sys.argv[1:], *places])
    )


if __name__ == "__main__":
    sys.exit(main())
