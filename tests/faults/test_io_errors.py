"""Every call that concerns files fails in turn, once or from then on, in everything a store does.

It is tolerated, or told in a documented exception. Whatever happens: the old value is there, or the
new one; nothing is left open; and when the fault is gone, the store works.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.injecting import FAULTS
from tests.faults.scenarios import SCENARIOS
from tests.faults.sweeping import ONE_IN_THREE, Sweep
from tests.lanes import by_lane
from tierstore.model.errors import TransferError
from tierstore.system import files as disk
from tierstore.system.files import DataFile, OpenForWriting
from tierstore.tiers import spill
from tierstore.tiers.reading import DiskReader

ALL = [(fault, once) for fault in FAULTS for once in (True, False)]
BRIEF = [("EIO", True), ("short", False)]


@ONE_IN_THREE
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_call_that_fails_is_told_or_made_good(name: str, quick_dir: Path) -> None:
    sweep = Sweep(name, quick_dir)
    counts = {
        fault: sweep.every_call(fault[0], once=fault[1]) for fault in by_lane(BRIEF[:1], BRIEF, ALL)
    }
    print(f"{name}: {counts}")
    assert counts["EIO", True] > 5, "hardly anything was counted"


# Controls: with a protection taken away, the same is noticed -------------------------------------


def swallowed(patch: pytest.MonkeyPatch, name: str) -> None:
    """Failures of a function of `os` are ignored where files are written."""

    class Ignoring:
        def __getattr__(self, wanted: str) -> Any:
            if wanted != name:
                return getattr(os, wanted)

            def call(*args: Any, **options: Any) -> Any:
                try:
                    return getattr(os, name)(*args, **options)
                except OSError:
                    return None

            return call

    for module in ("tiers.directory", "system.files", "tiers.spill"):
        patch.setattr(f"tierstore.{module}.os", Ignoring())


def one_read(self: DataFile, room: memoryview, offset: int, needed: int) -> int:
    return self._read_once(room, offset)


def hopeful(self: DiskReader, *_: object) -> None:
    """Bytes are taken for those that were written, whatever they are."""


def half_closed(self: OpenForWriting) -> None:
    os.close(self.cached)
    if self._direct is not None:
        os.close(self._direct)


def without_retries(descriptor: int, data: memoryview, offset: int) -> None:
    os.pwrite(descriptor, data, offset)


def failing_give_back(self: spill.Spill, offset: int, nbytes: int) -> None:
    if os.fstatvfs(self._file.cached).f_bavail == 0:
        self.trim()


CONTROLS: dict[str, tuple[str, str, bool, Callable[[pytest.MonkeyPatch], None]]] = {
    "failed syncs are ignored": ("putting", "EIO", True, lambda patch: swallowed(patch, "fsync")),
    "failed renames are ignored": (
        "replacing",
        "EIO",
        True,
        lambda patch: swallowed(patch, "rename"),
    ),
    "short reads are taken for whole": (
        "getting what is on disk",
        "short",
        False,
        lambda patch: patch.setattr(DataFile, "read_at_least", one_read),
    ),
    "short reads are taken for whole and nothing is compared": (
        "getting what is on disk",
        "short",
        False,
        lambda patch: (
            patch.setattr(DataFile, "read_at_least", one_read),
            patch.setattr(DiskReader, "check", hopeful),
        )[0],
    ),
    "short writes are taken for whole": (
        "putting",
        "short",
        False,
        lambda patch: (
            patch.setattr(disk, "write_all", without_retries),
            patch.setattr("tierstore.tiers.directory.write_all", without_retries),
        )[0],
    ),
    "the first close that fails is the last": (
        "putting",
        "EIO",
        True,
        lambda patch: patch.setattr(OpenForWriting, "close", half_closed),
    ),
    "what gives room back may fail": (
        "spilling",
        "EIO",
        True,
        lambda patch: patch.setattr(spill.Spill, "give_back", failing_give_back),
    ),
    "nobody is told what has failed": (
        "getting what is on disk",
        "EIO",
        True,
        lambda patch: patch.setattr(
            "tierstore.system.files.transfer_error", lambda *_, **__: TransferError("it failed")
        ),
    ),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_a_protection_that_is_missing_is_noticed(
    control: str, quick_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, fault, once, remove = CONTROLS[control]
    sweep = Sweep(name, quick_dir)
    remove(monkeypatch)
    with pytest.raises(AssertionError):
        for _ in range(10):  # whether a fault meets what is missing may depend on threads
            sweep.every_call(fault, once=once)
