"""Events about existing groups: hints, saves, budgets, and the end of a group."""

from __future__ import annotations

from dataclasses import dataclass

from tierstore.model import events
from tierstore.plan.copies import CopyTable
from tierstore.plan.eviction import Eviction
from tierstore.plan.movement import Movement
from tierstore.plan.prefetch import Prefetcher
from tierstore.plan.requests import Requests
from tierstore.plan.schedule import Schedule


@dataclass(eq=False, slots=True)
class HintEvents:
    """Handles events that need no answer."""

    _copies: CopyTable
    _requests: Requests
    _eviction: Eviction
    _movement: Movement
    _schedule: Schedule
    _prefetcher: Prefetcher

    def expected(self, event: events.Expected) -> bool:
        highest = self._copies.top if event.highest is None else event.highest
        found = [self._copies.groups[group] for group in event.groups]
        groups = [group for group in found if not group.forgotten]
        for group in groups:
            self._movement.cancel_drops(group)
            self._prefetcher.aim(group.number, highest)
        self._schedule.known.prefetch(group.id.key for group in groups)
        self._movement.look_ahead = True
        return True

    def offloaded(self, event: events.Offloaded) -> bool:
        self._requests.offloads[self._copies.groups[event.group]] = None
        self._schedule.known.cancel_prefetch(event.group.key)
        return True

    def memory_released(self, event: events.MemoryReleased) -> bool:
        group = self._copies.groups[event.group]
        self._schedule.known.cancel_prefetch(event.group.key)
        self._copies.abandon(group)
        for tier, copy in group.copies.items():
            waited_for = self._requests.is_waited_for(group, tier)
            copy.unwanted |= not (tier.persistent or waited_for)
        self._movement.tidy(group)
        return True

    def vacated(self, _event: events.DeviceVacated) -> bool:
        for group in list(self._movement.idle_on_top()):
            self._copies.drop(group, self._copies.top)
        self._movement.look_ahead = False
        return True

    def made_sticky(self, event: events.MadeSticky) -> bool:
        self._copies.groups[event.group].sticky = True
        return False

    def budget_changed(self, event: events.BudgetChanged) -> bool:
        copies, nbytes = self._copies, event.nbytes
        tier, before = copies.top, copies.budgets[copies.top]
        assert before is not None
        pool = copies.pools[tier]
        self._eviction.drop_idle(pool, nbytes)
        groups = (group for group in copies.groups.values() if copies.pool(group, tier) is pool)
        largest = max((group.nbytes for group in groups), default=0)
        copies.change_budget(tier, max(nbytes, pool.used, min(largest, before)))
        copies.blocked_sizes.clear()
        self._movement.look_ahead = True
        return True

    def shared_budget_changed(self, event: events.SharedBudgetChanged) -> bool:
        copies = self._copies
        copies.shared.limit = self._prefetcher.sizes.allowed = event.nbytes
        copies.blocked_sizes.clear()
        for number, group in copies.numbered.items():
            if group.shared:
                self._prefetcher.pass_over(number, ended=True)
        self._movement.look_ahead = True
        return True  # idle copies are dropped before anything else

    def memory_carved_out(self, event: events.MemoryBorrowed) -> bool:
        copies, tier = self._copies, event.tier
        pool, more = copies.pools[tier], event.nbytes - copies.carved_out[tier]
        if pool.limit is not None:
            self._eviction.drop_idle(pool, pool.limit - more)
        if more <= 0 or pool.has_space(more):
            copies.carve_out(tier, event.nbytes)
        self._movement.look_ahead = True
        return True

    def save_requested(self, event: events.SaveRequested) -> bool:
        group = self._copies.groups[event.group]
        group.error = None
        self._requests.saves[group] = None
        return True

    def spill_advised(self, event: events.SpillAdvised) -> bool:
        self._movement.spill(self._copies.groups[event.group])
        return False

    def error_reported(self, event: events.ErrorReported) -> bool:
        self._copies.groups[event.group].error = None
        return False

    def discarded(self, event: events.Discarded) -> bool:
        self._movement.forget(self._copies.groups[event.group])
        return True
