"""Being the only user of a store's directory, and removing files from it.

What is removed is a regular file below the directory that bears one of the store's own names, and
is still the file that was looked at. It is removed by its name in an open directory, so that no
link, whenever it was planted, can lead to another file.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tierstore.cli.directories import Item, look_at, opened_parent
from tierstore.cli.frame import Code, Failure, system_failure
from tierstore.cli.report import opened_store
from tierstore.system.files import sync_names
from tierstore.system.locking import describe_owner, sign_lock, try_lock
from tierstore.system.objects import LOCK

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextmanager
def only_user(directory: str) -> Iterator[int]:
    """Hold the directory's lock, as a live store does. Gives a descriptor of the directory."""
    with opened_store(directory) as root:
        try:
            descriptor = os.open(LOCK, _FLAGS, 0o600, dir_fd=root)
        except OSError as error:
            raise system_failure(error, f"opening {directory}/{LOCK}") from error
        try:
            _take(descriptor, directory)
            yield root
        finally:
            os.close(descriptor)


def _take(descriptor: int, directory: str) -> None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        # Our process id is written into it: never into a file that has another name elsewhere.
        raise Failure(
            f"{directory}/{LOCK} is no regular file with only this name",
            f"Remove it by hand if no store uses {directory}.",
            Code.UNEXPECTED,
        )
    if not try_lock(descriptor):
        raise Failure(
            f"{directory} is in use by {describe_owner(descriptor)}",
            "Close that store first (end that process), then try again.",
            Code.LOCKED,
        )
    try:
        sign_lock(descriptor)
    except OSError as error:
        # A full disk has no room for our name, and must not keep anybody from making room. The lock
        # is ours, and each removal is synced by itself.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise system_failure(error, f"writing {directory}/{LOCK}") from error


def remove(directory: str, root: int, items: Iterable[Item]) -> list[Item]:
    """Remove files for good. Returns those that were removed; the others were gone already."""
    removed: list[Item] = []
    for item in items:
        try:
            removed += [item] if _remove_one(root, item) else []
        except OSError as error:
            before = f" (after {len(removed)} of them were removed)" if removed else ""
            raise system_failure(error, f"removing from {directory}{before}") from error
    return removed


def _remove_one(root: int, item: Item) -> bool:
    with opened_parent(root, item.name) as parent:
        leaf = os.path.basename(item.name)
        if parent is None or item.kind != "file" or look_at(parent, leaf, item.name) != item:
            return False
        os.unlink(leaf, dir_fd=parent)
        sync_names(parent)
        return True
