"""A repair that dies at any system call loses nothing."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.processes import output_of


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """Return a directory in memory, if there is such a file system: syncs cost nothing there."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="tierstore-", dir="/dev/shm") as directory:
        yield Path(directory)


def dying(way: str, place: Path) -> list[tuple[str, str, str]]:
    """Return the calls at which repairs died, and the findings then and after the next repair."""
    output = output_of("-m", "tests.inspection.repairing", place / "store", way, timeout=300)
    return [(call, found, after) for call, found, after in map(json.loads, output.splitlines())]


def test_repair_killed_at_any_system_call_loses_nothing(in_memory: Path) -> None:
    found = dying("moving", in_memory)
    assert {"mkdir", "open", "fsync", "rename"} <= {call for call, _, _ in found}
    states = [state for _, state, _ in found]
    assert set(states) == {"in place", "in quarantine"}
    assert states == sorted(states, key=["in place", "in quarantine"].index), "it moves once"
    assert {after for _, _, after in found} == {"in quarantine"}


@pytest.mark.full("held between any two steps")
@pytest.mark.parametrize(("way", "wrong"), [("copying", "2 places"), ("deleting", "0 places")])
def test_repair_in_separate_steps_is_caught_between_them(
    in_memory: Path, way: str, wrong: str
) -> None:
    assert wrong in [state for _, state, _ in dying(way, in_memory)]
