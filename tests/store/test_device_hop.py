"""Copies to a device: queued by the thread that needs them, timed by the device itself."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.accelerator import ACCELERATOR, needs_accelerator
from tests.device.states import captured, pageable
from tests.faults.interrupting import Interrupter
from tests.helpers.engine import core_of
from tests.helpers.events import calls_of
from tests.helpers.threads import hold_calls, start_thread
from tests.helpers.torch_calls import BeforeEach
from tests.lanes import by_lane
from tests.store.helpers import (
    PAGE,
    PATIENCE,
    assert_at_rest,
    assert_same,
    join,
    open_store,
    pages,
    wait_until,
)
from tierstore import TierStore, TransferError
from tierstore.model.tiers import Tier
from tierstore.tiers.device_tier import DeviceTier
from tierstore.tiers.hops import HostToDevice
from tierstore.tiers.workers import SerialExecutor, Workers

MIB = 1 << 20
COPY = HostToDevice.copy.__qualname__


def in_ram(disk_dir: Path, count: int = 4, size: int = 1, **options: Any) -> TierStore:
    """Open a store whose groups `g0`, `g1`, ... of this many pages are in RAM only."""
    store = open_store(disk_dir, ram=2 * count * size * PAGE, device=ACCELERATOR, **options)
    for number in range(count):
        store.put(f"g{number}", pages(number, size), durable=False)
    return store


class Work:
    """Records which threads queue copies to the device, and jobs handed to other threads."""

    def __init__(self, calls: list[tuple[str, str]]) -> None:
        self.calls = calls

    @property
    def threads_of_copies(self) -> list[str]:
        """Return the names of the threads that queue copies."""
        return [thread for name, thread in self.calls if name == COPY]

    @property
    def handed_on(self) -> int:
        """Return the number of jobs handed to other threads."""
        return len(self.calls) - len(self.threads_of_copies)


@pytest.fixture
def work() -> Iterator[Work]:
    with calls_of(HostToDevice.copy, SerialExecutor.submit, Workers.submit) as calls:
        yield Work(calls)


@needs_accelerator
def test_acquire_from_ram_queues_the_copy_on_its_thread(work: Work, disk_dir: Path) -> None:
    here = threading.current_thread().name
    with in_ram(disk_dir, device_budget=2 * PAGE) as store:
        for number in (0, 1, 2, 3, 0):  # two of them evict others from the device
            before = work.handed_on
            with store.acquire(f"g{number}") as lease:
                assert work.handed_on == before, "another thread was needed"
                assert_same(lease.tensor.cpu(), pages(number))
        assert store.stats().bytes_onloaded >= 5 * PAGE
        assert store.stats().misses >= 3
        assert set(work.threads_of_copies) == {here}


@needs_accelerator
def test_acquire_from_disk_queues_its_copy(work: Work, disk_dir: Path) -> None:
    with open_store(disk_dir, device=ACCELERATOR) as store:
        store.put("g", pages(1))
    with open_store(disk_dir, device=ACCELERATOR) as store:
        assert_same(store.get("g").cpu(), pages(1))
    (name,) = work.threads_of_copies
    assert name.startswith("tierstore-disk")


@needs_accelerator
def test_prefetch_queues_copies_at_once(work: Work, disk_dir: Path) -> None:
    with in_ram(disk_dir) as store:
        before = work.handed_on
        store.prefetch(["g1", "g2"])
        assert len(work.threads_of_copies) == 2
        assert work.handed_on == before
        hits = store.stats().hits
        for number in (1, 2):
            with store.acquire(f"g{number}") as lease:
                assert_same(lease.tensor.cpu(), pages(number))
        assert store.stats().hits == hits + 2


@needs_accelerator
def test_pageable_prefetch_copy_blocks_no_thread(
    work: Work, disk_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver makes such a copy while its caller waits."""
    with pageable(), in_ram(disk_dir) as store:
        gate = hold_calls(monkeypatch, HostToDevice, "copy")
        store.prefetch("g1")
        assert gate.reached.wait(PATIENCE)
        gate.open()
        with store.acquire("g1") as lease:
            assert_same(lease.tensor.cpu(), pages(1))
    assert work.threads_of_copies == ["tierstore-onload-0"]


