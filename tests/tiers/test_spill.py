"""Space for groups that need not survive: never shared, reused, and freed when it is scarce."""

from __future__ import annotations

import errno
import os
import random
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
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

from tests.helpers.system_calls import Call, rejecting_opens, report_free_space, system_call
from tests.system.test_files import content, knows_direct_reads, open_file, read, room
from tierstore.errors import DiskFullError, TransferError
from tierstore.model.header import digest
from tierstore.model.sizes import PAGE, round_up
from tierstore.system.files import WRITE_BLOCK, parts
from tierstore.tiers.spill import Spill
from tierstore.tiers.workers import Workers


def filled(nbytes: int, seed: int = 0) -> memoryview:
    """Return page-aligned memory, in whole pages, with random content."""
    data = room(nbytes)
    data[:] = content(len(data), seed)
    return data


class SpillMachine(RuleBasedStateMachine):
    """Saves, reads and releases; the model is a dict of the bytes at each offset."""

    kind: type[Spill] = Spill

    @initialize(refused=st.sampled_from([0, os.O_TMPFILE, os.O_DIRECT]), reserves=st.booleans())
    def start(self, refused: int, reserves: bool) -> None:
        self.directory = tempfile.mkdtemp(prefix="tierstore-spill-")
        with rejecting_opens(refused) if refused else nullcontext():
            self.spill = self.kind(self.directory)
        self.system = ExitStack()
        if not reserves:
            self.system.enter_context(system_call("posix_fallocate", fails_with=errno.EOPNOTSUPP))
        assert os.listdir(self.directory) == [], "the file has a name"
        self.live: dict[int, bytes] = {}

    @rule(npages=st.integers(1, 5), seed=st.integers(0, 99))
    def save(self, npages: int, seed: int) -> None:
        data = filled(npages * PAGE, seed)
        offset, source = self.spill.save(data)
        assert offset % PAGE == 0
        (segment,) = source.segments
        assert (segment.extent.offset, segment.extent.nbytes, segment.at) == (offset, len(data), 0)
        self.live[offset] = bytes(data)

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 99))
    def give_back(self, index: int) -> None:
        offset = sorted(self.live)[index % len(self.live)]
        self.spill.release(offset, len(self.live.pop(offset)) - index % 2)

    @rule()
    def trim(self) -> None:
        before = os.stat(self.spill.path).st_size
        end = max((offset + len(data) for offset, data in self.live.items()), default=0)
        assert self.spill.trim() == before - end
        assert os.stat(self.spill.path).st_size == end

    @invariant()
    def nothing_overlaps_and_all_is_there(self) -> None:
        if not hasattr(self, "spill"):
            return
        here = 0
        for offset, data in sorted(self.live.items()):
            assert offset >= here, "two groups overlap"
            here = offset + len(data)
            assert read(open_file(self.spill.path), offset, len(data)) == data

    @invariant()
    def free_space_is_merged(self) -> None:
        if not hasattr(self, "spill"):
            return
        last, free = self.spill.usage()
        assert all(room > 0 for _, room in free)
        assert all(one[0] + one[1] < other[0] for one, other in pairwise(free))
        used = sum(len(data) for data in self.live.values())
        assert last == used + sum(room for _, room in free)
        end = max((offset + len(data) for offset, data in self.live.items()), default=0)
        assert last == end, "space behind the last group counts as used"
        assert os.stat(self.spill.path).st_size >= end

    def teardown(self) -> None:
        if hasattr(self, "spill"):
            self.system.close()
            self.spill.close()
            os.rmdir(self.directory)


SPILLS = settings(max_examples=60, stateful_step_count=30)
UNSHRUNK = settings(SPILLS, max_examples=2000, phases=[Phase.generate], report_multiple_bugs=False)


def test_spill_space_is_exclusive_and_reused() -> None:
    run_state_machine_as_test(SpillMachine, settings=SPILLS)


