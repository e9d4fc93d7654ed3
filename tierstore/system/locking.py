"""The lock of a store's directory: who holds it, and what becomes of it when processes fork or die.

It is a `flock` on the file LOCK, which is never removed and says who holds it. The file is empty
only if its last owner closed the directory and had seen to it that every name in it lasts.
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
"""Characters of what LOCK says, at most: anything may lie there."""

# Locks that this process holds. A forked child has copies of the descriptors, and as long as one is
# open the lock is held: so the child closes them, lest it keep others out when its parent is gone.
_held: set[int] = set()


def leave_to_the_parent(held: set[int] = _held) -> None:
    """Close the copies that a forked child has of its parent's locks."""
    while held:
        os.close(held.pop())


os.register_at_fork(after_in_child=leave_to_the_parent)


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
        give_back(descriptor)
        raise


def _take(descriptor: int, disk_dir: str) -> bool:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        raise OSError(errno.EINVAL, "LOCK is no file of its own", os.path.join(disk_dir, LOCK))
    if not try_lock(descriptor):
        raise StoreLockedError(
            f"{disk_dir} is in use by another live store ({describe_owner(descriptor)}): close "
            "that one, share it between pipelines, or choose another disk_dir"
        ) from None
    was_closed = os.fstat(descriptor).st_size == 0
    sign_lock(descriptor)
    return was_closed


def give_back(descriptor: int) -> None:
    """Give the lock back, also where a child that was forked past Python has a copy of it."""
    if descriptor in _held:  # else this is such a child, and the lock is its parent's
        _held.discard(descriptor)
        with contextlib.suppress(OSError):  # the file system knows no locks
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        close_quietly(descriptor)


def sign_lock(descriptor: int) -> None:
    """Write into the LOCK file who holds it: for the messages of others, and because the file is
    empty only if the last owner has seen to it that nothing is in doubt."""
    owner = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()
    os.pwrite(descriptor, owner, 0)
    os.ftruncate(descriptor, len(owner))


def try_lock(descriptor: int) -> bool:
    """Take the lock, bearing with somebody who only looks whether it is held (`is_locked`)."""
    for _ in range(5):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.02)
    return False


def describe_owner(descriptor: int) -> str:
    """Who wrote the LOCK file, for a message."""
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0))
        process, host = owner["pid"], str(owner["host"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "an unknown process"
    if type(process) is not int or not 0 < process <= MAX_PROCESS:
        return "an unknown process"
    name = f"process {process} on {host[:MAX_SHOWN]!a}"
    if host == socket.gethostname() and _has_ended(process):
        return f"{name}, which has ended: a process that it forked lives on, and must end too"
    return name


def _has_ended(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # somebody else's, and alive
    return False


def is_locked(disk_dir: str | Path) -> str | None:
    """Who holds the directory's lock now; None if nobody does. Changes nothing."""
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
        return None  # the file system knows no locks
    finally:
        close_quietly(descriptor)
