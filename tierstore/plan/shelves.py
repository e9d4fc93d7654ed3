"""Which copies exist, how far they are, and the room they take: the planner's books.

Room is taken from the moment a copy is planned, and given back the moment it is dropped. Making
room drops copies that are valid elsewhere, and has others saved one tier down first; which ones go
is the policy's choice, among those that nobody uses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from itertools import islice

from tierstore.model.groups import name_of
from tierstore.model.moves import Copy, Drop, Instruction
from tierstore.model.tiers import Access, Hold, Tier
from tierstore.plan.foresight import Foresight
from tierstore.plan.policy import Policy
from tierstore.plan.records import CopyRecord, GroupRecord, State

SAME_SIZE_AMONG = 128
"""How many of the copies that would be missed least are looked at for one of the size that is
needed: it leaves a slot that need not be made anew. Where memory has to be page-locked, that takes
longer than reading the group. The more are looked at, the more goes that was better kept."""


class Shelves:
    """The copies on the tiers of `budgets` (bytes; None for no limit), and what moves them."""

    def __init__(
        self, budgets: dict[Tier, int | None], policy: Policy, foresight: Foresight
    ) -> None:
        self.tiers = tuple(sorted(budgets))
        self.top = self.tiers[0]
        self.budgets = budgets
        self.used = {tier: 0 for tier in self.tiers}
        self.peak = {tier: 0 for tier in self.tiers}
        self._policy = policy
        self._foresight = foresight
        self._groups: dict[str, GroupRecord] = {}
        self._demands: dict[str, int] = {}  # what somebody insists on, and how many do
        self._claims: dict[str, None] = {}  # what somebody wants to put
        self._fetches: dict[str, list[Hold]] = {}  # what somebody wants to hold in host memory
        self._parting: set[tuple[str, Tier]] = set()  # copies that go when their save is done
        # Up to how many bytes room is on its way already, and from how many on there is none.
        self._in_vain: dict[Tier, tuple[float, float]] = {}
        self._promised: set[str] = set()  # groups with room set aside on the fastest tier
        self._ahead: set[int] = set()  # groups needed sooner than the one being fetched early
        self._instructions: list[Instruction] = []
        self._in_flight = 0

    def _start(self, group: GroupRecord, src: Tier, dst: Tier, *, urgent: bool) -> None:
        group.copies[dst].state = State.ARRIVING
        group.copies[dst].began = self._foresight.now()
        self._foresight.hops[src, dst].begin(group.nbytes)
        if dst is self.top:
            self._promised.discard(group.key)
        group.copies[src].readers += 1
        self._in_flight += 1
        self._instructions.append(Copy(group.key, group.nbytes, src, dst, urgent))

    def _abandon(self, group: GroupRecord) -> None:
        """Give up room that was set aside and that nothing is on its way to."""
        for tier in [t for t, c in group.copies.items() if c.state is State.RESERVED]:
            self._release_room(group, tier)
        self._promised.discard(group.key)

    def _in_use(self, group: GroupRecord, tier: Tier) -> bool:
        copy = group.copies[tier]
        leased = tier is self.top and group.leases > 0
        held = tier is self.tiers[-2] and group.held is not None
        return leased or held or copy.readers > 0 or copy.state is State.ARRIVING

    def _over(
        self, group: GroupRecord, src: Tier | None, dst: Tier, *, came: bool, timed: bool = True
    ) -> None:
        """A transfer is over. There was none (no `src`) if the caller filled the copy."""
        if src is not None:
            began, hop = group.copies[dst].began, self._foresight.hops[src, dst]
            if timed:
                hop.end(group.nbytes, began, self._foresight.now(), counts=came)
            else:
                hop.leave(group.nbytes)
            hop.ending -= group.copies[dst].ending
            group.copies[src].readers -= 1
        self._in_flight -= 1

    # Room --------------------------------------------------------------------------------------

    def _set_aside(self, group: GroupRecord, tier: Tier, rival: str | None) -> bool:
        """Take room for a copy of `group` on `tier`, evicting what must and may go."""
        nbytes = group.cost(tier)
        if not self._free(tier, nbytes) and not self._evict(tier, nbytes, rival):
            return False
        group.copies[tier] = CopyRecord(State.RESERVED)
        if tier is self.top and rival is None:
            self._promised.add(group.key)
        if group.number >= 0:
            self._foresight.took(group.number, tier)
        self._take_room(tier, nbytes)
        return True

    def _free(self, tier: Tier, nbytes: int) -> bool:
        budget = self.budgets[tier]
        return budget is None or self.used[tier] + nbytes <= budget

    def _take_room(self, tier: Tier, nbytes: int) -> None:
        self.used[tier] += nbytes
        self.peak[tier] = max(self.peak[tier], self.used[tier])

    def _release_room(self, group: GroupRecord, tier: Tier) -> None:
        self.used[tier] -= group.cost(tier)
        self._in_vain.clear()
        copy = group.copies.pop(tier)
        if group.number >= 0:
            self._foresight.gave_up(group.number, tier)
        if copy.state is not State.RESERVED:
            self._instructions.append(Drop(group.key, group.nbytes, tier))

    def _drop(self, group: GroupRecord, tier: Tier) -> None:
        self._release_room(group, tier)
        self._policy.dropped(group.key, tier)

    def _keep_only(self, group: GroupRecord, tier: Tier) -> None:
        for other in [t for t in group.copies if t is not tier]:
            self._drop(group, other)
        group.backed = False

    def _evict(self, tier: Tier, nbytes: int, rival: str | None) -> bool:
        """Make room on `tier`. True if it is there now; False if it is not, or not yet."""
        few, many = self._in_vain.get(tier, (0, math.inf)) if rival is None else (0, math.inf)
        if nbytes <= few or nbytes >= many:
            return False
        tried: set[str] = set()
        self._in_vain[tier] = few, many  # until something goes, or is about to
        while (chosen := self._chosen(tier, nbytes, rival, tried)) is not None:
            for group in chosen:
                self._evict_copy(group, tier, nbytes)
            tried |= {group.key for group in chosen}
            if self._free(tier, nbytes - self._leaving(tier)):
                few = nbytes
                break  # otherwise, one of them could not be saved
        else:
            many = many if tried else nbytes
        if rival is None and tier in self._in_vain:
            self._in_vain[tier] = few, many
        return self._free(tier, nbytes)

    def _chosen(
        self, tier: Tier, nbytes: int, rival: str | None, tried: Set[str]
    ) -> list[GroupRecord] | None:
        """Whose copies should go; None if there are not enough that may.

        Beside an accelerator, one of the size that is needed goes before those that are missed a
        little less.
        """
        short = self.used[tier] + nbytes - (self.budgets[tier] or 0)
        if 0 < short <= nbytes and len(self.tiers) > 2 and tier is not Tier.DISK:
            same = self._of_same_size(tier, nbytes, rival, tried)
            if same is not None:
                return [same]
        chosen = []
        for group in self._may_go(tier, rival, tried) if short > 0 else ():
            chosen.append(group)
            short -= group.nbytes
            if short <= 0:
                break
        if rival is None:
            short -= self._leaving(tier)
        return chosen if short <= 0 else None

    def _of_same_size(
        self, tier: Tier, nbytes: int, rival: str | None, tried: Set[str]
    ) -> GroupRecord | None:
        """Of those that need not stay, one of `nbytes` bytes that is not needed much sooner than
        the one that is missed least."""
        first = None
        for group in islice(self._may_go(tier, rival, tried), SAME_SIZE_AMONG):
            first = first or group
            if group.nbytes == nbytes and group.valid_elsewhere(tier):
                staying = group.kept or group.key in self._demands
                about = self._foresight.about_as_far(group.number, first.number)
                return group if about and not staying else None
        return None

    def _may_go(self, tier: Tier, rival: str | None, tried: Set[str]) -> Iterator[GroupRecord]:
        """Those that may be evicted and were not tried yet, the one missed least first."""
        for group in self._candidates(tier, rival):
            if group.key not in tried and self._evictable(group, tier, rival):
                yield group

    def _candidates(self, tier: Tier, rival: str | None) -> Iterator[GroupRecord]:
        """In the policy's order, but what should be kept late, and a demand's own source last."""
        kept, going_up = [], []
        for key in self._policy.victims(tier, rival):
            group = self._groups[key]
            if key in self._demands and not group.present(self.top):
                going_up.append(group)
            elif group.kept and tier is self.tiers[-2]:
                kept.append(group)
            else:
                yield group
        if rival is None or self._groups[rival].kept:
            yield from kept
        yield from going_up

    def _evict_copy(self, group: GroupRecord, tier: Tier, nbytes: int) -> None:
        if group.valid_elsewhere(tier):
            self._drop(group, tier)
        elif not self._free(tier, nbytes - self._leaving(tier)) and self._put_away(group, tier):
            group.copies[tier].unwanted = True
            self._note_parting(group, tier)

    def _put_away(self, group: GroupRecord, tier: Tier) -> bool:
        """See that the copy on `tier` may go: True if it may, or will when a save is done."""
        if group.valid_elsewhere(tier) or group.exclusive:
            return True
        below = self.tiers[self.tiers.index(tier) + 1]
        copy = group.copies.get(below)
        if copy is not None and copy.state is not State.RESERVED:
            return True
        if copy is None and not self._set_aside(group, below, None):
            return False
        self._start(group, tier, below, urgent=True)
        return True

    def _evictable(self, group: GroupRecord, tier: Tier, rival: str | None) -> bool:
        copy = group.copies[tier]
        if self._in_use(group, tier) or copy.unwanted or tier is Tier.DISK:
            return False
        if group.key in self._promised or (rival is not None and group.number in self._ahead):
            return False  # it is the source of a copy on its way up, or needed sooner
        if self._is_wanted(group.key, tier):
            return False  # its waiter is about to wake up and lease it
        return rival is None or group.valid_elsewhere(tier)

    def _is_wanted(self, key: str, tier: Tier) -> bool:
        """Whether somebody waits for the copy on `tier`."""
        return (tier is self.top and key in self._demands) or (
            tier is self.tiers[-2] and key in self._fetches
        )

    def _note_parting(self, group: GroupRecord, tier: Tier) -> None:
        self._parting.add((group.key, tier))
        self._in_vain.clear()

    def _leaving(self, tier: Tier) -> int:
        """Bytes of `tier` that go as soon as a save that is under way is done."""
        if not self._parting:
            return 0
        self._parting = {(key, t) for key, t in self._parting if self._is_parting(key, t)}
        return sum(self._groups[key].nbytes for key, t in self._parting if t is tier)

    def _is_parting(self, key: str, tier: Tier) -> bool:
        group = self._groups.get(key)
        copy = group.copies.get(tier) if group else None
        return group is not None and copy is not None and copy.unwanted and copy.readers > 0

    # The promises ------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert the five promises. Costs a walk over all groups: for tests."""
        for tier in self.tiers:
            groups = [g for g in self._groups.values() if tier in g.copies]
            held = sum(g.cost(tier) for g in groups)
            budget = self.budgets[tier]
            assert held == self.used[tier], f"{tier.name}: holds {held}, counts {self.used[tier]}"
            assert budget is None or held <= budget, f"{tier.name}: {held} over {budget}"
        for group in self._groups.values():
            self._check_group(group)

    def _check_group(self, group: GroupRecord) -> None:
        key = name_of(group.key)
        valid = [tier for tier in self.tiers if group.present(tier)]
        known = not group.forgotten and group.key not in self._claims
        assert valid or not known, f"{key} is nowhere"
        assert group.present(self.top) or not group.leases, f"{key} is leased but not there"
        assert group.present(self.tiers[-2]) or not group.held, f"{key} is held but not there"
        assert not (group.held and group.exclusive), f"{key} is held beside its changer"
        for tier, copy in group.copies.items():
            reading = copy.readers > 0
            assert copy.state is State.PRESENT or not reading, f"{key} is read before it is there"
            unused = not self._in_use(group, tier)
            assert not (copy.unwanted and unused), f"{key} on {tier.name} should be gone"
            assert not (group.forgotten and unused), f"{key} on {tier.name} is forgotten"
        if group.exclusive:
            assert group.leases == 1, f"{key} is lent to {group.leases} beside its changer"
        if group.exclusive is Access.UPDATE:
            assert len(group.copies) == 1, f"{key} is being changed and has several copies"
