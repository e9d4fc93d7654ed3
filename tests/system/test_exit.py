"""A store's threads when the interpreter exits, or when one of them drops the store.

A thread that is inside torch at exit aborts the process: SIGABRT, and "terminate called without an
active exception".
"""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.accelerator import ACCELERATOR
from tests.lanes import by_lane
from tierstore import TierStore
from tierstore.model.tiers import Tier
from tierstore.store import engine_of
from tierstore.tiers.workers import URGENT

pytestmark = pytest.mark.pretend_only("itself")

BEGIN = """
import sys, threading, time, torch
from tests.device import pretend
pretend.load()
from tierstore import TierStore
from tierstore.tiers.workers import URGENT, Workers

def work_in_torch(seconds):
    until = time.monotonic() + seconds
    x = torch.ones(4096, device="pretend")
    while time.monotonic() < until:
        x.add_(1)
        x.cpu()
"""

STORE = """
store = TierStore(1 << 20, sys.argv[1], device="pretend", device_budget=1 << 20)
for i in range(16):
    store.put(str(i), torch.full((65536,), i, dtype=torch.uint8))
lease = store.acquire("0")
for i in range(16):
    store.prefetch(str(i))
"""

ABANDONED = """
workers = Workers(2, "abandoned")
for _ in range(2):
    workers.submit(URGENT, lambda: work_in_torch(0.3))
time.sleep(0.1)
"""

CONTROL = """
for _ in range(8):
    threading.Thread(target=work_in_torch, args=(60,), daemon=True).start()
time.sleep(0.2)
"""


def ending(more: str, place: Path) -> tuple[int, str]:
    command = [sys.executable, "-c", BEGIN + more, str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, done.stderr


@pytest.mark.full("processes that import torch, and wait")
@pytest.mark.parametrize("more", [STORE, ABANDONED], ids=["store", "abandoned"])
def test_exit_waits_for_threads_inside_torch(more: str, pretend: Any, tmp_path: Path) -> None:
    """Exit with a store that is never closed, and with workers that are never stopped."""
    for number in range(by_lane(1, 6, 20)):
        assert ending(more, tmp_path / str(number)) == (0, "")


@pytest.mark.full("the control of the test above")
def test_exit_with_threads_inside_torch_aborts(pretend: Any, tmp_path: Path) -> None:
    """The control for the test above: daemon threads of another library."""
    status, told = ending(CONTROL, tmp_path)
    assert status == -6
    assert "terminate called" in told


def test_store_dropped_on_its_own_thread_ends(pretend: Any, disk_dir: Path) -> None:
    """A thread that briefly holds the last reference cannot wait for its own end."""
    before = set(threading.enumerate())
    stores = [TierStore(1 << 20, disk_dir, device=ACCELERATOR, device_budget=1 << 20)]
    stores[0].put("key", torch.ones(4096, dtype=torch.uint8))
    hop = engine_of(stores[0]).core.mover.hops[Tier.DISK, Tier.HOST]
    dropped = threading.Event()

    def drop() -> None:
        stores.clear()
        gc.collect()
        dropped.set()

    hop.workers.submit(URGENT, drop)
    assert dropped.wait(30)
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
        assert not thread.is_alive()
    with TierStore(1 << 20, disk_dir, device=ACCELERATOR, device_budget=1 << 20):
        pass  # the directory is free
