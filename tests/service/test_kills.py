"""Workers and services that are killed at random moments, observed from outside."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fresh import ROOT, run_fresh
from tests.helpers.processes import results_in
from tests.lanes import by_lane

KILLED, CROWDED = (Path(__file__).with_name(name) for name in ("killed.py", "crowded.py"))


@pytest.fixture
def place() -> Iterator[Path]:
    """Make a directory with a short name, as a socket's path must be short."""
    made = Path(tempfile.mkdtemp(prefix="ts-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


def run(program: Path, *words: object, place: Path, seconds: float) -> Any:
    environment = {"PYTHONPATH": str(ROOT)}
    done = run_fresh(
        program, *map(str, words), directory=place, seconds=seconds, environment=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return results_in(done.stdout)[-1]


def test_killed_workers_leave_nothing_behind(place: Path) -> None:
    found = run(
        KILLED, "workers", by_lane(8, 20, 1000), 7, place=place, seconds=by_lane(60, 300, 3000)
    )
    before, after = found["before"], found["after"]
    assert before["workers"] == after["workers"] == after["leases"] == 0
    assert after["descriptors"] == before["descriptors"]
    assert after["threads"] == before["threads"]
    assert after["resident"] - before["resident"] < 16 << 20


def test_workers_reconnect_to_a_restarted_service(place: Path) -> None:
    count, seconds = by_lane((3, 60), (8, 300), (200, 3000))
    found = run(KILLED, "services", count, 7, place=place, seconds=seconds)
    assert found == {"alive": [True, True], "killed": count}


@pytest.mark.full("a crowd of processes")
def test_crowd_of_workers_starves_no_worker(place: Path) -> None:
    workers, models = by_lane((8, 4), (24, 8), (64, 8))
    found = run(CROWDED, workers, models, place=place, seconds=290)
    assert found["workers"] == workers
    assert min(found["passes"]) >= 2
    # The fastest worker did at most a dozen times the work of the slowest.
    assert max(found["passes"]) <= 12 * min(found["passes"])
    assert found["grew"] <= found["budget"] + 100 * 10**6
