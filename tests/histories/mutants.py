"""Planners with one fault each. The history machine must notice every one of them.

A `FaultyPlanner` stands between a store and a real planner. It changes events, answers or
instructions, so that exactly one protection is missing. Its own `check` is off, so only the books
can notice the fault.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tierstore.errors import BudgetError
from tierstore.model import events
from tierstore.model.events import Event
from tierstore.model.groups import GroupId
from tierstore.model.moves import Copy, Drop, Forget, Instruction
from tierstore.model.tiers import Access, HostAccess, Tier
from tierstore.plan.planner import Planner
from tierstore.plan.policy import Policy
from tierstore.plan.schedule import LearnedOrder


class Facts:
    """The real events, as the caller reported them, and the real planner's instructions."""

    def __init__(self) -> None:
        self.sizes: dict[GroupId, int] = {}
        self.claims: set[GroupId] = set()
        self.demands: Counter[GroupId] = Counter()
        self.host_demands: defaultdict[GroupId, list[HostAccess]] = defaultdict(list)
        self.leases: defaultdict[GroupId, list[Access]] = defaultdict(list)
        self.held: dict[GroupId, HostAccess] = {}
        self.last_purpose: dict[GroupId, HostAccess] = {}  # of host leases, current and past
        self.offloaded: set[GroupId] = set()  # and not requested since
        self.moving: list[tuple[GroupId, Tier, Tier]] = []

    def moves(self, group: GroupId) -> list[tuple[Tier, Tier]]:
        """Return the source and destination of each current copy of the group."""
        return [(src, dst) for key, src, dst in self.moving if key == group]

    def exclusive(self, group: GroupId) -> bool:
        return any(access is not Access.READ for access in self.leases[group])

    def in_use(self, group: GroupId) -> bool:
        return bool(self.leases[group] or group in self.held or self.moves(group))

    def note(self, event: Event) -> None:  # noqa: C901 - a table of events
        match event:
            case events.Registered(group, nbytes):
                self.sizes[group] = nbytes
            case events.Recovered(groups):
                for found in groups:
                    self._recover(found)
            case events.Claimed(group, nbytes):
                self.sizes[group] = nbytes
                self.claims.add(group)
            case events.Filled(group):
                self.claims.discard(group)
            case events.Demanded(group):
                self.demands[group] += 1
                self.offloaded.discard(group)
            case events.Offloaded(group):
                self.offloaded.add(group)
            case events.Expected(groups):
                self.offloaded -= set(groups)
            case events.Withdrawn(group):
                self.demands[group] -= self.demands[group] > 0
                self.claims.discard(group)
            case events.Leased(group, access):
                self.demands[group] -= self.demands[group] > 0
                self.leases[group].append(access)
            case events.Released(group, access):
                self.leases[group].remove(access)
            case events.HostDemanded(group, purpose):
                self.host_demands[group].append(purpose)
                self.offloaded.discard(group)
            case events.HostWithdrawn(group, purpose):
                self.host_demands[group].remove(purpose)
            case events.HostLeased(group, purpose):
                self.host_demands[group].remove(purpose)
                self.held[group] = self.last_purpose[group] = purpose
            case events.HostReleased(group):
                del self.held[group]
            case events.Arrived(group, src, dst) | events.Failed(group, src, dst):
                self.moving.remove((group, src, dst))

    def _recover(self, found: events.RecoveredGroup) -> None:
        self.sizes[found.group] = found.nbytes
        self.claims |= {found.group} if found.claimed else set()
        self.leases[found.group] = [access for access, _ in found.leases]
        self.moving += [(found.group, src, dst) for src, dst in found.moves]
        if found.host_lease is not None:
            self.held[found.group] = self.last_purpose[found.group] = found.host_lease

    def refused(self, event: Event) -> None:
        """Forget a request that the planner rejected as impossible."""
        match event:
            case events.Claimed(group):
                self.claims.discard(group)
            case events.Demanded(group):
                self.demands[group] -= 1
            case events.HostDemanded(group, purpose):
                self.host_demands[group].remove(purpose)