@pytest.mark.parametrize("fault", ["forgets to merge", "gives back too much"])
def test_state_machine_notices_a_seeded_fault(fault: str) -> None:
    """The control."""

    class Faulty(Spill):
        def release(self, offset: int, nbytes: int) -> None:
            if fault == "gives back too much":
                super().release(offset, nbytes + PAGE)
            else:
                self._free.runs.append((offset, round_up(nbytes, PAGE)))
                self._free.runs.sort()
                self._free.longest = self._end

    class FaultyMachine(SpillMachine):
        kind = Faulty

    with pytest.raises(AssertionError):
        run_state_machine_as_test(FaultyMachine, settings=UNSHRUNK)


def test_spill_space_freed_is_used_first(tmp_path: Path) -> None:
    spill = Spill(str(tmp_path))
    first, second, third = (spill.take(3 * PAGE) for _ in range(3))
    spill.release(second, 3 * PAGE)
    assert spill.take(2 * PAGE) == second
    assert spill.take(PAGE) == second + 2 * PAGE
    assert spill.take(PAGE) == third + 3 * PAGE
    for offset, nbytes in [(first, 3), (second, 2), (second + 2 * PAGE, 1), (third, 4)]:
        spill.release(offset, nbytes * PAGE)
    assert spill.usage() == (0, [])
    spill.close()


# How much of the disk it takes -------------------------------------------------------------------


def test_same_blocks_are_overwritten_each_step(tmp_path: Path) -> None:
    """A step spills the same as the one before: the file does not grow."""
    spill = Spill(str(tmp_path))
    seen = set()
    for step in range(4):
        saved = [spill.save(filled(8 * PAGE, 10 * step + i))[0] for i in range(5)]
        status = os.stat(spill.path)
        seen.add((tuple(saved), status.st_size, status.st_blocks))
        for i, offset in enumerate(saved):
            assert read(open_file(spill.path), offset, 8 * PAGE) == content(8 * PAGE, 10 * step + i)
            spill.release(offset, 8 * PAGE)
    assert len(seen) == 1
    spill.close()


def test_spill_file_grows_in_large_steps(tmp_path: Path) -> None:
    spill = Spill(str(tmp_path), growth=10 * PAGE)
    sizes = []
    for _ in range(25):
        spill.take(PAGE)
        sizes.append(os.stat(spill.path).st_size // PAGE)
    assert sizes == [10] * 10 + [20] * 10 + [30] * 5
    spill.take(50 * PAGE)
    assert os.stat(spill.path).st_size == 75 * PAGE
    spill.close()


@pytest.mark.parametrize(("free", "kept"), [(8, True), (7, False)])
def test_spill_space_is_kept_only_with_as_much_free_besides(
    free: int, kept: bool, tmp_path: Path
) -> None:
    spill = Spill(str(tmp_path), growth=PAGE)
    stays, goes = spill.save(filled(2 * PAGE, 1))[0], spill.save(filled(8 * PAGE, 2))[0]
    with report_free_space(free * PAGE):
        spill.release(goes, 8 * PAGE)
        assert os.stat(spill.path).st_size == (10 if kept else 2) * PAGE
        assert read(open_file(spill.path), stays, 2 * PAGE) == content(2 * PAGE, 1)
        again = spill.save(filled(8 * PAGE, 3))[0]
    assert again == goes
    assert read(open_file(spill.path), again, 8 * PAGE) == content(8 * PAGE, 3)
    spill.close()


@pytest.mark.parametrize(("free", "size"), [(20, 10), (19, 2)])
def test_spill_large_step_needs_as_much_free_space(free: int, size: int, tmp_path: Path) -> None:
    with report_free_space(free * PAGE):
        spill = Spill(str(tmp_path), growth=10 * PAGE)
        assert spill.take(2 * PAGE) == 0
    assert os.stat(spill.path).st_size == size * PAGE
    spill.close()


def test_spill_without_disk_space_raises_and_counts_nothing(tmp_path: Path) -> None:
    spill = Spill(str(tmp_path))
    with (
        system_call("posix_fallocate", fails_with=errno.ENOSPC),
        pytest.raises(DiskFullError) as error,
    ):
        spill.take(3 * PAGE)
    assert str(tmp_path) in str(error.value)
    assert spill.take(PAGE) == 0
    spill.close()


# Saving ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, DiskFullError), (errno.EIO, TransferError)]
)
def test_spill_save_failure_takes_no_space(
    number: int, kind: type[TransferError], tmp_path: Path
) -> None:
    spill = Spill(str(tmp_path))
    with system_call("pwrite", fails_with=number), pytest.raises(TransferError) as error:
        spill.save(filled(2 * PAGE))
    assert type(error.value) is kind
    assert str(tmp_path) in str(error.value)
    assert spill.usage() == (0, [])
    offset, _ = spill.save(filled(2 * PAGE, 1))
    assert read(open_file(spill.path), offset, 2 * PAGE) == content(2 * PAGE, 1)
    spill.close()


