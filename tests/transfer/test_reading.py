"""Groups on their way from files to memory: in how many reads, on which threads, how it ends."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.transfer.test_disk import content
from tierstore.model.errors import CorruptDataError, TransferError, TruncatedFileError
from tierstore.model.groups import Check, Extent, FileTensor, Move, Source, group_of, place
from tierstore.model.header import digest
from tierstore.model.moves import Copy
from tierstore.model.sizes import PAGE
from tierstore.model.tiers import Tier
from tierstore.transfer import disk
from tierstore.transfer.arena import host_arena
from tierstore.transfer.cargo import Cargo
from tierstore.transfer.disk import FileTable
from tierstore.transfer.figures import DiskFigures
from tierstore.transfer.reading import Reader, Reading
from tierstore.transfer.workers import URGENT, Workers

SIZE = 50 * PAGE + 777


@dataclass
class Desk:
    """Reads groups as a carrier does."""

    reader: Reader

    def read(self, cargo: Cargo) -> bytes:
        """The group's memory once it has arrived. Raises what was reported instead."""
        reports: list[BaseException | None] = []
        over = threading.Event()

        def done(_: Copy, error: BaseException | None) -> None:
            reports.append(error)
            over.set()

        slot = self.reader.arena.take(cargo.spec.nbytes)
        copy = Copy(cargo.key, cargo.spec.nbytes, Tier.DISK, Tier.HOST)
        reading = Reading(self.reader, copy, cargo, slot, done)
        self.reader.workers.submit(URGENT, reading.begin)
        assert over.wait(60)
        self.reader.workers.stop()  # whoever comes late must not report again
        assert len(reports) == 1
        found = bytes(slot.bytes()) if slot.memory is not None else b""
        self.reader.arena.give(slot)
        if reports[0] is not None:
            raise reports[0]
        return found


