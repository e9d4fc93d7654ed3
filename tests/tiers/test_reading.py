"""Groups read from files into memory: the number of reads, their threads, and the outcome."""

from __future__ import annotations

import errno
import functools
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.system_calls import Call, system_call
from tests.system.test_files import content
from tierstore.errors import CorruptDataError, TransferError, TruncatedFileError
from tierstore.model.groups import Check, Extent, FileTensor, GroupId, Move, Source, group_of, place
from tierstore.model.header import digest
from tierstore.model.moves import Copy
from tierstore.model.sizes import PAGE, round_up
from tierstore.model.tiers import Tier
from tierstore.system.file_table import FileTable
from tierstore.system.files import READ_BLOCK
from tierstore.tiers.entry import GroupEntry
from tierstore.tiers.mover import library_error
from tierstore.tiers.pages import fresh_memory
from tierstore.tiers.reading import DiskReader, NotCheckedError
from tierstore.tiers.workers import URGENT, Future, Workers

SIZE = 50 * PAGE + 777


@dataclass
class Desk:
    """Reads groups on a disk thread as the hop does, and reports failures as the mover does."""

    reader: DiskReader

    def read(self, entry: GroupEntry) -> bytes:
        """Return the group's memory once it has arrived. Raises the error of a failed read."""
        memory = fresh_memory(entry.spec.nbytes)
        workers = self.reader.workers

        def read() -> int:
            return self.reader.read(entry, memory.numpy().data)

        asked = Future(read, functools.partial(workers.submit, URGENT), workers.alive)
        try:
            assert entry.source is not None
            assert asked.wait() == entry.source.nbytes
        except Exception as error:
            copy = Copy(entry.group, entry.spec.nbytes, Tier.DISK, Tier.HOST)
            raise library_error(error, copy) from None
        return bytes(memory.numpy().data)


@pytest.fixture
def desk() -> Iterator[Callable[..., Desk]]:
    made = []

    def make(verify: str = "first", threads: int = 3) -> Desk:
        workers = Workers(threads, "test")
        made.append(workers)
        return Desk(DiskReader(FileTable("/nowhere"), workers, verify))

    yield make
    for workers in made:
        assert workers.stop(), "a thread is still reading"


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "data"
    file.write_bytes(content(SIZE))
    return str(file)


@pytest.fixture
def reads() -> Iterator[list[tuple[int, int]]]:
    """The offset and length of every read."""
    notes: list[tuple[int, int]] = []

    def note(call: Call) -> Any:
        _, buffers, offset = call.args
        notes.append((offset, len(buffers[0])))
        return call.go_on()

    with system_call("preadv", answer=note):
        yield notes


def cargo_of(path: str, *extents: tuple[int, int]) -> GroupEntry:
    """Return a group of byte tensors at (offset, length) in the file."""
    tensors = [
        FileTensor(str(i), "U8", (nbytes,), Extent(path, offset, nbytes))
        for i, (offset, nbytes) in enumerate(extents)
    ]
    placed = place(tensors)
    return GroupEntry(
        GroupId("key", 0),
        group_of("key", placed.specs, placed.end),
        Source(placed.segments, placed.moves),
    )


def assert_right(found: bytes, entry: GroupEntry, *extents: tuple[int, int]) -> None:
    where = {tensor.name: tensor.offset for tensor in entry.spec.tensors}
    for i, (offset, nbytes) in enumerate(extents):
        at = where[str(i)]
        assert found[at : at + nbytes] == content(SIZE)[offset : offset + nbytes]


def test_neighbours_in_a_file_are_one_read(
    path: str, desk: Callable[..., Desk], reads: list[tuple[int, int]]
) -> None:
    """Return tensors of one group, at odd offsets, with less than a page between them."""
    extents = [(1000 + 6000 * i, 5000) for i in range(8)]
    entry = cargo_of(path, *extents)
    assert_right(desk().read(entry), entry, *extents)
    assert reads == [(0, 12 * PAGE)]


