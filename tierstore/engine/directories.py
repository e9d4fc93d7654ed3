"""Which directory a store works in where its user names none."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from tierstore.errors import StoreLockedError, TransferError
from tierstore.system.file_systems import IN_MEMORY, MOUNTS, OF_OTHER_MACHINES, file_system_of

logger = logging.getLogger("tierstore.engine")

VARIABLE = "TIERSTORE_DIR"


def chosen_directory(disk_dir: str | os.PathLike[str] | None) -> str:
    """Return the directory that was passed, that `TIERSTORE_DIR` names, or one in the user's cache.

    In the cache it has a name of its own: files of the command line lie beside it. See
    `resolved_directory` for the form of the path, and for errors.
    """
    if disk_dir is not None:
        return resolved_directory(disk_dir)
    named = os.environ.get(VARIABLE)
    if named:
        return resolved_directory(named)
    from platformdirs import user_cache_path  # when it is needed: few stores do

    return resolved_directory(user_cache_path("tierstore") / "store")


def resolved_directory(path: str | os.PathLike[str]) -> str:
    """Return the absolute path of a directory that a user named, without `~` and without links.

    Links on the way to a store are the user's choice (a home on another disk), so they are followed
    once, here. Inside the store none is ever followed.

    Raises TransferError for a link to nothing: the disk behind it may not be mounted.
    """
    text = os.fspath(path)
    if not text:
        raise ValueError("disk_dir is empty: name a directory, '.' for the current one")
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


def tell_of_file_system(directory: str, mounts: str = MOUNTS) -> None:
    """Log a warning where what a directory lies on is not what a store takes it for."""
    kind = file_system_of(directory, mounts)
    if kind in IN_MEMORY:
        logger.warning(
            "%s is on %s: what is written there takes memory, beside ram_budget, and is lost when "
            "the machine stops; pass a disk_dir that is on a disk",
            directory,
            kind,
        )
    elif kind in OF_OTHER_MACHINES:
        logger.warning(
            "%s is on %s, which other machines may see: its locks may not keep them out; pass a "
            "disk_dir on a disk of this machine",
            directory,
            kind,
        )


@contextmanager
def default_explained(disk_dir: str | os.PathLike[str] | None) -> Iterator[None]:
    """If the directory is in use and nobody chose it, the error says how to choose another."""
    try:
        yield
    except StoreLockedError as error:
        if disk_dir is not None:
            raise
        raise StoreLockedError(
            f"{error}. It is the one for stores that name none: pass disk_dir, a directory for "
            f"each store that is open at the same time, or set {VARIABLE} for this process"
        ) from None