class FaultyPlanner:
    """A planner that behaves like its inner planner; subclasses add the faults.

    `hears` yields the events that the inner planner handles in place of one; each is handled before
    the next is drawn. `tells` returns the instructions that are passed on.
    """

    def __init__(
        self, budgets: Mapping[Tier, int | None], policy: Policy, schedule: LearnedOrder
    ) -> None:
        self.inner = Planner(budgets, policy, schedule)
        self.top, self.host, self.tiers = self.inner.top, self.inner.host, self.inner.tiers
        self.budgets = dict(budgets)
        self.facts = Facts()

    def hears(self, event: Event) -> Iterable[Event]:
        return [event]

    def tells(self, event: Event, instructions: list[Instruction]) -> list[Instruction]:
        return instructions

    def handle(self, event: Event, now: float = 0.0) -> list[Instruction]:
        self.facts.note(event)
        told: list[Instruction] = []
        try:
            for heard in self.hears(event):
                instructions = self.inner.handle(heard, now)
                copies = [one for one in instructions if isinstance(one, Copy)]
                self.facts.moving += [(copy.group, copy.src, copy.dst) for copy in copies]
                told += instructions
        except BudgetError:
            self.facts.refused(event)
            raise
        return self.tells(event, told)

    def leasable(self, group: GroupId, access: Access) -> bool:
        return self.inner.leasable(group, access)

    def host_leasable(self, group: GroupId, purpose: HostAccess) -> bool:
        return self.inner.host_leasable(group, purpose)

    @property
    def used(self) -> Mapping[Tier, int]:
        return self.inner.used

    def __contains__(self, group: GroupId) -> bool:
        return group in self.inner

    def residence(self, group: GroupId) -> tuple[Tier, ...]:
        return self.inner.residence(group)

    def granted(self, group: GroupId) -> bool:
        return self.inner.granted(group)

    def saved(self, group: GroupId) -> bool:
        return self.inner.saved(group)

    def error_of(self, group: GroupId) -> BaseException | None:
        return self.inner.error_of(group)

    def idle(self) -> bool:
        return self.inner.idle()

    def check(self) -> None:
        """Check nothing."""

    # Shared by the mutants ---------------------------------------------------------------------

    def one_lease_more(self, group: GroupId) -> Iterator[Event]:
        """Make the inner planner wait for a lease that does not exist."""
        demanded = not self.facts.demands[group]
        yield events.Leased(group, Access.READ, demanded=demanded)
        yield events.Released(group, Access.READ, permanent=True)

    def one_lease_less(self, group: GroupId) -> Iterator[Event]:
        """Keep the inner planner from waiting for a lease that exists."""
        demanded = not self.facts.demands[group]
        yield events.Leased(group, Access.READ, permanent=True, demanded=demanded)
        yield events.Released(group, Access.READ)

    def makes_room(self, event: Event, copy: Copy) -> bool:
        """Return whether a group is copied down to free its slot, not to be saved."""
        down = copy.dst > copy.src and copy.urgent
        return (
            down and not self.inner.saving(copy.group) and not isinstance(event, events.Offloaded)
        )

    def never_fits(self, group: GroupId) -> bool:
        budgets = [self.budgets[tier] for tier in self.tiers[:-1]]
        return any(budget is not None and self.facts.sizes[group] > budget for budget in budgets)


# Promise 1: no group loses its last valid copy ---------------------------------------------------


class EvictsTheOnlyCopy(FaultyPlanner):
    """Drops a copy that should be saved first, to free space."""

    def tells(self, event: Event, instructions: list[Instruction]) -> list[Instruction]:
        return [
            Drop(one.group, one.nbytes, one.src)
            if isinstance(one, Copy) and self.makes_room(event, one)
            else one
            for one in instructions
        ]