def test_parts_are_written_by_several_threads_with_checksums(tmp_path: Path) -> None:
    spill = Spill(str(tmp_path))
    workers = Workers(3, "test")
    data = filled(2 * WRITE_BLOCK + 3 * PAGE, 4)
    meeting = threading.Barrier(3)
    threads = set()

    def meet() -> None:
        if threading.get_ident() not in threads:
            threads.add(threading.get_ident())
            meeting.wait(30)  # continues once three are here

    with system_call("pwrite", before=meet):
        start, source = spill.save(data, workers.run_parallel)
    assert len(threads) == 3
    assert [(check.offset, check.nbytes) for check in source.checks] == list(
        parts(len(data), WRITE_BLOCK)
    )
    for check in source.checks:
        assert check.digest == digest(data[check.offset : check.offset + check.nbytes])
    assert read(open_file(spill.path), start, len(data)) == bytes(data)
    workers.stop()
    spill.close()


def test_writes_bypass_the_page_cache(tmp_path: Path) -> None:
    probe = tmp_path / "probe"
    probe.write_bytes(bytes(PAGE))
    if not knows_direct_reads(str(probe)):
        pytest.skip("this file system knows no direct writes")
    direct = []

    def note(call: Call) -> Any:
        direct.append(call.direct)
        return call.go_on()

    spill = Spill(str(tmp_path))
    with system_call("pwrite", answer=note):
        spill.save(filled(4 * PAGE))
        assert direct == [True]
        spill.write(memoryview(bytes(3 * PAGE))[5 : PAGE + 5], 0)  # not page-aligned
        assert direct == [True, True, False]
        spill.save(filled(PAGE))
    assert direct == [True, True, False, False], "direct writes were tried again"
    spill.close()


def use_in_turns(spill: Spill, seed: int) -> list[int]:
    """Save, read and release, a few groups at a time. Returns those that were read wrong."""
    rng = random.Random(seed)
    held: list[tuple[int, int, int]] = []
    wrong = []
    for number in range(60):
        npages = rng.randrange(1, 6)
        what = 1000 * seed + number
        held.append((spill.save(filled(npages * PAGE, what))[0], npages * PAGE, what))
        if len(held) > 5 or number == 59:
            rng.shuffle(held)
            for offset, nbytes, saved in held:
                if read(open_file(spill.path), offset, nbytes) != content(nbytes, saved):
                    wrong.append(saved)
                spill.release(offset, nbytes)
            held.clear()
    return wrong


def test_many_threads_save_and_free(tmp_path: Path) -> None:
    spill = Spill(str(tmp_path))
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda seed: use_in_turns(spill, seed), range(4))) == 4 * [[]]
    assert spill.usage() == (0, [])
    spill.close()
