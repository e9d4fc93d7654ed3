"""Which object files of weights are still wanted, and the removal of the others.

Weights that no checkpoint has as they are used lie in object files named by their content. Such a
file is *referenced* by each group that is read from it and by each tensor that is a map of it. With
the last reference it is removed, unless it was derived from a checkpoint's bytes (cast, joined,
quantised, fetched): then the next `from_pretrained` finds it by what it was derived from, and it
stays until `disk_budget` needs the room.

References are objects that the garbage collector counts, so that none is lost where a call is cut
short. What follows from the end of one is done by the next transaction.
"""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from tierstore.engine.adoption import CASTS, CONTENT, WEIGHTS, ObjectReference, object_views
from tierstore.engine.transaction import transaction
from tierstore.errors import TierStoreError
from tierstore.model import events
from tierstore.model.groups import GroupId, Source
from tierstore.model.moves import Instruction
from tierstore.model.tiers import Access, Tier
from tierstore.system.objects import intact_object, object_name

if TYPE_CHECKING:
    from tierstore.engine.core import Core

_MADE = re.compile(f"(?:{WEIGHTS}|{CASTS})[0-9a-f]{{32}}")


def is_made(key: str) -> bool:
    """Whether a key is that of an object that the store makes up for weights.

    >>> is_made("weights/" + 32 * "0"), is_made("weights/of mine")
    (True, False)
    """
    return _MADE.fullmatch(key) is not None