class OffloadsTheOnlyCopy(FaultyPlanner):
    """Drops a copy that should be saved first, when it is offloaded."""

    def tells(self, event: Event, instructions: list[Instruction]) -> list[Instruction]:
        return [
            Drop(one.group, one.nbytes, one.src)
            if isinstance(event, events.Offloaded)
            and isinstance(one, Copy)
            and (one.group, one.src) == (event.group, self.top)
            else one
            for one in instructions
        ]


class TrustsAFailedCopy(FaultyPlanner):
    def hears(self, event: Event) -> Iterable[Event]:
        if isinstance(event, events.Failed):
            return [events.Arrived(event.group, event.src, event.dst)]
        return [event]


# Promise 2: budgets hold, including copies in transit --------------------------------------------


class ReservesSpaceTwice(FaultyPlanner):
    """Overestimates the space on the fastest tier by `more` bytes."""

    def more(self) -> int:
        raise NotImplementedError

    def hears(self, event: Event) -> Iterator[Event]:
        budget = self.budgets[self.top]
        asked = events.Claimed | events.HostDemanded if self.top is self.host else events.Demanded
        if isinstance(event, asked | events.Demanded):
            nbytes = self.facts.sizes[event.group]
            if budget is not None and nbytes > budget:  # mutants know this limit, too
                raise BudgetError(event.group.key, self.top.name, nbytes, budget, "")
        yield event
        if budget is not None:
            yield events.BudgetChanged(budget + self.more())


class ForgetsArrivals(ReservesSpaceTwice):
    def more(self) -> int:
        return sum(self.facts.sizes[key] for key, _, dst in self.facts.moving if dst is self.top)


class CountsARemovalTwice(ReservesSpaceTwice):
    gone = 0

    def more(self) -> int:
        return self.gone

    def tells(self, event: Event, instructions: list[Instruction]) -> list[Instruction]:
        drops = [one for one in instructions if isinstance(one, Drop) and one.tier is self.top]
        self.gone += sum(drop.nbytes for drop in drops)
        return instructions


class SaysThatLessIsUsed(FaultyPlanner):
    """Omits arriving copies."""

    @property
    def used(self) -> Mapping[Tier, int]:
        used = dict(self.inner.used)
        for key, _, dst in self.facts.moving:
            used[dst] -= self.facts.sizes[key]
        return used


# Promise 3: copies that are leased, read or written stay -----------------------------------------


class EvictsTheLeased(FaultyPlanner):
    """Waits for readers' leases to return, but treats their copies as unused."""

    def hears(self, event: Event) -> Iterator[Event]:
        match event:
            case events.Leased(group, Access.READ):
                yield event
                yield events.Released(group, Access.READ, permanent=True)
            case events.Released(group, Access.READ):
                yield from self.one_lease_less(group)
            case _:
                yield event

    def leasable(self, group: GroupId, access: Access) -> bool:
        alone = access is Access.READ or not self.facts.leases[group]
        return alone and self.inner.leasable(group, access)

    def host_leasable(self, group: GroupId, purpose: HostAccess) -> bool:
        return not self.facts.leases[group] and self.inner.host_leasable(group, purpose)


class EvictsTheHeld(FaultyPlanner):
    """Does the same with host leases."""

    def hears(self, event: Event) -> Iterator[Event]:
        match event:
            case events.HostLeased(group, purpose):
                yield event
                if purpose is not HostAccess.PERMANENT:
                    yield from self.one_lease_more(group)
                yield events.HostReleased(group)
            case events.HostReleased(group):
                if self.facts.last_purpose[group] is not HostAccess.PERMANENT:
                    yield from self.one_lease_less(group)
            case _:
                yield event

    def leasable(self, group: GroupId, access: Access) -> bool:
        alone = access is Access.READ or group not in self.facts.held
        return alone and self.inner.leasable(group, access)

    def host_leasable(self, group: GroupId, purpose: HostAccess) -> bool:
        return group not in self.facts.held and self.inner.host_leasable(group, purpose)


