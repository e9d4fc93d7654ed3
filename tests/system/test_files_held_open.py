"""Files that are open while disks do not answer, names change, and descriptors run out."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.threads import hold_calls
from tests.store.helpers import PATIENCE, join
from tierstore.model.sizes import PAGE
from tierstore.system import files as disk
from tierstore.system.files import FileTable, OpenForWriting, close_all, read_fully, write_all
from tierstore.tiers.spill import Spill


def held_open(path: str, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, ...]:
    """Opening `path` takes until the second event. The first tells that somebody does."""
    came, may_go = threading.Event(), threading.Event()
    plain = os.open

    def slow(name: Any, *args: Any, **options: Any) -> int:
        descriptor = plain(name, *args, **options)
        if name == path:
            came.set()
            assert may_go.wait(PATIENCE)
        return descriptor

    monkeypatch.setattr(os, "open", slow)
    return came, may_go


def in_background(act: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(act()), daemon=True)
    thread.start()
    return thread, found


def test_a_disk_that_does_not_answer_stops_no_reads_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("slow", "other"):
        (tmp_path / name).write_bytes(b"bytes")
    table = FileTable("/none")
    came, may_go = held_open(str(tmp_path / "slow"), monkeypatch)
    slow, _ = in_background(lambda: table.get(str(tmp_path / "slow")))
    assert came.wait(PATIENCE)
    other, found = in_background(lambda: table.get(str(tmp_path / "other")).path)
    join(other)
    table.forget("anything")
    may_go.set()
    join(slow)
    assert found == [str(tmp_path / "other")]


def test_a_file_that_was_replaced_while_it_was_opened_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    table = FileTable("/none")
    came, may_go = held_open(str(path), monkeypatch)
    opening, _ = in_background(lambda: table.get(str(path)))
    assert came.wait(PATIENCE)
    (tmp_path / "new").write_bytes(b"new!")
    (tmp_path / "new").rename(path)
    table.forget(str(path))
    may_go.set()
    join(opening)
    assert table.get(str(path)).stamp().size == 4, "it is read as it was before"


def test_files_are_let_go_of_when_descriptors_run_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(b"bytes")
    table = FileTable("/none")
    table.get(str(tmp_path / "a"))
    plain, tried = disk.DataFile, []

    def fails_once(path: str, **options: Any) -> disk.DataFile:
        tried.append(path)
        if len(tried) == 1:
            raise OSError(errno.EMFILE, "too many")
        return plain(path, **options)

    monkeypatch.setattr(disk, "DataFile", fails_once)
    assert table.get(str(tmp_path / "b")).path == str(tmp_path / "b")
    assert list(table._open) == [str(tmp_path / "b")]
    tried.clear()
    table.close()
    with pytest.raises(OSError, match="too many"):  # there is nothing to let go of
        table.get(str(tmp_path / "a"))


def test_short_reads_are_completed_up_to_the_end_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(bytes(range(100)))
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    plain = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, nbytes, at: plain(fd, min(nbytes, 7), at))
    assert read_fully(descriptor, 50, 20) == bytes(range(20, 70))
    assert read_fully(descriptor, 50, 80) == bytes(range(80, 100))
    os.close(descriptor)


def test_a_file_system_that_writes_nothing_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no reason to try for ever."""
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(OSError, match="writes nothing"):
        write_all(-1, memoryview(b"bytes"), 0)


def test_every_descriptor_is_closed_though_one_fails(tmp_path: Path) -> None:
    first, last = (os.open(tmp_path, os.O_RDONLY) for _ in range(2))
    with pytest.raises(OSError, match="Bad file descriptor"):
        close_all((first, None, 10**6, last))
    for descriptor in (first, last):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_a_file_is_closed_by_the_last_who_writes_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number would be another file's, soon, and that one would be written to."""
    cached = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    file = OpenForWriting(cached, str(tmp_path / "file"))
    gate = hold_calls(monkeypatch, os, "pwrite")
    data = memoryview(bytearray(b"bytes"))
    writing, _ = in_background(lambda: file.write(data, 0))
    assert gate.reached.wait(PATIENCE)
    file.close()
    os.fstat(cached)
    gate.open()
    join(writing)
    assert (tmp_path / "file").read_bytes() == b"bytes"
    for act in (lambda: os.fstat(cached), lambda: file.write(data, 0)):
        with pytest.raises(OSError, match=r"closed|Bad file descriptor"):
            act()


@pytest.mark.parametrize("call", ["ftruncate", "fstatvfs"])
def test_room_is_given_back_though_the_disk_fails(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "no")

    spill = Spill(str(tmp_path))
    offset = spill.take(3 * PAGE)
    monkeypatch.setattr(os, call, fail)
    spill.give_back(offset, 3 * PAGE)
    assert spill.take(3 * PAGE) == offset
    spill.close()
