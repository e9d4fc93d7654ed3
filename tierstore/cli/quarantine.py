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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from tierstore.cli.directories import Item, items_below, look_at, opened_below, opened_parent
from tierstore.cli.frame import Code, Failure, system_failure
from tierstore.cli.report import NOTE_SUFFIX, QUARANTINE, Problem, opened_store
from tierstore.system.files import sync_names
from tierstore.system.objects import READ

_MAX_NOTE_BYTES = 1 << 20
_NEW = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class Damage:
    """Something damaged, and everything that was found wrong with it."""

    item: Item
    key: str | None
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class QuarantineOutcome:
    """Where something damaged is now (a name below the directory), or why it was left in place."""

    moved_to: str | None
    left: str | None = None


@dataclass(frozen=True)
class Kept:
    """Something in quarantine, and what its note says; nothing, if the note cannot be believed."""

    item: Item
    key: str | None
    since: str | None
    reasons: tuple[str, ...]


# Putting away -------------------------------------------------------------------------------------


def put_away(directory: str, root: int, damages: Iterable[Damage]) -> dict[str, QuarantineOutcome]:
    """Move what is damaged into quarantine. Tells by name what became of each.

    `root` is the open directory of a store whose lock the caller holds.
    """
    damages = list(damages)
    if not damages:
        return {}
    try:
        with _opened(directory, root) as room:
            return {damage.item.name: _put_away(root, room, damage) for damage in damages}
    except OSError as error:
        raise system_failure(error, f"making {directory}/{QUARANTINE}") from error


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


def _put_away(root: int, room: int, damage: Damage) -> QuarantineOutcome:
    if any(problem.passing for problem in damage.problems):
        return QuarantineOutcome(None, "this may pass: verify again")
    try:
        with opened_parent(root, damage.item.name) as parent:
            leaf = os.path.basename(damage.item.name)
            if parent is None or look_at(parent, leaf, damage.item.name) != damage.item:
                return QuarantineOutcome(None, "it has just changed: verify again")
            name = _free_name(room, leaf)
            _write_note(room, name + NOTE_SUFFIX, damage)
            _move(parent, leaf, room, name)
    except OSError as error:
        return QuarantineOutcome(None, f"moving it failed: {error.strerror or error}")
    return QuarantineOutcome(f"{QUARANTINE}/{name}")


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


def _write_note(room: int, name: str, damage: Damage) -> None:
    note = {
        "key": damage.key,
        "was": damage.item.name,
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
        "problems": [
            {"reason": p.reason, "tensor": p.tensor, "expected": p.expected, "found": p.found}
            for p in damage.problems
        ],
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


def kept(directory: str) -> list[Kept]:
    """What is in quarantine."""
    with opened_store(directory) as root:
        try:
            return [
                _kept(item, _read_note(room, leaf + NOTE_SUFFIX))
                for room, leaf, item in items_below(root, QUARANTINE)
                if not leaf.endswith(NOTE_SUFFIX)
            ]
        except OSError as error:
            raise system_failure(error, f"reading {directory}/{QUARANTINE}") from error


def _kept(item: Item, note: dict[str, Any]) -> Kept:
    problems = _believed(note.get("problems"), list)
    reasons = (_believed(p.get("reason"), str) for p in problems if isinstance(p, dict))
    key, since = _believed(note.get("key"), str), _believed(note.get("since"), str)
    return Kept(item, key or None, since or None, tuple(filter(None, reasons)))


def _believed(value: Any, kind: Callable[[], Any]) -> Any:
    """The value, if it is what a note has there; anybody may have written it."""
    return value if isinstance(value, type(kind())) else kind()


def _read_note(room: int, name: str) -> dict[str, Any]:
    try:
        descriptor = os.open(name, READ, dir_fd=room)
    except OSError:
        return {}
    with os.fdopen(descriptor, "rb") as file:
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return {}
            note = json.loads(file.read(_MAX_NOTE_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
    return note if isinstance(note, dict) else {}
