"""Pages that move between slots: nothing shared, nothing lost, nothing populated twice."""

from __future__ import annotations

import errno
import gc
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.helpers.system_calls import system_call
from tierstore.model.sizes import PAGE
from tierstore.tiers.pages import HUGE_PAGE, PATIENCE, RecycledPages, fresh_memory

BUDGET = 64 * 1024**2
SIZES = [PAGE, 3 * PAGE, HUGE_PAGE - PAGE, HUGE_PAGE, HUGE_PAGE + PAGE, 9 * 1024**2, 21 * PAGE * 77]


def resident() -> int:
    """Return the private memory of this process, in bytes."""
    gc.collect()
    return _resident()


def _resident() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


# The kernel counts huge pages that were populated for all processes together.
counts_huge_pages = pytest.mark.alone


def populated(work: Callable[[], None]) -> int:
    """Return the bytes that the kernel backed with new pages during `work`, huge and small."""
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


def churn(
    allocate: Callable[[int], torch.Tensor],
    rounds: int,
    seed: int = 1,
    after_each: Callable[[], None] = lambda: None,
) -> None:
    """Allocate slots of many sizes, within the budget together; write and check each."""
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
        wanted = PAGE if nbytes < HUGE_PAGE or allocate is fresh_memory else HUGE_PAGE
        assert memory.data_ptr() % wanted == 0
        memory.fill_(turn % 251)
        live.append((memory, turn % 251))
        after_each()
    for memory, mark in live:
        assert_holds(memory, mark)


def assert_holds(memory: torch.Tensor, mark: int) -> None:
    """Check every page, from its first byte to its last, without a copy, which would use memory."""
    assert bool((memory[::PAGE] == mark).all()), "two slots shared a page"
    assert bool((memory[PAGE - 1 :: PAGE] == mark).all()), "two slots shared a page"


@pytest.mark.parametrize("seed", range(5))
def test_slots_of_any_size_are_disjoint_and_within_budget(seed: int) -> None:
    before = resident()
    pages = RecycledPages(BUDGET)
    most: list[int] = []
    churn(pages.allocate, 200, seed, lambda: most.append(_resident() - before))
    assert BUDGET * 3 / 4 < max(most) < BUDGET + 2 * 1024**2
    pages.close()
    assert resident() - before < 2 * 1024**2, "pages were lost"


def test_slots_of_threads_are_disjoint_and_within_budget() -> None:
    before = resident()
    pages = RecycledPages(4 * BUDGET)
    most: list[int] = []
    with ThreadPoolExecutor(4) as pool:  # each stays within a quarter
        work = [
            pool.submit(churn, pages.allocate, 100, seed, lambda: most.append(_resident() - before))
            for seed in range(4)
        ]
        for done in work:
            done.result()
    assert BUDGET < max(most) < 4 * BUDGET + 4 * 1024**2
    pages.close()
    assert resident() - before < 4 * 1024**2, "pages were lost"


def test_slot_like_an_earlier_one_reuses_its_pages() -> None:
    pages = RecycledPages(BUDGET)
    sizes = (3 * HUGE_PAGE + PAGE, 5 * HUGE_PAGE, 2 * PAGE)
    slots = {nbytes: pages.allocate(nbytes).fill_(1) for nbytes in sizes}
    addresses = {nbytes: memory.data_ptr() for nbytes, memory in slots.items()}
    slots.clear()
    with system_call("mmap of libc", "munmap", "mremap", "madvise") as changes:
        again = {nbytes: pages.allocate(nbytes) for nbytes in reversed(sizes)}
    assert {nbytes: memory.data_ptr() for nbytes, memory in again.items()} == addresses
    assert changes == []


@counts_huge_pages
def test_slot_in_use_lends_the_pages_below_it() -> None:
    pages = RecycledPages(10 * HUGE_PAGE)
    pages.allocate(10 * HUGE_PAGE).fill_(1)
    low = pages.allocate(4 * HUGE_PAGE).fill_(2)
    others: list[torch.Tensor] = []
    made = populated(lambda: others.append(pages.allocate(6 * HUGE_PAGE).fill_(3)))
    assert made < HUGE_PAGE
    assert_holds(low, 2)
    assert_holds(others[0], 3)


def test_small_pages_of_a_larger_tail_yield_to_huge_ones() -> None:
    before = resident()
    pages = RecycledPages(4 * HUGE_PAGE)
    slots = [pages.allocate(2 * HUGE_PAGE - PAGE).fill_(1) for _ in range(2)]
    slots.clear()
    slots = [pages.allocate(HUGE_PAGE + PAGE).fill_(mark) for mark in (2, 3)]
    slots.append(pages.allocate(2 * HUGE_PAGE - 2 * PAGE).fill_(4))
    assert resident() - before < 4 * HUGE_PAGE + 1024**2
    for memory, mark in zip(slots, (2, 3, 4), strict=True):
        assert_holds(memory, mark)


