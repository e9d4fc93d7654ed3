"""Memory of one tier: neither accounted nor real memory exceeds the budget."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.accelerator import ACCELERATOR, DEVICE_0, pretend
from tierstore.model.sizes import PAGE
from tierstore.tiers.arena import Arena, Slot, device_arena, host_arena
from tierstore.tiers.pages import fresh_memory

pytestmark = pytest.mark.floor

BUDGET = 12 * PAGE


class Memory:
    """Allocates and frees memory, and counts how much exists."""

    def __init__(self) -> None:
        self.exists = 0
        self.peak = 0
        self.made = 0
        self._lock = threading.Lock()

    def make(self, nbytes: int) -> torch.Tensor:
        with self._lock:
            self.exists += nbytes
            self.peak = max(self.peak, self.exists)
            self.made += 1
        return torch.zeros(nbytes, dtype=torch.uint8)

    def free(self, memory: torch.Tensor) -> None:
        with self._lock:
            self.exists -= memory.numel()


class Work:
    """Device work that uses a slot's memory until a thread waits for it."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self.over = False
        self._then = then

    def synchronize(self) -> None:
        self._then()
        self.over = True

    def query(self) -> bool:
        return self.over


class ArenaMachine(RuleBasedStateMachine):
    """A planner that keeps the budget, and slots that are filled in any order, or never."""

    kind: type[Arena] = Arena

    @initialize()
    def start(self) -> None:
        self.memory = Memory()
        self.arena = self.kind(BUDGET, self.memory.make, self.memory.free)
        self.taken: list[Slot] = []
        self.work: list[tuple[torch.Tensor, Work]] = []
        self.peak = 0

    @rule(npages=st.integers(1, 5))
    def take(self, npages: int) -> None:
        if sum(slot.nbytes for slot in self.taken) + npages * PAGE > BUDGET:
            return
        slot = self.arena.take(npages * PAGE)
        assert slot.nbytes == npages * PAGE
        assert all(slot is not other for other in self.taken), "one slot was taken for two groups"
        self.taken.append(slot)

    @precondition(lambda self: self.taken)
    @rule(index=st.integers(0, 99))
    def fill(self, index: int) -> None:
        slot = self.taken[index % len(self.taken)]
        memory = self.arena.fill(slot)
        assert memory is slot.memory
        assert memory.numel() == slot.nbytes
        assert self.arena.fill(slot) is memory

    @precondition(lambda self: self.taken)
    @rule(index=st.integers(0, 99), used=st.booleans())
    def give(self, index: int, used: bool) -> None:
        slot = self.taken.pop(index % len(self.taken))
        if used and slot.memory is not None:
            work = Work()
            slot.pending.append(work)
            self.work.append((slot.memory, work))
        self.arena.release(slot)

    @rule()
    def close(self) -> None:
        self.arena.close()
        live = sum(slot.nbytes for slot in self.taken if slot.memory is not None)
        assert self.memory.exists == live

    @invariant()
    def allocated_is_within_budget(self) -> None:
        if not hasattr(self, "arena"):
            return
        self.peak = max(self.peak, self.memory.exists)
        assert self.memory.exists == self.arena.bytes_held
        assert self.memory.peak == self.arena.peak_held <= BUDGET

    @invariant()
    def memory_goes_only_when_its_work_is_over(self) -> None:
        if not hasattr(self, "arena"):
            return
        kept = [slot.memory for slot in [*self.taken, *self.arena.unused_slots()]]
        for memory, work in self.work:
            assert work.over or any(memory is other for other in kept)


ARENAS = settings(max_examples=100, stateful_step_count=40)
UNSHRUNK = settings(ARENAS, max_examples=2000, phases=[Phase.generate], report_multiple_bugs=False)


def test_arena_in_any_order_of_calls_stays_within_budget() -> None:
    run_state_machine_as_test(ArenaMachine, settings=ARENAS)


class KeepsIdleSlots(Arena):
    def _retire_until_it_fits(self) -> None:
        pass


class ForgetsToWait(Arena):
    def _free_retired(self) -> None:
        for slot in self._retired:
            slot.pending.clear()
        super()._free_retired()


class UnmakesAfterwards(Arena):
    def fill(self, slot: Slot) -> torch.Tensor:
        if slot.memory is None:
            slot.memory = self.make(slot.nbytes)
            self.bytes_held += slot.nbytes
            self._free_retired()
            self.peak_held = max(self.peak_held, self.bytes_held)
        return slot.memory


@pytest.mark.parametrize("fault", [KeepsIdleSlots, ForgetsToWait, UnmakesAfterwards])
def test_state_machine_notices_a_seeded_fault(fault: type[Arena]) -> None:
    """The control."""

    class Faulty(ArenaMachine):
        kind = fault

    with pytest.raises(AssertionError):
        run_state_machine_as_test(Faulty, settings=UNSHRUNK)


def test_slot_is_reused_by_a_group_of_its_size() -> None:
    memory = Memory()
    arena = Arena(BUDGET, memory.make, memory.free)
    first = arena.take(4 * PAGE)
    arena.fill(first)
    arena.release(first)
    assert arena.take(4 * PAGE) is first
    assert memory.made == 1
    arena.release(first)
    other = arena.take(10 * PAGE)
    assert memory.exists == 4 * PAGE, "memory was freed too early"
    arena.fill(other)
    assert memory.exists == memory.peak == 10 * PAGE


def test_slots_of_a_size_are_reused_first_in_first_out() -> None:
    """Its device work is the oldest, so its next user waits least."""
    arena = Arena(BUDGET, Memory().make)
    slots = [arena.take(2 * PAGE) for _ in range(3)]
    for slot in slots:
        arena.fill(slot)
        slot.pending.append(Work())
        arena.release(slot)
    assert [arena.take(2 * PAGE) for _ in slots] == slots


