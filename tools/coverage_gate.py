"""Requires that tests cover every branch of the planner and of the modules that store bytes.

`python tools/coverage_gate.py` runs the tests that count. `tools/check.py` runs them once, among
all others: as a pytest plugin, this module measures coverage during these tests only, so the others
are not slowed down. Coverage of several processes is combined.
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
RANDOM = "tests/histories/test_planner_histories.py::test_random_histories_keep_every_promise"
WATCHED = (
    "tests/conformance/test_policies_and_schedules.py::Test",
    "tests/histories/test_known_faults.py",
    f"{RANDOM}[next-use]",
    "tests/model/test_header.py::test_malformed_checksum",
    "tests/model/test_header.py::test_object_",
    "tests/model/test_header.py::test_broken_rule",
    "tests/model/test_header.py::test_header_built",
    "tests/model/test_limits.py",
    "tests/model/test_scanning.py",
    "tests/model/test_stored_objects.py",
    "tests/plan/",
    "tests/store/test_checkpoint_files.py",
    "tests/store/test_directory_paths.py",
    "tests/store/test_every_dtype.py",
    "tests/store/test_readable_again.py",
    "tests/tiers/test_directory.py::test_damaged_object",
    "tests/tiers/test_directory.py::test_directory_is_private_to_its_user",
    "tests/tiers/test_directory.py::test_directory_has_one_live_store",
    "tests/tiers/test_directory.py::test_foreign_files_are_warned",
    "tests/tiers/test_directory.py::test_file_in_place_of_a_directory",
    "tests/tiers/test_directory.py::test_temporary_groups",
    "tests/system/test_files.py",
    "tests/system/test_file_table.py",
    "tests/system/test_locks.py",
    "tests/system/test_objects.py",
    "tests/system/test_writing.py",
)
"""Prefixes of the names of the tests that count.

Measuring makes a test two to three times slower; these are quick, and sufficient.
"""
NOTES = "TIERSTORE_COVERAGE_GATE"
"""Environment variable: the directory for the coverage data of each process."""


class Gate:
    """Measures the tests of one process; the main process reports branches without a test."""

    def __init__(self, config: pytest.Config) -> None:
        self._starts = not hasattr(config, "workerinput")
        self._report = ""
        if self._starts:
            os.environ[NOTES] = tempfile.mkdtemp(prefix="coverage-")
        self._coverage = coverage.Coverage(
            data_file=os.path.join(os.environ[NOTES], "notes"),
            data_suffix=True,
            config_file=str(ROOT / "pyproject.toml"),
        )
        self._coverage.set_option("run:source", None)
        self._coverage.set_option("run:include", [str(ROOT / name) for name in GUARDED])
        self._coverage.start()  # code that runs at import counts, too

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
            with contextlib.suppress(coverage.exceptions.NoDataError):  # no test was measured
                self._check_coverage(session)
            shutil.rmtree(os.environ.pop(NOTES))

    def _check_coverage(self, session: pytest.Session) -> None:
        table = io.StringIO()
        self._coverage.combine([os.environ[NOTES]])
        share = self._coverage.report(file=table, skip_covered=True, show_missing=True)
        self._report = table.getvalue()
        if share < 100:
            self._report += "\nFAILED: no measured test runs these lines: add one to WATCHED"
            if session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._report:
            terminalreporter.section("tools/coverage_gate.py: no branch without a test")
            terminalreporter.write_line(self._report)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--only-watched", action="store_true", help="run only the tests that count for coverage"
    )


@pytest.hookimpl(tryfirst=True)  # before the lane selects: --rest keeps these tests
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
