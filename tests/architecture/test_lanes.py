"""The lanes of tests are what docs/testing.md says: no promise is left out, and none is slow."""

from __future__ import annotations

import ast
import functools
import itertools
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.docs.test_reliability import NAMED, PAGE, named
from tests.lanes import MARKS, covering, searches
from tierstore.plan import invariants
from tools import check, durations, mutate

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "testing.md"


# What each lane runs ------------------------------------------------------------------------------

CONFTEST = """
import sys
sys.path.insert(0, {root!r})
from tests import lanes
pytest_addoption = lanes.pytest_addoption
pytest_configure = lanes.pytest_configure
pytest_collection_modifyitems = lanes.pytest_collection_modifyitems
"""
TESTS = """
import subprocess, sys
import pytest
from tests.lanes import by_lane

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
@pytest.mark.parametrize("x", ["a", "b", "c", pytest.param("d", marks=pytest.mark.full("d"))])
def test_devices(device, x): pass

@pytest.mark.full("devices", keep="any device")
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_one_device(device): pass

@pytest.mark.full("devices", keep="any device")
def test_no_device(): pass

@pytest.mark.full("models", keep="a third")
@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("model", "abcdefg")
def test_models(model, device): pass

@pytest.mark.full("models", keep="a third")
@pytest.mark.parametrize("model", "ab")
def test_two(model): pass

@pytest.mark.full("all of the product", keep="pairs")
@pytest.mark.parametrize("third", ["3", "4"])
@pytest.mark.parametrize("other", ["x", "y"])
@pytest.mark.parametrize("one", ["1", "2"])
def test_pairs(one, other, third): pass

def test_sizes():
    told = subprocess.run(
        [sys.executable, "-c", "from tests.lanes import lane; print(lane())"],
        capture_output=True, text=True, check=True, cwd={root!r},
    )
    print("SIZE", by_lane(1, 2, 3), by_lane(4, 5), told.stdout.strip())
"""
EVERY_PAIR = {f"test_pairs[{'-'.join(ids)}]" for ids in itertools.product("12", "xy", "34")}
ON_DEVICES = {f"test_devices[{x}-{device}]" for x in "abcd" for device in ("cpu", "gpu")}
ON_ONE = {"test_one_device[cpu]", "test_one_device[gpu]"}
WITHOUT = {"test_sizes", "test_no_device", "test_watched"}
LONG_ONLY = {"test_kills", *(f"test_most[{each}]" for each in ("x-3", "y-1", "y-3"))}
IN_FULL = {f"test_most[{each}]" for each in ("x-1", "x-2", "y-2")}
EVERYTHING = {"test_whole", *(f"test_some[{x}]" for x in "abc")}
MODELS = {f"test_models[{model}-{device}]" for model in "abcdefg" for device in ("cpu", "gpu")}
TWO = {"test_two[a]", "test_two[b]"}
EVERYTHING |= EVERY_PAIR | ON_DEVICES | ON_ONE | WITHOUT | MODELS | TWO | IN_FULL


def run_pytest(place: Path, *words: str, tests: str = TESTS) -> str:
    """What pytest prints in a directory with such tests."""
    place.joinpath("conftest.py").write_text(CONFTEST.format(root=str(ROOT)))
    place.joinpath("test_it.py").write_text(tests.replace("{root!r}", repr(str(ROOT))))
    place.joinpath("pytest.ini").write_text(
        "[pytest]\nmarkers =\n full\n long\n watched\n"
        "addopts = -p no:cacheprovider --strict-markers -rA"
    )
    command = [sys.executable, "-m", "pytest", "-s", *words]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def passed(text: str) -> set[str]:
    return {line.partition("::")[2] for line in text.splitlines() if line.startswith("PASSED ")}


def test_the_default_lane_leaves_out_what_is_marked_but_for_its_sentinels(tmp_path: Path) -> None:
    text = run_pytest(tmp_path)
    ran = passed(text)
    drawn = EVERY_PAIR | ON_DEVICES | ON_ONE | MODELS | TWO | IN_FULL
    assert ran - drawn == {"test_some[b]", *WITHOUT}
    assert [name[len("test_devices[")] for name in sorted(ran & ON_DEVICES)] == ["a", "b", "c"]
    assert len(ran & ON_ONE) == 1
    assert len({name.partition("-")[0] for name in ran & MODELS}) == len(ran & MODELS) == 3
    assert len(ran & TWO) == 1
    assert 4 <= len(ran & EVERY_PAIR) < len(EVERY_PAIR)
    assert ran & IN_FULL == {"test_most[x-1]", "test_most[y-2]"}, "each value that is left to it"
    assert "SIZE 1 4 default" in text


