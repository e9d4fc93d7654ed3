"""Directories and files that no other user may change, whatever the umask is."""

from __future__ import annotations

import os
import stat

OWNER_ONLY = 0o700
"""The mode of directories that are a store's."""
READABLE = 0o755
"""The mode, less the umask, of directories that are a user's own: others may look, and not write.
"""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def make_directories(path: str, mode: int = OWNER_ONLY) -> None:
    """Make a directory, and those above it that are missing, all of this mode.

    (`os.makedirs` makes those above by the umask alone: open to all where that is 0.) Raises
    FileExistsError where something else is in the way, and other OSErrors.
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
    """Take from a file or directory of ours what lets others write to it. Raises OSError."""
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & _OTHERS_WRITE:
        os.chmod(path, mode & ~_OTHERS_WRITE)


def why_not_private(path: str) -> str | None:
    """What lets others into a directory, or put another in its place; None if it is ours alone.

    A link that another user has made may lead elsewhere at any time. Raises OSError.
    """
    us = os.geteuid()
    status, link = os.stat(path), os.lstat(path)
    if link.st_uid not in (us, 0) or status.st_uid != us:
        return f"it belongs to user {link.st_uid if link.st_uid != us else status.st_uid}"
    if not stat.S_ISDIR(status.st_mode):
        return "it is no directory"
    if stat.S_IMODE(status.st_mode) & 0o077:
        return "others can enter it"
    return None
