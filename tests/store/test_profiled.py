"""`torch.profiler` sees a store's waits, and its moves if it profiles all threads."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from tests.accelerator import ACCELERATOR, needs_accelerator
from tests.helpers.system_calls import system_call
from tests.helpers.tensors import assert_same
from tests.store.helpers import (
    PAGE,
    open_store,
    pages,
    push_out,
    run_threads,
    wait_until_idle,
)
from tierstore import TierStore
from tierstore.errors import StoreTimeoutError, UnknownKeyError
from tierstore.observe.ranges import ranged


def away(store: TierStore, count: int) -> list[str]:
    """Put this many groups on disk only, and return their keys."""
    keys = [f"layer/{i}" for i in range(count)]
    for i, key in enumerate(keys):
        store.put(key, pages(i, 2))
    store.flush()
    for key in keys:
        push_out(store, key)
    return keys


def ranges(profiler: profile) -> Counter[str]:
    """Return how often a profiler saw each of the store's ranges."""
    names = (event.name for event in profiler.events())
    return Counter(name for name in names if name.startswith("tierstore: "))


def test_profiler_sees_each_wait_once(disk_dir: Path) -> None:
    with open_store(disk_dir, 12 * PAGE) as store:
        keys = away(store, 8)
        before = store.stats()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for key in keys * 3:
                store.get(key)
                store.get(key)  # a hit: no wait
        stats = store.stats()
    waited = stats.late + stats.misses - before.late - before.misses
    seen = ranges(profiler)
    assert seen.total() == waited > 8
    assert stats.hits - before.hits >= 8 * 3
    assert set(seen) <= {f"tierstore: wait {key}" for key in keys}


def test_profiler_range_is_as_long_as_the_stall(disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        [key] = away(store, 1)
        with (
            system_call("preadv", before=lambda: time.sleep(0.05)),
            profile(activities=[ProfilerActivity.CPU]) as profiler,
            record_function("step"),
        ):
            store.get(key)
        stalled = store.stats().stalled_seconds
    [wait] = [one for one in profiler.events() if one.name == f"tierstore: wait {key}"]
    [step] = [one for one in profiler.events() if one.name == "step"]
    assert wait.cpu_time_total == pytest.approx(stalled * 1e6, abs=20_000)
    assert wait.cpu_time_total >= 45_000
    assert step.time_range.start <= wait.time_range.start
    assert wait.time_range.end <= step.time_range.end


def test_profiler_of_all_threads_sees_the_moves(disk_dir: Path) -> None:
    config = torch._C._profiler._ExperimentalConfig
    try:
        everything = config(profile_all_threads=True)
    except TypeError:
        pytest.skip("this torch cannot profile all threads")
    with open_store(disk_dir, 16 * PAGE) as store:
        keys = away(store, 8)
        before = store.stats()
        with profile(activities=[ProfilerActivity.CPU], experimental_config=everything) as profiler:
            for key in keys:
                store.get(key)
            wait_until_idle(store)
        stats = store.stats()
        store.put("new", pages(1, 2))
    seen = ranges(profiler)
    reads = {name: n for name, n in seen.items() if name.startswith("tierstore: read ")}
    assert sum(reads.values()) * 2 * PAGE == stats.bytes_read - before.bytes_read > 0
    assert reads.keys() == {f"tierstore: read {key}" for key in keys}


@needs_accelerator
def test_profiler_sees_device_copies_on_the_queuing_thread(disk_dir: Path) -> None:
    with open_store(disk_dir, 16 * PAGE, device=ACCELERATOR) as store:
        store.put("key", pages(1, 2))
        store.get("key")
        push_out(store, "key")
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            before = store.stats().bytes_onloaded
            store.get("key")
            onloaded = store.stats().bytes_onloaded - before
    seen = ranges(profiler)
    assert onloaded == 2 * PAGE
    assert seen["tierstore: wait key"] + seen["tierstore: to device key"] >= 1


def test_failed_wait_ends_its_range(disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        [key] = away(store, 1)
        slow = system_call("preadv", before=lambda: time.sleep(0.2))
        with slow, profile(activities=[ProfilerActivity.CPU]) as profiler:
            with pytest.raises(StoreTimeoutError):
                store.acquire(key, timeout=0.02)
            with pytest.raises(UnknownKeyError):
                store.acquire("nothing")
            with record_function("after"):
                torch.zeros(1)
        wait_until_idle(store)
    [wait] = [one for one in profiler.events() if one.name == f"tierstore: wait {key}"]
    [after] = [one for one in profiler.events() if one.name == "after"]
    assert wait.time_range.end <= after.time_range.start
    assert ranges(profiler).total() == 1


def test_unprofiled_run_creates_no_ranges() -> None:
    assert ranged("wait", "a") is ranged("read", "b")
    with profile(activities=[ProfilerActivity.CPU]):
        assert isinstance(ranged("wait", "a"), record_function)
    assert ranged("wait", "a") is ranged("read", "b")


def test_unprofiled_threads_wait_as_before(disk_dir: Path) -> None:
    with open_store(disk_dir, 16 * PAGE) as store:
        keys = away(store, 8)
        barrier = threading.Barrier(2)

        def read() -> None:
            barrier.wait()
            for i, key in enumerate(keys):
                assert_same(store.get(key), pages(i, 2))

        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            assert not run_threads([read, read])
    assert not ranges(profiler)
