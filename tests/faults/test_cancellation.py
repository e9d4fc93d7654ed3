"""A cancelled or interrupted call leaves nothing behind and nothing half-done."""

from __future__ import annotations

import asyncio
import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults.cancelling import Tasks
from tests.helpers.engine import core_of
from tests.lanes import by_lane
from tests.store.helpers import PATIENCE, on_both
from tierstore import CorruptDataError
from tierstore.store import engine_of


@pytest.mark.full("a task makes the same requests on each device", keep=["cpu"])
@on_both
@pytest.mark.timeout(7200)
def test_tasks_cancelled_at_random_leave_nothing_behind(
    device: str, tmp_path: Path, first_seed: int
) -> None:
    seed = first_seed
    for number in range(by_lane(1, 1, 10)):
        print(f"Tasks({seed + number}, {device!r}, directory)")
        tasks = Tasks(seed + number, device, tmp_path / str(number))
        tasks.play(by_lane(5, 5, 30))
        assert tasks.outcomes["CancelledError"] > 20
        assert tasks.outcomes["NoneType"] > 20
        assert tasks.outcomes["TimeoutError"] > 0
        assert tasks.watch.samples > 10
        tasks.store.close()


def test_lease_left_by_a_cancelled_task_is_noticed(tmp_path: Path) -> None:
    """Check the control: a task cancelled while it waits does not withdraw its request."""
    tasks = Tasks(1, "cpu", tmp_path / "store")
    give_up = engine_of(tasks.store).requests.cancel

    def forgetful(request: Any) -> None:
        if not isinstance(sys.exc_info()[1], asyncio.CancelledError):
            give_up(request)

    engine_of(tasks.store).requests.cancel = forgetful
    tasks.patience = 3.0  # abandoned requests block others forever
    with pytest.raises((AssertionError, TimeoutError)):
        tasks.play(8)
    engine_of(tasks.store).requests.cancel = give_up
    tasks.store.close()


def test_half_a_put_is_noticed(tmp_path: Path) -> None:
    """Check the control: readers see a group before it is filled."""
    tasks = Tasks(1, "cpu", tmp_path / "store")
    store, late = tasks.store, dict[int, tuple[Any, ...]]()
    host, fill, show = (
        core_of(store).tiers.host,
        core_of(store).tiers.host.fill,
        engine_of(store).puts.publish,
    )

    def postpone(entry: Any, blocks: Any) -> None:
        host.arena.fill(entry.slots[host.tier])
        late[threading.get_ident()] = (entry, blocks)

    def shown(*arguments: Any) -> None:
        show(*arguments)
        time.sleep(0.001)
        fill(*late.pop(threading.get_ident()))

    host.fill, engine_of(store).puts.publish = postpone, shown
    # A value is torn, missing before it was filled, or filled while it is written to disk.
    with pytest.raises((AssertionError, KeyError, CorruptDataError)):
        tasks.play(8)
    store.close()


# Signals ------------------------------------------------------------------------------------------


def interrupted(directory: Path, seed: int, count: int, fault: str = "") -> dict[str, Any]:
    """Run a process that uses a store, and interrupt it `count` times at random moments."""
    patience = PATIENCE if not fault else 1
    told = {"place": str(directory), "seed": seed, "fault": fault, "patience": patience}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.faults.signals", json.dumps(told)],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    rng, silent = random.Random(seed), 0
    try:
        assert read_some(process, PATIENCE), failure(process)
        for _ in range(count):
            time.sleep(rng.random() * 0.01)
            process.send_signal(signal.SIGINT)
            # An interrupt in a finalizer is reported there and never seen again.
            silent = 0 if read_some(process, 0.3) else silent + 1
            if process.poll() is not None or silent * 0.3 > patience:
                raise AssertionError(failure(process))
        process.send_signal(signal.SIGTERM)
        out, errors = process.communicate(timeout=2 * PATIENCE)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"it hangs: {failure(process)}") from None
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, errors.decode()[-6000:]
    lines = [line for line in out.decode().splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def read_some(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], seconds)
    return os.read(process.stdout.fileno(), 4096) if ready else b""


def failure(process: subprocess.Popen[bytes]) -> str:
    process.send_signal(signal.SIGABRT)  # if it still runs: it prints all stacks
    try:
        _, errors = process.communicate(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        _, errors = process.communicate()
    return errors.decode()[-6000:]


@pytest.mark.timeout(3600)
def test_process_interrupted_hundreds_of_times_continues(tmp_path: Path, first_seed: int) -> None:
    seed = first_seed
    count = by_lane(40, 100, 1000)
    for number in range(by_lane(1, 1, 10)):
        print(f"interrupted(directory, {seed + number}, {count})")
        found = interrupted(tmp_path / str(number), seed + number, count)
        assert found["interrupts"] > count / 2
        assert found["steps"] > count / 2
        assert found["checked"] > 0


@pytest.mark.full("waits in vain after each interrupt")
def test_leftovers_of_an_interrupt_are_noticed(tmp_path: Path) -> None:
    """Check the control: an interrupted waiter does not withdraw its request."""
    with pytest.raises(AssertionError):
        interrupted(tmp_path, 1, 100, "forgets")
