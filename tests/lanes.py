"""Three lanes of tests: for each change, for each landing, and for each release.

- **default**, `pytest`: every test without a mark, searches with a few seeds. Minutes.
- **full**, `pytest --full`: those marked `full`, too; searches as long as they need to find each
  seeded fault. 40 minutes.
- **long**, `pytest --long`: every test, each search at full length. Hours.

Each test declares its lane:

    @pytest.mark.full("every pipeline at every budget", keep=["flux-0.4"])
    @pytest.mark.long("cuts the power repeatedly", sentinel="tests/a/test_b.py::test_c")

The mark names the first lane that runs the test. It leaves all cases of a parametrised test to that
lane except those that `keep` names: a list of ids, or a rule that chooses them. A test with both
marks is divided by `long` first, and `full` divides the rest. A mark `long` that keeps nothing
names the test that represents it in the full lane, its `sentinel`.

- `keep="pairs"`: cases in which each two values of two parameters meet. Enough where no three
  parameters interact.
- `keep="values"`: cases in which each value of each parameter occurs. Enough where no two interact.
- `keep="any device"`: the same, except for the parameter `device`: each case gets one device, drawn
  by the case's name. Enough where other tests cover the devices.
- `keep="one device"`: each case, but on one device only. The rule for a test without a mark.
- `keep="a third"`: one in three of "any device", drawn by the cases' names. Enough where the cases
  show the same for different models or calls.

By a rule, a test without parameters is kept. Without `keep`, all of it is left to that lane.
The mark of a `pytest.param` counts before that of the function, and that before one of the module.

`by_lane(3, 40, 1000)` is the number of searches in each lane. Seeds are the same each time, except
in the long lane.

`pytest --full --rest` leaves out what the default lane runs in the same way: its cases of files
that do not search (`searches`), except for tests that a gate watches (the mark `watched`).
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from tests import devices

T = TypeVar("T")

DEFAULT, FULL, LONG = LANES = ("default", "full", "long")
MARKS = (LONG, FULL)
"""Marks, named after the first lane that runs the tests that they leave out; last lane first."""
VARIABLE = "TIERSTORE_TEST_LANE"
"""Environment variable that passes the lane on to processes that a test starts."""


def lane() -> str:
    """Return the lane that runs now."""
    return os.environ.get(VARIABLE, DEFAULT)


def by_lane(default: T, full: T, long: T | None = None) -> T:
    """Return the value for the running lane; `long` defaults to the value for the full lane."""
    return {DEFAULT: default, FULL: full, LONG: full if long is None else long}[lane()]


# Which tests run: hooks that tests/conftest.py gives to pytest ------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the full lane (40 minutes)")
    parser.addoption("--long", action="store_true", help="run every test at full length (hours)")
    parser.addoption(
        "--rest", action="store_true", help="with --full: not what the default lane runs as it does"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Set the lane of this process, and of those that it starts, before anything is collected."""
    if config.getoption("rest") and not config.getoption("full"):
        raise pytest.UsageError("--rest is for --full")
    chosen = LONG if config.getoption("long") else FULL if config.getoption("full") else DEFAULT
    os.environ[VARIABLE] = chosen


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests outside the lane. Raises UsageError for marks that are wrong."""
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    # If single cases were asked for, the other cases of a test are unknown here.
    some = any("::" in argument for argument in config.args)
    first: dict[int, str] = {}
    for (name, cases), mark in itertools.product(functions.items(), MARKS):
        left = [case for case in cases if id(case) not in first]
        first |= {id(case): mark for case in left_out(name, left, mark, some)}
    runs = LANES[: LANES.index(lane()) + 1]
    skipped = {id(item) for item in items if first.get(id(item), DEFAULT) not in runs}
    if config.getoption("rest"):
        skipped |= {id(item) for item in items if id(item) not in first and _repeats(item)}
    if skipped:
        config.hook.pytest_deselected(items=[item for item in items if id(item) in skipped])
        items[:] = [item for item in items if id(item) not in skipped]


def left_out(
    name: str, cases: Sequence[pytest.Item], mark_name: str, some: bool
) -> list[pytest.Item]:
    """Return those of a test's cases that a mark leaves to the lane of its name."""
    found: list[pytest.Item] = []
    marks = {id(mark): mark for case in cases if (mark := _mark(case, mark_name)) is not None}
    for mark in marks.values():
        marked = [case for case in cases if _mark(case, mark_name) is mark]
        kept = kept_cases(name, marked, mark, some)
        found += [case for case in marked if case not in kept]
    return found


def _repeats(item: pytest.Item) -> bool:
    """Return whether the full lane would run the case just as the default lane does."""
    return item.get_closest_marker("watched") is None and not searches(item.path)


