"""Pages that move between slots: nothing shared, nothing lost, nothing populated twice."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tierstore.model.sizes import PAGE
from tierstore.transfer import pages as pages_module
from tierstore.transfer.pages import HUGE_PAGE, PATIENCE, RecycledPages, fresh_memory

BUDGET = 64 * 1024**2
SIZES = [PAGE, 3 * PAGE, HUGE_PAGE - PAGE, HUGE_PAGE, HUGE_PAGE + PAGE, 9 * 1024**2, 21 * PAGE * 77]


def resident() -> int:
    """Private memory of this process now, in bytes."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def populated(work: Callable[[], None]) -> int:
    """Bytes that the kernel had to back with new pages during `work`, huge and small."""
    before = _faults()
    work()
    after = _faults()
    huge = (after["thp_fault_alloc"] - before["thp_fault_alloc"]) * HUGE_PAGE
    return huge + (after["own"] - before["own"]) * PAGE


def _faults() -> dict[str, int]:
    lines = Path("/proc/vmstat").read_text().splitlines()
    found = {"thp_fault_alloc": next(int(x.split()[1]) for x in lines if "thp_fault_alloc" in x)}
    found["own"] = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[7])
    return found


def churn(allocate: Callable[[int], torch.Tensor], rounds: int, seed: int = 1) -> None:
    """Slots of many sizes, together never above the budget, each written and checked."""
    rng = random.Random(seed)
    live: list[tuple[torch.Tensor, int]] = []
    for turn in range(rounds):
        nbytes = rng.choice(SIZES)
        while sum(memory.numel() for memory, _ in live) + nbytes > BUDGET:
            memory, mark = live.pop(rng.randrange(len(live)))
            assert_holds(memory, mark)
            del memory
        memory = allocate(nbytes)
        assert memory.dtype == torch.uint8
        assert memory.numel() == nbytes
        assert memory.data_ptr() % PAGE == 0
        memory.fill_(turn % 251)
        live.append((memory, turn % 251))
    for memory, mark in live:
        assert_holds(memory, mark)


def assert_holds(memory: torch.Tensor, mark: int) -> None:
    """Every page, from its first byte to its last, without a copy that would count as memory."""
    assert bool((memory[::PAGE] == mark).all()), "two slots shared a page"
    assert bool((memory[PAGE - 1 :: PAGE] == mark).all()), "two slots shared a page"


def test_slots_of_any_size_share_nothing_and_stay_within_the_budget() -> None:
    before = resident()
    pages = RecycledPages(BUDGET)
    for seed in range(5):
        churn(pages.allocate, 100, seed)
        assert resident() - before < BUDGET + 2 * 1024**2
    pages.close()
    assert resident() - before < 2 * 1024**2, "pages were lost"


def test_after_the_first_pass_hardly_anything_is_populated() -> None:
    pages = RecycledPages(BUDGET)
    churn(pages.allocate, 300)
    again = populated(lambda: churn(pages.allocate, 300, seed=2))
    fresh = populated(lambda: churn(fresh_memory, 300, seed=2))
    assert fresh > 500 * 1024**2, "the control: memory made anew is populated anew"
    assert again < fresh / 5


def test_a_large_slot_lies_in_huge_pages_again_after_its_pages_moved() -> None:
    pages = RecycledPages(BUDGET)
    first = pages.allocate(9 * HUGE_PAGE + PAGE)
    first.fill_(1)
    del first
    second = pages.allocate(8 * HUGE_PAGE)
    second.fill_(2)
    if not _huge_pages_at(first_made := fresh_memory(8 * HUGE_PAGE)):
        pytest.skip("this system gives no huge pages")
    del first_made
    assert second.data_ptr() % HUGE_PAGE == 0
    assert _huge_pages_at(second) == 8 * HUGE_PAGE


def _huge_pages_at(memory: torch.Tensor) -> int:
    memory.fill_(2)
    found = 0
    start, end = memory.data_ptr(), memory.data_ptr() + memory.numel()
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            low, high = (int(part, 16) for part in head.split("-"))
            inside = low < end and high > start
        elif inside and head == "AnonHugePages:":
            found += int(line.split()[1]) * 1024
    return found


def test_a_view_that_outlives_its_slot_keeps_its_bytes() -> None:
    pages = RecycledPages(BUDGET)
    memory = pages.allocate(4 * HUGE_PAGE)
    memory.fill_(7)
    view = memory[HUGE_PAGE : HUGE_PAGE + 10]
    del memory
    for _ in range(5):
        pages.allocate(4 * HUGE_PAGE).fill_(9)
    assert view.tolist() == [7] * 10
    pages.close()
    assert view.tolist() == [7] * 10


def test_pages_that_are_just_coming_back_are_waited_for() -> None:
    before = resident()
    pages = RecycledPages(8 * HUGE_PAGE)
    going = [pages.allocate(8 * HUGE_PAGE).fill_(1)]
    timer = threading.Timer(PATIENCE / 5, going.clear)
    timer.start()
    pages.allocate(8 * HUGE_PAGE).fill_(2)
    timer.join()
    assert resident() - before < 9 * HUGE_PAGE


def test_a_view_that_is_kept_is_not_waited_for_again_and_again() -> None:
    pages = RecycledPages(8 * HUGE_PAGE)
    kept = pages.allocate(8 * HUGE_PAGE)[:10]
    started = time.monotonic()
    rounds = 20
    for _ in range(rounds):
        pages.allocate(8 * HUGE_PAGE)
    assert time.monotonic() - started < rounds * PATIENCE / 2, "each one waited"
    assert len(kept) == 10


def test_what_comes_back_after_the_end_goes_to_the_system() -> None:
    before = resident()
    pages = RecycledPages(BUDGET)
    memory = pages.allocate(8 * HUGE_PAGE)
    memory.fill_(7)
    pages.close()
    assert resident() - before >= 8 * HUGE_PAGE
    del memory
    assert resident() - before < HUGE_PAGE


def test_pages_that_cannot_be_moved_are_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may have only so many maps (vm.max_map_count); then `mremap` refuses."""
    monkeypatch.setattr(pages_module, "_move", lambda start, nbytes, address: False)
    before = resident()
    pages = RecycledPages(BUDGET)
    churn(pages.allocate, 200)
    assert resident() - before < BUDGET + 2 * 1024**2
    pages.close()
    assert resident() - before < 2 * 1024**2


def test_memory_that_the_system_refuses_is_an_error_and_costs_nothing() -> None:
    before = resident()
    pages = RecycledPages(None)
    with pytest.raises(OSError, match="could not map"):
        pages.allocate(1 << 60)
    pages.allocate(HUGE_PAGE).fill_(1)
    pages.close()
    assert resident() - before < HUGE_PAGE
