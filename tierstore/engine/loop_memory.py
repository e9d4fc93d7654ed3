"""The memory of a followed plan: slots of groups that stay resident, and rings for the others.

Each memory tier holds the groups that stay there for the whole loop, which are leased in place, and
one *ring*: memory through which all other groups pass. A ring is reserved
(`events.MemoryBorrowed`), so that the planner does not use it. The planner does not track its
contents: for it, those groups are on disk (or in host memory, if they stay there).
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
from tierstore.system.streams import stream_context
from tierstore.tiers.arena import Slot
from tierstore.tiers.device_tier import CopyPairs, copy_runs, parts_of
from tierstore.tiers.entry import GroupEntry
from tierstore.tiers.slot_views import LiveViews, SlotViews, Token

StepKeys = tuple[str, ...]


@dataclass(frozen=True)
class KeyedPlan:
    """A plan with the keys of its groups (by number) and of its steps.

    `steps` has all keys that each step uses, and `own` those of the unit that begins the step: none
    if a unit continues after a nested one.
    """

    plan: LoopPlan
    groups: tuple[str, ...]
    steps: tuple[StepKeys, ...]
    own: tuple[StepKeys, ...]


def moves_as_a_whole(core: Core, entry: GroupEntry) -> bool:
    """Return True if a group cannot move in tiles.

    It cannot be read in parts, or a tile would overlap device memory that other groups may still
    use.
    """
    if core.tiers.device is not None and any(
        run.device_offset > run.host_offset for run in entry.spec.runs
    ):
        return True
    return not core.tiers.reader.may_read_parts(entry)


class LeaseSource(Protocol):
    """Leases groups, as any caller of the store does."""

    def lease(self, key: str, tier: Tier, owner: object) -> Lease:
        """Lease a group to read for `owner`, on the fastest tier or in host memory.

        Blocks until it is resident.
        """


class RingViews:
    """The tensors of all groups that pass through a ring. Has the interface of `SlotViews`."""

    again = False

    def __init__(self, memory: torch.Tensor) -> None:
        self.token: Token | None = Token(memory)
        self.views: dict[tuple[int, int], SlotViews] = {}  # by group and address

    def are_in_use(self) -> bool:
        """Return True if other code holds a view of the memory."""
        return any(views.are_in_use() for views in self.views.values())

    def end(self) -> LiveViews | None:
        """Drop the tensors. Return the views that other code still holds, or None."""
        left = [views.end() for views in self.views.values()]
        self.views.clear()
        self.token = None
        viewed = [each for each in left if each is not None and each.token() is not None]
        return LiveViews(viewed[0].token, {}) if viewed else None


class LoopRing:
    """The memory of a tier through which groups pass.

    `kept` are the groups that stay resident in their slots; they have the lowest addresses of the
    plan. `entry` represents the ring in the tier.
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
        """Return `nbytes` bytes at an address of the plan, as a view of the ring."""
        assert self.memory is not None
        return self.memory[address - self.low : address - self.low + nbytes]

    def passing(self) -> list[Resident]:
        """Return the residents of the ring before the first step."""
        return [each for each in self.planned.start if each.group not in self.kept]


@dataclass
class StepViews:
    """The tensors of one step, and the views of groups in the ring among them."""

    tensors: dict[str, torch.Tensor]
    passing: tuple[SlotViews, ...]


