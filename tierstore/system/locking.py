"""The lock of a store's directory, across forks and crashes.

It is a `flock` on the file LOCK, which is never removed and names its owner. The file is empty only
if its last owner closed the directory and synced every name in it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import time
from pathlib import Path

from tierstore.errors import StoreLockedError
from tierstore.system.files import close_quietly
from tierstore.system.objects import LOCK, READ

MAX_PROCESS = 1 << 31
MAX_SHOWN = 64
"""Maximum characters of LOCK's content in a message: the file may contain anything."""

# Locks that this process holds. A forked child inherits the descriptors, and the lock is held while
# any copy is open. The child closes them, or it would hold the lock after its parent ends.
_held: set[int] = set()


def close_inherited_locks(held: set[int] = _held) -> None:
    """Close the copies of its parent's locks that a forked child inherits."""
    while held:
        os.close(held.pop())


os.register_at_fork(after_in_child=close_inherited_locks)


def take_lock(disk_dir: str) -> tuple[int, bool]:
    """Take the lock of a directory. Returns it, and whether its last owner closed the directory.

    Raises StoreLockedError or OSError.
    """
    flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(os.path.join(disk_dir, LOCK), flags, 0o600)
    _held.add(descriptor)
    try:
        return descriptor, _take(descriptor, disk_dir)
    except BaseException:
        release_lock(descriptor)
        raise


def _take(descriptor: int, disk_dir: str) -> bool:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        raise OSError(
            errno.EINVAL, "LOCK is not a regular file with one name", os.path.join(disk_dir, LOCK)
        )
    if not try_lock(descriptor):
        raise StoreLockedError(
            f"{disk_dir} is in use by another live store ({describe_owner(descriptor)}): close "
            "that one, share it between pipelines, or choose another disk_dir"
        ) from None
    was_closed = os.fstat(descriptor).st_size == 0
    write_owner(descriptor)
    return was_closed


def release_lock(descriptor: int) -> None:
    """Release the lock, even if a child that was forked outside Python has a copy of it."""
    if descriptor in _held:  # otherwise this is a forked child, and its parent owns the lock
        _held.discard(descriptor)
        with contextlib.suppress(OSError):  # the file system does not support locks
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        close_quietly(descriptor)


def write_owner(descriptor: int) -> None:
    """Write the identity of this process to the LOCK file.

    Other processes show it in their messages, and an empty file means that the last owner synced
    all names.
    """
    owner = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()
    os.pwrite(descriptor, owner, 0)
    os.ftruncate(descriptor, len(owner))


def try_lock(descriptor: int) -> bool:
    """Try to take the lock, retrying while `is_locked` probes it in another process."""
    for _ in range(5):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.02)
    return False


def describe_owner(descriptor: int) -> str:
    """Describe the process that wrote the LOCK file, for a message."""
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0))
        process, host = owner["pid"], str(owner["host"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "an unknown process"
    if type(process) is not int or not 0 < process <= MAX_PROCESS:
        return "an unknown process"
    name = f"process {process} on {host[:MAX_SHOWN]!a}"
    if host == socket.gethostname() and _has_ended(process):
        return f"{name}, which has ended: a process that it forked is alive, and must end too"
    return name


def _has_ended(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # alive, and owned by another user
    return False


def is_locked(disk_dir: str | Path) -> str | None:
    """Return a description of the lock's current owner; None if it is free. Changes nothing."""
    try:
        descriptor = os.open(os.path.join(disk_dir, LOCK), READ)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return describe_owner(descriptor)
    except OSError:
        return None  # the file system does not support locks
    finally:
        close_quietly(descriptor)
