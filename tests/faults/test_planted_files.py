"""Planted files in a store's directory, or in place of a checkpoint.

Foreign files have every name that the store uses. The store raises an error or ignores them; it
neither opens nor changes link targets, and no call blocks.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from tests.cli.conftest import tree
from tests.faults.watching import watched
from tests.helpers.engine import core_of
from tests.helpers.files import object_file, open_files
from tests.helpers.processes import output_of
from tests.helpers.system_calls import Call, random_bytes_zero, rejecting_opens, system_call
from tests.store.helpers import (
    PAGE,
    PATIENCE,
    assert_group,
    assert_same,
    join,
    open_store,
    pages,
    push_out,
    run_threads,
)
from tierstore import TierStore, TierStoreError, TransferError
from tierstore.cli.commands import inspector
from tierstore.engine.checkpoints import read_checkpoint
from tierstore.errors import StaleCheckpointError
from tierstore.system.mapping import anonymous_file
from tierstore.system.objects import MARKER
from tierstore.tiers.disk_speed import cache_file, known_speed, remember

ROOT = Path(__file__).resolve().parents[2]
KEY, OTHER = "key", "other"
GUESSED = "00" * 8


# Planted files -----------------------------------------------------------------------------------


class Victims:
    """Files and a directory of another owner: they must not change."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.file = place / "file"
        self.folder = place / "folder"
        self.folder.mkdir(parents=True)
        self.file.write_text("secret")
        (self.folder / "file").write_text("secret")
        self._before = self._look()

    def _look(self) -> dict[str, object]:
        found: dict[str, object] = {}
        for path in sorted(self.place.rglob("*")):
            status = path.lstat()
            content = path.read_bytes() if path.is_file() else b""
            name = str(path.relative_to(self.place))
            found[name] = (status.st_mode, status.st_uid, status.st_mtime_ns, content)
        return found

    def check(self) -> None:
        assert self._look() == self._before, "a foreign file was changed"


def link_to_file(path: Path, victims: Victims) -> None:
    path.symlink_to(victims.file)


def link_to_folder(path: Path, victims: Victims) -> None:
    path.symlink_to(victims.folder)


def dangling(path: Path, victims: Victims) -> None:
    path.symlink_to(victims.place / "nothing")


def loop(path: Path, victims: Victims) -> None:
    path.symlink_to(path)


def pipe(path: Path, victims: Victims) -> None:
    os.mkfifo(path)


def unix_socket(path: Path, victims: Victims) -> None:
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)  # a whole path may be too long


def device(path: Path, victims: Victims) -> None:
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero


def hard_link(path: Path, victims: Victims) -> None:
    os.link(victims.file, path)


def folder(path: Path, victims: Victims) -> None:
    (path / "inside").mkdir(parents=True)


def plain_file(path: Path, victims: Victims) -> None:
    path.write_text("plain")


def huge(path: Path, victims: Victims) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 40)


KINDS: dict[str, Callable[[Path, Victims], None]] = {
    "a link to a file": link_to_file,
    "a link to a directory": link_to_folder,
    "a link to nothing": dangling,
    "a link to itself": loop,
    "a pipe": pipe,
    "a socket": unix_socket,
    "a device": device,
    "another name of a file": hard_link,
    "a directory": folder,
    "a plain file": plain_file,
    "a huge file": huge,
}

PLACES: dict[str, Callable[[Path], Path]] = {
    "the lock": lambda disk_dir: disk_dir / "LOCK",
    "the marker": lambda disk_dir: disk_dir / MARKER,
    "all objects": lambda disk_dir: disk_dir / "objects",
    "drafts": lambda disk_dir: disk_dir / "tmp",
    "a shard": lambda disk_dir: object_file(disk_dir, KEY).parent,
    "an object": lambda disk_dir: object_file(disk_dir, KEY),
    "a draft": lambda disk_dir: disk_dir / "tmp" / f"object-{GUESSED}",
    "a draft of the marker": lambda disk_dir: disk_dir / "tmp" / f"marker-{GUESSED}",
    "a spill file": lambda disk_dir: disk_dir / f".spill-{os.getpid()}-{GUESSED}",
}

USUAL = [
    *("a link to a file", "a link to a directory", "a pipe"),
    *("another name of a file", "a directory"),
]
ANYTHING_ANYWHERE = [
    pytest.mark.needs("root"),
    pytest.mark.parametrize("place", PLACES),
    pytest.mark.parametrize("kind", KINDS),
    pytest.mark.long(
        "rare kinds, at each place", keep=[f"{place}-{kind}" for kind in USUAL for place in PLACES]
    ),
]