class DropsCopiesBeingRead(FaultyPlanner):
    """Drops a copy that frees space before it is saved."""

    def tells(self, event: Event, instructions: list[Instruction]) -> list[Instruction]:
        told: list[Instruction] = []
        for one in instructions:
            told.append(one)
            if isinstance(one, Copy) and self.makes_room(event, one):
                told.append(Drop(one.group, one.nbytes, one.src))
        return told


class DropsCopiesBeingWritten(FaultyPlanner):
    """Drops an arriving copy of a group that is no longer wanted before it has arrived."""

    def tells(self, event: Event, instructions: list[Instruction]) -> list[Instruction]:
        if not isinstance(event, events.Discarded | events.Offloaded):
            return instructions
        moves, nbytes = self.facts.moves(event.group), self.facts.sizes[event.group]
        return [*instructions, *(Drop(event.group, nbytes, dst) for _, dst in moves)]


# Promise 4: a group being updated has one copy and one user ---------------------------------------


class KeepsStaleCopies(FaultyPlanner):
    def tells(self, event: Event, instructions: list[Instruction]) -> list[Instruction]:
        match event:
            case events.Leased(group, Access.UPDATE):
                drops = [i for i in instructions if isinstance(i, Drop) and i.group == group]
                return [one for one in instructions if one not in drops]
        return instructions


class LendsWhileItMoves(FaultyPlanner):
    def leasable(self, group: GroupId, access: Access) -> bool:
        alone = not self.facts.leases[group] and self.inner.leasable(group, Access.READ)
        return self.inner.leasable(group, access) or (bool(self.facts.moves(group)) and alone)


class LendsToTwo(FaultyPlanner):
    def leasable(self, group: GroupId, access: Access) -> bool:
        beside_a_changer = self.facts.exclusive(group) and group in self.inner
        return self.inner.leasable(group, access) or beside_a_changer


class LetsTwoHold(FaultyPlanner):
    def host_leasable(self, group: GroupId, purpose: HostAccess) -> bool:
        return self.inner.host_leasable(group, purpose) or group in self.facts.held


class HoldsLeasedGroups(FaultyPlanner):
    def host_leasable(self, group: GroupId, purpose: HostAccess) -> bool:
        there = self.host in self.inner.residence(group) and group not in self.facts.held
        return self.inner.host_leasable(group, purpose) or (
            there and bool(self.facts.leases[group]) and not self.facts.moves(group)
        )


class HoldsBesideStaleCopies(FaultyPlanner):
    """Takes a host lease for an update as one for reading."""

    def hears(self, event: Event) -> Iterable[Event]:
        match event:
            case events.HostDemanded(group, HostAccess.UPDATE):
                return [events.HostDemanded(group, HostAccess.READ)]
            case events.HostWithdrawn(group, HostAccess.UPDATE):
                return [events.HostWithdrawn(group, HostAccess.READ)]
            case events.HostLeased(group, HostAccess.UPDATE):
                return [events.HostLeased(group, HostAccess.READ)]
        return [event]


class LendsTheHeldToAChanger(FaultyPlanner):
    def leasable(self, group: GroupId, access: Access) -> bool:
        alone = not self.facts.leases[group] and not self.facts.moves(group)
        beside = group in self.facts.held and alone and self.inner.leasable(group, Access.READ)
        return self.inner.leasable(group, access) or beside


class SavesDuringUpdates(FaultyPlanner):
    """Takes a lease for an update as one for reading, once there is no other copy."""

    def hears(self, event: Event) -> Iterator[Event]:
        yield event
        match event:
            case events.Leased(group, Access.UPDATE):
                yield events.Leased(group, Access.READ, permanent=True, demanded=False)
                yield events.Released(group, Access.READ, permanent=True)

    def leasable(self, group: GroupId, access: Access) -> bool:
        return not self.facts.exclusive(group) and self.inner.leasable(group, access)


