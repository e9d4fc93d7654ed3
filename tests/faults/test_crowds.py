"""Dozens of threads use one store at random: each operation appears to run alone."""

from __future__ import annotations

import errno
import random
import threading
import time
from pathlib import Path

import pytest

from tests.accelerator import ACCELERATOR
from tests.faults.crowds import Throng, Watch
from tests.faults.values import Torn, fill, group, tag_for, tag_of
from tests.helpers.engine import core_of
from tests.helpers.system_calls import system_call
from tests.lanes import by_lane
from tests.store.helpers import (
    PAGE,
    assert_group,
    make_deaf_to_changes,
    on_both,
    open_store,
    pages,
    push_out,
)
from tierstore import Access, CorruptDataError, TransferError
from tierstore.model.tiers import Tier
from tierstore.store import engine_of
from tierstore.tiers import mover

STEPS = 25  # of each thread in a round


@pytest.mark.full("eight threads on the CPU see each kind of disorder", keep=["8-cpu"])
@pytest.mark.long("eight threads see each kind of disorder", keep=["8-cpu", f"8-{ACCELERATOR}"])
@on_both
@pytest.mark.parametrize("threads", [8, 64])
@pytest.mark.timeout(14400)
def test_threads_observe_a_linearizable_history(
    threads: int, device: str, tmp_path: Path, first_seed: int
) -> None:
    seed, stores = first_seed, by_lane(1, 1, 8)
    for number in range(stores):
        print(f"Throng({seed + number}, {device!r}, directory, {threads})")
        throng = Throng(seed + number, device, tmp_path / str(number), threads)
        throng.play(by_lane(10, 12, 800) // stores, STEPS)
        assert throng.watch.samples > 10
        for step in throng.players[0].STEPS:
            assert throng.done[step] > 0, f"no thread did {step}"
        stats = throng.store.stats()
        assert stats.bytes_read > 0
        assert stats.bytes_written > 0
        throng.store.close()


def held_after_failed_reads(directory: Path) -> int:
    """Return the bytes held by a store with a budget of 8 pages, while errors of reads are kept."""
    store, errors = open_store(directory, 8 * PAGE), []
    # Different sizes: no group can reuse another's memory.
    keys = {f"key{count}": pages(1, count) for count in (3, 4, 5, 6)}
    for key, tensor in keys.items():
        store.put(key, tensor)
    push_out(store, *keys)

    with system_call("preadv", fails_with=errno.EIO):
        for key in keys:
            with pytest.raises(TransferError) as caught:
                store.get(key)
            errors.append(caught.value)
    held = 0
    for key, tensor in keys.items():
        assert_group(store.get(key), tensor)
        held = max(held, core_of(store).tiers.host.arena.make.__self__.held)
    store.close()
    return held


def test_failed_read_keeps_no_memory(tmp_path: Path) -> None:
    assert held_after_failed_reads(tmp_path / "store") <= 8 * PAGE


def test_error_holding_its_frames_would_keep_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the control."""
    monkeypatch.setattr(mover, "without_frames", lambda error: error)
    assert held_after_failed_reads(tmp_path / "store") > 8 * PAGE


# Controls: the same with one protection removed ---------------------------------------------------


@pytest.mark.full("a search for a rare event; the controls below are deterministic")
def test_stale_value_is_noticed(tmp_path: Path) -> None:
    """Make some puts return before readers can see the new value.

    There is space for everything. An unpublished group keeps its space, so with less of it a put
    could be refused first.
    """
    throng = Throng(1, "cpu", tmp_path / "store", threads=8, least=200)
    rng, show, late = random.Random(1), engine_of(throng.store).puts.publish, []

    def later(*arguments: object) -> None:
        time.sleep(0.005)
        show(*arguments)

    def filled(*arguments: object) -> None:
        if rng.random() < 0.8:
            show(*arguments)
            return
        thread = threading.Thread(target=later, args=arguments)
        late.append(thread)
        thread.start()

    engine_of(throng.store).puts.publish = filled
    with pytest.raises(AssertionError, match="no order explains"):
        throng.play(20, STEPS)
    for thread in late:
        thread.join()
    throng.store.close()


def test_concurrent_updaters_are_noticed(tmp_path: Path) -> None:
    throng = Throng(1, "cpu", tmp_path / "store", threads=8)
    throng.access_to_change = Access.READ
    # A group changed while it is read, saved or copied is torn, too.
    seen = (AssertionError, CorruptDataError)
    with pytest.raises(seen, match=r"no order explains|a mix of|changed under|is not what was"):
        throng.play(20, STEPS)
    throng.store.close()


def test_dropped_update_is_noticed(tmp_path: Path) -> None:
    """Check that using the old copy on disk of a changed group is noticed."""
    throng = Throng(1, "cpu", tmp_path / "store", threads=8)
    make_deaf_to_changes(throng.store)
    with pytest.raises(AssertionError):
        throng.play(20, STEPS)
    throng.store.close()


def test_store_above_its_budget_is_noticed(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store", 4 * PAGE)
    watch = Watch(store, lambda: 0)
    store.put("fits", pages(1, 3))
    watch.look()
    core_of(store).planner.copies.change_budget(Tier.HOST, 8 * PAGE)
    store.put("more", pages(1, 4))
    with pytest.raises(AssertionError, match="used 28672 of 16384 on HOST"):
        watch.look()
    store.close()


def test_bytes_of_another_group_or_version_are_noticed() -> None:
    mine, other = tag_for("key/001", 1, 1), tag_for("key/002", 1, 1)
    newer = tag_for("key/001", 2, 1)
    tensors = group(mine, 2)
    assert tag_of("key/001", tensors) == mine
    with pytest.raises(Torn, match="holds numbers of key/002"):
        tag_of("key/001", group(other, 2))
    with pytest.raises(Torn, match="a mix of"):
        tag_of("key/001", {**tensors, "right": group(newer, 2)["right"]})
    swapped = group(mine, 2)
    swapped["left"][:256], swapped["left"][256:] = tensors["left"][256:], tensors["left"][:256]
    with pytest.raises(Torn):
        tag_of("key/001", swapped)
    fill(tensors, newer)
    assert tag_of("key/001", tensors) == newer
