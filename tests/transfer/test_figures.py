"""What is remembered of disks: hints, in a file that may be missing, damaged or another's."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.processes import output_of
from tests.transfer.test_disk import open_file
from tierstore.transfer.figures import (
    DEFAULT_BLOCK,
    DEFAULT_THREADS,
    DiskFigures,
    cache_file,
    disk_threads,
    known_figures,
    remember,
)
from tierstore.transfer.measure import measured_bandwidth

FOUND = DiskFigures(block=32 << 20, threads=8, read=3e9, write=2e9, measured=1.8e9)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "data"
    path.write_bytes(bytes(100))
    return str(path)


def nothing_is_known(data: str) -> bool:
    """And so everybody gets the defaults."""
    return (
        known_figures(data) is None
        and measured_bandwidth(data) is None
        and open_file(data).block == DEFAULT_BLOCK
        and disk_threads() == DEFAULT_THREADS
    )


def test_what_was_measured_is_known_of_every_file_of_the_file_system(
    data: str, tmp_path: Path
) -> None:
    assert nothing_is_known(data)
    assert remember(tmp_path, FOUND) == cache_file()
    for path in (data, tmp_path, str(tmp_path / "cache")):
        assert known_figures(path) == FOUND
        assert measured_bandwidth(path) == 3e9
    with open(data, "rb") as opened:
        assert known_figures(opened.fileno()) == FOUND
    assert open_file(data).block == 32 << 20
    assert disk_threads() == 8
    remember(data, replace(FOUND, threads=2))
    assert disk_threads() == 2


def test_it_is_for_the_owner_only(tmp_path: Path, cache: Path) -> None:
    before = os.umask(0)
    try:
        remember(tmp_path, FOUND)
    finally:
        os.umask(before)
    assert stat.S_IMODE(cache_file().stat().st_mode) == 0o600
    assert stat.S_IMODE(cache_file().parent.stat().st_mode) == 0o700
    assert os.listdir(cache / "tierstore") == ["disks.json"]


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    home = Path(os.path.expanduser("~"))
    assert cache_file({"XDG_CACHE_HOME": "/c"}) == Path("/c/tierstore/disks.json")
    for other in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):
        assert cache_file(other) == home / ".cache/tierstore/disks.json"


def another_system(**changes: Any) -> Callable[[Any], Any]:
    real = os.stat, os.statvfs

    def answer(path: Any, **_: object) -> Any:
        told = real[0](path)
        about = {"st_dev": told.st_dev, "st_mode": told.st_mode, "f_fsid": real[1](path).f_fsid}
        return SimpleNamespace(**{**about, **changes})

    return answer


@pytest.mark.parametrize(
    ("call", "change"), [("stat", {"st_dev": 12345}), ("statvfs", {"f_fsid": 12345})]
)
def test_another_file_system_is_not_known(
    call: str, change: dict[str, int], data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither another disk, nor a disk that has the number of one that is gone."""
    remember(data, FOUND)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, another_system(**change))
        assert known_figures(data) is None
        remember(data, replace(FOUND, threads=16))
    assert known_figures(data) == FOUND
    assert disk_threads() == 16, "a store may read from both"