@pytest.mark.parametrize(
    ("option", "told", "more"), [("--full", "2 5 full", set()), ("--long", "3 5 long", LONG_ONLY)]
)
def test_the_other_lanes_run_everything(
    option: str, told: str, more: set[str], tmp_path: Path
) -> None:
    text = run_pytest(tmp_path, option)
    assert passed(text) == EVERYTHING | more
    assert f"SIZE {told}" in text


SAME = "import pytest\nfrom tests.lanes import {name}\n\ndef test_same(): pass\n"


@pytest.mark.full("six processes; what a lane leaves out is tested above")
def test_the_rest_leaves_out_what_would_run_in_the_same_way(tmp_path: Path) -> None:
    """Not a test of a file that searches, nor one that a gate watches."""
    asks = run_pytest(tmp_path, "--full", "--rest")
    assert passed(asks) == EVERYTHING, "the file asks for the lane"
    text = TESTS[: TESTS.index("def test_sizes")].replace("import by_lane", "import covering")
    before = passed(run_pytest(tmp_path, tests=text))
    rest = passed(run_pytest(tmp_path, "--full", "--rest", tests=text))
    assert rest | before == EVERYTHING - {"test_sizes"}
    assert rest & before == {"test_watched"}
    same = SAME.format(name="covering")
    assert "1 deselected" in run_pytest(tmp_path, "--full", "--rest", tests=same)
    assert "--rest is for --full" in run_pytest(tmp_path, "--rest", tests=same)


def test_a_file_searches_if_what_it_imports_does() -> None:
    tests = ROOT / "tests"
    assert searches(tests / "activations" / "cases.py")
    assert searches(tests / "activations" / "test_op_parity.py")
    assert searches(tests / "histories" / "test_seeded_faults.py"), "by what it imports"
    assert not searches(tests / "plan" / "test_planner.py")
    assert not searches(tests / "lanes.py")


@pytest.mark.parametrize(
    ("mark", "why"),
    [
        ("@pytest.mark.full", "needs one argument, its reason"),
        ("@pytest.mark.full('')", "needs one argument, its reason"),
        ("@pytest.mark.full('why', keep=['a', 'd'])", "no case that is called ['d']"),
        ("@pytest.mark.long('')", "needs one argument, its reason"),
        ("@pytest.mark.long('why')", "needs either `keep` or a `sentinel`"),
        ("@pytest.mark.long('why', keep=['d'])", "no case that is called ['d']"),
        (
            "@pytest.mark.full('why', keep='most')",
            "is none of ['a third', 'any device', 'pairs', 'values']",
        ),
    ],
)
@pytest.mark.full("a process of its own for each", keep="a third")
def test_a_mark_that_is_wrong_is_refused(mark: str, why: str, tmp_path: Path) -> None:
    cases = "@pytest.mark.parametrize('x', 'ab')\ndef test_it(x): pass\n"
    text = run_pytest(tmp_path, tests=f"import pytest\n{mark}\n{cases}")
    assert why in text
    assert not passed(text)


SIZES = [(2, 2), (3, 2, 2), (4, 3, 2, 5), (5, 1, 3), (7,), ()]


def product(sizes: Sequence[int]) -> list[dict[str, int]]:
    names = "abcd"
    return [dict(zip(names, row, strict=False)) for row in itertools.product(*map(range, sizes))]


@pytest.mark.parametrize("sizes", SIZES)
def test_each_two_values_of_two_parameters_meet(sizes: Sequence[int]) -> None:
    cases = product(sizes)
    chosen = covering(cases, 2)
    for one, other in itertools.combinations("abcd"[: len(sizes)], 2):
        met = {(cases[number][one], cases[number][other]) for number in chosen}
        assert met == {(case[one], case[other]) for case in cases}
    largest = sorted([1, 1, *sizes])[-2:]
    assert len(chosen) <= largest[0] * largest[1] + 4, "hardly fewer than the whole product"


