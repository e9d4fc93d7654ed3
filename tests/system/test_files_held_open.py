"""Files that are open while disks hang, names change, and descriptors run out."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.files import open_files
from tests.helpers.system_calls import report_free_space, system_call
from tests.helpers.threads import Gate
from tests.store.helpers import PATIENCE, join
from tierstore.model.sizes import PAGE
from tierstore.system.file_table import FileTable
from tierstore.system.files import OpenForWriting, close_all, read_fully, write_all
from tierstore.tiers.spill import Spill


@contextmanager
def held_open(path: str) -> Iterator[Gate]:
    """Open `path` on a thread that continues once the gate is open."""
    gate = Gate()
    with system_call("open", after=gate.hold, when=lambda call: call.args[0] == path):
        yield gate


def in_background(act: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(act()), daemon=True)
    thread.start()
    return thread, found


def test_hung_disk_blocks_no_other_reads(tmp_path: Path) -> None:
    for name in ("slow", "other"):
        (tmp_path / name).write_bytes(b"bytes")
    table = FileTable("/none")
    with held_open(str(tmp_path / "slow")) as gate:
        slow, _ = in_background(lambda: table.get(str(tmp_path / "slow")))
        assert gate.reached.wait(PATIENCE)
        other, found = in_background(lambda: table.get(str(tmp_path / "other")).path)
        join(other)
        table.forget("anything")
        gate.open()
        join(slow)
    assert found == [str(tmp_path / "other")]


def test_file_replaced_while_opening_is_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    table = FileTable("/none")
    with held_open(str(path)) as gate:
        opening, _ = in_background(lambda: table.get(str(path)))
        assert gate.reached.wait(PATIENCE)
        (tmp_path / "new").write_bytes(b"new!")
        (tmp_path / "new").rename(path)
        table.forget(str(path))
        gate.open()
        join(opening)
    assert table.get(str(path)).stamp().size == 4, "the file is read as before"


def test_files_are_closed_when_descriptors_run_out(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(b"bytes")
    table = FileTable("/none")
    table.get(str(tmp_path / "a"))
    with system_call("open", fails_with=errno.EMFILE, at=1) as refused:
        assert table.get(str(tmp_path / "b")).path == str(tmp_path / "b")
    assert len(refused) == 1
    assert set(open_files(tmp_path).values()) == {str(tmp_path / "b")}
    table.close()
    with (
        system_call("open", fails_with=errno.EMFILE, at=1),
        pytest.raises(OSError, match="Too many"),  # there is nothing to close
    ):
        table.get(str(tmp_path / "a"))


def test_short_reads_are_completed_to_the_end_of_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(100)))
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    with system_call("pread", short=7):
        assert read_fully(descriptor, 50, 20) == bytes(range(20, 70))
        assert read_fully(descriptor, 50, 80) == bytes(range(80, 100))
    os.close(descriptor)


def test_file_system_writing_nothing_raises() -> None:
    """It does not retry forever."""
    with system_call("pwrite", returns=0), pytest.raises(OSError, match="wrote 0 bytes"):
        write_all(-1, memoryview(b"bytes"), 0)


def test_every_descriptor_is_closed_though_one_fails(tmp_path: Path) -> None:
    first, last = (os.open(tmp_path, os.O_RDONLY) for _ in range(2))
    with pytest.raises(OSError, match="Bad file descriptor"):
        close_all((first, None, 10**6, last))
    for descriptor in (first, last):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_file_is_closed_by_its_last_writer(tmp_path: Path) -> None:
    """Its descriptor would soon be another file's, which would then be overwritten."""
    cached = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    file = OpenForWriting(cached, str(tmp_path / "file"))
    gate, data = Gate(), memoryview(bytearray(b"bytes"))
    with system_call("pwrite", before=gate.hold):
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
def test_space_is_freed_though_the_disk_fails(call: str, tmp_path: Path) -> None:
    spill = Spill(str(tmp_path))
    offset = spill.take(3 * PAGE)
    full = report_free_space(0) if call == "ftruncate" else nullcontext()
    with full, system_call(call, fails_with=errno.EIO) as failed:
        spill.release(offset, 3 * PAGE)
    assert failed
    assert spill.take(3 * PAGE) == offset
    spill.close()