# Promise 5: unwanted, unused copies are gone -----------------------------------------------------


class LeavesTheUnwanted(FaultyPlanner):
    """Forgets to drop an unwanted copy that was in use at first."""

    def hears(self, event: Event) -> Iterable[Event]:
        match event:
            case events.Offloaded(group) | events.MemoryReleased(group):
                return [] if self.facts.in_use(group) else [event]
        return [event]


class LeavesTheForgotten(FaultyPlanner):
    def tells(self, event: Event, instructions: list[Instruction]) -> list[Instruction]:
        return [
            one
            for one in instructions
            if not isinstance(one, Drop | Forget) or one.group in self.inner
        ]


class KeepsFlushedCopies(FaultyPlanner):
    def hears(self, event: Event) -> Iterable[Event]:
        return [] if isinstance(event, events.MemoryReleased) else [event]


class EvictsItsSource(FaultyPlanner):
    """Evicts a copy on its way up, between its two hops."""

    hoped: frozenset[GroupId] = frozenset()

    def hears(self, event: Event) -> Iterator[Event]:
        match event:
            case events.Expected(groups, None):
                self.hoped |= set(groups)
                yield event
            case events.Arrived(group, _, self.host) if group in self.hoped and group in self:
                yield events.Expected((group,), self.host)
                yield event
                yield events.Expected((group,))
            case _:
                yield event


class EvictsTheSourceOfADemand(FaultyPlanner):
    """Frees space for a demand before it considers which groups are demanded."""

    def hears(self, event: Event) -> Iterator[Event]:
        if not isinstance(event, events.Demanded) or self.never_fits(event.group):
            yield event
            return
        others = Counter({g: n for g, n in self.facts.demands.items() if g in self.inner})
        del others[event.group]
        for group in others.elements():
            yield events.Withdrawn(group)
        budget, nbytes = self.budgets[self.top], self.facts.sizes[event.group]
        if budget is not None and self.inner.used[self.top] + nbytes > budget:
            for group in [g for g in self.facts.sizes if g in self.inner]:
                if self.top in self.residence(group) and not self.facts.in_use(group):
                    yield events.Offloaded(group)
        yield event
        for group in others.elements():
            yield events.Demanded(group)
        for group in self.facts.offloaded.intersection(others):
            yield events.Offloaded(group)


class DropsBeforeTheWaiterWakes(FaultyPlanner):
    """Counts a demand as met once the group has arrived."""

    def hears(self, event: Event) -> Iterator[Event]:
        yield event
        if isinstance(event, events.Arrived) and event.dst is self.top:
            for _ in range(self.facts.demands[event.group]):
                yield events.Withdrawn(event.group)


