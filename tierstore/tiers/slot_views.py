"""The tensors of a slot, and slots that are detached because views outlive their group.

A view of a leased tensor may outlive its lease: a module keeps `weight.t()`, a cache has a row of a
table, numpy an array over a bias. No code can list these views, but their memory can be tracked.
Each tensor of a slot has its own storage, and all of these hold one token. While the token exists,
views exist, and the slot serves no other group: it is *detached*. The views still show the weight,
as in plain torch. Until they are gone, the memory does not count against the tier's budget.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from tierstore.model.formatting import size
from tierstore.model.groups import GroupId, GroupSpec
from tierstore.system.views import owning_views
from tierstore.tiers.arena import Slot, Spans
from tierstore.torch_private import storage_id, storage_use_count

logger = logging.getLogger("tierstore.tiers")

Storages = Mapping[str, "weakref.ref[torch.UntypedStorage]"]
"""Storages by the names of their tensors."""


class Token:
    """Owns the memory of a slot. Every storage over the memory holds the token."""

    __slots__ = ("__weakref__", "memory")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory


class SlotViews:
    """The tensors of a group over the memory of its slot, at `offsets`.

    Tensors named in `reused` use these storages, of an earlier slot, which have the same bytes.
    This limits the detached memory of a weight to its own size.
    """

    __slots__ = ("_own_uses", "_storages", "_token", "reused", "tensors")

    def __init__(
        self,
        spec: GroupSpec,
        memory: torch.Tensor,
        offsets: Mapping[str, int],
        reused: Mapping[str, torch.UntypedStorage],
        token: Token | None = None,
    ) -> None:
        token = token or Token(memory)
        self.reused = bool(reused)
        self.tensors = owning_views(spec, memory, offsets, token, reused)
        self._token = weakref.ref(token)
        self._storages = [storage_id(t.untyped_storage()) for t in self.tensors.values()]
        self._own_uses = list(map(storage_use_count, self._storages))

    def over_slot(
        self, spec: GroupSpec, memory: torch.Tensor, offsets: Mapping[str, int]
    ) -> SlotViews:
        """Return views without reused storages, which share the token."""
        return SlotViews(spec, memory, offsets, {}, self._token())

    def are_in_use(self) -> bool:
        """Return whether other views, or tensors bound to the memory, exist."""
        return list(map(storage_use_count, self._storages)) != self._own_uses

    def end(self) -> LiveViews | None:
        """Drop the tensors. Returns the views that are still in use; None if there are none."""
        storages = self._live_storages() if self.are_in_use() else {}
        self.tensors = {}
        return None if self._token() is None else LiveViews(self._token, storages)

    def _live_storages(self) -> Storages:
        found = [(name, tensor.untyped_storage()) for name, tensor in self.tensors.items()]
        return {
            name: weakref.ref(storage)
            for (name, storage), own in zip(found, self._own_uses, strict=True)
            if storage_use_count(storage_id(storage)) > own
        }


@dataclass(frozen=True)
class LiveViews:
    """Memory with views, which exist as long as `token` does.

    `storages` are those of the tensors known to have views; empty if the lease's own tensors are
    still in use.
    """

    token: weakref.ref[Token]
    storages: Storages


def spans_of(spec: GroupSpec, offsets: Mapping[str, int], live: LiveViews) -> Spans:
    """Return the parts of a slot's memory that views may use."""
    if not (spec.simple and live.storages):
        return [(0, spec.nbytes)]
    viewed = [t for t in spec.tensors if t.name in live.storages]
    return [(offsets[t.name], offsets[t.name] + t.nbytes) for t in viewed]


@dataclass(frozen=True)
class DetachedSlot:
    """A slot whose group has gone while views exist. `end` is called after the last one."""

    slot: Slot
    group: GroupId
    live: LiveViews
    end: Callable[[], None]


class DetachedSlots:
    """The detached slots of one tier, until their views are gone."""

    def __init__(self) -> None:
        self.slots: list[DetachedSlot] = []
        self._logged = False

    def __iter__(self) -> Iterator[Slot]:
        return iter([detached.slot for detached in self.slots])

    def add(self, detached: DetachedSlot, tier: str) -> None:
        """Add a slot. The first one is logged."""
        self.slots.append(detached)
        if not self._logged:
            self._logged = True
            names = ", ".join(detached.live.storages) or "its tensors"
            logger.warning(
                "group %r has left %s, but views of %s are kept (by a module's attribute, a cache, "
                "a closure, an array): they stay valid, in memory that no budget counts, up to %s "
                "for this group. Keep copies instead (.clone()). Other groups are not logged",
                detached.group.key,
                tier,
                names,
                size(detached.slot.nbytes),
            )

    def collect(self) -> None:
        """Free the slots whose views are gone."""
        if self.slots:
            for detached in [detached for detached in self.slots if detached.live.token() is None]:
                self.slots.remove(detached)
                detached.end()

    def storages_of(self, group: GroupId) -> dict[str, torch.UntypedStorage]:
        """Return the storages with bytes of a group that views use, by tensor."""
        if not self.slots:
            return {}
        mine = [detached for detached in self.slots if detached.group == group]
        known = [item for detached in mine for item in detached.live.storages.items()]
        found = {name: reference() for name, reference in known}
        return {name: storage for name, storage in found.items() if storage is not None}

    def forget(self, group: GroupId) -> None:
        """Stop reusing the storages of a group, whose bytes will change."""
        for number, detached in enumerate(self.slots):
            if detached.group == group:
                live = LiveViews(detached.live.token, {})
                self.slots[number] = DetachedSlot(detached.slot, group, live, detached.end)

    def close(self) -> None:
        """Drop all slots. Each is freed with its last view."""
        for slot in self:
            slot.memory = None
        self.slots.clear()
