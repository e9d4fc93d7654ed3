"""Which directory a store works in where its user names none."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from tierstore.model.errors import StoreLockedError
from tierstore.system.file_systems import IN_MEMORY, MOUNTS, OF_OTHER_MACHINES, file_system_of

logger = logging.getLogger("tierstore.engine")

VARIABLE = "TIERSTORE_DIR"


def chosen_directory(disk_dir: str | os.PathLike[str] | None) -> str:
    """The directory that was passed; else what `TIERSTORE_DIR` names; else the user's cache.

    In the cache it has a name of its own: what the command line remembers lies beside it.
    """
    if disk_dir is not None:
        return os.fspath(disk_dir)
    named = os.environ.get(VARIABLE)
    if named:
        return os.path.expanduser(named)
    from platformdirs import user_cache_path  # when it is needed: few stores do

    return str(user_cache_path("tierstore") / "store")


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
