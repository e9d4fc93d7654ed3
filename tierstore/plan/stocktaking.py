"""A planner's beliefs, made from what there is.

What a planner believes can be cut short in the middle of a step, and then nobody knows what is true
of it. What there is is known elsewhere, and is always as some step had left it: the carrier makes
whole batches of instructions true. So a new planner takes stock, and goes on from there. It has
seen no use of any group yet, and nobody has told it what they want.
"""

from __future__ import annotations

from collections.abc import Iterable

from tierstore.model.groups import name_of
from tierstore.model.tiers import Access, Hold, Tier
from tierstore.plan.holding import Holding
from tierstore.plan.records import CopyRecord, Found, GroupRecord, State


class Stocktaking(Holding):
    """What a planner does before its first step, where there is something already."""

    def take_stock(self, found: Iterable[Found]) -> None:
        """Believe this, and nothing else: these are all the groups, the oldest first."""
        groups = [self._note(one) for one in found]
        for group in groups:
            self._tidy(group)
        self._settle()

    def _note(self, found: Found) -> GroupRecord:
        group = GroupRecord(found.key, found.nbytes, found.backed, guided=found.guided)
        group.kept, group.held = found.kept, found.held
        if found.shown or found.claimed:
            self._know(group)
        else:
            self._groups[group.key] = group
            group.forgotten = True
        if found.shown and not group.guided:
            self._schedule.introduce(name_of(group.key))
        if found.claimed and not found.shown:
            self._claims[group.key] = None
        for tier in found.tiers:
            self._note_copy(group, tier, found)
        for src, dst in found.moves:
            group.copies[src].readers += 1
            group.copies[dst].began = self._foresight.now()
            self._foresight.hops[src, dst].begin(group.nbytes)
            self._in_flight += 1
        for access, for_good in found.leases:
            group.leases += 1
            group.exclusive = None if access is Access.READ else access
            self._leases += not for_good
        self._leases += group.held not in (None, Hold.KEEP)
        return group

    def _note_copy(self, group: GroupRecord, tier: Tier, found: Found) -> None:
        self._take_room(tier, group.cost(tier))
        if group.number >= 0:
            self._foresight.took(group.number, tier)
        if group.key in self._claims:
            self._in_flight += 1  # somebody is filling it
            group.copies[tier] = CopyRecord(State.ARRIVING)
        elif any(dst is tier for _, dst in found.moves):
            group.copies[tier] = CopyRecord(State.ARRIVING)
        else:
            group.copies[tier] = CopyRecord(State.PRESENT)
            self._policy.admitted(group.key, tier)
