"""After an event: move what can be moved, until nothing more can."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tierstore.model.errors import BudgetError
from tierstore.model.tiers import HostAccess
from tierstore.plan.copies import CopyTable
from tierstore.plan.movement import Movement
from tierstore.plan.records import GroupRecord
from tierstore.plan.requests import Requests


@dataclass(eq=False, slots=True)
class Fixpoint:
    """Pursues everything that is wanted, the most pressing first."""

    _copies: CopyTable
    _requests: Requests
    _movement: Movement

    def run(self) -> None:
        """Make the next move of everything that is wanted, and fail what can never be met."""
        requests = self._requests  # looked through here: this is asked after every use
        if (
            requests.demands
            or requests.claims
            or requests.saves
            or requests.offloads
            or requests.host_demands
            or self._copies.promised
        ):
            self._pursue_all()
        elif self._movement.look_ahead:
            self._fetch_early()

    def _pursue_all(self) -> None:
        copies, movement = self._copies, self._movement
        beside_an_accelerator = copies.top is not copies.host
        if movement.look_ahead and beside_an_accelerator and self._requests.only_need_the_top():
            # What was fetched early and came half-way goes on before its place is needed again.
            movement.fetch_early((copies.top,))
        roomy = self._pursue_needs()
        if roomy and movement.look_ahead:  # a hope must not take the room that somebody waits for
            self._fetch_early()
        if copies.promised and movement.abandon_orphans():
            self._pursue_needs()
        self._fail_what_is_stuck()

    def _fetch_early(self) -> None:
        self._movement.look_ahead = self._movement.short_of_room = False
        self._movement.fetch_early(self._copies.tiers[-2::-1])

    def _pursue_needs(self) -> bool:
        """Pursue what somebody insists on. False if a demand or a claim waits for room."""
        requests, movement = self._requests, self._movement
        in_vain = self._copies.in_vain
        in_vain.clear()  # from here to the end, what there was no room for has none
        for group in list(requests.offloads):
            movement.offload(group)
        roomy = [movement.pull_up(group) for group in list(requests.demands)]
        roomy += [movement.bring_to_host(group) for group in list(requests.host_demands)]
        roomy += [movement.grant_claim(group) for group in list(requests.claims)]
        for group in list(requests.saves):
            movement.save(group)
        in_vain.clear()
        return all(roomy)

    def _fail_what_is_stuck(self) -> None:
        """Nothing is moving and nothing is lent, so whoever still waits would wait for ever.

        The largest is told first: when it does not wait any more, others may get on.
        """
        while not self._copies.in_flight and not self._copies.leased and not self._about_to_wake():
            waiting = [*self._requests.unmet(), *self._requests.saves]
            if not waiting:
                return
            group = max(waiting, key=lambda group: group.nbytes)
            group.error = self._no_room(group)
            self._copies.abandon(group)
            self._requests.saves.pop(group, None)
            self._pursue_needs()

    def _about_to_wake(self) -> bool:
        """Whether what somebody waits for is there: they will give their lease back."""
        copies, requests = self._copies, self._requests
        coming = [(group, copies.top) for group in requests.demands if requests.is_coming(group)]
        coming += [(group, copies.host) for group in requests.host_demands]
        return any(
            tier in group.copies
            and not (tier is copies.host and group.host_lease is HostAccess.PERMANENT)
            for group, tier in coming
        )

    def _no_room(self, group: GroupRecord) -> BudgetError:
        copies = self._copies
        tier = copies.host
        kept = sum(g.nbytes for g in copies.groups.values() if g.host_lease is HostAccess.PERMANENT)
        stuck = max(self._may_need_host_memory(group), key=lambda g: g.nbytes)
        if kept and not copies.has_room(tier, stuck.nbytes):
            advice = f"{kept:,} bytes are in use there for good"
            if stuck is not group:
                advice += f", which leaves no room for group {stuck.id.key!r} to go there"
            advice += "; raise ram_budget"
        else:
            tier = copies.below[copies.host]
            advice = (
                f"{copies.used[tier]:,} bytes are in use there and nothing may be dropped; raise "
                "disk_budget, or discard groups that are not needed"
            )
        budget = copies.budgets[tier]
        limit = copies.used[tier] if budget is None else budget
        return BudgetError(group.id.key, tier.name, group.nbytes, limit, advice)

    def _may_need_host_memory(self, group: GroupRecord) -> Iterator[GroupRecord]:
        """The group, and what is only on the device."""
        yield group
        top = self._copies.top
        if top is not self._copies.host:
            for other in self._copies.groups.values():
                if other.present(top) and not other.valid_elsewhere(top):
                    yield other
