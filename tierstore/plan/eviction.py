"""Eviction: frees space by dropping copies, saving them one tier down first if necessary.

A copy that is valid on another tier is dropped at once; any other is saved first. The policy
chooses among the copies that are not in use.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from itertools import islice

from tierstore.model.tiers import Tier
from tierstore.plan.copies import CopyTable
from tierstore.plan.policy import Policy
from tierstore.plan.pools import Pool
from tierstore.plan.prefetch import Prefetcher
from tierstore.plan.records import GroupRecord, State
from tierstore.plan.requests import Requests

SAME_SIZE_AMONG = 128
"""Number of best victims to search for one of exactly the needed size.

Its slot can be reused directly; where memory must be page-locked, allocating a new slot takes
longer than reading the group. A longer search evicts more copies that should have stayed.
"""


@dataclass(eq=False, slots=True)
class Eviction:
    """Reserves space for new copies by evicting others.

    A `rival` is a group that is prefetched: it must not evict what is needed sooner, and nothing is
    saved to make space for it. If `rival` is None, a caller waits, and every copy that is not in
    use may be evicted.
    """

    _copies: CopyTable
    _requests: Requests
    _policy: Policy
    _prefetcher: Prefetcher
    needed_sooner: set[int] = field(default_factory=set)  # numbers of groups used before the rival
    # Copies to drop when their save is done.
    _leaving: set[tuple[GroupRecord, Tier]] = field(default_factory=set)

    def reserve_space(
        self, group: GroupRecord, tier: Tier, rival: GroupRecord | None = None
    ) -> bool:
        """Reserve space for a copy of `group` on `tier`, evicting others if necessary.

        Returns whether it succeeded.
        """
        copies = self._copies
        nbytes, pool = group.cost(tier), copies.pool(group, tier)
        if not pool.has_space(nbytes) and not self._evict(pool, nbytes, rival):
            return False
        copies.place(group, tier, State.RESERVED)
        if tier is copies.top and rival is None:
            copies.promised[group] = None
        return True

    def save_below(self, group: GroupRecord, tier: Tier) -> bool:
        """Save the copy on `tier` one tier down if it is the only valid one.

        Returns True if it may be dropped, now or when that save is done.
        """
        if group.valid_elsewhere(tier) or group.exclusive:
            return True
        below = self._copies.below[tier]
        copy = group.copies.get(below)
        if copy is not None and copy.state is not State.RESERVED:
            return True
        if copy is None and not self.reserve_space(group, below):
            return False
        self._copies.start(group, tier, below, urgent=True)
        return True

    def drop_when_saved(self, group: GroupRecord, tier: Tier) -> None:
        """Drop the copy on `tier` as soon as it is not in use and another one is valid."""
        group.copies[tier].unwanted = True
        self._leaving.add((group, tier))
        self._copies.blocked_sizes.clear()

    def may_be_dropped(self, group: GroupRecord, tier: Tier, rival: GroupRecord | None) -> bool:
        """Return whether the copy on `tier` may be evicted, after a save if it is the only one."""
        if self._copies.in_use(group, tier) or group.copies[tier].unwanted:
            return False
        if tier not in self._copies.below or tier is group.backing:
            return False
        if group in self._copies.promised:
            return False  # it is the source of a copy on its way up
        if rival is not None and group.number in self.needed_sooner:
            return False
        if rival is not None and group in self._requests.saves:
            return False  # it is half-way down, and would be fetched again
        if self._requests.is_waited_for(group, tier):
            return False  # its waiter is about to wake up and lease it
        return rival is None or group.valid_elsewhere(tier)

    def drop_idle(self, pool: Pool, most: int) -> None:
        """Drop idle copies that are valid elsewhere until `pool` uses at most `most` bytes."""
        if pool.used <= most:
            return
        for group in list(self._candidates(pool, None)):
            droppable = self.may_be_dropped(group, pool.tier, None)
            if droppable and group.valid_elsewhere(pool.tier):
                self._copies.drop(group, pool.tier)
            if pool.used <= most:
                break

    def _candidates(self, pool: Pool, rival: GroupRecord | None) -> Iterator[GroupRecord]:
        """Yield the policy's victims, with sticky groups late and sources of demands last."""
        sticky, going_up = [], []
        demands, copies, tier = self._requests.demands, self._copies, pool.tier
        for group_id in self._policy.victims(tier, None if rival is None else rival.id):
            group = copies.groups[group_id]
            if tier is copies.host and group.shared is not pool.shared:
                continue  # it is in the other pool
            if group in demands and not group.present(copies.top):
                going_up.append(group)
            elif group.sticky and tier is copies.host:
                sticky.append(group)
            else:
                yield group
        if rival is None or rival.sticky:
            yield from sticky
        yield from going_up

    def _evict(self, pool: Pool, nbytes: int, rival: GroupRecord | None) -> bool:
        """Evict until `pool` has `nbytes` bytes of space. Returns whether it has them now."""
        blocked_sizes = self._copies.blocked_sizes
        few, many = blocked_sizes.get(pool, (0, math.inf)) if rival is None else (0, math.inf)
        if nbytes <= few or nbytes >= many:
            return False
        tried: set[GroupRecord] = set()
        blocked_sizes[pool] = few, many  # until a copy is dropped, or is about to be
        while (chosen := self._chosen(pool, nbytes, rival, tried)) is not None:
            for group in chosen:
                self._evict_copy(group, pool, nbytes)
            tried.update(chosen)
            if pool.has_space(nbytes - self._bytes_leaving(pool)):
                few = nbytes
                break  # else some victim could not be saved: try others
        else:
            many = many if tried else nbytes
        if rival is None and pool in blocked_sizes:
            blocked_sizes[pool] = few, many
        return pool.has_space(nbytes)

    def _evict_copy(self, group: GroupRecord, pool: Pool, nbytes: int) -> None:
        tier = pool.tier
        if group.valid_elsewhere(tier):
            self._copies.drop(group, tier)
        elif not pool.has_space(nbytes - self._bytes_leaving(pool)) and self.save_below(
            group, tier
        ):
            self.drop_when_saved(group, tier)

    def _chosen(
        self, pool: Pool, nbytes: int, rival: GroupRecord | None, tried: Set[GroupRecord]
    ) -> list[GroupRecord] | None:
        """Return the groups whose copies to evict; None if too few may be evicted.

        On the host of an accelerator, a copy of exactly the needed size is preferred to slightly
        better victims.
        """
        copies = self._copies
        short = pool.used + nbytes - (pool.limit or 0)
        beside_an_accelerator = copies.top is not copies.host and not pool.tier.persistent
        if 0 < short <= nbytes and beside_an_accelerator:
            same = self._of_same_size(pool, nbytes, rival, tried)
            if same is not None:
                return [same]
        chosen = []
        for group in self._may_go(pool, rival, tried) if short > 0 else ():
            chosen.append(group)
            short -= group.nbytes
            if short <= 0:
                break
        if rival is None:
            short -= self._bytes_leaving(pool)
        return chosen if short <= 0 else None

    def _of_same_size(
        self, pool: Pool, nbytes: int, rival: GroupRecord | None, tried: Set[GroupRecord]
    ) -> GroupRecord | None:
        """Return a victim of exactly `nbytes` bytes that is almost as good as the best one."""
        first = None
        for group in islice(self._may_go(pool, rival, tried), SAME_SIZE_AMONG):
            first = first or group
            if group.nbytes == nbytes and group.valid_elsewhere(pool.tier):
                staying = group.sticky or group in self._requests.demands
                about = self._prefetcher.about_as_far(group.number, first.number)
                return group if about and not staying else None
        return None

    def _may_go(
        self, pool: Pool, rival: GroupRecord | None, tried: Set[GroupRecord]
    ) -> Iterator[GroupRecord]:
        """Yield the groups that may be evicted and are not in `tried`, the best victim first."""
        for group in self._candidates(pool, rival):
            if group not in tried and self.may_be_dropped(group, pool.tier, rival):
                yield group

    def _bytes_leaving(self, pool: Pool) -> int:
        """Return the bytes of `pool` that will be freed by saves in progress."""
        if not self._leaving:
            return 0
        self._leaving = {(group, t) for group, t in self._leaving if _is_leaving(group, t)}
        return sum(
            group.nbytes for group, tier in self._leaving if self._copies.pool(group, tier) is pool
        )


def _is_leaving(group: GroupRecord, tier: Tier) -> bool:
    copy = group.copies.get(tier)
    return copy is not None and copy.unwanted and copy.readers > 0