def test_arena_without_a_budget_retires_nothing() -> None:
    memory = Memory()
    arena = Arena(None, memory.make, memory.free)
    for npages in range(1, 20):
        slot = arena.take(npages * PAGE)
        arena.fill(slot)
        arena.release(slot)
    assert memory.made == 19
    assert memory.exists == arena.bytes_held == 190 * PAGE
    arena.close()
    assert memory.exists == arena.bytes_held == 0


def test_allocation_failure_counts_no_bytes() -> None:
    def fail(nbytes: int) -> torch.Tensor:
        raise MemoryError

    arena = Arena(BUDGET, fail)
    for _ in range(3):
        slot = arena.take(BUDGET)
        with pytest.raises(MemoryError):
            arena.fill(slot)
        arena.release(slot)
    assert arena.bytes_held == arena.peak_held == 0


def test_slot_released_unfilled_never_gets_memory() -> None:
    """Its caller was interrupted: the memory would not be counted anywhere."""
    memory = Memory()
    arena = Arena(BUDGET, memory.make, memory.free)
    slot = arena.take(BUDGET)
    arena.release(slot)
    with pytest.raises(RuntimeError, match="was released"):
        arena.fill(slot)
    assert memory.made == 0
    arena.fill(arena.take(BUDGET))
    assert memory.peak == arena.peak_held == BUDGET


def test_slot_released_while_filling_is_freed_before_the_next() -> None:
    memory = Memory()
    first: list[Slot] = []

    def make(nbytes: int) -> torch.Tensor:
        if not memory.made:
            arena.release(first[0])
        return memory.make(nbytes)

    arena = Arena(BUDGET, make, memory.free)
    first.append(arena.take(BUDGET))
    arena.fill(first[0])
    arena.fill(arena.take(BUDGET))
    assert memory.made == 2
    assert memory.peak == memory.exists == arena.peak_held == BUDGET


def test_concurrent_fills_stay_within_budget() -> None:
    """Each thread takes and releases slots under a lock, like a store, and fills outside it."""
    memory = Memory()
    arena = Arena(BUDGET, memory.make, memory.free)
    lock, used, wrong = threading.Lock(), [0], []

    def body(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(300):
            nbytes = rng.randint(1, 4) * PAGE
            with lock:
                if used[0] + nbytes > BUDGET:
                    continue
                used[0] += nbytes
                slot = arena.take(nbytes)
            mine = arena.fill(slot)
            mine.fill_(seed)
            if rng.random() < 0.3:
                slot.pending.append(Work())
            if not bool((mine == seed).all()):
                wrong.append(seed)
            with lock:
                used[0] -= nbytes
                arena.release(slot)

    threads = [threading.Thread(target=body, args=(seed,)) for seed in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, "two groups shared memory"
    assert 0 < memory.peak == arena.peak_held <= BUDGET
    arena.close()
    assert memory.exists == arena.bytes_held == 0


def test_slot_wait_includes_work_added_meanwhile() -> None:
    slot = Slot(PAGE)
    late = Work()
    slot.pending.append(Work(then=lambda: slot.pending.append(late)))
    slot.wait()
    assert late.over
    assert slot.pending == []


@pytest.mark.parametrize("npages", [1, 3, 600])
def test_fresh_memory_is_whole_pages(npages: int) -> None:
    memory = fresh_memory(npages * PAGE)
    assert (memory.dtype, memory.shape) == (torch.uint8, (npages * PAGE,))
    assert memory.data_ptr() % PAGE == 0
    assert not memory.any()
    view = Slot(npages * PAGE, memory).bytes()
    view[-1] = 7
    assert memory[-1] == 7


@pytest.mark.pretend_only("counts")
def test_accelerator_host_memory_is_page_locked_to_the_byte() -> None:
    gc.collect()
    before = pretend.pinned_bytes()
    arena = host_arena(BUDGET, torch.device(ACCELERATOR))
    slots = [arena.take(npages * PAGE) for npages in (1, 4, 5)]
    assert pretend.pinned_bytes() == before
    for slot in slots:
        assert arena.fill(slot).is_pinned()
        assert arena.fill(slot).data_ptr() % PAGE == 0
    assert pretend.pinned_bytes() - before == arena.bytes_held == 10 * PAGE
    for slot in slots:
        arena.release(slot)
    arena.close()
    assert pretend.pinned_bytes() == before


@pytest.mark.pretend_only("bytes")
def test_device_memory_is_counted_to_the_byte() -> None:
    gc.collect()
    device = torch.device(DEVICE_0)
    before = pretend.memory_allocated()
    arena = device_arena(BUDGET, device, torch.Stream(device))
    slot = arena.take(7 * PAGE)
    assert arena.fill(slot).device == device
    assert pretend.memory_allocated() - before == arena.bytes_held == 7 * PAGE
    arena.release(slot)
    arena.close()
    assert pretend.memory_allocated() == before


# Recounting --------------------------------------------------------------------------------------


def test_interrupted_bookkeeping_recovers_all_space() -> None:
    memory = Memory()
    arena = Arena(BUDGET, memory.make, memory.free)
    used, lost, idle = (arena.take(4 * PAGE) for _ in range(3))
    for slot in (used, lost, idle):
        arena.fill(slot)
    arena.release(idle)
    arena.recount([used])
    assert arena.bytes_held == 8 * PAGE
    whole = arena.take(8 * PAGE)  # idle and lost slots were freed for it
    arena.fill(whole)
    assert idle.memory is None
    assert arena.bytes_held == BUDGET
