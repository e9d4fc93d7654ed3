"""Making room: which copies go, and which are saved one tier down before.

Copies that are valid elsewhere are dropped; others have to be saved first. Which ones go is the
policy's choice, among those that nobody uses.
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
"""How many of the copies that would be missed least are looked at for one of the size that is
needed: it leaves a slot that need not be made anew. Where memory has to be page-locked, that takes
longer than reading the group. The more are looked at, the more goes that was better kept."""


@dataclass(eq=False, slots=True)
class Eviction:
    """Takes room for new copies, at the cost of others.

    A `rival` is a group that is fetched early: it takes no room from what is needed sooner, and
    nothing is saved for it. None: somebody waits, and whatever nobody uses may go.
    """

    _copies: CopyTable
    _requests: Requests
    _policy: Policy
    _prefetcher: Prefetcher
    needed_sooner: set[int] = field(default_factory=set)  # than the rival: numbers of groups
    # Copies that go when their save is done.
    _leaving: set[tuple[GroupRecord, Tier]] = field(default_factory=set)

    def set_aside(self, group: GroupRecord, tier: Tier, rival: GroupRecord | None = None) -> bool:
        """Take room for a copy of `group` on `tier`, evicting what must and may go."""
        copies = self._copies
        nbytes, pool = group.cost(tier), copies.pool(group, tier)
        if not pool.has_room(nbytes) and not self._evict(pool, nbytes, rival):
            return False
        copies.place(group, tier, State.RESERVED)
        if tier is copies.top and rival is None:
            copies.promised[group] = None
        return True

    def save_below(self, group: GroupRecord, tier: Tier) -> bool:
        """See that the copy on `tier` may go: True if it may, or will when a save is done."""
        if group.valid_elsewhere(tier) or group.exclusive:
            return True
        below = self._copies.below[tier]
        copy = group.copies.get(below)
        if copy is not None and copy.state is not State.RESERVED:
            return True
        if copy is None and not self.set_aside(group, below):
            return False
        self._copies.start(group, tier, below, urgent=True)
        return True

    def leave_when_saved(self, group: GroupRecord, tier: Tier) -> None:
        """The copy on `tier` goes as soon as nothing uses it and another is valid."""
        group.copies[tier].unwanted = True
        self._leaving.add((group, tier))
        self._copies.in_vain.clear()

    def may_be_dropped(self, group: GroupRecord, tier: Tier, rival: GroupRecord | None) -> bool:
        """Whether the copy on `tier` may make room, saved before if it is the only one."""
        if self._copies.in_use(group, tier) or group.copies[tier].unwanted:
            return False
        if tier not in self._copies.below or tier is group.backing:
            return False
        if group in self._copies.promised:
            return False  # it is the source of a copy on its way up
        if rival is not None and group.number in self.needed_sooner:
            return False
        if rival is not None and group in self._requests.saves:
            return False  # it is half-way down, and would come again
        if self._requests.is_waited_for(group, tier):
            return False  # its waiter is about to wake up and lease it
        return rival is None or group.valid_elsewhere(tier)

    def drop_idle(self, pool: Pool, most: int) -> None:
        """Drop what nobody uses and is valid elsewhere, until at most so many bytes are used."""
        if pool.used <= most:
            return
        for group in list(self._candidates(pool, None)):
            droppable = self.may_be_dropped(group, pool.tier, None)
            if droppable and group.valid_elsewhere(pool.tier):
                self._copies.drop(group, pool.tier)
            if pool.used <= most:
                break

    def _candidates(self, pool: Pool, rival: GroupRecord | None) -> Iterator[GroupRecord]:
        """In the policy's order, but what is sticky late, and a demand's own source last."""
        sticky, going_up = [], []
        demands, copies, tier = self._requests.demands, self._copies, pool.tier
        for group_id in self._policy.victims(tier, None if rival is None else rival.id):
            group = copies.groups[group_id]
            if tier is copies.host and group.shared is not pool.shared:
                continue  # its room is elsewhere
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
        """Make room in `pool`. True if it is there now; False if it is not, or not yet."""
        in_vain = self._copies.in_vain
        few, many = in_vain.get(pool, (0, math.inf)) if rival is None else (0, math.inf)
        if nbytes <= few or nbytes >= many:
            return False
        tried: set[GroupRecord] = set()
        in_vain[pool] = few, many  # until something goes, or is about to
        while (chosen := self._chosen(pool, nbytes, rival, tried)) is not None:
            for group in chosen:
                self._evict_copy(group, pool, nbytes)
            tried.update(chosen)
            if pool.has_room(nbytes - self._bytes_leaving(pool)):
                few = nbytes
                break  # otherwise, one of them could not be saved
        else:
            many = many if tried else nbytes
        if rival is None and pool in in_vain:
            in_vain[pool] = few, many
        return pool.has_room(nbytes)

    def _evict_copy(self, group: GroupRecord, pool: Pool, nbytes: int) -> None:
        tier = pool.tier
        if group.valid_elsewhere(tier):
            self._copies.drop(group, tier)
        elif not pool.has_room(nbytes - self._bytes_leaving(pool)) and self.save_below(group, tier):
            self.leave_when_saved(group, tier)

    def _chosen(
        self, pool: Pool, nbytes: int, rival: GroupRecord | None, tried: Set[GroupRecord]
    ) -> list[GroupRecord] | None:
        """Whose copies should go; None if there are not enough that may.

        Beside an accelerator, one of the size that is needed goes before those that are missed a
        little less.
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
        """Of those that need not stay, one of `nbytes` bytes that is not needed much sooner than
        the one that is missed least."""
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
        """Those that may be evicted and were not tried yet, the one missed least first."""
        for group in self._candidates(pool, rival):
            if group not in tried and self.may_be_dropped(group, pool.tier, rival):
                yield group

    def _bytes_leaving(self, pool: Pool) -> int:
        """Bytes of `pool` that go as soon as a save that is under way is done."""
        if not self._leaving:
            return 0
        self._leaving = {(group, t) for group, t in self._leaving if _is_leaving(group, t)}
        return sum(
            group.nbytes for group, tier in self._leaving if self._copies.pool(group, tier) is pool
        )


def _is_leaving(group: GroupRecord, tier: Tier) -> bool:
    copy = group.copies.get(tier)
    return copy is not None and copy.unwanted and copy.readers > 0
