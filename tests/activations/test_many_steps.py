"""Memory does not grow over hundreds of steps, and a killed process leaves no files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.activations import stepping
from tests.helpers.processes import results_in, with_the_usual_allocator
from tests.store.helpers import PATIENCE, files_below, on_both, open_store

STEPS = 200
WARM = 50
"""Steps after which pools, caches and learned orders have reached their full size."""


@contextmanager
def started(device: str, disk_dir: Path, steps: int, what: str) -> Iterator[subprocess.Popen[str]]:
    arguments = [device, str(disk_dir), str(steps), what]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.activations.stepping", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=with_the_usual_allocator(threads=1),
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE)


def measure(device: str, disk_dir: Path, steps: int, what: str) -> list[dict[str, Any]]:
    with started(device, disk_dir, steps, what) as process:
        output, _ = process.communicate(timeout=5 * PATIENCE)
    assert process.returncode == 0
    measured = results_in(output, "STEP")
    assert len(measured) == steps // stepping.EVERY
    return measured


SAVED = 9 * stepping.SIZE**2 * 4
"""Bytes that a step saves."""


@pytest.mark.full("hundreds of steps; test_training_steps.py covers a few")
@on_both
def test_many_steps_do_not_grow(device: str, disk_dir: Path) -> None:
    measured = measure(device, disk_dir, STEPS, "measure")
    assert measured[-1]["written"] > STEPS * SAVED // 10, "the disk was hardly used"
    assert all(step["groups"] == 0 for step in measured)
    assert all(not any(step["used"].values()) for step in measured)
    assert all(step["files"] == measured[0]["files"] for step in measured)
    warm, rest = measured[: WARM // stepping.EVERY], measured[WARM // stepping.EVERY :]
    # The number of slots that a step needs at once depends on the disk's speed; budgets do not.
    matrices = (2 * stepping.LAYERS + 2) * stepping.SIZE**2 * 4  # and gradients
    assert all(step["device"] <= matrices + stepping.BUDGET for step in measured)
    assert all(step["pinned"] <= stepping.BUDGET for step in measured)
    assert max(step["slab"] for step in rest) <= max(step["slab"] for step in warm)
    # A leak of one saved tensor of each step would be 37 MiB.
    grown = max(step["host"] for step in rest[-4:]) - max(step["host"] for step in warm)
    assert grown < 8 * 1024 * 1024
    # A thread may hold one at that moment, but not each time.
    assert min(step["tensors"] for step in rest[-4:]) <= max(step["tensors"] for step in warm)


@pytest.mark.full("hundreds of steps; test_training_steps.py covers a few")
@on_both
def test_many_steps_with_a_leak_grow(device: str, disk_dir: Path) -> None:
    """The control: the graphs of all steps are kept, with the tensors that they saved."""
    measured = measure(device, disk_dir, 20, "leak")
    first, last = measured[0], measured[-1]
    assert last["groups"] > 3 * first["groups"] > 0
    assert last["used"]["DISK"] > first["used"]["DISK"] > 0
    assert last["tensors"] > first["tensors"]


@pytest.mark.full("the file has no name in any process", keep=["forward-cpu"])
@on_both
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_killed_process_leaves_no_file(part: str, device: str, disk_dir: Path) -> None:
    with open_store(disk_dir):
        pass
    empty = files_below(disk_dir)
    with started(device, disk_dir, 3, part) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "READY\n"
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(PATIENCE) == -signal.SIGKILL
    assert files_below(disk_dir) == empty
    with open_store(disk_dir) as store:
        assert len(store) == 0
        assert store.snapshot().used_bytes["DISK"] == 0
