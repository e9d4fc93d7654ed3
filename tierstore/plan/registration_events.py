"""Events that register existing groups: from a checkpoint, from files, or after a rebuild.

If an exception interrupts a planner in the middle of an event, its state cannot be trusted. The
true state is known to the store, which carries out instructions in complete batches, so it always
matches some event's outcome. A new planner therefore starts with `Recovered` and continues from
there. It has seen no uses yet, and has no requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierstore.model import events
from tierstore.model.tiers import Access, HostAccess, Tier, UseOrder
from tierstore.plan.copies import CopyTable
from tierstore.plan.movement import Movement
from tierstore.plan.prefetch import Prefetcher
from tierstore.plan.records import GroupRecord, State
from tierstore.plan.requests import Requests
from tierstore.plan.schedule import Schedule


@dataclass(eq=False, slots=True)
class RegistrationEvents:
    """Handles the events that add groups."""

    _copies: CopyTable
    _requests: Requests
    _movement: Movement
    _schedule: Schedule
    _prefetcher: Prefetcher

    def registered(self, event: events.Registered) -> bool:
        assert event.backing or not event.shared, (
            f"{event.group.key} is shared but not backed by a file"
        )
        group = GroupRecord(
            event.group,
            event.nbytes,
            event.tier if event.backing else None,
            use_order=event.use_order,
            shared=event.shared,
        )
        self._copies.add(group)
        self._copies.place(group, event.tier, State.PRESENT)
        self._copies.arrive(group, event.tier)
        self._introduce(group)
        return False

    def _introduce(self, group: GroupRecord) -> None:
        if group.use_order is not UseOrder.PREFETCHED:
            self._schedule.known.introduce(group.id.key, group.use_order)

    def recovered(self, event: events.Recovered) -> bool:
        groups = [self._add(found) for found in event.groups]
        for group in groups:
            self._movement.tidy(group)
        return True

    def _add(self, found: events.RecoveredGroup) -> GroupRecord:
        copies = self._copies
        group = GroupRecord(found.group, found.nbytes, found.backing, use_order=found.use_order)
        group.sticky, group.host_lease, group.shared = found.sticky, found.host_lease, found.shared
        if found.visible or found.claimed:
            copies.add(group)
        else:
            copies.groups[group.id] = group
            group.forgotten = True
        if found.visible:
            self._introduce(group)
        if found.claimed and not found.visible:
            self._requests.claims[group] = None
        for tier in found.tiers:
            self._add_copy(group, tier, found)
        for src, dst in found.moves:
            group.copies[src].readers += 1
            group.copies[dst].began = self._prefetcher.now
            self._prefetcher.hops[src, dst].begin(group.nbytes)
            copies.in_flight += 1
        for access, permanent in found.leases:
            group.leases += 1
            group.exclusive = None if access is Access.READ else access
            copies.leased += not permanent
        copies.leased += group.host_lease not in (None, HostAccess.PERMANENT)
        return group

    def _add_copy(self, group: GroupRecord, tier: Tier, found: events.RecoveredGroup) -> None:
        copies = self._copies
        claimed = group in self._requests.claims
        copies.in_flight += claimed  # a caller is filling it
        if claimed or any(dst is tier for _, dst in found.moves):
            copies.place(group, tier, State.ARRIVING)
        else:
            copies.place(group, tier, State.PRESENT)
            copies.arrive(group, tier)
