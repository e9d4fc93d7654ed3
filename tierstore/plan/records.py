"""The planner's record of each group and its copies."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from tierstore.model.groups import GroupId
from tierstore.model.tiers import Access, HostAccess, Tier, UseOrder


class State(Enum):
    """The state of a copy. It takes space in all of them."""

    RESERVED = "space is reserved, no transfer has begun"
    ARRIVING = "a transfer is in flight"
    PRESENT = "complete and valid"


@dataclass(slots=True)
class CopyRecord:
    """One group's copy on one tier.

    `readers` counts the transfers that read it. An `unwanted` copy is dropped as soon as it is not
    in use and another one is valid. `began` is the time in seconds at which its transfer was
    instructed. `ending` is True while its last bytes move.
    """

    state: State
    began: float = 0.0
    readers: int = 0
    unwanted: bool = False
    ending: bool = False


@dataclass(slots=True, eq=False)
class GroupRecord:
    """One group.

    On the tier `backing`, if any, one of the user's files holds its bytes, so that copy takes no
    space. `number` is the schedule's number of its key; -1 if a newer generation has it. `sticky`
    groups are evicted last from host memory. `use_order` says how the next use is predicted. While
    there is a `host_lease`, a caller has leased the copy in host memory, and may change it. Copies
    of a `shared` group in host memory belong to another process and are never changed.
    """

    id: GroupId
    nbytes: int
    backing: Tier | None = None
    number: int = -1
    copies: dict[Tier, CopyRecord] = field(default_factory=dict)
    leases: int = 0
    exclusive: Access | None = None
    forgotten: bool = False
    sticky: bool = False
    use_order: UseOrder = UseOrder.LEARNED
    host_lease: HostAccess | None = None
    error: BaseException | None = None
    shared: bool = False

    def present(self, tier: Tier) -> bool:
        """Return whether a complete copy is on `tier`."""
        copy = self.copies.get(tier)
        return copy is not None and copy.state is State.PRESENT

    def saved(self) -> bool:
        """Return whether a complete copy is on a persistent tier."""
        return any(tier.persistent and self.present(tier) for tier in self.copies)

    def valid_elsewhere(self, tier: Tier) -> bool:
        """Return whether the group has a complete copy on a tier other than `tier`."""
        for other, copy in self.copies.items():
            if other is not tier and copy.state is State.PRESENT:
                return True
        return False

    def moving(self) -> bool:
        """Return whether a transfer reads or writes any of its copies."""
        return any(c.readers or c.state is State.ARRIVING for c in self.copies.values())

    def cost(self, tier: Tier) -> int:
        """Return the bytes that a copy on `tier` takes of its budget."""
        return 0 if tier is self.backing else self.nbytes