def kept_cases(
    name: str, cases: Sequence[pytest.Item], mark: pytest.Mark, some: bool
) -> Sequence[pytest.Item]:
    """Return those of the marked cases that run in the earlier lane, too.

    `some` says that the test has other cases. Raises UsageError for a mark without a reason, with
    an unknown rule, or that names a missing case, as after a rename; and for a mark `long` that
    neither keeps a case nor names a sentinel.
    """
    if not (len(mark.args) == 1 and isinstance(mark.args[0], str) and mark.args[0]):
        raise pytest.UsageError(f"{name}: the mark `{mark.name}` needs one argument, its reason")
    keep = mark.kwargs.get("keep", ())
    if mark.name == LONG and bool(keep) == bool(mark.kwargs.get("sentinel")):
        raise pytest.UsageError(f"{name}: the mark `long` needs either `keep` or a `sentinel`")
    if isinstance(keep, str):
        if keep not in RULES:
            raise pytest.UsageError(f"{name}: keep={keep!r} is none of {sorted(RULES)}, nor ids")
        strength, ignored, one_in = RULES[keep]
        drawn = sorted(cases, key=lambda case: zlib.crc32(case.nodeid.encode()))
        order = drawn if ignored else cases
        values = [_parameters(case, ignored) for case in order]
        return [order[number] for number in covering(values, strength)][::one_in]
    ids = {_case(case): case for case in cases}
    if not some and (missing := sorted(set(keep) - ids.keys())):
        raise pytest.UsageError(f"{name} has no case that is called {missing}")
    return [case for key, case in ids.items() if key in keep]


def _mark(item: pytest.Item, name: str) -> pytest.Mark | None:
    """Return a case's mark: that of its parameters, or the function's, or the module's."""
    own = [mark for mark in item.own_markers if mark.name == name]
    found = own[-1] if own else item.get_closest_marker(name)
    return ON_ONE_DEVICE if found is None and name == FULL and _names_a_device(item) else found


def _names_a_device(item: pytest.Item) -> bool:
    """Return whether a case has its device as parameter. A real accelerator must run them all."""
    call = getattr(item, "callspec", None)
    found = None if call is None else call.params.get("device")
    return isinstance(found, str) and devices.chosen() == devices.PRETEND


def _case(item: pytest.Item) -> str:
    """Return the part in brackets of a parametrised test's name."""
    call = getattr(item, "callspec", None)
    return "" if call is None else str(call.id)


def _parameters(item: pytest.Item, ignored: str) -> dict[str, int]:
    """Return the parameters of a case. Equal values are the same object in each case."""
    call = getattr(item, "callspec", None)
    values = {} if call is None else call.params
    return {name: id(value) for name, value in values.items() if name != ignored}


TESTS = Path(__file__).resolve().parent
LANE_USE = re.compile(r"\bby_lane\(|\blane\(\)")
IMPORTS = re.compile(r"^[ \t]*from tests((?:\.\w+)*) import (\([^)]*\)|.*)$", re.MULTILINE)


@functools.cache
def searches(file: Path) -> bool:
    """Return whether the cases of a file may depend on the lane.

    They do if the file uses the lane, or if a module of the tests that it imports does.
    """
    text = "" if file == TESTS / "lanes.py" else file.read_text(encoding="utf-8")
    if LANE_USE.search(text):
        return True
    imported = set()
    for package, names in IMPORTS.findall(text):
        folder = TESTS.joinpath(*package.split("."))
        files = [folder, *(folder / name for name in re.findall(r"\w+", names))]
        imported |= {each.with_suffix(".py") for each in files if each != TESTS}
    return any(searches(each) for each in sorted(imported) if each.is_file() and each != file)


RULES = {
    "values": (1, "", 1),
    "pairs": (2, "", 1),
    "any device": (1, "device", 1),
    "one device": (9, "device", 1),
    "a third": (1, "device", 3),
}
"""Selection of cases by each rule.

The number of parameters that are considered together, the parameter that is ignored, and one in how
many of the found cases is kept.
"""


ON_ONE_DEVICE = pytest.mark.full("shows the same on another device", keep="one device").mark
"""The mark for tests without one."""


def covering(cases: Sequence[Mapping[str, int]], strength: int) -> list[int]:
    """Return numbers of a few cases in which all combinations of `strength` parameters occur.

    Counts only combinations that occur in any of the cases. Case by case, always the one with the
    most missing combinations; among equals the one whose values were chosen least, then the first.
    A case with fewer parameters is covered by its combinations of all of them.
    """
    parts = [set(itertools.combinations(sorted(c.items()), min(strength, len(c)))) for c in cases]
    missing = set().union(*parts)
    used: Counter[tuple[str, int]] = Counter()
    chosen = []
    while missing:
        number = max(
            range(len(cases)),
            key=lambda n: (len(missing & parts[n]), -sum(used[v] for v in cases[n].items()), -n),
        )
        chosen.append(number)
        missing -= parts[number]
        used.update(cases[number].items())
    return sorted(chosen)
