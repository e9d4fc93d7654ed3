"""Writing files: past the page cache where that is possible, whole, and to nobody else's file."""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tierstore.model.sizes import PAGE
from tierstore.system import files as disk
from tierstore.system.files import OpenForWriting, close_all, close_quietly, read_fully, write_all

SIZE = 3 * PAGE


@pytest.fixture
def data() -> memoryview:
    """Page-aligned memory with something in it."""
    memory = mmap.mmap(-1, SIZE)
    memory.write(random.Random(1).randbytes(SIZE))
    return memoryview(memory)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "target"
    path.touch()
    return path


def opened(path: Path) -> OpenForWriting:
    return OpenForWriting(os.open(path, os.O_RDWR), str(path))


def is_open(descriptor: int | None) -> bool:
    try:
        os.fstat(-1 if descriptor is None else descriptor)
    except OSError:
        return False
    return True


Writes = list[tuple[int, int]]


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Writes:
    """Descriptor and offset of every write."""
    noted: Writes = []
    pwrite = os.pwrite

    def note(descriptor: int, data: memoryview, offset: int) -> int:
        noted.append((descriptor, offset))
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", note)
    return noted


def no_direct_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_open = os.open

    def refusing(path: str, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "refused")
        return plain_open(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", refusing)


def takes_no_direct_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "direct_alignment", lambda _: 0)


@pytest.mark.parametrize("kind", [no_direct_opens, takes_no_direct_writes])
def test_where_nothing_is_written_past_the_cache_it_is_written_through_it(
    kind: Callable[[pytest.MonkeyPatch], None],
    target: Path,
    data: memoryview,
    writes: Writes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind(monkeypatch)
    file = opened(target)
    file.write(data, 0)
    assert {descriptor for descriptor, _ in writes} == {file.cached}
    file.close()
    assert not is_open(file.cached)
    assert target.read_bytes() == bytes(data)


def with_direct(monkeypatch: pytest.MonkeyPatch, path: Path) -> OpenForWriting:
    """A file that has a descriptor of its own for direct writes, on any file system."""
    plain_open = os.open
    monkeypatch.setattr(
        os, "open", lambda path, flags, *a, **o: plain_open(path, flags & ~os.O_DIRECT, *a, **o)
    )
    monkeypatch.setattr(disk, "direct_alignment", lambda _: PAGE)
    file = opened(path)
    assert file._direct is not None
    return file


def test_what_the_disk_takes_past_the_cache_is_not_written_twice(
    target: Path, data: memoryview, writes: Writes, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = with_direct(monkeypatch, target)
    file.write(data, PAGE)
    assert {descriptor for descriptor, _ in writes} == {file._direct}
    file.close()
    assert not is_open(file.cached) and not is_open(file._direct)
    assert target.read_bytes() == bytes(PAGE) + bytes(data)


def failing(monkeypatch: pytest.MonkeyPatch, descriptor: int | None, number: int) -> list[int]:
    """From now on, writes to `descriptor` fail. Their offsets."""
    refused: list[int] = []
    pwrite = os.pwrite

    def fail(to: int, data: memoryview, offset: int) -> int:
        if to == descriptor:
            refused.append(offset)
            raise OSError(number, os.strerror(number))
        return pwrite(to, data, offset)

    monkeypatch.setattr(os, "pwrite", fail)
    return refused


def test_a_file_system_that_takes_the_flag_and_refuses_the_write_is_asked_once(
    target: Path, data: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = with_direct(monkeypatch, target)
    refused = failing(monkeypatch, file._direct, errno.EINVAL)
    for offset in (0, SIZE):
        file.write(data, offset)
    assert refused == [0]
    assert is_open(file._direct), "another thread may be about to write to that number"
    file.close()
    assert target.read_bytes() == 2 * bytes(data)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_direct_write_that_fails_is_not_tried_through_the_cache(
    number: int, target: Path, data: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = with_direct(monkeypatch, target)
    failing(monkeypatch, file._direct, number)
    with pytest.raises(OSError) as error:
        file.write(data, 0)
    assert error.value.errno == number
    file.close()
    assert target.read_bytes() == b""


def test_a_disk_that_writes_nothing_is_an_error_and_no_endless_loop(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(OSError, match="writes nothing") as error:
        write_all(0, memoryview(b"some"), 0)
    assert error.value.errno == errno.EIO


# Closing -----------------------------------------------------------------------------------------


def test_what_is_closed_is_written_to_no_more(target: Path, data: memoryview) -> None:
    file = opened(target)
    file.close()
    with pytest.raises(OSError, match="the file was closed") as error:
        file.write(data, 0)
    assert error.value.errno == errno.EBADF
    file.close()  # once more: nothing is closed that may be another's by now


def test_a_file_that_is_closed_while_it_is_written_to_stays_open_until_then(
    target: Path, data: memoryview
) -> None:
    file = opened(target)
    with file.in_use():
        with file.in_use():
            file.close()
            assert is_open(file.cached)
        assert is_open(file.cached), "one still uses it"
    assert not is_open(file.cached)


def test_a_file_that_nobody_writes_to_is_closed_at_once(target: Path) -> None:
    file = opened(target)
    with file.in_use():
        pass
    assert is_open(file.cached), "nobody has closed it"
    file.close()
    assert not is_open(file.cached)


def test_many_threads_write_while_somebody_closes(target: Path, data: memoryview) -> None:
    file = opened(target)
    started, refused = threading.Event(), []

    def write(place: int) -> None:
        for _ in range(200):
            try:
                file.write(data, place * SIZE)
                started.set()
            except OSError as error:
                refused.append(error.errno)

    threads = [threading.Thread(target=write, args=(place,)) for place in range(3)]
    for thread in threads:
        thread.start()
    assert started.wait(60)
    file.close()
    for thread in threads:
        thread.join(60)
    assert set(refused) <= {errno.EBADF}, "something else than the closed file was written to"
    assert not is_open(file.cached)


def test_every_descriptor_is_closed_though_some_fail(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptors = [os.open(target, os.O_RDONLY) for _ in range(4)]
    close = os.close

    def fail(descriptor: int) -> None:
        close(descriptor)
        if descriptor in descriptors[1:3]:
            raise OSError(errno.EIO, f"number {descriptors.index(descriptor)}")

    monkeypatch.setattr(os, "close", fail)
    with pytest.raises(OSError, match="number 1"):
        close_all([None, *descriptors])
    assert not any(map(is_open, descriptors))
    close_all([None])


def test_what_was_only_read_is_closed_without_a_word(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptor, close = os.open(target, os.O_RDONLY), os.close

    def fail(number: int) -> None:
        close(number)
        raise OSError(errno.EIO, "on the network")

    monkeypatch.setattr(os, "close", fail)
    close_quietly(descriptor)
    assert not is_open(descriptor)


@pytest.mark.parametrize("most", [1, 7, 100])
def test_a_file_is_read_to_its_end_in_whatever_pieces_it_comes(
    most: int, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target.write_bytes(bytes(range(50)))
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda d, n, offset: pread(d, min(n, most), offset))
    descriptor = os.open(target, os.O_RDONLY)
    assert read_fully(descriptor, 40, 5) == bytes(range(5, 45))
    assert read_fully(descriptor, 60, 5) == bytes(range(5, 50))
    os.close(descriptor)
