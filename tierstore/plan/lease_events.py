"""Handles the events of leases and puts, and learns from each use."""

from __future__ import annotations

from dataclasses import dataclass

from tierstore.model import events
from tierstore.model.tiers import Access, HostAccess, UseOrder
from tierstore.plan.copies import CopyTable
from tierstore.plan.movement import Movement
from tierstore.plan.policy import Policy
from tierstore.plan.prefetch import Prefetcher
from tierstore.plan.records import GroupRecord, State
from tierstore.plan.requests import Requests
from tierstore.plan.schedule import Schedule


@dataclass(eq=False, slots=True)
class UseEvents:
    """Learns the order of uses, and the times between them."""

    _policy: Policy
    _schedule: Schedule
    _prefetcher: Prefetcher
    _movement: Movement

    def asked(self, group: GroupRecord, stream: int) -> None:
        """Note that a user requests a group."""
        if group.use_order is UseOrder.LEARNED:
            self._prefetcher.asked(group.number, self._schedule.ask(group.id.key, stream))

    def note(self, group: GroupRecord, stream: int) -> None:
        """Note that a group was leased by a user."""
        prefetcher = self._prefetcher
        self._policy.used(group.id)
        self._movement.look_ahead = True
        if group.use_order is not UseOrder.LEARNED:
            self._schedule.note_unordered_use(group.id.key, stream)
            prefetcher.leased(group.number)
            return
        prefetcher.used(group.number, self._schedule.advance_past(group.id.key, stream))

    def ended(self, event: events.StreamEnded) -> bool:
        """Forget the order learned from a user that has ended."""
        self._schedule.end(event.stream)
        return False


@dataclass(eq=False, slots=True)
class LeaseEvents:
    """Handles the events of puts and of leases on the fastest tier."""

    _copies: CopyTable
    _requests: Requests
    _movement: Movement
    _uses: UseEvents

    def claimed(self, event: events.Claimed) -> bool:
        copies = self._copies
        copies.check_fits(event.group, event.nbytes, (copies.pools[copies.host],))
        group = GroupRecord(event.group, event.nbytes, use_order=event.use_order)
        copies.add(group)
        self._requests.claims[group] = None
        return True

    def filled(self, event: events.Filled) -> bool:
        group = self._copies.groups[event.group]
        self._copies.arrive(group, self._copies.host)
        self._copies.in_flight -= 1
        self._requests.claims.pop(group, None)
        self._movement.look_ahead = True
        self._movement.tidy(group)
        return True

    def demanded(self, event: events.Demanded) -> bool:
        group = self._copies.groups[event.group]
        way_up = self._copies.way_up(group, self._copies.top)
        self._copies.check_fits(group.id, group.nbytes, way_up)
        demands = self._requests.demands
        demands[group] = demands.get(group, 0) + 1
        self._asked(group, event.stream)
        return not group.present(self._copies.top)

    def _asked(self, group: GroupRecord, stream: int) -> None:
        self._uses.asked(group, stream)
        self._movement.cancel_drops(group)

    def withdrawn(self, event: events.Withdrawn) -> bool:
        group = self._copies.groups.get(event.group)
        if group is None:
            return True
        if group in self._requests.claims:
            self._withdraw_claim(group)
        elif self._requests.withdraw(group):
            group.error = None
        return True

    def _withdraw_claim(self, group: GroupRecord) -> None:
        host = self._copies.host
        if host in group.copies:
            self._copies.in_flight -= 1
            self._copies.release_space(group, host)
        self._movement.forget(group)

    def leasable(self, group: GroupRecord, access: Access) -> bool:
        """Return whether the group is resident, and no other use conflicts with `access`."""
        if not group.present(self._copies.top) or group.exclusive or group.forgotten:
            return False
        return access is Access.READ or not (group.leases or group.host_lease or group.moving())

    def leased(self, event: events.Leased) -> bool:
        copies, access = self._copies, event.access
        group = copies.groups[event.group]
        if not event.demanded:
            self._asked(group, event.stream)
        if access is Access.UPDATE:
            copies.keep_only(group, copies.top)
        group.exclusive = None if access is Access.READ else access
        group.leases += 1
        copies.leased += not event.permanent
        self._uses.note(group, event.stream)
        if event.demanded:
            self._requests.withdraw(group)
        return True

    def released(self, event: events.Released) -> bool:
        group, movement = self._copies.groups[event.group], self._movement
        group.leases -= 1
        self._copies.leased -= not event.permanent
        group.exclusive = None
        if event.access is Access.TAKE:
            movement.forget(group)
        movement.tidy(group)
        movement.look_ahead |= movement.short_of_space
        return True


@dataclass(eq=False, slots=True)
class HostLeaseEvents:
    """Handles the events of leases in host memory, which on the CPU is also the fastest tier.

    For example, an optimizer uses them: it works on the host, regardless of the model's device.
    """

    _copies: CopyTable
    _requests: Requests
    _movement: Movement
    _uses: UseEvents

    def demanded(self, event: events.HostDemanded) -> bool:
        group = self._copies.groups[event.group]
        way_up = self._copies.way_up(group, self._copies.host)
        self._copies.check_fits(group.id, group.nbytes, way_up)
        self._requests.host_demands.setdefault(group, []).append(event.purpose)
        self._movement.cancel_drops(group)
        return True

    def withdrawn(self, event: events.HostWithdrawn) -> bool:
        group = self._copies.groups.get(event.group)
        if group is None or group not in self._requests.host_demands:
            return False
        group.error = None
        self._remove_request(group, event.purpose)
        return True

    def leasable(self, group: GroupRecord, purpose: HostAccess) -> bool:
        """Return whether the group may be leased in host memory now."""
        copy = group.copies.get(self._copies.host)
        if group.host_lease or group.leases or group.moving() or copy is None:
            return False
        return copy.state is State.PRESENT or purpose is HostAccess.RENEW

    def leased(self, event: events.HostLeased) -> bool:
        copies = self._copies
        group = copies.groups[event.group]
        if not group.present(copies.host):
            copies.renew(group)
        group.host_lease = event.purpose
        self._remove_request(group, event.purpose)
        copies.leased += event.purpose is not HostAccess.PERMANENT
        if event.purpose is not HostAccess.READ:
            copies.keep_only(group, copies.host)
        self._uses.note(group, event.stream)
        return True

    def released(self, event: events.HostReleased) -> bool:
        group = self._copies.groups[event.group]
        self._copies.leased -= group.host_lease is not HostAccess.PERMANENT
        group.host_lease = None
        self._movement.tidy(group)
        self._movement.look_ahead |= self._movement.short_of_space
        return True

    def _remove_request(self, group: GroupRecord, purpose: HostAccess) -> None:
        """Remove one request for the group in host memory: it was met or withdrawn."""
        purposes = self._requests.host_demands[group]
        purposes.remove(purpose)
        if not purposes:
            del self._requests.host_demands[group]
        if set(purposes) != {HostAccess.RENEW}:
            self._release_reserved(group)

    def _release_reserved(self, group: GroupRecord) -> None:
        copy = group.copies.get(self._copies.host)
        if copy is not None and copy.state is State.RESERVED:
            self._copies.release_space(group, self._copies.host)
