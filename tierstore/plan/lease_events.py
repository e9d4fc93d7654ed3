"""Leases on the fastest tier, and the room for puts: who waits, who is lent what."""

from __future__ import annotations

from tierstore.model.events import Claimed, Demanded, Filled, Leased, Released, Withdrawn
from tierstore.model.tiers import Access
from tierstore.plan.copies import CopyTable
from tierstore.plan.movement import Movement
from tierstore.plan.prefetch import Prefetcher
from tierstore.plan.records import GroupRecord
from tierstore.plan.requests import Requests
from tierstore.plan.uses import Handlers, Uses


class LeaseEvents:
    """Handles the events of puts and of leases on the fastest tier."""

    def __init__(
        self,
        copies: CopyTable,
        requests: Requests,
        movement: Movement,
        uses: Uses,
        prefetcher: Prefetcher,
    ) -> None:
        self._copies = copies
        self._requests = requests
        self._movement = movement
        self._uses = uses
        self._prefetcher = prefetcher

    def handlers(self) -> Handlers:
        return {
            Claimed: self._claimed,
            Filled: self._filled,
            Demanded: self._demanded,
            Withdrawn: self._withdrawn,
            Leased: self._leased,
            Released: self._released,
        }

    def _claimed(self, event: Claimed) -> bool:
        copies = self._copies
        copies.refuse_what_never_fits(event.group, event.nbytes, (copies.host,))
        group = GroupRecord(event.group, event.nbytes, caller_scheduled=event.caller_scheduled)
        copies.add(group)
        self._requests.claims[group] = None
        return True

    def _filled(self, event: Filled) -> bool:
        group = self._copies.groups[event.group]
        self._copies.arrive(group, self._copies.host)
        self._copies.in_flight -= 1
        self._requests.claims.pop(group, None)
        self._movement.look_ahead = True
        self._movement.tidy(group)
        return True

    def _demanded(self, event: Demanded) -> bool:
        group = self._copies.groups[event.group]
        way_up = self._copies.way_up(group, self._copies.top)
        self._copies.refuse_what_never_fits(group.id, group.nbytes, way_up)
        demands = self._requests.demands
        demands[group] = demands.get(group, 0) + 1
        self._asked(group)
        return not group.present(self._copies.top)

    def _asked(self, group: GroupRecord) -> None:
        if not group.caller_scheduled:
            self._prefetcher.asked(group.number)
        self._movement.want_again(group)

    def _withdrawn(self, event: Withdrawn) -> bool:
        group = self._copies.groups.get(event.group)
        if group is None:
            return True
        if group in self._requests.claims:
            self._withdraw_claim(group)
        elif self._requests.take_back(group):
            group.error = None
        return True

    def _withdraw_claim(self, group: GroupRecord) -> None:
        host = self._copies.host
        if host in group.copies:
            self._copies.in_flight -= 1
            self._copies.release_room(group, host)
        self._movement.forget(group)

    def leasable(self, group: GroupRecord, access: Access) -> bool:
        """Whether the group may be lent now: it is there, and nobody uses it in another way."""
        if not group.present(self._copies.top) or group.exclusive or group.forgotten:
            return False
        return access is Access.READ or not (group.leases or group.host_lease or group.moving())

    def _leased(self, event: Leased) -> bool:
        copies, access = self._copies, event.access
        group = copies.groups[event.group]
        if not event.demanded:
            self._asked(group)
        if access is Access.UPDATE:
            copies.keep_only(group, copies.top)
        group.exclusive = None if access is Access.READ else access
        group.leases += 1
        copies.leased += not event.permanent
        self._uses.note(group)
        if event.demanded:
            self._requests.take_back(group)
        return True

    def _released(self, event: Released) -> bool:
        group, movement = self._copies.groups[event.group], self._movement
        group.leases -= 1
        self._copies.leased -= not event.permanent
        group.exclusive = None
        if event.access is Access.TAKE:
            movement.forget(group)
        movement.tidy(group)
        movement.look_ahead |= movement.short_of_room
        return True
