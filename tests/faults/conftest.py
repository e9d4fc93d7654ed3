"""Fault tests declare the facilities they need and are skipped where one is missing."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.facilities import missing
from tests.lanes import LONG, lane


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for name in mark.args:
            if (reason := missing(name)) is not None:
                pytest.skip(f"{name}: {reason}")


@pytest.fixture(scope="module")
def quick_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a directory in memory if there is space: this machine's power is not cut."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK) or shutil.disk_usage(memory).free < 2**30:
        yield tmp_path_factory.mktemp("quick")
        return
    with tempfile.TemporaryDirectory(prefix="tierstore-", dir=memory) as directory:
        yield Path(directory)


@pytest.fixture(scope="module")
def first_seed() -> int:
    """Return the first seed: constant, except in the long lane, which explores.

    `TIERSTORE_SEED` repeats a run. Tests print it.
    """
    new = random.randrange(10**6) if lane() == LONG else 0
    return int(os.environ.get("TIERSTORE_SEED", new))
