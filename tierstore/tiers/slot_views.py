"""The tensors that show the memory of a slot, and the slots at which somebody goes on looking.

A view of a leased tensor may outlive its lease: a module keeps `weight.t()`, a cache has a row of
a table, numpy an array over a bias. Nobody can list those, but memory says by itself whether it is
looked at. Each tensor of a slot has a storage of its own, and all of these keep one token. While
the token is there, somebody looks, through whatever that may be, and the slot serves no other
group: it is *left* to the views. They go on showing the weight, as in plain torch, and its memory
counts as theirs, not as the tier's, until they have gone.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from tierstore.model.formatting import size
from tierstore.model.groups import GroupId, GroupSpec
from tierstore.system.views import lasting_views
from tierstore.tiers.arena import Slot, Spans
from tierstore.torch_private import storage_id, uses_of_storage

logger = logging.getLogger("tierstore.tiers")

Storages = Mapping[str, "weakref.ref[torch.UntypedStorage]"]
"""Storages by the names of the tensors that show them."""


class Token:
    """Keeps the memory of a slot. Every storage that shows it keeps the token."""

    __slots__ = ("__weakref__", "memory")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory


class SlotViews:
    """The tensors of a group over the memory of its slot, at `offsets`.

    Those named in `again` are shown by these storages, which have the same bytes already: what a
    view has outlived is shown again, so that a weight has no more such memory than it has bytes.
    """

    __slots__ = ("_alone", "_storages", "_token", "again", "tensors")

    def __init__(
        self,
        spec: GroupSpec,
        memory: torch.Tensor,
        offsets: Mapping[str, int],
        again: Mapping[str, torch.UntypedStorage],
        token: Token | None = None,
    ) -> None:
        token = token or Token(memory)
        self.again = bool(again)
        self.tensors = lasting_views(spec, memory, offsets, token, again)
        self._token = weakref.ref(token)
        self._storages = [storage_id(t.untyped_storage()) for t in self.tensors.values()]
        self._alone = list(map(uses_of_storage, self._storages))

    def over_the_slot(
        self, spec: GroupSpec, memory: torch.Tensor, offsets: Mapping[str, int]
    ) -> SlotViews:
        """The same, with no storage shown again. Who looks at these is known to those."""
        return SlotViews(spec, memory, offsets, {}, self._token())

    def are_looked_at(self) -> bool:
        """Whether anything else shows the memory: a view, or a tensor that is bound to it."""
        return list(map(uses_of_storage, self._storages)) != self._alone

    def end(self) -> LookedAt | None:
        """Forget the tensors. Returns what somebody still looks at; None if nobody does."""
        storages = self._looked_at() if self.are_looked_at() else {}
        self.tensors = {}
        return None if self._token() is None else LookedAt(self._token, storages)

    def _looked_at(self) -> Storages:
        found = [(name, tensor.untyped_storage()) for name, tensor in self.tensors.items()]
        return {
            name: weakref.ref(storage)
            for (name, storage), alone in zip(found, self._alone, strict=True)
            if uses_of_storage(storage_id(storage)) > alone
        }


@dataclass(frozen=True)
class LookedAt:
    """Memory that somebody looks at: as long as `token` is there. `storages` are those of the
    tensors that are known to be looked at; none if somebody has the very tensors of a lease."""

    token: weakref.ref[Token]
    storages: Storages


def spans_of(spec: GroupSpec, offsets: Mapping[str, int], looked_at: LookedAt) -> Spans:
    """The parts of a slot's memory that somebody looks at, as far as is known."""
    if not (spec.simple and looked_at.storages):
        return [(0, spec.nbytes)]
    looked = [t for t in spec.tensors if t.name in looked_at.storages]
    return [(offsets[t.name], offsets[t.name] + t.nbytes) for t in looked]


@dataclass(frozen=True)
class LeftSlot:
    """A slot whose group has gone while somebody looks at it. `end` is called when nobody does."""

    slot: Slot
    group: GroupId
    looked_at: LookedAt
    end: Callable[[], None]


class LeftSlots:
    """The slots of one tier that are left to views, until nobody looks at them."""

    def __init__(self) -> None:
        self.slots: list[LeftSlot] = []
        self._told = False

    def __iter__(self) -> Iterator[Slot]:
        return iter([left.slot for left in self.slots])

    def add(self, left: LeftSlot, tier: str) -> None:
        """A slot is left. The first time, that is logged."""
        self.slots.append(left)
        if not self._told:
            self._told = True
            names = ", ".join(left.looked_at.storages) or "its tensors"
            logger.warning(
                "group %r has left %s, but views of %s are kept (by a module's attribute, a cache, "
                "a closure, an array): they stay right, in memory that no budget counts, up to %s "
                "for this group. Keep copies instead (.clone()). Other groups are not logged",
                left.group.key,
                tier,
                names,
                size(left.slot.nbytes),
            )

    def collect(self) -> None:
        """End those that nobody looks at any more."""
        if self.slots:
            for left in [left for left in self.slots if left.looked_at.token() is None]:
                self.slots.remove(left)
                left.end()

    def storages_of(self, group: GroupId) -> dict[str, torch.UntypedStorage]:
        """The storages with bytes of a group that somebody looks at, by tensor."""
        if not self.slots:
            return {}
        mine = [left for left in self.slots if left.group == group]
        known = [item for left in mine for item in left.looked_at.storages.items()]
        found = {name: reference() for name, reference in known}
        return {name: storage for name, storage in found.items() if storage is not None}

    def forget(self, group: GroupId) -> None:
        """The group has other bytes from now on: its storages are not shown again."""
        for number, left in enumerate(self.slots):
            if left.group == group:
                looked_at = LookedAt(left.looked_at.token, {})
                self.slots[number] = LeftSlot(left.slot, group, looked_at, left.end)

    def close(self) -> None:
        """Let go of all of them: their memory goes with the last view."""
        for slot in self:
            slot.memory = None
        self.slots.clear()
