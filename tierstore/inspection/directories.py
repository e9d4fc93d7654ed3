"""Opens, locks and lists a store's directory without following links.

Each directory is opened relative to its parent, so a planted link cannot lead out of the store.
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
from tierstore.system.locking import describe_owner, try_lock, write_owner
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
    """An entry of a store's directory.

    `name` is its path relative to the store; `inode` distinguishes it from a replacement. `nbytes`
    is 0 unless it is a regular file. `mode` has the permission bits.
    """

    name: str
    kind: str
    nbytes: int
    modified: float
    inode: int
    mode: int


@contextmanager
def open_below(parent: int, name: str) -> Iterator[int | None]:
    """Open a directory in an open one; None if it is missing or is not a directory."""
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
def open_parent(root: int, name: str) -> Iterator[int | None]:
    """Open the parent directory of `name` without following links; None if it is missing."""
    with ExitStack() as stack:
        here: int | None = root
        for parent in name.split("/")[:-1]:
            if here is not None:
                here = stack.enter_context(open_below(here, parent))
        yield here


def stat_item(parent: int, leaf: str, name: str) -> Item | None:
    """Return the item of `leaf` in an open directory, without opening it; None if missing."""
    try:
        status = os.stat(leaf, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return item_of(status, name)


def item_of(status: os.stat_result, name: str) -> Item:
    """Return the item of an entry with this status."""
    kind = _KINDS.get(stat.S_IFMT(status.st_mode), "device")
    nbytes = status.st_size if kind == "file" else 0
    mode = stat.S_IMODE(status.st_mode)
    return Item(name, kind, nbytes, status.st_mtime, status.st_ino, mode)


def items_in(descriptor: int, prefix: str) -> Iterator[tuple[str, Item]]:
    """Yield the entries of an open directory, sorted by name."""
    for leaf in sorted(os.listdir(descriptor)):
        item = stat_item(descriptor, leaf, prefix + leaf)
        if item is not None:
            yield leaf, item


def items_below(parent: int, name: str, prefix: str = "") -> Iterator[tuple[int, str, Item]]:
    """Yield the entries of a directory in an open one; none if it is missing or not a directory.

    Each entry comes with a descriptor of that directory, which is valid until the iteration ends.
    """
    with open_below(parent, name) as descriptor:
        if descriptor is not None:
            for leaf, item in items_in(descriptor, f"{prefix}{name}/"):
                yield descriptor, leaf, item


# A store's directory ------------------------------------------------------------------------------


def not_a_directory(path: str) -> str:
    """Return a message: nothing exists at the path, or something that is not a directory."""
    exists = os.path.lexists(path)
    return f"{path} is not a directory" if exists else f"there is no directory {path}"


@contextmanager
def open_store(directory: str) -> Iterator[int]:
    """Open a store's directory. Raises TierStoreError if it is missing or is not a store."""
    try:
        descriptor = os.open(directory, _DIRECTORY)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise TierStoreError(f"{not_a_directory(directory)}: {_ADVICE}") from error
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
        raise TierStoreError(f"{directory}/{MARKER} is not a regular file: {_ADVICE}") from error
    if marker is None:
        raise TierStoreError(f"{directory} is not a store, because it has no {MARKER}: {_ADVICE}")


@contextmanager
def locked_store(directory: str) -> Iterator[int]:
    """Open a store's directory and hold its lock, as a live store does.

    Raises StoreLockedError, TierStoreError or TransferError.
    """
    with open_store(directory) as root:
        with transfer_errors("opening", path=f"{directory}/{LOCK}"):
            descriptor = os.open(LOCK, _LOCK_FLAGS, 0o600, dir_fd=root)
        try:
            _acquire_lock(descriptor, directory)
            yield root
        finally:
            os.close(descriptor)


def _acquire_lock(descriptor: int, directory: str) -> None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        # Our process id is written into it, so it must not be a file with another name elsewhere.
        raise TransferError(
            f"{directory}/{LOCK} is not a regular file with a single name: remove it by hand if no "
            f"store uses {directory}"
        )
    if not try_lock(descriptor):
        raise StoreLockedError(
            f"{directory} is in use by {describe_owner(descriptor)}: close that store, or end that "
            "process, then try again"
        )
    try:
        write_owner(descriptor)
    except OSError as error:
        # On a full disk our name cannot be written, but removing files must still work. The lock is
        # held in any case, and each removal is synced separately.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise transfer_error(error, "writing", key=None, path=f"{directory}/{LOCK}") from error
