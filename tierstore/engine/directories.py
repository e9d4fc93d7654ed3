"""Which directory a store works in where its user names none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tierstore.model.errors import StoreLockedError

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
