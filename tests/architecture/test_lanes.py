"""Lanes of tests match docs/testing.md: every promise is covered, and no test is slow."""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import lanes
from tests.docs.test_named_tests import missing, named
from tests.helpers.processes import run_python
from tests.lanes import MARKS, covering, searches
from tierstore.plan import invariants
from tools import durations, mutate

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


# Tests of each lane -------------------------------------------------------------------------------

SAMPLE = """
import pytest
from tests.lanes import covering

@pytest.mark.full("searches for hours")
def test_whole(): pass

@pytest.mark.full("every one", keep=["b"])
@pytest.mark.parametrize("x", ["a", "b", "c"])
def test_some(x): pass

@pytest.mark.long("kills for hours", sentinel="test_it.py::test_whole")
def test_kills(): pass

@pytest.mark.full("some", keep="values")
@pytest.mark.long("most", keep=["x-1", "x-2", "y-2"])
@pytest.mark.parametrize("number", ["1", "2", "3"])
@pytest.mark.parametrize("letter", ["x", "y"])
def test_most(letter, number): pass

@pytest.mark.watched
def test_watched(): pass

@pytest.mark.full("devices", keep="any device")
@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("x", ["a", "b", pytest.param("d", marks=pytest.mark.full("d"))])
def test_devices(device, x): pass

@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("x", ["a", "b"])
@pytest.mark.parametrize("y", ["a", "b"])
def test_everywhere(x, y, device): pass

@pytest.mark.full("models", keep="a third")
@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("model", "abcdefg")
def test_models(model, device): pass
"""


def collected(place: Path, *words: str, sample: str = SAMPLE) -> set[str]:
    """Return the tests of a sample that a lane runs."""
    place.joinpath("test_it.py").write_text(sample)
    place.joinpath("pytest.ini").write_text("[pytest]\nmarkers =\n full\n long\n watched\n")
    command = ["-m", "pytest", "--collect-only", "-q", "-p", "tests.lanes", "--strict-markers"]
    return set(re.findall(r"::(\S+)", run_python(*command, *words, place).stdout))


def test_each_lane_runs_tests_by_their_marks(tmp_path: Path) -> None:
    default = collected(tmp_path)
    everywhere = [name for name in default if name.startswith("test_everywhere")]
    assert len(everywhere) == len({name.partition("-")[0] for name in everywhere}) * 2 == 4
    kept = {"test_some[b]", "test_watched", "test_most[x-1]", "test_most[y-2]"}
    devices, models = (
        [name.partition("[")[2][0] for name in sorted(default) if name.startswith(test)]
        for test in ("test_devices", "test_models")
    )
    assert devices == ["a", "b"]
    assert len(models) == len(set(models)) == 3
    assert kept < default and len(default) == len(kept) + 2 + 3 + 4

    full, long = collected(tmp_path, "--full"), collected(tmp_path, "--long")
    assert default < full < long
    assert len(full) == 1 + 3 + 3 + 1 + 6 + 8 + 14
    more = {"test_kills", "test_most[x-3]", "test_most[y-1]", "test_most[y-3]"}
    assert long - full == more

    rest = ["--full", "--rest"]
    assert collected(tmp_path, *rest) == full - default | {"test_watched"}
    searching = SAMPLE.replace("import covering", "import by_lane\nby_lane(1, 2)")
    assert collected(tmp_path, *rest, sample=searching) == full


def test_file_searches_if_it_imports_one_that_does() -> None:
    tests = ROOT / "tests"
    assert searches(tests / "activations" / "test_op_parity.py")
    assert searches(tests / "histories" / "test_seeded_faults.py")
    assert not searches(tests / "plan" / "test_planner.py")


@pytest.mark.parametrize(
    ("mark", "why"),
    [
        (pytest.mark.full(), "needs one argument, its reason"),
        (pytest.mark.full(""), "needs one argument, its reason"),
        (pytest.mark.full("why", keep=["a", "d"]), r"no case that is called \['d'\]"),
        (pytest.mark.long("why"), "needs either `keep` or a `sentinel`"),
        (pytest.mark.long("why", keep=["d"]), r"no case that is called \['d'\]"),
        (pytest.mark.full("why", keep="most"), "is none of .*'any device'"),
    ],
)
def test_lane_mark_wrong_raises(mark: pytest.MarkDecorator, why: str) -> None:
    cases: list[Any] = [SimpleNamespace(callspec=SimpleNamespace(id="a"))]
    with pytest.raises(pytest.UsageError, match=why):
        lanes.kept_cases("test_it", cases, mark.mark, some=False)