@pytest.mark.pretend_only("captures")
def test_captured_thread_queues_no_copy(work: Work, disk_dir: Path) -> None:
    with in_ram(disk_dir) as store:
        with captured():
            store.prefetch("g1")
            wait_until(lambda: bool(work.threads_of_copies), "nobody queued the copy")
        assert work.threads_of_copies == ["tierstore-onload-0"]
        assert_same(store.get("g1").cpu(), pages(1))


@needs_accelerator
def test_copy_that_cannot_be_queued_raises_and_leaves_nothing(disk_dir: Path) -> None:
    def fail() -> None:
        raise RuntimeError("the device is out of order")

    with in_ram(disk_dir, device_budget=2 * PAGE) as store:
        broken = BeforeEach("copy_", fail)
        with broken, pytest.raises(TransferError, match="out of order") as raised:
            store.acquire("g1")
        assert raised.value.key == "g1"
        assert_at_rest(store)
        with store.acquire("g1"), store.acquire("g2") as lease:  # all space is free
            assert_same(lease.tensor.cpu(), pages(2))


# Interrupts --------------------------------------------------------------------------------------

SIZE = 2
STRIDE = by_lane(47, 13, 1)


def misses(store: TierStore, patience: float, stride: int = STRIDE) -> Iterator[Interrupter]:
    """Interrupt acquires that evict another group, at every `stride`-th instruction."""
    turn = 0
    while True:
        key = f"g{turn % 4}"
        store.offload(key)
        interrupter = Interrupter(turn)
        interrupter.run(lambda key=key: store.acquire(key, timeout=patience).release())
        gc.collect()
        yield interrupter
        if not interrupter.fired:
            return
        turn += stride


def stat_item(store: TierStore, patience: float) -> None:
    for number in range(4):
        with store.acquire(f"g{number}", timeout=patience) as lease:
            assert_same(lease.tensor.cpu(), pages(number, SIZE))
    assert_at_rest(store)
    arena = core_of(store).tiers.device.arena
    with core_of(store).lock:
        there = [
            c.slots[Tier.DEVICE] for c in core_of(store).mover.entries() if Tier.DEVICE in c.slots
        ]
    assert arena.bytes_counted == sum(slot.nbytes for slot in [*there, *arena.unused_slots()])


def two_of_four(disk_dir: Path) -> TierStore:
    return in_ram(disk_dir, size=SIZE, device_budget=2 * SIZE * PAGE)


@pytest.mark.full("interrupts at each point; tests/faults/test_interrupts.py has some in each lane")
@needs_accelerator
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_copy_interrupted_while_queued_keeps_consistency(disk_dir: Path) -> None:
    with two_of_four(disk_dir) as store:
        count, stream = 0, torch.accelerator.current_stream()
        for interrupter in misses(store, PATIENCE):
            try:
                assert torch.accelerator.current_stream() == stream, "left on another stream"
                stat_item(store, PATIENCE)
            except BaseException as error:
                error.add_note(f"interrupted at {interrupter.where}, number {interrupter.turn}")
                raise
            count += interrupter.fired
        assert count > 1300 // STRIDE


