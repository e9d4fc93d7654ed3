"""The table of copies: which exist, their states, and the space they take.

A copy takes space from the moment it is planned until it is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tierstore.errors import BudgetError
from tierstore.model.groups import GroupId
from tierstore.model.moves import Copy, Drop, Forget, Instruction, Reserve
from tierstore.model.tiers import Tier, in_memory
from tierstore.plan.policy import Policy
from tierstore.plan.pools import Pool
from tierstore.plan.prefetch import Prefetcher
from tierstore.plan.records import CopyRecord, GroupRecord, State
from tierstore.plan.schedule import Schedule


class CopyTable:
    """The copies on the tiers of `budgets` (bytes; None for no limit), and pending instructions.

    `pools` has the budget of each tier, and `shared` the separate budget of shared groups in host
    memory (see `pool`). `used` and `peak` are bytes by tier, summed over both. `carved_out` has the
    bytes of each tier that no copy may use (see `carve_out`). `in_flight` counts copies that are
    being moved or filled. `leased` counts the leases that will be released; others may wait for
    their space. `promised` has the groups with space reserved on the fastest tier, none of whose
    copies may be dropped. `instructions` are the ones not yet returned to the caller.
    """

    def __init__(
        self,
        budgets: dict[Tier, int | None],
        policy: Policy,
        schedule: Schedule,
        prefetcher: Prefetcher,
    ) -> None:
        self.tiers = tuple(sorted(budgets))
        self.top = self.tiers[0]
        self.host = in_memory(self.tiers)[-1]
        self.below = dict(zip(self.tiers, self.tiers[1:], strict=False))
        self.above = {below: tier for tier, below in self.below.items()}
        self.budgets = budgets
        self.pools = {tier: Pool(tier, budgets[tier]) for tier in self.tiers}
        self.shared = Pool(self.host, 0, shared=True)
        self.used = dict.fromkeys(self.tiers, 0)
        self.carved_out = dict.fromkeys(self.tiers, 0)
        self.peak = dict.fromkeys(self.tiers, 0)
        self.groups: dict[GroupId, GroupRecord] = {}
        self.newest: dict[str, GroupRecord] = {}  # key -> its newest generation
        self.numbered: dict[int, GroupRecord] = {}  # the same, by the key's schedule number
        self.promised: dict[GroupRecord, None] = {}
        self.in_flight = 0
        self.leased = 0
        self.instructions: list[Instruction] = []
        # By pool, two sizes: requests up to the first are about to get space, requests from the
        # second on are blocked. Neither needs another attempt until a copy is dropped.
        self.blocked_sizes: dict[Pool, tuple[float, float]] = {}
        self._policy = policy
        self._schedule = schedule
        self._prefetcher = prefetcher

    # Groups ------------------------------------------------------------------------------------

    def add(self, group: GroupRecord) -> None:
        """Add a group as the newest generation of its key."""
        key = group.id.key
        self.groups[group.id] = group
        self.newest[key] = group
        number = self._schedule.known.number(key)
        if number in self.numbered:
            self._unnumber(self.numbered[number])
        group.number = number
        self.numbered[number] = group
        self._prefetcher.know(number, group.nbytes, shared=group.shared)

    def forget(self, group: GroupRecord) -> None:
        """Make a group unreachable. `remove` follows once its last copy is dropped."""
        group.forgotten = True
        key = group.id.key
        if self.newest.get(key) is group:
            del self.newest[key]
            self._schedule.known.forget(key)
            self._unnumber(group)

    def _unnumber(self, group: GroupRecord) -> None:
        """Clear a group's schedule number."""
        self._prefetcher.forget(group.number)
        del self.numbered[group.number]
        group.number = -1

    def remove(self, group: GroupRecord) -> None:
        """Remove a forgotten group whose last copy was dropped."""
        del self.groups[group.id]
        self.instructions.append(Forget(group.id))

    # Space -------------------------------------------------------------------------------------

    def pool(self, group: GroupRecord, tier: Tier) -> Pool:
        """Return the pool in which a copy of `group` on `tier` takes space."""
        return self.shared if group.shared and tier is self.host else self.pools[tier]

    def change_budget(self, tier: Tier, nbytes: int) -> None:
        """Set the budget of a tier, in bytes."""
        self.budgets[tier] = self.pools[tier].limit = nbytes

    def carve_out(self, tier: Tier, nbytes: int) -> None:
        """Set the bytes of a tier that are used by something other than copies."""
        more = nbytes - self.carved_out[tier]
        self.carved_out[tier] = nbytes
        self.pools[tier].used += more
        self.used[tier] += more
        self.peak[tier] = max(self.peak[tier], self.used[tier])
        self.blocked_sizes.clear()

    def way_up(self, group: GroupRecord, top: Tier) -> list[Pool]:
        """Return the pools in which a group needs space to reach `top`, now or under pressure.

        Omits the pool of shared groups if the group is already in host memory or on a faster tier,
        because the service that sets its limit may have lowered it since.
        """
        saved = [tier for tier in group.copies if tier.persistent]
        lowest = self.above[min(saved)] if saved else self.host
        came = group.shared and any(
            top <= tier <= self.host and copy.state is not State.RESERVED
            for tier, copy in group.copies.items()
        )
        pools = [self.pool(group, tier) for tier in self.tiers if top <= tier <= lowest]
        return [pool for pool in pools if not (came and pool.shared)]

    def check_fits(self, group: GroupId, nbytes: int, pools: Iterable[Pool]) -> None:
        """Raise BudgetError if one of `pools` is too small for a group of `nbytes` bytes."""
        for pool in pools:
            if pool.limit is not None and nbytes > pool.limit:
                advice = pool.advice(nbytes)
                raise BudgetError(group.key, pool.tier.name, nbytes, pool.limit, advice)

    def largest_in_memory(self) -> int:
        """Return the bytes of the largest group without space on a persistent tier."""
        groups = self.groups.values()
        only = (g.nbytes for g in groups if not any(tier.persistent for tier in g.copies))
        return max(only, default=0)

    def can_fit(self, group: GroupRecord) -> bool:
        """Return whether a group fits all budgets on its way to the fastest tier."""
        pools = self.way_up(group, self.top)
        return all(pool.limit is None or group.nbytes <= pool.limit for pool in pools)

    def place(self, group: GroupRecord, tier: Tier, state: State) -> None:
        """Add a copy in `state`, and count its space."""
        group.copies[tier] = CopyRecord(state)
        if group.number >= 0:
            self._prefetcher.placed(group.number, tier)
        cost = group.cost(tier)
        self.pool(group, tier).used += cost
        self.used[tier] += cost
        self.peak[tier] = max(self.peak[tier], self.used[tier])

    def release_space(self, group: GroupRecord, tier: Tier) -> None:
        """Remove a copy in any state, and free its space."""
        cost = group.cost(tier)
        self.pool(group, tier).used -= cost
        self.used[tier] -= cost
        self.blocked_sizes.clear()
        copy = group.copies.pop(tier)
        if group.number >= 0:
            self._prefetcher.removed(group.number, tier)
        if copy.state is not State.RESERVED:
            self.instructions.append(Drop(group.id, group.nbytes, tier))

    def drop(self, group: GroupRecord, tier: Tier) -> None:
        """Drop a complete copy."""
        self.release_space(group, tier)
        self._policy.dropped(group.id, tier)

    def keep_only(self, group: GroupRecord, tier: Tier) -> None:
        """Drop all copies but the one on `tier`, which is about to be changed."""
        assert not group.shared, f"{group.id.key} belongs to another process"
        for other in [t for t in group.copies if t is not tier]:
            self.drop(group, other)
        group.backing = None

    def abandon(self, group: GroupRecord) -> None:
        """Free reserved space to which no transfer has begun."""
        for tier in [t for t, c in group.copies.items() if c.state is State.RESERVED]:
            self.release_space(group, tier)
        self.promised.pop(group, None)

    # Moves -------------------------------------------------------------------------------------

    def start(self, group: GroupRecord, src: Tier, dst: Tier, *, urgent: bool) -> None:
        """Instruct the transfer of a group to its reserved space on `dst`."""
        copy = group.copies[dst]
        copy.state = State.ARRIVING
        copy.began = self._prefetcher.now
        self._prefetcher.hops[src, dst].begin(group.nbytes)
        if dst is self.top:
            self.promised.pop(group, None)
        group.copies[src].readers += 1
        self.in_flight += 1
        self.instructions.append(Copy(group.id, group.nbytes, src, dst, urgent))

    def end(self, group: GroupRecord, src: Tier, dst: Tier, *, timed: bool, counts: bool) -> None:
        """Account for the end of a transfer.

        A `timed` one ends the hop's busy interval; if it also `counts`, it updates the bandwidth.
        """
        copy, hop = group.copies[dst], self._prefetcher.hops[src, dst]
        hop.end(group.nbytes)
        if timed:
            hop.measure(group.nbytes, copy.began, self._prefetcher.now, counts=counts)
        hop.ending -= copy.ending
        group.copies[src].readers -= 1
        self.in_flight -= 1

    def arrive(self, group: GroupRecord, tier: Tier) -> None:
        """Mark a copy as complete."""
        group.copies[tier].state = State.PRESENT
        self._policy.admitted(group.id, tier)

    def grant(self, group: GroupRecord) -> None:
        """Give the reserved space in host memory to the caller that fills it."""
        group.copies[self.host].state = State.ARRIVING
        self.promised.pop(group, None)
        self.in_flight += 1
        self.instructions.append(Reserve(group.id, group.nbytes, self.host))

    def renew(self, group: GroupRecord) -> None:
        """Give the space in host memory to a caller that replaces all values of the group."""
        self.arrive(group, self.host)
        self.instructions.append(Reserve(group.id, group.nbytes, self.host))

    # Queries -----------------------------------------------------------------------------------

    def in_use(self, group: GroupRecord, tier: Tier) -> bool:
        """Return whether the copy on `tier` is leased, or a transfer reads or writes it."""
        copy = group.copies[tier]
        leased = tier is self.top and group.leases > 0
        leased_in_host = tier is self.host and group.host_lease is not None
        return leased or leased_in_host or copy.readers > 0 or copy.state is State.ARRIVING


def budgets_of(budgets: Mapping[Tier, int | None]) -> dict[Tier, int | None]:
    """Return a copy of `budgets`. Raises ValueError without memory above a persistent tier."""
    tiers = sorted(budgets)
    if not tiers or tiers[0].persistent or not tiers[-1].persistent:
        raise ValueError(f"budgets need memory above a persistent tier, not {tiers}")
    return dict(budgets)
