"""Quarantine: moves damaged objects to `quarantine/` in the store's directory.

Each move is one rename, so after a crash an object is either in place or in quarantine. A note on
the damage is on disk before the object moves. A killed command leaves at most a note without an
object; the next command uses another number.
"""

from __future__ import annotations

import itertools
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from tierstore.errors import TransferError
from tierstore.inspection.directories import (
    Item,
    items_below,
    open_below,
    open_parent,
    open_store,
    stat_item,
)
from tierstore.inspection.survey import NOTE_SUFFIX, QUARANTINE, Group
from tierstore.system.documents import read_document
from tierstore.system.files import sync_names, transfer_errors

_MAX_NOTE_BYTES = 1 << 20
_NEW = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class QuarantineOutcome:
    """The new path of a damaged object (`moved_to`), or the reason why it was `left` in place."""

    moved_to: str | None = None
    left: str | None = None


def move_to_quarantine(
    directory: str, root: int, problems: Iterable[Group]
) -> dict[str, QuarantineOutcome]:
    """Move damaged objects to quarantine. Returns the outcomes by name of the object.

    `root` is the open directory of a store whose lock the caller holds. `problems` has an object
    once for each of its problems. Raises TransferError.
    """
    damages: dict[Item, list[Group]] = {}
    for group in problems:
        damages.setdefault(group.item, []).append(group)
    if not damages:
        return {}
    place = f"{directory}/{QUARANTINE}"
    with transfer_errors("making", path=place), _opened(place, root) as quarantine:
        return {
            item.name: _quarantine(directory, root, quarantine, item, found)
            for item, found in damages.items()
        }


@contextmanager
def _opened(path: str, root: int) -> Iterator[int]:
    with suppress(FileExistsError):
        os.mkdir(QUARANTINE, 0o700, dir_fd=root)
    sync_names(root)
    with open_below(root, QUARANTINE) as quarantine:
        if quarantine is None:
            raise TransferError(
                f"{path} is not a directory, so nothing was changed: move it away, then try again"
            )
        if stat.S_IMODE(os.fstat(quarantine).st_mode) != 0o700:
            os.fchmod(quarantine, 0o700)
        yield quarantine


def _quarantine(
    directory: str, root: int, quarantine: int, item: Item, damages: Sequence[Group]
) -> QuarantineOutcome:
    if any(group.problem and group.problem.transient for group in damages):
        return QuarantineOutcome(left="the error may be transient: verify again")
    leaf = os.path.basename(item.name)
    try:
        with open_parent(root, item.name) as parent:
            if parent is None or stat_item(parent, leaf, item.name) != item:
                return QuarantineOutcome(left="it was changed meanwhile: verify again")
            name = _free_name(quarantine, leaf)
            _write_note(quarantine, name + NOTE_SUFFIX, damages)
            _move(parent, leaf, quarantine, name)
            return QuarantineOutcome(os.path.join(os.path.abspath(directory), QUARANTINE, name))
    except OSError as error:
        return QuarantineOutcome(left=f"the move failed: {error.strerror or error}")


def _move(parent: int, leaf: str, quarantine: int, name: str) -> None:
    """Move an object durably: once this returns, the move survives a power failure."""
    try:
        os.rename(leaf, name, src_dir_fd=parent, dst_dir_fd=quarantine)
    except OSError:
        os.unlink(name + NOTE_SUFFIX, dir_fd=quarantine)  # a note without an object
        raise
    sync_names(
        quarantine
    )  # the new name first: after a power failure, two names are better than none
    sync_names(parent)


def _free_name(quarantine: int, leaf: str) -> str:
    """Return a name that is unused in quarantine, by objects and notes."""
    stem, suffix = os.path.splitext(leaf)
    names = (f"{stem}.{number}{suffix}" for number in itertools.count(1))
    taken = set(os.listdir(quarantine))
    return next(name for name in names if taken.isdisjoint((name, name + NOTE_SUFFIX)))


def _write_note(quarantine: int, name: str, damages: Sequence[Group]) -> None:
    note = {
        "key": damages[0].key,
        "was": damages[0].item.name,
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
        "problems": [group.problem.described() for group in damages if group.problem],
    }
    # Non-ASCII text is escaped, so a key cannot control the terminal of a reader.
    descriptor = os.open(name, _NEW, 0o600, dir_fd=quarantine)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            json.dump(note, file, indent=2)
            file.flush()
            os.fsync(descriptor)
    except BaseException:
        with suppress(OSError):
            os.unlink(name, dir_fd=quarantine)
        raise
    sync_names(quarantine)


def quarantined(directory: str) -> list[tuple[Item, dict[str, Any]]]:
    """Return the objects in quarantine, each with the fields of its note if that is valid."""
    with (
        open_store(directory) as root,
        transfer_errors("reading", path=f"{directory}/{QUARANTINE}"),
    ):
        return [
            (item, _noted(quarantine, leaf + NOTE_SUFFIX))
            for quarantine, leaf, item in items_below(root, QUARANTINE)
            if not leaf.endswith(NOTE_SUFFIX)
        ]


def _noted(quarantine: int, name: str) -> dict[str, Any]:
    note = read_document(name, _MAX_NOTE_BYTES, quarantine)
    problems = _checked(note.get("problems"), list)
    reasons = (_checked(p.get("reason"), str) for p in problems if isinstance(p, dict))
    return {
        "key": _checked(note.get("key"), str) or None,
        "since": _checked(note.get("since"), str) or None,
        "reasons": [reason for reason in reasons if reason],
    }


def _checked(value: Any, kind: Callable[[], Any]) -> Any:
    """Return the value if it has the expected type, else an empty one: notes are untrusted."""
    return value if isinstance(value, type(kind())) else kind()
