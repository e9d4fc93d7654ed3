"""`verify --repair` quarantines damaged files, all of them and no others, and deletes nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.conftest import Inspect, put, tree
from tests.cli.damage import empty, extend, flip_header, truncate
from tests.helpers.events import before
from tests.helpers.files import flip_bit, object_file
from tests.helpers.processes import run_python
from tests.helpers.system_calls import Call, system_call
from tests.inspection.repairing import by_deleting
from tierstore import TierStore
from tierstore.errors import CorruptDataError, TransferError, UnknownKeyError
from tierstore.inspection import checksums, quarantine
from tierstore.system.objects import object_name
from tierstore.tiers.directory import ObjectDirectory

Verify = Callable[..., Any]


def served(store: Path) -> dict[str, torch.Tensor | type[BaseException]]:
    """Return what a store reads for each key: a group, or the error that it raises."""
    found: dict[str, torch.Tensor | type[BaseException]] = {}
    with TierStore(1 << 20, store, device="cpu") as opened:
        for key in ("a", "b", "layers/0"):
            try:
                group = opened.get(key)
                assert isinstance(group, dict)
                found[key] = group["weight"].view(torch.int32)  # some are NaN
            except (TransferError, UnknownKeyError) as error:
                found[key] = type(error)
    return found


def lost(before: dict[str, tuple[Any, ...]], after: dict[str, tuple[Any, ...]]) -> list[str]:
    """Return the files and links that no longer exist, unchanged, under any name."""
    kept = {(entry[1], entry[3]) for entry in after.values()}
    return [
        name
        for name, entry in before.items()
        # the owner's name in LOCK changes
        if os.path.basename(name) != "LOCK" and (entry[1], entry[3]) not in kept
    ]


# Damage ------------------------------------------------------------------------------------------


def flip_data(path: Path, _: Path) -> None:
    flip_bit(path, path.stat().st_size - 100)


def another_key(path: Path, other: Path) -> None:
    shutil.copy(other, path)


def foreign(path: Path, _: Path) -> None:
    save_file({"weight": torch.ones(3)}, path)


def newer_version(path: Path, _: Path) -> None:
    raw = path.read_bytes()
    assert raw.count(b'"tierstore.format":"1"') == 1
    path.write_bytes(raw.replace(b'"tierstore.format":"1"', b'"tierstore.format":"2"'))


def link(path: Path, other: Path) -> None:
    path.unlink()
    path.symlink_to(other)


def link_to_itself_elsewhere(path: Path, other: Path) -> None:
    target = other.parents[3] / "elsewhere"
    shutil.move(path, target)
    path.symlink_to(target)


def fifo(path: Path, _: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def directory(path: Path, _: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "something").write_text("of mine")


def linked_shard(path: Path, other: Path) -> None:
    target = other.parents[3] / "elsewhere"
    shutil.move(path.parent, target)
    path.parent.symlink_to(target)


def file_for_a_shard(path: Path, _: Path) -> None:
    shutil.rmtree(path.parent)
    path.parent.write_text("of mine")


DAMAGES = [
    flip_data, flip_header, truncate, extend, empty, another_key, foreign, newer_version, link,
    link_to_itself_elsewhere, fifo, directory, linked_shard, file_for_a_shard,
]  # fmt: skip
SHARDS = linked_shard, file_for_a_shard
KEY_READABLE = flip_data, truncate, extend, newer_version  # the key can still be read


@pytest.mark.parametrize("damage", DAMAGES)
def test_repair_quarantines_damaged_objects_only(
    store: Path, inspect: Inspect, damage: Callable[[Path, Path], None]
) -> None:
    whole = served(store)
    path = object_file(store, "b")
    damage(path, object_file(store, "a"))
    before = tree(store)
    found = inspect.json("verify", store, "--data", code=3)
    assert not found["repair"]
    assert found["quarantine"] == []
    assert tree(store) == before, "nothing is changed without --repair"

    document = inspect.json("verify", store, "--data", "--repair")
    (problem,) = document["problems"]
    place = path.parent if damage in SHARDS else path
    assert problem["path"] == str(place)
    assert problem["left"] is None
    moved = Path(problem["put_away"])
    stem, dot, suffix = place.name.partition(".")
    assert moved == store / "quarantine" / f"{stem}.1{dot}{suffix}"
    assert lost(before, tree(store)) == []
    assert not os.path.lexists(place)
    (entry,) = document["quarantine"]
    if damage in KEY_READABLE:
        assert entry["key"] == "b"
    assert entry["path"] == str(moved)
    assert entry["key"] == problem["key"]
    assert entry["reasons"] == [problem["reason"]]

    after = served(store)
    assert after["b"] is UnknownKeyError
    assert all(torch.equal(after[key], whole[key]) for key in ("a", "layers/0"))  # type: ignore[arg-type]
    with TierStore(1 << 20, store, device="cpu") as opened:
        opened.put("b", {"weight": torch.ones(64, 64)})
        opened.flush()
        assert len(opened.keys()) == 3
    settled = tree(store)
    assert inspect.json("verify", store, "--data", "--repair")["problems"] == []
    del settled["LOCK"]
    again = tree(store)
    del again["LOCK"]
    assert again == settled


@pytest.mark.parametrize("name", ["objects", "tmp"])
@pytest.mark.parametrize("kind", ["link", "file"])
def test_repair_damage_that_prevents_opening_is_fixed(
    store: Path, tmp_path: Path, inspect: Inspect, name: str, kind: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.move(store / name, elsewhere)
    if kind == "link":
        (store / name).symlink_to(elsewhere)
    else:
        (store / name).write_text("mine")
    before = tree(tmp_path)
    with pytest.raises(TransferError):
        TierStore(1 << 20, store, device="cpu")
    (problem,) = inspect.json("verify", store, code=3)["problems"]
    assert problem["path"] == str(store / name)
    assert (problem["expected"], problem["found"]) == ("directory", kind)
    assert inspect("verify", store, "--repair").exit_code == 0
    assert lost(before, tree(tmp_path)) == []
    with TierStore(1 << 20, store, device="cpu") as opened:
        assert len(opened) == (0 if name == "objects" else 3)


def test_damaged_marker_removed_by_hand_keeps_all_groups(store: Path, inspect: Inspect) -> None:
    (store / "STORE.json").write_bytes(b"")
    result = inspect("verify", store, "--repair")
    assert result.exit_code == 2
    assert "STORE.json is damaged" in result.stderr
    assert (store / "STORE.json").exists()
    (store / "STORE.json").unlink()  # by hand, once the user is sure
    with TierStore(1 << 20, store, device="cpu") as opened:
        assert opened.keys() == ["a", "b", "layers/0"]
    assert inspect("verify", store, "--data").exit_code == 0


def test_damaged_group_raises_until_it_is_repaired(store: Path, inspect: Inspect) -> None:
    flip_data(object_file(store, "b"), store)
    assert served(store)["b"] is CorruptDataError
    assert inspect("verify", store, "--repair").exit_code == 0, "only --data reads the data"
    assert served(store)["b"] is CorruptDataError
    assert inspect("verify", store, "--data", "--repair").exit_code == 0
    assert served(store)["b"] is UnknownKeyError


def test_repair_without_checksums_misses_a_flipped_bit(
    store: Path, inspect: Inspect, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip_data(object_file(store, "b"), store)
    with monkeypatch.context() as patch:
        patch.setattr(checksums.Checker, "_digests", lambda self, file, stored: stored.digests)
        assert inspect("verify", store, "--data", "--repair").exit_code == 0
        assert object_file(store, "b").exists()
    assert inspect("verify", store, "--data").exit_code == 3


def test_repair_that_deletes_is_detected(store: Path, inspect: Inspect) -> None:
    flip_data(object_file(store, "b"), store)
    before = tree(store)
    with system_call("rename", answer=by_deleting):
        assert inspect("verify", store, "--data", "--repair").exit_code == 0
    assert lost(before, tree(store)) == [f"objects/{object_name('b')}"]


# The note and the name ---------------------------------------------------------------------------


def test_quarantine_note_describes_the_damage(store: Path, inspect: Inspect) -> None:
    key = "evil \x1b[31m \u202e ключ"
    directory = ObjectDirectory(store)
    put(directory, key)
    directory.close()
    path = object_file(store, key)
    flip_bit(path, path.stat().st_size - 1)
    flip_bit(path, path.stat().st_size - 100)
    result = inspect("verify", store, "--data", "--repair")
    assert result.exit_code == 0
    assert "\x1b" not in result.output
    assert result.stdout.endswith("4 groups: 1 damaged, 1 quarantined\n")
    (note,) = (store / "quarantine").glob("*.note.json")
    text = note.read_text()
    assert text.isascii()
    assert text.isprintable() or text.replace("\n", "").isprintable()
    said = json.loads(text)
    assert said["key"] == key
    assert said["was"] == str(path.relative_to(store))
    assert [problem["tensor"] for problem in said["problems"]] == ["weight", "bias"]
    for problem in said["problems"]:
        assert len(problem["expected"]) == len(problem["found"]) == 16
        assert problem["expected"] != problem["found"]
    assert said["since"].startswith("20")
    assert oct((store / "quarantine").stat().st_mode & 0o777) == "0o700"
    assert oct(note.stat().st_mode & 0o777) == "0o600"


def test_quarantine_names_never_clash(store: Path, inspect: Inspect) -> None:
    name = object_file(store, "b").stem
    contents = []
    for number in (1, 2, 3):
        path = object_file(store, "b")
        path.write_bytes(b"damage %d" % number)
        contents.append(path.read_bytes())
        if number == 2:
            (store / "quarantine" / f"{name}.2.safetensors.note.json").write_text("of mine")
        assert inspect("verify", store, "--repair").exit_code == 0
    away = store / "quarantine"
    assert [(away / f"{name}.{n}.safetensors").read_bytes() for n in (1, 3, 4)] == contents
    assert (away / f"{name}.2.safetensors.note.json").read_text() == "of mine"


def test_quarantine_note_not_trusted_hides_nothing(
    store: Path, tmp_path: Path, inspect: Inspect
) -> None:
    for key in ("a", "b", "layers/0"):
        object_file(store, key).write_bytes(b"")
    assert inspect("verify", store, "--repair").exit_code == 0
    notes = sorted((store / "quarantine").glob("*.note.json"))
    notes[0].write_text('{"key": 7, "since": [], "problems": [1, {"reason": {}}]}')
    notes[1].write_text("[" * 100_000)
    notes[2].unlink()
    os.mkfifo(notes[2])
    secret = tmp_path / "secret"
    secret.write_text('{"key": "secret"}')
    (store / "quarantine" / "planted").write_text("")
    (store / "quarantine" / "planted.note.json").symlink_to(secret)
    entries = inspect.json("verify", store)["quarantine"]
    assert [(e["key"], e["since"], e["reasons"]) for e in entries] == [(None, None, [])] * 4
    assert "secret" not in inspect("verify", store).output


# Quarantined files -------------------------------------------------------------------------------


@pytest.fixture
def quarantined(store: Path, inspect: Inspect) -> Path:
    """Return a store in which b is in quarantine."""
    truncate(object_file(store, "b"), store)
    assert inspect("verify", store, "--repair").exit_code == 0
    return store


def test_quarantined_file_is_listed_and_counted(quarantined: Path, inspect: Inspect) -> None:
    moved, note = sorted((quarantined / "quarantine").iterdir())
    nbytes = moved.stat().st_size + note.stat().st_size
    listing = inspect.json("ls", quarantined)
    assert listing["quarantine"] == {"count": 1, "nbytes": nbytes}
    assert listing["stray"] == listing["temporary"] == []
    assert listing["group_count"] == 2
    assert f"; 1 in quarantine ({nbytes / 1024:.1f} KiB); " in inspect("ls", quarantined).stdout
    (row,) = inspect.json("df", quarantined)["directories"]
    assert row["quarantine"] == {"count": 1, "nbytes": nbytes}
    assert row["reclaimable"]["nbytes"] == 0
    title, line = inspect("df", quarantined).stdout.splitlines()
    assert "QUARANTINE" in title
    assert f"{nbytes / 1024:.1f} KiB" in line
    result = inspect("verify", quarantined)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "in quarantine: b"
    assert lines[1].split() == ["path", str(moved)]
    assert lines[-1] == "2 groups: no damage found"


def test_prune_and_the_store_leave_quarantine_alone(quarantined: Path, inspect: Inspect) -> None:
    before = tree(quarantined / "quarantine")
    assert inspect("prune", quarantined, "--damaged", "-y").exit_code == 0
    assert inspect("rm", quarantined, "b", "-y").exit_code == 4
    with TierStore(1 << 20, quarantined, device="cpu", disk_budget=1 << 20) as store:
        assert store.keys() == ["a", "layers/0"]
        store.put("b", torch.ones(5))
        store.discard("b")
    assert tree(quarantined / "quarantine") == before


# Files that are not damaged ----------------------------------------------------------------------


def test_repair_leaves_foreign_and_temporary_files_alone(store: Path, inspect: Inspect) -> None:
    (store / "mine.txt").write_text("mine")
    (store / "objects" / "notes").write_text("mine")
    (object_file(store, "a").parent / "backup").symlink_to("/etc/passwd")
    (store / "tmp" / "object-0123456789abcdef").write_bytes(bytes(1000))
    before = tree(store)
    result = inspect("verify", store, "--data", "--repair")
    assert result.exit_code == 0
    assert "3 foreign entries" in result.stderr
    assert "1 temporary file (1000 B)" in result.stderr
    after = tree(store)
    del before["LOCK"], after["LOCK"]
    assert after == before
    document = inspect.json("verify", store)
    assert len(document["stray"]) == 3
    assert len(document["temporary"]) == 1


@pytest.mark.parametrize("name", [".", "objects", "STORE.json", "LOCK", "b"])
def test_verify_reports_files_that_others_may_access(
    store: Path, inspect: Inspect, name: str
) -> None:
    assert inspect.json("verify", store)["exposed"] == []
    assert "chmod" not in inspect("verify", store).stderr
    path = object_file(store, name) if name == "b" else store / name
    path.chmod(path.stat().st_mode | 0o020)
    (exposed,) = inspect.json("verify", store)["exposed"]
    assert os.path.normpath(exposed["path"]) == str(path)
    result = inspect("verify", store)
    assert result.exit_code == 0
    assert f"chmod -R go= {store}" in result.stderr


# Locks and failures ------------------------------------------------------------------------------


def test_repair_store_in_use_changes_nothing(locked: Path, inspect: Inspect) -> None:
    flip_bit(object_file(locked, "b"), 50)
    before = tree(locked)
    result = inspect("verify", locked, "--repair")
    assert result.exit_code == 11
    assert result.stderr.startswith(f"Error: {locked} is in use by process ")
    assert tree(locked) == before
    assert inspect("verify", locked).exit_code == 3, "reading needs no lock"


def test_repair_holds_the_lock_while_moving(store: Path, inspect: Inspect) -> None:
    flip_bit(object_file(store, "b"), 50)
    outputs: list[str] = []

    def look(*_: object) -> None:
        code = "import sys; from tierstore.tiers.directory import ObjectDirectory as Directory\n"
        outputs.append(run_python("-c", code + "Directory(sys.argv[1])", store).stderr)

    with before("os.rename", look):
        assert inspect("verify", store, "--repair").exit_code == 0
    assert len(outputs) == 1
    assert "StoreLockedError" in outputs[0]
    assert not object_file(store, "b").exists()


@pytest.mark.parametrize("plant", ["link", "file"])
def test_repair_quarantine_not_a_directory_exits_1(
    store: Path, tmp_path: Path, inspect: Inspect, plant: str
) -> None:
    flip_bit(object_file(store, "b"), 50)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    if plant == "link":
        (store / "quarantine").symlink_to(elsewhere)
    else:
        (store / "quarantine").touch()
    result = inspect("verify", store, "--repair")
    assert result.exit_code == 1
    assert "quarantine is not a directory" in result.stderr
    assert object_file(store, "b").exists()
    assert list(elsewhere.iterdir()) == []
    (store / "quarantine").unlink()
    assert inspect("verify", store, "--repair").exit_code == 0
    assert not object_file(store, "b").exists()


def test_repair_restricts_an_open_quarantine_directory(store: Path, inspect: Inspect) -> None:
    flip_bit(object_file(store, "b"), 50)
    (store / "quarantine").mkdir()
    (store / "quarantine").chmod(0o755)
    assert inspect("verify", store, "--repair").exit_code == 0
    assert oct((store / "quarantine").stat().st_mode & 0o777) == "0o700"


@pytest.mark.parametrize("call", ["rename", "open", "fsync"])
def test_repair_file_that_cannot_move_continues_with_the_rest(
    store: Path, inspect: Inspect, call: str
) -> None:
    for key in ("a", "b"):
        truncate(object_file(store, key), store)
    before = tree(store)

    def is_of_a_note(call: Call) -> bool:
        noted = call.name != "open" or str(call.args[0]).endswith(quarantine.NOTE_SUFFIX)
        started = (store / "quarantine").exists() and (call.name != "fsync" or notes(store))
        return bool(noted and started)

    with system_call(call, fails_with=errno.ENOSPC, when=is_of_a_note, at=1):
        problems = inspect.json("verify", store, "--repair", code=3)["problems"]
    assert [problem["left"] for problem in problems] == [
        "the move failed: No space left on device",
        None,
    ]
    assert lost(before, tree(store)) == []
    assert len(notes(store)) == 1, "there is a note on files that stayed"
    assert inspect("verify", store, "--repair").exit_code == 0
    assert len(notes(store)) == 2
    assert lost(before, tree(store)) == []


def notes(store: Path) -> list[Path]:
    return sorted((store / "quarantine").glob(f"*{quarantine.NOTE_SUFFIX}"))


def test_repair_file_changed_meanwhile_is_left(store: Path, inspect: Inspect) -> None:
    path = object_file(store, "b")
    truncate(path, store)

    def change(*_: object) -> None:
        path.write_bytes(b"another")

    with before("os.mkdir", change):  # of the quarantine
        (problem,) = inspect.json("verify", store, "--repair", code=3)["problems"]
    assert problem["left"] == "it was changed meanwhile: verify again"
    assert path.read_bytes() == b"another"
    assert inspect("verify", store, "--repair").exit_code == 0
