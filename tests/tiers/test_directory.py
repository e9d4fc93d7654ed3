"""The store's directory: commits are whole or absent, and no file in it is trusted."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.helpers.files import flip_bit, object_file, open_files, with_flipped_bit
from tests.helpers.processes import output_of
from tests.helpers.system_calls import Call, random_bytes_zero, system_call
from tests.tiers.dying import FLOATS, KEY, NEW, OLD, data_of, look, packing
from tierstore.errors import (
    CorruptDataError,
    StoreLockedError,
    TierStoreError,
    TransferError,
)
from tierstore.system.locking import is_locked
from tierstore.system.objects import find_objects, object_name
from tierstore.tiers.directory import ObjectDirectory

ROOT = Path(__file__).resolve().parents[2]


def write(directory: ObjectDirectory, key: str, value: int) -> None:
    directory.write(key, packing(), data_of(value), single=False)


def made(disk_dir: Path, *keys: str) -> Path:
    """Make a directory with a group under each key, close and return it."""
    directory = ObjectDirectory(disk_dir)
    for key in keys:
        write(directory, key, OLD)
    directory.close()
    return disk_dir


# Dying at any moment -----------------------------------------------------------------------------


WHOLE = pytest.mark.full("a whole store, which commits by the protocol of the cases above")


def dying(protocol: str, existing: bool, disk_dir: Path) -> list[tuple[str, str]]:
    """Return, for each call of a protocol, its name and what remains if the process dies there."""
    begin = "over an old group" if existing else "in an empty directory"
    output = output_of("-m", "tests.tiers.dying", disk_dir, protocol, begin)
    return [(name, found) for name, found in map(json.loads, output.splitlines())]


@pytest.mark.parametrize(
    ("protocol", "existing", "before", "after"),
    [
        ("put", True, "old", "new"),
        ("put", False, "absent", "new"),
        ("remove", True, "old", "absent"),
        ("open", True, "old", "old"),
        ("open", False, "absent", "absent"),
        pytest.param("store", True, "old", "new", marks=WHOLE),
        pytest.param("store", False, "absent", "new", marks=WHOLE),
    ],
)
def test_process_death_leaves_the_old_or_the_new_group(
    protocol: str, existing: bool, before: str, after: str, disk_dir: Path
) -> None:
    found = dying(protocol, existing, disk_dir)
    names = [name for name, _ in found]
    outcomes = [outcome for _, outcome in found]
    assert len(found) > 15
    assert set(outcomes) <= {before, after}
    assert outcomes == sorted(outcomes, key=[before, after].index), "a new group became old again"
    assert outcomes[-1] == after, "the whole protocol left no new group"
    if before != after:
        changed = names[outcomes.index(after) - 1]
        assert changed == ("unlink" if protocol == "remove" else "rename"), "another call committed"
    if protocol in ("put", "store"):
        assert {"open", "pwrite", "fsync", "rename", "posix_fallocate"} <= set(names)


@pytest.mark.parametrize(
    ("protocol", "wrong"), [("in place", "a mix"), ("remove and write", "absent")]
)
def test_weaker_commit_protocol_is_caught(protocol: str, wrong: str, disk_dir: Path) -> None:
    """The control: the same search finds the fault of each."""
    assert wrong in [found for _, found in dying(protocol, True, disk_dir)]


LASTING = ("pwrite", "fsync", "posix_fallocate", "rename", "mkdir", "unlink")


class Recorder:
    """Records calls that make files durable, with the names of the files."""

    def __init__(self, root: Path) -> None:
        self.calls: list[tuple[str, str]] = []
        self._root = root

    def noting(self) -> AbstractContextManager[list[Call]]:
        return system_call(*LASTING, answer=self._note)

    def _note(self, call: Call) -> Any:
        assert call.path is not None
        about = str(Path(call.path).relative_to(self._root))  # before the call changes it
        result = call.go_on()
        self.calls.append((call.name, about))
        return result

    def places(self, name: str, about: str) -> list[int]:
        """Return the positions of these calls in the record."""
        return [i for i, call in enumerate(self.calls) if call == (name, about)]


@pytest.mark.parametrize("shard", ["is new", "was left by somebody who died"])
def test_commit_report_matches_a_power_cut(shard: str, disk_dir: Path) -> None:
    """Everything is synced before the next step relies on it, and before the commit returns."""
    directory = ObjectDirectory(disk_dir)
    if shard != "is new":
        object_file(disk_dir, KEY).parent.mkdir()
    record = Recorder(disk_dir)
    with record.noting():
        write(directory, KEY, NEW)
    (_, temporary) = next(call for call in record.calls if call[0] == "rename")
    folder = "objects/" + object_name(KEY).partition("/")[0]
    (synced,), (renamed,) = record.places("fsync", temporary), record.places("rename", temporary)
    assert max(record.places("pwrite", temporary)) < synced < renamed
    assert renamed < record.places("fsync", folder)[-1]
    assert record.places("fsync", "objects"), "the shard's name might be lost"
    record.calls.clear()
    with record.noting():
        directory.remove(KEY)
    assert [name for name, _ in record.calls] == ["unlink", "fsync"]
    directory.close()


def test_object_is_a_safetensors_file_with_page_aligned_data(disk_dir: Path) -> None:
    made(disk_dir, KEY)
    found = next(iter(find_objects(disk_dir)))
    assert found.stored is not None
    assert found.stored.data_start % 4096 == 0
    with safe_open(found.path, "np") as file:
        assert file.get_slice("weight").get_shape() == [FLOATS]
        assert file.metadata()["tierstore.key"] == KEY
        assert {byte for name in file.keys() for byte in file.get_tensor(name).tobytes()} == {OLD}  # noqa: SIM118


def test_two_puts_keep_the_last(disk_dir: Path) -> None:
    directory = ObjectDirectory(disk_dir)
    staged = [directory.stage(KEY, packing(), data_of(value), single=False) for value in (NEW, OLD)]
    assert list(find_objects(disk_dir)) == [], "it is visible before it is committed"
    directory.commit(staged[0])
    directory.abandon(staged[1])
    directory.abandon(staged[0])  # too late: it is committed
    assert os.listdir(disk_dir / "tmp") == []
    directory.close()
    assert look(disk_dir) == "new"


def test_concurrent_commits_succeed(disk_dir: Path) -> None:
    directory = ObjectDirectory(disk_dir)
    errors: list[BaseException] = []

    def body(name: str) -> None:
        try:
            for number in range(10):
                write(directory, f"{name}{number % 3}", NEW)
                if number % 3 == 2:
                    directory.remove(f"{name}{number % 3}")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    directory.close()
    again = ObjectDirectory(disk_dir)
    keys = sorted(stored.key for stored in again.objects())
    assert keys == sorted(f"{name}{number}" for name in "abcd" for number in (0, 1))
    assert not again.damaged
    again.close()


# Ownership ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_directory_is_private_to_its_user(mask: int, disk_dir: Path) -> None:
    before = os.umask(mask)
    try:
        directory = ObjectDirectory(disk_dir)
        write(directory, KEY, OLD)
        staged = directory.stage("other", packing(), data_of(NEW), single=False)
        modes = {
            str(path.relative_to(disk_dir)): (path.is_dir(), stat.S_IMODE(path.lstat().st_mode))
            for path in [disk_dir, *disk_dir.rglob("*")]
        }
        directory.abandon(staged)
        directory.close()
    finally:
        os.umask(before)
    assert len(modes) == 8, modes
    for name, (folder, mode) in modes.items():
        assert mode == (0o700 if folder else 0o600), f"{name} has {mode:o}"


@pytest.fixture
def secret(tmp_path: Path) -> Iterator[Path]:
    """A file and a directory of another program, which must not change."""
    outside = tmp_path / "outside"
    (outside / "folder").mkdir(parents=True)
    (outside / "file").write_text("secret")
    yield outside
    assert (outside / "file").read_text() == "secret"
    assert sorted(p.name for p in outside.rglob("*")) == ["file", "folder"]


def refuses(disk_dir: Path) -> TierStoreError:
    """Check that opening fails, names the place, and leaves no lock and no descriptor."""
    before = open_files()
    with pytest.raises(TierStoreError) as error:
        ObjectDirectory(disk_dir)
    assert str(disk_dir) in str(error.value)
    assert open_files() == before, "a descriptor was left open"
    return error.value


@pytest.mark.parametrize("part", ["LOCK", "STORE.json", "objects", "tmp"])
def test_symlinked_part_is_not_followed(part: str, disk_dir: Path, secret: Path) -> None:
    made(disk_dir, KEY)
    place = disk_dir / part
    target = secret / ("folder" if place.is_dir() else "file")
    shutil.move(place, disk_dir.parent / "aside")
    place.symlink_to(target)
    refuses(disk_dir)
    place.unlink()
    shutil.move(disk_dir.parent / "aside", place)
    assert look(disk_dir) == "old"


@pytest.mark.parametrize("part", ["LOCK", "STORE.json"])
def test_pipe_in_place_of_a_part_does_not_hang(part: str, disk_dir: Path) -> None:
    made(disk_dir, KEY)
    (disk_dir / part).unlink()
    os.mkfifo(disk_dir / part)
    refuses(disk_dir)


def test_hard_linked_lock_is_not_written_to(disk_dir: Path, secret: Path) -> None:
    made(disk_dir)
    (disk_dir / "LOCK").unlink()
    os.link(secret / "file", disk_dir / "LOCK")
    refuses(disk_dir)


def test_links_below_objects_are_not_followed(disk_dir: Path, secret: Path) -> None:
    made(disk_dir, KEY, "other")
    path = object_file(disk_dir, KEY)
    shard = object_file(disk_dir, "other").parent
    path.unlink()
    path.symlink_to(secret / "file")
    shutil.rmtree(shard)
    shard.symlink_to(secret / "folder")
    directory = ObjectDirectory(disk_dir)
    assert directory.objects() == []
    assert list(directory.damaged) == [object_name(KEY)]
    with pytest.raises(TransferError):
        write(directory, "other", NEW)
    write(directory, KEY, NEW)  # takes the link's place
    directory.close()
    assert not path.is_symlink()
    assert look(disk_dir) == "new"


def test_guessed_temporary_name_is_not_used(disk_dir: Path, secret: Path) -> None:
    directory = ObjectDirectory(disk_dir)
    write(directory, KEY, OLD)
    (disk_dir / "tmp" / ("object-" + "00" * 8)).symlink_to(secret / "file")
    with random_bytes_zero(), pytest.raises(TransferError):
        write(directory, KEY, NEW)
    directory.close()
    assert look(disk_dir) == "old"


def test_foreign_files_are_left_alone(disk_dir: Path) -> None:
    made(disk_dir, KEY)
    mine = [
        disk_dir / "notes.txt",
        disk_dir / "tmp" / "notes.txt",
        disk_dir / "objects" / "notes.txt",
        object_file(disk_dir, KEY).parent / "notes.txt",
    ]
    for path in mine:
        path.write_text("mine")
    (disk_dir / "tmp" / "folder").mkdir()
    (disk_dir / "tmp" / ("object-" + "ab" * 8)).write_text("left by somebody who died")
    directory = ObjectDirectory(disk_dir)
    assert [stored.key for stored in directory.objects()] == [KEY]
    assert not directory.damaged
    directory.close()
    assert all(path.read_text() == "mine" for path in mine)
    assert sorted(os.listdir(disk_dir / "tmp")) == ["folder", "notes.txt"]


# Markers -----------------------------------------------------------------------------------------

MARKERS = {
    "a newer format": b'{"format": 2}',
    "an older format": b'{"format": 0}',
    "a format that is no number": b'{"format": "one"}',
    "no format": b"{}",
    "a list": b"[1]",
    "no JSON": b"{",
    "nothing": b"",
    "bytes": b"\xff\xfe",
    "deeply nested": b"[" * 60_000,
}


@pytest.mark.parametrize("kind", MARKERS)
def test_directory_of_another_format_raises_and_is_kept(kind: str, disk_dir: Path) -> None:
    made(disk_dir, KEY)
    marker = disk_dir / "STORE.json"
    whole = marker.read_bytes()
    marker.write_bytes(MARKERS[kind])
    left = disk_dir / "tmp" / ("object-" + "ab" * 8)
    left.write_text("a newer version may need this")
    error = refuses(disk_dir)
    assert "disk_dir" in str(error)
    if kind == "a newer format":
        for part in ("format 2", "reads format 1", "upgrade"):
            assert part in str(error)
    assert left.exists()
    assert marker.read_bytes() == MARKERS[kind]
    marker.write_bytes(whole)
    assert look(disk_dir) == "old"


def test_directory_has_one_live_store(disk_dir: Path) -> None:
    first = ObjectDirectory(disk_dir)
    assert is_locked(disk_dir) == f"process {os.getpid()} on {os.uname().nodename!r}"
    error = refuses(disk_dir)
    assert isinstance(error, StoreLockedError)
    assert f"process {os.getpid()} " in str(error)
    first.close()
    assert is_locked(disk_dir) is None
    ObjectDirectory(disk_dir).close()


def test_foreign_files_are_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    for _ in range(2):
        ObjectDirectory(tmp_path).close()
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("tierstore.tiers", "WARNING")
    assert str(tmp_path) in record.getMessage() and "'model_index.json'" in record.getMessage()
    assert (tmp_path / "model_index.json").read_text() == "{}"
    caplog.clear()
    ObjectDirectory(tmp_path / "new").close()
    assert not caplog.records


def test_reading_the_lock_file_does_not_lock(disk_dir: Path) -> None:
    made(disk_dir)
    over = threading.Event()

    def look_at_it() -> None:
        while not over.is_set():
            is_locked(disk_dir)

    watcher = threading.Thread(target=look_at_it)
    watcher.start()
    try:
        for _ in range(50):
            ObjectDirectory(disk_dir).close()
    finally:
        over.set()
        watcher.join()


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ({"pid": 1, "host": os.uname().nodename}, f"process 1 on {os.uname().nodename!r}"),
        ({"pid": 1, "host": "another"}, "process 1 on 'another'"),
        ({"pid": 2**31 - 1, "host": os.uname().nodename}, "which has ended"),
        ({"pid": 2**31 - 1, "host": "another"}, f"process {2**31 - 1} on 'another'"),
        ({"pid": 10**30, "host": "another"}, "an unknown process"),
        ({"pid": True, "host": "another"}, "an unknown process"),
        ({"pid": 1}, "an unknown process"),
        ({"pid": 1, "host": "x" * 4000}, f"process 1 on '{'x' * 64}'"),
        ([], "an unknown process"),
    ],
)
def test_locked_directory_error_names_the_holder(said: Any, shown: str, disk_dir: Path) -> None:
    first = ObjectDirectory(disk_dir)
    (disk_dir / "LOCK").write_text(json.dumps(said))
    owner = is_locked(disk_dir)
    first.close()
    assert owner is not None
    assert shown in owner if "ended" in shown else owner == shown


def test_opening_removes_orphans_of_a_killed_process(
    disk_dir: Path,
) -> None:
    made(disk_dir, KEY)
    ours = [
        disk_dir / "tmp" / "object-0123456789abcdef",
        disk_dir / "tmp" / "marker-0123456789abcdef",
        disk_dir / ".spill-12-0123456789abcdef",
    ]
    others = [
        disk_dir / "tmp" / "object-of-mine",
        disk_dir / ".spill-of-mine",
        disk_dir / "object-0123456789abcdef",
    ]
    for path in (*ours, *others):
        path.write_bytes(b"bytes")
    (disk_dir / ".spill-13-0123456789abcdef").mkdir()
    ObjectDirectory(disk_dir).close()
    assert [path for path in ours if path.exists()] == []
    assert [path for path in others if not path.exists()] == []
    assert (disk_dir / ".spill-13-0123456789abcdef").is_dir()
    assert object_file(disk_dir, KEY).exists()


def test_new_directory_names_are_synced_in_their_parents(
    tmp_path: Path,
) -> None:
    record = Recorder(tmp_path)
    with record.noting():
        ObjectDirectory(tmp_path / "new" / "newer" / "store").close()
    synced = [about for name, about in record.calls if name == "fsync"]
    assert {".", "new", "new/newer", "new/newer/store"} <= set(synced)
    record.calls.clear()
    with record.noting():
        ObjectDirectory(tmp_path / "new" / "newer" / "store").close()
    assert ("fsync", "new/newer") in record.calls, "its creator may have died before the sync"


@pytest.mark.parametrize(
    ("call", "about"),
    [("open", "/objects"), ("open", "/tmp"), ("listdir", ""), ("fsync", "/store")],
    ids=["objects", "tmp", "cleaning", "syncing"],
)
def test_failed_opening_leaves_no_lock_and_no_descriptor(
    call: str, about: str, disk_dir: Path
) -> None:
    made(disk_dir)
    before = os.listdir("/proc/self/fd")
    with (
        system_call(call, fails_with=errno.EIO, when=lambda call: str(call.path).endswith(about)),
        pytest.raises(TransferError, match="opening"),
    ):
        ObjectDirectory(disk_dir)
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert is_locked(disk_dir) is None
    ObjectDirectory(disk_dir).close()


# Damage ------------------------------------------------------------------------------------------


def another_name(path: Path) -> None:
    shutil.copy(object_file(path.parents[2], "other"), path)


HEADER_DAMAGES: dict[str, Callable[[Path], object]] = {
    "a bit of the length": lambda path: flip_bit(path, 2),
    "a bit of the header": lambda path: flip_bit(path, 60),
    "a bit of the padding": lambda path: flip_bit(path, 4000),
    "cut in the header": lambda path: os.truncate(path, 1000),
    "cut in the data": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: os.truncate(path, path.stat().st_size + 1),
    "somebody else's": another_name,
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.mark.parametrize("damage", HEADER_DAMAGES)
def test_damaged_object_costs_its_own_key_only(damage: str, disk_dir: Path) -> None:
    made(disk_dir, KEY, "other")
    path = object_file(disk_dir, KEY)
    HEADER_DAMAGES[damage](path)
    directory = ObjectDirectory(disk_dir)
    assert [stored.key for stored in directory.objects()] == ["other"]
    error = directory.damaged[object_name(KEY)]
    assert isinstance(error, TransferError)
    assert error.path == str(path)
    if damage == "somebody else's":
        assert isinstance(error, CorruptDataError)
        assert "'other'" in str(error)
    if not path.is_dir():
        write(directory, KEY, NEW)
        assert not directory.damaged
    directory.close()
    assert path.is_dir() or look(disk_dir) == "new"


def test_header_with_any_flipped_bit_is_refused(disk_dir: Path) -> None:
    """Many single flips, of which the structure alone would accept two in five."""
    made(disk_dir, KEY)
    path = object_file(disk_dir, KEY)
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    end = whole.rindex(b"}", 0, 8 + length) + 20
    for offset in range(0, end, 7):
        path.write_bytes(with_flipped_bit(whole, offset, offset % 8))
        (found,) = find_objects(disk_dir)
        assert found.error is not None, f"bit {offset % 8} of byte {offset}"
    path.write_bytes(whole)
    assert look(disk_dir) == "old"


# Ephemeral groups --------------------------------------------------------------------------------


@pytest.mark.parametrize("durable", [True, False])
def test_temporary_groups_are_never_synced(durable: bool, disk_dir: Path) -> None:
    directory = ObjectDirectory(disk_dir, durable=durable)
    with system_call("fsync") as calls:
        write(directory, KEY, OLD)
        write(directory, KEY, NEW)
        write(directory, "other", OLD)
        directory.remove("other")
    assert bool(calls) is durable
    directory.close()
    assert look(disk_dir) == "new"


def test_file_in_place_of_a_directory_is_reported_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for path in (file, file / "below" / "it"):
        with pytest.raises(TransferError, match=f"{file} is a file; pass another disk_dir"):
            ObjectDirectory(path)
    assert file.read_text() == "mine"
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(TransferError, match="link is not a directory"):
        ObjectDirectory(tmp_path / "link")
    assert not (tmp_path / "nowhere").exists()
