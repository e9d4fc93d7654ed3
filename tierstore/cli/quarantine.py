"""Putting what is damaged away: into `quarantine/` in the store's directory. Nothing is deleted.

One rename is one step: whatever dies in between, an object lies in its place or in quarantine. The
note that says what was wrong with it is on disk before the object moves. A note without an object
is all that a killed command can leave; the next one takes another number.
"""

from __future__ import annotations

import itertools
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

from tierstore.cli.directories import (
    Item,
    items_below,
    look_at,
    opened_below,
    opened_parent,
    opened_store,
    read_document,
)
from tierstore.cli.output import Code, Document, Failure, system_failures
from tierstore.cli.report import NOTE_SUFFIX, QUARANTINE, Group, item_row, problem_row
from tierstore.system.files import sync_names

_MAX_NOTE_BYTES = 1 << 20
_NEW = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC


# Putting away -------------------------------------------------------------------------------------


def put_away(directory: str, root: int, problems: Iterable[Group]) -> dict[str, Document]:
    """Move what is damaged into quarantine.

    Tells by name where each is now (the path, as `put_away`), or why it is `left` in its place.
    `root` is the open directory of a store whose lock the caller holds. What has several problems
    is among them several times.
    """
    damages: dict[Item, list[Group]] = {}
    for group in problems:
        damages.setdefault(group.item, []).append(group)
    if not damages:
        return {}
    with system_failures(f"making {directory}/{QUARANTINE}"), _opened(directory, root) as room:
        return {
            item.name: _put_away(directory, root, room, item, found)
            for item, found in damages.items()
        }


@contextmanager
def _opened(directory: str, root: int) -> Iterator[int]:
    with suppress(FileExistsError):
        os.mkdir(QUARANTINE, 0o700, dir_fd=root)
    sync_names(root)
    with opened_below(root, QUARANTINE) as room:
        if room is None:
            raise Failure(
                f"{directory}/{QUARANTINE} is no directory",
                "Nothing was changed. Move it away, then try again.",
                Code.UNEXPECTED,
            )
        if stat.S_IMODE(os.fstat(room).st_mode) != 0o700:
            os.fchmod(room, 0o700)
        yield room


def _put_away(
    directory: str, root: int, room: int, item: Item, damages: Sequence[Group]
) -> Document:
    left = None
    if any(group.problem and group.problem.passing for group in damages):
        left = "this may pass: verify again"
    else:
        try:
            with opened_parent(root, item.name) as parent:
                leaf = os.path.basename(item.name)
                if parent is not None and look_at(parent, leaf, item.name) == item:
                    name = _free_name(room, leaf)
                    _write_note(room, name + NOTE_SUFFIX, damages)
                    _move(parent, leaf, room, name)
                    place = os.path.join(os.path.abspath(directory), QUARANTINE, name)
                    return {"put_away": place, "left": None}
            left = "it has just changed: verify again"
        except OSError as error:
            left = f"moving it failed: {error.strerror or error}"
    return {"put_away": None, "left": left}


def _move(parent: int, leaf: str, room: int, name: str) -> None:
    """When this returns, the move survives a power cut."""
    try:
        os.rename(leaf, name, src_dir_fd=parent, dst_dir_fd=room)
    except OSError:
        os.unlink(name + NOTE_SUFFIX, dir_fd=room)  # a note on nothing
        raise
    sync_names(room)  # the new name first: rather two names after a power cut than none
    sync_names(parent)


def _free_name(room: int, leaf: str) -> str:
    """A name that nothing in quarantine has, and no note either."""
    stem, suffix = os.path.splitext(leaf)
    names = (f"{stem}.{number}{suffix}" for number in itertools.count(1))
    taken = set(os.listdir(room))
    return next(name for name in names if taken.isdisjoint((name, name + NOTE_SUFFIX)))


def _write_note(room: int, name: str, damages: Sequence[Group]) -> None:
    note = {
        "key": damages[0].key,
        "was": damages[0].item.name,
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
        "problems": [problem_row(group.problem) for group in damages if group.problem],
    }
    # Whatever is not ASCII is escaped: a key cannot steer the terminal of who looks at the note.
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


# Looking ------------------------------------------------------------------------------------------


def quarantined(directory: str) -> list[Document]:
    """What is in quarantine, and what its notes say; nothing, of notes that cannot be believed."""
    with opened_store(directory) as root, system_failures(f"reading {directory}/{QUARANTINE}"):
        return [
            {**item_row(directory, item), **_noted(room, leaf + NOTE_SUFFIX)}
            for room, leaf, item in items_below(root, QUARANTINE)
            if not leaf.endswith(NOTE_SUFFIX)
        ]


def _noted(room: int, name: str) -> Document:
    note = read_document(name, _MAX_NOTE_BYTES, room)
    problems = _believed(note.get("problems"), list)
    reasons = (_believed(p.get("reason"), str) for p in problems if isinstance(p, dict))
    return {
        "key": _believed(note.get("key"), str) or None,
        "since": _believed(note.get("since"), str) or None,
        "reasons": [reason for reason in reasons if reason],
    }


def _believed(value: Any, kind: Callable[[], Any]) -> Any:
    """The value, if it is what a note has there; anybody may have written it."""
    return value if isinstance(value, type(kind())) else kind()
