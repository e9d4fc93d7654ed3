"""Traces: valid files that agree with the statistics."""

from __future__ import annotations

import asyncio
import errno
import random
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from tests.accelerator import ACCELERATOR, needs_accelerator
from tests.helpers.engine import core_of
from tests.helpers.system_calls import Call, system_call
from tests.store import traces
from tests.store.helpers import (
    PAGE,
    open_store,
    pages,
    push_out,
    run_threads,
    wait_until_idle,
)
from tierstore import Access, TierStore, TransferError
from tierstore.errors import InvalidTraceError
from tierstore.observe.journal import Ring
from tierstore.observe.trace import COMPUTE, STALLS, read_trace


def fill(store: TierStore, count: int, size: int = 2) -> list[str]:
    """Put `count` groups, and flush."""
    keys = [f"layer/{i}" for i in range(count)]
    for i, key in enumerate(keys):
        store.put(key, pages(i, size))
    store.flush()
    return keys


def slow_reads(seconds: float) -> AbstractContextManager[list[Call]]:
    """Make every read of a file take `seconds`."""
    return system_call("preadv", before=lambda: time.sleep(seconds))


def test_trace_is_sound_and_ends_at_the_stores_figures(disk_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with open_store(disk_dir, 16 * PAGE, disk_budget="1MB") as store:
        keys = fill(store, 20)
        for key in keys * 3:
            with store.acquire(key) as lease:
                assert lease.tensor.numel()
        wait_until_idle(store)
        stats = store.stats()
        store.trace(path)
    document = traces.check(path, stats)
    assert stats.misses > 0
    reads = traces.slices(document, "disk read")
    assert sum(event["args"]["nbytes"] for event in reads) == stats.bytes_read > 0
    writes = traces.slices(document, "disk write")
    assert sum(event["args"]["nbytes"] for event in writes) == stats.bytes_written > 0
    assert {event["name"] for event in reads + writes} == set(keys)
    assert [event["name"] for event in traces.slices(document, COMPUTE)] == keys * 3


def test_trace_holds_all_that_a_replay_needs(disk_dir: Path, tmp_path: Path) -> None:
    with open_store(disk_dir, 16 * PAGE) as store:
        keys = fill(store, 10)
        store.put("once", pages(1, 3))
        store.acquire("once", Access.TAKE).release()
        for key in reversed(keys):
            store.get(key)
        wait_until_idle(store)
        store.trace(tmp_path / "trace.json.gz")
        stats = store.stats()
    traces.check(tmp_path / "trace.json.gz", stats)
    recorded = read_trace(tmp_path / "trace.json.gz")
    assert [key for key, _ in recorded.uses] == ["once", *reversed(keys)]
    assert recorded.groups == (*((key, 2 * PAGE) for key in keys), ("once", 3 * PAGE))
    assert recorded.budgets == {"HOST": 16 * PAGE, "DISK": None}
    assert recorded.device == "cpu"
    assert recorded.dropped == 0
    assert recorded.stats == stats.as_dict()
    # Speed is bytes moved divided by the time spent moving them.
    assert recorded.bandwidth.keys() == {"DISK>HOST", "HOST>DISK"}
    assert recorded.bandwidth["DISK>HOST"] == pytest.approx(
        stats.bytes_read / stats.busy_seconds["DISK>HOST"]
    )


def test_compute_after_a_use_lasts_until_the_next_request(disk_dir: Path, tmp_path: Path) -> None:
    with open_store(disk_dir) as store:
        fill(store, 3)
        for i in range(3):
            with store.acquire(f"layer/{i}"):
                time.sleep(0.02 * i)
            time.sleep(0.01)
        store.trace(tmp_path / "trace.json")
    uses = [seconds for _, seconds in read_trace(tmp_path / "trace.json").uses]
    assert uses[1] >= 0.02 + 0.01
    assert uses[2] >= 0.04
    recorded = read_trace(tmp_path / "trace.json")
    computed = [one.seconds for one in recorded.slices if one.kind == COMPUTE]
    assert computed[2] >= 0.04


def test_stall_is_recorded_with_key_and_outcome(disk_dir: Path, tmp_path: Path) -> None:
    with open_store(disk_dir) as store:
        fill(store, 1)
        push_out(store, "layer/0")
        with slow_reads(0.05):
            store.get("layer/0")
        store.trace(tmp_path / "trace.json")
        stats = store.stats()
    document = traces.check(tmp_path / "trace.json", stats)
    (stall,) = traces.slices(document, STALLS)
    assert (stall["name"], stall["args"]) == ("layer/0", {"met": "miss"})
    (read,) = traces.slices(document, "disk read")
    assert stall["ts"] <= read["ts"] <= read["ts"] + read["dur"] <= stall["ts"] + stall["dur"]
    assert read["dur"] >= 50_000
    assert stats.stalled_seconds >= 0.05
    # The write without a waiter was hidden; the read, waited for throughout, was not.
    busy = stats.busy_seconds
    hidden = busy["HOST>DISK"] / (busy["HOST>DISK"] + busy["DISK>HOST"])
    assert stats.overlap == pytest.approx(hidden, abs=1e-6)


def test_transfer_hidden_behind_compute_is_no_stall(disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        fill(store, 1)
        push_out(store, "layer/0")
        with slow_reads(0.02):
            store.prefetch("layer/0")
            wait_until_idle(store)
        store.get("layer/0")
        stats = store.stats()
    assert (stats.hits, stats.stalled_seconds, stats.overlap) == (1, 0.0, 1.0)
    assert stats.busy_seconds["DISK>HOST"] >= 0.02


def test_store_without_transfers_has_full_overlap(disk_dir: Path, tmp_path: Path) -> None:
    with open_store(disk_dir) as store:
        assert (store.stats().overlap, store.stats().busy_seconds) == (1.0, {})
        store.trace(tmp_path / "trace.json")
        traces.check(tmp_path / "trace.json", store.stats())


def test_many_threads_write_a_sound_trace(disk_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with open_store(disk_dir, 24 * PAGE) as store:
        keys = fill(store, 12)
        stop = threading.Event()

        def use(seed: int) -> None:
            chosen = random.Random(seed)
            for _ in range(60):
                access = chosen.choice([Access.READ, Access.READ, Access.UPDATE])
                with store.acquire(chosen.choice(keys), access):
                    pass
                if chosen.random() < 0.2:
                    store.put(chosen.choice(keys), pages(seed, 2))

        def look() -> None:
            while not stop.is_set():
                store.trace(tmp_path / "meanwhile.json")
                assert 0 <= store.stats().overlap <= 1

        looking = threading.Thread(target=look)
        looking.start()
        errors = run_threads([lambda seed=seed: use(seed) for seed in range(4)])  # type: ignore[misc]
        stop.set()
        looking.join()
        assert not errors
        wait_until_idle(store)
        stats = store.stats()
        store.trace(path)
    document = traces.check(path, stats)
    assert len(document["tierstore"]["uses"]) == 4 * 60
    traces.check_slices(traces.load(tmp_path / "meanwhile.json")["traceEvents"])


def test_tasks_of_one_thread_are_separate_callers(disk_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with open_store(disk_dir) as store:
        fill(store, 4)

        async def use(key: str) -> None:
            with await store.aacquire(key):
                await asyncio.sleep(0.05)

        async def all_at_once() -> None:
            await asyncio.gather(*(use(f"layer/{i}") for i in range(4)))

        asyncio.run(all_at_once())
        stats = store.stats()
        store.trace(path)
    computed = traces.slices(traces.check(path, stats), COMPUTE)
    assert len({event["tid"] for event in computed}) == 4, "they computed at the same time"
    assert all(event["dur"] >= 50_000 for event in computed)


def test_caller_with_several_leases_computes_once_at_a_time(disk_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with open_store(disk_dir) as store:
        fill(store, 2)
        with store.acquire("layer/0"):
            with store.acquire("layer/1"):
                time.sleep(0.005)
            time.sleep(0.005)
            store.trace(path)  # layer/0 is still leased
            document = traces.check(path, store.stats())
    computed = traces.slices(document, COMPUTE)
    assert [event["name"] for event in computed] == ["layer/0", "layer/1", "layer/0"]
    assert len({event["tid"] for event in computed}) == 1


def test_failed_reads_are_shown_and_not_counted(disk_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with open_store(disk_dir) as store:
        fill(store, 1)
        push_out(store, "layer/0")
        with system_call("preadv", fails_with=errno.EIO), pytest.raises(TransferError):
            store.get("layer/0")
        store.trace(path)
        stats = store.stats()
        assert stats.bytes_read == 0
        document = traces.check(path, stats)
        (read,) = traces.slices(document, "disk read")
        assert read["args"] == {"nbytes": 0, "failed": True}
        (stall,) = traces.slices(document, STALLS)
        assert stall["args"] == {"met": "failed", "failed": True}
        store.get("layer/0")
        store.trace(path)
        traces.check(path, store.stats())
        assert store.stats().bytes_read > 0


def test_closed_store_can_be_traced(disk_dir: Path, tmp_path: Path) -> None:
    store = open_store(disk_dir)
    store.put("key", pages(1))
    store.close()
    store.trace(tmp_path / "trace.json")
    document = traces.check(tmp_path / "trace.json", store.stats())
    assert len(traces.slices(document, "disk write")) == 1, "closing wrote it"


def test_dropped_events_are_reported_and_totals_stay_exact(disk_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with open_store(disk_dir, 8 * PAGE) as store:
        journal = core_of(store).mover.journal
        journal.uses, journal.levels, journal.spans = Ring(5), Ring(5), Ring(5)
        keys = fill(store, 10)
        for key in keys * 2:
            store.get(key)
        wait_until_idle(store)
        stats = store.stats()
        store.trace(path)
    document = traces.check(path, stats)
    recorded = read_trace(path)
    assert [key for key, _ in recorded.uses] == keys[-5:]
    events = len(document["tierstore"]["uses"])
    assert recorded.dropped >= 20 - events
    (said,) = [e for e in document["traceEvents"] if e["ph"] == "i"]
    assert said["name"] == f"{recorded.dropped:,} older events were dropped"


# Files -----------------------------------------------------------------------------------------


def test_unwritable_trace_leaves_the_old_one(disk_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "out" / "trace.json"
    path.parent.mkdir()
    with open_store(disk_dir) as store:
        store.trace(path)
        before = path.read_bytes()
        full = system_call("replace", fails_with=errno.ENOSPC)
        with full, pytest.raises(OSError, match="No space"):
            store.trace(path)
        assert path.read_bytes() == before
        assert list(path.parent.iterdir()) == [path], "a temporary file was left behind"
        store.put("key", pages(1))
        store.trace(path)
        assert path.read_bytes() != before


def test_stalls_fall_into_profiler_ranges(disk_dir: Path, tmp_path: Path) -> None:
    """torch.profiler's clock and the store's agree in the merged file."""
    with open_store(disk_dir) as store:
        fill(store, 1)
        push_out(store, "layer/0")
        with slow_reads(0.1), profile(activities=[ProfilerActivity.CPU]) as profiler:
            with record_function("before"):
                time.sleep(0.1)
            with record_function("fetching"):
                store.get("layer/0")
            with record_function("after"):
                time.sleep(0.1)
        profiler.export_chrome_trace(str(tmp_path / "profile.json"))
        store.trace(tmp_path / "both.json", merge=tmp_path / "profile.json")
        store.trace(tmp_path / "both.json", merge=tmp_path / "both.json")  # again: replaces ours
        stats = store.stats()
    document = traces.check(tmp_path / "both.json", stats)
    ranges = {
        e["name"]: (e["ts"], e["ts"] + e["dur"])
        for e in document["traceEvents"]
        if e.get("cat") == "user_annotation"
    }
    (stall,) = traces.slices(document, STALLS)
    begin, end = stall["ts"], stall["ts"] + stall["dur"]
    clocks_apart = 20_000  # microseconds, on a busy machine
    assert (
        ranges["fetching"][0] - clocks_apart <= begin < end <= ranges["fetching"][1] + clocks_apart
    )
    assert ranges["before"][1] <= begin + clocks_apart
    assert end - clocks_apart <= ranges["after"][0]
    assert end - begin >= 100_000
    profiled = traces.load(tmp_path / "profile.json")
    assert len(document["traceEvents"]) > len(profiled["traceEvents"])
    assert document.keys() - {"tierstore"} == profiled.keys()
    assert read_trace(tmp_path / "both.json").stats == stats.as_dict()


def test_file_that_is_no_trace_is_not_merged(disk_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text('{"traceEvents": 1}')
    with open_store(disk_dir) as store:
        with pytest.raises(InvalidTraceError, match=r"notes\.json"):
            store.trace(tmp_path / "trace.json", merge=tmp_path / "notes.json")
        with pytest.raises(FileNotFoundError):
            store.trace(tmp_path / "trace.json", merge=tmp_path / "missing.json")
    assert not (tmp_path / "trace.json").exists()


def test_two_stores_have_separate_processes(tmp_path: Path) -> None:
    with open_store(tmp_path / "a") as one, open_store(tmp_path / "b") as other:
        one.trace(tmp_path / "one.json")
        other.trace(tmp_path / "both.json", merge=tmp_path / "one.json")
    document = traces.load(tmp_path / "both.json")
    pids = {event["pid"] for event in document["traceEvents"]}
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "a real process has that number"


def test_newest_of_two_stores_in_a_trace_is_read(tmp_path: Path) -> None:
    with open_store(tmp_path / "a") as one, open_store(tmp_path / "b") as other:
        one.put("first", torch.zeros(8))
        for _ in range(3):
            one.get("first")
        other.put("second", torch.zeros(8))
        other.get("second")
        one.trace(tmp_path / "one.json")
        other.trace(tmp_path / "other.json")
        other.trace(tmp_path / "both.json", merge=tmp_path / "one.json")
    alone, both = read_trace(tmp_path / "other.json"), read_trace(tmp_path / "both.json")
    assert [s.name for s in both.slices] == [s.name for s in alone.slices]
    assert both.slices
    assert {n: len(v) for n, v in both.counters.items()} == {
        n: len(v) for n, v in alone.counters.items()
    }


@pytest.mark.parametrize(
    "text",
    ['{"traceEvents": [{"ts": NaN}]}', '[{"ts": -Infinity}]'],
)
def test_impossible_numbers_raise(text: str, disk_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "odd.json").write_text(text)
    with open_store(disk_dir) as store, pytest.raises(InvalidTraceError, match="not a JSON number"):
        store.trace(tmp_path / "trace.json", merge=tmp_path / "odd.json")


def test_foreign_process_ids_of_any_kind_are_accepted(disk_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "odd.json").write_text('{"traceEvents": [{"pid": [1], "ph": "X"}]}')
    with open_store(disk_dir) as store:
        store.trace(tmp_path / "trace.json", merge=tmp_path / "odd.json")
    assert {"pid": [1], "ph": "X"} in traces.load(tmp_path / "trace.json")["traceEvents"]


# An accelerator --------------------------------------------------------------------------------


@needs_accelerator
def test_device_hop_is_timed_by_the_device(disk_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with open_store(disk_dir, 16 * PAGE, device=ACCELERATOR) as store:
        keys = fill(store, 12)
        for key in keys * 2:
            with store.acquire(key) as lease:
                lease.tensor.add(1)
        wait_until_idle(store)
        torch.accelerator.synchronize()  # including the work queued last
        stats = store.stats()
        store.trace(path)
    document = traces.check(path, stats)
    onloads = traces.slices(document, "host to device")
    assert sum(event["args"]["nbytes"] for event in onloads) == stats.bytes_onloaded > 0
    assert stats.busy_seconds["HOST>DEVICE"] > 0
    assert 0 <= stats.overlap <= 1
    assert traces.slices(document, COMPUTE)
    stalls = traces.slices(document, STALLS)
    assert sum(event["dur"] for event in stalls) == pytest.approx(
        stats.stalled_seconds * 1e6, abs=1 + len(stalls)
    )
    assert stats.stalled_seconds > 0
    assert [key for key, _ in read_trace(path).uses] == keys * 2
    assert read_trace(path).device.startswith(ACCELERATOR)


# The checks themselves -------------------------------------------------------------------------


def test_checks_notice_seeded_faults(disk_dir: Path, tmp_path: Path) -> None:
    with open_store(disk_dir) as store:
        fill(store, 2)
        store.get("layer/0")
        stats = store.stats()
        store.trace(tmp_path / "trace.json")
    events = traces.check(tmp_path / "trace.json", stats)["traceEvents"]
    piece = next(event for event in events if event["ph"] == "X")
    long = {**piece, "dur": 10**9}
    with pytest.raises(AssertionError, match="overlap"):
        traces.check_slices([*events, long, {**piece, "ts": piece["ts"] + 1}])
    with pytest.raises(AssertionError, match="no name"):
        traces.check_slices([*events, {**piece, "tid": -1}])
    counted = next(e for e in events if "written" in e.get("args", {}))
    late = {**counted, "ts": 10**18, "args": {"written": stats.bytes_written + 1}}
    with pytest.raises(AssertionError):
        traces.check_counters([*events, late], stats)
    with pytest.raises(AssertionError, match="falls"):
        traces.check_counters([*events, {**late, "args": {"written": 0}}], stats)