def test_another_machine_is_not_known(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Home directories are shared."""
    remember(data, FOUND)
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename="other"))
    assert nothing_is_known(data)


def test_a_path_that_is_not_there_is_not_known(tmp_path: Path) -> None:
    remember(tmp_path, FOUND)
    assert known_figures(tmp_path / "missing") is None
    with pytest.raises(FileNotFoundError):
        remember(tmp_path / "missing", FOUND)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "nothing": lambda file: file.write_bytes(b""),
    "bytes": lambda file: file.write_bytes(b"\xff\xfe{}"),
    "no JSON": lambda file: file.write_text(file.read_text()[:-9]),
    "a list": lambda file: file.write_text("[]"),
    "a list of disks": lambda file: file.write_text('{"version": 1, "disks": []}'),
    "no disks": lambda file: file.write_text('{"version": 1}'),
    "a newer version": lambda file: file.write_text(file.read_text().replace(": 1,", ": 2,", 1)),
    "deeply nested": lambda file: file.write_text("[" * 60_000),
    "huge": lambda file: file.write_text(" " * (2 << 20) + file.read_text()),
    "a directory": lambda file: (file.unlink(), file.mkdir()),
    "a pipe": lambda file: (file.unlink(), os.mkfifo(file)),
    "unreadable": lambda file: (file.unlink(), file.symlink_to(file)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_as_good_as_none(damage: str, data: str) -> None:
    file = remember(data, FOUND)
    assert not nothing_is_known(data)
    DAMAGES[damage](file)
    assert nothing_is_known(data)
    if damage == "a directory":
        with pytest.raises(OSError, match="directory"):
            remember(data, FOUND)
        assert os.listdir(file.parent) == ["disks.json"], "something was left behind"
    else:
        remember(data, FOUND)
        assert known_figures(data) == FOUND


WRONG: dict[str, Any] = {
    "block": [0, 1, 4095, 4097, -4096, 2 << 30, 4096.0, "4096", None, True],
    "threads": [0, -1, 65, 4.0, "4", None, True],
    "read": [0, -1.0, float("nan"), float("inf"), "3e9", None, True],
    "write": [0, float("inf"), None],
    "measured": [-1, None],
}


@pytest.mark.parametrize("field", WRONG)
def test_a_value_that_cannot_be_is_as_good_as_none(field: str, data: str) -> None:
    file = remember(data, FOUND)
    document = json.loads(file.read_text())
    ((name, entry),) = document["disks"].items()
    assert entry == asdict(FOUND)
    for wrong in WRONG[field]:
        document["disks"] = {name: {**entry, field: wrong}}
        file.write_text(json.dumps(document))
        assert nothing_is_known(data), wrong
    for shape in ([], "text", None, {**entry, "more": 1}, {"block": 4096}):
        document["disks"] = {name: shape}
        file.write_text(json.dumps(document))
        assert nothing_is_known(data), shape


def test_what_others_measured_stays(data: str) -> None:
    file = remember(data, FOUND)
    document = json.loads(file.read_text())
    document["disks"]["elsewhere 1 2"] = {"some": "thing"}
    file.write_text(json.dumps(document))
    remember(data, replace(FOUND, threads=2))
    assert json.loads(file.read_text())["disks"]["elsewhere 1 2"] == {"some": "thing"}


def test_a_cache_that_cannot_be_written_says_so(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", data)  # a file in the place of a directory
    with pytest.raises(OSError, match="data"):
        remember(data, FOUND)
    assert nothing_is_known(data)


def test_without_a_home_nothing_is_written_anywhere(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match="XDG_CACHE_HOME"):
        remember(data, FOUND)
    assert nothing_is_known(data)
    assert os.listdir(tmp_path) == ["data"]


def test_a_write_that_fails_leaves_the_old_file(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(data, FOUND)

    def failing(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match="full"):
        remember(data, replace(FOUND, threads=2))
    assert known_figures(data) == FOUND
    assert os.listdir(cache_file().parent) == ["disks.json"]


def test_readers_find_a_whole_file_while_it_is_written(data: str) -> None:
    remember(data, FOUND)
    found = set()
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            found.add(known_figures(data))

    reader = threading.Thread(target=look)
    reader.start()
    try:
        for number in range(200):
            remember(data, replace(FOUND, threads=8 + number % 2))
    finally:
        over.set()
        reader.join()
    assert found <= {FOUND, replace(FOUND, threads=9)}


def test_looking_needs_no_torch() -> None:
    code = (
        "import sys, tierstore.transfer.measure as m; m.measured_bandwidth('.');"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    assert output_of("-c", code) == "[]\n"
