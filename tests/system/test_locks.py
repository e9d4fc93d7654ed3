"""The owner of a directory, its description, and the cleanup of its remains."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Container
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.helpers.files import is_open, open_files
from tests.helpers.system_calls import Call, system_call
from tests.tiers.dying import KEY, NEW, OLD, data_of, packing
from tierstore.errors import DiskFullError, StoreLockedError, TierStoreError, TransferError
from tierstore.model.groups import Block, TensorSpec, pack
from tierstore.model.header import digest
from tierstore.model.sizes import PAGE
from tierstore.system import locking
from tierstore.system.locking import MAX_PROCESS, MAX_SHOWN, describe_owner, is_locked
from tierstore.tiers.directory import ObjectDirectory

WAIT = 60.0
HOST = socket.gethostname()


def free(disk_dir: Path) -> bool:
    """Return whether another process could take the lock."""
    code = (
        "import fcntl, sys\n"
        "file = open(sys.argv[1])\n"
        "try: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "except BlockingIOError: sys.exit(1)\n"
    )
    return subprocess.run([sys.executable, "-c", code, str(disk_dir / "LOCK")]).returncode == 0


def owner_written_as(text: str, tmp_path: Path) -> str:
    path = tmp_path / "LOCK"
    path.write_text(text)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return describe_owner(descriptor)
    finally:
        os.close(descriptor)


def owner(process: object, host: object) -> str:
    return json.dumps({"pid": process, "host": host})


def test_live_owner_is_named_by_pid_and_host(tmp_path: Path) -> None:
    found = owner_written_as(owner(os.getpid(), HOST), tmp_path)
    assert found == f"process {os.getpid()} on {HOST!r}"


def test_dead_owner_is_reported_to_have_left_a_fork(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(WAIT)
    for process in (ended.pid, MAX_PROCESS - 1):  # no system has process ids that large
        assert "which has ended" in owner_written_as(owner(process, HOST), tmp_path)
    elsewhere = owner_written_as(owner(ended.pid, "elsewhere"), tmp_path)
    assert elsewhere == f"process {ended.pid} on 'elsewhere'", "another machine is unknown"


def test_owner_of_another_user_counts_as_alive(tmp_path: Path) -> None:
    with system_call("kill", fails_with=errno.EPERM) as asked:
        assert "has ended" not in owner_written_as(owner(4711, HOST), tmp_path)
    assert asked


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", "[]", '{"pid": 1}', "[" * 5000, "\x00"),
        *(owner(process, HOST) for process in ("x", [], True, 1.0, 0, -1, MAX_PROCESS + 1)),
    ],
)
def test_unreadable_owner_is_unknown(text: str, tmp_path: Path) -> None:
    assert owner_written_as(text, tmp_path) == "an unknown process"


def test_host_name_of_any_length_fits_one_line(tmp_path: Path) -> None:
    found = owner_written_as(owner(1, "h\n" * MAX_SHOWN), tmp_path)
    assert found == "process 1 on " + ascii("h\n" * (MAX_SHOWN // 2))
    assert "\n" not in found


def test_directory_without_a_lock_has_no_owner(tmp_path: Path) -> None:
    assert is_locked(tmp_path) is None
    assert is_locked(tmp_path / "missing") is None
    assert not any(tmp_path.iterdir())


def test_file_system_without_locks_has_no_owner(disk_dir: Path) -> None:
    directory = ObjectDirectory(disk_dir)
    with system_call("flock", fails_with=errno.ENOLCK):
        assert is_locked(disk_dir) is None
    assert is_locked(disk_dir) is not None, "the control"
    directory.close()


def test_lock_is_retried_for_a_moment_only(disk_dir: Path) -> None:
    """A process that only tests the lock holds it for a moment."""
    ObjectDirectory(disk_dir).close()

    def busy(tries: Container[int]) -> AbstractContextManager[list[Call]]:
        return system_call(
            "flock",
            fails_with=errno.EAGAIN,
            when=lambda call: call.args[1] & fcntl.LOCK_EX,
            at=tries,
        )

    with busy(range(1, 100)) as tries, pytest.raises(StoreLockedError):
        ObjectDirectory(disk_dir)
    assert 1 < len(tries) < 10
    with busy(range(1, 2)) as tries:
        ObjectDirectory(disk_dir).close()
    assert len(tries) == 1
    assert free(disk_dir)


# Forks -------------------------------------------------------------------------------------------


def test_forked_child_releases_the_lock_with_its_parent(disk_dir: Path) -> None:
    directory = ObjectDirectory(disk_dir)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)  # until the parent has checked
        os._exit(0)
    os.close(reader)
    directory.close()
    try:
        assert free(disk_dir)
    finally:
        os.close(writer)
        os.waitpid(child, 0)


def test_forked_child_releases_no_lock(disk_dir: Path) -> None:
    """Only the child closes it; the parent still holds the lock."""
    directory = ObjectDirectory(disk_dir)
    child = os.fork()
    if child == 0:
        directory.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert not free(disk_dir)
    directory.close()
    assert free(disk_dir)


def test_fork_closes_every_copy_of_a_lock(tmp_path: Path) -> None:
    """Covers all locks of the parent; an unrelated descriptor stays open."""
    directories = [ObjectDirectory(tmp_path / name) for name in "abc"]
    other = os.open(tmp_path, os.O_RDONLY)
    child = os.fork()
    if child == 0:
        locks = [path for path in open_files(tmp_path).values() if path.endswith("/LOCK")]
        locking.release_lock(other)  # not held here: it may be another file's descriptor by now
        os._exit(len(locks) + (0 if is_open(other) else 100))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    locking.release_lock(other)  # not held here either
    left = {other}
    locking.close_inherited_locks(left)  # as in the child, but observable here
    assert not left and not is_open(other)
    for directory in directories:
        directory.close()


# Orphans -----------------------------------------------------------------------------------------


def test_orphans_of_a_killed_process_alone_are_removed(disk_dir: Path) -> None:
    ObjectDirectory(disk_dir).close()
    temporary = disk_dir / "tmp"
    left = [
        disk_dir / f".spill-123-{'0' * 16}",
        temporary / f"object-{'a' * 16}",
        temporary / f"marker-{'f' * 16}",
    ]
    others = [
        disk_dir / f".spill-123-{'0' * 15}",
        disk_dir / f"spill-123-{'0' * 16}",
        temporary / f"object-{'a' * 17}",
        temporary / "notes.txt",
    ]
    for path in [*left, *others]:
        path.write_text("something")
    place = temporary / f"object-{'b' * 16}"
    place.mkdir()  # a foreign file that blocks nothing
    ObjectDirectory(disk_dir).close()
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in [*others, place])


def test_missing_directories_are_created_private(tmp_path: Path) -> None:
    place = tmp_path / "a" / "b" / "store"
    directory = ObjectDirectory(place)
    directory.write(KEY, packing(), data_of(OLD), single=False)
    directory.close()
    assert [stored.key for stored in ObjectDirectory(place).objects()] == [KEY]
    assert place.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("exists", "number", "opens"),
    [
        (False, errno.EACCES, True),
        (False, errno.EIO, False),
        (True, errno.EACCES, True),
        (True, errno.EIO, True),
    ],
)
def test_new_directory_name_is_synced(
    exists: bool, number: int, opens: bool, disk_dir: Path
) -> None:
    """Fail to sync the directory above.

    Without permission it cannot be synced; a failing disk is an error.
    """
    if exists:
        disk_dir.mkdir()
    above = str(disk_dir.parent)
    with system_call("open", fails_with=number, when=lambda call: call.args[0] == above):
        if opens:
            ObjectDirectory(disk_dir).close()
        else:
            with pytest.raises(Exception, match=os.strerror(number)):
                ObjectDirectory(disk_dir)


# Closing -----------------------------------------------------------------------------------------


def test_directory_closed_well_leaves_an_empty_lock(disk_dir: Path) -> None:
    directory = ObjectDirectory(disk_dir)
    assert (disk_dir / "LOCK").stat().st_size > 0
    directory.close()
    assert (disk_dir / "LOCK").stat().st_size == 0


def test_unsynced_directory_name_is_left_to_the_next_owner(disk_dir: Path) -> None:
    directory = ObjectDirectory(disk_dir)
    directory.write(KEY, packing(), data_of(OLD), single=False)
    with (
        system_call("fsync", fails_with=errno.EIO),
        pytest.raises(TransferError, match="Input/output"),
    ):
        directory.remove(KEY)
    directory.close()
    assert (disk_dir / "LOCK").stat().st_size > 0, "the lock file does not record the doubt"
    with system_call("fsync") as synced:
        ObjectDirectory(disk_dir).close()
    with system_call("fsync") as synced_without_doubt:
        ObjectDirectory(disk_dir).close()
    assert len(synced) > len(synced_without_doubt), "the next owner has not synced it"


@pytest.mark.parametrize(
    ("mode", "mine", "refused"),
    [
        (0o700, True, False),
        (0o777, True, False),
        (0o755, False, False),
        (0o775, False, True),
        (0o757, False, True),
    ],
)
def test_directory_writable_by_others_raises(
    mode: int, mine: bool, refused: bool, disk_dir: Path
) -> None:
    disk_dir.mkdir()
    disk_dir.chmod(mode)
    with system_call("geteuid", returns=os.geteuid() + (not mine)):
        if refused:
            with pytest.raises(TierStoreError, match="belongs to another user"):
                ObjectDirectory(disk_dir)
        else:
            ObjectDirectory(disk_dir).close()


def test_group_of_one_tensor_is_written_from_its_memory(disk_dir: Path) -> None:
    spec = TensorSpec("t", "U8", (3 * PAGE,), (1,), 0)
    one = pack([Block("t", "U8", (3 * PAGE,), 3 * PAGE, (spec,))])
    data = random.Random(1).randbytes(one.nbytes)
    directory = ObjectDirectory(disk_dir)
    stored = directory.write(KEY, one, memoryview(bytearray(data)), single=True)
    raw = Path(directory.path_of(KEY)).read_bytes()
    directory.close()
    assert raw[stored.data_start :] == data[: 3 * PAGE]
    assert stored.digests == (digest(data[: 3 * PAGE]),)
    [check] = stored.source("path").checks
    [segment] = stored.source("path").segments
    assert (check.nbytes, segment.extent.offset, segment.at) == (3 * PAGE, stored.data_start, 0)
    assert stored.source("path", base=PAGE).segments[0].at == PAGE
    assert stored.spec().key == KEY and stored.spec("other").key == "other"


def test_group_without_bytes_reads_nothing(disk_dir: Path) -> None:
    spec = TensorSpec("t", "F32", (0,), (1,), 0)
    directory = ObjectDirectory(disk_dir)
    stored = directory.write(
        KEY, pack([Block("t", "F32", (0,), 0, (spec,))]), memoryview(b""), single=True
    )
    directory.close()
    assert stored.source("path").segments == ()
    assert len(stored.source("path").checks) == 1


@pytest.mark.parametrize("call", ["posix_fallocate", "fsync", "rename"])
def test_write_failure_leaves_only_the_old_group(call: str, disk_dir: Path) -> None:
    directory = ObjectDirectory(disk_dir)
    before = directory.write(KEY, packing(), data_of(OLD), single=False)
    with system_call(call, fails_with=errno.ENOSPC), pytest.raises(DiskFullError) as error:
        directory.write(KEY, packing(), data_of(NEW), single=False)
    assert error.value.key == KEY
    assert os.listdir(disk_dir / "tmp") == []
    assert directory.objects() == [before]
    directory.close()


def test_lock_that_is_another_file_is_not_written_to(disk_dir: Path) -> None:
    ObjectDirectory(disk_dir).close()
    os.link(disk_dir / "LOCK", disk_dir / "precious")
    with pytest.raises(TransferError, match="not a regular file with one name"):
        ObjectDirectory(disk_dir)
    assert (disk_dir / "precious").read_bytes() == b""
