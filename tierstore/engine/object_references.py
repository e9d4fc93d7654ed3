"""References to the object files of weights, and the removal of unreferenced files.

Weights that no checkpoint has in their final form are in object files named by their content. Such
a file is *referenced* by each group that is read from it and by each tensor that maps it. It is
removed with its last reference, unless it is derived from a checkpoint (cast, concatenated,
quantised or fetched). Then the next `from_pretrained` finds it by its derivation, and it stays
until `disk_budget` needs the space.

References are Python objects, so none leaks if a call is interrupted. The next transaction handles
the end of a reference.
"""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from tierstore.engine.in_place_groups import CASTS, CONTENT, WEIGHTS, ObjectReference, object_views
from tierstore.engine.transaction import transaction
from tierstore.errors import TierStoreError
from tierstore.model import events
from tierstore.model.groups import GroupId, Source
from tierstore.model.moves import Instruction
from tierstore.model.tiers import Access, Tier
from tierstore.system.objects import object_name, read_valid_object

if TYPE_CHECKING:
    from tierstore.engine.core import Core

_GENERATED_KEY = re.compile(f"(?:{WEIGHTS}|{CASTS})[0-9a-f]{{32}}")


def is_generated_key(key: str) -> bool:
    """Return True if the store generated this key for the object file of weights.

    >>> is_generated_key("weights/" + 32 * "0"), is_generated_key("weights/of mine")
    (True, False)
    """
    return _GENERATED_KEY.fullmatch(key) is not None


class ObjectReferences:
    """The references to the object files of a store. Methods are transactions or parts of one.

    `_unreferenced` are keys of files that may be removed for space, least recently used first.
    `_derived` are keys of weights that a restart finds by their derivation.
    """

    def __init__(self, core: Core) -> None:
        self.core = core
        self._references: dict[str, weakref.ref[ObjectReference]] = {}
        self._keys: dict[str, str] = {}  # by file name
        self._unreferenced: dict[str, None] = {}
        self._derived: set[str] = set()
        self._largest = 0  # bytes of the largest group that was put or changed

    # References --------------------------------------------------------------------------------

    @transaction
    def hold(self, key: str) -> ObjectReference:
        """Return a reference to the object file of a key, which exists or will be written."""
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
        """Return a reference to the object file of a key, or None if there is none."""
        return self._hold(key) if key in self.core.current else None

    @transaction
    def of_path(self, path: str) -> ObjectReference | None:
        """Return a reference to the object file at a path, or None if it is another file."""
        return self._of_path(path)

    def _of_path(self, path: str) -> ObjectReference | None:
        key = self._keys.get(os.path.basename(path))
        return None if key is None else self._hold(key)

    def of_source(self, source: Source) -> tuple[ObjectReference, ...]:
        """Return references to the object files of a group. Part of a transaction."""
        found = [self._of_path(path) for path in source.paths]
        return tuple(reference for reference in found if reference is not None)

    def note_derived(self, weights: ObjectReference, note: ObjectReference) -> None:
        """Mark weights as derived from a checkpoint. They keep the note that leads to them."""
        weights.note = note
        self._derived.add(weights.key)

    def _end(self, key: str) -> None:
        """Handle the end of the last reference to an object, unless there is a new one."""
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

    def add_existing(self, keys: Iterable[str]) -> None:
        """Add the objects that the directory has, the oldest first."""
        for key in sorted(filter(is_generated_key, keys), key=self._written):
            self.add(key)

    def _written(self, key: str) -> float:
        """Return the modification time of an object; 0 if unknown."""
        with suppress(OSError):
            return os.stat(self.core.directory.path_of(key)).st_mtime
        return 0.0

    def add(self, key: str) -> None:
        """Add an object. Unless it is referenced, it may be removed for disk space."""
        if key in self._references:
            return
        self._keys[os.path.basename(object_name(key))] = key
        self._unreferenced[key] = None

    def free_disk_for(self, event: events.Event) -> list[Instruction]:
        """Remove unreferenced objects if the disk budget is short of space for an event.

        An event may cause the largest group to be written. Returns instructions.
        """
        claimed = event.nbytes if isinstance(event, events.Claimed) else 0
        changed = 0
        if isinstance(event, events.Leased) and event.access is not Access.READ:
            changed = self.core.mover.entry(event.group).spec.nbytes
        self._largest = max(self._largest, claimed, changed)
        if not self._unreferenced or not self._exceeds_disk_budget(self._largest):
            return []
        in_memory = self.core.planner.copies.largest_in_memory()
        return self.free_disk(max(claimed, in_memory))

    def free_disk(self, nbytes: int) -> list[Instruction]:
        """Remove unreferenced objects until `nbytes` fit in the disk budget, or none are left.

        Returns instructions.
        """
        instructions: list[Instruction] = []
        if not self._unreferenced or not self._exceeds_disk_budget(nbytes):
            return instructions
        in_use = self.core.planner.leased() | self.core.planner.waited_for()
        for key in list(self._unreferenced):
            if self.core.current.get(key) not in in_use:
                instructions += self._remove(key)
            if not self._exceeds_disk_budget(nbytes):
                break
        return instructions

    def _exceeds_disk_budget(self, nbytes: int) -> bool:
        planner = self.core.planner
        limit = planner.budgets[Tier.DISK]
        return limit is not None and planner.used[Tier.DISK] + nbytes > limit

    @transaction
    def free_disk_now(self, nbytes: int) -> None:
        """Free disk space for a file that the planner does not write."""
        self.core.deliver(self.free_disk(nbytes))

    def _remove(self, key: str) -> list[Instruction]:
        """Discard an object, and begin to remove its file. Returns instructions."""
        core = self.core
        self._forget_name(key)
        group: GroupId | None = core.current.pop(key, None)
        if group is None:  # already discarded by a caller
            return []
        instructions = core.instructions_for(events.Discarded(group), free_disk=False)
        removal = core.tiers.disk.remove(key, core.next_number(), True)
        if removal is not None:  # if it fails, `flush` tries again, and raises
            removal.then(core.reports.removed_if_open)
        return instructions

    def _forget_name(self, key: str) -> None:
        self._unreferenced.pop(key, None)
        self._derived.discard(key)
        self._keys.pop(os.path.basename(object_name(key)), None)

    @transaction
    def remove_for_close(self) -> None:
        """Remove objects that neither a model nor a restart needs, before the store closes.

        Those are unreferenced objects that are not derived from a checkpoint, and notes whose
        objects no longer exist.
        """
        core = self.core
        core.run_deferred()
        core.mover.drain()  # copies are dropped on another thread
        core.run_deferred()
        if not self._unreferenced:
            return
        contents = {key: self._content(key) for key in list(core.current) if _is_note(key)}
        derived = self._derived.union(*contents.values())
        for key in list(self._unreferenced):
            dangling = _is_note(key) and not any(c in core.current for c in contents[key])
            if dangling or (not _is_note(key) and key not in derived):
                core.deliver(self._remove(key))

    def _content(self, note: str) -> set[str]:
        """Return the key of the weights that a note leads to; empty if it is unreadable."""
        path = self.core.directory.path_of(note)
        with suppress(TierStoreError):
            digest = object_views(path, read_valid_object(path)).get(CONTENT)
            return set() if digest is None else {WEIGHTS + bytes(digest.tolist()).hex()}
        return set()


def _is_note(key: str) -> bool:
    return key.startswith(CASTS) and is_generated_key(key)
