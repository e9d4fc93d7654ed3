"""Reading and writing files: direct and cached, in pieces of any size, and within bounds."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.files import open_files
from tests.helpers.system_calls import (
    Call,
    rejecting_opens,
    report_alignment,
    system_call,
    without_libc_function,
)
from tierstore.errors import (
    DiskFullError,
    TransferError,
    TruncatedFileError,
)
from tierstore.model.groups import Extent, Segment, Source
from tierstore.model.sizes import PAGE, round_up
from tierstore.system.file_table import MAX_OPEN_FILES, FileTable
from tierstore.system.files import (
    DataFile,
    close_quietly,
    direct_alignment,
    parts,
    pieces,
    transfer_error,
    write_all,
)

SIZE = 5 * PAGE + 123


def content(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def room(nbytes: int) -> memoryview:
    """Return page-aligned memory."""
    return memoryview(mmap.mmap(-1, max(round_up(nbytes, PAGE), PAGE)))


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "data"
    file.write_bytes(content(SIZE))
    return str(file)


def read(file: DataFile, offset: int, nbytes: int) -> bytes:
    """Read as hops do: whole pages around the needed bytes."""
    lead = offset % PAGE
    memory = room(lead + nbytes)
    got = file.read_at_least(memory, offset - lead, lead + nbytes)
    assert got >= lead + nbytes
    return bytes(memory[lead : lead + nbytes])


@pytest.fixture
def direct_reads() -> Iterator[list[bool]]:
    """Record for every `preadv` whether it bypassed the page cache."""
    notes: list[bool] = []

    def note(call: Call) -> Any:
        notes.append(call.direct)
        return call.go_on()

    with system_call("preadv", answer=note):
        yield notes


def open_file(path: str) -> DataFile:
    return DataFile(path, follow_links=True)


def knows_direct_reads(path: str) -> bool:
    return open_file(path).direct


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ends=st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)))
def test_any_part_of_a_file_is_read(ends: tuple[int, int], path: str) -> None:
    start, stop = sorted(ends)
    assert read(open_file(path), start, stop - start) == content(SIZE)[start:stop]


def test_aligned_reads_bypass_the_page_cache(path: str, direct_reads: list[bool]) -> None:
    if not knows_direct_reads(path):
        pytest.skip("this file system knows no direct reads")
    file = open_file(path)
    assert read(file, 0, SIZE) == content(SIZE)
    assert direct_reads[0]
    direct_reads.clear()
    memory = room(2 * PAGE)
    file.read_at_least(memory[: PAGE + 1], 0, PAGE + 1)  # not a whole number of pages
    assert direct_reads == [False]
    assert bytes(memory[: PAGE + 1]) == content(SIZE)[: PAGE + 1]


def test_file_system_refusing_direct_opens_is_read(path: str, direct_reads: list[bool]) -> None:
    with rejecting_opens(os.O_DIRECT), system_call("posix_fadvise") as advice:
        assert read(open_file(path), 100, 3 * PAGE) == content(SIZE)[100 : 100 + 3 * PAGE]
    assert direct_reads == [False]
    assert {call.args[3] for call in advice} == {os.POSIX_FADV_DONTNEED}
    given_back = sum(call.args[2] for call in advice)
    assert given_back >= 3 * PAGE, "the read bytes stay in the page cache"


def test_file_system_refusing_direct_reads_is_read(path: str) -> None:
    if not knows_direct_reads(path):
        pytest.skip("this file system knows no direct reads")
    file = open_file(path)
    with system_call("preadv", fails_with=errno.EINVAL, when=lambda call: call.direct) as refused:
        for _ in range(3):
            assert read(file, 0, 2 * PAGE) == content(SIZE)[: 2 * PAGE]
    assert len(refused) == 1, "it was tried again"
    # Another thread may be about to read: the descriptor must not be reused for another file.
    direct = refused[0].args[0]
    assert os.readlink(f"/proc/self/fd/{direct}") == path
    del file
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(direct)


@pytest.mark.parametrize("most", [1, 511, 4095, 4096, 4097, 9000])
def test_short_reads_are_continued(path: str, most: int) -> None:
    """As after a signal, on a network file system, or across the end of an extent."""
    with system_call("preadv", short=most) as calls:
        assert read(open_file(path), 77, 2 * PAGE) == content(SIZE)[77 : 77 + 2 * PAGE]
    assert len(calls) >= 2 * PAGE // most


def test_direct_read_stopping_inside_a_page_continues(path: str, direct_reads: list[bool]) -> None:
    if not knows_direct_reads(path):
        pytest.skip("this file system knows no direct reads")
    stops = system_call("preadv", answer=lambda call: min(call.go_on(), 1000), at=1)
    with stops:
        assert read(open_file(path), 0, 3 * PAGE) == content(SIZE)[: 3 * PAGE]
    assert direct_reads == [True, False]


@pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE, PAGE + 1, SIZE - 1])
def test_truncated_file_raises(path: str, size: int) -> None:
    file = open_file(path)
    os.truncate(path, size)
    with pytest.raises(TruncatedFileError) as error:
        read(file, 0, SIZE)
    assert error.value.path == path
    for part in (path, f"byte {size:,}", f"{SIZE - size:,} bytes"):
        assert part in str(error.value)
    if size:
        assert read(file, 0, size) == content(SIZE)[:size]


def test_disk_error_is_not_mistaken_for_another(path: str) -> None:
    with (
        system_call("preadv", fails_with=errno.EIO),
        pytest.raises(OSError, match="Input/output"),
    ):
        read(open_file(path), 0, PAGE)


def test_links_are_followed_only_where_allowed(path: str, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(path)
    assert read(DataFile(str(link), follow_links=True), 0, 9) == content(SIZE)[:9]
    with pytest.raises(OSError) as error:
        DataFile(str(link), follow_links=False)
    assert error.value.errno == errno.ELOOP


def test_unused_files_are_closed(path: str, tmp_path: Path) -> None:
    file = open_file(path)
    assert len(open_files(tmp_path)) in (1, 2)
    del file
    gc.collect()
    assert len(open_files(tmp_path)) == 0


# Cutting -----------------------------------------------------------------------------------------


@st.composite
def sources(draw: st.DrawFn) -> Source:
    """Return segments as `place` does: at their file offset modulo the page, one after another."""
    segments, here = [], 0
    for number in range(draw(st.integers(1, 4))):
        offset = draw(st.integers(0, 10 * PAGE))
        nbytes = draw(st.integers(1, 6 * PAGE))
        at = here + offset % PAGE
        segments.append(Segment(Extent(f"file{number}", offset, nbytes), at))
        here = round_up(at + nbytes, PAGE)
    return Source(tuple(segments))


@given(sources(), st.sampled_from([PAGE, 2 * PAGE, 8 * PAGE]))
def test_pieces_are_whole_pages_that_cover_everything_once(source: Source, chunk: int) -> None:
    end = max(round_up(s.at + s.extent.nbytes, PAGE) for s in source.segments)
    place_in_memory: dict[int, tuple[str, int]] = {}
    for piece in pieces(source, chunk):
        assert piece.offset % PAGE == piece.at % PAGE == piece.nbytes % PAGE == 0
        assert 0 < piece.needed <= piece.nbytes <= chunk
        assert piece.at >= 0
        assert piece.at + piece.nbytes <= end
        for page in range(0, piece.nbytes, PAGE):
            assert piece.at + page not in place_in_memory, "written twice"
            place_in_memory[piece.at + page] = (piece.path, piece.offset + page)
    for segment in source.segments:
        for byte in (0, segment.extent.nbytes - 1, segment.extent.nbytes // 2):
            where = segment.at + byte
            path, offset = place_in_memory[where - where % PAGE]
            assert (path, offset + where % PAGE) == (
                segment.extent.path,
                segment.extent.offset + byte,
            )


@given(st.integers(0, 40 * PAGE), st.integers(1, 12))
def test_parts_are_few_and_equal(nbytes: int, pages: int) -> None:
    block = pages * PAGE
    found = list(parts(nbytes, block))
    assert len(found) == -(-nbytes // block), "more than needed"
    here = 0
    for offset, length in found:
        assert offset == here
        assert offset % PAGE == 0
        assert 0 < length <= block
        here += length
    assert here == nbytes
    if found:
        assert len({length for _, length in found[:-1]} | {max(n for _, n in found)}) == 1
        assert found[0][1] - found[-1][1] < len(found) * PAGE


# Properties of disks -----------------------------------------------------------------------------


def test_direct_read_alignment_is_asked_of_the_system(path: str) -> None:
    with open(path, "rb") as file:
        told = direct_alignment(file.fileno())
    if told is None:
        pytest.skip("this system, or this kind of file system, does not tell")
    if told == 0:
        assert not knows_direct_reads(path)
        return
    assert told & (told - 1) == 0, "not a power of two"
    memory = room(2 * max(told, PAGE))
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    assert os.preadv(descriptor, [memory[:told]], 0) == min(told, SIZE)
    assert bytes(memory[: min(told, SIZE)]) == content(SIZE)[:told]
    os.close(descriptor)


def test_direct_read_alignment_unknown_is_a_page(path: str) -> None:
    untold = (
        without_libc_function("statx"),
        system_call("statx", fails_with=errno.ENOSYS),
        report_alignment(512, mask=0),
    )
    with open(path, "rb") as file:
        for system in untold:
            with system:
                assert direct_alignment(file.fileno()) is None
                assert read(open_file(path), 100, 3 * PAGE) == content(SIZE)[100 : 100 + 3 * PAGE]


def test_file_without_direct_reads_is_read_buffered(path: str, direct_reads: list[bool]) -> None:
    """Some file systems accept the flag and still read through the cache."""
    with report_alignment(0):
        assert read(open_file(path), 0, 2 * PAGE) == content(SIZE)[: 2 * PAGE]
    assert direct_reads == [False]


def test_disk_alignment_above_a_page_is_respected(path: str, direct_reads: list[bool]) -> None:
    if not knows_direct_reads(path):
        pytest.skip("this file system knows no direct reads")
    with report_alignment(4 * PAGE):
        file = open_file(path)
    assert read(file, PAGE, 2 * PAGE) == content(SIZE)[PAGE : 3 * PAGE]
    assert read(file, 0, 4 * PAGE) == content(SIZE)[: 4 * PAGE]
    assert direct_reads == [False, True]


# The table ---------------------------------------------------------------------------------------


@pytest.fixture
def many(tmp_path: Path) -> list[str]:
    paths = []
    for number in range(2 * MAX_OPEN_FILES):
        file = tmp_path / f"shard{number}"
        file.write_bytes(content(100, number))
        paths.append(str(file))
    return paths


def test_open_files_are_bounded(many: list[str], tmp_path: Path) -> None:
    table = FileTable("/nowhere")
    held = table.get(many[0])
    for round_trip in range(2):
        for number, path in enumerate(many):
            assert read(table.get(path), 0, 100) == content(100, number), round_trip
            assert len(open_files(tmp_path)) <= 2 * (MAX_OPEN_FILES + 1)
    assert read(held, 0, 100) == content(100, 0), "a file in use was closed"
    del held
    table.close()
    gc.collect()
    assert len(open_files(tmp_path)) == 0


def test_file_in_use_is_opened_once(path: str) -> None:
    table = FileTable("/nowhere")
    assert table.get(path) is table.get(path)


def test_renamed_file_is_read_anew(path: str, tmp_path: Path) -> None:
    table = FileTable("/nowhere")
    old = table.get(path)
    (tmp_path / "new").write_bytes(content(SIZE, 1))
    os.replace(tmp_path / "new", path)
    assert read(table.get(path), 0, 100) == content(SIZE)[:100]
    table.forget(path)
    assert read(table.get(path), 0, 100) == content(SIZE, 1)[:100]
    assert read(old, 0, 100) == content(SIZE)[:100]


def test_links_in_the_stores_directory_are_not_followed(path: str, tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    for directory in (own, other):
        directory.mkdir()
        (directory / "link").symlink_to(path)
    table = FileTable(str(own))
    assert read(table.get(str(other / "link")), 0, 9) == content(SIZE)[:9]
    with pytest.raises(OSError) as error:
        table.get(str(own / "link"))
    assert error.value.errno == errno.ELOOP


def test_many_threads_share_a_table(many: list[str], tmp_path: Path) -> None:
    table = FileTable("/nowhere")
    wrong: list[str] = []

    def use(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(300):
            number = rng.randrange(len(many))
            if read(table.get(many[number]), 0, 100) != content(100, number):
                wrong.append(many[number])
            if rng.random() < 0.2:
                table.forget(many[rng.randrange(len(many))])

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    table.close()
    gc.collect()
    assert len(open_files(tmp_path)) == 0


# Writing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 1000, PAGE])
def test_short_writes_are_continued(most: int, tmp_path: Path) -> None:
    with system_call("pwrite", short=most), open(tmp_path / "file", "wb") as file:
        write_all(file.fileno(), memoryview(content(2 * PAGE)), 10)
    assert (tmp_path / "file").read_bytes() == bytes(10) + content(2 * PAGE)


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, DiskFullError), (errno.EDQUOT, DiskFullError), (errno.EIO, TransferError)],
)
def test_system_errors_name_the_file_and_the_remedy(number: int, kind: type[TransferError]) -> None:
    cause = OSError(number, os.strerror(number))
    error = transfer_error(cause, "writing to", key="k", path="/some/file")
    assert type(error) is kind
    assert (error.key, error.path, error.__cause__) == ("k", "/some/file", cause)
    assert "/some/file" in str(error)
    assert os.strerror(number) in str(error)


@pytest.mark.parametrize("direct", [True, False])
def test_passed_file_is_read_by_its_descriptors(path: str, direct: bool) -> None:
    opened = DataFile(path, follow_links=True)
    cached, *past_the_cache = map(os.dup, opened.descriptors)
    if not direct:
        for descriptor in past_the_cache:
            os.close(descriptor)
        past_the_cache = []
    os.unlink(path)  # it is not opened by name
    passed = DataFile.passed(
        "as they call it", cached, next(iter(past_the_cache), None), close_quietly
    )
    assert passed.descriptors == (cached, *past_the_cache)
    assert passed.direct == bool(past_the_cache)
    assert read(passed, PAGE, 9) == content(SIZE)[PAGE : PAGE + 9]
    assert passed.stamp() == opened.stamp()
    with pytest.raises(TruncatedFileError, match="as they call it ends"):
        read(passed, SIZE, 9)