def anything_anywhere(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test for each kind of object at each place."""
    for mark in ANYTHING_ANYWHERE:
        test = mark(test)
    return test


@pytest.fixture
def victims(tmp_path: Path) -> Iterator[Victims]:
    found = Victims(tmp_path / "outside")
    yield found
    found.check()


def in_time(act: Callable[[], None]) -> None:
    """Run a function on a separate thread, and fail if it does not end."""
    errors: list[BaseException] = []

    def body() -> None:
        try:
            act()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    join(thread, PATIENCE)
    if errors:
        raise errors[0]


def use(disk_dir: Path) -> list[TierStoreError]:
    """Use the store in every way. Returns the errors."""
    refused: list[TierStoreError] = []
    try:
        store = open_store(disk_dir, 8 * PAGE)
    except TierStoreError as error:
        return [error]
    acts: list[Callable[[], object]] = [
        lambda: assert_group(store.get(OTHER), pages(2, 2)),
        lambda: assert_group(store.get(KEY), pages(1, 2)),
        lambda: store.put("volatile", pages(4, 8), durable=False),
        lambda: store.put("pushes it out", pages(5, 8), durable=False),
        lambda: assert_group(store.get("volatile"), pages(4, 8)),
        lambda: store.put(KEY, pages(3, 2)),
        store.flush,
        lambda: store.discard(KEY),
    ]
    for act in [*acts, store.close]:
        try:
            act()
        except TierStoreError as error:
            refused.append(error)
    return refused


def made(disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        store.put(KEY, pages(1, 2))
        store.put(OTHER, pages(2, 2))


@anything_anywhere
def test_planted_file_is_refused_or_left_alone(
    place: str, kind: str, disk_dir: Path, victims: Victims
) -> None:
    made(disk_dir)
    planted = PLACES[place](disk_dir)
    aside = disk_dir.parent / "aside"
    if planted.exists():
        shutil.move(planted, aside)
    KINDS[kind](planted, victims)
    refused: list[TierStoreError] = []
    with random_bytes_zero(), watched() as seen:  # the planted file has the very name of a draft
        in_time(lambda: refused.extend(use(disk_dir)))
    told = (str(disk_dir), "the store has no group")
    assert all(any(part in str(error) for part in told) for error in refused), refused
    assert not seen.code()
    allowed = [disk_dir, disk_dir.parent, cache_file()]  # it checks whether its parent is there
    assert not [e for e in seen.outside(*allowed) if e[0] != "os.listdir"], seen.outside(*allowed)
    assert not [path for path in seen.opened() if path.startswith(str(victims.place))]
    victims.check()
    if place in ("the lock", "all objects", "drafts") and kind not in (
        "a plain file",
        "a huge file",
        "a directory",
    ):
        assert refused, "a foreign file was used as the store's own"
    remove(planted)
    if aside.exists():
        shutil.move(aside, planted)
    with open_store(disk_dir) as store:
        assert_group(store.get(OTHER), pages(2, 2))


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@pytest.mark.full(
    "each place and each kind of object; every lane has a store that meets each", keep="a third"
)
@anything_anywhere
def test_command_leaves_planted_files_alone(
    place: str, kind: str, disk_dir: Path, victims: Victims
) -> None:
    made(disk_dir)
    planted = PLACES[place](disk_dir)
    remove(planted)
    KINDS[kind](planted, victims)

    def run() -> None:
        for words in (["ls"], ["verify", "--data"], ["prune", "--damaged", "-y"]):
            done = CliRunner().invoke(inspector, [words[0], str(disk_dir), *words[1:]])
            if done.exception is not None and not isinstance(done.exception, SystemExit):
                raise done.exception

    with watched() as seen:
        in_time(run)
    assert not seen.code()
    assert not [path for path in seen.opened() if path.startswith(str(victims.place))]


def test_spill_file_with_a_taken_name_uses_another(tmp_path: Path, victims: Victims) -> None:
    """Simulate a file system without unnamed files."""
    (tmp_path / f".spill-{os.getpid()}-{GUESSED}").symlink_to(victims.file)
    with (
        random_bytes_zero(),
        rejecting_opens(os.O_TMPFILE),
        pytest.raises((OSError, TransferError)),
    ):
        anonymous_file(str(tmp_path))


@pytest.mark.needs("root")
@pytest.mark.parametrize("kind", KINDS)
def test_planted_disk_speeds_are_ignored(kind: str, tmp_path: Path, victims: Victims) -> None:
    path = cache_file()
    remove(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    KINDS[kind](path, victims)
    try:
        found: list[object] = []
        in_time(lambda: found.extend([known_speed(tmp_path)]))
        assert found == [None]
        with contextlib.suppress(OSError):  # a directory is not replaced
            remember(tmp_path, 1e9)
        victims.check()
        if kind != "a directory":
            assert known_speed(tmp_path) == 1e9
            assert stat.S_ISREG(path.lstat().st_mode)
    finally:
        remove(path)


# Files of another user, or of another time --------------------------------------------------------


AS_SOMEBODY = r"""
import os, sys, torch
from tierstore import TierStore, TierStoreError
from safetensors.torch import save_file
with TierStore("1MB", sys.argv[1] + "-warm", device="cpu") as store:
    store.put("key", torch.ones(4))
os.setgroups([]); os.setgid(65534); os.setuid(65534); os.umask(0)
try:
    with TierStore("1MB", sys.argv[1], device="cpu") as store:
        store.put("key", torch.ones(4))
        store.flush()
    print("used")
except TierStoreError as error:
    print("refused", error)
"""


def as_somebody(disk_dir: Path) -> str:
    """Use the directory as a non-root user. Returns the outcome."""
    return output_of("-c", AS_SOMEBODY, disk_dir, timeout=120)


@pytest.fixture
def open_place() -> Iterator[Path]:
    """Create a directory that any user can reach."""
    place = Path("/var/tmp") / f"tierstore-{os.getpid()}-{os.urandom(4).hex()}"
    place.mkdir()
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


@pytest.mark.full("a process of another user; every lane has one that is rejected")
@pytest.mark.needs("other-users")
def test_own_directory_is_used_and_closed_to_others(open_place: Path) -> None:
    open_place.chmod(0o777)
    disk_dir = open_place / "store"
    assert as_somebody(disk_dir) == "used\n"
    for path in [disk_dir, *disk_dir.rglob("*")]:
        status = path.lstat()
        assert status.st_uid == 65534
        assert stat.S_IMODE(status.st_mode) == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.needs("other-users")
def test_foreign_world_writable_directory_raises(open_place: Path) -> None:
    disk_dir = open_place / "store"
    disk_dir.mkdir()
    disk_dir.chmod(0o777)
    told = as_somebody(disk_dir)
    assert told.startswith("refused") and str(disk_dir) in told
    assert list(disk_dir.iterdir()) == []


@pytest.mark.needs("other-users")
@pytest.mark.long(
    "a process of another user for each part",
    sentinel="tests/faults/test_planted_files.py::test_foreign_world_writable_directory_raises",
)
@pytest.mark.parametrize("name", ["LOCK", MARKER, "objects", "tmp"])
def test_foreign_owned_part_raises(name: str, open_place: Path) -> None:
    disk_dir = open_place / "store"
    made(disk_dir)
    for path in [disk_dir, *disk_dir.rglob("*")]:
        os.chown(path, 65534, 65534)
    part = disk_dir / name
    os.chown(part, 0, 0)
    before = tree(disk_dir)
    assert as_somebody(disk_dir).startswith("refused")
    after = tree(disk_dir)
    assert before.keys() == after.keys()
    assert all(before[n][3] == after[n][3] for n in before if n != "LOCK")


@pytest.mark.parametrize("mask", [0o000, 0o027, 0o077])
def test_whole_store_is_private_to_its_owner(mask: int, disk_dir: Path) -> None:
    before = os.umask(mask)
    try:
        with open_store(disk_dir, 4 * PAGE) as store:
            store.put(KEY, pages(1, 2))
            store.put("volatile", pages(2, 4), durable=False)
            store.put("pushes it out", pages(3, 4), durable=False)
            store.flush()
            nameless = [n for n, name in open_files(disk_dir).items() if "(deleted)" in name]
            assert nameless, "nothing was spilled"
            assert {stat.S_IMODE(os.fstat(n).st_mode) for n in nameless} == {0o600}
        modes = {
            path: stat.S_IMODE(path.stat().st_mode) for path in [disk_dir, *disk_dir.rglob("*")]
        }
    finally:
        os.umask(before)
    assert len(modes) >= 7
    for path, mode in modes.items():
        assert mode == (0o700 if path.is_dir() else 0o600), f"{path}: {mode:o}"


# Checkpoints --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        "a pipe",
        "a socket",
        "a device",
        "a link to nothing",
        "a link to itself",
        "a directory",
        "a huge file",
    ],
)
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
@pytest.mark.needs("root")
def test_special_file_as_checkpoint_does_not_block(
    kind: str, name: str, tmp_path: Path, victims: Victims
) -> None:
    place = tmp_path / "checkpoint"
    place.mkdir()
    KINDS[kind](place / name, victims)
    for path in (place, place / name):

        def read(path: Path = path) -> None:
            with pytest.raises(TransferError) as error:
                read_checkpoint(path)
            assert str(tmp_path) in str(error.value)

        in_time(read)


def replace_by_link(path: Path, victims: Victims) -> None:
    path.unlink()
    path.symlink_to(victims.file)


def replace_by_link_to_a_copy(path: Path, victims: Victims) -> None:
    copy = path.with_suffix(".copy")
    save_file({f"layer{i}": pages(50 + i, 4) for i in range(8)}, copy)
    path.unlink()
    path.symlink_to(copy)


def replace_by_pipe(path: Path, victims: Victims) -> None:
    path.unlink()
    os.mkfifo(path)


def cut_off(path: Path, victims: Victims) -> None:
    os.truncate(path, path.stat().st_size - 3 * PAGE)


def edit_in_place(path: Path, victims: Victims) -> None:
    before = path.stat()
    with open(path, "r+b") as file:
        file.seek(before.st_size - PAGE)
        file.write(b"\x55" * PAGE)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES = [replace_by_link, replace_by_link_to_a_copy, replace_by_pipe, cut_off, edit_in_place]


@pytest.mark.parametrize("change", CHANGES)
def test_checkpoint_replaced_during_a_read_raises(
    change: Callable[[Path, Victims], None], tmp_path: Path, disk_dir: Path, victims: Victims
) -> None:
    """Check that readers get the old bytes or an error; afterwards only one of the two."""
    path = tmp_path / "model.safetensors"
    save_file({f"layer{i}": pages(i, 4) for i in range(8)}, path)
    with open_store(disk_dir, 8 * PAGE) as store:
        keys = store.register_checkpoint(path, "m/")
        begun, changed = threading.Barrier(4), threading.Event()

        def read() -> None:
            begun.wait(PATIENCE)
            for number in range(40):
                i = number % 8
                late = changed.is_set()
                try:
                    found = store.get(f"m/layer{i}")
                except TransferError as error:
                    assert error.path == str(path) and error.key == f"m/layer{i}"
                    continue
                assert isinstance(found, torch.Tensor)
                assert_same(found, pages(i, 4))
                assert not late or number < 40

        def act() -> None:
            begun.wait(PATIENCE)
            change(path, victims)
            changed.set()

        assert run_threads([read, read, read, act]) == []
        push_out(store, *keys[:0])
        store.put("filler", pages(0, 8), durable=False)
        store.discard("filler")
        for i in range(8):
            with contextlib.suppress(TransferError):
                found = store.get(f"m/layer{i}")
                assert isinstance(found, torch.Tensor)
                assert_same(found, pages(i, 4))
        in_place = change in (cut_off, edit_in_place)
        with pytest.raises(StaleCheckpointError) if in_place else contextlib.nullcontext():
            for i in range(8):
                found = store.get(f"m/layer{i}")
                assert isinstance(found, torch.Tensor)
                assert_same(found, pages(i, 4))


@pytest.mark.parametrize("change", [edit_in_place, cut_off, replace_by_pipe, replace_by_link])
def test_object_changed_after_its_first_read_raises(
    change: Callable[[Path, Victims], None], disk_dir: Path, victims: Victims
) -> None:
    """Check that a right checksum at the first read is not trusted forever."""
    with open_store(disk_dir, 8 * PAGE) as store:
        store.put(KEY, pages(1, 4))
        store.flush()
        push_out(store, KEY)
        assert_group(store.get(KEY), pages(1, 4))
        push_out(store, KEY)
        change(object_file(disk_dir, KEY), victims)
        try:
            assert_group(store.get(KEY), pages(1, 4))  # by a file that is still open
        except TransferError as error:
            assert error.key == KEY


def test_object_change_without_stamp_check_is_served(
    tmp_path: Path, disk_dir: Path, victims: Victims
) -> None:
    """Check the control: it is this check that notices."""
    path = tmp_path / "model.safetensors"
    save_file({f"layer{i}": pages(i, 4) for i in range(8)}, path)
    with open_store(disk_dir, 8 * PAGE) as store:
        store.register_checkpoint(path, "m/")
        core_of(store).tiers.disk.files.check = lambda file, held: None  # type: ignore[method-assign]
        edit_in_place(path, victims)
        found = store.get("m/layer7")
        assert isinstance(found, torch.Tensor)
        with pytest.raises(AssertionError):
            assert_same(found, pages(7, 4))


def test_link_without_nofollow_is_followed(disk_dir: Path, victims: Victims) -> None:
    """Check the control: the watcher sees it."""
    made(disk_dir)
    path = object_file(disk_dir, KEY)
    path.unlink()
    path.symlink_to(victims.file)

    def follow(call: Call) -> Any:
        if call.name == "stat":
            return call.plain(*call.args, **{**call.options, "follow_symlinks": True})
        name, flags, *rest = call.args
        return call.plain(name, flags & ~os.O_NOFOLLOW, *rest, **call.options)

    following = system_call("open", "stat", answer=follow)
    with following, watched() as seen, TierStore("1MB", disk_dir, device="cpu") as store:
        assert store.keys() == [OTHER]
    assert [
        event
        for event in seen.outside(disk_dir, disk_dir.parent, cache_file())
        if event[0] == "open"
    ]
