"""Events: the only input of a planner.

An event reports a caller's request or the result of an instruction; `Planner.handle` returns the
instructions that follow from it. Events are plain data, so a log of a store's events with their
times is enough to replay every decision (see `tierstore.observe.event_log`).

Sizes are in bytes; times are in seconds of one clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierstore.model.groups import GroupId
from tierstore.model.tiers import Access, HostAccess, Tier, UseOrder

# Registration -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Registered:
    """A group exists on `tier`, a persistent one: in a file of the store or of the user.

    If `backing` is True, the file is the user's: the store must not remove it, and its bytes do not
    count against a budget. If `shared` is True, the copies in host memory are read-only and belong
    to another process; they count against the budget of `SharedBudgetChanged`. A shared group is
    always `backing` and never changed.
    """

    group: GroupId
    nbytes: int
    backing: bool = False
    use_order: UseOrder = UseOrder.LEARNED
    tier: Tier = Tier.DISK
    shared: bool = False


@dataclass(frozen=True, slots=True)
class RecoveredGroup:
    """The actual state of a group, from which a new planner is built after a failed step.

    Attributes:
        tiers: the tiers with a copy, complete or not, or with memory reserved for a put.
        moves: the copies in progress, as (source, destination).
        leases: the leases, each as its access and whether it is permanent.
        visible: False if readers see a newer generation, or none.
        claimed: True if a put has reserved memory and not filled it yet.
        shared: True if the copies in host memory belong to another process.
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
    """A new planner starts with these groups, oldest first, after a step was interrupted."""

    groups: tuple[RecoveredGroup, ...]


# Puts -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Claimed:
    """A caller wants to put a group and needs host memory for it. See `Planner.granted`."""

    group: GroupId
    nbytes: int
    use_order: UseOrder = UseOrder.LEARNED


@dataclass(frozen=True, slots=True)
class Filled:
    """The caller has filled the memory that was granted to its claim."""

    group: GroupId


# Leases on the fastest tier ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Demanded:
    """A caller waits for the group on the fastest tier, until it is `Leased` or `Withdrawn`.

    `stream` identifies a sequence of uses, such as a thread.
    """

    group: GroupId
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """A caller cancels one demand, or a claim that it has not filled."""

    group: GroupId


@dataclass(frozen=True, slots=True)
class Leased:
    """A `leasable` group was leased. If it was `demanded`, this satisfies one demand.

    No request may wait for the memory of a permanent lease. `stream` is as in `Demanded`.
    """

    group: GroupId
    access: Access
    permanent: bool = False
    demanded: bool = True
    stream: int = 0


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """A stream has ended, so its learned order can be dropped."""

    stream: int


@dataclass(frozen=True, slots=True)
class Released:
    """A lease was released."""

    group: GroupId
    access: Access
    permanent: bool = False


# Leases in host memory --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostDemanded:
    """A caller waits for the group in host memory, until it is `HostLeased` or `HostWithdrawn`."""

    group: GroupId
    purpose: HostAccess


@dataclass(frozen=True, slots=True)
class HostWithdrawn:
    """A caller cancels one host demand."""

    group: GroupId
    purpose: HostAccess


@dataclass(frozen=True, slots=True)
class HostLeased:
    """A `host_leasable` copy in host memory was leased to one of the callers that demanded it.

    If the lease is for writing, this copy is the only valid one. A caller that knows when the copy
    does not change may still copy from it. `stream` is as in `Demanded`.
    """

    group: GroupId
    purpose: HostAccess
    stream: int = 0


@dataclass(frozen=True, slots=True)
class HostReleased:
    """A lease in host memory was released."""

    group: GroupId


# Hints and housekeeping -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Expected:
    """A prefetch hint: these groups are used next, in this order.

    `highest` is the fastest tier to fetch them to (None: the fastest of the store).
    """

    groups: tuple[GroupId, ...]
    highest: Tier | None = None


@dataclass(frozen=True, slots=True)
class Offloaded:
    """The copy on the fastest tier is no longer needed: it is dropped, after saving if unsaved."""

    group: GroupId


@dataclass(frozen=True, slots=True)
class MemoryReleased:
    """Copies of a saved group in memory are no longer needed: drop each once it is not leased."""

    group: GroupId


@dataclass(frozen=True, slots=True)
class DeviceVacated:
    """Others need the memory of the fastest tier.

    Drops every copy there that is not leased and has a copy on another tier. Nothing is prefetched
    before the next use.
    """


@dataclass(frozen=True, slots=True)
class MadeSticky:
    """The group should stay in host memory: evict all others first."""

    group: GroupId


@dataclass(frozen=True, slots=True)
class BudgetChanged:
    """The budget of the fastest tier changed.

    If it shrank, drops copies that are not leased and have a copy on another tier. The budget never
    falls below the remaining copies, nor below the largest group of the tier.
    """

    nbytes: int


@dataclass(frozen=True, slots=True)
class SharedBudgetChanged:
    """The total budget of shared groups in host memory changed. It is 0 before the first event.

    If it shrank, drops copies that are not leased. Leased copies are dropped when they are
    released; until then, no other copy is made in their place.
    """

    nbytes: int


@dataclass(frozen=True, slots=True)
class MemoryBorrowed:
    """A loop runner reserves a total of `nbytes` bytes of a tier for itself; 0 returns them all.

    Copies that are not leased and have a copy on another tier are evicted. If that frees too
    little, nothing is reserved: see `Planner.carved_out`.
    """

    tier: Tier
    nbytes: int


@dataclass(frozen=True, slots=True)
class SaveRequested:
    """A caller waits until the group is on a persistent tier. See `Planner.saved`."""

    group: GroupId


@dataclass(frozen=True, slots=True)
class SpillAdvised:
    """The group will be evicted soon, so it may be saved ahead of time.

    If that fails, the error is raised only for requests that wait for memory.
    """

    group: GroupId


@dataclass(frozen=True, slots=True)
class ErrorReported:
    """The error of a save was raised for its waiters: the group can be used again."""

    group: GroupId


@dataclass(frozen=True, slots=True)
class Discarded:
    """The group was discarded. Its copies are dropped as soon as they are not leased."""

    group: GroupId


# Results of instructions ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ending:
    """The last bytes of a copy are moving, so its hop will soon be idle."""

    group: GroupId
    src: Tier
    dst: Tier


@dataclass(frozen=True, slots=True)
class Arrived:
    """A copy is complete.

    If it is not `timed`, it is only queued on the device so far, and may be used in device order.
    `TransferMeasured` reports later how long it took.
    """

    group: GroupId
    src: Tier
    dst: Tier
    timed: bool = True


@dataclass(frozen=True, slots=True)
class Failed:
    """A copy failed: the one on `src` is still valid, and there is none on `dst`."""

    group: GroupId
    src: Tier
    dst: Tier
    error: BaseException


@dataclass(frozen=True, slots=True)
class TransferMeasured:
    """`nbytes` bytes of a copy moved between these times."""

    src: Tier
    dst: Tier
    nbytes: int
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class UseMeasured:
    """The device began to use a group at `began`. It had been requested at `asked`."""

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
