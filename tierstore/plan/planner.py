"""Who may hold bytes where: a state machine that decides every move and makes none.

`Planner.handle` takes one event, changes what the planner believes, and returns instructions that
make the belief true, to be followed in that order; what becomes of them are events again. One rule
governs all movement:

    A copy may be dropped when another valid copy exists; otherwise it is saved one tier down first.

A copy on its way takes its room from the moment it is planned: budgets hold at every instant.
Room on the fastest tier is set aside before the first hop towards it begins, so nothing that is on
its way up can be stranded half-way by something else that is. A drop takes effect at once, which
is why the order of the instructions matters.

What holds after every event is in `tierstore.plan.invariants`.

The parts, none of which knows the planner:

    CopyTable   which copies are where, and the room they take
    Requests    what callers want
    Eviction    whose copies make room
    Movement    the next move of a group
    Fixpoint    everything that is wanted, the most pressing first
    KnownEvents, LeaseEvents, HostLeaseEvents, HintEvents, TransferEvents
                what each event changes
    Schedule, Policy, Prefetcher
                what comes next, what is missed least, what to fetch early
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
from tierstore.plan.known_events import KnownEvents
from tierstore.plan.lease_events import HostLeaseEvents, LeaseEvents, Uses
from tierstore.plan.movement import Fixpoint, Movement
from tierstore.plan.policy import Policy, policy_named
from tierstore.plan.prefetch import Prefetcher
from tierstore.plan.records import State
from tierstore.plan.requests import Requests
from tierstore.plan.schedule import MEMORY, Schedule
from tierstore.plan.transfer_events import TransferEvents
from tierstore.plan.use_streams import UseStreams

NEXT_USE_UNFORETOLD = "next-use-unforetold"
"""The policy of who serves users that ask for groups early themselves: nothing is fetched early. No
store is given it."""


class Planner:
    """Plans for the tiers of `budgets` (bytes; None for no limit): memory, and what is persistent
    below it.

    Given the time of each event it learns how long computing and moving take. Without, it fetches
    about two groups ahead. Where a device works later than it is told to, its uses are
    `timed_by_device`: `UseMeasured` tells how long it computes.

    Groups are leased on `top`, the fastest of the `tiers`; they are put to `host`, the last one in
    memory, and changed there. `budgets`, `used` and `peak` are bytes by tier, counting copies still
    arriving; they change with each event. In host memory `used` and `peak` also count copies of
    shared groups, of which `budgets` says nothing: see `shared_budget`. `copies`, `requests` and
    `prefetcher` are there to be looked at; what changes them is `handle`.
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
        uses = Uses(policy, schedule, prefetcher, movement)
        self.tiers, self.top, self.host = copies.tiers, copies.top, copies.host
        self.budgets: Mapping[Tier, int | None] = own
        self.used: Mapping[Tier, int] = copies.used
        self.borrowed: Mapping[Tier, int] = copies.borrowed
        self.peak = copies.peak
        self.prefetcher, self.copies, self.requests = prefetcher, copies, requests
        self._movement = movement
        self._fixpoint = Fixpoint(copies, requests, movement)
        known = KnownEvents(copies, requests, movement, schedule, prefetcher)
        self._leases = leases = LeaseEvents(copies, requests, movement, uses)
        self._host_leases = host_leases = HostLeaseEvents(copies, requests, movement, uses)
        hints = HintEvents(copies, requests, eviction, movement, schedule, prefetcher)
        transfers = TransferEvents(copies, requests, movement, prefetcher)
        # What to do for each type of event. True: something may have to move now.
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
            events.MemoryBorrowed: hints.memory_borrowed,
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
        """Believe what the event says, which happened at `now` (seconds). Returns what to do.

        Raises BudgetError for a claim or a demand that can never be met; then nothing has changed.
        """
        self.prefetcher.now = now
        if self._handlers[type(event)](event):
            self._fixpoint.run()
        copies = self.copies
        instructions, copies.instructions = copies.instructions, []
        return instructions

    # What there is -----------------------------------------------------------------------------

    def bandwidth(self, src: Tier, dst: Tier) -> float | None:
        """Bytes per second from one tier to the next; None before the first measurement."""
        return self.prefetcher.hops[src, dst].bandwidth

    def computing_seconds(self, group: GroupId) -> float:
        """The seconds of computing that follow a use of the group, as far as was learned."""
        return self.prefetcher.computing_seconds(self.copies.groups[group].number)

    def spare_bytes(self) -> int:
        """Bytes on the fastest tier that `DeviceVacated` would free."""
        return sum(group.cost(self.top) for group in self._movement.idle_on_top())

    @property
    def shared_used(self) -> int:
        """Bytes of the copies of shared groups in host memory, counting those still arriving."""
        return self.copies.shared.used

    @property
    def shared_budget(self) -> int:
        """Bytes that those may take: what was allowed, or more while more is in use."""
        shared = self.copies.shared
        return max(shared.limit or 0, shared.used)

    def idle(self) -> bool:
        """Whether nothing is on its way."""
        return self.copies.in_flight == 0

    def has_room(self, nbytes: int) -> bool:
        """Whether host memory has room for so many bytes, without that anything goes."""
        return self.copies.pools[self.copies.host].has_room(nbytes)

    def all_there(self) -> bool:
        """Whether every group has its place on the fastest tier."""
        return self.prefetcher.all_there()

    def groups(self) -> set[GroupId]:
        """All groups, and those that are forgotten and still have a copy."""
        return set(self.copies.groups)

    def leased(self) -> set[GroupId]:
        """The groups that are lent to somebody."""
        return {g.id for g in self.copies.groups.values() if g.leases or g.host_lease}

    def waited_for(self) -> set[GroupId]:
        """The groups of which somebody wants anything, or for which room is set aside."""
        requests = self.requests
        wanted = {*requests.demands, *requests.host_demands, *requests.claims, *requests.saves}
        return {group.id for group in wanted.union(self.copies.promised)}

    def check(self) -> None:
        """Assert the promises. Costs a walk over all groups: for tests."""
        invariants.check(self.copies, self.requests, self.prefetcher)

    # What is true of a group -------------------------------------------------------------------

    def __contains__(self, group: GroupId) -> bool:
        record = self.copies.groups.get(group)
        return record is not None and not record.forgotten

    def state_of(self, group: GroupId) -> State | None:
        """How far the copy on the fastest tier is; None if there is none."""
        copy = self.copies.groups[group].copies.get(self.copies.top)
        return None if copy is None else copy.state

    def residence(self, group: GroupId) -> tuple[Tier, ...]:
        """The tiers that hold a complete copy."""
        record = self.copies.groups[group]
        return tuple(tier for tier in self.copies.tiers if record.present(tier))

    def arriving(self, group: GroupId) -> bool:
        """Whether a copy in memory is on its way."""
        copies = self.copies.groups[group].copies.items()
        return any(copy.state is State.ARRIVING and not tier.persistent for tier, copy in copies)

    def backed(self, group: GroupId) -> bool:
        """Whether a file of the user's holds the group's bytes."""
        return self.copies.groups[group].backing is not None

    def granted(self, group: GroupId) -> bool:
        """Whether the room for a claim is there. Then fill it: `Filled`."""
        return self.copies.host in self.copies.groups[group].copies

    def leasable(self, group: GroupId, access: Access) -> bool:
        """Whether the group may be `Leased` now."""
        return self._leases.leasable(self.copies.groups[group], access)

    def host_leasable(self, group: GroupId, purpose: HostAccess) -> bool:
        """Whether the group may be `HostLeased` now."""
        return self._host_leases.leasable(self.copies.groups[group], purpose)

    def leased_permanently(self, group: GroupId) -> bool:
        """Whether somebody has it in host memory for good: nobody else may change or hold it."""
        return self.copies.groups[group].host_lease is HostAccess.PERMANENT

    def saved(self, group: GroupId) -> bool:
        """Whether a valid copy is on a persistent tier."""
        return self.copies.groups[group].saved()

    def saving(self, group: GroupId) -> bool:
        """Whether a save is still being pursued."""
        return self.copies.groups[group] in self.requests.saves

    def error_of(self, group: GroupId) -> BaseException | None:
        """Why the group could not be brought or saved; None while all is well."""
        return self.copies.groups[group].error


def planner_for(
    budgets: Mapping[Tier, int | None],
    policy: str,
    *,
    timed_by_device: bool = False,
    memory: int = MEMORY,
    foretell: bool = True,
) -> Planner:
    """A planner with the policy of this name, and a schedule that remembers `memory` uses of each
    stream. Without `foretell`, or with `NEXT_USE_UNFORETOLD`, nothing is fetched early.

    Raises ValueError for a policy that there is not, and for budgets without memory above something
    persistent.
    """

    def in_use(number: int) -> bool:
        group = planner.copies.numbered.get(number)
        if group is None:
            return False
        requests = planner.requests
        lent = bool(group.leases) or group.host_lease not in (None, HostAccess.PERMANENT)
        return lent or group in requests.demands or group in requests.host_demands

    schedule = UseStreams(
        lambda: planner.prefetcher.now,
        in_use,
        lambda: planner.prefetcher.nbytes,
        memory=memory,
        foretell=foretell and policy != NEXT_USE_UNFORETOLD,
    )
    named = "next-use" if policy == NEXT_USE_UNFORETOLD else policy
    ranking = policy_named(named, schedule, budgets_of(budgets))
    planner = Planner(budgets, ranking, schedule, timed_by_device=timed_by_device)
    return planner