class DropsBeforeItIsHeld(FaultyPlanner):
    """Does the same with demands for host leases."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.known: defaultdict[GroupId, list[HostAccess]] = defaultdict(list)

    def hears(self, event: Event) -> Iterator[Event]:
        match event:
            case events.HostDemanded(group, purpose):
                yield event
                self.known[group].append(purpose)
            case events.HostWithdrawn(group, purpose) if purpose not in self.known[group]:
                pass
            case events.HostWithdrawn(group, purpose):
                self.known[group].remove(purpose)
                yield event
            case events.HostLeased(group, purpose):
                if purpose in self.known[group]:
                    self.known[group].remove(purpose)
                else:
                    yield events.HostDemanded(group, purpose)
                yield event
            case events.Arrived(group, _, self.host):
                yield event
                for purpose in self.known.pop(group, []):
                    yield events.HostWithdrawn(group, purpose)
            case _:
                yield event


class CopiesTheCleanDown(FaultyPlanner):
    """Saves a copy again that is already saved, before it drops it."""

    def tells(self, event: Event, instructions: list[Instruction]) -> list[Instruction]:
        if isinstance(event, events.Leased | events.HostLeased):
            return instructions  # these copies are about to become stale
        told: list[Instruction] = []
        for one in instructions:
            if isinstance(one, Drop) and one.group in self.inner:
                below = [tier for tier in self.tiers if tier > one.tier]
                if any(tier in self.residence(one.group) for tier in below):
                    told.append(Copy(one.group, one.nbytes, one.tier, below[0], urgent=True))
            told.append(one)
        return told


# Liveness ----------------------------------------------------------------------------------------


class NeverAsksAgain(FaultyPlanner):
    """Does not pursue a demand again that found no space at first."""

    def hears(self, event: Event) -> Iterator[Event]:
        yield event
        if isinstance(event, events.Demanded):
            there = self.top in self.residence(event.group)
            if not there and not self.facts.moves(event.group):
                yield events.Withdrawn(event.group)


class NeverFailsRequests(FaultyPlanner):
    """Waits for a lease that is never released, so blocked requests never fail."""

    waits = False

    def hears(self, event: Event) -> Iterator[Event]:
        yield event
        if not self.waits and self.facts.sizes:
            self.waits = True
            yield from self.one_lease_more(next(iter(self.facts.sizes)))


class PrefetchesTakeNeededSpace(FaultyPlanner):
    """Lets prefetches repeatedly take the space that a claim waits for."""

    hopes: tuple[GroupId, ...] = ()

    def hears(self, event: Event) -> Iterator[Event]:
        if isinstance(event, events.Expected):
            self.hopes = event.groups
        yield event
        for claim in sorted(self.facts.claims):
            if self.hopes and not self.granted(claim):
                yield events.Withdrawn(claim)
                yield events.Expected(tuple(g for g in self.hopes if g in self.inner))
                yield events.Claimed(claim, self.facts.sizes[claim])

    def tells(self, event: Event, instructions: list[Instruction]) -> list[Instruction]:
        claims = {Forget(claim) for claim in self.facts.claims}
        return [one for one in instructions if one not in claims]


class OrphansKeepTheirSpace(FaultyPlanner):
    """Keeps the space of a withdrawn demand from others, until it is wanted again.

    It is as if the group were held in host memory without a waiter.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.coming: set[GroupId] = set()
        self.stuck: set[GroupId] = set()

    def hears(self, event: Event) -> Iterator[Event]:
        named = getattr(event, "groups", None) or [getattr(event, "group", None)]
        if not isinstance(event, events.Recovered | events.Arrived):
            for group in named:
                yield from self._let_loose(group)
        yield event
        match event:
            case events.Withdrawn(group):
                wanted = self.facts.demands[group] or self.facts.host_demands[group]
                if not wanted and any(dst is self.host for _, dst in self.facts.moves(group)):
                    yield from self._comes(group)
            case events.Arrived(group, _, self.host) if group in self.coming:
                yield from self._sticks(group)

    def _comes(self, group: GroupId) -> Iterator[Event]:
        self.coming.add(group)
        yield events.HostDemanded(group, HostAccess.READ)

    def _sticks(self, group: GroupId) -> Iterator[Event]:
        self.coming.discard(group)
        self.stuck.add(group)
        yield events.HostLeased(group, HostAccess.READ)
        yield from self.one_lease_less(group)

    def _let_loose(self, group: GroupId | None) -> Iterator[Event]:
        if group in self.coming:
            self.coming.discard(group)
            yield events.HostWithdrawn(group, HostAccess.READ)
        elif group in self.stuck:
            self.stuck.discard(group)
            yield from self.one_lease_more(group)
            yield events.HostReleased(group)


class KeepsThePromiseOfAClaim(OrphansKeepTheirSpace):
    """Counts a claim's space as taken until the group is requested again."""

    def hears(self, event: Event) -> Iterator[Event]:
        if isinstance(event, events.Filled):
            yield from self._comes(event.group)
            yield event
            yield from self._sticks(event.group)
        else:
            yield from super().hears(event)


