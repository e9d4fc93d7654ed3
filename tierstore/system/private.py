"""Directories and files that no other user may change, whatever the umask."""

from __future__ import annotations

import os
import stat

OWNER_ONLY = 0o700
"""Mode of a store's directories."""
READABLE = 0o755
"""Mode, before the umask, of a user's own directories: others may read them, not write."""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def make_directories(path: str, mode: int = OWNER_ONLY) -> None:
    """Create a directory and its missing parents, all with this mode.

    `os.makedirs` creates the parents by the umask alone: writable by all where that is 0. Raises
    FileExistsError where another kind of file has the name, and other OSErrors.
    """
    if os.path.isdir(path):
        return
    above = os.path.dirname(path)
    if above not in ("", path):
        make_directories(above, mode)
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def deny_others_writing(path: str | int) -> None:
    """Remove group and world write permission from our file or directory. Raises OSError."""
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & _OTHERS_WRITE:
        os.chmod(path, mode & ~_OTHERS_WRITE)


def why_not_private(path: str) -> str | None:
    """Return why other users can enter or replace a directory; None if it is private.

    A link of another user counts as not private: it may lead elsewhere at any time. Raises OSError.
    """
    us = os.geteuid()
    status, link = os.stat(path), os.lstat(path)
    if link.st_uid not in (us, 0) or status.st_uid != us:
        return f"it belongs to user {link.st_uid if link.st_uid != us else status.st_uid}"
    if not stat.S_ISDIR(status.st_mode):
        return "it is not a directory"
    if stat.S_IMODE(status.st_mode) & 0o077:
        return "others can enter it"
    return None
