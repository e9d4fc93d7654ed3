"""Page-locking beside reading: which threads lock host memory, when, and how often.

Gates stop the driver, so that a test sees concurrent work. Nothing is timed.
"""

from __future__ import annotations

import errno
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.accelerator import ACCELERATOR
from tests.helpers.engine import core_of
from tests.helpers.system_calls import system_call
from tests.helpers.threads import PATIENCE, Gate, start_thread
from tests.store.helpers import open_store
from tests.tiers.test_pinned import MADV_POPULATE_WRITE, Driver
from tierstore import TierStore, TransferError
from tierstore.model.sizes import PAGE
from tierstore.system.files import READ_BLOCK
from tierstore.tiers.arena import Arena, RegisteredArena, Slot
from tierstore.tiers.pinned import RegisteredMemory

pytestmark = pytest.mark.floor

TWO_PIECES = READ_BLOCK + PAGE
"""Bytes of a group that is read in two pieces."""
BUDGET = 4 << 20  # of an arena: its slabs have 64 KiB, and slots of up to 8 KiB


@dataclass
class Calls:
    """Calls that register memory: the addresses, and the names of the threads that make them.

    Each calls `first` before the driver.
    """

    first: Callable[[], object] = bool
    addresses: list[int] = field(default_factory=list)
    threads: list[str] = field(default_factory=list)