@pytest.mark.parametrize("sizes", SIZES)
def test_each_value_of_each_parameter_occurs_and_none_much_oftener(sizes: Sequence[int]) -> None:
    cases = product(sizes)
    chosen = [cases[number] for number in covering(cases, 1)]
    assert len(chosen) == max([1, *sizes])
    for name, size in zip("abcd", sizes, strict=False):
        counts = [sum(case[name] == value for case in chosen) for value in range(size)]
        assert min(counts) >= 1
        assert max(counts) - min(counts) <= 1


def test_what_there_is_not_need_not_be_covered() -> None:
    cases = [case for case in product((3, 3)) if case["a"] <= case["b"]]
    assert len(covering(cases, 2)) == len(cases) == 6
    assert len(covering(cases, 1)) == 3


# How long the default lane takes ------------------------------------------------------------------


def test_no_test_of_the_default_lane_is_slow() -> None:
    """By what was measured on a quiet machine: see tools/durations.py."""
    tests = durations.measured("default")
    assert len(tests) > 1000
    assert durations.too_slow(tests) == []


def test_one_that_is_slow_is_told() -> None:
    """The control."""
    told = durations.too_slow({"a": durations.MOST, "b": durations.MOST + 1, "c": 60.0})
    assert [line.split()[0] for line in told] == ["c", "b"]


def test_slow_test_without_a_measured_time_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = (
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "import pytest\n"
        "from tools import durations\n"
        "from tools.durations import pytest_configure\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_runtest_logreport(report):\n"
        "    report.duration = durations.MOST if 'slow' in report.nodeid else 0.0\n"
    )
    tmp_path.joinpath("gate.py").write_text(gate)
    told = run_pytest(
        tmp_path, "-p", "gate", tests="def test_slow(): pass\ndef test_quick(): pass\n"
    )
    assert "test_it.py::test_slow takes 15.0 s" in told  # to be set up, to run, to be torn down
    assert "test_it.py::test_quick takes" not in told
    assert "2 passed" in told


# Which promise has which sentinel -----------------------------------------------------------------


def promises() -> list[str]:
    """What docs/reliability.md and the planner promise, as they number it."""
    page = re.findall(r"^### (P\d): ", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    stated = invariants.__doc__ or ""
    numbered = re.findall(r"^(\d)\. ", stated, re.MULTILINE)
    assert "And one of liveness" in stated
    return [*page, *(f"planner {number}" for number in numbered), "planner, liveness"]


def sentinels() -> dict[str, list[tuple[str, str]]]:
    """The table's rows: each promise, and the tests that are named beside it."""
    rows = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and NAMED.search(cells[-1]):
            rows[cells[0]] = named(cells[-1])
    return rows


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def why_left_out(
    path: str, name: str, root: Path = ROOT, marks: Sequence[str] = MARKS
) -> str | None:
    """Why no case of a test runs in the default lane; None if one does.

    With `marks=["long"]`: in the full lane.
    """
    tree = _parsed(root / path)
    modules = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    found = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
    ]
    if not found:
        return f"{path} has no {name}"
    for mark_name in marks:
        own = [mark for mark in found[0].decorator_list if _is(mark, mark_name)]
        for mark in own or [mark for mark in modules if _is(mark, mark_name)]:
            if "keep=" not in ast.unparse(mark):
                return f"{path}::{name} is left to the {mark_name} lane, all of it"
    return None


def _is(mark: ast.expr, name: str) -> bool:
    return f"mark.{name}(" in ast.unparse(mark)


def test_every_promise_has_a_sentinel() -> None:
    assert len(promises()) == 6 + 5 + 1
    assert list(sentinels()) == promises()


def test_every_sentinel_runs_in_the_default_lane() -> None:
    tests = [test for row in sentinels().values() for test in row]
    assert len(tests) >= len(promises())
    assert [why for test in tests if (why := why_left_out(*test))] == []


