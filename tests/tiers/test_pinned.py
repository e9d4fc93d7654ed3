"""Host memory that CUDA page-locks: our own maps, registered with a driver that may refuse.

`Driver` stands in for the runtime's functions that are called. The pretend accelerator detects
memory that is unmapped while registered: every test that uses it fails then, and if any stays
registered.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import subprocess
import sys
import threading
import warnings
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.accelerator import ACCELERATOR, pretend
from tests.device import states
from tests.helpers.system_calls import system_call
from tests.helpers.threads import Gate
from tests.helpers.torch_calls import BeforeEach
from tierstore import TierStore
from tierstore.model.sizes import PAGE
from tierstore.model.tiers import Tier
from tierstore.store import engine_of
from tierstore.tiers import mover, pinned
from tierstore.tiers.arena import Arena, RegisteredArena, Slot, host_arena
from tierstore.tiers.pinned import RegisteredMemory
from tierstore.tiers.workers import URGENT

pytestmark = pytest.mark.floor

NBYTES = 3 << 20
MADV_POPULATE_WRITE = 23


class Driver:
    """Locks pages, `limit` bytes of them at most."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.refuses = False
        self.locked: dict[int, int] = {}
        self.calls: list[str] = []

    def register(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append("register")
        assert address % PAGE == 0 and nbytes % PAGE == 0 and flags == 0
        assert address not in self.locked
        if sum(self.locked.values()) + nbytes > self.limit:
            return 2
        self.locked[address] = nbytes
        return 0

    def unregister(self, address: int) -> int:
        self.calls.append("unregister")
        if self.refuses:
            return 900
        return 0 if self.locked.pop(address, None) else 713

    def forget(self) -> int:
        self.calls.append("forget")
        return 0

    def cudart(self) -> SimpleNamespace:
        return SimpleNamespace(
            cudaHostRegister=self.register,
            cudaHostUnregister=self.unregister,
            cudaGetLastError=self.forget,
        )

    def check_error(self, result: int) -> None:
        if result:
            raise RuntimeError(f"error {result}")


@pytest.fixture
def driver() -> Driver:
    return Driver(limit=1 << 40)


def arena_of(driver: Driver, budget: int = 12 * PAGE) -> Arena:
    """Return an arena as for a CUDA device with this driver."""
    return RegisteredArena(budget, RegisteredMemory(driver))


def test_memory_for_cuda_is_registered() -> None:
    assert isinstance(host_arena(12 * PAGE, torch.device("cuda", 0)), RegisteredArena)


def locked(memory: RegisteredMemory, nbytes: int) -> torch.Tensor:
    """Allocate memory and page-lock it."""
    made = memory.make(nbytes)
    memory.lock(made)
    return made


def filled(arena: Arena, *sizes: int) -> list[torch.Tensor]:
    slots = [arena.take(nbytes) for nbytes in sizes]
    memory = [arena.fill(slot) for slot in slots]
    for slot in slots:
        arena.release(slot)
    return memory


def test_memory_is_locked_from_creation_to_release(driver: Driver) -> None:
    arena = arena_of(driver)
    slot = arena.take(4 * PAGE)
    memory = arena.fill(slot)
    address = memory.data_ptr()
    assert driver.locked == {address: 4 * PAGE}
    assert not memory.any()
    arena.release(slot)
    arena.close()
    assert driver.locked == {address: 4 * PAGE}, "a view of it still exists"
    del memory
    assert driver.calls == ["register", "unregister"]
    assert (arena.allocations, arena.frees) == (1, 1)
    assert not driver.locked


def test_memory_that_cannot_be_locked_stays_pageable_and_warns(
    driver: Driver,
) -> None:
    driver.limit = 4 * PAGE
    arena = arena_of(driver)
    with pytest.warns(RuntimeWarning, match=r"12,288 bytes.*error 2.*ram_budget") as warned:
        first, second, third = filled(arena, 4 * PAGE, 3 * PAGE, 2 * PAGE)
    assert len(warned) == 1
    assert driver.locked == {first.data_ptr(): 4 * PAGE}
    assert second.fill_(7).sum() == 7 * 3 * PAGE
    assert third.numel() == 2 * PAGE
    assert driver.calls == ["register", *["register", "forget"] * 2], "an error is left"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arena.close()
        del first, second, third
    assert driver.calls[5:] == ["unregister"], "unlocked memory was unregistered"


def test_memory_a_driver_does_not_release_stays_mapped(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    """Unregistering is retried whenever memory is allocated or dropped."""
    memory = RegisteredMemory(driver)
    made = locked(memory, 4 * PAGE)
    address, driver.refuses = made.data_ptr(), True
    del made
    assert "stay page-locked" in caplog.text
    assert driver.calls[-2:] == ["unregister", "forget"]
    assert driver.locked == {address: 4 * PAGE}
    assert is_mapped(address)
    driver.refuses = False
    memory.close()
    assert not driver.locked
    assert not is_mapped(address)


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as maps:
        spans = [line.split()[0].split("-") for line in maps]
    return any(int(start, 16) <= address < int(end, 16) for start, end in spans)


def resident(memory: torch.Tensor) -> int:
    """Return how many of its bytes have a page."""
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        pagemap.seek(memory.data_ptr() // PAGE * 8)
        entries = array("Q", pagemap.read(memory.nbytes // PAGE * 8))
    return PAGE * sum(entry >> 63 for entry in entries)


@pytest.mark.parametrize("kernel_knows_how", [True, False])
def test_memory_is_populated_before_registration_zeroed_once(
    kernel_knows_how: bool, driver: Driver
) -> None:
    """Only the kernel may zero it: a read into it may be running."""
    filled: list[None] = []
    refused = system_call(
        "madvise",
        fails_with=errno.EINVAL,
        when=lambda call: not kernel_knows_how and call.args[2] == MADV_POPULATE_WRITE,
    )
    with refused, BeforeEach("fill_", lambda: filled.append(None)):
        memory = locked(RegisteredMemory(driver), NBYTES)
    assert not filled
    assert resident(memory) == (NBYTES if kernel_knows_how else 0)
    assert driver.locked == {memory.data_ptr(): NBYTES}
    assert not memory.any()


def in_a_fork(address: int) -> bool:
    """Return whether a forked process has memory at an address."""
    child = os.fork()
    if not child:
        found = True
        with contextlib.suppress(BaseException):
            found = is_mapped(address)
        os._exit(found)
    return bool(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_forked_process_has_no_copy_of_locked_memory(driver: Driver) -> None:
    """The kernel would copy every locked page at the fork."""
    driver.limit = 4 * PAGE
    arena = arena_of(driver)
    with pytest.warns(RuntimeWarning, match="page-lock"):
        locked, pageable = filled(arena, 4 * PAGE, 3 * PAGE)
    for page in range(4):
        assert not in_a_fork(locked.data_ptr() + page * PAGE)
    assert in_a_fork(pageable.data_ptr()), "the control"


def test_memory_allocated_later_is_locked_again(driver: Driver) -> None:
    driver.limit = 4 * PAGE
    arena = arena_of(driver, 8 * PAGE)
    with pytest.warns(RuntimeWarning, match="page-lock"):
        filled(arena, 4 * PAGE, 3 * PAGE)
    (memory,) = filled(arena, 2 * PAGE)  # after one of the others was freed
    assert memory.data_ptr() in driver.locked
    arena.close()
    del memory
    assert not driver.locked


# Each way on which page-locked memory goes --------------------------------------------------------
#
# In each, the pretend accelerator has registered memory, and work that uses it. The test passes
# only if everything is unregistered before it is unmapped, and nothing is left.


def used_slot(arena: Arena) -> tuple[Slot, torch.Tensor]:
    """Return a slot that a queued copy reads, and the target of that copy."""
    slot = arena.take(4 * PAGE)
    memory = arena.fill(slot)
    assert memory.is_pinned()
    target = memory.fill_(7).to(ACCELERATOR, non_blocking=True)
    slot.pending.append(torch.accelerator.current_stream().record_event())
    return slot, target


def dropped_arena() -> list[torch.Tensor]:
    arena = host_arena(None, torch.device(ACCELERATOR))
    kept = [used_slot(arena) for _ in range(3)]
    arena.release(kept[0][0])
    arena.release(kept[1][0], keep=False)
    return [target for _, target in kept]


def closed_arena() -> list[torch.Tensor]:
    arena = host_arena(None, torch.device(ACCELERATOR))
    slot, target = used_slot(arena)
    arena.release(slot)
    arena.close()
    return [target]


def arena_closed_before_its_slot_is_given_back() -> list[torch.Tensor]:
    arena = host_arena(None, torch.device(ACCELERATOR))
    slot, target = used_slot(arena)
    arena.close()
    assert pretend.registered_bytes() == 4 * PAGE
    assert slot.memory is not None
    return [target]


def arena_in_a_cycle() -> list[torch.Tensor]:
    arena = host_arena(None, torch.device(ACCELERATOR))
    slot, target = used_slot(arena)
    slot.views = {"all": slot.memory}
    slot.views["itself"] = slot
    del arena, slot
    gc.collect()
    return [target]


def view_that_another_thread_drops() -> list[torch.Tensor]:
    arena = host_arena(None, torch.device(ACCELERATOR))
    slot, target = used_slot(arena)
    views = [arena.fill(slot)[PAGE:]]
    del arena, slot
    assert pretend.registered_bytes() == 4 * PAGE, "the view still exists"
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    return [target]


WAYS = (
    dropped_arena,
    closed_arena,
    arena_closed_before_its_slot_is_given_back,
    arena_in_a_cycle,
    view_that_another_thread_drops,
)


@pytest.mark.pretend_only("counts")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_registered_memory_is_released_in_order(
    way: Callable[[], list[torch.Tensor]], late_pretend: Any
) -> None:
    late_pretend.reset_counters()
    targets = way()
    assert late_pretend.registrations() == len(targets)
    assert late_pretend.registered_bytes() == 0
    assert late_pretend.unregistered_in_use() == 0, "memory in use was unregistered"
    assert all(torch.equal(t.cpu(), torch.full_like(t, 7, device="cpu")) for t in targets)


@pytest.mark.pretend_only("counts")
def test_registered_memory_of_a_hung_store_is_released(
    late_pretend: Any, monkeypatch: pytest.MonkeyPatch, disk_dir: Path
) -> None:
    """Closing abandons the thread, and with it the arena, which is dropped later."""
    monkeypatch.setattr(mover, "PATIENCE", 0.1)
    store = TierStore(1 << 20, disk_dir, device=ACCELERATOR, device_budget=1 << 20)
    store.put("key", torch.ones(PAGE, dtype=torch.uint8))
    with store.acquire("key"):
        assert late_pretend.registered_bytes() == PAGE
    engine, gate = engine_of(store), Gate()
    workers = engine.core.mover.hops[Tier.DISK, Tier.HOST].workers
    workers.submit(URGENT, gate.hold)
    assert gate.reached.wait(30)
    store.close()
    assert late_pretend.registered_bytes() == PAGE, "the thread may still use the memory"
    del store, engine
    gc.collect()
    assert late_pretend.registered_bytes() == 0
    gate.open()
    assert workers.stop()


@pytest.mark.pretend_only("counts")
def test_registered_memory_never_used_is_released(
    late_pretend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception during its creation, and an interrupt right after its registration."""
    late_pretend.reset_counters()
    memory = RegisteredMemory(late_pretend)
    registered = late_pretend.cudart().cudaHostRegister

    def interrupted(*arguments: int) -> int:
        registered(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(pretend.Runtime, "cudaHostRegister", staticmethod(interrupted))
    with pytest.raises(KeyboardInterrupt):
        locked(memory, 4 * PAGE)
    monkeypatch.undo()
    monkeypatch.setattr(pinned, "populate", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        locked(memory, 4 * PAGE)
    monkeypatch.undo()
    assert late_pretend.registered_bytes() == 0
    assert late_pretend.registrations() == 1


@pytest.mark.pretend_only("counts")
@pytest.mark.parametrize("step", ["is_dropped", "release", "unregister"])
def test_registered_memory_interrupted_release_is_retried(
    step: str, late_pretend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = RegisteredMemory(late_pretend)
    made = locked(memory, 4 * PAGE)
    where = RegisteredMemory if step == "unregister" else pinned.Registration
    done = getattr(where, step)

    def interrupted(*arguments: Any) -> Any:
        if step == "unregister":  # it is unregistered, and not yet recorded
            done(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(where, step, interrupted)
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    del made
    monkeypatch.undo()
    assert late_pretend.registered_bytes() == (0 if step == "unregister" else 4 * PAGE)
    memory.make(PAGE)
    assert late_pretend.registered_bytes() == 0


@pytest.mark.pretend_only("counts")
def test_registered_memory_dropped_in_a_capture_goes_after_it(pretend: Any) -> None:
    """Neither waiting nor unregistering is allowed meanwhile: the graph would be lost."""
    memory = RegisteredMemory(pretend)
    made = locked(memory, 4 * PAGE)
    with states.captured():
        del made
        assert pretend.registered_bytes() == 4 * PAGE
    memory.close()
    assert pretend.registered_bytes() == 0


@pytest.mark.pretend_only("counts")
def test_registration_refused_leaves_no_error_to_a_launch(pretend: Any) -> None:
    memory = RegisteredMemory(pretend)
    pretend.fail_registrations(2)
    with pytest.warns(RuntimeWarning, match="page-lock"):
        made = locked(memory, PAGE)
    assert not made.is_pinned()
    assert torch.ones(1, device=ACCELERATOR).item() == 1
    with pytest.raises(RuntimeError, match="out of memory"):  # the control
        pretend.register_host(made.data_ptr(), made.nbytes)
    with pytest.raises(RuntimeError, match="launched after error 2"):
        torch.ones(1, device=ACCELERATOR)


@pytest.mark.pretend_only("counts")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_fork_dropping_registered_memory_does_nothing(pretend: Any) -> None:
    memory = [locked(RegisteredMemory(pretend), 4 * PAGE)]
    before = pretend.registrations()
    child = os.fork()
    if not child:
        memory.clear()
        still = pretend.registered_bytes() == 4 * PAGE  # as the driver counts in the fork
        os._exit(0 if still else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert memory[0].is_pinned()
    assert pretend.registrations() == before


EXIT = """
import torch
from tests.device import pretend
from tierstore.tiers.arena import host_arena
pretend.load()
pretend.set_slowness(None)
arena = host_arena(None, torch.device("pretend"))
slots = [arena.take(8192) for _ in range(3)]
memory = [arena.fill(slot) for slot in slots]
copies = [each.to("pretend", non_blocking=True) for each in memory]
arena.release(slots[0])
arena.cycle = [arena]
{more}
"""


def ending(more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", EXIT.format(more=more)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.full("processes that import torch and end")
@pytest.mark.pretend_only("counts")
def test_registered_memory_at_exit_stays_mapped(pretend: Any) -> None:
    done = ending("")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.full("the control of the test above")
@pytest.mark.pretend_only("counts")
def test_memory_unmapped_at_exit_is_noticed(pretend: Any) -> None:
    """The control for the test above: a map that is freed with the modules."""
    done = ending(
        "from tierstore.tiers.pages import fresh_memory\n"
        "mine = fresh_memory(8192)\n"
        "pretend.register_host(mine.data_ptr(), 8192)"
    )
    assert "munmap of 8192 bytes" in done.stderr
