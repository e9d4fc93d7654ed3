"""Independent books: the state after a carrier has executed exactly the planner's instructions.

The books never look into the planner. They replay its instructions in order, and reject the first
one that breaks a promise. Every copy has the version of the bytes that it holds, which an UPDATE
increases, so a stale copy is noticed when it is read or leased.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tierstore.model.groups import GroupId
from tierstore.model.moves import Copy, Drop, Forget, Instruction, Reserve
from tierstore.model.tiers import Access, HostAccess, Tier


@dataclass
class Held:
    """A copy: the version of the bytes it holds, None while they are on their way."""

    cost: int
    version: int | None = None
    readers: int = 0
    lost: bool = False  # its transfer failed or its caller withdrew: it never becomes complete


@dataclass
class Entry:
    """The reference state of one group."""

    group: GroupId
    nbytes: int
    backing: Tier | None = None  # the tier where a user's file holds its bytes
    version: int = 0
    copies: dict[Tier, Held] = field(default_factory=dict)
    leases: list[Access] = field(default_factory=list)
    demands: int = 0
    claimed: bool = False
    discarded: bool = False
    offloaded: bool = False
    fetches: int = 0
    renewed: bool = False  # by its host lease: no copy has the new values yet
    held: bool = False
    away: set[Tier] = field(default_factory=set)  # the tiers it was on when it was moved to disk
    shared: bool = False  # in host memory it takes the space of another process

    def complete(self, tier: Tier) -> bool:
        """Return whether `tier` has the newest bytes."""
        copy = self.copies.get(tier)
        return copy is not None and copy.version == self.version

    def saved(self) -> bool:
        """Return whether a persistent tier has the newest bytes."""
        return any(tier.persistent and self.complete(tier) for tier in self.copies)

    def moving(self) -> bool:
        """Return whether a transfer or its caller reads or writes any of its copies."""
        return any(copy.readers or copy.version is None for copy in self.copies.values())

    def exclusive(self) -> bool:
        """Return whether it is leased for update."""
        return any(access is not Access.READ for access in self.leases)


class Books:
    """Every group, the bytes on every tier, and the copies on their way."""

    def __init__(self, budgets: Mapping[Tier, int | None]) -> None:
        self.budgets = dict(budgets)
        self.tiers = sorted(budgets)
        self.top = self.tiers[0]
        self.host = [tier for tier in self.tiers if not tier.persistent][-1]
        self.used = dict.fromkeys(self.tiers, 0)
        self.carved_out = dict.fromkeys(self.tiers, 0)  # bytes of no copy
        self.shared_budget = self.shared_used = 0  # in host memory, outside its budget
        self.entries: dict[GroupId, Entry] = {}
        self.moving: list[Copy] = []
        self.followed: list[Instruction] = []

    # Calls of the planner ----------------------------------------------------------------------

    def registered(
        self, key: GroupId, nbytes: int, tier: Tier, *, backed: bool, shared: bool = False
    ) -> None:
        self.entries[key] = Entry(key, nbytes, tier if backed else None, shared=shared)
        self._take(self.entries[key], tier)
        self.entries[key].copies[tier].version = 0

    def claimed(self, key: GroupId, nbytes: int) -> None:
        self.entries[key] = Entry(key, nbytes, claimed=True)

    def filled(self, key: GroupId) -> None:
        entry = self.entries[key]
        entry.claimed = False
        entry.copies[self.host].version = entry.version

    def discarded(self, key: GroupId) -> None:
        entry = self.entries[key]
        entry.discarded, entry.offloaded, entry.away = True, False, set()

    def withdrew_claim(self, key: GroupId) -> None:
        self.discarded(key)
        for copy in self.entries[key].copies.values():
            copy.lost = True

    def offloaded(self, key: GroupId) -> None:
        self.entries[key].offloaded = self.top in self.entries[key].copies

    def may_lease(self, key: GroupId, access: Access) -> bool:
        """Return exactly the answer that the planner must give."""
        entry = self.entries[key]
        if entry.discarded or entry.exclusive() or not entry.complete(self.top):
            return False
        return access is Access.READ or not (entry.leases or entry.held or entry.moving())

    def leased(self, key: GroupId, access: Access) -> None:
        entry = self.entries[key]
        entry.leases.append(access)
        if access is Access.UPDATE:
            entry.version += 1
            entry.backing = None
            entry.copies[self.top].version = entry.version

    def may_hold(self, key: GroupId, purpose: HostAccess) -> bool | None:
        """Return the answer to a request for a host lease, or None if it depends on free space."""
        entry = self.entries[key]
        if entry.held or entry.leases or entry.moving():
            return False
        if purpose is HostAccess.RENEW and self.host not in entry.copies:
            return None
        return entry.complete(self.host)

    def took_hold(self, key: GroupId, purpose: HostAccess) -> None:
        """Record an update: later copies have the new bytes."""
        entry = self.entries[key]
        entry.held = True
        if purpose is HostAccess.READ:
            return
        entry.backing, entry.away = None, set()
        entry.version += 1
        if self.host in entry.copies:
            entry.copies[self.host].version = entry.version
        else:
            entry.renewed = True

    def put_away(self, key: GroupId) -> None:
        entry = self.entries[key]
        if not (entry.demands or entry.fetches):
            entry.away = {tier for tier in entry.copies if not tier.persistent}

    def wanted(self, key: GroupId) -> None:
        """Record a request: copies that were about to leave may stay."""
        self.entries[key].offloaded, self.entries[key].away = False, set()

    def delivered(self, move: Copy) -> None:
        entry = self._landed(move)
        entry.copies[move.dst].version = entry.copies[move.src].version

    def failed(self, move: Copy) -> None:
        entry = self._landed(move)
        entry.copies[move.dst].lost = True
        entry.offloaded, entry.away = False, set()

    def _landed(self, move: Copy) -> Entry:
        self.moving.remove(move)
        entry = self.entries[move.group]
        entry.copies[move.src].readers -= 1
        return entry

    # Instructions ------------------------------------------------------------------------------

    def follow(self, instruction: Instruction) -> None:
        """Follow an instruction, and raise if it breaks a promise."""
        self.followed.append(instruction)
        assert instruction.group in self.entries, f"{instruction}: no such group"
        entry = self.entries[instruction.group]
        match instruction:
            case Forget():
                assert entry.discarded, f"{instruction}: it was not discarded"
                assert not (entry.copies or entry.leases), f"{instruction}: it still has copies"
                del self.entries[entry.group]
            case Reserve(tier=tier):
                assert entry.claimed or entry.renewed, f"{instruction}: it was not claimed"
                self._take(entry, tier)
                if entry.renewed:
                    entry.renewed = False
                    entry.copies[tier].version = entry.version
            case Copy():
                self._copy(entry, instruction)
            case Drop(tier=tier):
                self._drop(entry, tier)

    def _copy(self, entry: Entry, move: Copy) -> None:
        assert move.nbytes == entry.nbytes, f"{move}: wrong size"
        assert not entry.discarded, f"{move}: the group is no longer wanted"
        assert entry.complete(move.src), f"{move}: its source is stale, incomplete or missing"
        assert not entry.exclusive(), f"{move}: its group is lent to somebody who must be alone"
        places = self.tiers.index(move.src), self.tiers.index(move.dst)
        assert abs(places[0] - places[1]) == 1, f"{move}: skips a tier"
        if move.dst > move.src:
            clean = [tier for tier in self.tiers if tier >= move.dst and entry.complete(tier)]
            assert not clean, f"{move}: a clean group is copied down"
        self._take(entry, move.dst)
        entry.copies[move.src].readers += 1
        self.moving.append(move)

    def _take(self, entry: Entry, tier: Tier) -> None:
        assert tier not in entry.copies, f"{entry.group} is already on {tier.name}"
        cost = 0 if tier is entry.backing else entry.nbytes
        entry.copies[tier] = Held(cost)
        self.used[tier] += cost
        if entry.shared and tier is self.host:
            self.shared_used += cost
            over = self.shared_used > self.shared_budget
            assert not over, f"others lent {self.shared_used} bytes of {self.shared_budget}"
            return
        budget, used = self.budgets[tier], self.own(tier)
        assert budget is None or used <= budget, f"{tier.name} holds {used} bytes of {budget}"

    def own(self, tier: Tier) -> int:
        """Return the bytes that count against the budget of a tier."""
        shared = self.shared_used if tier is self.host else 0
        return self.used[tier] + self.carved_out[tier] - shared

    def _drop(self, entry: Entry, tier: Tier) -> None:
        assert tier in entry.copies, f"{entry.group} is not on {tier.name}: dropped twice"
        copy = entry.copies[tier]
        assert not copy.readers, f"{entry.group} on {tier.name} is dropped while it is read"
        if not copy.lost:
            self._assert_may_go(entry, tier)
        self.used[tier] -= copy.cost
        self.shared_used -= copy.cost if entry.shared and tier is self.host else 0
        del entry.copies[tier]
        entry.away.discard(tier)
        if tier is self.top:
            entry.offloaded = False
        others = any(entry.complete(other) for other in self.tiers)
        assert others or entry.discarded, f"{entry.group} lost its last copy on {tier.name}"

    def _assert_may_go(self, entry: Entry, tier: Tier) -> None:
        where = f"{entry.group} on {tier.name}"
        users = tier is entry.backing and not entry.discarded
        assert not users, f"{where} is dropped although it takes no space there"
        assert entry.copies[tier].version is not None, f"{where} is dropped while it is written"
        stale = entry.copies[tier].version != entry.version  # another copy is being changed
        if tier is self.top:
            assert not entry.leases, f"{where} is dropped while it is leased"
            awaited = entry.demands and not entry.discarded and not stale
            assert not awaited, f"{where} is dropped before its waiter woke up"
        if tier is self.host:
            assert not entry.held, f"{where} is dropped while it is held"
            awaited = entry.fetches and not entry.discarded and not stale
            assert not awaited, f"{where} is dropped before who wants to hold it woke up"

    # Invariants between steps ------------------------------------------------------------------

    def inspect(self) -> None:
        """Check the promises that span several instructions."""
        for entry in self.entries.values():
            self._inspect(entry)
            over = entry.discarded and not entry.copies
            assert not over, f"{entry.group} should have been forgotten"

    def _inspect(self, entry: Entry) -> None:
        where = sorted(entry.copies)
        if entry.leases:
            assert entry.complete(self.top), f"{entry.group} is leased but not resident"
        if Access.UPDATE in entry.leases:
            assert where == [self.top], f"{entry.group} is being changed and on {where}"
        if entry.held:
            assert entry.complete(self.host), (
                f"{entry.group} is leased in host memory but not resident"
            )
        unused = [tier for tier in where if not self._in_use(entry, tier)]
        if entry.saved() and not (entry.demands or entry.fetches):
            left = entry.away.intersection(unused)
            assert not left, f"{entry.group} was put away, but is on {left}"
        assert not (entry.discarded and unused), f"{entry.group} is discarded, but on {unused}"
        saved = any(entry.complete(tier) for tier in where if tier is not self.top)
        awaited = entry.demands or (entry.fetches and self.top is self.host)
        if entry.offloaded and saved and not awaited:
            assert self.top not in unused, f"{entry.group} was to leave {self.top.name}"

    def _in_use(self, entry: Entry, tier: Tier) -> bool:
        copy = entry.copies[tier]
        leased = tier is self.top and bool(entry.leases)
        held = tier is self.host and entry.held
        return leased or held or copy.readers > 0 or copy.version is None

    def known(self) -> list[GroupId]:
        """Return the groups that any caller may use."""
        return [k for k, e in self.entries.items() if not (e.discarded or e.claimed)]

    def held_for_good_leave(self, nbytes: int, held: int) -> bool:
        """Return whether `nbytes` fit into host memory beside the groups held permanently."""
        budget = self.budgets[self.host]
        return budget is None or held + nbytes <= budget

    def never_comes_up(self, key: GroupId, goal: Tier) -> bool:
        """Return whether a group is too large for a tier that it must occupy.

        These are the memory tiers from `goal` on, and each persistent tier above all tiers that
        have it, which it must pass through.
        """
        entry = self.entries[key]
        for tier in self.tiers[self.tiers.index(goal) :]:
            if tier.persistent and tier in entry.copies:
                return False
            passes = tier <= self.host or any(there > tier for there in entry.copies)
            budget = self.budgets[tier]
            if entry.shared and tier is self.host:
                came = any(goal <= there <= tier for there in entry.copies)
                budget = None if came else self.shared_budget
            if passes and budget is not None and entry.nbytes > budget:
                return True
        return False

    def disk_is_tight(self) -> bool:
        """Return whether a group without a file no longer fits on the disk.

        Copies on a persistent tier can move to the one below, so that only the last one may be
        full; but one above it may be too small for a group that has to pass through.
        """
        unsaved = [e.nbytes for e in self.entries.values() if not e.complete(self.tiers[-1])]
        budget = self.budgets[self.tiers[-1]]
        full = budget is not None and self.used[self.tiers[-1]] + max(unsaved, default=0) > budget
        return full or any(self._is_too_small(tier) for tier in self.tiers[:-1] if tier.persistent)

    def _is_too_small(self, tier: Tier) -> bool:
        missing = [e.nbytes for e in self.entries.values() if not e.complete(tier)]
        budget = self.budgets[tier]
        return budget is not None and max(missing, default=0) > budget