class LosesInstructions(FaultyPlanner):
    """Loses the copies that a claim has started, as a store would that raises too early."""

    def tells(self, event: Event, instructions: list[Instruction]) -> list[Instruction]:
        if isinstance(event, events.Claimed) and not self.granted(event.group):
            return [one for one in instructions if not isinstance(one, Copy)]
        return instructions


class KeepsAnOldError(FaultyPlanner):
    """Counts a waiter that got an error as waiting."""

    def hears(self, event: Event) -> Iterable[Event]:
        if isinstance(event, events.Withdrawn) and event.group in self.inner:
            claimed = not (self.residence(event.group) or self.facts.moves(event.group))
            if self.error_of(event.group) is not None and not claimed:
                return []
        return [event]


class NeverChangesItsMind(FaultyPlanner):
    """Evicts a copy that is requested again, and notices the request only then."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.leaving: set[GroupId] = set()
        self.unheard: defaultdict[GroupId, list[Event]] = defaultdict(list)

    def hears(self, event: Event) -> Iterator[Event]:  # noqa: C901 - a table of events
        match event:
            case events.Offloaded(group) | events.MemoryReleased(group):
                yield event
                if self.facts.in_use(group):
                    self.leaving.add(group)
            case events.Expected(groups, highest):
                yield events.Expected(tuple(g for g in groups if g not in self.leaving), highest)
            case events.Demanded(group) | events.HostDemanded(group) if group in self.leaving:
                self.unheard[group].append(event)
            case events.Withdrawn(group) if events.Demanded(group) in self.unheard[group]:
                self.unheard[group].remove(events.Demanded(group))
            case events.HostWithdrawn(group, purpose) if (
                events.HostDemanded(group, purpose) in self.unheard[group]
            ):
                self.unheard[group].remove(events.HostDemanded(group, purpose))
            case events.Leased(group) | events.HostLeased(group) if group in self.leaving:
                yield from self._hears_at_last(group)
                yield event
            case _:
                yield event
        for group in [g for g in self.leaving if not self.facts.in_use(g)]:
            yield from self._hears_at_last(group)

    def _hears_at_last(self, group: GroupId) -> Iterator[Event]:
        self.leaving.discard(group)
        yield from self.unheard.pop(group, []) if group in self.inner else []


class LosesDemands(FaultyPlanner):
    """Forgets a demand when its group is half-way."""

    def hears(self, event: Event) -> Iterator[Event]:
        yield event
        if isinstance(event, events.Arrived) and event.dst is not self.top:
            for _ in range(self.facts.demands[event.group]):
                yield events.Withdrawn(event.group)


class WaitsForPermanentLeases(FaultyPlanner):
    """Waits for permanent leases to be released."""

    def hears(self, event: Event) -> Iterator[Event]:
        match event:
            case events.HostLeased(group, HostAccess.PERMANENT):
                yield event
                yield from self.one_lease_more(group)
            case events.HostReleased(group) if (
                self.facts.last_purpose[group] is HostAccess.PERMANENT
            ):
                yield from self.one_lease_less(group)
                yield event
            case _:
                yield event


class LosesSaves(FaultyPlanner):
    """Begins a save if it can, and never retries it."""

    def hears(self, event: Event) -> Iterable[Event]:
        if isinstance(event, events.SaveRequested):
            return [events.ErrorReported(event.group), events.SpillAdvised(event.group)]
        return [event]


def all_of(namespace: dict[str, Any], excluded: Iterable[type] = ()) -> list[type[FaultyPlanner]]:
    """Return every faulty planner of a module."""
    left_out = {FaultyPlanner, ReservesSpaceTwice, *excluded}
    classes = [value for value in namespace.values() if isinstance(value, type)]
    return [c for c in classes if issubclass(c, FaultyPlanner) and c not in left_out]
