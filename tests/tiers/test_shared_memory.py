"""Shared memory: others see the owner's bytes, and their writes stay private."""

from __future__ import annotations

import errno
import fcntl
import functools
import mmap
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.helpers.system_calls import system_call
from tests.lanes import by_lane
from tierstore.model.sizes import PAGE, round_up
from tierstore.system.mapping import libc, map_beginning
from tierstore.tiers.arena import Arena
from tierstore.tiers.shared_memory import (
    CHUNK,
    MADV_COLLAPSE,
    RANGES,
    FreeRanges,
    SharedArena,
    SharedMap,
)

BUDGET = 8 * CHUNK
SIZES = [PAGE, 3 * PAGE, CHUNK - PAGE, CHUNK, CHUNK + PAGE, 2 * CHUNK, 5 * CHUNK + 7 * PAGE]


@pytest.fixture
def shared() -> Iterator[SharedArena]:
    arena = SharedArena(BUDGET)
    yield arena
    arena.close()


@contextmanager
def descriptor_of(shared: SharedArena) -> Iterator[int]:
    descriptor = shared.read_only_descriptor()
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def map_of(shared: SharedArena, *, private: bool = True) -> SharedMap:
    with descriptor_of(shared) as descriptor:
        return SharedMap(descriptor, shared.size, private=private)


def taken(shared: SharedArena) -> int:
    """Return the bytes of memory that the file takes."""
    with descriptor_of(shared) as descriptor:
        return os.fstat(descriptor).st_blocks * 512


