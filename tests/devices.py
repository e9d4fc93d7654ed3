"""The accelerator that the tests use: the pretend one, or a real one with `pytest --device cuda`.

Tests name no device. `tests/accelerator.py` has the constant for the chosen one, and marks say what
a test needs:

- `accelerator`: it uses the accelerator. Skipped where there is none.
- `pretend_only("late")`: it needs the pretend accelerator, for one of the `REASONS`. `--device`
  with another device leaves it out, except the cases of a test whose `device` is the CPU.
- `two_devices`: it uses a second device. Skipped where there is one.

A test without a mark uses the CPU alone; `-m accelerator` leaves those out. The fixtures `pretend`
and `late_pretend`, and `pretend` of `tests/accelerator.py`, raise in tests without the mark
`pretend_only`, on the pretend accelerator, too: a test that runs nowhere else must be marked.

Nothing here imports torch before a test module has, unless a real device was asked for.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import pytest

PRETEND = "pretend"
VARIABLE = "TIERSTORE_TEST_DEVICE"
"""Environment variable that passes the choice on to processes that a test starts."""

REASONS = {
    "captures": "work is captured, and what was captured is never run",
    "itself": "tests the pretend accelerator, or a command on it",
    "late": "work runs late on purpose, so that a missing wait shows each time",
    "counts": "copies, page-locked bytes or queued work are counted",
    "bytes": "device memory is counted to the byte",
    "limits": "memory and page-locking are what the test says",
    "times": "kernels and copies take the time that the test says",
    "kernels": "the kernels and the random numbers are the CPU's",
    "collectives": "has collectives that are made for the pretend accelerator",
}
"""Reasons why a test may need the pretend accelerator, by the argument of its mark."""

FIXTURES = {"pretend", "late_pretend"}
"""Fixtures for tests that are marked `pretend_only`."""

# Set before CUDA starts: cuBLAS then gives each call the same bits on every stream.
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def chosen() -> str:
    """Return the type of the accelerator that tests use, such as "pretend" or "cuda"."""
    return os.environ.get(VARIABLE, PRETEND)


# Which tests run: hooks that tests/conftest.py gives to pytest ------------------------------------


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add `--device`, and set it for this process and those that it starts.

    Read here, before pytest reads the command line: modules whose parameters name the device are
    imported earlier than that, where they are a folder's conftest.py.
    """
    parser.addoption(
        "--device",
        default=chosen(),
        metavar="TYPE",
        help="the type of accelerator that tests use: pretend (default), cuda",
    )
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--device", default=chosen())
    config: Any = pluginmanager.get_plugin("pytestconfig")
    given, _ = early.parse_known_args([str(each) for each in config.invocation_params.args])
    os.environ[VARIABLE] = given.device
    if given.device != PRETEND:
        os.environ.update(DETERMINISTIC)


def pytest_configure(config: pytest.Config) -> None:
    """Reject a device that is unknown or absent; collecting alone needs none."""
    device = config.getoption("device")
    if device != chosen():
        raise pytest.UsageError(f"pass --device on the command line, or set {VARIABLE}={device}")
    if not device.isalpha() or device == "cpu":
        raise pytest.UsageError(
            f"--device takes a type of accelerator, such as cuda, not {device!r}; choose one of "
            "several GPUs with CUDA_VISIBLE_DEVICES"
        )
    loaded = sys.modules.get("tests.accelerator")
    if loaded is not None and device != loaded.ACCELERATOR:
        raise pytest.UsageError("tests/accelerator.py was imported before --device was read")
    if device == PRETEND or config.getoption("collectonly"):
        return
    reason = importlib.import_module("tests.accelerator").REASON
    if reason is not None:
        raise pytest.UsageError(f"--device {device}: {reason}")


