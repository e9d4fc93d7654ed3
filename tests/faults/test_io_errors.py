"""Every file system call of every operation fails, once or from then on.

The failure is tolerated, or a documented exception is raised. In any case a group has its old or
its new value, nothing stays open, and the store works once the fault has ended.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.faults.injecting import FAULTS
from tests.faults.scenarios import SCENARIOS
from tests.faults.sweeping import ONE_IN_THREE, Sweep
from tests.helpers.system_calls import Call, system_call
from tests.lanes import by_lane
from tierstore.errors import TransferError
from tierstore.system import files
from tierstore.tiers.reading import DiskReader
from tierstore.tiers.spill import Spill

Missing = Callable[[], AbstractContextManager[Any]]
"""Removes a protection."""

ALL = [(fault, once) for fault in FAULTS for once in (True, False)]
BRIEF = [("EIO", True), ("short", False)]


@ONE_IN_THREE
@pytest.mark.parametrize("name", SCENARIOS)
def test_system_call_failure_raises_or_is_recovered(name: str, quick_dir: Path) -> None:
    sweep = Sweep(name, quick_dir)
    counts = {
        fault: sweep.every_call(fault[0], once=fault[1]) for fault in by_lane(BRIEF[:1], BRIEF, ALL)
    }
    print(f"{name}: {counts}")
    assert counts["EIO", True] > 5, "too few calls were counted"


# Controls: without a protection, the fault is noticed --------------------------------------------


def swallowed(name: str) -> Missing:
    """Ignore failures of a call."""

    def ignore(call: Call) -> Any:
        with suppress(OSError):
            return call.go_on()

    return lambda: system_call(name, answer=ignore)


def all_was_read(call: Call) -> int:
    """Take a partial read for a complete one."""
    call.go_on()
    return len(call.args[1][0])


def all_was_written(call: Call) -> int:
    call.go_on()
    return len(call.args[1])


@contextmanager
def patched(owner: object, name: str, value: object) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield


@contextmanager
def nothing_is_compared() -> Iterator[None]:
    """Accept any bytes in a comparison with those written."""
    with patched(DiskReader, "check", lambda *_: None), system_call("preadv", answer=all_was_read):
        yield


@contextmanager
def one_close_only() -> Iterator[None]:
    """Simulate a known leak: a writable file has two descriptors.

    If the first cannot be closed, the second stays open.
    """
    left: set[str | None] = set()

    def close(call: Call) -> None:
        path = call.path
        if path in left:
            return
        try:
            call.go_on()
        except OSError:
            left.add(path)
            raise

    with system_call("close", answer=close, when=lambda call: "/tmp/object-" in str(call.path)):
        yield


def failing_give_back(self: Spill, offset: int, nbytes: int) -> None:
    if os.fstatvfs(self._file.cached).f_bavail == 0:
        self.trim()


CONTROLS: dict[str, tuple[str, str, bool, Missing]] = {
    "failed syncs are ignored": ("putting", "EIO", True, swallowed("fsync")),
    "failed renames are ignored": ("replacing", "EIO", True, swallowed("rename")),
    "short reads are taken for whole": (
        "getting what is on disk",
        "short",
        False,
        lambda: system_call("preadv", answer=all_was_read),
    ),
    "short reads are taken for whole and nothing is compared": (
        "getting what is on disk",
        "short",
        False,
        nothing_is_compared,
    ),
    "short writes are taken for whole": (
        "putting",
        "short",
        False,
        lambda: system_call("pwrite", answer=all_was_written),
    ),
    "the first close that fails is the last": ("putting", "EIO", True, one_close_only),
    "what gives room back may fail": (
        "spilling",
        "EIO",
        True,
        lambda: patched(Spill, "release", failing_give_back),
    ),
    "nobody is told what has failed": (
        "getting what is on disk",
        "EIO",
        True,
        lambda: patched(files, "transfer_error", lambda *_, **__: TransferError("it failed")),
    ),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_missing_protection_is_noticed(control: str, quick_dir: Path) -> None:
    name, fault, once, missing = CONTROLS[control]
    sweep = Sweep(name, quick_dir, missing)
    with pytest.raises(AssertionError):
        for _ in range(10):  # whether a fault hits the missing protection may depend on threads
            sweep.every_call(fault, once=once)