def test_what_proves_a_promise_is_not_left_to_the_full_lane() -> None:
    """At least half of the tests and controls that docs/reliability.md names for each."""
    page = PAGE.read_text(encoding="utf-8")
    for number in range(1, 7):
        section = page.partition(f"### P{number}: ")[2].partition("\n#")[0]
        tests = named(section)
        left_out = [why for test in tests if (why := why_left_out(*test))]
        assert 2 * len(left_out) <= len(tests), f"P{number}: {left_out}"


def named_sentinels(root: Path) -> list[str]:
    """What marks `long` in the tests name as their sentinels."""
    files = [path for path in root.rglob("*.py") if "mark.long(" in path.read_text("utf-8")]
    return [
        ast.literal_eval(word.value)
        for path in files
        for node in ast.walk(_parsed(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("mark.long")
        for word in node.keywords
        if word.arg == "sentinel"
    ]


def test_what_is_left_to_the_long_lane_has_a_sentinel_in_the_full_one() -> None:
    names = named_sentinels(ROOT / "tests")
    assert len(names) > 5
    found = [why_left_out(*name.split("::"), marks=["long"]) for name in names]
    assert [why for why in found if why] == []


def test_who_notices_seeded_faults_runs_in_the_default_lane() -> None:
    """The tests of tools/mutate.py: so its figures are those of the default lane."""
    names = {test.partition("[")[0] for tests in mutate.TARGETS.values() for test in tests}
    assert len(names) > 20
    found = []
    for name in names:
        path, _, function = name.partition("::")
        files = (
            [path]
            if path.endswith(".py")
            else [str(p.relative_to(ROOT)) for p in (ROOT / path).rglob("test_*.py")]
        )
        for file in files:
            functions = (
                [function] if function else re.findall(r"^def (test_\w+)", _text(file), re.M)
            )
            found += [(file, each) for each in functions]
    assert len(found) > 400
    assert [why for test in found if (why := why_left_out(*test))] == []


def _text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


MARKED = """
import pytest
pytestmark = [pytest.mark.full("all of it"), pytest.mark.timeout(3)]
def test_left_out(): ...
@pytest.mark.full("some", keep=["a"])
def test_some(): ...
@pytest.mark.long("kills", keep=["a"])
@pytest.mark.full("some", keep=["a"])
def test_kept(): ...
@pytest.mark.long("kills", sentinel="test_it.py::test_kept")
@pytest.mark.full("some", keep=["a"])
def test_later(): ...
"""


def test_one_that_is_left_out_is_noticed(tmp_path: Path) -> None:
    """The control."""
    tmp_path.joinpath("test_it.py").write_text(MARKED)
    assert why_left_out("test_it.py", "test_left_out", tmp_path) is not None
    assert why_left_out("test_it.py", "test_nowhere", tmp_path) is not None
    assert why_left_out("test_it.py", "test_some", tmp_path) is None
    assert why_left_out("test_it.py", "test_kept", tmp_path) is None
    assert why_left_out("test_it.py", "test_later", tmp_path) is not None
    assert why_left_out("test_it.py", "test_left_out", tmp_path, ["long"]) is None
    assert why_left_out("test_it.py", "test_later", tmp_path, ["long"]) is not None
    assert named_sentinels(tmp_path) == ["test_it.py::test_kept"]


# What a change concerns ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        (["tests/plan/test_policy.py"], ["tests/plan/test_policy.py"]),
        (["tests/store/helpers.py", "tests/store/test_async.py"], ["tests/store"]),
        (["tierstore/tiers/spill.py"], ["tests/tiers/test_spill.py"]),
        (["tierstore/adapters/training/tiles.py"], ["tests/training"]),
        (["tierstore/adapters/dispatch.py"], ["tests/dispatch"]),
        (["tierstore/simulation.py"], ["tests/simulation"]),
        (["tierstore/store.py"], ["tests/store"]),
        (["docs/why.md", "README.md"], ["tests/docs"]),
        (["tools/bench/disk.py"], ["tests/bench"]),
        (["tools/gpu/lines.py"], ["tests/bench"]),
        (["tests/conftest.py", "tests/plan/test_policy.py"], ["tests"]),
        (["LICENSE", "tests/nowhere/test_gone.py"], []),
    ],
)
def test_the_tests_that_mirror_a_change(changed: list[str], tests: list[str]) -> None:
    assert check.tests_of(changed) == tests
