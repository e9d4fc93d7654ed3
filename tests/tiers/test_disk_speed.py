"""Speed tests of a disk: progress is reported, and no file is left."""

from __future__ import annotations

import ctypes
import errno
import gc
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.files import open_files
from tests.helpers.system_calls import Call, rejecting_opens, system_call
from tests.system.test_files import knows_direct_reads
from tierstore.system.files import DISK_THREADS, READ_BLOCK
from tierstore.tiers.disk_speed import ROUNDS, SMALLEST, measure


def test_speed_test_measures_reads_and_writes(tmp_path: Path) -> None:
    found = measure(str(tmp_path), SMALLEST)
    assert found.read > 0
    assert found.new > 0
    assert found.again > 0
    assert os.listdir(tmp_path) == list(open_files(tmp_path).values()) == []
    (tmp_path / "probe").write_bytes(bytes(9))
    assert found.direct == knows_direct_reads(str(tmp_path / "probe"))


def test_speed_test_moves_as_many_bytes_as_announced(tmp_path: Path) -> None:
    announced: list[tuple[str, int]] = []
    moved: dict[str, int] = {}
    lock = threading.Lock()

    @contextmanager
    def progress(doing: str, nbytes: int) -> Iterator[Callable[[int], None]]:
        announced.append((doing, nbytes))

        def advance(more: int) -> None:
            with lock:
                moved[doing] = moved.get(doing, 0) + more

        yield advance

    measure(str(tmp_path), SMALLEST, progress)
    assert announced == [("Writing", 2 * SMALLEST), ("Reading", ROUNDS * SMALLEST)]
    assert moved == dict(announced)


def test_speed_test_reads_exceed_processor_caches(tmp_path: Path) -> None:
    """Some disks read a third faster into the same few megabytes."""
    filled: set[int] = set()

    def note(call: Call) -> Any:
        (room,) = call.args[1]
        filled.add(ctypes.addressof(ctypes.c_char.from_buffer(room)))
        return call.go_on()

    with system_call("preadv", answer=note):
        measure(str(tmp_path), SMALLEST)
    apart = sorted(filled)
    assert all(b - a >= READ_BLOCK for a, b in itertools.pairwise(apart))
    assert len(apart) * READ_BLOCK >= 256 << 20


def test_speed_test_reads_have_the_given_size_and_depth(tmp_path: Path) -> None:
    """The file is read as written: all of it, repeatedly."""
    sizes: set[int] = set()
    together, most = set(), 0
    lock = threading.Lock()

    def note(call: Call) -> Any:
        nonlocal most
        (room,) = call.args[1]
        with lock:
            sizes.add(len(room))
            together.add(threading.get_ident())
            most = max(most, len(together))
        got = call.go_on()
        assert got == len(room)
        assert bytes(room[:4096]) != bytes(4096), "the file was not written"
        with lock:
            together.discard(threading.get_ident())
        return got

    with system_call("preadv", answer=note):
        measure(str(tmp_path), SMALLEST)
    assert sizes == {READ_BLOCK}
    assert 2 <= most <= DISK_THREADS


@pytest.mark.full("measures a disk for seconds")
def test_speed_test_without_direct_reads_says_so(tmp_path: Path) -> None:
    with rejecting_opens(os.O_DIRECT):
        found = measure(str(tmp_path), SMALLEST)
    assert not found.direct
    assert found.read > 0


@pytest.mark.full("the call, and its file", keep="values")
@pytest.mark.parametrize("call", ["pwrite", "preadv", "posix_fallocate", "fsync"])
@pytest.mark.parametrize("nameless", [True, False])
def test_speed_test_failure_leaves_nothing_behind(
    call: str, nameless: bool, tmp_path: Path
) -> None:
    files = nullcontext() if nameless else rejecting_opens(os.O_TMPFILE)
    failing = system_call(call, fails_with=errno.EIO)
    with files, failing, pytest.raises(OSError, match="Input/output"):
        measure(str(tmp_path), SMALLEST)
    gc.collect()  # the traceback kept it alive
    assert os.listdir(tmp_path) == list(open_files(tmp_path).values()) == []