@pytest.hookimpl(trylast=True)  # after the lane has deselected its own
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect cases that a real device cannot run, and skip those that no device here can.

    Raises UsageError for marks that are wrong or missing.
    """
    for item in items:
        _check(item)
    if chosen() != PRETEND:
        left_out = [item for item in items if _needs_pretend(item)]
        config.stash[COUNTS] = _counted(items, left_out)
        items[:] = [item for item in items if not _needs_pretend(item)]
        config.hook.pytest_deselected(items=left_out)
    for item in items:
        for reason in _missing(item):
            item.add_marker(pytest.mark.skip(reason=reason))


def _check(item: pytest.Item) -> None:
    mark = item.get_closest_marker("pretend_only")
    used = FIXTURES & set(getattr(item, "fixturenames", ()))
    if mark is None and used:
        raise pytest.UsageError(
            f"{item.nodeid} uses {sorted(used)}: mark it pretend_only, with its reason"
        )
    if mark is not None and (len(mark.args) != 1 or mark.args[0] not in REASONS):
        raise pytest.UsageError(
            f"{item.nodeid}: the mark pretend_only needs one argument of {sorted(REASONS)}"
        )


def _needs_pretend(item: pytest.Item) -> bool:
    """Return whether the case is left to the pretend accelerator. Cases on the CPU run anywhere."""
    call = getattr(item, "callspec", None)
    on_cpu = call is not None and call.params.get("device") == "cpu"
    return item.get_closest_marker("pretend_only") is not None and not on_cpu


def _missing(item: pytest.Item) -> Iterator[str]:
    """Return why the case cannot run here. Loads tests/accelerator.py if a test needs it."""
    two = item.get_closest_marker("two_devices") is not None
    if not (two or item.get_closest_marker("accelerator") or _needs_pretend(item)):
        return
    accelerator = importlib.import_module("tests.accelerator")
    if accelerator.REASON is not None:
        yield accelerator.REASON
    elif two and accelerator.count() < 2:
        yield f"needs two devices, and there is one {chosen()}"


# Summary of deselected tests ----------------------------------------------------------------------

Counts = dict[str, int]
COUNTS = pytest.StashKey[Counts]()


def _counted(items: Sequence[pytest.Item], left_out: Sequence[pytest.Item]) -> Counts:
    """Return the number of cases of each kind: on the device, on the CPU alone, by reason."""
    kinds: Counter[str] = Counter()
    out = {id(item) for item in left_out}
    for item in items:
        if id(item) in out:
            kinds[item.get_closest_marker("pretend_only").args[0]] += 1  # type: ignore[union-attr]
        elif item.get_closest_marker("two_devices"):
            kinds["two devices"] += 1
        else:
            kinds["accelerator" if item.get_closest_marker("accelerator") else "cpu"] += 1
    return dict(kinds)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Report the counts from a worker process to the main one."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None and COUNTS in session.config.stash:
        output["devices"] = session.config.stash[COUNTS]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the counts of one worker: all of them collect the same."""
    if "devices" in (output := getattr(node, "workeroutput", {})):
        node.config.stash[COUNTS] = output["devices"]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if COUNTS not in config.stash:
        return
    terminalreporter.section(f"--device {chosen()}")
    for line in summary(config.stash[COUNTS]):
        terminalreporter.write_line(line)


def summary(counts: Counts) -> list[str]:
    """Return lines that say how many tests use the device, and why others do not."""
    reasons = {reason: counts[reason] for reason in REASONS if reason in counts}
    return [
        f"{counts.get('accelerator', 0):5d} on {chosen()}, "
        f"{counts.get('two devices', 0)} on two of them, {counts.get('cpu', 0)} on the CPU alone",
        f"{sum(reasons.values()):5d} left to the pretend accelerator:",
        *(f"{count:5d}   {reason}: {REASONS[reason]}" for reason, count in reasons.items()),
    ]


# While a test runs --------------------------------------------------------------------------------

_running: list[str] = []
"""The running test, if it is not marked."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Reject functions of the pretend accelerator during the test, unless it is marked."""
    if item.get_closest_marker("pretend_only") is None:
        _running[:] = [item.nodeid]
    try:
        return (yield)
    finally:
        _running.clear()


def require_mark(used: str) -> None:
    """Raise UsageError in a test that is not marked `pretend_only`."""
    if _running:
        raise pytest.UsageError(f"{_running[0]} uses pretend.{used}: mark it pretend_only")
