"""The memory of a loop that is followed: slots of groups that stay, and rings for the others.

Each tier in memory holds the groups that stay there for the whole loop, which are leased where they
lie, and one *ring*, a piece of memory through which all other groups pass. A ring is borrowed
(`events.MemoryBorrowed`): no copy of the planner's takes it. Its contents are not in the planner's
books; there, those groups are on disk (or in host memory, if they stay there).
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Set
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tierstore.engine.core import Core
from tierstore.engine.lease_table import LeaseTable
from tierstore.engine.transaction import transaction
from tierstore.lease import Lease
from tierstore.model import events
from tierstore.model.groups import GroupId, GroupSpec
from tierstore.model.tiers import Tier
from tierstore.observe.journal import Span, hop
from tierstore.plan.loop_plan import LoopPlan, Resident, TierPlan
from tierstore.system.streams import entered
from tierstore.tiers.arena import Slot
from tierstore.tiers.device_tier import Places, copy_runs, parts_of
from tierstore.tiers.entry import GroupEntry
from tierstore.tiers.slot_views import LookedAt, SlotViews, Token

StepKeys = tuple[str, ...]


@dataclass(frozen=True)
class KeyedPlan:
    """A plan with the keys of its groups (by number) and of its steps.

    `steps` has all keys that a step uses, `own` those of the unit that begins there: none where a
    unit goes on after others that ran inside it.
    """

    plan: LoopPlan
    groups: tuple[str, ...]
    steps: tuple[StepKeys, ...]
    own: tuple[StepKeys, ...]


def moves_as_a_whole(core: Core, entry: GroupEntry) -> bool:
    """Return whether a group may not move in tiles: it cannot be read in parts, or a tile would
    reach beyond its room on the device, where bytes of others may still be in use."""
    if core.tiers.device is not None and any(
        run.device_offset > run.host_offset for run in entry.spec.runs
    ):
        return True
    return not core.tiers.reader.may_read_parts(entry)


class LeaseSource(Protocol):
    """Acquires groups as any caller of the store would."""

    def lease(self, key: str, tier: Tier, owner: object) -> Lease:
        """Lease a group for `owner` to read, on the fastest tier or in host memory. Blocks until it
        is resident."""


class RingViews:
    """The tensors of all groups that pass through a ring; stands for the views of its slot."""

    again = False

    def __init__(self, memory: torch.Tensor) -> None:
        self.token: Token | None = Token(memory)
        self.views: dict[tuple[int, int], SlotViews] = {}  # by group and address

    def are_looked_at(self) -> bool:
        """Return whether anybody else holds a view of the memory."""
        return any(views.are_looked_at() for views in self.views.values())

    def end(self) -> LookedAt | None:
        """Forget the tensors. Return the views that somebody still holds, if any."""
        left = [views.end() for views in self.views.values()]
        self.views.clear()
        self.token = None
        looked_at = [each for each in left if each is not None and each.token() is not None]
        return LookedAt(looked_at[0].token, {}) if looked_at else None


class LoopRing:
    """The memory of a tier through which groups pass.

    `kept` are the groups that stay, in slots of their own; they come first in the addresses of the
    plan. `entry` stands for the ring in the books of the tier.
    """

    def __init__(self, planned: TierPlan) -> None:
        first = min((copy.target for copy in planned.copies), default=planned.nbytes)
        kept = [each for each in planned.start if each.address + each.nbytes <= first]
        self.planned = planned
        self.kept = frozenset(each.group for each in kept)
        self.low = max((each.address + each.nbytes for each in kept), default=0)
        self.memory: torch.Tensor | None = None
        name = f"loop on {planned.tier.name}"
        self.entry = GroupEntry(GroupId(name, 0), GroupSpec(name, (), self.nbytes))

    @property
    def tier(self) -> Tier:
        return self.planned.tier

    @property
    def nbytes(self) -> int:
        return self.planned.nbytes - self.low

    def part(self, address: int, nbytes: int) -> torch.Tensor:
        """Return the bytes at an address of the plan."""
        assert self.memory is not None
        return self.memory[address - self.low : address - self.low + nbytes]

    def passing(self) -> list[Resident]:
        """Return what has to be in the ring before the first step."""
        return [each for each in self.planned.start if each.group not in self.kept]


@dataclass
class StepViews:
    """The tensors of one step, and the views among them that are over a ring."""

    tensors: dict[str, torch.Tensor]
    passing: tuple[SlotViews, ...]


class LoopMemory:
    """Leases and rings of one loop, with a ring for each tier in memory, the fastest first.

    `entries` has the groups by number, `views` the tensors by step, and `used` what the unit of
    that step uses: groups and their bytes. `copies` has the memory of each copy to the device,
    target and source of each part, and the slot that the sources are in.
    """

    def __init__(self, core: Core, lease_table: LeaseTable, keyed: KeyedPlan) -> None:
        self.core = core
        self.keyed = keyed
        self.rings = [LoopRing(tier) for tier in keyed.plan.tiers]
        self.entries: list[GroupEntry] = []
        self.views: list[StepViews] = []
        self.used: list[list[tuple[GroupId, int]]] = []
        self.copies: list[tuple[Slot, Places]] = []
        self._leases: list[Lease] = []
        self._lease_table = lease_table

    # Entering ----------------------------------------------------------------------------------

    @transaction
    def find_groups(self) -> bool:
        """Look up the groups. Returns False if one is gone, or has another size, or if it was
        planned to move in tiles, but has to move as a whole."""
        core, keyed = self.core, self.keyed
        core.check_open()
        groups = [core.current.get(key) for key in keyed.groups]
        self.entries = [core.mover.entry(group) for group in groups if group is not None]
        sizes = tuple(entry.spec.nbytes for entry in self.entries)
        return keyed.plan.loop.sizes == sizes and not any(
            moves_as_a_whole(core, self.entries[group]) for group in keyed.plan.cut_groups
        )

    @transaction
    def others_have_leases(self) -> bool:
        """Return whether leases take room that the plan does not know of: it may never come back.
        Those of units around the first step are of groups that stay."""
        core = self.core
        kept = {self.entries[group].group for group in self.rings[0].kept}
        leases = [record for record in core.leases if record not in core.revocable]
        return any(
            record.caller is not None and (record.held is not None or record.group not in kept)
            for record in leases
        )

    def enter(self, source: LeaseSource, owner: object) -> bool:
        """Bring all groups to where the plan has them before its first step, and lease those that
        stay for `owner`. Blocks until they are there.

        Returns False if there is no room; `give_back` is to be called then, too. Raises what
        acquiring and reading the groups raises.
        """
        for ring in self.rings:  # the fastest first: groups get there by way of the others
            if not self._borrow(ring):
                return False
            self._bring(ring, source, owner)
        device = self.core.tiers.device
        if device is not None:  # steps may run on any stream
            torch.accelerator.current_stream(device.device).synchronize()
            self.copies = list(self._find_copies())
        self._make_views()
        return not self._views_are_kept()

    def _bring(self, ring: LoopRing, source: LeaseSource, owner: object) -> None:
        self._make(ring)
        for each in ring.passing():
            if ring is self.rings[-1]:
                self.read(ring, each)
            else:
                self._copy_up(ring, each, source, owner)
        for group in sorted(ring.kept):
            self._leases.append(source.lease(self.keyed.groups[group], ring.tier, owner))

    @transaction
    def _borrow(self, ring: LoopRing) -> bool:
        core = self.core
        core.tell(events.MemoryBorrowed(ring.tier, ring.nbytes))
        if core.planner.borrowed[ring.tier] != ring.nbytes:
            return False
        if core.tiers.device is not None and ring is self.rings[0] and ring.nbytes:
            core.tiers.device.borrow(ring.entry)
        return True

    def _make(self, ring: LoopRing) -> None:
        """Allocate the memory of a ring, page-locked if it has to be."""
        tiers = self.core.tiers
        if not ring.nbytes:
            ring.memory = torch.empty(0, dtype=torch.uint8)
        elif ring.tier is Tier.DEVICE:
            assert tiers.device is not None
            tiers.device.arena.give_back_idle()  # torch's cache has it in pieces that are too small
            ring.memory = tiers.device.arena.fill(ring.entry.slots[ring.tier])
        else:
            ring.memory = tiers.host.take(ring.entry)

    def _copy_up(self, ring: LoopRing, there: Resident, source: LeaseSource, owner: object) -> None:
        """Copy a group from host memory to its place on the device."""
        device, entry = self.core.tiers.device, self.entries[there.group]
        assert device is not None
        with source.lease(self.keyed.groups[there.group], Tier.HOST, owner):
            slot = entry.slots[Tier.HOST]
            target = ring.part(there.address, there.nbytes)
            with entered(device.up):
                copy = functools.partial(copy_runs, entry.spec, slot.memory, target, up=True)
                slot.while_locked(copy)
            device.up.synchronize()

    def read(self, ring: LoopRing, there: Resident) -> None:
        """Read bytes of a group to their place in host memory. Raises what the disk does."""
        entry, journal = self.entries[there.group], self.core.mover.journal
        reader = self.core.tiers.reader
        span = Span(hop(Tier.DISK, ring.tier), entry.group.key)
        journal.begin(span)
        try:
            room = ring.part(there.address, there.nbytes).numpy().data
            if there.nbytes == entry.spec.nbytes:
                span.nbytes = reader.read(entry, room)
            else:
                span.nbytes = reader.read_part(entry, room, there.offset)
            journal.count(span.kind, span.nbytes)
        except BaseException:
            span.note = "failed"
            raise
        finally:
            journal.end(span)

    def _make_views(self) -> None:
        """Make the tensors of all steps, once."""
        ring, keyed = self.rings[0], self.keyed
        leased = {lease.key: lease.tensors for lease in self._leases[: len(ring.kept)]}
        assert ring.memory is not None
        views = RingViews(ring.memory)
        if ring.nbytes:
            ring.entry.slots[ring.tier].views = views  # type: ignore[assignment]
        numbers = {key: number for number, key in enumerate(keyed.groups)}
        for step, planned, own in zip(
            keyed.plan.loop.steps, keyed.plan.steps, keyed.own, strict=True
        ):
            addresses = dict(zip(step.groups, planned.addresses, strict=True))
            tensors: dict[str, torch.Tensor] = {}
            passing, used = [], []
            for key in own:
                group = numbers[key]
                used.append((self.entries[group].group, self.entries[group].spec.nbytes))
                if group in ring.kept:
                    tensors |= leased[key]
                else:
                    passing.append(self._views_at(group, addresses[group], views))
                    tensors |= passing[-1].tensors
            self.views.append(StepViews(tensors, tuple(passing)))
            self.used.append(used)

    def _views_at(self, group: int, address: int, views: RingViews) -> SlotViews:
        place = group, address
        if place not in views.views:
            entry = self.entries[group]
            memory = self.rings[0].part(address, entry.spec.nbytes)
            assert views.token is not None
            views.views[place] = self.core.tiers.top.views_over(entry, memory, views.token)
        return views.views[place]

    def _find_copies(self) -> Iterator[tuple[Slot, Places]]:
        ring, below = self.rings
        for copy in self.keyed.plan.top.copies:
            assert copy.source is not None
            entry = self.entries[copy.group]
            if copy.group in below.kept:
                slot = entry.slots[below.tier]
                assert slot.memory is not None
                source = slot.memory[copy.offset : copy.offset + copy.nbytes]
            else:
                slot = below.entry.slots[below.tier]
                source = below.part(copy.source, copy.nbytes)
            target = ring.part(copy.target - copy.offset, entry.spec.nbytes)
            parts = parts_of(entry.spec, source, target, copy.offset)
            yield slot, [(there, here) for here, there in parts]

    @transaction
    def _views_are_kept(self) -> bool:
        """Return whether somebody holds views of memory in which a group was before."""
        left = self.core.tiers.top.left
        return any(left.storages_of(entry.group) for entry in self.entries)

    # Leaving: each as part of a transaction ----------------------------------------------------

    def note_device_work(self, streams: Set[torch.Stream], copied: Any) -> None:
        """Note what the device has still to do with the memory. It may be far behind.

        Steps ran on `streams`; the copies to the device are done at the event `copied` (or None).
        """
        if self.core.tiers.device is None:
            return
        for ring in self.rings:
            for entry in [ring.entry, *[self.entries[group] for group in ring.kept]]:
                slot = entry.slots.get(ring.tier)
                if slot is None:
                    continue
                if copied is not None:
                    slot.pending.append(copied)
                if ring is self.rings[0]:  # to the end: views may have outlived their steps
                    slot.streams |= streams

    def forget_views(self) -> None:
        """Drop all views, so that nobody else holds any of memory that goes."""
        self.views.clear()
        self.copies.clear()

    def keep_only(self, used: Collection[str]) -> set[GroupId]:
        """End the leases of all groups that are not `used`. Return those that are still leased."""
        for lease in [lease for lease in self._leases if lease.key not in used]:
            self._leases.remove(lease)
            self._lease_table.end_lease(lease)
        return {lease.group for lease in self._leases}

    def give_back(self) -> None:
        """End all leases, and give the rings back."""
        core = self.core
        self.forget_views()
        leases, self._leases = self._leases, []
        for ring in self.rings:
            ring.memory = None
        if core.ended():  # everything goes with the tiers
            for lease in leases:
                lease.revoked()
            return
        for lease in leases:
            self._lease_table.end_lease(lease)
        core.tiers.host.give_back_soon(self.rings[-1].entry)
        if core.tiers.device is not None:
            core.tiers.device.give_back(self.rings[0].entry)
        for ring in self.rings:
            core.tell(events.MemoryBorrowed(ring.tier, 0))