@pytest.fixture
def calls(pretend: Any, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Calls of the driver, which raise no audit event."""
    found, runtime = Calls(), pretend.cudart()
    register = runtime.cudaHostRegister

    def noted(address: int, nbytes: int, flags: int) -> int:
        found.addresses.append(address)
        found.threads.append(threading.current_thread().name)
        found.first()
        return int(register(address, nbytes, flags))

    monkeypatch.setattr(type(runtime), "cudaHostRegister", staticmethod(noted))
    return found


class Count:
    """Counts actions of several threads; any thread can wait for a count."""

    def __init__(self) -> None:
        self._done = threading.Semaphore(0)

    def add(self) -> None:
        self._done.release()

    def wait_for(self, number: int) -> None:
        assert all(self._done.acquire(timeout=PATIENCE) for _ in range(number))


@dataclass
class Groups:
    """A store over a file of groups, each a tensor of bytes, and the contents of the file."""

    store: TierStore
    values: dict[str, torch.Tensor]

    def read(self, *keys: str) -> None:
        """Acquire each of the groups, and compare it with the file."""
        for key in keys:
            with self.store.acquire(key) as lease:
                (found,) = (tensor.cpu() for tensor in lease.tensors.values())
            assert torch.equal(found, self.values[key])

    @property
    def arena(self) -> Arena:
        return core_of(self.store).tiers.host.arena


@contextmanager
def groups(directory: Path, *sizes: int, ram: int = 256 << 20) -> Iterator[Groups]:
    """Register groups "0", "1" and so on of these sizes, on disk only."""
    values = {
        str(i): torch.randint(256, (nbytes,)).to(torch.uint8) for i, nbytes in enumerate(sizes)
    }
    path = directory / "groups.safetensors"
    save_file(values, path)
    with open_store(directory / "store", ram, ACCELERATOR) as store:
        assert sorted(store.register_checkpoint(path)) == list(values)
        yield Groups(store, values)


# Beside reading -----------------------------------------------------------------------------------


@pytest.mark.pretend_only("counts")
def test_page_locking_runs_beside_other_slots_and_reads(calls: Calls, tmp_path: Path) -> None:
    """The driver continues once it locks both slots and both groups were read completely."""
    locking, reads = threading.Barrier(2), Count()

    def first() -> None:
        locking.wait(PATIENCE)
        reads.wait_for(2)

    calls.first = first
    with groups(tmp_path, TWO_PIECES, TWO_PIECES) as found:
        with system_call("preadv", after=reads.add) as pieces:
            other = start_thread(lambda: found.read("0"))
            found.read("1")
            other.join()
        assert len(pieces) == 4
        assert len(set(calls.threads)) == 2
        assert all(name.startswith("tierstore-disk-") for name in calls.threads)


@pytest.mark.pretend_only("counts")
def test_slot_reused_is_not_locked_again(calls: Calls, tmp_path: Path) -> None:
    nbytes = 300 * PAGE
    with groups(tmp_path, *4 * [nbytes], ram=3 * nbytes) as found:
        for _ in range(3):
            found.read("0", "1", "2", "3")
        made = found.arena.allocations
        assert found.store.stats().bytes_read > 4 * nbytes
        assert len(calls.addresses) == len(set(calls.addresses)) == made <= 3
        found.store.put("other", torch.ones(100 * PAGE))  # the control: no free slot has this size
        assert len(calls.addresses) == found.arena.allocations == made + 1


@pytest.mark.pretend_only("counts")
def test_read_failure_waits_until_its_slot_is_locked(calls: Calls, tmp_path: Path) -> None:
    driver, failed, errors = Gate(), threading.Event(), []
    calls.first = driver.hold
    with groups(tmp_path, TWO_PIECES) as found:

        def read() -> None:
            with pytest.raises(TransferError) as error:
                found.read("0")
            errors.append(error.value)

        with system_call("preadv", fails_with=errno.EIO, before=failed.set):
            reader = start_thread(read)
            assert failed.wait(PATIENCE) and driver.reached.wait(PATIENCE)
            assert reader.is_alive()
            driver.open()
            reader.join()
        assert len(errors) == 1
        found.read("0")
        assert len(calls.addresses) == 1, "the memory of the failed read is locked"


@pytest.mark.pretend_only("counts")
def test_lock_refused_beside_a_read_leaves_bytes_pageable(
    calls: Calls, pretend: Any, tmp_path: Path
) -> None:
    reads = Count()
    calls.first = lambda: reads.wait_for(2)
    pretend.fail_registrations(1)
    with groups(tmp_path, TWO_PIECES) as found:
        with (
            system_call("preadv", after=reads.add),
            pytest.warns(RuntimeWarning, match="could not page-lock"),
        ):
            found.read("0")
        found.read("0")
        assert pretend.registered_bytes() == 0
        assert len(calls.addresses) == 1, "a driver that refused was called again"


@pytest.mark.pretend_only("counts")
def test_store_closed_while_locking_leaves_nothing_locked(
    calls: Calls, pretend: Any, tmp_path: Path
) -> None:
    driver = Gate()
    calls.first = driver.hold
    with groups(tmp_path, TWO_PIECES) as found:
        found.store.prefetch("0")
        assert driver.reached.wait(PATIENCE)
        closing = start_thread(found.store.close)
        driver.open()
        closing.join()
        assert len(calls.addresses) == 1
        assert pretend.registered_bytes() == 0


# Memory that is not locked yet ----------------------------------------------------------------


def provided(arena: Arena, nbytes: int) -> Slot:
    """A slot with memory, which is not locked yet."""
    slot = arena.take(nbytes)
    arena.provide(slot).fill_(7)
    assert arena.needs_lock(slot)
    return slot


@pytest.fixture
def driver() -> Driver:
    return Driver(limit=1 << 40)


@pytest.fixture
def arena(driver: Driver) -> Arena:
    return RegisteredArena(BUDGET, RegisteredMemory(driver, budget=BUDGET))


def test_memory_counts_before_it_is_locked(arena: Arena, driver: Driver) -> None:
    slot = provided(arena, BUDGET // 2)
    assert arena.bytes_there() == arena.peak_held == slot.nbytes
    assert not driver.locked


@pytest.mark.parametrize("kernel_knows_how", [True, False])
def test_page_locking_leaves_earlier_bytes(
    kernel_knows_how: bool, arena: Arena, driver: Driver
) -> None:
    slot = provided(arena, BUDGET // 2)
    with system_call(
        "madvise",
        fails_with=errno.EINVAL,
        when=lambda call: not kernel_knows_how and call.args[2] == MADV_POPULATE_WRITE,
    ):
        arena.lock(slot)
    assert slot.memory is not None
    assert driver.locked == {slot.memory.data_ptr(): BUDGET // 2}
    assert bool((slot.memory == 7).all())


def test_slot_released_unlocked_is_locked_by_its_next_user(arena: Arena, driver: Driver) -> None:
    first = provided(arena, BUDGET // 2)
    arena.release(first)
    assert not driver.locked
    again = arena.take(BUDGET // 2)
    assert again is first
    memory = arena.fill(again)
    arena.fill(again)
    assert driver.calls == ["register"]
    assert memory.data_ptr() in driver.locked


def test_interrupted_locking_is_undone_and_not_repeated(driver: Driver) -> None:
    """The driver may have locked the memory already, and would then refuse to lock it again."""
    arena = RegisteredArena(BUDGET, RegisteredMemory(driver, budget=BUDGET))
    slot, register = provided(arena, BUDGET // 2), driver.register

    def interrupted(address: int, nbytes: int, flags: int) -> int:
        register(address, nbytes, flags)
        raise KeyboardInterrupt

    driver.register = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        arena.lock(slot)
    arena.fill(slot)
    assert not arena.needs_lock(slot)
    assert driver.calls == ["register"]
    arena.release(slot, keep=False)
    arena.close()
    del slot
    gc.collect()
    assert driver.calls == ["register", "unregister"]


def test_slots_of_one_slab_lock_it_once(arena: Arena, driver: Driver) -> None:
    """The second caller waits for the first; the slab, and so both slots, is locked by then."""
    slots, gate = [provided(arena, PAGE) for _ in range(2)], Gate()
    assert slots[0].slab is slots[1].slab is not None
    register = driver.register

    def held(address: int, nbytes: int, flags: int) -> int:
        gate.hold()
        return register(address, nbytes, flags)

    driver.register = held  # type: ignore[method-assign]
    first = start_thread(lambda: arena.lock(slots[0]))
    assert gate.reached.wait(PATIENCE)
    assert arena.needs_lock(slots[1]), "the driver has not locked it yet"
    second = start_thread(lambda: arena.fill(slots[1]))
    assert second.is_alive()
    gate.open()
    first.join()
    second.join()
    assert driver.calls == ["register"]
    assert not any(map(arena.needs_lock, slots))


@pytest.mark.parametrize("locked_before", [True, False])
def test_slab_removed_before_it_is_locked_stays_pageable(
    locked_before: bool, arena: Arena, driver: Driver
) -> None:
    small = provided(arena, PAGE)
    assert small.slab is not None
    if locked_before:
        arena.lock(small)
    provided(arena, BUDGET - PAGE)  # needs the pages of the slab that no slot has
    assert small.slab.unlocked
    assert not arena.needs_lock(small)
    arena.lock(small)
    assert driver.calls == (["register", "unregister"] if locked_before else [])
    assert not driver.locked
    assert small.memory is not None and small.memory.sum() == 7 * PAGE
