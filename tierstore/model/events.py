"""What can happen to a planner: the only way into it.

An event says what a caller wants, or what became of an instruction; `Planner.handle` answers with
the instructions that follow. Events are data: the list of all events of a store, with the time of
each, is a record from which every decision can be made again (see `tierstore.observe.event_log`).

Sizes are in bytes and times in seconds of one clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierstore.model.groups import GroupId
from tierstore.model.tiers import Access, HostAccess, Tier, UseOrder

# What there is ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Registered:
    """A group is on `tier`, a persistent one: in a file of the store's own, or of the user's.

    A file of the user's is `backing`: the store may not remove it, and its bytes do not count. If
    the group is `shared`, its copies in host memory are another process's, and read-only: they
    count against what `SharedBudgetChanged` allows. What is shared is `backing`, and never changed.
    """

    group: GroupId
    nbytes: int
    backing: bool = False
    use_order: UseOrder = UseOrder.LEARNED
    tier: Tier = Tier.DISK
    shared: bool = False


@dataclass(frozen=True, slots=True)
class RecoveredGroup:
    """What is true of a group, whatever a planner may have believed.

    `tiers` are those on which there is a copy, complete or not, or room for the put that has
    `claimed` it; `moves` are the copies under way, from and to where. A lease has an access, and is
    permanent or not. Of a group that is not `visible`, readers see a newer generation, or none. If
    it is `shared`, its copies in host memory are another process's.
    """

    group: GroupId
    nbytes: int
    tiers: tuple[Tier, ...]
    moves: tuple[tuple[Tier, Tier], ...] = ()
    leases: tuple[tuple[Access, bool], ...] = ()
    host_lease: HostAccess | None = None
    backing: Tier | None = None
    use_order: UseOrder = UseOrder.LEARNED
    sticky: bool = False
    visible: bool = True
    claimed: bool = False
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Recovered:
    """After a step that was cut short, a new planner begins with these groups, the oldest first."""

    groups: tuple[RecoveredGroup, ...]


# Puts -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Claimed:
    """A caller wants to put a group, and needs room in host memory. See `Planner.granted`."""

    group: GroupId
    nbytes: int
    use_order: UseOrder = UseOrder.LEARNED


@dataclass(frozen=True, slots=True)
class Filled:
    """The room that was granted to a claim has the bytes now."""

    group: GroupId


# Leases on the fastest tier ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Demanded:
    """Somebody insists on the group on the fastest tier, until it is `Leased` or `Withdrawn`.

    `stream` is the number of a thread, or of whatever else uses one group after another.
    """

    group: GroupId
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """One demand, or a claim that was not filled, is taken back."""

    group: GroupId


@dataclass(frozen=True, slots=True)
class Leased:
    """The group, which was `leasable`, is lent: one demand is met, if it had to be `demanded`.

    Nobody may wait for the room of what is lent permanently. `stream` is as in `Demanded`.
    """

    group: GroupId
    access: Access
    permanent: bool = False
    demanded: bool = True
    stream: int = 0


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """Who went by this number is gone, and nobody else will use groups in the same order."""

    stream: int


@dataclass(frozen=True, slots=True)
class Released:
    """A lease comes back."""

    group: GroupId
    access: Access
    permanent: bool = False


# Leases in host memory --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostDemanded:
    """Somebody wants to hold the group in host memory, until `HostLeased` or `HostWithdrawn`."""

    group: GroupId
    purpose: HostAccess


@dataclass(frozen=True, slots=True)
class HostWithdrawn:
    """One of those who wanted to hold the group does so no more."""

    group: GroupId
    purpose: HostAccess


@dataclass(frozen=True, slots=True)
class HostLeased:
    """The copy in host memory, which was `host_leasable`, is lent to one who demanded it.

    If it is to be changed it is the only one then; but copies of it may be made meanwhile, by who
    knows when it does not change. `stream` is as in `Demanded`.
    """

    group: GroupId
    purpose: HostAccess
    stream: int = 0


@dataclass(frozen=True, slots=True)
class HostReleased:
    """What was lent in host memory comes back."""

    group: GroupId


# Hints and housekeeping -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Expected:
    """The caller hopes to use these next, in this order, on tier `highest` (None: the fastest)."""

    groups: tuple[GroupId, ...]
    highest: Tier | None = None


@dataclass(frozen=True, slots=True)
class Offloaded:
    """The copy on the fastest tier is not needed: it goes, saved first if it is the only one."""

    group: GroupId


@dataclass(frozen=True, slots=True)
class MemoryReleased:
    """No copy in memory is needed of a group that is saved: they go once nobody uses them."""

    group: GroupId


@dataclass(frozen=True, slots=True)
class DeviceVacated:
    """The memory of the fastest tier is wanted by others: what nobody uses there goes, if another
    tier has it, and nothing is fetched early before the next use."""


@dataclass(frozen=True, slots=True)
class MadeSticky:
    """The group should stay in host memory: others give up their room first."""

    group: GroupId


@dataclass(frozen=True, slots=True)
class BudgetChanged:
    """The fastest tier has so many bytes from now on. If those are fewer, copies go that nobody
    uses and another tier has; the tier keeps room for what is left, and for its largest group."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class SharedBudgetChanged:
    """Copies of shared groups in host memory may take so many bytes together from now on; none
    before the first such event. If those are fewer, copies go that nobody uses; what is in use goes
    when that is over, and until then nothing comes instead."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class MemoryBorrowed:
    """The runner of a loop wants so many bytes of a tier in memory, all in all, that no copy takes;
    0 gives all of it back. Copies that nobody uses and another tier has make room. If that is not
    enough, nothing is borrowed: see `Planner.borrowed`."""

    tier: Tier
    nbytes: int


@dataclass(frozen=True, slots=True)
class SaveRequested:
    """Somebody waits for the group to be on a persistent tier. See `Planner.saved`."""

    group: GroupId


@dataclass(frozen=True, slots=True)
class SpillAdvised:
    """The group will have to make room soon, so it may be saved already. If that fails, only those
    who wait for room are told."""

    group: GroupId


@dataclass(frozen=True, slots=True)
class ErrorReported:
    """The error of a save was told to who waited: the group can be used again."""

    group: GroupId


@dataclass(frozen=True, slots=True)
class Discarded:
    """The group is forgotten; its copies go as soon as nothing uses them."""

    group: GroupId


# What became of instructions --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ending:
    """The last bytes of a copy move: soon its hop has nothing to do."""

    group: GroupId
    src: Tier
    dst: Tier


@dataclass(frozen=True, slots=True)
class Arrived:
    """A copy is complete. If it is not `timed`, it is only queued so far, for who uses it in order
    with the device, and `TransferMeasured` tells later how long it took."""

    group: GroupId
    src: Tier
    dst: Tier
    timed: bool = True


@dataclass(frozen=True, slots=True)
class Failed:
    """A copy could not be made: that on `src` is still valid, there is none on `dst`."""

    group: GroupId
    src: Tier
    dst: Tier
    error: BaseException


@dataclass(frozen=True, slots=True)
class TransferMeasured:
    """So many bytes of a copy moved between these times."""

    src: Tier
    dst: Tier
    nbytes: int
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class UseMeasured:
    """On the device a use of a group began, for which it had waited since it was `asked` for."""

    group: GroupId
    asked: float
    began: float


Event = (
    Registered
    | Recovered
    | Claimed
    | Filled
    | Demanded
    | Withdrawn
    | Leased
    | StreamEnded
    | Released
    | HostDemanded
    | HostWithdrawn
    | HostLeased
    | HostReleased
    | Expected
    | Offloaded
    | MemoryReleased
    | DeviceVacated
    | MadeSticky
    | BudgetChanged
    | SharedBudgetChanged
    | MemoryBorrowed
    | SaveRequested
    | SpillAdvised
    | ErrorReported
    | Discarded
    | Ending
    | Arrived
    | Failed
    | TransferMeasured
    | UseMeasured
)