def test_distant_tensors_are_one_read_each(
    path: str, desk: Callable[..., Desk], reads: list[tuple[int, int]]
) -> None:
    extents = [(10 * PAGE, PAGE), (30 * PAGE + 5, 2 * PAGE), (SIZE - 9, 9)]
    entry = cargo_of(path, *extents)
    assert_right(desk().read(entry), entry, *extents)
    assert sorted(reads) == [(10 * PAGE, PAGE), (30 * PAGE, 3 * PAGE), (50 * PAGE, PAGE)]


def test_large_group_is_read_in_equal_blocks(
    tmp_path: Path, desk: Callable[..., Desk], reads: list[tuple[int, int]]
) -> None:
    path, nbytes = tmp_path / "large", 2 * READ_BLOCK + PAGE
    with open(path, "wb") as file:
        file.truncate(nbytes)
    assert desk().read(cargo_of(str(path), (0, nbytes)))[:nbytes] == bytes(nbytes)
    length = round_up(nbytes // 3, PAGE)
    assert sorted(reads) == [(0, length), (length, length), (2 * length, nbytes - 2 * length)]


APART = [(i * 10 * PAGE, PAGE) for i in range(4)]
"""Each of these is one read."""


def test_several_threads_read_one_group(path: str, desk: Callable[..., Desk]) -> None:
    meeting = threading.Barrier(3)
    threads: set[int] = set()

    def meet() -> None:
        if threading.get_ident() not in threads:
            threads.add(threading.get_ident())
            meeting.wait(30)  # continues once three are here

    entry = cargo_of(path, *APART)
    with system_call("preadv", before=meet):
        assert_right(desk(threads=3).read(entry), entry, *APART)
    assert len(threads) == 3


@pytest.mark.parametrize("broken", [0, 1, 3])
def test_read_failure_fails_the_group(broken: int, path: str, desk: Callable[..., Desk]) -> None:
    start = APART[broken][0]
    with (
        system_call("preadv", fails_with=errno.EIO, when=lambda call: call.args[2] == start),
        pytest.raises(TransferError, match="Input/output") as error,
    ):
        desk().read(cargo_of(path, *APART))
    assert (error.value.key, error.value.path) == ("key", path)


def test_file_that_ends_early_fails_the_group(path: str, desk: Callable[..., Desk]) -> None:
    with pytest.raises(TruncatedFileError) as error:
        desk().read(cargo_of(path, (0, SIZE + 1)))
    assert error.value.key == "key"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(
    moves=st.lists(
        st.tuples(st.integers(0, 9000), st.integers(0, 9000), st.integers(1, 9000)), max_size=4
    )
)
def test_overlapping_moves_keep_the_bytes(
    moves: list[tuple[int, int, int]], path: str, desk: Callable[..., Desk]
) -> None:
    """As if the moved bytes had been copied aside first."""
    entry = cargo_of(path, (0, SIZE))
    assert entry.source is not None
    entry.source = replace(entry.source, moves=tuple(Move(*move) for move in moves))
    expected = bytearray(content(SIZE))
    for src, dst, nbytes in moves:
        aside = bytes(expected[src : src + nbytes])
        expected[dst : dst + nbytes] = aside
    assert desk().read(entry)[:SIZE] == expected


def test_move_out_of_bounds_touches_no_memory(path: str, desk: Callable[..., Desk]) -> None:
    entry = cargo_of(path, (0, SIZE))
    assert entry.source is not None
    entry.source = replace(entry.source, moves=(Move(0, entry.spec.nbytes - 5, 100),))
    with pytest.raises(TransferError):
        desk().read(entry)


@pytest.mark.parametrize("verify", ["always", "first", "never"])
def test_checksums_are_compared_as_often_as_asked(
    verify: str, path: str, desk: Callable[..., Desk]
) -> None:
    entry = cargo_of(path, (0, SIZE))
    assert entry.source is not None
    data, rng = content(SIZE), random.Random(0)
    cuts = sorted({0, SIZE, *(rng.randrange(SIZE) for _ in range(5))})
    checks = [Check(f"part {a}", a, b - a, digest(data[a:b])) for a, b in pairwise(cuts)]
    entry.source = replace(entry.source, checks=tuple(checks))
    read = desk(verify).read
    assert read(entry)[:SIZE] == data
    # While the file is unchanged, only "always" compares again.
    wrong = replace(checks[0], digest="0" * len(checks[0].digest))
    object.__setattr__(entry.source, "checks", (wrong, *checks[1:]))
    if verify == "always":
        with pytest.raises(CorruptDataError):
            read(entry)
    else:
        assert read(entry)[:SIZE] == data
    object.__setattr__(entry.source, "checks", tuple(checks))
    with open(path, "r+b") as file:
        file.seek(cuts[2])
        file.write(bytes([data[cuts[2]] ^ 1]))
    if verify == "never":
        assert read(entry)[:SIZE] != data
    else:
        with pytest.raises(CorruptDataError) as error:
            read(entry)
        assert f"part {cuts[2]}" in str(error.value)


# --- parts of a group -----------------------------------------------------------------------------


def checked_cargo(path: str) -> GroupEntry:
    """A group of two extents, with a checksum of the first."""
    entry = cargo_of(path, (100, 9 * PAGE), (30 * PAGE, 5 * PAGE + 7))
    assert entry.source is not None
    check = Check("0", 100, 9 * PAGE, digest(content(SIZE)[100 : 100 + 9 * PAGE]))
    entry.source = replace(entry.source, checks=(check,))
    return entry


@pytest.mark.parametrize("tile", [1, 2, 3, 7])
def test_parts_of_a_group_add_up_to_it(tile: int, path: str, desk: Callable[..., Desk]) -> None:
    reader, entry = desk().reader, checked_cargo(path)
    whole, parts = (fresh_memory(entry.spec.nbytes).numpy().data for _ in range(2))
    assert not reader.may_read_parts(entry), "it was never checked"
    nbytes = reader.read(entry, whole)
    assert reader.may_read_parts(entry)
    read = 0
    for offset in range(0, entry.spec.nbytes, tile * PAGE):
        read += reader.read_part(entry, parts[offset : offset + tile * PAGE], offset)
    assert read >= nbytes
    for segment in (entry.source or Source(())).segments:
        stop = segment.at + segment.extent.nbytes
        assert parts[segment.at : stop] == whole[segment.at : stop]


def test_part_of_a_changed_file_is_not_trusted(path: str, desk: Callable[..., Desk]) -> None:
    reader, entry = desk().reader, checked_cargo(path)
    memory = fresh_memory(entry.spec.nbytes).numpy().data
    reader.read(entry, memory)
    Path(path).write_bytes(b"x" * SIZE)
    with pytest.raises(NotCheckedError, match="'key'"):
        reader.read_part(entry, memory[:PAGE], 0)
    assert not reader.may_read_parts(entry)
    with pytest.raises(CorruptDataError):
        reader.read(entry, memory)


@pytest.mark.parametrize(
    ("verify", "checks", "may"),
    [
        ("always", True, False),
        ("always", False, False),
        ("first", False, True),
        ("never", True, True),
    ],
)
def test_unchecked_parts_are_read_separately(
    verify: str, checks: bool, may: bool, path: str, desk: Callable[..., Desk]
) -> None:
    entry = checked_cargo(path) if checks else cargo_of(path, (0, 9 * PAGE))
    assert desk(verify).reader.may_read_parts(entry) is may


def test_moved_bytes_are_read_as_a_whole(path: str, desk: Callable[..., Desk]) -> None:
    entry = cargo_of(path, (0, 9 * PAGE))
    assert entry.source is not None
    entry.source = replace(entry.source, moves=(Move(0, 9 * PAGE, PAGE),))
    assert not desk("never").reader.may_read_parts(entry)
    assert not desk().reader.may_read_parts(replace(entry, source=None))