@pytest.mark.full("the control of the test above")
@needs_accelerator
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_copy_interrupted_without_rebuild_is_inconsistent(
    disk_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the accounting of device memory is not rebuilt."""
    monkeypatch.setattr(DeviceTier, "rebuild", lambda *arguments: None)
    store = two_of_four(disk_dir)
    found = []
    # Instructions depend on the Python version: with larger strides, 3.13 would escape by chance.
    for interrupter in misses(store, 1.0, min(STRIDE, 13)):
        try:
            stat_item(store, 1.0)
        except BaseException as error:
            found.append((interrupter.where, error))
            break
    assert found
    core_of(store).finalizer()


# Times -------------------------------------------------------------------------------------------


@pytest.fixture
def link_speed(pretend: Any) -> Iterator[Callable[[float], None]]:
    """Sets the speed of the device's link, in bytes per second. Queued copies wait for a waiter."""
    pretend.set_slowness(None)
    yield pretend.set_link_speed
    pretend.start_over()


@pytest.mark.pretend_only("times")
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_planner_assumes_the_links_speed(
    link_speed: Callable[[float], None], runs_ahead: bool, disk_dir: Path
) -> None:
    speed = 50e6  # a copy takes 20 ms, long against a wait for a core
    link_speed(speed)
    count, size = 6, MIB // PAGE
    with in_ram(disk_dir, count, size, device_budget=3 * MIB) as store:
        for turn in range(3):
            for number in range(count):
                with store.acquire(f"g{number}") as lease:
                    if not runs_ahead:
                        assert lease.tensor[0].item() == number
            if turn < 2:
                torch.accelerator.synchronize(store.device)
        torch.accelerator.synchronize(store.device)
        store.acquire("g0").release()  # a step polls the device's finished work
        believed = core_of(store).planner.bandwidth(Tier.HOST, Tier.DEVICE)
        assert store.stats().bytes_onloaded >= count * MIB
    assert believed == pytest.approx(speed, rel=0.1)


@pytest.mark.pretend_only("times")
def test_compute_time_is_the_devices(link_speed: Callable[[float], None], disk_dir: Path) -> None:
    """A copy on the caller's own stream takes the place of a kernel that takes a known time."""
    speed, busy = 20e6, 0.05  # seconds
    link_speed(speed)
    work = torch.zeros(int(speed * busy), dtype=torch.uint8).pin_memory()
    target = torch.empty_like(work, device=ACCELERATOR)
    with in_ram(disk_dir) as store:
        began = time.monotonic()
        for _ in range(3):
            for number in range(4):
                with store.acquire(f"g{number}"):
                    target.copy_(work, non_blocking=True)
        queued = time.monotonic() - began
        torch.accelerator.synchronize(store.device)
        store.acquire("g0").release()
        groups = [core_of(store).current[f"g{number}"] for number in range(4)]
        believed = [core_of(store).planner.computing_seconds(group) for group in groups]
    assert believed == [pytest.approx(busy, rel=0.1)] * 4
    assert queued < 6 * busy


@needs_accelerator
def test_events_block_without_spinning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that waits for an event should not take a core from those that compute."""
    made: list[dict[str, Any]] = []
    kind = torch.Event

    def noting(*arguments: Any, **options: Any) -> torch.Event:
        made.append(options)
        return kind(*arguments, **options)

    monkeypatch.setattr(torch, "Event", noting)
    DeviceTier(torch.device(ACCELERATOR, 0), None).times.mark()
    assert made
    assert all(options.get("blocking") for options in made)


@needs_accelerator
def test_thread_evicting_for_itself_keeps_others_correct(disk_dir: Path) -> None:
    """Many threads queue copies, in less memory than all of them need."""
    errors: list[BaseException] = []
    with in_ram(disk_dir, 8, device_budget=3 * PAGE) as store:

        def work(first: int) -> None:
            try:
                for turn in range(40):
                    number = (first + 3 * turn) % 8
                    with store.acquire(f"g{number}", timeout=PATIENCE) as lease:
                        assert_same(lease.tensor.cpu(), pages(number))
            except BaseException as error:
                errors.append(error)

        threads = [start_thread(lambda first=first: work(first)) for first in range(3)]
        for thread in threads:
            join(thread)
        assert not errors
        assert_at_rest(store)
