"""The table of open files under pressure: names that change meanwhile, too few descriptors."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tierstore.model.sizes import PAGE
from tierstore.system import files as disk
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


def refusing_opens(monkeypatch: pytest.MonkeyPatch, number: int, times: Iterator[bool]) -> None:
    plain_open = os.open

    def refuse(path: str, flags: int, *args: Any, **options: Any) -> int:
        if not flags & os.O_DIRECT and next(times, False):
            raise OSError(number, os.strerror(number))
        return plain_open(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", refuse)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_without_a_descriptor_left_files_that_nobody_reads_are_closed(
    number: int, paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = FileTable("/nowhere")
    table.get(paths[0])
    refusing_opens(monkeypatch, number, iter([True]))
    assert start_of(table.get(paths[1])) == b"second"
    assert start_of(table.get(paths[0])) == b"first"


@pytest.mark.parametrize(
    ("number", "others"), [(errno.EMFILE, False), (errno.EACCES, True), (errno.EIO, True)]
)
def test_an_open_that_would_fail_again_is_not_tried_again(
    number: int, others: bool, paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = FileTable("/nowhere")
    kept = table.get(paths[0]) if others else None
    refusing_opens(monkeypatch, number, iter([True]))
    with pytest.raises(OSError) as error:
        table.get(paths[1])
    assert error.value.errno == number
    assert kept is None or table.get(paths[0]) is kept, "others were closed for nothing"


@pytest.mark.parametrize("change", ["forget", "expect"])
def test_a_file_whose_name_leads_elsewhere_while_it_is_opened_is_not_kept(
    change: str, paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asked before may have the old one; whoever asks afterwards may not."""
    table = FileTable("/nowhere")
    real = disk.direct_alignment

    def replaced(descriptor: int) -> Any:
        monkeypatch.setattr(disk, "direct_alignment", real)
        os.replace(paths[1], paths[0])
        getattr(table, change)(paths[0])
        return real(descriptor)

    monkeypatch.setattr(disk, "direct_alignment", replaced)
    assert start_of(table.get(paths[0])) == b"first"
    assert start_of(table.get(paths[0])) == b"second"


def test_two_who_open_a_file_at_once_have_the_same(
    paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = FileTable("/nowhere")
    real, others = disk.direct_alignment, []

    def meanwhile(descriptor: int) -> Any:
        monkeypatch.setattr(disk, "direct_alignment", real)
        others.append(table.get(paths[0]))
        return real(descriptor)

    monkeypatch.setattr(disk, "direct_alignment", meanwhile)
    assert table.get(paths[0]) is others[0] is table.get(paths[0])


def test_closing_says_whether_there_was_anything_to_close(paths: list[str]) -> None:
    table = FileTable("/nowhere")
    assert not table.close()
    table.get(paths[0])
    assert table.close()
    assert not table.close()


def test_advice_that_is_refused_loses_no_bytes(
    paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(disk, "direct_alignment", lambda _: 0)
    monkeypatch.setattr(os, "posix_fadvise", refuse)
    file = DataFile(paths[0], follow_links=True)
    assert start_of(file) == b"first"


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_a_file_says_whether_it_is_read_past_the_cache(
    number: int, paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until that was refused once: not for alignment, but for whatever else fails there."""
    plain_open, preadv = os.open, os.preadv
    monkeypatch.setattr(disk, "direct_alignment", lambda _: PAGE)
    monkeypatch.setattr(  # on any file system
        os, "open", lambda path, flags, *a, **o: plain_open(path, flags & ~os.O_DIRECT, *a, **o)
    )
    file = DataFile(paths[0], follow_links=True)
    assert file.direct

    def refuse(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if descriptor == file._direct:
            raise OSError(number, os.strerror(number))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", refuse)
    if number == errno.EINVAL:
        assert start_of(file) == b"first"
        assert not file.direct
    else:
        with pytest.raises(OSError, match="Input/output"):
            start_of(file)
        assert file.direct
    monkeypatch.setattr(disk, "direct_alignment", lambda _: 0)
    assert not DataFile(paths[0], follow_links=True).direct