@counts_huge_pages
def test_later_passes_populate_hardly_anything() -> None:
    pages = RecycledPages(BUDGET)
    churn(pages.allocate, 300)
    again = populated(lambda: churn(pages.allocate, 300, seed=2))
    fresh = populated(lambda: churn(fresh_memory, 300, seed=2))
    assert fresh > 500 * 1024**2, "the control: new memory is populated again"
    assert again < fresh / 5


def test_large_slot_regains_huge_pages_after_moves() -> None:
    pages = RecycledPages(BUDGET)
    first = [pages.allocate(nbytes).fill_(1) for nbytes in (5 * HUGE_PAGE + PAGE, 3 * HUGE_PAGE)]
    first.clear()
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


def test_view_that_outlives_its_slot_keeps_its_bytes() -> None:
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


def test_pages_being_released_are_awaited() -> None:
    # Long enough for the other thread to run on a busy machine.
    before = resident()
    pages = RecycledPages(8 * HUGE_PAGE, patience=10 * PATIENCE)
    going = [pages.allocate(8 * HUGE_PAGE).fill_(1)]
    timer = threading.Timer(PATIENCE / 5, going.clear)
    timer.start()
    pages.allocate(8 * HUGE_PAGE).fill_(2)
    timer.join()
    assert resident() - before < 9 * HUGE_PAGE


def test_view_kept_for_long_is_awaited_once() -> None:
    pages = RecycledPages(8 * HUGE_PAGE)
    kept = pages.allocate(8 * HUGE_PAGE)[:10]
    started = time.monotonic()
    rounds = 20
    for _ in range(rounds):
        pages.allocate(8 * HUGE_PAGE)
    assert time.monotonic() - started < rounds * PATIENCE / 2, "each allocation waited"
    assert len(kept) == 10


def test_memory_above_the_budget_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pages = RecycledPages(8 * HUGE_PAGE, patience=PATIENCE / 10)
    for _ in range(2):
        pages.allocate(8 * HUGE_PAGE)
        assert not caplog.messages
        kept = pages.allocate(8 * HUGE_PAGE)[:10]
        for _ in range(3):
            pages.allocate(3 * HUGE_PAGE)
        assert len(kept) == 10
        del kept
        (told,) = caplog.messages
        assert f"{3 * HUGE_PAGE:,} bytes of host memory above the budget of" in told
        caplog.clear()


def test_memory_released_after_close_goes_to_the_system() -> None:
    before = resident()
    pages = RecycledPages(BUDGET)
    memory = pages.allocate(8 * HUGE_PAGE)
    memory.fill_(7)
    pages.close()
    assert resident() - before >= 8 * HUGE_PAGE
    del memory
    assert resident() - before < HUGE_PAGE


def test_close_frees_spare_pages_of_a_slot_in_use() -> None:
    before = resident()
    pages = RecycledPages(BUDGET)
    pages.allocate(9 * HUGE_PAGE - PAGE).fill_(1)
    memory = pages.allocate(2 * HUGE_PAGE + PAGE).fill_(7)
    assert resident() - before > 8 * HUGE_PAGE
    pages.close()
    assert resident() - before < 3 * HUGE_PAGE
    assert_holds(memory, 7)


def test_pages_that_cannot_be_moved_are_mapped_again() -> None:
    """A process has a limited number of maps (vm.max_map_count); beyond it, `mremap` fails."""
    before = resident()
    pages = RecycledPages(BUDGET)
    with system_call("mremap", fails_with=errno.ENOMEM) as refused:
        churn(pages.allocate, 200)
    assert refused
    assert resident() - before < BUDGET + 2 * 1024**2
    pages.close()
    assert resident() - before < 2 * 1024**2


def test_memory_refused_by_the_system_raises_and_counts_nothing() -> None:
    before = resident()
    pages = RecycledPages(None)
    with pytest.raises(OSError, match="could not map"):
        pages.allocate(1 << 60)
    pages.allocate(HUGE_PAGE).fill_(1)
    pages.close()
    assert resident() - before < HUGE_PAGE


def test_memory_left_behind_keeps_only_viewed_pages() -> None:
    pages = RecycledPages(None)
    memory = pages.allocate(16 * HUGE_PAGE)
    memory.fill_(3)
    before, held = resident(), pages.held
    pages.set_detached(memory, [(5 * PAGE + 7, 5 * PAGE + 9), (9 * PAGE, 11 * PAGE)])
    assert resident() < before - 15 * HUGE_PAGE
    assert pages.held == held - 16 * HUGE_PAGE
    kept = torch.cat([memory[5 * PAGE : 6 * PAGE], memory[9 * PAGE : 11 * PAGE]])
    assert torch.equal(kept, torch.full_like(kept, 3))
    pages.set_detached(memory, None)
    assert pages.held == held
    pages.close()
