"""Directories that are opened one in the other, never through a link, and what lies in them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NO_DIRECTORY = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_KINDS = (
    (stat.S_ISREG, "file"),
    (stat.S_ISDIR, "directory"),
    (stat.S_ISLNK, "link"),
    (stat.S_ISFIFO, "fifo"),
    (stat.S_ISSOCK, "socket"),
    (stat.S_ISBLK, "device"),
    (stat.S_ISCHR, "device"),
)


@dataclass(frozen=True)
class Item:
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
        descriptor = os.open(name, DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
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
    kind = next((kind for test, kind in _KINDS if test(status.st_mode)), "device")
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
