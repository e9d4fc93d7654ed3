"""Measuring a disk: what is chosen, what is told meanwhile, and that nothing is left behind."""

from __future__ import annotations

import ctypes
import errno
import gc
import itertools
import os
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.files import open_files
from tests.transfer.test_disk import knows_direct_reads
from tests.transfer.test_spill import refusing_open
from tierstore.transfer import measure as module
from tierstore.transfer.figures import DEFAULT_BLOCK, DEFAULT_THREADS
from tierstore.transfer.measure import BLOCKS, SMALLEST, THREADS, Measurement, measure

SETTINGS = [(block, threads) for block in BLOCKS for threads in THREADS]
DEFAULT = DEFAULT_BLOCK, DEFAULT_THREADS


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROUNDS", 1)
    monkeypatch.setattr(module, "SECONDS", 0)


def seen(**other: list[float]) -> Measurement:
    """Every setting reads 1 GB/s in each round but for those named like `b32t12`."""
    rounds = {f"b{block >> 20}t{threads}": [1.0, 1.0, 1.0] for block, threads in SETTINGS}
    rounds.update(other)
    found = [[1e9 * rate for rate in rates] for rates in rounds.values()]
    return Measurement(dict(zip(SETTINGS, found, strict=True)), 2e8, 4e8, direct=True)


@pytest.mark.parametrize(
    ("other", "chosen"),
    [
        ({}, DEFAULT),
        ({"b32t12": [1.09, 1.09, 1.09]}, DEFAULT),
        ({"b32t12": [1.11, 1.11, 1.11]}, (32 << 20, 12)),
        ({"b32t12": [1.11, 1.11, 1.11], "b4t12": [1.2, 1.2, 1.2]}, (4 << 20, 12)),
        ({"b32t12": [1.5, 1.5, 0.9]}, DEFAULT),  # not in every round: it may be chance
        ({"b32t12": [1.5, 1.2, 1.01]}, (32 << 20, 12)),
        ({"b32t12": [1.3, 1.3, 1.3], "b16t6": [1.25, 1.25, 1.25]}, DEFAULT),
    ],
)
def test_the_defaults_stay_unless_another_setting_is_clearly_better(
    other: dict[str, list[float]], chosen: tuple[int, int]
) -> None:
    figures = seen(**other).figures()
    assert (figures.block, figures.threads) == chosen
    assert figures.read == seen(**other).read(chosen)
    assert figures.write == 4e8
    assert all(value > 0 for value in asdict(figures).values())


def test_every_setting_is_measured(tmp_path: Path) -> None:
    found = measure(str(tmp_path), SMALLEST)
    assert list(found.rounds) == SETTINGS
    assert all(found.read(setting) > 0 for setting in SETTINGS)
    assert found.new > 0
    assert found.again > 0
    assert os.listdir(tmp_path) == list(open_files(tmp_path).values()) == []
    (tmp_path / "probe").write_bytes(bytes(9))
    assert found.direct == knows_direct_reads(str(tmp_path / "probe"))


def test_as_many_bytes_are_moved_as_were_announced(tmp_path: Path) -> None:
    announced: list[tuple[str, int]] = []
    moved: dict[str, int] = {}
    lock = threading.Lock()

    def start(doing: str, nbytes: int) -> Callable[[int], None]:
        announced.append((doing, nbytes))

        def advance(more: int) -> None:
            with lock:
                moved[doing] = moved.get(doing, 0) + more

        return advance

    measure(str(tmp_path), SMALLEST, start)
    assert announced == [("Writing", 2 * SMALLEST), ("Reading", len(SETTINGS) * SMALLEST)]
    assert moved == dict(announced)


def test_reads_fill_more_memory_than_a_processor_keeps_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into the same few megabytes again and again, some disks are a third faster."""
    filled: dict[int, set[int]] = {}
    read_at_least = module.DataFile.read_at_least

    def noted(file: Any, room: memoryview, offset: int, needed: int) -> int:
        address = ctypes.addressof(ctypes.c_char.from_buffer(room))
        filled.setdefault(len(room), set()).add(address)
        return read_at_least(file, room, offset, needed)

    monkeypatch.setattr(module.DataFile, "read_at_least", noted)
    measure(str(tmp_path), SMALLEST)
    assert filled.keys() == set(BLOCKS)
    for block, addresses in filled.items():
        apart = sorted(addresses)
        assert all(b - a >= block for a, b in itertools.pairwise(apart))
        assert len(apart) * block >= SMALLEST, f"blocks of {block >> 20} MiB"


def test_reads_are_of_the_size_and_depth_that_they_are_told_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written is what is read: all of the file, over and over."""
    sizes: set[int] = set()
    together, most = set(), 0
    lock = threading.Lock()
    preadv = os.preadv

    def noted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal most
        with lock:
            sizes.add(len(buffers[0]))
            together.add(threading.get_ident())
            most = max(most, len(together))
        got = preadv(descriptor, buffers, offset)
        assert got == len(buffers[0])
        assert bytes(buffers[0][:4096]) != bytes(4096), "nothing was written there"
        with lock:
            together.discard(threading.get_ident())
        return got

    monkeypatch.setattr(os, "preadv", noted)
    measure(str(tmp_path), SMALLEST)
    assert sizes == set(BLOCKS)
    assert 2 <= most <= max(THREADS)


def test_without_direct_reads_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", refusing_open(os.O_DIRECT))
    found = measure(str(tmp_path), SMALLEST)
    assert not found.direct
    assert all(found.read(setting) > 0 for setting in SETTINGS)


@pytest.mark.full("the call, and what file it is made on", keep="values")
@pytest.mark.parametrize("call", ["pwrite", "preadv", "posix_fallocate", "fsync"])
@pytest.mark.parametrize("nameless", [True, False])
def test_a_measurement_that_fails_leaves_nothing_behind(
    call: str, nameless: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not nameless:
        monkeypatch.setattr(os, "open", refusing_open(os.O_TMPFILE))

    def failing(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, call, failing)
    with pytest.raises(OSError, match="Input/output"):
        measure(str(tmp_path), SMALLEST)
    gc.collect()  # the traceback held on to it
    assert os.listdir(tmp_path) == list(open_files(tmp_path).values()) == []