class LoopMemory:
    """The leases and rings of one loop, with one ring for each memory tier, the fastest first.

    `entries` are the groups by number, `views` the tensors by step, and `used` the groups (with
    their bytes) of the unit of each step. For each copy to the device, `copies` has the source
    slot, and the target and source memory of each part.
    """

    def __init__(self, core: Core, lease_table: LeaseTable, keyed: KeyedPlan) -> None:
        self.core = core
        self.keyed = keyed
        self.rings = [LoopRing(tier) for tier in keyed.plan.tiers]
        self.entries: list[GroupEntry] = []
        self.views: list[StepViews] = []
        self.used: list[list[tuple[GroupId, int]]] = []
        self.copies: list[tuple[Slot, CopyPairs]] = []
        self._leases: list[Lease] = []
        self._lease_table = lease_table

    # Entering ----------------------------------------------------------------------------------

    @transaction
    def find_groups(self) -> bool:
        """Look up the groups of the plan. Return False if the plan does not fit them.

        It does not fit if a group is gone, has another size, or cannot move in tiles as planned.
        """
        core, keyed = self.core, self.keyed
        core.check_open()
        groups = [core.current.get(key) for key in keyed.groups]
        self.entries = [core.mover.entry(group) for group in groups if group is not None]
        sizes = tuple(entry.spec.nbytes for entry in self.entries)
        return keyed.plan.loop.sizes == sizes and not any(
            moves_as_a_whole(core, self.entries[group]) for group in keyed.plan.tiled_groups
        )

    @transaction
    def others_have_leases(self) -> bool:
        """Return True if there are leases that the plan does not include, which may never end.

        Leases of units that enclose the first step are of groups that stay resident.
        """
        core = self.core
        kept = {self.entries[group].group for group in self.rings[0].kept}
        leases = [record for record in core.leases if record not in core.revocable]
        return any(
            record.caller is not None
            and (record.host_access is not None or record.group not in kept)
            for record in leases
        )

    def enter(self, source: LeaseSource, owner: object) -> bool:
        """Load all groups to their places before the first step of the plan. Blocks until done.

        `owner` leases the groups that stay resident. Returns False if there is not enough memory;
        the caller must call `free` in that case too. Raises the errors of leasing and reading.
        """
        for ring in self.rings:  # the fastest first: its groups pass through the slower ones
            if not self._reserve(ring):
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
    def _reserve(self, ring: LoopRing) -> bool:
        core = self.core
        core.apply(events.MemoryBorrowed(ring.tier, ring.nbytes))
        if core.planner.carved_out[ring.tier] != ring.nbytes:
            return False
        if core.tiers.device is not None and ring is self.rings[0] and ring.nbytes:
            core.tiers.device.carve_out(ring.entry)
        return True

    def _make(self, ring: LoopRing) -> None:
        """Allocate the memory of a ring, page-locked if it has to be."""
        tiers = self.core.tiers
        if not ring.nbytes:
            ring.memory = torch.empty(0, dtype=torch.uint8)
        elif ring.tier is Tier.DEVICE:
            assert tiers.device is not None
            tiers.device.arena.free_idle()  # its pieces in torch's cache are too small
            ring.memory = tiers.device.arena.fill(ring.entry.slots[ring.tier])
        else:
            ring.memory = tiers.host.take(ring.entry)

    def _copy_up(self, ring: LoopRing, there: Resident, source: LeaseSource, owner: object) -> None:
        """Copy a group from host memory to its address on the device."""
        device, entry = self.core.tiers.device, self.entries[there.group]
        assert device is not None
        with source.lease(self.keyed.groups[there.group], Tier.HOST, owner):
            slot = entry.slots[Tier.HOST]
            target = ring.part(there.address, there.nbytes)
            with stream_context(device.up):
                copy = functools.partial(copy_runs, entry.spec, slot.memory, target, up=True)
                slot.while_locked(copy)
            device.up.synchronize()

    def read(self, ring: LoopRing, there: Resident) -> None:
        """Read bytes of a group to their address in host memory. Raises the errors of the disk."""
        entry, journal = self.entries[there.group], self.core.mover.journal
        reader = self.core.tiers.reader
        span = Span(hop(Tier.DISK, ring.tier), entry.group.key)
        journal.begin(span)
        try:
            space = ring.part(there.address, there.nbytes).numpy().data
            if there.nbytes == entry.spec.nbytes:
                span.nbytes = reader.read(entry, space)
            else:
                span.nbytes = reader.read_part(entry, space, there.offset)
            journal.count(span.kind, span.nbytes)
        except BaseException:
            span.note = "failed"
            raise
        finally:
            journal.end(span)

    def _make_views(self) -> None:
        """Create the tensors of all steps, once."""
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

    def _find_copies(self) -> Iterator[tuple[Slot, CopyPairs]]:
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
        """Return True if other code holds views of earlier memory of a group."""
        left = self.core.tiers.top.detached
        return any(left.storages_of(entry.group) for entry in self.entries)

    # Leaving: each as part of a transaction ----------------------------------------------------

    def note_device_work(self, streams: Set[torch.Stream], copied: Any) -> None:
        """Record work of the device that may still use the memory.

        Steps ran on `streams`. `copied` is an event after the last copy to the device, or None.
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
                if ring is self.rings[0]:  # the whole streams: views may outlive their steps
                    slot.streams |= streams

    def forget_views(self) -> None:
        """Drop all views, so that only other code still holds views of memory that is freed."""
        self.views.clear()
        self.copies.clear()

    def keep_only(self, used: Collection[str]) -> set[GroupId]:
        """End the leases of groups that are not `used`. Return the groups that stay leased."""
        for lease in [lease for lease in self._leases if lease.key not in used]:
            self._leases.remove(lease)
            self._lease_table.end_lease(lease)
        return {lease.group for lease in self._leases}

    def free(self) -> None:
        """End all leases, and free the rings."""
        core = self.core
        self.forget_views()
        leases, self._leases = self._leases, []
        for ring in self.rings:
            ring.memory = None
        if core.is_stopped():  # all memory is freed with the tiers
            for lease in leases:
                lease.invalidate()
            return
        for lease in leases:
            self._lease_table.end_lease(lease)
        core.tiers.host.return_carved_out_soon(self.rings[-1].entry)
        if core.tiers.device is not None:
            core.tiers.device.return_carved_out(self.rings[0].entry)
        for ring in self.rings:
            core.apply(events.MemoryBorrowed(ring.tier, 0))
