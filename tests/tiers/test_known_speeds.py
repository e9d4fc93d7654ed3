"""Remembered disk speeds: hints, in a file that may be missing, damaged or foreign."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.events import before
from tests.helpers.processes import output_of
from tierstore.tiers.disk_speed import cache_file, known_speed, remember

FOUND = 3e9


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
    return known_speed(data) is None


def test_known_speed_applies_to_the_whole_file_system(data: str, tmp_path: Path) -> None:
    assert nothing_is_known(data)
    assert remember(tmp_path, FOUND) == cache_file()
    for path in (data, tmp_path, str(tmp_path / "cache")):
        assert known_speed(path) == FOUND
    remember(data, 2e9)
    assert known_speed(tmp_path) == 2e9


def test_known_speeds_file_is_private_to_its_owner(tmp_path: Path, cache: Path) -> None:
    before = os.umask(0)
    try:
        remember(tmp_path, FOUND)
    finally:
        os.umask(before)
    assert stat.S_IMODE(cache_file().stat().st_mode) == 0o600
    assert stat.S_IMODE(cache_file().parent.stat().st_mode) == 0o700
    assert os.listdir(cache / "tierstore") == ["disks.json"]


@pytest.mark.parametrize("part", [1, 2], ids=["device", "identity"])
def test_known_speed_of_another_file_system_is_none(part: int, data: str) -> None:
    """Neither another disk, nor one that reuses the number of a removed disk."""
    file = remember(data, FOUND)
    assert known_speed(data) == FOUND
    renamed(
        file, lambda parts: [*parts[:part], f"{int(parts[part], 16) + 1:x}", *parts[part + 1 :]]
    )
    assert nothing_is_known(data)
    remember(data, 1e9)
    assert known_speed(data) == 1e9
    assert len(json.loads(file.read_text())["disks"]) == 2


def renamed(file: Path, name: Callable[[list[str]], list[str]]) -> None:
    """Rewrite the entry, as if measured on another machine, device or file system."""
    document = json.loads(file.read_text())
    ((known, entry),) = document["disks"].items()
    document["disks"] = {" ".join(name(known.split(" "))): entry}
    file.write_text(json.dumps(document))


def test_known_speed_of_another_machine_is_none(data: str) -> None:
    """Home directories are shared."""
    file = remember(data, FOUND)
    assert os.uname().nodename in file.read_text()
    renamed(file, lambda parts: ["other", *parts[1:]])
    assert nothing_is_known(data)


def test_known_speed_of_missing_path_is_none(tmp_path: Path) -> None:
    remember(tmp_path, FOUND)
    assert known_speed(tmp_path / "missing") is None
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
def test_known_speeds_damaged_file_is_ignored(damage: str, data: str) -> None:
    file = remember(data, FOUND)
    assert not nothing_is_known(data)
    DAMAGES[damage](file)
    assert nothing_is_known(data)
    if damage == "a directory":
        with pytest.raises(OSError, match="directory"):
            remember(data, FOUND)
        assert os.listdir(file.parent) == ["disks.json"], "a temporary file was left behind"
    else:
        remember(data, FOUND)
        assert known_speed(data) == FOUND


WRONG = [0, -1.0, float("nan"), float("inf"), "3e9", None, True, [3e9]]


def test_known_speeds_impossible_value_is_ignored(data: str) -> None:
    file = remember(data, FOUND)
    document = json.loads(file.read_text())
    ((name, entry),) = document["disks"].items()
    for shape in (*({**entry, "read": wrong} for wrong in WRONG), [], "read", None, {"write": 1.0}):
        document["disks"] = {name: shape}
        file.write_text(json.dumps(document))
        assert nothing_is_known(data), shape
    document["disks"] = {name: {**entry, "more": 1}}
    file.write_text(json.dumps(document))
    assert known_speed(data) == FOUND


def test_known_speeds_without_home_writes_nothing(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "nowhere")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match="XDG_CACHE_HOME"):
        remember(data, FOUND)
    assert nothing_is_known(data)
    assert os.listdir(tmp_path) == ["data"]


@pytest.mark.parametrize("event", ["open", "os.rename"])
def test_known_speeds_failed_write_keeps_the_old_file(event: str, data: str) -> None:
    file = remember(data, FOUND)

    def full(path: object, *_: object) -> None:
        if path not in (file, str(file)):
            raise OSError(errno.ENOSPC, "the disk is full")

    with before(event, full), pytest.raises(OSError, match="full"):
        remember(data, 2e9)
    assert known_speed(data) == FOUND
    assert os.listdir(cache_file().parent) == ["disks.json"]


def test_known_speeds_lookup_needs_no_torch() -> None:
    code = (
        "import sys, tierstore.tiers.disk_speed as m; m.known_speed('.');"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    assert output_of("-c", code) == "[]\n"
