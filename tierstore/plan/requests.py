"""What callers want of groups, until it is met, has failed or is taken back."""

from __future__ import annotations

from dataclasses import dataclass, field

from tierstore.model.tiers import HostAccess, Tier
from tierstore.plan.records import GroupRecord, State


@dataclass
class Requests:
    """All that is wanted, each kind in the order in which it was asked for.

    `demands`: groups that so many insist on, on the tier `top`. `host_demands`: those that somebody
    wants to hold in host memory, the tier `host`, and for what. `claims`: those that somebody wants
    to put. `saves`: those that are to be on a persistent tier, `offloads`: those that are to leave
    `top`.
    """

    top: Tier
    host: Tier
    demands: dict[GroupRecord, int] = field(default_factory=dict)
    host_demands: dict[GroupRecord, list[HostAccess]] = field(default_factory=dict)
    claims: dict[GroupRecord, None] = field(default_factory=dict)
    saves: dict[GroupRecord, None] = field(default_factory=dict)
    offloads: dict[GroupRecord, None] = field(default_factory=dict)

    def is_waited_for(self, group: GroupRecord, tier: Tier) -> bool:
        """Whether somebody waits for the copy on `tier`, and will use it at once."""
        return (tier is self.top and group in self.demands) or (
            tier is self.host and group in self.host_demands
        )

    def take_back(self, group: GroupRecord) -> bool:
        """One demand is met, or taken back. True if it was the last one."""
        if self.demands.get(group) == 1:
            del self.demands[group]
            return True
        if group in self.demands:
            self.demands[group] -= 1
        return False

    def drop_all(self, group: GroupRecord) -> None:
        """Nobody wants anything of a group any more."""
        self.demands.pop(group, None)
        self.host_demands.pop(group, None)
        self.claims.pop(group, None)
        self.saves.pop(group, None)
        self.offloads.pop(group, None)

    def only_for_new_values(self, group: GroupRecord) -> bool:
        """Whether all who want to hold a group in host memory give it new values."""
        return set(self.host_demands[group]) == {HostAccess.RENEW}

    def only_need_the_top(self) -> bool:
        """Whether there are no requests but for groups that have room on the fastest tier."""
        others = self.claims or self.saves or self.offloads or self.host_demands
        return not others and all(self.top in group.copies for group in self.demands)

    def unmet(self) -> list[GroupRecord]:
        """The groups that somebody waits for and that are not on their way."""
        waiting = [group for group in self.demands if not self.is_coming(group)]
        waiting += [group for group in self.host_demands if self.host not in group.copies]
        waiting += [group for group in self.claims if not group.copies]
        return [group for group in waiting if group.error is None]

    def is_coming(self, group: GroupRecord) -> bool:
        """Whether the group is on the fastest tier, or on its last way to it."""
        copy = group.copies.get(self.top)
        return copy is not None and copy.state is not State.RESERVED
