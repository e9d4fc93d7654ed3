"""Opening a directory of very many groups: the work for each of them, counted in calls."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import pytest
import torch

from tierstore import TierStore
from tierstore.model import header_reader
from tierstore.model.objects import read_header

FEW, MANY = 20, 80
MOST_CALLS = 125
"""Python calls per group.

On the usual machine, 100,000 groups then take about 6 seconds.
"""


def python_calls(place: Path) -> int:
    """Count the calls of Python functions on this thread while a store is opened."""
    count = 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        store = TierStore("1MiB", place, device="cpu")
    finally:
        sys.setprofile(before)
    store.close()
    return count


def calls_for_each(place: Path) -> float:
    counts = []
    done = 0
    for groups in (FEW, MANY):
        with TierStore("1MiB", place, device="cpu") as store:
            for number in range(done, groups):
                store.put(f"k{number}", torch.full((25,), float(number)), durable=True)
        done = groups
        counts.append(python_calls(place))
    return (counts[1] - counts[0]) / (MANY - FEW)


def test_open_takes_few_system_calls_per_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = calls_for_each(tmp_path / "few")
    with TierStore("1MiB", tmp_path / "few", device="cpu") as store:
        for number in (0, FEW, MANY - 1):
            assert torch.equal(store.get(f"k{number}"), torch.full((25,), float(number)))
    monkeypatch.setattr(header_reader.HeaderReader, "read", lambda _, *of: read_header(*of))
    parsed = calls_for_each(tmp_path / "parsed")
    assert few <= MOST_CALLS < parsed, (few, parsed)
