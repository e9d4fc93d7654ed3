"""What the planner believes about each group."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from tierstore.model.groups import GroupId
from tierstore.model.tiers import Access, HostAccess, Tier, UseOrder


class State(Enum):
    """How far a copy is. Room is taken from the first state on."""

    RESERVED = "room is set aside, nothing is on its way yet"
    ARRIVING = "bytes are on their way"
    PRESENT = "complete and valid"


@dataclass(slots=True)
class CopyRecord:
    """One group's copy on one tier.

    `readers` counts transfers that read it. `unwanted` means that it goes as soon as nothing uses
    it and another copy is valid. `began` is when its transfer was instructed, in seconds; it is
    `ending` once the last of its bytes move.
    """

    state: State
    began: float = 0.0
    readers: int = 0
    unwanted: bool = False
    ending: bool = False


@dataclass(slots=True, eq=False)
class GroupRecord:
    """One group.

    On the tier `backing`, if any, a file of the user's holds its bytes: that copy takes no room.
    `number` is what the schedule knows its key by; -1 if a newer generation has taken it over.
    `sticky` says that it should stay in host memory. `use_order` says how it is known when it is
    used next. While there is a `host_lease`, somebody has its copy in host memory, and may change
    it. The copies in host memory of what is `shared` are another process's: nobody changes them.
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
        """Whether a complete copy is on `tier`."""
        copy = self.copies.get(tier)
        return copy is not None and copy.state is State.PRESENT

    def saved(self) -> bool:
        """Whether a complete copy is on a persistent tier."""
        return any(tier.persistent and self.present(tier) for tier in self.copies)

    def valid_elsewhere(self, tier: Tier) -> bool:
        """Whether the copy on `tier` could go without losing the group."""
        for other, copy in self.copies.items():
            if other is not tier and copy.state is State.PRESENT:
                return True
        return False

    def moving(self) -> bool:
        """Whether any transfer reads or writes any of its copies."""
        return any(c.readers or c.state is State.ARRIVING for c in self.copies.values())

    def cost(self, tier: Tier) -> int:
        """The bytes that a copy takes of the budget of `tier`."""
        return 0 if tier is self.backing else self.nbytes
