"""The planner: a pure state machine that decides every move.

`Planner.handle` takes one event, updates the planner's state, and returns the instructions that
bring the memory into that state. The caller follows them in order, and reports their outcomes as
events. One rule governs all movement:

    A copy may be dropped when another valid copy exists; otherwise it is saved one tier down first.

A copy takes space from the moment it is planned, so budgets hold at every instant. Space on the
fastest tier is reserved before a group's first hop begins, so two groups on their way up cannot
block each other half-way. A drop takes effect at once, so the order of instructions matters.

The invariants that hold after every event are in `tierstore.plan.invariants`.

The parts, none of which refers to the planner:

    CopyTable   the copies by tier, and the space they take
    Requests    the requests of callers
    Eviction    frees space
    Movement    makes the next move of a group
    Fixpoint    pursues all requests, the most pressing first
    RegistrationEvents, LeaseEvents, HostLeaseEvents, HintEvents, TransferEvents
                handle the events
    Schedule, Policy, Prefetcher
                predict uses, rank victims, choose prefetches
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tierstore.model import events
from tierstore.model.groups import GroupId
from tierstore.model.moves import Instruction
from tierstore.model.tiers import Access, HostAccess, Tier
from tierstore.plan import invariants
from tierstore.plan.copies import CopyTable, budgets_of
from tierstore.plan.eviction import Eviction
from tierstore.plan.hint_events import HintEvents
from tierstore.plan.lease_events import HostLeaseEvents, LeaseEvents, UseEvents
from tierstore.plan.movement import Fixpoint, Movement
from tierstore.plan.policy import Policy, policy_named
from tierstore.plan.prefetch import Prefetcher
from tierstore.plan.records import State
from tierstore.plan.registration_events import RegistrationEvents
from tierstore.plan.requests import Requests
from tierstore.plan.schedule import MEMORY, Schedule
from tierstore.plan.transfer_events import TransferEvents
from tierstore.plan.use_streams import UseStreams

NEXT_USE_WITHOUT_PREFETCH = "next-use-unforetold"
"""The policy of a service, whose workers prefetch groups themselves. Stores do not offer it."""


class Planner:
    """Plans for the tiers of `budgets` (bytes; None for no limit): memory above persistent tiers.

    Given the time of each event, the planner learns how long computing and moving take. Without
    times, it prefetches about two groups ahead. If a device runs behind its caller, uses are
    `timed_by_device`: then `UseMeasured` events have the device's times.

    Groups are leased on `top`, the fastest of the `tiers`. They are put to `host`, the slowest tier
    in memory, and changed there. `budgets`, `used` and `peak` are bytes by tier, counting copies
    still arriving; they change with each event. In host memory `used` and `peak` also count copies
    of shared groups, which have a budget of their own: see `shared_budget`. `copies`, `requests`
    and `prefetcher` may be read, but only `handle` changes them.
    """

    def __init__(
        self,
        budgets: Mapping[Tier, int | None],
        policy: Policy,
        schedule: Schedule,
        *,
        timed_by_device: bool = False,
    ) -> None:
        own = budgets_of(budgets)  # one for all: see `BudgetChanged`
        prefetcher = Prefetcher(schedule, own, timed_by_device=timed_by_device)
        copies = CopyTable(own, policy, schedule, prefetcher)
        requests = Requests(copies.top, copies.host)
        eviction = Eviction(copies, requests, policy, prefetcher)
        movement = Movement(copies, requests, eviction, prefetcher)
        uses = UseEvents(policy, schedule, prefetcher, movement)
        self.tiers, self.top, self.host = copies.tiers, copies.top, copies.host
        self.budgets: Mapping[Tier, int | None] = own
        self.used: Mapping[Tier, int] = copies.used
        self.carved_out: Mapping[Tier, int] = copies.carved_out
        self.peak = copies.peak
        self.prefetcher, self.copies, self.requests = prefetcher, copies, requests
        self._movement = movement
        self._fixpoint = Fixpoint(copies, requests, movement)
        known = RegistrationEvents(copies, requests, movement, schedule, prefetcher)
        self._leases = leases = LeaseEvents(copies, requests, movement, uses)
        self._host_leases = host_leases = HostLeaseEvents(copies, requests, movement, uses)
        hints = HintEvents(copies, requests, eviction, movement, schedule, prefetcher)
        transfers = TransferEvents(copies, requests, movement, prefetcher)
        # Handlers by type of event. They return True if something may have to move now.
        self._handlers: dict[type, Callable[[Any], bool]] = {
            events.Registered: known.registered,
            events.Recovered: known.recovered,
            events.Claimed: leases.claimed,
            events.Filled: leases.filled,
            events.Demanded: leases.demanded,
            events.Withdrawn: leases.withdrawn,
            events.Leased: leases.leased,
            events.StreamEnded: uses.ended,
            events.Released: leases.released,
            events.HostDemanded: host_leases.demanded,
            events.HostWithdrawn: host_leases.withdrawn,
            events.HostLeased: host_leases.leased,
            events.HostReleased: host_leases.released,
            events.Expected: hints.expected,
            events.Offloaded: hints.offloaded,
            events.MemoryReleased: hints.memory_released,
            events.DeviceVacated: hints.vacated,
            events.MadeSticky: hints.made_sticky,
            events.BudgetChanged: hints.budget_changed,
            events.SharedBudgetChanged: hints.shared_budget_changed,
            events.MemoryBorrowed: hints.memory_carved_out,
            events.SaveRequested: hints.save_requested,
            events.SpillAdvised: hints.spill_advised,
            events.ErrorReported: hints.error_reported,
            events.Discarded: hints.discarded,
            events.Ending: transfers.ending,
            events.Arrived: transfers.arrived,
            events.Failed: transfers.failed,
            events.TransferMeasured: transfers.transfer_measured,
            events.UseMeasured: transfers.use_measured,
        }

    def handle(self, event: events.Event, now: float = 0.0) -> list[Instruction]:
        """Apply an event that happened at `now` (seconds). Returns the instructions to follow.

        Raises BudgetError for a claim or a demand that can never be met, without any change.
        """
        self.prefetcher.now = now
        if self._handlers[type(event)](event):
            self._fixpoint.run()
        copies = self.copies
        instructions, copies.instructions = copies.instructions, []
        return instructions

    # State -------------------------------------------------------------------------------------

    def bandwidth(self, src: Tier, dst: Tier) -> float | None:
        """Return the bytes per second from one tier to the next; None before it was measured."""
        return self.prefetcher.hops[src, dst].bandwidth

    def computing_seconds(self, group: GroupId) -> float:
        """Return the learned seconds of computing after a use of the group; 0.0 if unknown."""
        return self.prefetcher.computing_seconds(self.copies.groups[group].number)

    def spare_bytes(self) -> int:
        """Return the bytes on the fastest tier that `DeviceVacated` would free."""
        return sum(group.cost(self.top) for group in self._movement.idle_on_top())

    @property
    def shared_used(self) -> int:
        """Bytes of shared groups in host memory, counting copies still arriving."""
        return self.copies.shared.used

    @property
    def shared_budget(self) -> int:
        """Bytes that shared groups may take, or the bytes in use if these are more."""
        shared = self.copies.shared
        return max(shared.limit or 0, shared.used)

    def idle(self) -> bool:
        """Return whether no copy is being moved or filled."""
        return self.copies.in_flight == 0

    def has_space(self, nbytes: int) -> bool:
        """Return whether host memory has space for `nbytes` bytes without evicting anything."""
        return self.copies.pools[self.copies.host].has_space(nbytes)

    def all_there(self) -> bool:
        """Return whether every group has space on the fastest tier."""
        return self.prefetcher.all_there()

    def groups(self) -> set[GroupId]:
        """Return all groups, including forgotten ones that still have a copy."""
        return set(self.copies.groups)

    def leased(self) -> set[GroupId]:
        """Return the groups that are leased."""
        return {g.id for g in self.copies.groups.values() if g.leases or g.host_lease}

    def waited_for(self) -> set[GroupId]:
        """Return the groups with a request, or with space reserved on the fastest tier."""
        requests = self.requests
        wanted = {*requests.demands, *requests.host_demands, *requests.claims, *requests.saves}
        return {group.id for group in wanted.union(self.copies.promised)}

    def check(self) -> None:
        """Assert the invariants. Visits every group, so it is for tests."""
        invariants.check(self.copies, self.requests, self.prefetcher)

    # State of a group --------------------------------------------------------------------------

    def __contains__(self, group: GroupId) -> bool:
        record = self.copies.groups.get(group)
        return record is not None and not record.forgotten

    def state_of(self, group: GroupId) -> State | None:
        """Return the state of the copy on the fastest tier; None if there is none."""
        copy = self.copies.groups[group].copies.get(self.copies.top)
        return None if copy is None else copy.state

    def residence(self, group: GroupId) -> tuple[Tier, ...]:
        """Return the tiers with a complete copy, the fastest first."""
        record = self.copies.groups[group]
        return tuple(tier for tier in self.copies.tiers if record.present(tier))

    def arriving(self, group: GroupId) -> bool:
        """Return whether a copy in memory is arriving."""
        copies = self.copies.groups[group].copies.items()
        return any(copy.state is State.ARRIVING and not tier.persistent for tier, copy in copies)

    def backed(self, group: GroupId) -> bool:
        """Return whether one of the user's files holds the group's bytes."""
        return self.copies.groups[group].backing is not None

    def granted(self, group: GroupId) -> bool:
        """Return whether a claim has its space. The caller then fills it, and reports `Filled`."""
        return self.copies.host in self.copies.groups[group].copies

    def leasable(self, group: GroupId, access: Access) -> bool:
        """Return whether the group may be `Leased` now."""
        return self._leases.leasable(self.copies.groups[group], access)

    def host_leasable(self, group: GroupId, purpose: HostAccess) -> bool:
        """Return whether the group may be `HostLeased` now."""
        return self._host_leases.leasable(self.copies.groups[group], purpose)

    def leased_permanently(self, group: GroupId) -> bool:
        """Return whether the group is leased permanently in host memory, which excludes others."""
        return self.copies.groups[group].host_lease is HostAccess.PERMANENT

    def saved(self, group: GroupId) -> bool:
        """Return whether a valid copy is on a persistent tier."""
        return self.copies.groups[group].saved()

    def saving(self, group: GroupId) -> bool:
        """Return whether a save is pending."""
        return self.copies.groups[group] in self.requests.saves

    def error_of(self, group: GroupId) -> BaseException | None:
        """Return the error that prevented moving or saving the group; None if there is none."""
        return self.copies.groups[group].error


def planner_for(
    budgets: Mapping[Tier, int | None],
    policy: str,
    *,
    timed_by_device: bool = False,
    memory: int = MEMORY,
    prefetch: bool = True,
) -> Planner:
    """Create a planner with the policy of this name.

    Its schedule remembers `memory` uses of each stream. With `prefetch` False, or with
    `NEXT_USE_WITHOUT_PREFETCH`, nothing is prefetched.

    Raises ValueError for an unknown policy, and for budgets without memory above a persistent tier.
    """

    def in_use(number: int) -> bool:
        group = planner.copies.numbered.get(number)
        if group is None:
            return False
        requests = planner.requests
        leased = bool(group.leases) or group.host_lease not in (None, HostAccess.PERMANENT)
        return leased or group in requests.demands or group in requests.host_demands

    schedule = UseStreams(
        lambda: planner.prefetcher.now,
        in_use,
        lambda: planner.prefetcher.nbytes,
        memory=memory,
        prefetch=prefetch and policy != NEXT_USE_WITHOUT_PREFETCH,
    )
    named = "next-use" if policy == NEXT_USE_WITHOUT_PREFETCH else policy
    ranking = policy_named(named, schedule, budgets_of(budgets))
    planner = Planner(budgets, ranking, schedule, timed_by_device=timed_by_device)
    return planner
