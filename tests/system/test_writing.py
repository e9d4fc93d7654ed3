"""Files are written completely, past the page cache where possible, and no others are touched."""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.helpers.files import is_open
from tests.helpers.system_calls import (
    Call,
    accepting_direct_opens,
    rejecting_opens,
    report_alignment,
    system_call,
)
from tierstore.model.sizes import PAGE
from tierstore.system.files import OpenForWriting, close_all, close_quietly, read_fully, write_all

SIZE = 3 * PAGE


@pytest.fixture
def data() -> memoryview:
    """Return page-aligned memory with content."""
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


def no_direct_opens() -> AbstractContextManager[list[Call]]:
    return rejecting_opens(os.O_DIRECT)


def takes_no_direct_writes() -> AbstractContextManager[list[Call]]:
    return report_alignment(0)


@pytest.mark.parametrize("kind", [no_direct_opens, takes_no_direct_writes])
def test_write_without_direct_io_goes_through_the_cache(
    kind: Callable[[], AbstractContextManager[list[Call]]], target: Path, data: memoryview
) -> None:
    with kind(), system_call("pwrite") as writes:
        file = opened(target)
        file.write(data, 0)
    assert {call.args[0] for call in writes} == {file.cached}
    file.close()
    assert not is_open(file.cached)
    assert target.read_bytes() == bytes(data)


def with_direct(path: Path) -> OpenForWriting:
    """Open a file with a separate descriptor for direct writes, on any file system."""
    with report_alignment(PAGE), accepting_direct_opens() as opens:
        file = opened(path)
    assert len(opens) == 2
    return file


def test_direct_write_is_not_repeated_through_the_cache(target: Path, data: memoryview) -> None:
    file = with_direct(target)
    with system_call("pwrite") as writes:
        file.write(data, PAGE)
    [direct] = {call.args[0] for call in writes}
    assert direct != file.cached
    file.close()
    assert not is_open(file.cached) and not is_open(direct)
    assert target.read_bytes() == bytes(PAGE) + bytes(data)


def failing(file: OpenForWriting, number: int) -> AbstractContextManager[list[Call]]:
    """Make direct writes to `file` fail inside the context."""
    return system_call("pwrite", fails_with=number, when=lambda call: call.args[0] != file.cached)


def test_refused_direct_write_is_tried_once(target: Path, data: memoryview) -> None:
    file = with_direct(target)
    with failing(file, errno.EINVAL) as refused:
        for offset in (0, SIZE):
            file.write(data, offset)
    [[direct, _, offset]] = [call.args for call in refused]
    assert offset == 0
    assert is_open(direct), "another thread may be about to write to it"
    file.close()
    assert target.read_bytes() == 2 * bytes(data)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_failed_direct_write_is_not_retried_through_the_cache(
    number: int, target: Path, data: memoryview
) -> None:
    file = with_direct(target)
    with failing(file, number), pytest.raises(OSError) as error:
        file.write(data, 0)
    assert error.value.errno == number
    file.close()
    assert target.read_bytes() == b""


def test_disk_writing_nothing_raises_without_looping() -> None:
    with (
        system_call("pwrite", returns=0),
        pytest.raises(OSError, match="wrote 0 bytes") as error,
    ):
        write_all(0, memoryview(b"some"), 0)
    assert error.value.errno == errno.EIO


# Closing -----------------------------------------------------------------------------------------


def test_closed_file_is_not_written_to(target: Path, data: memoryview) -> None:
    file = opened(target)
    file.close()
    with pytest.raises(OSError, match="the file was closed") as error:
        file.write(data, 0)
    assert error.value.errno == errno.EBADF
    file.close()  # a second time: a reused descriptor must stay open


def test_file_closed_during_a_write_stays_open_until_it_ends(
    target: Path, data: memoryview
) -> None:
    file = opened(target)
    with file.in_use():
        with file.in_use():
            file.close()
            assert is_open(file.cached)
        assert is_open(file.cached), "a writer still uses it"
    assert not is_open(file.cached)


def test_file_without_writers_is_closed_at_once(target: Path) -> None:
    file = opened(target)
    with file.in_use():
        pass
    assert is_open(file.cached), "it was not closed by its user"
    file.close()
    assert not is_open(file.cached)


def test_many_threads_write_during_a_close(target: Path, data: memoryview) -> None:
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
    assert set(refused) <= {errno.EBADF}, "a write failed for another reason"
    assert not is_open(file.cached)


def test_every_descriptor_is_closed_though_some_fail(target: Path) -> None:
    descriptors = [os.open(target, os.O_RDONLY) for _ in range(4)]
    fail = system_call(
        "close", fails_with=errno.EIO, when=lambda call: call.args[0] in descriptors[1:3]
    )
    with fail as failed, pytest.raises(OSError, match="Input/output"):
        close_all([None, *descriptors])
    assert len(failed) == 2
    assert not any(map(is_open, descriptors))
    close_all([None])


def test_first_of_several_close_errors_is_raised(target: Path) -> None:
    descriptors = [os.open(target, os.O_RDONLY) for _ in range(2)]
    with (
        system_call("close", fails_with=errno.EIO, at=1),
        system_call("close", fails_with=errno.EDQUOT, at=2),
        pytest.raises(OSError) as error,
    ):
        close_all(descriptors)
    assert error.value.errno == errno.EIO
    assert not any(map(is_open, descriptors))


def test_read_only_file_is_closed_silently(target: Path) -> None:
    descriptor = os.open(target, os.O_RDONLY)
    with system_call("close", fails_with=errno.EIO) as failed:
        close_quietly(descriptor)
    assert failed
    assert not is_open(descriptor)


@pytest.mark.parametrize("most", [1, 7, 100])
def test_file_is_read_to_its_end_in_any_pieces(most: int, target: Path) -> None:
    target.write_bytes(bytes(range(50)))
    descriptor = os.open(target, os.O_RDONLY)
    with system_call("pread", short=most):
        assert read_fully(descriptor, 40, 5) == bytes(range(5, 45))
        assert read_fully(descriptor, 60, 5) == bytes(range(5, 50))
    os.close(descriptor)
