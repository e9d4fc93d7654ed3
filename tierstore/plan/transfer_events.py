"""Events about transfers: their ends, failures and times."""

from __future__ import annotations

from dataclasses import dataclass

from tierstore.model import events
from tierstore.model.tiers import Tier
from tierstore.plan.copies import CopyTable
from tierstore.plan.movement import Movement
from tierstore.plan.prefetch import Prefetcher
from tierstore.plan.records import GroupRecord
from tierstore.plan.requests import Requests


@dataclass(eq=False, slots=True)
class TransferEvents:
    """Handles the ends of transfers, and measurements."""

    _copies: CopyTable
    _requests: Requests
    _movement: Movement
    _prefetcher: Prefetcher

    def ending(self, event: events.Ending) -> bool:
        copy = self._copies.groups[event.group].copies[event.dst]
        if copy.ending:
            return False
        copy.ending = True
        self._prefetcher.hops[event.src, event.dst].ending += 1
        self._movement.look_ahead = True
        return True

    def arrived(self, event: events.Arrived) -> bool:
        group = self._copies.groups[event.group]
        self._copies.arrive(group, event.dst)
        self._copies.end(group, event.src, event.dst, timed=event.timed, counts=True)
        self._movement.look_ahead = True
        self._movement.tidy(group)
        return True

    def failed(self, event: events.Failed) -> bool:
        group = self._copies.groups[event.group]
        self._copies.end(group, event.src, event.dst, timed=True, counts=False)
        self._copies.release_space(group, event.dst)
        self._movement.look_ahead = True
        if event.dst < event.src:
            group.error = event.error
            self._copies.abandon(group)
        else:
            self._fail_save(group, event.src, event.error)
        self._movement.tidy(group)
        return True

    def _fail_save(self, group: GroupRecord, src: Tier, error: BaseException) -> None:
        """Keep the copy on `src`, and fail the requests that wait for the save or its space."""
        group.copies[src].unwanted = False
        waiting = self._requests.unmet()
        if group in self._requests.saves:
            del self._requests.saves[group]
            waiting.append(group)
        for other in waiting:
            other.error = error
            self._copies.abandon(other)

    def transfer_measured(self, event: events.TransferMeasured) -> bool:
        hop = self._prefetcher.hops[event.src, event.dst]
        hop.measure(event.nbytes, event.began, event.ended)
        return False

    def use_measured(self, event: events.UseMeasured) -> bool:
        group = self._copies.groups.get(event.group)
        number = -1 if group is None else group.number
        self._prefetcher.ran(number, event.asked, event.began)
        return False
