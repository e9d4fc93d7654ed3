"""Quarantine: damaged objects are moved into `quarantine/` in the store's directory, not deleted.

One rename is one step: if the process dies, an object is in its place or in quarantine. The note
that says what was wrong with it is on disk before the object moves. A killed command leaves at most
a note without an object; the next one takes another number.
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
    look_at,
    opened_below,
    opened_parent,
    opened_store,
)
from tierstore.inspection.survey import NOTE_SUFFIX, QUARANTINE, Group
from tierstore.system.documents import read_document
from tierstore.system.files import sync_names, transfer_errors

_MAX_NOTE_BYTES = 1 << 20
_NEW = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class QuarantineOutcome:
    """The new path of a damaged object (`put_away`), or why it was `left` in its place."""

    put_away: str | None = None
    left: str | None = None


def put_away(directory: str, root: int, problems: Iterable[Group]) -> dict[str, QuarantineOutcome]:
    """Move damaged objects into quarantine. Returns the outcome by the name of each.

    `root` is the open directory of a store whose lock the caller holds. An object with several
    problems is among them several times. Raises TransferError.
    """
    damages: dict[Item, list[Group]] = {}
    for group in problems:
        damages.setdefault(group.item, []).append(group)
    if not damages:
        return {}
    place = f"{directory}/{QUARANTINE}"
    with transfer_errors("making", path=place), _opened(place, root) as room:
        return {
            item.name: _put_away(directory, root, room, item, found)
            for item, found in damages.items()
        }


@contextmanager
def _opened(path: str, root: int) -> Iterator[int]:
    with suppress(FileExistsError):
        os.mkdir(QUARANTINE, 0o700, dir_fd=root)
    sync_names(root)
    with opened_below(root, QUARANTINE) as room:
        if room is None:
            raise TransferError(
                f"{path} is no directory, so that nothing was changed: move it away, then try again"
            )
        if stat.S_IMODE(os.fstat(room).st_mode) != 0o700:
            os.fchmod(room, 0o700)
        yield room


def _put_away(
    directory: str, root: int, room: int, item: Item, damages: Sequence[Group]
) -> QuarantineOutcome:
    if any(group.problem and group.problem.passing for group in damages):
        return QuarantineOutcome(left="this may pass: verify again")
    leaf = os.path.basename(item.name)
    try:
        with opened_parent(root, item.name) as parent:
            if parent is None or look_at(parent, leaf, item.name) != item:
                return QuarantineOutcome(left="it has just changed: verify again")
            name = _free_name(room, leaf)
            _write_note(room, name + NOTE_SUFFIX, damages)
            _move(parent, leaf, room, name)
            return QuarantineOutcome(os.path.join(os.path.abspath(directory), QUARANTINE, name))
    except OSError as error:
        return QuarantineOutcome(left=f"moving it failed: {error.strerror or error}")


def _move(parent: int, leaf: str, room: int, name: str) -> None:
    """Move an object. When this returns, the move survives a power cut."""
    try:
        os.rename(leaf, name, src_dir_fd=parent, dst_dir_fd=room)
    except OSError:
        os.unlink(name + NOTE_SUFFIX, dir_fd=room)  # a note on nothing
        raise
    sync_names(room)  # the new name first: rather two names after a power cut than none
    sync_names(parent)


def _free_name(room: int, leaf: str) -> str:
    """Return a name that neither an object in quarantine nor a note has."""
    stem, suffix = os.path.splitext(leaf)
    names = (f"{stem}.{number}{suffix}" for number in itertools.count(1))
    taken = set(os.listdir(room))
    return next(name for name in names if taken.isdisjoint((name, name + NOTE_SUFFIX)))


def _write_note(room: int, name: str, damages: Sequence[Group]) -> None:
    note = {
        "key": damages[0].key,
        "was": damages[0].item.name,
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
        "problems": [group.problem.described() for group in damages if group.problem],
    }
    # All but ASCII is escaped: a key cannot steer the terminal of a reader.
    descriptor = os.open(name, _NEW, 0o600, dir_fd=room)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            json.dump(note, file, indent=2)
            file.flush()
            os.fsync(descriptor)
    except BaseException:
        with suppress(OSError):
            os.unlink(name, dir_fd=room)
        raise
    sync_names(room)


def quarantined(directory: str) -> list[tuple[Item, dict[str, Any]]]:
    """List the quarantine, each entry with what its note says; nothing from an invalid note."""
    with (
        opened_store(directory) as root,
        transfer_errors("reading", path=f"{directory}/{QUARANTINE}"),
    ):
        return [
            (item, _noted(room, leaf + NOTE_SUFFIX))
            for room, leaf, item in items_below(root, QUARANTINE)
            if not leaf.endswith(NOTE_SUFFIX)
        ]


def _noted(room: int, name: str) -> dict[str, Any]:
    note = read_document(name, _MAX_NOTE_BYTES, room)
    problems = _checked(note.get("problems"), list)
    reasons = (_checked(p.get("reason"), str) for p in problems if isinstance(p, dict))
    return {
        "key": _checked(note.get("key"), str) or None,
        "since": _checked(note.get("since"), str) or None,
        "reasons": [reason for reason in reasons if reason],
    }


def _checked(value: Any, kind: Callable[[], Any]) -> Any:
    """Return the value if it has the type that a note has there: a note may be planted."""
    return value if isinstance(value, type(kind())) else kind()
