"""`verify` finds every kind of damage, and no other."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.conftest import Inspect, float_block, on_terminal, put, start
from tests.cli.damage import empty, extend, flip_header, truncate
from tests.helpers.events import before
from tests.helpers.files import flip_bit, object_file
from tests.helpers.system_calls import system_call
from tierstore.inspection import checksums
from tierstore.inspection.survey import survey
from tierstore.model.header import LENGTH_BYTES
from tierstore.system.objects import object_name
from tierstore.tiers.directory import ObjectDirectory


def test_verify_undamaged_store_passes(store: Path, inspect: Inspect) -> None:
    for options in ([], ["--data"]):
        result = inspect("verify", store, *options)
        assert result.exit_code == 0
        assert result.stdout == "3 groups: no damage found\n"
    document = inspect.json("verify", store, "--data")
    assert document["problems"] == []
    assert document["nbytes_read"] == 3 * (64 * 64 * 4 + 3 * 4)
    assert inspect.json("verify", store)["nbytes_read"] == 0


def data_of(path: Path) -> int:
    return LENGTH_BYTES + int.from_bytes(path.read_bytes()[:LENGTH_BYTES], "little")


@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_verify_data_finds_a_flipped_bit_in_the_data(
    store: Path, inspect: Inspect, where: str
) -> None:
    path = object_file(store, "b")
    last = path.stat().st_size - 1
    offset = {"first": data_of(path), "middle": data_of(path) + 5000, "last": last}[where]
    flip_bit(path, offset)
    assert inspect("verify", store).exit_code == 0, "headers and sizes are intact"
    result = inspect("verify", store, "--data")
    assert result.exit_code == 3
    (problem,) = inspect.json("verify", store, "--data", code=3)["problems"]
    shown = inspect.json("show", store, "b")["tensors"]
    tensor = "bias" if where == "last" else "weight"
    (expected,) = (row["xxh3"] for row in shown if row["name"] == tensor)
    assert problem["key"] == "b"
    assert problem["path"] == str(path)
    assert problem["tensor"] == tensor
    assert problem["expected"] == expected
    assert problem["found"] != expected
    for value in ("damaged: b", str(path), tensor, expected, problem["found"]):
        assert value in result.stdout
    assert result.stdout.endswith("3 groups: 1 damaged\n")


def test_verify_finds_a_flipped_bit_anywhere_in_the_header(store: Path) -> None:
    path = object_file(store, "b")
    assert not survey(str(store)).damaged
    for offset in range(0, data_of(path), 13):
        flip_bit(path, offset)
        assert [group.item.name for group in survey(str(store)).damaged] == [
            f"objects/{object_name('b')}"
        ], offset
        flip_bit(path, offset)
    assert not survey(str(store)).damaged


def cut_header(path: Path, _: Path) -> None:
    os.truncate(path, 100)


def replace_by_another(path: Path, other: Path) -> None:
    shutil.copy(other, path)


DAMAGES = [truncate, extend, empty, cut_header, flip_header, replace_by_another]


@pytest.mark.parametrize("damage", DAMAGES)
def test_verify_finds_structural_damage(
    store: Path, inspect: Inspect, damage: Callable[[Path, Path], None]
) -> None:
    assert inspect("verify", store).exit_code == 0
    path = object_file(store, "b")
    damage(path, object_file(store, "a"))
    for options in ([], ["--data"]):
        (problem,) = inspect.json("verify", store, *options, code=3)["problems"]
        assert problem["path"] == str(path)
        assert problem["reason"]
    result = inspect("verify", store)
    assert result.exit_code == 3
    assert str(path) in result.stdout
    listing = inspect.json("ls", store)
    assert listing["unusable_count"] == 1
    assert sorted(group["state"] for group in listing["groups"]) == ["damaged", "ok", "ok"]
    assert "1 damaged" in inspect("ls", store).stdout


def test_verify_renamed_file_is_damage(store: Path, inspect: Inspect) -> None:
    shutil.move(
        object_file(store, "b"), object_file(store, "b").with_name("b" * 32 + ".safetensors")
    )
    (problem,) = inspect.json("verify", store, code=3)["problems"]
    assert problem["key"] == "b"
    assert problem["expected"] == f"objects/{object_name('b')}"
    assert problem["found"].endswith(f"{'b' * 32}.safetensors")


# Concurrent changes ------------------------------------------------------------------------------


@contextmanager
def meanwhile(store: Path, happens: Callable[[], object]) -> Iterator[None]:
    """Run `happens` just before the data of the first group are read."""
    done: list[bool] = []

    def act(path: object, *_: object) -> None:
        if path == str(object_file(store, "a")) and not done:  # headers are read in their directory
            done.append(True)
            happens()

    with before("open", act):
        yield
    assert done


def test_verify_group_replaced_meanwhile_is_checked_again(
    store: Path, inspect: Inspect, monkeypatch: pytest.MonkeyPatch
) -> None:
    with meanwhile(store, lambda: put_all(store, version=1)):
        assert inspect.json("verify", store, "--data")["problems"] == []
    # Without a second check, the new bytes are taken for damaged old ones.
    stale = {group.key: group for group in survey(str(store)).groups}
    monkeypatch.setattr(checksums, "find_group", lambda _, key: stale[key])
    with meanwhile(store, lambda: put_all(store, version=2)):
        assert inspect("verify", store, "--data").exit_code == 3


def put_all(store: Path, version: int) -> None:
    directory = ObjectDirectory(store)
    for key in ("a", "b", "layers/0"):
        put(directory, key, version=version)
    directory.close()


def test_verify_group_removed_meanwhile_is_no_damage(store: Path, inspect: Inspect) -> None:
    with meanwhile(store, lambda: shutil.rmtree(store / "objects")):
        assert inspect.json("verify", store, "--data")["problems"] == []


def test_verify_disk_error_is_unreadable_not_damaged(store: Path, inspect: Inspect) -> None:
    with system_call("preadv", fails_with=errno.EIO):
        problems = inspect.json("verify", store, "--data", code=3)["problems"]
        assert [problem["state"] for problem in problems] == ["unreadable"] * 3
        assert all("Input/output error" in problem["reason"] for problem in problems)
        object_file(store, "b").write_bytes(b"short")
        result = inspect("verify", store, "--data")
    assert result.stdout.endswith("3 groups: 1 damaged, 2 unreadable\n")


# Reading -----------------------------------------------------------------------------------------


@pytest.fixture
def large(disk_dir: Path) -> Path:
    """Return a store with a group of 40 MiB and a few odd bytes."""
    directory = ObjectDirectory(disk_dir)
    put(directory, "large", float_block("a", 10 << 20), float_block("b", 7), float_block("c", 9))
    directory.close()
    return disk_dir


def test_verify_checks_blocks_that_span_several_reads(large: Path, inspect: Inspect) -> None:
    assert inspect("verify", large, "--data").exit_code == 0
    path = object_file(large, "large")
    for offset in (data_of(path) + (8 << 20), data_of(path) + (40 << 20) - 1):
        flip_bit(path, offset)
        (problem,) = inspect.json("verify", large, "--data", code=3)["problems"]
        assert problem["tensor"] == "a"
        flip_bit(path, offset)


def test_verify_memory_is_bounded(large: Path) -> None:
    tell = (
        "print([line.split()[1] for line in open('/proc/self/status') if 'VmHWM' in line][0],"
        "file=sys.stderr)"
    )

    def peak(*options: str, before: str = "") -> int:
        run = start("verify", large, "--json", *options, before=before, after=tell)
        assert run.returncode == 0, run.stderr
        return int(run.stderr) << 10

    usual = peak()
    assert peak("--data") - usual < 16 << 20
    whole = "import tierstore.system.files as disk; disk.CHUNK = 64 << 20"
    assert peak("--data", before=whole) - usual > 16 << 20


AT_ONCE = "import tierstore.progress as progress; progress.DELAY_SECONDS = 0"
"""Otherwise a bar is drawn only after two seconds."""


def test_verify_progress_bar_is_drawn_on_a_terminal_only(large: Path) -> None:
    shown = on_terminal("verify", large, "--data", before=AT_ONCE, COLUMNS="100")
    assert shown.exit_code == 0
    assert "Reading" in shown.output
    assert "40.0 MiB" in shown.output
    run = start("verify", large, "--data", before=AT_ONCE)
    assert run.returncode == 0
    assert "Reading" not in run.stdout + run.stderr
    assert run.stderr.startswith("Read 40.0 MiB in ")


def test_verify_progress_bar_stays_out_of_the_data(large: Path, tmp_path: Path) -> None:
    to_file = f"import os; os.dup2(os.open({str(tmp_path / 'out')!r}, os.O_WRONLY | os.O_CREAT), 1)"
    shown = on_terminal("verify", large, "--data", "--json", before=f"{AT_ONCE}; {to_file}")
    assert "Reading" in shown.output
    assert json.loads((tmp_path / "out").read_text())["problems"] == []
