"""Planners with one fault each. The history machine must notice every one of them.

Each overrides one private step of the planner, so that exactly one protection is gone. `Unchecked`
switches the planner's own `check` off: what the books do not notice from outside, goes unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tierstore.model.moves import Copy
from tierstore.model.tiers import Access, Hold, Tier
from tierstore.plan.planner import Planner
from tierstore.plan.records import CopyRecord, GroupRecord, State


class Unchecked(Planner):
    """Does not look after its own promises."""

    def check(self) -> None:
        pass


# Promise 1: no group loses its last valid copy ---------------------------------------------------


class EvictsTheOnlyCopy(Planner):
    def _evict_copy(self, group: GroupRecord, tier: Tier, nbytes: int) -> None:
        self._drop(group, tier)


class OffloadsTheOnlyCopy(Planner):
    def _pursue_offload(self, group: GroupRecord) -> None:
        copy = group.copies.get(self.top)
        if copy and not self._in_use(group, self.top) and group.key not in self._demands:
            self._drop(group, self.top)
        self._offloads.pop(group.key, None)


class TrustsAFailedCopy(Planner):
    def failed(self, key: str, dst: Tier, src: Tier, error: BaseException) -> None:
        self.arrived(key, dst, src)


# Promise 2: budgets hold, counting what is on its way --------------------------------------------


class ForgetsWhatIsArriving(Planner):
    def _free(self, tier: Tier, nbytes: int) -> bool:
        arriving = sum(
            group.cost(tier)
            for group in self._groups.values()
            if tier in group.copies and not group.present(tier)
        )
        budget = self.budgets[tier]
        return budget is None or self.used[tier] - arriving + nbytes <= budget


class CountsACopyTwiceGone(Planner):
    def _drop(self, group: GroupRecord, tier: Tier) -> None:
        super()._drop(group, tier)
        self.used[tier] = max(0, self.used[tier] - group.nbytes)


# Promise 3: what is leased, read or written stays ------------------------------------------------


class EvictsTheLeased(Planner):
    def _in_use(self, group: GroupRecord, tier: Tier) -> bool:
        leases, group.leases = group.leases, 0
        try:
            return super()._in_use(group, tier)
        finally:
            group.leases = leases


class EvictsTheHeld(Planner):
    def _in_use(self, group: GroupRecord, tier: Tier) -> bool:
        held, group.held = group.held, None
        try:
            return super()._in_use(group, tier)
        finally:
            group.held = held


class DropsWhatIsRead(Planner):
    def _in_use(self, group: GroupRecord, tier: Tier) -> bool:
        readers, group.copies[tier].readers = group.copies[tier].readers, 0
        try:
            return super()._in_use(group, tier)
        finally:
            group.copies[tier].readers = readers


class DropsWhatIsWritten(Planner):
    def _in_use(self, group: GroupRecord, tier: Tier) -> bool:
        state, group.copies[tier].state = group.copies[tier].state, State.PRESENT
        try:
            return super()._in_use(group, tier)
        finally:
            group.copies[tier].state = state


# Promise 4: a group being changed has one copy, and nobody beside its changer ---------------------


class KeepsStaleCopies(Planner):
    def _keep_only(self, group: GroupRecord, tier: Tier) -> None:
        group.backed = False


class LendsWhileItMoves(Planner):
    def lease(self, key: str, access: Access, *, for_good: bool = False) -> bool:
        group = self._groups[key]
        if access is Access.READ or not group.moving():
            return super().lease(key, access, for_good=for_good)
        if not group.present(self.top) or group.leases or group.forgotten:
            return False
        group.exclusive = access
        group.leases += 1
        self._leases += 1
        self._settle()
        return True


class LendsToTwo(Planner):
    def lease(self, key: str, access: Access, *, for_good: bool = False) -> bool:
        self._groups[key].exclusive = None
        return super().lease(key, access, for_good=for_good)


class LetsTwoHold(Planner):
    def hold(self, key: str, purpose: Hold) -> bool:
        self._groups[key].held = None
        return super().hold(key, purpose)


class LetsHoldWhatIsLent(Planner):
    def hold(self, key: str, purpose: Hold) -> bool:
        group = self._groups[key]
        leases, group.leases = group.leases, 0
        try:
            return super().hold(key, purpose)
        finally:
            group.leases = leases


class HoldsBesideStaleCopies(Planner):
    def hold(self, key: str, purpose: Hold) -> bool:
        backed, kept = self._groups[key].backed, dict(self._groups[key].copies)
        held = super().hold(key, purpose)
        if held and Tier.DISK in kept and backed:
            self._groups[key].backed = True
            self._groups[key].copies[Tier.DISK] = kept[Tier.DISK]
        return held


class LendsTheHeldToAChanger(Planner):
    def lease(self, key: str, access: Access, *, for_good: bool = False) -> bool:
        held, self._groups[key].held = self._groups[key].held, None
        try:
            return super().lease(key, access, for_good=for_good)
        finally:
            if key in self._groups:
                self._groups[key].held = held


class SavesWhatIsBeingChanged(Planner):
    def _pursue_save(self, group: GroupRecord) -> None:
        exclusive, group.exclusive = group.exclusive, None
        super()._pursue_save(group)
        group.exclusive = exclusive


# Promise 5: what is unwanted and unused is gone --------------------------------------------------


class LeavesTheUnwanted(Planner):
    def _tidy(self, group: GroupRecord) -> None:
        if group.forgotten:
            super()._tidy(group)


class LeavesTheForgotten(Planner):
    def _tidy(self, group: GroupRecord) -> None:
        if not group.forgotten:
            super()._tidy(group)


class KeepsWhatWasPutAway(Planner):
    def put_away(self, key: str) -> None:
        pass


class GivesUpItsSource(Planner):
    """Evicts what is on its way up, between its two hops."""

    def _all_have_room(self) -> bool:
        return False

    def _evictable(self, group: GroupRecord, tier: Tier, rival: str | None) -> bool:
        promised, self._promised = self._promised, set()
        try:
            return super()._evictable(group, tier, rival)
        finally:
            self._promised = promised


class EvictsTheSourceOfADemand(Planner):
    """Follows the policy, even where that gives up the source of the very copy that wants room."""

    def _evict(self, tier: Tier, nbytes: int, rival: str | None) -> bool:
        demands, self._demands = self._demands, {}
        try:
            return super()._evict(tier, nbytes, rival)
        finally:
            self._demands = demands


class DropsBeforeTheWaiterWakes(Planner):
    def _evictable(self, group: GroupRecord, tier: Tier, rival: str | None) -> bool:
        demands, self._demands = self._demands, {}
        try:
            return super()._evictable(group, tier, rival)
        finally:
            self._demands = demands


class DropsBeforeItIsHeld(Planner):
    def _evictable(self, group: GroupRecord, tier: Tier, rival: str | None) -> bool:
        fetches, self._fetches = self._fetches, {}
        try:
            return super()._evictable(group, tier, rival)
        finally:
            self._fetches = fetches


class CopiesTheCleanDown(Planner):
    def _put_away(self, group: GroupRecord, tier: Tier) -> bool:
        below = self.tiers[self.tiers.index(tier) + 1]
        if below not in group.copies and not group.exclusive and self._free(below, group.nbytes):
            group.copies[below] = CopyRecord(State.RESERVED)
            self._foresight.took(group.number, below)
            self._take_room(below, group.nbytes)
            self._start(group, tier, below, urgent=True)
            return True
        return super()._put_away(group, tier)


# Liveness ----------------------------------------------------------------------------------------


class NeverAsksAgain(Planner):
    """A demand or claim that finds no room at once is not pursued when room comes back."""

    def _settle(self) -> None:
        if self._in_flight or self._leases:
            self._pursue_hopes(self.tiers[:-1])
        else:
            super()._settle()


class NeverGivesUp(Planner):
    def _fail_what_is_stuck(self) -> None:
        pass


class HopesTakeNeededRoom(Planner):
    """A prefetch takes the room that a claim waits for, again and again."""

    def _pursue_needs(self) -> bool:
        super()._pursue_needs()
        return True


class OrphansKeepTheirRoom(Planner):
    def _abandon_orphans(self) -> bool:
        return False


class KeepsThePromiseOfAClaim(OrphansKeepTheirRoom):
    """Room that a claim was granted on the fastest tier counts as room set aside for ever."""

    def _grant(self, group: GroupRecord) -> bool:
        granted = super()._grant(group)
        if granted and self.top in group.copies:
            self._promised.add(group.key)
        return granted


class LosesInstructions(Planner):
    """Like a store that raises before it has handed over what a failed claim had started."""

    def claim(self, key: str, nbytes: int, *, guided: bool = False) -> None:
        super().claim(key, nbytes, guided=guided)
        if not self.granted(key):
            self._instructions = [i for i in self._instructions if not isinstance(i, Copy)]


class KeepsAnOldError(Planner):
    def withdraw(self, key: str) -> None:
        error = self._groups[key].error if key in self._groups else None
        super().withdraw(key)
        if error is not None and key in self._groups:
            self._groups[key].error = error


class NeverChangesItsMind(Planner):
    """What was to leave leaves, although somebody wants it again."""

    def _want_again(self, group: GroupRecord) -> None:
        pass


class LosesDemands(Planner):
    def arrived(self, key: str, dst: Tier, src: Tier | None = None) -> None:
        super().arrived(key, dst, src)
        if dst is not self.top:
            self._demands.pop(key, None)


class WaitsForWhatIsHeldForGood(Planner):
    """Takes what is held for good for something that comes back."""

    def hold(self, key: str, purpose: Hold) -> bool:
        held = super().hold(key, purpose)
        self._leases += held and self._groups[key].held is Hold.KEEP
        return held


class LosesSaves(Planner):
    def save(self, key: str) -> None:
        super().save(key)
        self._saves.pop(key, None)


def unchecked(mutant: type[Planner]) -> type[Planner]:
    """The mutant with its own check switched off."""
    return type(f"Unchecked{mutant.__name__}", (Unchecked, mutant), {})


def all_of(namespace: dict[str, Any], excluded: Iterable[type] = ()) -> list[type[Planner]]:
    """Every faulty planner of a module."""
    left_out = {Planner, Unchecked, *excluded}
    classes = [value for value in namespace.values() if isinstance(value, type)]
    return [c for c in classes if issubclass(c, Planner) and c not in left_out]
