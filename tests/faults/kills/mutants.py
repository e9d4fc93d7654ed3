"""Faulty variants of the store. Kills that find no fault in the store find each of these.

Most act at the boundary to the system: the store's call is right, but does less.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from tests.helpers.system_calls import Call, system_call, until_the_end
from tierstore.store import TierStore

# mypy: disable-error-code="method-assign"


def is_of_a_group(call: Call) -> bool:
    """Return whether a path is the temporary file that a group is written to before its commit."""
    return str(call.args[0]).startswith("object-")


def write_in_place() -> None:
    """Write a group over the one it replaces, without a rename."""

    def write(call: Call) -> None:
        name, target = call.args
        new = os.open(name, os.O_RDONLY, dir_fd=call.options["src_dir_fd"])
        data = os.pread(new, os.fstat(new).st_size, 0)
        flags = os.O_CREAT | os.O_RDWR
        old = os.open(target, flags, 0o600, dir_fd=call.options["dst_dir_fd"])
        os.ftruncate(old, len(data))
        os.pwrite(old, data, 0)
        os.fsync(old)
        os.close(old)
        os.close(new)
        os.unlink(name, dir_fd=call.options["src_dir_fd"])

    until_the_end(system_call("rename", answer=write, when=is_of_a_group))


def remove_before_the_rename() -> None:
    """Remove the old group before the rename: for a moment there is neither."""

    def rename(call: Call) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(call.args[1], dir_fd=call.options["dst_dir_fd"])
        call.go_on()

    until_the_end(system_call("rename", answer=rename, when=is_of_a_group))


def never_clean_up() -> None:
    """Skip the deletion of orphans when a store opens."""

    def is_looked_for(call: Call) -> bool:
        return isinstance(call.args[0], int) and str(call.path).endswith("/tmp")

    until_the_end(system_call("listdir", returns=[], when=is_looked_for))


def flush_nothing() -> None:
    """Acknowledge a flush before anything is on disk."""
    TierStore.flush = lambda self: None


def remove_nothing() -> None:
    """Keep files of groups that were discarded, taken, or replaced by non-durable ones."""
    until_the_end(
        system_call("unlink", returns=None, when=lambda call: "/objects/" in str(call.path))
    )


def write_elsewhere() -> None:
    """Create a file outside the store's directory."""

    def make_two(call: Call) -> int:
        store = os.path.dirname(os.path.dirname(str(call.path)))
        beside = f"{store}.{call.args[0]}"
        os.close(os.open(beside, os.O_CREAT | os.O_WRONLY, 0o600))
        return int(call.go_on())

    def makes_one(call: Call) -> bool:
        return bool(call.flags & os.O_CREAT) and is_of_a_group(call)

    until_the_end(system_call("open", answer=make_two, when=makes_one))


MUTANTS: dict[str, Callable[[], None]] = {
    mutant.__name__.replace("_", " "): mutant
    for mutant in (
        write_in_place,
        remove_before_the_rename,
        never_clean_up,
        flush_nothing,
        remove_nothing,
        write_elsewhere,
    )
}
