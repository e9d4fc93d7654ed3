"""Requests of callers, each kept until it is met, has failed or is withdrawn."""

from __future__ import annotations

from dataclasses import dataclass, field

from tierstore.model.tiers import HostAccess, Tier
from tierstore.plan.records import GroupRecord, State


@dataclass
class Requests:
    """All pending requests, each kind in the order in which they were made.

    `demands`: groups requested on the tier `top`, with the number of waiters. `host_demands`:
    groups requested in host memory, the tier `host`, with the purposes. `claims`: groups being put.
    `saves`: groups to copy to a persistent tier. `offloads`: groups to drop from `top`.
    """

    top: Tier
    host: Tier
    demands: dict[GroupRecord, int] = field(default_factory=dict)
    host_demands: dict[GroupRecord, list[HostAccess]] = field(default_factory=dict)
    claims: dict[GroupRecord, None] = field(default_factory=dict)
    saves: dict[GroupRecord, None] = field(default_factory=dict)
    offloads: dict[GroupRecord, None] = field(default_factory=dict)

    def is_waited_for(self, group: GroupRecord, tier: Tier) -> bool:
        """Return whether a caller waits for the copy on `tier`, and will lease it at once."""
        return (tier is self.top and group in self.demands) or (
            tier is self.host and group in self.host_demands
        )

    def withdraw(self, group: GroupRecord) -> bool:
        """Remove one demand that was met or withdrawn. Returns True if it was the last one."""
        if self.demands.get(group) == 1:
            del self.demands[group]
            return True
        if group in self.demands:
            self.demands[group] -= 1
        return False

    def drop_all(self, group: GroupRecord) -> None:
        """Remove all requests for a group."""
        self.demands.pop(group, None)
        self.host_demands.pop(group, None)
        self.claims.pop(group, None)
        self.saves.pop(group, None)
        self.offloads.pop(group, None)

    def only_for_new_values(self, group: GroupRecord) -> bool:
        """Return whether all requests for a group in host memory replace its values."""
        return set(self.host_demands[group]) == {HostAccess.RENEW}

    def only_need_the_top(self) -> bool:
        """Return whether all requests are demands for groups with space on the fastest tier."""
        others = self.claims or self.saves or self.offloads or self.host_demands
        return not others and all(self.top in group.copies for group in self.demands)

    def unmet(self) -> list[GroupRecord]:
        """Return the groups that callers wait for and that are not on their way."""
        waiting = [group for group in self.demands if not self.is_in_flight(group)]
        waiting += [group for group in self.host_demands if self.host not in group.copies]
        waiting += [group for group in self.claims if not group.copies]
        return [group for group in waiting if group.error is None]

    def is_in_flight(self, group: GroupRecord) -> bool:
        """Return whether the group is on the fastest tier, or on its last hop there."""
        copy = group.copies.get(self.top)
        return copy is not None and copy.state is not State.RESERVED
