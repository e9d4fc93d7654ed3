"""Small slots share memory maps and registrations: a process has only few of them."""

from __future__ import annotations

import mmap
import random
import threading
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.accelerator import ACCELERATOR, pretend
from tests.helpers.engine import core_of
from tests.lanes import by_lane
from tests.store.helpers import on_both, open_store
from tests.tiers.test_pinned import Driver
from tierstore import TierStore
from tierstore.errors import BudgetError
from tierstore.model.sizes import PAGE
from tierstore.system import mapping
from tierstore.system.mapping import MapLimit, TooManyMapsError
from tierstore.tiers import pages as pages_module
from tierstore.tiers.arena import RegisteredArena, Slot
from tierstore.tiers.free_runs import FreeRuns
from tierstore.tiers.pages import HUGE_PAGE, RecycledPages
from tierstore.tiers.pinned import RegisteredMemory

MIB = 1 << 20


def maps() -> int:
    with open("/proc/self/maps") as lines:
        return sum(1 for _ in lines)


def resident_pages(memory: torch.Tensor) -> int:
    """Return how many of its pages have memory."""
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        pagemap.seek(memory.data_ptr() // PAGE * 8)
        return sum(entry >> 63 for entry in array("Q", pagemap.read(memory.nbytes // PAGE * 8)))


# Free runs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(by_lane(3, 20, 200)))
def test_free_runs_match_a_bitmap(seed: int) -> None:
    rng, size = random.Random(seed), 200
    runs, taken = FreeRuns(size), np.zeros(size, dtype=bool)
    live: list[tuple[int, int]] = []
    for _ in range(400):
        if live and rng.random() < 0.5:
            offset, nbytes = live.pop(rng.randrange(len(live)))
            runs.release(offset, nbytes)
            taken[offset : offset + nbytes] = False
        else:
            nbytes = rng.choice((1, 2, 7, 40))
            first = next(
                (i for i in range(size - nbytes + 1) if not taken[i : i + nbytes].any()), None
            )
            assert runs.take(nbytes) == first
            if first is not None:
                taken[first : first + nbytes] = True
                live.append((first, nbytes))
        assert runs.nbytes == size - np.count_nonzero(taken)
        assert [i for offset, n in runs for i in range(offset, offset + n)] == list(
            np.flatnonzero(~taken)
        )


def test_free_runs_end_with_the_range() -> None:
    runs = FreeRuns(10)
    assert runs.take(10) == 0
    runs.release(2, 3)
    assert runs.cut(10) == 10, "the free run is not at the end"
    runs.release(7, 3)
    assert (runs.cut(10), list(runs), runs.nbytes) == (7, [(2, 3)], 3)


# Ordinary memory ----------------------------------------------------------------------------------


def test_small_slots_share_memory_maps() -> None:
    pages, before = RecycledPages(None), maps()
    slots = [pages.allocate(PAGE).fill_(i % 251) for i in range(3000)]
    assert maps() - before < 20
    assert all(bool((slot == i % 251).all()) for i, slot in enumerate(slots))


def test_different_memory_kinds_have_separate_maps() -> None:
    """The control: maps are counted. (The system joins neighbours that are alike.)"""
    before = maps()
    each = [mmap.mmap(-1, PAGE, prot=mmap.PROT_READ << i % 2) for i in range(100)]
    assert maps() - before >= 100
    for mapped in each:
        mapped.close()


@pytest.mark.parametrize("seed", range(by_lane(2, 10, 100)))
def test_slabs_hold_the_bytes_they_count(seed: int) -> None:
    """The bytes held are those of slots and of spare pages, never above the budget."""
    rng, budget = random.Random(seed), 8 * MIB
    pages = RecycledPages(budget)
    live: list[torch.Tensor] = []
    for _ in range(300):
        nbytes = rng.choice((PAGE, 3 * PAGE, 100 * PAGE, HUGE_PAGE - PAGE, HUGE_PAGE + PAGE))
        while sum(slot.nbytes for slot in live) + nbytes > budget:
            live.pop(rng.randrange(len(live)))
        live.append(pages.allocate(nbytes).fill_(1))
        used = sum(slot.nbytes for slot in live)
        assert pages.held == used + pages.waiting <= budget


def test_spare_slab_pages_yield_to_a_large_slot() -> None:
    pages = RecycledPages(8 * MIB)
    slots = [pages.allocate(PAGE).fill_(1) for _ in range(2048)]
    address = slots[0].data_ptr()
    kept = slots[1024]
    del slots[:]
    large = pages.allocate(6 * MIB).fill_(2)
    assert pages.held == 8 * MIB
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        pagemap.seek(address // PAGE * 8)
        there = sum(entry >> 63 for entry in array("Q", pagemap.read(2048 * 8)))
    assert there == 2 * MIB // PAGE, "4 MiB and a page, less the pages that the large slot needed"
    assert bool((kept == 1).all())
    assert bool((large == 2).all())


def test_slab_after_close_goes_with_its_last_slot() -> None:
    pages = RecycledPages(8 * MIB)
    first, second = (pages.allocate(PAGE).fill_(mark) for mark in (1, 2))
    address = first.data_ptr()
    pages.close()
    del first
    assert second.sum() == 2 * PAGE
    assert is_mapped(address), "the other slot is in the same slab"
    del second
    assert not is_mapped(address)


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as lines:
        spans = [line.split()[0].split("-") for line in lines]
    return any(int(start, 16) <= address < int(end, 16) for start, end in spans)


# The limit of maps --------------------------------------------------------------------------------


def test_map_limit_leaves_a_quarter_to_others() -> None:
    limit = MapLimit(4 * (maps() + 100) // 3)
    limit.count(50)
    with pytest.raises(TooManyMapsError, match=r"memory maps.*vm\.max_map_count"):
        limit.count(200)
    limit.count(50)


def test_put_near_the_limit_of_maps_raises_budget_error(
    disk_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TierStore(64 * MIB, disk_dir, device="cpu") as store:
        store.put("before", torch.ones(MIB))
        monkeypatch.setattr(pages_module, "map_limit", MapLimit(maps()))
        with pytest.raises(BudgetError, match=r"'large'.*memory maps.*fewer, larger groups"):
            store.put("large", torch.ones(3 * MIB))
        assert "large" not in store
        assert torch.equal(store.get("before"), torch.ones(MIB))
        monkeypatch.setattr(pages_module, "map_limit", mapping.map_limit)
        store.put("large", torch.ones(3 * MIB))


@pytest.mark.pretend_only("counts")
@on_both
def test_store_of_many_small_groups_has_few_maps(device: str, disk_dir: Path) -> None:
    count = by_lane(600, 3000, 5000)
    with open_store(disk_dir, 64 * MIB, device) as store:
        before = maps()
        registered = pretend.registrations() if device != "cpu" else 0
        for i in range(count):
            store.put(f"k{i}", torch.full((25,), float(i)), durable=False)
        assert maps() - before < 150
        if device != "cpu":
            assert pretend.registrations() - registered <= count * PAGE // MIB + 1
        for i in range(0, count, 97):
            assert torch.equal(store.get(f"k{i}").cpu(), torch.full((25,), float(i)))


@pytest.mark.full("80,000 groups take half a minute")
def test_store_of_more_groups_than_maps_stays_usable(disk_dir: Path) -> None:
    with TierStore("600MB", disk_dir, device="cpu") as store:
        for i in range(80_000):
            store.put(f"k{i}", torch.full((4,), float(i)), durable=i % 1000 == 0)
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()
        assert torch.ones(16 << 20).sum() == 16 << 20
        store.flush()
        for i in range(0, 80_000, 1999):
            assert torch.equal(store.get(f"k{i}"), torch.full((4,), float(i)))


# Page-locked memory -------------------------------------------------------------------------------

BUDGET = 4 * MIB  # slabs of 64 KiB, and slots of up to 8 KiB in them


@pytest.fixture
def driver() -> Driver:
    return Driver(limit=1 << 40)


@pytest.fixture
def locked(driver: Driver) -> RegisteredMemory:
    return RegisteredMemory(driver, budget=BUDGET)


@pytest.fixture
def arena(locked: RegisteredMemory) -> RegisteredArena:
    return RegisteredArena(BUDGET, locked)


def filled(arena: RegisteredArena, nbytes: int, mark: int) -> Slot:
    slot = arena.take(nbytes)
    arena.fill(slot).fill_(mark)
    return slot


def test_small_page_locked_slots_share_registrations(
    arena: RegisteredArena, driver: Driver
) -> None:
    slots = [filled(arena, PAGE, i % 251) for i in range(BUDGET // PAGE)]
    assert driver.calls == ["register"] * 64
    assert sum(driver.locked.values()) == BUDGET == arena.peak_held
    assert all(
        bool((s.memory == i % 251).all()) for i, s in enumerate(slots) if s.memory is not None
    )
    for slot in slots:
        arena.release(slot)
    arena.close()
    del slots, slot
    assert not driver.locked


def test_large_page_locked_slots_are_registered_separately(
    arena: RegisteredArena, driver: Driver
) -> None:
    """The control."""
    slots = [filled(arena, 3 * PAGE, 1) for _ in range(10)]
    assert list(driver.locked.values()) == [3 * PAGE] * 10
    assert all(slot.slab is None for slot in slots)


def sparse(arena: RegisteredArena) -> list[Slot]:
    """Make one small slot in each of 64 slabs, which use all of the budget."""
    slots = [filled(arena, PAGE, i % 251) for i in range(BUDGET // PAGE)]
    for i, slot in enumerate(slots):
        if i % 16:
            arena.release(slot, keep=False)
    return slots[::16]


def test_spare_locked_pages_yield_to_a_large_slot(
    arena: RegisteredArena, locked: RegisteredMemory, driver: Driver
) -> None:
    kept = sparse(arena)
    large = filled(arena, 2 * MIB, 7)
    assert sum(driver.locked.values()) <= BUDGET
    assert locked.used() <= BUDGET
    assert arena.peak_held <= BUDGET
    unlocked = [slot for slot in kept if slot.slab is not None and slot.slab.unlocked]
    assert 30 <= len(unlocked) < 64, "more slabs were unlocked than needed"
    for slot in unlocked:
        assert slot.slab is not None and slot.memory is not None
        slab_memory = torch.frombuffer(slot.slab.buffer, dtype=torch.uint8)
        assert resident_pages(slab_memory) == 1, "the rest did not return to the system"
        del slab_memory
    for i, slot in enumerate(kept):
        assert slot.memory is not None
        assert bool((slot.memory == i * 16 % 251).all())
    for slot in [*kept, large]:
        arena.release(slot, keep=True)
    assert sum(slot.nbytes for slot in arena.unused_slots()) == 2 * MIB + 64 * PAGE
    arena.close()
    del kept, large, slot, unlocked
    assert not driver.locked
    assert locked.used() == 0


@pytest.mark.filterwarnings("ignore:CUDA could not page-lock")
def test_spare_pageable_pages_yield_to_a_large_slot(
    arena: RegisteredArena, locked: RegisteredMemory, driver: Driver
) -> None:
    driver.limit = 0
    kept = sparse(arena)
    assert locked.used() == BUDGET
    large = filled(arena, 2 * MIB, 7)
    assert large.slab is None
    assert arena.peak_held == BUDGET
    assert locked.used() <= BUDGET
    assert not driver.locked
    assert all(slot.memory is not None for slot in kept)


def test_slab_with_a_live_view_stays_locked(
    arena: RegisteredArena, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    kept = sparse(arena)
    for slot in kept:
        slot.exposed = True
    filled(arena, MIB, 7)
    assert not any(slot.slab is None or slot.slab.unlocked for slot in kept)
    assert "above the budget" in caplog.text


@pytest.mark.pretend_only("limits")
@pytest.mark.parametrize("kept", [True, False])
def test_slab_with_a_view_that_outlived_its_group_stays_locked(kept: bool, disk_dir: Path) -> None:
    """Fill two slabs, and hold a view.

    One slab has sixteen groups, another four; a large group has all but 896 KiB. Without a view,
    a group of 936 KiB gets the spare pages of the second slab.
    """
    with TierStore(4 * MIB, disk_dir, device=ACCELERATOR, device_budget=4 * MIB) as store:
        for i in range(20):
            store.put(f"k{i}", torch.full((100,), float(i)))
        store.put("first", torch.zeros(3 * MIB // 4))
        tier = core_of(store).tiers.host
        entry = next(e for e in core_of(store).mover.entries() if e.group.key == "k19")
        slot = entry.slots[tier.tier]
        assert slot.slab is not None and not slot.may_have_views()
        view = next(iter(tier.view(entry).values()))[10:20]
        assert slot.may_have_views()
        if not kept:
            del view
        slab = slot.slab
        store.discard("k19")
        core_of(store).mover.drain()
        assert slot.may_have_views() == kept
        store.put("second", torch.ones(936 << 8))
        assert slab.unlocked != kept
        if kept:
            assert view.is_pinned()
            assert torch.equal(view, torch.full((10,), 19.0))


def test_slab_is_unlocked_after_the_work_of_its_slots(
    arena: RegisteredArena, driver: Driver
) -> None:
    class Work:
        over = False

        def query(self) -> bool:
            return self.over

        def synchronize(self) -> None:
            self.over = True
            driver.calls.append("waited")

    kept = sparse(arena)
    for slot in kept:
        slot.pending.append(Work())  # type: ignore[arg-type]
    large = filled(arena, 64 << 10, 7)
    assert large.slab is None
    assert driver.calls[64:] == ["waited", "unregister", "waited", "unregister", "register"]


@pytest.mark.pretend_only("counts")
def test_small_groups_move_while_slabs_are_unlocked(late_pretend: Any, disk_dir: Path) -> None:
    """Small groups are added and removed on the device while large ones need their slabs' pages."""
    late_pretend.reset_counters()
    rng, ram, device_ram = random.Random(1), 4 * MIB, MIB
    with TierStore(ram, disk_dir, device=ACCELERATOR, device_budget=device_ram) as store:
        for i in range(300):
            store.put(f"s{i}", torch.full((100,), float(i)), durable=False)
        for i in range(6):
            store.put(f"l{i}", torch.full((64 << 10,), float(i)))
        for _ in range(by_lane(60, 1000, 10000)):
            if rng.random() < 0.2:
                key, expected = f"l{(i := rng.randrange(6))}", float(i)
            else:
                key, expected = f"s{(i := rng.randrange(300))}", float(i)
            with store.acquire(key) as lease:
                found = lease.tensor.cpu()
            assert bool((found == expected).all())
            assert late_pretend.registered_bytes() <= ram
    assert late_pretend.unregistered_in_use() == 0
