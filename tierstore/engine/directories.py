"""The directory of a store, and the default if the user names none."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from tierstore.errors import StoreLockedError, TransferError
from tierstore.system.file_systems import (
    MEMORY_FILE_SYSTEMS,
    MOUNTS,
    NETWORK_FILE_SYSTEMS,
    file_system_of,
)

logger = logging.getLogger("tierstore.engine")

VARIABLE = "TIERSTORE_DIR"


def chosen_directory(disk_dir: str | os.PathLike[str] | None) -> str:
    """Return `disk_dir`, or the value of `TIERSTORE_DIR`, or a directory in the user's cache.

    The default is a subdirectory of tierstore's cache, which also holds files of the command line.
    See `resolved_directory` for the form of the path, and for errors.
    """
    if disk_dir is not None:
        return resolved_directory(disk_dir)
    named = os.environ.get(VARIABLE)
    if named:
        return resolved_directory(named)
    from platformdirs import user_cache_path  # lazily: few stores need it

    return resolved_directory(user_cache_path("tierstore") / "store")


def resolved_directory(path: str | os.PathLike[str]) -> str:
    """Return the absolute path of a user's directory, with `~` and symbolic links resolved.

    Links on the way to a store are the user's choice (such as a home on another disk), so they are
    resolved once, here. Inside the store no link is followed.

    Raises TransferError for a dangling link: its disk may not be mounted.
    """
    text = os.fspath(path)
    if not text:
        raise ValueError("disk_dir is empty: pass a directory, '.' for the current one")
    wanted = there = os.path.abspath(os.path.expanduser(text))
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    if os.path.islink(there) and not os.path.exists(there):
        raise TransferError(
            f"{wanted} cannot be a store's directory: {there} is a link to "
            f"{os.path.realpath(there)}, which does not exist; mount that disk, or pass another "
            "disk_dir",
            path=wanted,
        )
    return os.path.realpath(wanted)


def warn_about_file_system(directory: str, mounts: str = MOUNTS) -> None:
    """Log a warning if a directory is on a file system in memory or on a network."""
    kind = file_system_of(directory, mounts)
    if kind in MEMORY_FILE_SYSTEMS:
        logger.warning(
            "%s is on %s: its files take memory in addition to ram_budget, and are lost when the "
            "machine stops; pass a disk_dir on a disk",
            directory,
            kind,
        )
    elif kind in NETWORK_FILE_SYSTEMS:
        logger.warning(
            "%s is on %s, which other machines may mount: file locks may not keep them out; pass a "
            "disk_dir on a local disk",
            directory,
            kind,
        )


@contextmanager
def explain_default_directory(disk_dir: str | os.PathLike[str] | None) -> Iterator[None]:
    """Explain in StoreLockedError how to choose a directory, if the user chose none."""
    try:
        yield
    except StoreLockedError as error:
        if disk_dir is not None:
            raise
        raise StoreLockedError(
            f"{error}. This is the default directory: pass another disk_dir to each store that is "
            f"open at the same time, or set {VARIABLE} for this process"
        ) from None
