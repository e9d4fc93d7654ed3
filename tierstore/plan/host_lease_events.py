"""Copies in host memory that somebody has, to look at them or to change them.

On the fastest tier groups are leased. In host memory, which on the CPU is the same, they are leased
as well: to an optimizer, say, which works there whatever the model computes on.
"""

from __future__ import annotations

from tierstore.model.events import HostDemanded, HostLeased, HostReleased, HostWithdrawn
from tierstore.model.tiers import HostAccess
from tierstore.plan.copies import CopyTable
from tierstore.plan.movement import Movement
from tierstore.plan.records import GroupRecord, State
from tierstore.plan.requests import Requests
from tierstore.plan.uses import Handlers, Uses


class HostLeaseEvents:
    """Handles the events of leases in host memory."""

    def __init__(
        self, copies: CopyTable, requests: Requests, movement: Movement, uses: Uses
    ) -> None:
        self._copies = copies
        self._requests = requests
        self._movement = movement
        self._uses = uses

    def handlers(self) -> Handlers:
        return {
            HostDemanded: self._demanded,
            HostWithdrawn: self._withdrawn,
            HostLeased: self._leased,
            HostReleased: self._released,
        }

    def _demanded(self, event: HostDemanded) -> bool:
        group = self._copies.groups[event.group]
        way_up = self._copies.way_up(group, self._copies.host)
        self._copies.refuse_what_never_fits(group.id, group.nbytes, way_up)
        self._requests.host_demands.setdefault(group, []).append(event.purpose)
        self._movement.want_again(group)
        return True

    def _withdrawn(self, event: HostWithdrawn) -> bool:
        group = self._copies.groups.get(event.group)
        if group is None or group not in self._requests.host_demands:
            return False
        group.error = None
        self._met(group, event.purpose)
        return True

    def leasable(self, group: GroupRecord, purpose: HostAccess) -> bool:
        """Whether the group may be lent in host memory now."""
        copy = group.copies.get(self._copies.host)
        if group.host_lease or group.leases or group.moving() or copy is None:
            return False
        return copy.state is State.PRESENT or purpose is HostAccess.RENEW

    def _leased(self, event: HostLeased) -> bool:
        copies = self._copies
        group = copies.groups[event.group]
        if not group.present(copies.host):
            copies.renew(group)
        group.host_lease = event.purpose
        self._met(group, event.purpose)
        copies.leased += event.purpose is not HostAccess.PERMANENT
        if event.purpose is not HostAccess.READ:
            copies.keep_only(group, copies.host)
        self._uses.note(group)
        return True

    def _released(self, event: HostReleased) -> bool:
        group = self._copies.groups[event.group]
        self._copies.leased -= group.host_lease is not HostAccess.PERMANENT
        group.host_lease = None
        self._movement.tidy(group)
        self._movement.look_ahead |= self._movement.short_of_room
        return True

    def _met(self, group: GroupRecord, purpose: HostAccess) -> None:
        """One who wanted to hold the group does so, or wants it no more."""
        purposes = self._requests.host_demands[group]
        purposes.remove(purpose)
        if not purposes:
            del self._requests.host_demands[group]
        if set(purposes) != {HostAccess.RENEW}:
            self._give_up_room_for_new_values(group)

    def _give_up_room_for_new_values(self, group: GroupRecord) -> None:
        copy = group.copies.get(self._copies.host)
        if copy is not None and copy.state is State.RESERVED:
            self._copies.release_room(group, self._copies.host)
