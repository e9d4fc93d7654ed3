"""The table of open files under pressure: names that change meanwhile, too few descriptors."""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.helpers.system_calls import Call, statx_tells, system_call, taking_direct_opens
from tierstore.model.sizes import PAGE
from tierstore.system.files import DataFile, FileTable


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    found = [tmp_path / name for name in ("first", "second")]
    for path in found:
        path.write_bytes(path.name.encode().ljust(PAGE, b"."))
    return [str(path) for path in found]


def start_of(file: DataFile) -> bytes:
    room = memoryview(mmap.mmap(-1, PAGE))
    file.read_at_least(room, 0, PAGE)
    return bytes(room).rstrip(b".")


def one_open_fails(number: int) -> AbstractContextManager[list[Call]]:
    return system_call("open", fails_with=number, when=lambda call: not call.direct, at=1)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_without_a_descriptor_left_files_that_nobody_reads_are_closed(
    number: int, paths: list[str]
) -> None:
    table = FileTable("/nowhere")
    table.get(paths[0])
    with one_open_fails(number) as failed:
        assert start_of(table.get(paths[1])) == b"second"
    assert failed
    assert start_of(table.get(paths[0])) == b"first"


@pytest.mark.parametrize(
    ("number", "others"), [(errno.EMFILE, False), (errno.EACCES, True), (errno.EIO, True)]
)
def test_an_open_that_would_fail_again_is_not_tried_again(
    number: int, others: bool, paths: list[str]
) -> None:
    table = FileTable("/nowhere")
    kept = table.get(paths[0]) if others else None
    with one_open_fails(number), pytest.raises(OSError) as error:
        table.get(paths[1])
    assert error.value.errno == number
    assert kept is None or table.get(paths[0]) is kept, "others were closed for nothing"


@pytest.mark.parametrize("change", ["forget", "expect"])
def test_a_file_whose_name_leads_elsewhere_while_it_is_opened_is_not_kept(
    change: str, paths: list[str]
) -> None:
    """Whoever asked before may have the old one; whoever asks afterwards may not."""
    table = FileTable("/nowhere")

    def replace() -> None:
        os.replace(paths[1], paths[0])
        getattr(table, change)(paths[0])

    with system_call("statx", before=replace, at=1):
        assert start_of(table.get(paths[0])) == b"first"
    assert start_of(table.get(paths[0])) == b"second"


def test_two_who_open_a_file_at_once_have_the_same(paths: list[str]) -> None:
    table, others = FileTable("/nowhere"), []
    with system_call("statx", before=lambda: others.append(table.get(paths[0])), at=1):
        assert table.get(paths[0]) is others[0] is table.get(paths[0])


def test_closing_says_whether_there_was_anything_to_close(paths: list[str]) -> None:
    table = FileTable("/nowhere")
    assert not table.close()
    table.get(paths[0])
    assert table.close()
    assert not table.close()


def test_advice_that_is_refused_loses_no_bytes(paths: list[str]) -> None:
    with statx_tells(0), system_call("posix_fadvise", fails_with=errno.EINVAL) as refused:
        assert start_of(DataFile(paths[0], follow_links=True)) == b"first"
    assert refused


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_a_file_says_whether_it_is_read_past_the_cache(number: int, paths: list[str]) -> None:
    """Until that was refused once: not for alignment, but for whatever else fails there."""
    with statx_tells(PAGE), taking_direct_opens():
        file = DataFile(paths[0], follow_links=True)
    assert file.direct
    with system_call("preadv", fails_with=number, at=1) as refused:
        if number == errno.EINVAL:
            assert start_of(file) == b"first"
            assert not file.direct
        else:
            with pytest.raises(OSError, match="Input/output"):
                start_of(file)
            assert file.direct
    assert refused
    with statx_tells(0):
        assert not DataFile(paths[0], follow_links=True).direct
