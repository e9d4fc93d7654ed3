"""Host memory that CUDA page-locks: our own maps, registered with a driver that may refuse.

There is no such driver here: `Driver` stands for the two of its functions that are called.
"""

from __future__ import annotations

import contextlib
import errno
import os
import warnings
from array import array
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.system_calls import system_call
from tests.helpers.torch_calls import BeforeEach
from tierstore.model.sizes import PAGE
from tierstore.tiers.arena import Arena, host_arena
from tierstore.tiers.pinned import RegisteredMemory

pytestmark = pytest.mark.floor

NBYTES = 3 << 20
MADV_POPULATE_WRITE = 23


class Driver:
    """Locks pages, `limit` bytes of them at most."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
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
        return 0 if self.locked.pop(address, None) else 713

    def cudart(self) -> SimpleNamespace:
        return SimpleNamespace(cudaHostRegister=self.register, cudaHostUnregister=self.unregister)

    def check_error(self, result: int) -> None:
        if result:
            raise RuntimeError(f"error {result}")


@pytest.fixture
def driver() -> Driver:
    return Driver(limit=1 << 40)


def arena_of(driver: Driver, budget: int = 12 * PAGE) -> Arena:
    """As for a CUDA device that has this driver."""
    registered = RegisteredMemory(driver)
    return Arena(budget, registered.make, registered.unmake)


def test_memory_for_cuda_is_registered() -> None:
    arena = host_arena(12 * PAGE, torch.device("cuda", 0))
    assert isinstance(arena.make.__self__, RegisteredMemory)


def filled(arena: Arena, *sizes: int) -> list[torch.Tensor]:
    slots = [arena.take(nbytes) for nbytes in sizes]
    memory = [arena.fill(slot) for slot in slots]
    for slot in slots:
        arena.give(slot)
    return memory


def test_memory_is_locked_when_it_is_made_and_unlocked_before_it_goes(driver: Driver) -> None:
    arena = arena_of(driver)
    (memory,) = filled(arena, 4 * PAGE)
    assert driver.locked == {memory.data_ptr(): 4 * PAGE}
    assert not memory.any()
    arena.close()
    assert driver.calls == ["register", "unregister"]
    assert (arena.made, arena.unmade) == (1, 1)
    assert not driver.locked


def test_memory_that_cannot_be_locked_stays_pageable_and_one_warning_says_so(
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
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arena.close()
    assert driver.calls == ["register"] * 3 + ["unregister"], "what is not locked is not unlocked"


def resident(memory: torch.Tensor) -> int:
    """How many bytes of it have a page behind them."""
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        pagemap.seek(memory.data_ptr() // PAGE * 8)
        entries = array("Q", pagemap.read(memory.nbytes // PAGE * 8))
    return PAGE * sum(entry >> 63 for entry in entries)


@pytest.mark.parametrize("kernel_knows_how", [True, False])
def test_memory_is_populated_before_it_is_registered_and_zeroed_once(
    kernel_knows_how: bool, driver: Driver
) -> None:
    filled: list[None] = []
    refused = system_call(
        "madvise",
        fails_with=errno.EINVAL,
        when=lambda call: not kernel_knows_how and call.args[2] == MADV_POPULATE_WRITE,
    )
    with refused, BeforeEach("fill_", lambda: filled.append(None)):
        memory = RegisteredMemory(driver).make(NBYTES)
    assert len(filled) == (not kernel_knows_how)
    assert resident(memory) == NBYTES
    assert driver.locked == {memory.data_ptr(): NBYTES}
    assert not memory.any()


def in_a_fork(address: int) -> bool:
    """Whether a forked process has memory at an address."""
    child = os.fork()
    if not child:
        found = True
        with contextlib.suppress(BaseException), open("/proc/self/maps") as maps:
            spans = [line.split()[0].split("-") for line in maps]
            found = any(int(start, 16) <= address < int(end, 16) for start, end in spans)
        os._exit(found)
    return bool(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_forked_processes_have_no_copy_of_locked_memory(driver: Driver) -> None:
    """The kernel would make it at the fork, of every page."""
    driver.limit = 4 * PAGE
    arena = arena_of(driver)
    with pytest.warns(RuntimeWarning, match="page-lock"):
        locked, pageable = filled(arena, 4 * PAGE, 3 * PAGE)
    for page in range(4):
        assert not in_a_fork(locked.data_ptr() + page * PAGE)
    assert in_a_fork(pageable.data_ptr()), "the control"
    arena.close()
    assert in_a_fork(locked.data_ptr()), "it is ordinary memory again"


def test_memory_that_is_made_later_is_locked_again(driver: Driver) -> None:
    driver.limit = 4 * PAGE
    arena = arena_of(driver, 8 * PAGE)
    with pytest.warns(RuntimeWarning, match="page-lock"):
        filled(arena, 4 * PAGE, 3 * PAGE)
    (memory,) = filled(arena, 2 * PAGE)  # after one of the others had to go
    assert memory.data_ptr() in driver.locked
    arena.close()
    assert not driver.locked