def maps() -> list[list[str]]:
    """Return the fields of each map of such a file in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split() for line in lines if "memfd:tierstore" in line]


# Free ranges -------------------------------------------------------------------------------------


def test_lowest_sufficient_range_is_taken() -> None:
    free = FreeRanges(100)
    assert [free.take(nbytes, 1) for nbytes in (10, 20, 30)] == [0, 10, 30]
    free.release(0, 10)
    free.release(30, 30)
    assert free.ranges == [(0, 10), (30, 100)]
    assert free.take(11, 1) == 30
    assert free.take(10, 1) == 0
    assert free.take(60, 1) is None
    assert free.take(59, 1) == 41
    assert free.ranges == []


def test_space_below_an_aligned_range_stays_free() -> None:
    free = FreeRanges(100)
    assert free.take(5, 1) == 0
    assert free.take(16, 16) == 16
    assert free.ranges == [(5, 16), (32, 100)]
    assert free.take(11, 1) == 5


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0)])
def test_neighbouring_ranges_are_merged(order: tuple[int, ...]) -> None:
    free = FreeRanges(30)
    for _ in range(3):
        free.take(10, 1)
    for one in order:
        free.release(10 * one, 10)
    assert free.ranges == [(0, 30)]


def play(seed: int, factor: int) -> None:
    """Play a history of ranges, at most 64 chunks in all, and check it page by page."""
    rng = random.Random(seed)
    budget = 64 * CHUNK
    free = FreeRanges(factor * budget)
    owner = [False] * (factor * budget // PAGE)
    there: list[tuple[int, int]] = []
    longest = rng.choice((CHUNK // 4, 4 * CHUNK, 64 * CHUNK))
    for _ in range(300):
        nbytes = round_up(min(int(PAGE * 2 ** (rng.random() * 20)), longest), PAGE)
        while there and sum(size for _, size in there) + nbytes > budget:
            offset, size = there.pop(rng.randrange(len(there)))
            owner[offset // PAGE : (offset + size) // PAGE] = [False] * (size // PAGE)
            free.release(offset, size)
        alignment = CHUNK if nbytes >= CHUNK else PAGE
        taken = free.take(nbytes, alignment)
        assert taken is not None, "no space"
        assert taken % alignment == 0
        pages = slice(taken // PAGE, (taken + nbytes) // PAGE)
        assert not any(owner[pages]), "two ranges overlap"
        owner[pages] = [True] * (nbytes // PAGE)
        there.append((taken, nbytes))
    for offset, size in there:
        free.release(offset, size)
    assert free.ranges == [(0, factor * budget)]


@pytest.mark.parametrize("seed", range(by_lane(20, 200, 2000)))
def test_allocation_within_the_budget_always_succeeds(seed: int) -> None:
    play(seed, RANGES)


def test_file_of_exactly_the_budget_is_too_small() -> None:
    with pytest.raises(AssertionError, match="no space"):
        for seed in range(20):
            play(seed, 1)


def test_worst_allocation_order_finds_space() -> None:
    """Robson's order: of each size, the ranges that block the next size stay."""
    budget = 1 << 10  # in units of the smallest range
    free = FreeRanges(RANGES * budget)
    there: set[tuple[int, int]] = set()
    highest = 0
    for size in (1 << step for step in range(11)):
        for _ in range((budget - sum(nbytes for _, nbytes in there)) // size):
            offset = free.take(size, 1)
            assert offset is not None
            there.add((offset, size))
            highest = max(highest, offset + size)
        gone = {one for one in there if one[0] % (2 * size) + one[1] < 2 * size}
        for one in gone:
            free.release(*one)
        there -= gone
    assert highest > 3 * budget, "the order was not bad"


# The owner ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, PAGE, CHUNK, 5 * CHUNK + 7 * PAGE])
def test_memory_is_whole_ordinary_pages(shared: SharedArena, nbytes: int) -> None:
    memory = shared.make(nbytes)
    assert (memory.dtype, memory.shape, memory.is_contiguous()) == (torch.uint8, (nbytes,), True)
    assert memory.data_ptr() % PAGE == 0
    assert shared.offset_of(memory) % (CHUNK if nbytes >= CHUNK else PAGE) == 0
    memory.fill_(7)
    assert int(memory.sum(dtype=torch.int64)) == 7 * nbytes


def test_file_takes_only_touched_pages(shared: SharedArena) -> None:
    assert shared.size == RANGES * BUDGET
    assert taken(shared) == 0
    memory = shared.make(3 * PAGE)
    memory.fill_(1)
    assert taken(shared) == 3 * PAGE


def test_retired_memory_returns_to_the_system_at_once(shared: SharedArena) -> None:
    first, second = shared.make(CHUNK + PAGE), shared.make(CHUNK)
    first.fill_(1)
    second.fill_(2)
    assert taken(shared) == 2 * CHUNK + PAGE
    offset = shared.offset_of(first)
    shared.free(first)
    assert taken(shared) == CHUNK
    assert not first.any(), "a remaining view does not show zeros"
    assert bool((second == 2).all())
    assert shared.offset_of(shared.make(CHUNK)) == offset


def test_foreign_memory_is_refused(shared: SharedArena) -> None:
    memory = shared.make(2 * PAGE)
    for other in (torch.zeros(PAGE, dtype=torch.uint8), memory[PAGE:]):
        with pytest.raises(ValueError, match="not from this arena"):
            shared.free(other)
    shared.free(memory)
    with pytest.raises(ValueError, match="not from this arena"):
        shared.offset_of(memory)


def test_memory_the_system_refuses_back_stays(shared: SharedArena) -> None:
    memory = shared.make(PAGE).fill_(1)
    with (
        system_call("madvise", fails_with=errno.EINVAL),
        pytest.raises(OSError, match="free shared"),
    ):
        shared.free(memory)
    assert shared.offset_of(memory) == 0
    assert shared.offset_of(shared.make(PAGE)) != 0
    shared.free(memory)
    assert taken(shared) == 0


def test_range_beyond_the_file_is_refused(shared: SharedArena) -> None:
    with pytest.raises(MemoryError, match="--ram"):
        shared.make(shared.size + 1)
    with pytest.raises(ValueError, match="at least 1"):
        shared.make(0)
    shared.make(shared.size)
    with pytest.raises(MemoryError, match="--ram"):
        shared.make(1)


@pytest.mark.parametrize("seed", range(by_lane(3, 20, 200)))
def test_arena_in_any_order_stays_within_budget(seed: int) -> None:
    rng = random.Random(seed)
    shared = SharedArena(BUDGET)
    arena = Arena(BUDGET, shared.make, shared.free, close=shared.close)
    there = []
    for turn in range(40):
        nbytes = rng.choice(SIZES)
        while sum(slot.nbytes for slot, _ in there) + nbytes > BUDGET:
            slot, mark = there.pop(rng.randrange(len(there)))
            assert slot.memory is not None and bool((slot.memory == mark).all())
            arena.release(slot, keep=rng.random() < 0.5)
        slot = arena.take(nbytes)
        arena.fill(slot).fill_(turn)
        there.append((slot, turn))
        assert taken(shared) <= BUDGET
    assert arena.frees > 0
    for slot, mark in there:
        assert slot.memory is not None and bool((slot.memory == mark).all())
        arena.release(slot)
    arena.free_idle()
    assert taken(shared) == 0
    arena.close()


def test_threads_get_separate_memory(shared: SharedArena) -> None:
    wrong: list[int] = []

    def work(mark: int) -> None:
        for _ in range(200):
            memory = shared.make(3 * PAGE).fill_(mark)
            if not bool((memory == mark).all()):
                wrong.append(mark)
            shared.free(memory)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert taken(shared) == 0
    assert shared.offset_of(shared.make(shared.size)) == 0, "a range was not returned"


def test_direct_read_arrives_in_shared_memory(shared: SharedArena, tmp_path: Path) -> None:
    data = random.Random(0).randbytes(CHUNK + PAGE)
    (tmp_path / "file").write_bytes(data)
    memory = shared.make(len(data))
    try:
        descriptor = os.open(tmp_path / "file", os.O_RDONLY | os.O_DIRECT)
    except OSError:
        pytest.skip("this file system has no direct reads")
    try:
        assert os.preadv(descriptor, [memory.numpy().data], 0) == len(data)
    finally:
        os.close(descriptor)
    assert memory.numpy().tobytes() == data
    assert map_of(shared).view(0, len(data)).numpy().tobytes() == data


def test_memory_outlives_the_arena_until_its_map_is_gone() -> None:
    before = len(maps())
    shared = SharedArena(BUDGET)
    memory, other = shared.make(PAGE).fill_(3), shared.make(PAGE).fill_(4)
    shared.close()
    shared.close()
    assert bool((memory == 3).all())
    shared.free(memory)
    assert not memory.any()
    assert bool((other == 4).all())
    for call in (shared.read_only_descriptor, functools.partial(shared.make, PAGE)):
        with pytest.raises(ValueError, match="is closed"):
            call()
    assert len(maps()) > before
    del memory, other
    assert len(maps()) == before


@pytest.mark.parametrize(
    "call, number, kind",
    [
        ("mmap of libc", errno.ENOMEM, MemoryError),
        ("mmap of libc", errno.EPERM, PermissionError),
        ("memfd_create", errno.ENOSYS, OSError),
        ("memfd_create", errno.EPERM, PermissionError),
    ],
)
def test_system_refusal_raises_with_a_remedy(call: str, number: int, kind: type[Exception]) -> None:
    before = os.listdir("/proc/self/fd")
    with system_call(call, fails_with=number), pytest.raises(kind, match=r"lower --ram.*ulimit"):
        SharedArena(BUDGET)
    assert os.listdir("/proc/self/fd") == before
    SharedArena(BUDGET).close()


# Readers -----------------------------------------------------------------------------------------


def test_read_only_descriptor_cannot_write(shared: SharedArena) -> None:
    shared.make(PAGE).fill_(5)
    with descriptor_of(shared) as descriptor:
        assert not os.get_inheritable(descriptor)
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, PAGE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(OSError):
            os.pwrite(descriptor, b"x", 0)
        with mmap.mmap(descriptor, PAGE, mmap.MAP_SHARED, mmap.PROT_READ) as shown:
            assert shown[0] == 5


@pytest.mark.parametrize("size", [0, 2 * RANGES * BUDGET], ids=["shorter", "longer"])
def test_file_keeps_its_size_for_every_opener(shared: SharedArena, size: int) -> None:
    with descriptor_of(shared) as descriptor:
        assert not os.fstat(descriptor).st_mode & 0o222
        os.fchmod(descriptor, 0o600)
        writable = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                os.ftruncate(writable, size)
            with pytest.raises(PermissionError):
                fcntl.fcntl(writable, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
            assert os.fstat(writable).st_size == shared.size
            assert os.pwrite(writable, b"x", 0) == 1, "only the seals prevent changes"
        finally:
            os.close(writable)


@pytest.mark.parametrize("private", [True, False])
def test_reader_sees_the_owners_writes(shared: SharedArena, private: bool) -> None:
    memory = shared.make(CHUNK).fill_(1)
    reader = map_of(shared, private=private)
    shown = reader.view(shared.offset_of(memory), CHUNK)
    assert bool((shown == 1).all())
    memory.fill_(2)
    assert bool((shown == 2).all())


def test_reader_writes_stay_private(shared: SharedArena) -> None:
    memory = shared.make(2 * PAGE).fill_(1)
    reader, other = map_of(shared), map_of(shared)
    shown = reader.view(0, 2 * PAGE)
    shown[:PAGE].fill_(9)
    assert bool((memory == 1).all())
    assert bool((other.view(0, 2 * PAGE) == 1).all())
    memory.fill_(2)
    assert shown[0] == 9
    assert shown[PAGE] == 2
    reader.refresh(0, 2 * PAGE)
    assert bool((shown == 2).all())


def test_device_map_is_read_only(shared: SharedArena) -> None:
    before = {one[0] for one in maps()}
    reader = map_of(shared, private=False)
    assert {one[1] for one in maps() if one[0] not in before} == {"r--s"}
    with pytest.raises(ValueError, match="private"):
        reader.refresh(0, PAGE)


def test_views_outside_the_file_are_refused(shared: SharedArena) -> None:
    reader = map_of(shared)
    assert reader.view(shared.size - PAGE, PAGE).numel() == PAGE
    reader.refresh(shared.size - PAGE, PAGE)
    for offset, nbytes in [(-PAGE, PAGE), (0, 0), (shared.size, 1), (PAGE, shared.size)]:
        for call in (reader.view, reader.refresh):
            with pytest.raises(ValueError, match="not among"):
                call(offset, nbytes)
    with pytest.raises(ValueError, match="whole pages"):
        reader.refresh(1, PAGE)
    with descriptor_of(shared) as descriptor, pytest.raises(ValueError, match="the arena's size"):
        SharedMap(descriptor, shared.size + PAGE, private=True)


def test_map_is_released_with_its_last_view(shared: SharedArena) -> None:
    before = len(maps())
    memory = shared.make(PAGE).fill_(4)
    reader = map_of(shared)
    shown = reader.view(0, PAGE)
    reader.close()
    with pytest.raises(ValueError, match="not among"):
        reader.view(0, PAGE)
    assert bool((shown == memory).all())
    assert len(maps()) > before
    del shown
    assert len(maps()) == before


def test_reader_without_address_space_raises(shared: SharedArena) -> None:
    with (
        system_call("mmap of libc", fails_with=errno.ENOMEM),
        pytest.raises(MemoryError, match="--ram"),
    ):
        map_of(shared)


def in_a_fork(work: Callable[[], None]) -> int:
    """Run a function in a fork, and return its exit status: 0 if the function returned."""
    child = os.fork()
    if not child:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_other_process_sees_bytes_without_taking_memory(
    shared: SharedArena,
) -> None:
    memory = shared.make(4 * CHUNK).fill_(1)
    to_child, from_child = (os.pipe() for _ in range(2))

    def read() -> None:
        shown = map_of(shared).view(0, memory.numel()).numpy()  # torch has no threads in a fork
        assert (shown == 1).all()
        os.write(from_child[1], b".")
        os.read(to_child[0], 1)
        assert (shown == 2).all()
        shown[0] = 9

    def change() -> None:
        os.read(from_child[0], 1)
        memory.fill_(2)
        os.write(to_child[1], b".")

    owner = threading.Thread(target=change)
    owner.start()
    assert in_a_fork(read) == 0
    owner.join()
    assert memory[0] == 2
    assert taken(shared) == memory.numel()
    for end in (*to_child, *from_child):
        os.close(end)


def shared_bytes_in_huge_pages(address: int) -> int:
    """Return the fields of this process's map that begins at `address`."""
    found, here = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            start, stop = (int(part, 16) for part in words[0].split("-"))
            here = start <= address < stop
        elif here and words[0] == "ShmemPmdMapped:":
            found += int(words[1]) << 10
    return found


def collapses() -> bool:
    """Return whether this system makes huge pages of shared memory on request."""
    file = os.memfd_create("probe")
    try:
        os.ftruncate(file, CHUNK)
        pages = map_beginning(file, CHUNK, mmap.MAP_SHARED, mmap.PROT_WRITE, CHUNK)
    finally:
        os.close(file)
    pages[0] = 1
    address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
    return bool(libc.madvise(address, CHUNK, MADV_COLLAPSE) == 0)


def test_whole_chunks_are_huge_pages_for_owner_and_reader(shared: SharedArena) -> None:
    if not collapses():
        pytest.skip("this system makes no huge pages of shared memory")
    memory = shared.make(2 * CHUNK + PAGE)
    assert memory.data_ptr() % CHUNK == 0
    assert shared_bytes_in_huge_pages(memory.data_ptr()) == 2 * CHUNK
    memory.fill_(3)
    with descriptor_of(shared) as descriptor:
        reader = SharedMap(descriptor, shared.size, private=True)
    seen = reader.view(shared.offset_of(memory), memory.nbytes)
    assert seen.data_ptr() % CHUNK == 0
    assert bool((seen == 3).all())
    assert shared_bytes_in_huge_pages(seen.data_ptr()) == 2 * CHUNK
    seen[7] = 5  # makes a private copy of one page
    assert memory[7] == 3
    assert int(seen.sum()) == 3 * (memory.nbytes - 1) + 5
    reader.refresh(shared.offset_of(memory), memory.nbytes)
    assert bool((seen == 3).all())


def test_chunks_that_cannot_be_collapsed_keep_their_bytes(shared: SharedArena) -> None:
    with system_call("madvise", fails_with=errno.EINVAL):
        memory = shared.make(CHUNK + PAGE)
    memory.fill_(9)
    assert int(memory.sum()) == 9 * memory.nbytes
