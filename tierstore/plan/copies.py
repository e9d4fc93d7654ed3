"""Which copies exist, how far they are, and the room they take.

Room is taken from the moment a copy is planned, and given back the moment it is dropped.
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
    """The copies on the tiers of `budgets` (bytes; None for no limit), and what moves them.

    `pools` are the tiers' budgets, and `shared` is that of shared groups in host memory, beside the
    one of the others there; see `pool`. `used` and `peak` are bytes by tier, of both. `in_flight`
    counts copies that are on their way or being filled, `leased` counts leases whose room somebody
    may wait for. `promised` are groups with room set aside on the fastest tier, of which nothing
    may be dropped meanwhile. `instructions` are those that were not handed out yet.
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
        self.borrowed = dict.fromkeys(self.tiers, 0)
        self.peak = dict.fromkeys(self.tiers, 0)
        self.groups: dict[GroupId, GroupRecord] = {}
        self.newest: dict[str, GroupRecord] = {}  # key -> the generation that was made last
        self.numbered: dict[int, GroupRecord] = {}  # the same, by the schedule's number of the key
        self.promised: dict[GroupRecord, None] = {}
        self.in_flight = 0
        self.leased = 0
        self.instructions: list[Instruction] = []
        # Up to how many bytes room is on its way already, and from how many on there is none:
        # until anything is dropped, it is in vain to ask for it again.
        self.in_vain: dict[Pool, tuple[float, float]] = {}
        self._policy = policy
        self._schedule = schedule
        self._prefetcher = prefetcher

    # Groups ------------------------------------------------------------------------------------

    def add(self, group: GroupRecord) -> None:
        """A group is the newest of its key."""
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
        """Nobody can ask for a group any more; see `remove` for when its last copy is gone."""
        group.forgotten = True
        key = group.id.key
        if self.newest.get(key) is group:
            del self.newest[key]
            self._schedule.known.forget(key)
            self._unnumber(group)

    def _unnumber(self, group: GroupRecord) -> None:
        """The number is another's, or nobody's, from now on."""
        self._prefetcher.forget(group.number)
        del self.numbered[group.number]
        group.number = -1

    def remove(self, group: GroupRecord) -> None:
        """The last copy of a forgotten group is gone."""
        del self.groups[group.id]
        self.instructions.append(Forget(group.id))

    # Room --------------------------------------------------------------------------------------

    def pool(self, group: GroupRecord, tier: Tier) -> Pool:
        """Where a copy of `group` on `tier` takes room."""
        return self.shared if group.shared and tier is self.host else self.pools[tier]

    def change_budget(self, tier: Tier, nbytes: int) -> None:
        """A tier has so many bytes from now on."""
        self.budgets[tier] = self.pools[tier].limit = nbytes

    def borrow(self, tier: Tier, nbytes: int) -> None:
        """So many bytes of a tier are used, but by no copy."""
        more = nbytes - self.borrowed[tier]
        self.borrowed[tier] = nbytes
        self.pools[tier].used += more
        self.used[tier] += more
        self.peak[tier] = max(self.peak[tier], self.used[tier])
        self.in_vain.clear()

    def way_up(self, group: GroupRecord, top: Tier) -> list[Pool]:
        """Where a group needs room, now or once memory is short, to come to `top`.

        Others allow what is shared its room, and may allow less by now: what has come that far
        needs none any more.
        """
        saved = [tier for tier in group.copies if tier.persistent]
        lowest = self.above[min(saved)] if saved else self.host
        came = group.shared and any(
            top <= tier <= self.host and copy.state is not State.RESERVED
            for tier, copy in group.copies.items()
        )
        pools = [self.pool(group, tier) for tier in self.tiers if top <= tier <= lowest]
        return [pool for pool in pools if not (came and pool.shared)]

    def refuse_what_never_fits(self, group: GroupId, nbytes: int, pools: Iterable[Pool]) -> None:
        """Raise BudgetError if one of `pools` is too small for it."""
        for pool in pools:
            if pool.limit is not None and nbytes > pool.limit:
                advice = pool.advice(nbytes)
                raise BudgetError(group.key, pool.tier.name, nbytes, pool.limit, advice)

    def largest_in_memory(self) -> int:
        """Bytes of the largest group that no persistent tier has room for yet."""
        groups = self.groups.values()
        only = (g.nbytes for g in groups if not any(tier.persistent for tier in g.copies))
        return max(only, default=0)

    def can_ever_hold(self, group: GroupRecord) -> bool:
        """Whether a group is within all budgets on its way to the top."""
        pools = self.way_up(group, self.top)
        return all(pool.limit is None or group.nbytes <= pool.limit for pool in pools)

    def place(self, group: GroupRecord, tier: Tier, state: State) -> None:
        """Take room for a copy that is there, or for one to come."""
        group.copies[tier] = CopyRecord(state)
        if group.number >= 0:
            self._prefetcher.took(group.number, tier)
        cost = group.cost(tier)
        self.pool(group, tier).used += cost
        self.used[tier] += cost
        self.peak[tier] = max(self.peak[tier], self.used[tier])

    def release_room(self, group: GroupRecord, tier: Tier) -> None:
        """Give the room of a copy back, whatever had been of it."""
        cost = group.cost(tier)
        self.pool(group, tier).used -= cost
        self.used[tier] -= cost
        self.in_vain.clear()
        copy = group.copies.pop(tier)
        if group.number >= 0:
            self._prefetcher.gave_up(group.number, tier)
        if copy.state is not State.RESERVED:
            self.instructions.append(Drop(group.id, group.nbytes, tier))

    def drop(self, group: GroupRecord, tier: Tier) -> None:
        """Give up a copy that was complete."""
        self.release_room(group, tier)
        self._policy.dropped(group.id, tier)

    def keep_only(self, group: GroupRecord, tier: Tier) -> None:
        """Give up all other copies: this one is going to be changed."""
        assert not group.shared, f"{group.id.key} is another process's"
        for other in [t for t in group.copies if t is not tier]:
            self.drop(group, other)
        group.backing = None

    def abandon(self, group: GroupRecord) -> None:
        """Give up room that was set aside and that nothing is on its way to."""
        for tier in [t for t, c in group.copies.items() if c.state is State.RESERVED]:
            self.release_room(group, tier)
        self.promised.pop(group, None)

    # Moves -------------------------------------------------------------------------------------

    def start(self, group: GroupRecord, src: Tier, dst: Tier, *, urgent: bool) -> None:
        """Have a copy made where room was set aside."""
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
        """A move is over. If it is `timed`, it tells how fast its hop is, if it `counts`."""
        copy, hop = group.copies[dst], self._prefetcher.hops[src, dst]
        hop.end(group.nbytes)
        if timed:
            hop.measure(group.nbytes, copy.began, self._prefetcher.now, counts=counts)
        hop.ending -= copy.ending
        group.copies[src].readers -= 1
        self.in_flight -= 1

    def arrive(self, group: GroupRecord, tier: Tier) -> None:
        """A copy is complete from now on."""
        group.copies[tier].state = State.PRESENT
        self._policy.admitted(group.id, tier)

    def grant(self, group: GroupRecord) -> None:
        """Give the room that was set aside in host memory to a caller, who fills it."""
        group.copies[self.host].state = State.ARRIVING
        self.promised.pop(group, None)
        self.in_flight += 1
        self.instructions.append(Reserve(group.id, group.nbytes, self.host))

    def renew(self, group: GroupRecord) -> None:
        """The same, where the caller holds the group, and gives all of it new values."""
        self.arrive(group, self.host)
        self.instructions.append(Reserve(group.id, group.nbytes, self.host))

    # Questions ---------------------------------------------------------------------------------

    def in_use(self, group: GroupRecord, tier: Tier) -> bool:
        """Whether the copy on `tier` is leased, or a transfer reads or writes it."""
        copy = group.copies[tier]
        leased = tier is self.top and group.leases > 0
        leased_in_host = tier is self.host and group.host_lease is not None
        return leased or leased_in_host or copy.readers > 0 or copy.state is State.ARRIVING


def budgets_of(budgets: Mapping[Tier, int | None]) -> dict[Tier, int | None]:
    """A copy of budgets, checked: there must be memory, and something persistent below it."""
    tiers = sorted(budgets)
    if not tiers or tiers[0].persistent or not tiers[-1].persistent:
        raise ValueError(f"no memory above something persistent: {tiers}")
    return dict(budgets)