class ObjectReferences:
    """The references to the object files of a store. Its methods need the lock.

    `_unreferenced` are keys of files that may go when room is wanted, the one that was wanted
    longest ago first. `_derived` are those of weights that a restart finds by their derivation.
    """

    def __init__(self, core: Core) -> None:
        self.core = core
        self._references: dict[str, weakref.ref[ObjectReference]] = {}
        self._keys: dict[str, str] = {}  # by the names of their files
        self._unreferenced: dict[str, None] = {}
        self._derived: set[str] = set()
        self._largest = 0  # bytes of the largest group that was put or changed

    # References --------------------------------------------------------------------------------

    @transaction
    def hold(self, key: str) -> ObjectReference:
        """A reference to the object file of a key, which is there or will be."""
        return self._hold(key)

    def _hold(self, key: str) -> ObjectReference:
        held = self._references.get(key)
        reference = None if held is None else held()
        if reference is None:
            ended = partial(self.core.deferred.append, partial(self._end, key))
            reference = ObjectReference(key)
            self._references[key] = weakref.ref(reference, lambda _: ended())
            self._keys[os.path.basename(object_name(key))] = key
            self._unreferenced.pop(key, None)
        return reference

    @transaction
    def hold_if_there(self, key: str) -> ObjectReference | None:
        """`hold`, if there is such an object."""
        return self._hold(key) if key in self.core.current else None

    @transaction
    def of_path(self, path: str) -> ObjectReference | None:
        """A reference to the object file at a path; None if that is no file of made weights."""
        return self._of_path(path)

    def _of_path(self, path: str) -> ObjectReference | None:
        key = self._keys.get(os.path.basename(path))
        return None if key is None else self._hold(key)

    def of_source(self, source: Source) -> tuple[ObjectReference, ...]:
        """References to all object files that a group is read from. Part of a transaction."""
        found = [self._of_path(path) for path in source.paths]
        return tuple(reference for reference in found if reference is not None)

    def note_derived(self, weights: ObjectReference, note: ObjectReference) -> None:
        """Weights were derived from a checkpoint, as a note tells, which stays with them."""
        weights.note = note
        self._derived.add(weights.key)

    def _end(self, key: str) -> None:
        """The last reference to an object has ended, unless there is a new one by now."""
        held = self._references.get(key)
        if held is not None and held() is not None:
            return
        self._references.pop(key, None)
        if key not in self.core.current:
            self._forget_name(key)
        elif key in self._derived or key.startswith(CASTS):
            self._unreferenced[key] = None
        else:
            self.core.deliver(self._remove(key))

    # The end of objects ------------------------------------------------------------------------

    def found(self, keys: Iterable[str]) -> None:
        """The directory has objects of these keys."""
        for key in sorted(filter(is_made, keys), key=self._written):
            self.know(key)

    def _written(self, key: str) -> float:
        """When an object was written; 0 if nobody can tell."""
        with suppress(OSError):
            return os.stat(self.core.directory.path_of(key)).st_mtime
        return 0.0

    def know(self, key: str) -> None:
        """There is an object. Unless something refers to it already, it may go for room."""
        if key in self._references:
            return
        self._keys[os.path.basename(object_name(key))] = key
        self._unreferenced[key] = None

    def make_room_before(self, event: events.Event) -> list[Instruction]:
        """Remove unreferenced objects so that what an event needs has room within `disk_budget`:
        the largest group that may have to be written. Returns what to do."""
        claimed = event.nbytes if isinstance(event, events.Claimed) else 0
        changed = 0
        if isinstance(event, events.Leased) and event.access is not Access.READ:
            changed = self.core.mover.entry(event.group).spec.nbytes
        self._largest = max(self._largest, claimed, changed)
        if not self._unreferenced or not self._lacks_room(self._largest):
            return []
        in_memory = self.core.planner.copies.largest_in_memory()
        return self.make_room(max(claimed, in_memory))

    def make_room(self, nbytes: int) -> list[Instruction]:
        """Remove unreferenced objects until so many bytes have room within `disk_budget`, or there
        are none. Returns what to do."""
        instructions: list[Instruction] = []
        if not self._unreferenced or not self._lacks_room(nbytes):
            return instructions
        in_use = self.core.planner.leased() | self.core.planner.waited_for()
        for key in list(self._unreferenced):
            if self.core.current.get(key) not in in_use:
                instructions += self._remove(key)
            if not self._lacks_room(nbytes):
                break
        return instructions

    def _lacks_room(self, nbytes: int) -> bool:
        planner = self.core.planner
        limit = planner.budgets[Tier.DISK]
        return limit is not None and planner.used[Tier.DISK] + nbytes > limit

    @transaction
    def make_room_now(self, nbytes: int) -> None:
        """`make_room`, for what is going to be written beside the planner."""
        self.core.deliver(self.make_room(nbytes))

    def _remove(self, key: str) -> list[Instruction]:
        """Forget an object, and begin to remove its file. Returns what to do."""
        core = self.core
        self._forget_name(key)
        group: GroupId | None = core.current.pop(key, None)
        if group is None:  # the caller has discarded it
            return []
        instructions = core.handled(events.Discarded(group), make_room=False)
        removal = core.tiers.disk.remove(key, core.newest(), True)
        if removal is not None:  # if it fails, `flush` tries again, and tells
            removal.then(core.reports.removed_if_open)
        return instructions

    def _forget_name(self, key: str) -> None:
        self._unreferenced.pop(key, None)
        self._derived.discard(key)
        self._keys.pop(os.path.basename(object_name(key)), None)

    @transaction
    def remove_before_end(self) -> None:
        """Remove what no model shows and no restart looks for: unreferenced objects that were not
        derived from a checkpoint, and notes of those that are gone."""
        core = self.core
        core.collect_garbage()
        core.mover.catch_up()  # copies are dropped on another thread
        core.collect_garbage()
        if not self._unreferenced:
            return
        contents = {key: self._content(key) for key in list(core.current) if _is_note(key)}
        derived = self._derived.union(*contents.values())
        for key in list(self._unreferenced):
            dangling = _is_note(key) and not any(c in core.current for c in contents[key])
            if dangling or (not _is_note(key) and key not in derived):
                core.deliver(self._remove(key))

    def _content(self, note: str) -> set[str]:
        """The key of the weights that a note tells of, if it can be read."""
        path = self.core.directory.path_of(note)
        with suppress(TierStoreError):
            told = object_views(path, intact_object(path)).get(CONTENT)
            return set() if told is None else {WEIGHTS + bytes(told.tolist()).hex()}
        return set()


def _is_note(key: str) -> bool:
    return key.startswith(CASTS) and is_made(key)
