"""A store's directory: opened, locked, and read without ever following a link.

Each directory is opened in the one above it, so nothing outside the store is reached, whatever
somebody planted.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from tierstore.cli.output import Code, Failure, system_failure, system_failures
from tierstore.model.errors import TierStoreError
from tierstore.system.locking import describe_owner, sign_lock, try_lock
from tierstore.system.objects import LOCK, MARKER, READ, read_marker

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NO_DIRECTORY = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_ADVICE = "Give the directory that the store was opened with (its disk_dir)."
_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "link",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
}


class Item(NamedTuple):
    """Something in the directory. `name` is its path from there; `inode` tells it from a successor.

    Only regular files count bytes. `mode` is who may do what with it, as `chmod` takes it.
    """

    name: str
    kind: str
    nbytes: int
    modified: float
    inode: int
    mode: int


@contextmanager
def opened_below(parent: int, name: str) -> Iterator[int | None]:
    """A descriptor of a directory's directory; None if it is missing or is something else."""
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
    """A descriptor of the directory that `name` lies in; None if it is not there any more.

    Each directory on the way is opened in the one above it, and never through a link.
    """
    with ExitStack() as stack:
        here: int | None = root
        for parent in name.split("/")[:-1]:
            if here is not None:
                here = stack.enter_context(opened_below(here, parent))
        yield here


def look_at(parent: int, leaf: str, name: str) -> Item | None:
    """What `leaf` in an open directory is, without opening it; None if there is no such name."""
    try:
        status = os.stat(leaf, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return item_of(status, name)


def item_of(status: os.stat_result, name: str) -> Item:
    """Something with this status."""
    kind = _KINDS.get(stat.S_IFMT(status.st_mode), "device")
    nbytes = status.st_size if kind == "file" else 0
    mode = stat.S_IMODE(status.st_mode)
    return Item(name, kind, nbytes, status.st_mtime, status.st_ino, mode)


def items_in(descriptor: int, prefix: str) -> Iterator[tuple[str, Item]]:
    """What an open directory holds, by name."""
    for leaf in sorted(os.listdir(descriptor)):
        item = look_at(descriptor, leaf, prefix + leaf)
        if item is not None:
            yield leaf, item


def items_below(parent: int, name: str, prefix: str = "") -> Iterator[tuple[int, str, Item]]:
    """What a directory's directory holds: nothing if it is missing or is something else.

    Each with a descriptor of that directory, which is open until the next is asked for.
    """
    with opened_below(parent, name) as descriptor:
        if descriptor is not None:
            for leaf, item in items_in(descriptor, f"{prefix}{name}/"):
                yield descriptor, leaf, item


# A store's directory ------------------------------------------------------------------------------


@contextmanager
def opened_store(directory: str) -> Iterator[int]:
    """A descriptor of a store's directory. Fails if there is none, or if it is no store."""
    try:
        descriptor = os.open(directory, _DIRECTORY)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Failure(f"{directory} is no directory", _ADVICE) from error
    except OSError as error:
        raise system_failure(error, f"opening {directory}") from error
    try:
        _check_marker(directory)
        yield descriptor
    finally:
        os.close(descriptor)


def _check_marker(directory: str) -> None:
    try:
        marker = read_marker(directory)
    except TierStoreError as error:
        raise Failure(str(error), _ADVICE) from error
    except PermissionError as error:
        raise system_failure(error, f"reading {directory}/{MARKER}") from error
    except OSError as error:  # a link or a directory has taken its place
        raise Failure(f"{directory}/{MARKER} is no regular file", _ADVICE) from error
    if marker is None:
        raise Failure(f"{directory} is no store: it has no {MARKER}", _ADVICE)


@contextmanager
def only_user(directory: str) -> Iterator[int]:
    """Hold the directory's lock, as a live store does. Gives a descriptor of the directory."""
    with opened_store(directory) as root:
        with system_failures(f"opening {directory}/{LOCK}"):
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


# Documents ----------------------------------------------------------------------------------------


def read_document(
    name: str | os.PathLike[str], limit: int, dir_fd: int | None = None, flags: int = READ
) -> dict[str, Any]:
    """The JSON object in a regular file; an empty one if there is none that can be read.

    Anybody may have put something else there: a pipe keeps nobody waiting, a link is not followed
    (unless `flags` say so), and of a larger file only `limit` bytes are read.
    """
    try:
        with open(name, "rb", opener=lambda path, _: os.open(path, flags, dir_fd=dir_fd)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return {}
            found = json.loads(file.read(limit))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
