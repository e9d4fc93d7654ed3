"""A store's directory: opened, locked, and read without following links.

Each directory is opened in the one above it, so that no planted link leads out of the store.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from tierstore.errors import StoreLockedError, TierStoreError, TransferError
from tierstore.system.files import transfer_error, transfer_errors
from tierstore.system.locking import describe_owner, sign_lock, try_lock
from tierstore.system.objects import LOCK, MARKER, read_marker

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NO_DIRECTORY = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_ADVICE = "give the directory that the store was opened with (its disk_dir)"
_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "link",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
}


class Item(NamedTuple):
    """An entry of the directory. `name` is its path from there; `inode` tells it from a successor.

    Only regular files count bytes. `mode` has the permissions, as `chmod` takes them.
    """

    name: str
    kind: str
    nbytes: int
    modified: float
    inode: int
    mode: int


@contextmanager
def opened_below(parent: int, name: str) -> Iterator[int | None]:
    """Open a directory in an open one; None if it is missing or is something else."""
    descriptor = None
    try:
        descriptor = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY:
            raise
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


@contextmanager
def opened_parent(root: int, name: str) -> Iterator[int | None]:
    """Open the directory that `name` lies in, never through a link; None if it is gone."""
    with ExitStack() as stack:
        here: int | None = root
        for parent in name.split("/")[:-1]:
            if here is not None:
                here = stack.enter_context(opened_below(here, parent))
        yield here


def look_at(parent: int, leaf: str, name: str) -> Item | None:
    """Describe `leaf` in an open directory, without opening it; None if it is missing."""
    try:
        status = os.stat(leaf, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return item_of(status, name)


def item_of(status: os.stat_result, name: str) -> Item:
    """Describe an entry by its status."""
    kind = _KINDS.get(stat.S_IFMT(status.st_mode), "device")
    nbytes = status.st_size if kind == "file" else 0
    mode = stat.S_IMODE(status.st_mode)
    return Item(name, kind, nbytes, status.st_mtime, status.st_ino, mode)


def items_in(descriptor: int, prefix: str) -> Iterator[tuple[str, Item]]:
    """List an open directory, sorted by name."""
    for leaf in sorted(os.listdir(descriptor)):
        item = look_at(descriptor, leaf, prefix + leaf)
        if item is not None:
            yield leaf, item


def items_below(parent: int, name: str, prefix: str = "") -> Iterator[tuple[int, str, Item]]:
    """List a directory in an open one; nothing if it is missing or is something else.

    Each entry comes with a descriptor of that directory, open until the next is asked for.
    """
    with opened_below(parent, name) as descriptor:
        if descriptor is not None:
            for leaf, item in items_in(descriptor, f"{prefix}{name}/"):
                yield descriptor, leaf, item


# A store's directory ------------------------------------------------------------------------------


@contextmanager
def opened_store(directory: str) -> Iterator[int]:
    """Open a store's directory. Raises TierStoreError if there is none, or if it is no store."""
    try:
        descriptor = os.open(directory, _DIRECTORY)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise TierStoreError(f"{directory} is no directory: {_ADVICE}") from error
    except OSError as error:
        raise transfer_error(error, "opening", key=None, path=directory) from error
    try:
        _check_marker(directory)
        yield descriptor
    finally:
        os.close(descriptor)


def _check_marker(directory: str) -> None:
    try:
        marker = read_marker(directory)
    except TierStoreError as error:
        raise TierStoreError(str(error)) from error
    except PermissionError as error:
        raise transfer_error(error, "reading", key=None, path=f"{directory}/{MARKER}") from error
    except OSError as error:  # a link or a directory has taken its place
        raise TierStoreError(f"{directory}/{MARKER} is no regular file: {_ADVICE}") from error
    if marker is None:
        raise TierStoreError(f"{directory} is no store, as it has no {MARKER}: {_ADVICE}")


@contextmanager
def only_user(directory: str) -> Iterator[int]:
    """Open a store's directory and hold its lock, as a live store does.

    Raises StoreLockedError, TierStoreError or TransferError.
    """
    with opened_store(directory) as root:
        with transfer_errors("opening", path=f"{directory}/{LOCK}"):
            descriptor = os.open(LOCK, _LOCK_FLAGS, 0o600, dir_fd=root)
        try:
            _take(descriptor, directory)
            yield root
        finally:
            os.close(descriptor)


def _take(descriptor: int, directory: str) -> None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        # Our process id is written into it: never into a file that has another name elsewhere.
        raise TransferError(
            f"{directory}/{LOCK} is no regular file with only this name: remove it by hand if no "
            f"store uses {directory}"
        )
    if not try_lock(descriptor):
        raise StoreLockedError(
            f"{directory} is in use by {describe_owner(descriptor)}: close that store first (end "
            "that process), then try again"
        )
    try:
        sign_lock(descriptor)
    except OSError as error:
        # A full disk has no room for our name, and removing must still make room. The lock is ours,
        # and each removal is synced by itself.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise transfer_error(error, "writing", key=None, path=f"{directory}/{LOCK}") from error
