"""A store that is used for a long time takes no more resources than at the beginning."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from tests.faults.soak import FAULT_EVERY, PARTS, Note, Told, slope
from tests.helpers.events import before, failing
from tests.helpers.processes import output_of
from tests.lanes import by_lane
from tests.store.helpers import assert_group, open_store, pages
from tierstore import TransferError

STEADY = 1.0
"""Bytes of process memory that an operation may add: 1 MB for a million operations."""
ROUGH = 50.0
"""The same for a run of a minute, in which memory taken once at the beginning counts."""


def soaked(place: Path, gets: int, *, faults: bool = True, leak: int = 0, seed: int = 0) -> Told:
    """Return the report of a process that soaks a store."""
    given = {"place": str(place), "gets": gets, "faults": faults, "leak": leak, "seed": seed}
    output = output_of("-W", "ignore", "-m", "tests.faults.soak", json.dumps(given))
    told = json.loads(output.splitlines()[-1])
    told["notes"] = [Note(**note) for note in told["notes"]]
    return Told(**told)


@pytest.mark.full("hundreds of thousands of calls")
@pytest.mark.timeout(4 * 3600)
def test_soak_keeps_memory_files_and_threads_constant(tmp_path: Path) -> None:
    gets = by_lane(30_000, 100_000, 10_000_000)
    told = soaked(tmp_path / "store", gets)

    later = told.notes[PARTS // 2 :]
    growth = slope(later)
    print(f"{growth:.2f} bytes per operation, {told.evicted} evictions, {told.notes[-1]}")
    assert growth < (STEADY if gets > 1_000_000 else ROUGH)
    assert len({note.files for note in later}) == 1, [note.files for note in later]
    assert len({note.threads for note in told.notes}) == 1
    # It was a soak: many groups were evicted, and calls failed in every second part.
    assert told.done["get"] > 0.9 * gets
    assert told.evicted > gets / 10
    assert told.samples > PARTS
    operations = told.notes[-1].operations
    assert operations / 2 / FAULT_EVERY / 2 < sum(told.injected.values())
    assert len(told.injected) >= by_lane(1, 1, 2), told.injected
    assert told.failed


@pytest.mark.full("the control of hundreds of thousands of calls")
@pytest.mark.timeout(1800)
def test_soak_notices_a_leak_of_a_hundred_bytes(tmp_path: Path) -> None:
    """Check the control."""
    told = soaked(tmp_path / "store", 20_000, faults=False, leak=100)
    assert slope(told.notes[PARTS // 2 :]) > ROUGH


def test_leftovers_of_failed_writes_go_with_the_next_flush(tmp_path: Path) -> None:
    """Check this also for a file that could not be removed after the failed write."""
    store = open_store(tmp_path / "store")
    store.put("key", pages(1))

    broken = failing(errno.EIO)
    with before("os.remove", broken), before("os.rename", broken), pytest.raises(TransferError):
        store.flush()
    assert os.listdir(tmp_path / "store" / "tmp")
    store.flush()
    assert not os.listdir(tmp_path / "store" / "tmp")
    assert_group(store.get("key"), pages(1))
    store.close()


def test_failed_put_stores_nothing(tmp_path: Path) -> None:
    """Check a put that fails only because the replaced group's file cannot be removed."""
    store = open_store(tmp_path / "store")
    store.put("key", pages(1))
    store.flush()

    raised = False
    with before("os.remove", failing(errno.EIO)):
        try:
            store.put("key", pages(2), durable=False)
        except TransferError:
            raised = True
        assert_group(store.get("key"), pages(1 if raised else 2))
    store.close()
