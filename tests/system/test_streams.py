"""The stream of a thread's device work, while the store works on its own streams."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.accelerator import ACCELERATOR, DEVICE_0, DEVICE_1, needs_accelerator
from tests.device.states import pageable
from tests.helpers.torch_calls import BeforeEach
from tests.store.helpers import PAGE, assert_same, open_store, pages
from tierstore import Access, TierStore
from tierstore.lease import make_revocable, resume
from tierstore.store import engine_of
from tierstore.system.streams import run_on
from tierstore.tiers.arena import device_arena

pytestmark = pytest.mark.floor

NBYTES = 64 << 10
KINDS = ("disk", "onload", "offload", "copy")
"""Kinds of threads on which a store does slow work."""


class TwoThreads:
    """Two threads that are inside a function at once, and leave it in the order of arrival."""

    def __init__(self) -> None:
        self.inside = {name: threading.Event() for name in ("first", "second")}
        self.first_is_out = threading.Event()
        self.before: dict[str, torch.Stream] = {}
        self.after: dict[str, torch.Stream] = {}
        self.errors: list[BaseException] = []

    def meet(self) -> None:
        """Meet the other thread there; further threads pass."""
        name = threading.current_thread().name
        if name not in self.inside or self.inside[name].is_set():
            return
        self.inside[name].set()
        wait_for = self.inside["second"] if name == "first" else self.first_is_out
        assert wait_for.wait(20), "the two threads did not meet"

    def run(self, job: Any, device: torch.device) -> None:
        def body() -> None:
            name = threading.current_thread().name
            try:
                torch.accelerator.set_stream(torch.Stream(device))
                self.before[name] = torch.accelerator.current_stream(device)
                if name == "second":
                    assert self.inside["first"].wait(20)
                job()
                self.after[name] = torch.accelerator.current_stream(device)
            except BaseException as error:
                self.errors.append(error)
            finally:
                if name == "first":
                    self.first_is_out.set()

        threads = [threading.Thread(target=body, name=name) for name in self.inside]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not self.errors, self.errors
        assert self.before["first"] != self.before["second"]


@needs_accelerator
def test_threads_saving_at_once_return_to_their_streams(disk_dir: Path) -> None:
    device, two = torch.device(ACCELERATOR, 0), TwoThreads()

    def save() -> None:
        with BeforeEach("copy_", two.meet):
            number, event = engine_of(store).saved_tensors.save(
                torch.ones(NBYTES, dtype=torch.uint8, device=device)
            )
        assert event is not None
        event.synchronize()
        engine_of(store).saved_tensors.drop(number)

    with TierStore(8 * NBYTES, disk_dir, device=device, device_budget=8 * NBYTES) as store:
        two.run(save, device)
    assert two.after == two.before


@needs_accelerator
def test_threads_allocating_at_once_return_to_their_streams() -> None:
    device, two = torch.device(ACCELERATOR, 0), TwoThreads()
    stream = torch.Stream(device)

    def make() -> None:
        arena = device_arena(None, device, stream)  # one each: it has a lock
        with BeforeEach("empty", two.meet):
            arena.fill(arena.take(NBYTES))

    two.run(make, device)
    assert two.after == two.before


@needs_accelerator
def test_stream_is_left_when_its_work_fails(disk_dir: Path) -> None:
    device = torch.device(ACCELERATOR, 0)
    before = torch.accelerator.current_stream(device)

    def fail() -> None:
        raise RuntimeError("the copy fails")

    with TierStore(8 * NBYTES, disk_dir, device=device, device_budget=8 * NBYTES) as store:
        memory = torch.ones(NBYTES, dtype=torch.uint8, device=device)
        with BeforeEach("copy_", fail), pytest.raises(RuntimeError, match="the copy fails"):
            engine_of(store).saved_tensors.save(memory)
        assert torch.accelerator.current_stream(device) == before


@needs_accelerator
@pytest.mark.parametrize("index", [0, pytest.param(1, marks=pytest.mark.two_devices)])
def test_store_threads_work_on_its_device(index: int, disk_dir: Path) -> None:
    """Page-locking, for example, acts on the thread's current device."""
    device = torch.device(ACCELERATOR, index)
    current: dict[str, set[int]] = {}

    def note() -> None:
        name = threading.current_thread().name.rstrip("-_0123456789")
        current.setdefault(name, set()).add(torch.accelerator.current_device_index())

    def look(_: Any, what: str, called: Any) -> None:
        if what == "c_call" and called.__name__ in ("empty", "copy_", "record"):
            note()

    threading.setprofile(look)  # for threads that start from now on
    # A store's thread queues copies from pageable memory to the device, too.
    store = TierStore(2 * NBYTES, disk_dir, device=device, device_budget=2 * NBYTES)
    threading.setprofile(None)
    with pageable(), store:
        for key in "abcd":
            store.put(key, torch.ones(NBYTES, dtype=torch.uint8))
        store.put("large", torch.ones(2 * NBYTES, dtype=torch.uint8))  # recreates the others
        for key in "abcd":
            with store.acquire(key, Access.UPDATE) as lease:
                lease.tensor.add_(1)
        assert store.get("a").sum() == 2 * NBYTES
        asyncio.run(engine_of(store).copy_threads.run(note))
    assert current == {"tierstore-" + kind: {index} for kind in KINDS}


@pytest.mark.pretend_only("late")
@pytest.mark.parametrize("rested", [False, True])
def test_lost_lease_memory_waits_for_its_stream(
    rested: bool, late_pretend: Any, disk_dir: Path
) -> None:
    """The thread that finds the lease lost, or recalls it, uses another stream."""
    device = torch.device(ACCELERATOR, 0)
    theirs, read = torch.Stream(device), torch.empty(NBYTES, dtype=torch.uint8, pin_memory=True)
    with TierStore(4 * NBYTES, disk_dir, device=device, device_budget=NBYTES) as store:
        for value, key in enumerate("ab"):
            store.put(key, torch.full((NBYTES,), value + 1, dtype=torch.uint8))
        if rested:
            lease = store.acquire("a")
            assert make_revocable(lease)
        with theirs:
            if rested:
                assert resume(lease)
            else:
                lease = store.acquire("a")
            read.copy_(lease.tensor, non_blocking=True)
            assert late_pretend.queued_tasks() > 0, "the copy has already run"
        lease.abandon()  # as finalizers do
        with store.acquire("b") as other:
            assert other.tensor.sum() == 2 * NBYTES
    theirs.synchronize()
    assert read.sum() == NBYTES, "another group used the memory before it was read"


@needs_accelerator
@pytest.mark.two_devices
def test_stream_of_another_device_leaves_the_callers_device() -> None:
    stream = torch.Stream(DEVICE_1)
    mine = torch.accelerator.current_stream(DEVICE_0), torch.accelerator.current_stream(1)
    assert run_on(stream, torch.accelerator.current_device_index) == 1
    assert torch.accelerator.current_device_index() == 0
    after = torch.accelerator.current_stream(DEVICE_0), torch.accelerator.current_stream(1)
    assert after == mine


@needs_accelerator
def test_memory_first_used_in_inference_mode_is_reusable(disk_dir: Path) -> None:
    with open_store(disk_dir, ram=8 * PAGE, device=ACCELERATOR, device_budget=PAGE) as store:
        for number in range(2):
            store.put(f"g{number}", pages(number + 1))
        with torch.inference_mode():
            assert_same(store.get("g0"), pages(1))
        assert_same(store.get("g1"), pages(2))  # in the same slot
        with store.acquire("g1") as lease:
            assert not lease.tensor.is_inference()