@pytest.fixture
def desk() -> Iterator[Callable[..., Desk]]:
    made = []

    def make(verify: str = "first", threads: int = 3) -> Desk:
        arena = host_arena(None, torch.device("cpu"))
        workers = Workers(threads, "test")
        made.append(workers)
        return Desk(Reader(arena, FileTable("/nowhere"), workers, verify))

    yield make
    for workers in made:
        workers.stop()


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "data"
    file.write_bytes(content(SIZE))
    return str(file)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The offset and length of every read."""
    notes: list[tuple[int, int]] = []
    preadv = os.preadv

    def noted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        notes.append((offset, len(buffers[0])))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", noted)
    return notes


def cargo_of(path: str, *extents: tuple[int, int]) -> Cargo:
    """A group of byte tensors at (offset, length) in the file."""
    tensors = [
        FileTensor(str(i), "U8", (nbytes,), Extent(path, offset, nbytes))
        for i, (offset, nbytes) in enumerate(extents)
    ]
    placed = place(tensors)
    return Cargo(
        "key", group_of("key", placed.specs, placed.end), Source(placed.segments, placed.moves)
    )


def assert_right(found: bytes, cargo: Cargo, *extents: tuple[int, int]) -> None:
    where = {tensor.name: tensor.offset for tensor in cargo.spec.tensors}
    for i, (offset, nbytes) in enumerate(extents):
        at = where[str(i)]
        assert found[at : at + nbytes] == content(SIZE)[offset : offset + nbytes]


def test_neighbours_in_a_file_are_one_read(
    path: str, desk: Callable[..., Desk], reads: list[tuple[int, int]]
) -> None:
    """Tensors of one group, at odd offsets, with less than a page between them."""
    extents = [(1000 + 6000 * i, 5000) for i in range(8)]
    cargo = cargo_of(path, *extents)
    assert_right(desk().read(cargo), cargo, *extents)
    assert reads == [(0, 12 * PAGE)]


def test_what_lies_apart_is_one_read_each(
    path: str, desk: Callable[..., Desk], reads: list[tuple[int, int]]
) -> None:
    extents = [(10 * PAGE, PAGE), (30 * PAGE + 5, 2 * PAGE), (SIZE - 9, 9)]
    cargo = cargo_of(path, *extents)
    assert_right(desk().read(cargo), cargo, *extents)
    assert sorted(reads) == [(10 * PAGE, PAGE), (30 * PAGE, 3 * PAGE), (50 * PAGE, PAGE)]


def test_a_group_is_cut_as_the_disk_of_its_file_wants_it(
    path: str,
    desk: Callable[..., Desk],
    reads: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    figures = DiskFigures(block=16 * PAGE, threads=2, read=1.0, write=1.0, measured=1.0)
    monkeypatch.setattr(disk, "known_figures", lambda descriptor: figures)
    cargo = cargo_of(path, (5, SIZE - 5))
    assert_right(desk().read(cargo), cargo, (5, SIZE - 5))
    assert sorted(reads) == [(i * 13 * PAGE, n * PAGE) for i, n in enumerate((13, 13, 13, 12))]


def test_several_threads_read_one_group(
    path: str, desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = DiskFigures(block=PAGE, threads=2, read=1.0, write=1.0, measured=1.0)
    monkeypatch.setattr(disk, "known_figures", lambda descriptor: figures)
    meeting = threading.Barrier(3)
    threads: set[int] = set()
    preadv = os.preadv

    def met(*arguments: Any) -> int:
        if threading.get_ident() not in threads:
            threads.add(threading.get_ident())
            meeting.wait(30)  # three are here at once, or nobody goes on
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", met)
    cargo = cargo_of(path, (0, SIZE))
    assert_right(desk(threads=3).read(cargo), cargo, (0, SIZE))
    assert len(threads) == 3


@pytest.mark.parametrize("broken", [0, 1, 3])
def test_one_read_that_fails_fails_the_group(
    broken: int, path: str, desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = DiskFigures(block=16 * PAGE, threads=2, read=1.0, write=1.0, measured=1.0)
    monkeypatch.setattr(disk, "known_figures", lambda descriptor: figures)
    preadv = os.preadv

    def failing(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if offset == broken * 13 * PAGE:
            raise OSError(errno.EIO, "Input/output error")
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(TransferError, match="Input/output") as error:
        desk().read(cargo_of(path, (5, SIZE - 5)))
    assert (error.value.key, error.value.path) == ("key", path)


def test_a_file_that_ends_too_early_fails_the_group(path: str, desk: Callable[..., Desk]) -> None:
    with pytest.raises(TruncatedFileError) as error:
        desk().read(cargo_of(path, (0, SIZE + 1)))
    assert error.value.key == "key"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(
    moves=st.lists(
        st.tuples(st.integers(0, 9000), st.integers(0, 9000), st.integers(1, 9000)), max_size=4
    )
)
def test_moves_that_overlap(
    moves: list[tuple[int, int, int]], path: str, desk: Callable[..., Desk]
) -> None:
    """As if what is moved had been put aside before."""
    cargo = cargo_of(path, (0, SIZE))
    assert cargo.source is not None
    cargo.source = replace(cargo.source, moves=tuple(Move(*move) for move in moves))
    expected = bytearray(content(SIZE))
    for src, dst, nbytes in moves:
        aside = bytes(expected[src : src + nbytes])
        expected[dst : dst + nbytes] = aside
    assert desk().read(cargo)[:SIZE] == expected


def test_a_move_out_of_bounds_touches_no_memory(path: str, desk: Callable[..., Desk]) -> None:
    cargo = cargo_of(path, (0, SIZE))
    assert cargo.source is not None
    cargo.source = replace(cargo.source, moves=(Move(0, cargo.spec.nbytes - 5, 100),))
    with pytest.raises(TransferError):
        desk().read(cargo)


@pytest.mark.parametrize("verify", ["always", "first", "never"])
def test_checksums_are_compared_as_often_as_asked(
    verify: str, path: str, desk: Callable[..., Desk]
) -> None:
    cargo = cargo_of(path, (0, SIZE))
    assert cargo.source is not None
    data, rng = content(SIZE), random.Random(0)
    cuts = sorted({0, SIZE, *(rng.randrange(SIZE) for _ in range(5))})
    checks = [Check(f"part {a}", a, b - a, digest(data[a:b])) for a, b in pairwise(cuts)]
    cargo.source = replace(cargo.source, checks=tuple(checks))
    assert desk(verify).read(cargo)[:SIZE] == data
    # If the file is what it was, only "always" compares again.
    right, wrong = cargo.source, replace(checks[0], digest="0" * len(checks[0].digest))
    cargo.source = replace(right, checks=(wrong, *checks[1:]))
    if verify == "always":
        with pytest.raises(CorruptDataError):
            desk(verify).read(cargo)
    else:
        assert desk(verify).read(cargo)[:SIZE] == data
    cargo.source = right
    with open(path, "r+b") as file:
        file.seek(cuts[2])
        file.write(bytes([data[cuts[2]] ^ 1]))
    if verify == "never":
        assert desk(verify).read(cargo)[:SIZE] != data
    else:
        with pytest.raises(CorruptDataError) as error:
            desk(verify).read(cargo)
        assert f"part {cuts[2]}" in str(error.value)