@pytest.mark.parametrize("sizes", [(2, 2), (3, 2, 2), (4, 3, 2, 5), (5, 1, 3), (7,), ()])
def test_chosen_cases_cover_values_and_pairs(sizes: Sequence[int]) -> None:
    cases = [dict(zip("abcd", row, strict=False)) for row in itertools.product(*map(range, sizes))]
    pairs = covering(cases, 2)
    for one, other in itertools.combinations("abcd"[: len(sizes)], 2):
        met = {(cases[number][one], cases[number][other]) for number in pairs}
        assert met == {(case[one], case[other]) for case in cases}
    largest = sorted([1, 1, *sizes])[-2:]
    assert len(pairs) <= largest[0] * largest[1] + 4, "hardly fewer than the whole product"
    values = [cases[number] for number in covering(cases, 1)]
    assert len(values) == max([1, *sizes])
    for name, size in zip("abcd", sizes, strict=False):
        assert {case[name] for case in values} == set(range(size))


# Duration of the default lane ---------------------------------------------------------------------


def test_default_lane_has_no_slow_test() -> None:
    """Durations were measured on a quiet machine: see tools/durations.py."""
    tests = durations.measured("default")
    assert tests
    assert durations.too_slow(tests) == []


def test_slow_test_is_named() -> None:
    """The control. A run of the lane also names tests that were never measured."""
    notice, lines = durations.Notice(), []
    for name, seconds in {"a": 1.0, "test_b[x]": durations.MOST + 1, "c": 60.0}.items():
        notice.pytest_runtest_logreport(SimpleNamespace(nodeid=name, duration=seconds))
    reporter: Any = SimpleNamespace(section=lines.append, write_line=lines.append)
    notice.pytest_terminal_summary(reporter)
    assert [line.split()[0] for line in lines if " takes " in line] == ["c", "test_b"]


# Sentinels of promises ----------------------------------------------------------------------------


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def left_out(path: str, name: str, root: Path = ROOT, marks: Sequence[str] = MARKS) -> str | None:
    """Return why no case of a test runs in the default lane, or None if one does.

    With `marks=["long"]`: in the full lane.
    """
    if (why := missing(path, name, root)) is not None:
        return why
    body = _parsed(root / path).body
    module = [
        node.value
        for node in body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    [found] = [node for node in body if getattr(node, "name", "") == name]
    for mark in marks:
        own = [each for each in found.decorator_list if f"mark.{mark}(" in ast.unparse(each)]
        outer = [each for each in module if f"mark.{mark}(" in ast.unparse(each)]
        if any("keep=" not in ast.unparse(each) for each in own or outer):
            return f"{path}::{name} is left to the {mark} lane, all of it"
    return None


def test_every_promise_has_a_sentinel_in_the_default_lane() -> None:
    """The promises are those of docs/reliability.md and of the planner, by their numbers there."""
    page = (DOCS / "reliability.md").read_text(encoding="utf-8")
    planner = re.findall(r"^(\d)\. ", invariants.__doc__ or "", re.MULTILINE)
    promises = [
        *re.findall(r"^### (P\d): ", page, re.MULTILINE),
        *(f"planner {number}" for number in planner),
        "planner, liveness",
    ]
    rows = {}
    for line in (DOCS / "testing.md").read_text(encoding="utf-8").splitlines():
        if line.startswith(("| P", "| planner")):
            rows[line.split("|")[1].strip()] = named(line)
    assert list(rows) == promises and all(rows.values())
    assert [why for tests in rows.values() for test in tests if (why := left_out(*test))] == []


def test_long_lane_tests_have_a_sentinel_in_the_full_lane() -> None:
    files = [path for path in (ROOT / "tests").rglob("*.py") if "sentinel=" in path.read_text()]
    sentinels = [
        ast.literal_eval(node.value)
        for path in files
        for node in ast.walk(_parsed(path))
        if isinstance(node, ast.keyword) and node.arg == "sentinel"
    ]
    assert sentinels
    found = [left_out(*name.split("::"), marks=["long"]) for name in sentinels]
    assert [why for why in found if why] == []


def test_mutation_tests_run_in_the_default_lane() -> None:
    """Tests of tools/mutate.py, so that its figures are for the default lane."""
    names = {test.partition("[")[0] for tests in mutate.TARGETS.values() for test in tests}
    assert [name for name in names if not (ROOT / name.partition("::")[0]).exists()] == []
    tests = [name.split("::") for name in names if "::" in name]
    assert [why for test in tests if (why := left_out(*test))] == []


MARKED = """
import pytest
pytestmark = [pytest.mark.full("all of it"), pytest.mark.timeout(3)]
def test_left_out(): ...
@pytest.mark.long("kills", keep=["a"])
@pytest.mark.full("some", keep=["a"])
def test_kept(): ...
@pytest.mark.long("kills", sentinel="test_it.py::test_kept")
@pytest.mark.full("some", keep=["a"])
def test_later(): ...
"""


def test_sentinel_left_out_is_reported(tmp_path: Path) -> None:
    """The control."""
    tmp_path.joinpath("test_it.py").write_text(MARKED)
    names = ["test_left_out", "test_nowhere", "test_kept", "test_later"]
    for marks, run in ((MARKS, {"test_kept"}), (["long"], {"test_kept", "test_left_out"})):
        found = [name for name in names if left_out("test_it.py", name, tmp_path, marks) is None]
        assert set(found) == run
