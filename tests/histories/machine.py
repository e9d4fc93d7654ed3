"""A store and its carriers, simulated by a test: any caller, any order, any failure.

`World` makes one planner step at a time and updates the books. `play` draws a random history of
such steps from a seed. `World.finish` asserts liveness.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.histories.books import Books
from tests.histories.logs import write_log
from tierstore.errors import BudgetError
from tierstore.model import events
from tierstore.model.groups import GroupId
from tierstore.model.moves import Copy, Instruction
from tierstore.model.tiers import Access, HostAccess, Tier, UseOrder
from tierstore.plan.planner import Planner
from tierstore.plan.policy import Policy, policy_named
from tierstore.plan.schedule import LearnedOrder

ROUNDS = 2000
"""More rounds than any history needs to come to rest."""

MEMORY = 64
"""Number of uses that the schedule of a world remembers."""

Kind = Callable[[Mapping[Tier, int | None], Policy, LearnedOrder], Planner]
"""`Planner`, or a class that behaves like it, such as those of `mutants`."""


@dataclass(eq=False)
class Waiter:
    """A caller that demanded `key` and has no answer yet."""

    key: GroupId
    access: Access


@dataclass(eq=False)
class Holder:
    """A caller that has or requests a host lease of `key`."""

    key: GroupId
    purpose: HostAccess


@dataclass(eq=False)
class Saver:
    """A caller that waits until `key` is on disk. The first true answer counts."""

    key: GroupId
    answer: BaseException | bool | None = None


class InjectedError(Exception):
    """A transfer failed because the test said so."""


class World:
    """The planner, its books, and all callers that wait."""

    def __init__(
        self,
        budgets: Mapping[Tier, int | None],
        policy: str | Callable[[LearnedOrder], Policy] = "next-use",
        planner: Kind = Planner,
        *,
        routed: bool = False,
    ) -> None:
        self.now = 0.0
        self._budgets_given, self.policy, self._kind = dict(budgets), policy, planner
        self.planner = self._new_planner()
        self.books = Books(budgets)
        self.waiters: list[Waiter] = []
        self.leases: list[Waiter] = []
        self.claims: list[GroupId] = []
        self.fetchers: list[Holder] = []
        self.holders: list[Holder] = []
        self.savers: list[Saver] = []
        self.errors: list[tuple[GroupId, BaseException]] = []
        self.sound = True
        self.log: list[tuple[float, events.Event]] = []  # of this planner
        self.told: list[list[Instruction]] = []  # by event of the log
        self._guided: set[GroupId] = set()
        self._routed = routed
        self._versions = 0
        self._injected: list[BaseException] = []
        self._excused: set[int] = set()

    def _new_planner(self) -> Planner:
        schedule, policy = LearnedOrder(memory=MEMORY), self.policy
        named = isinstance(policy, str)
        chosen = policy_named(policy, schedule, self._budgets_given) if named else policy(schedule)
        return self._kind(self._budgets_given, chosen, schedule)

    # One step ----------------------------------------------------------------------------------

    def step(self, event: events.Event) -> None:
        """Pass an event to the planner, follow its instructions, and check all promises."""
        self.sound = False
        self.now += 1.0  # constant step time: the planner learns times and plans by them
        self._handle(event)
        self.sound = True

    def _handle(self, event: events.Event) -> None:
        self.log.append((self.now, event))  # first, as it may be the step that fails
        try:
            instructions = self.planner.handle(event, self.now)
        except BudgetError:
            self.log.pop()  # no state has changed
            raise
        self.told.append(instructions)
        self._follow(instructions)

    def _follow(self, instructions: Sequence[Instruction] = ()) -> None:
        for instruction in instructions:
            self.books.follow(instruction)
        self.planner.check()
        self.books.inspect()
        self._compare()
        self._excuse_full_tiers()
        for saver in self.savers:
            saver.answer = saver.answer or self._answer_to(saver.key)

    def _answer_to(self, key: GroupId) -> BaseException | bool | None:
        """Return whether a save of `key` is done, or its error."""
        entry = self.books.entries.get(key)
        if entry is None or entry.discarded:
            return KeyError(key)
        return self.planner.saved(key) or self.planner.error_of(key)

    def _compare(self) -> None:
        books, planner = self.books, self.planner
        for key in books.known():
            there = tuple(tier for tier in books.tiers if books.entries[key].complete(tier))
            assert planner.residence(key) == there, f"{key} is complete on {there}"
        for tier in books.tiers:
            assert planner.used[tier] >= books.used[tier], f"{tier.name} is counted too low"
        entries = books.entries.values()
        filling = any(entry.claimed and entry.copies for entry in entries)
        idle = not books.moving and not filling
        assert planner.idle() == idle, f"idle is {idle}: an instruction was lost, or made twice"

    def _excuse_full_tiers(self) -> None:
        """Excuse demands that fail for lack of space, if the disk has none at this moment."""
        wanted = {w.key for w in self.waiters} | set(self.claims) | {s.key for s in self.savers}
        wanted |= {f.key for f in self.fetchers}
        for key in wanted & self.books.entries.keys():
            error = self.planner.error_of(key) if key in self.planner else None
            if isinstance(error, BudgetError) and id(error) not in self._excused:
                tight = self.books.disk_is_tight() or not self.fits_beside_held(key)
                assert tight, f"{key} failed though there is room: {error}"
                self._excused.add(id(error))
                self._injected.append(error)

    def fits_beside_held(self, key: GroupId) -> bool:
        entries = self.books.entries
        held = sum(entries[h.key].nbytes for h in self.holders if h.purpose is HostAccess.PERMANENT)
        host = self.books.tiers.index(self.books.host)
        above, below = self.books.tiers[:host], self.books.tiers[host:]
        # A copy that is only on the device must leave through host memory.
        only_above = [
            entry.nbytes
            for entry in entries.values()
            if any(map(entry.complete, above)) and not any(map(entry.complete, below))
        ]
        if entries[key].shared:
            if entries[key].nbytes > self.books.shared_budget:
                return False
            only_above.append(0)  # only on the device does it take other groups' space
        else:
            only_above.append(entries[key].nbytes)
        return self.books.held_for_good_leave(max(only_above), held)

    # Callers -----------------------------------------------------------------------------------

    def register(
        self,
        nbytes: int,
        *,
        backed: bool = True,
        guided: bool = False,
        tier: Tier = Tier.DISK,
        shared: bool = False,
    ) -> GroupId:
        key = self._new_key("file")
        self._guided |= {key} if guided else set()
        self.books.registered(key, nbytes, tier, backed=backed, shared=shared)
        self.step(events.Registered(key, nbytes, backed, self._order(key), tier, shared))
        return key

    def allow(self, nbytes: int) -> None:
        """Set the host memory that shared groups may take, in bytes."""
        self.books.shared_budget = nbytes
        self.step(events.SharedBudgetChanged(nbytes))

    def carve_out(self, tier: Tier, nbytes: int) -> bool:
        """Take `nbytes` of a tier for use outside any copy, if there is space."""
        self.sound = False
        self.now += 1.0
        before = self.planner.carved_out[tier]
        self.books.carved_out[tier] = min(nbytes, before)  # returned bytes may be taken at once
        self._handle(events.MemoryBorrowed(tier, nbytes))
        self.books.carved_out[tier] = self.planner.carved_out[tier]
        assert self.books.carved_out[tier] in (before, nbytes)
        self._inspect_room(tier)
        self.sound = True
        return self.books.carved_out[tier] == nbytes

    def _inspect_room(self, tier: Tier) -> None:
        budget, used = self.books.budgets[tier], self.books.own(tier)
        assert budget is None or used <= budget, f"{tier.name} holds {used} bytes of {budget}"

    def claim(self, nbytes: int, name: str = "put", *, guided: bool = False) -> GroupId | None:
        """Claim space for a new group, or a new version of `name`. None if it can never fit."""
        key = self._new_key(name)
        self._guided |= {key} if guided else set()
        budget = self.books.budgets[self.books.host]
        never = budget is not None and nbytes > budget
        self.books.claimed(key, nbytes)
        self.claims.append(key)
        try:
            self.step(events.Claimed(key, nbytes, use_order=self._order(key)))
        except BudgetError:
            assert never, f"{key} would have fitted"
            del self.books.entries[key]
            self.claims.remove(key)
            self._follow()
            return None
        assert not never, f"{key} can never fit"
        return key

    def _order(self, key: GroupId) -> UseOrder:
        """In a world with routed groups, every second one without a prefetch is routed."""
        if key in self._guided:
            return UseOrder.PREFETCHED
        return UseOrder.ROUTED if self._routed and key.generation % 2 else UseOrder.LEARNED

    def _new_key(self, name: str) -> GroupId:
        self._versions += 1
        if name in ("put", "file"):
            name = f"{name} {self._versions}"
        return GroupId(name, self._versions)

    def fill(self, key: GroupId) -> bool:
        """Poll a claim. True if there is an answer."""
        error = self.planner.error_of(key)
        if error is not None:
            self.withdraw_claim(key)
            self._answer(key, error)
            return True
        if not self.planner.granted(key) or not self.books.entries[key].copies:
            return False
        self.claims.remove(key)
        self.books.filled(key)
        self.step(events.Filled(key))
        for older in self.books.known():
            if older != key and older.key == key.key:
                self.discard(older)
        return True

    def withdraw_claim(self, key: GroupId) -> None:
        self.claims.remove(key)
        self.books.withdrew_claim(key)
        self.step(events.Withdrawn(key))

    def demand(self, key: GroupId, access: Access = Access.READ) -> Waiter | None:
        """Demand `key`, and wait. None if it can never fit."""
        entry = self.books.entries[key]
        never = self.books.never_comes_up(key, self.books.top)
        entry.demands += 1
        was = entry.offloaded, entry.away
        self.books.wanted(key)
        waiter = Waiter(key, access)
        self.waiters.append(waiter)
        try:
            self.step(events.Demanded(key))
        except BudgetError:
            assert never, f"{key} would have fitted"
            self.waiters.remove(waiter)
            entry.demands -= 1
            entry.offloaded, entry.away = was
            self._follow()
            return None
        assert not never, f"{key} can never fit"
        return waiter

    def wake(self, waiter: Waiter) -> bool:
        """Poll a demand. True if there is an answer: a lease or an error."""
        entry = self.books.entries.get(waiter.key)
        if entry is None or entry.discarded:
            self.give_up(waiter)
            self._answer(waiter.key, KeyError(waiter.key))
            return True
        error = self.planner.error_of(waiter.key)
        if error is not None:
            self.give_up(waiter)
            self._answer(waiter.key, error)
            return True
        if waiter.access is not Access.READ and self._is_kept(waiter.key):
            self.give_up(waiter)  # the store raises an error: it would wait forever
            return True
        return self._lease(waiter)

    def _is_kept(self, key: GroupId) -> bool:
        return any(h.key == key and h.purpose is HostAccess.PERMANENT for h in self.holders)

    def _answer(self, key: GroupId, error: BaseException) -> None:
        known = isinstance(error, KeyError) or any(error is e for e in self._injected)
        assert known, f"{key} failed with an unknown error: {error!r}"
        self.errors.append((key, error))

    def _lease(self, waiter: Waiter) -> bool:
        expected = self.books.may_lease(waiter.key, waiter.access)
        self.sound = False
        lent = self.planner.leasable(waiter.key, waiter.access)
        assert lent == expected, f"{waiter}: the planner says {lent}"
        if lent:
            self.books.leased(waiter.key, waiter.access)
            self.leases.append(waiter)
            self._answered(waiter)
            self._handle(events.Leased(waiter.key, waiter.access))
        self.sound = True
        return lent

    def _answered(self, waiter: Waiter) -> None:
        self.waiters.remove(waiter)
        if waiter.key in self.books.entries:
            self.books.entries[waiter.key].demands -= 1

    def give_up(self, waiter: Waiter) -> None:
        """Drop a waiter that got an error or withdrew."""
        self._answered(waiter)
        self.step(events.Withdrawn(waiter.key))
        others = {w.key for w in [*self.waiters, *self.savers, *self.fetchers]}
        if waiter.key in self.planner and waiter.key not in others:
            error = self.planner.error_of(waiter.key)
            assert error is None, f"{waiter.key} has an error that everybody was told: {error!r}"

    def release(self, lease: Waiter) -> None:
        self.leases.remove(lease)
        self.books.entries[lease.key].leases.remove(lease.access)
        if lease.access is Access.TAKE:
            self.books.discarded(lease.key)
        self.step(events.Released(lease.key, lease.access))

    def fetch(self, key: GroupId, purpose: HostAccess = HostAccess.UPDATE) -> Holder | None:
        """Request a host lease of `key`. None if it can never fit."""
        entry = self.books.entries[key]
        never = self.books.never_comes_up(key, self.books.host)
        entry.fetches += 1
        was = entry.offloaded, entry.away
        self.books.wanted(key)
        fetcher = Holder(key, purpose)
        self.fetchers.append(fetcher)
        try:
            self.step(events.HostDemanded(key, purpose))
        except BudgetError:
            assert never, f"{key} would have fitted"
            self.fetchers.remove(fetcher)
            entry.fetches -= 1
            entry.offloaded, entry.away = was
            self._follow()
            return None
        assert not never, f"{key} can never fit"
        return fetcher

    def hold(self, fetcher: Holder) -> bool:
        """Poll a request to hold a group. True if there is an answer."""
        key = fetcher.key
        entry = self.books.entries.get(key)
        gone = entry is None or entry.discarded
        error = KeyError(key) if gone else self.planner.error_of(key)
        if error is not None:
            self.withdraw_fetch(fetcher)
            self._answer(key, error)
            return True
        if self._is_kept(key):
            self.withdraw_fetch(fetcher)  # the store raises an error: it would wait forever
            return True
        expected = self.books.may_hold(key, fetcher.purpose)
        self.sound = False
        held = self.planner.host_leasable(key, fetcher.purpose)
        assert expected in (held, None), f"{fetcher}: the planner says {held}"
        if held:
            self._no_longer_fetched(fetcher)
            self.books.took_hold(key, fetcher.purpose)
            self.holders.append(fetcher)
            self._handle(events.HostLeased(key, fetcher.purpose))
        self.sound = True
        return held

    def withdraw_fetch(self, fetcher: Holder) -> None:
        """Drop a holder that got an error or withdrew."""
        self._no_longer_fetched(fetcher)
        if fetcher.key in self.planner:
            self.step(events.HostWithdrawn(fetcher.key, fetcher.purpose))

    def _no_longer_fetched(self, fetcher: Holder) -> None:
        self.fetchers.remove(fetcher)
        if fetcher.key in self.books.entries:
            self.books.entries[fetcher.key].fetches -= 1

    def let_go(self, holder: Holder) -> None:
        self.holders.remove(holder)
        self.books.entries[holder.key].held = False
        self.step(events.HostReleased(holder.key))

    def put_away(self, key: GroupId) -> None:
        """Make the disk copy the only one, once the group is unused."""
        if self.planner.saved(key):
            self.books.put_away(key)
            self.step(events.MemoryReleased(key))

    def prefetch(self, keys: list[GroupId], top: Tier | None = None) -> None:
        for key in keys:
            self.books.wanted(key)
        self.step(events.Expected(tuple(keys), top))

    def offload(self, key: GroupId) -> None:
        self.books.offloaded(key)
        self.step(events.Offloaded(key))

    def save(self, key: GroupId) -> Saver:
        saver = Saver(key)
        self.savers.append(saver)
        self.step(events.SaveRequested(key))
        return saver

    def look_saved(self, saver: Saver) -> bool:
        """Poll a save. True if it has its answer."""
        if saver.answer is None:
            return False
        self.savers.remove(saver)
        if isinstance(saver.answer, BaseException):
            self._answer(saver.key, saver.answer)
            if saver.key in self.planner:
                self.step(events.ErrorReported(saver.key))
        return True

    def discard(self, key: GroupId) -> None:
        self.books.discarded(key)
        self.step(events.Discarded(key))

    # Movers ------------------------------------------------------------------------------------

    def deliver(self, move: Copy) -> None:
        self.books.delivered(move)
        self.step(events.Arrived(move.group, move.src, move.dst))

    def fail(self, move: Copy) -> None:
        error = InjectedError(f"{move}")
        self._injected.append(error)
        self.books.failed(move)
        self.step(events.Failed(move.group, move.src, move.dst, error))

    # The end -----------------------------------------------------------------------------------

    def round(self) -> bool:
        """Let every actor finish one operation. False if none could."""
        lent = [holder for holder in self.holders if holder.purpose is not HostAccess.PERMANENT]
        acted = bool(self.leases or lent or self.books.moving)
        for lease in list(self.leases):
            self.release(lease)
        for holder in lent:
            self.let_go(holder)
        for move in self.books.moving[:1]:
            self.deliver(move)
        acted |= any([self.wake(waiter) for waiter in list(self.waiters)])
        acted |= any([self.hold(fetcher) for fetcher in list(self.fetchers)])
        acted |= any([self.fill(key) for key in list(self.claims)])
        acted |= any([self.look_saved(saver) for saver in list(self.savers)])
        return acted

    def tear(self) -> None:
        """Interrupt a step: a new planner takes inventory, and waiters repeat their requests."""
        self.planner = self._new_planner()
        self.log.clear()
        self.told.clear()
        entries = self.books.entries.values()
        waits = {entry.group: (entry.demands, entry.fetches) for entry in entries}
        for entry in entries:  # the new planner knows none of these
            entry.demands = entry.fetches = 0
            entry.offloaded, entry.away = False, set()
        if self.books.shared_budget:
            allowed = events.SharedBudgetChanged(self.books.shared_budget)
            self.log.append((self.now, allowed))
            self.told.append(self.planner.handle(allowed, self.now))
        for tier, nbytes in self.books.carved_out.items():
            if nbytes:
                carved_out = events.MemoryBorrowed(tier, nbytes)
                self.log.append((self.now, carved_out))
                self.told.append(self.planner.handle(carved_out, self.now))
                assert self.planner.carved_out[tier] == nbytes, "the same bytes were free before"
        self.step(events.Recovered(tuple(self.found(entry.group) for entry in entries)))
        self._ask_again(waits)

    def _ask_again(self, waits: dict[GroupId, tuple[int, int]]) -> None:
        entries, planner = self.books.entries, self.planner
        for waiter in [w for w in self.waiters if w.key in planner]:
            entries[waiter.key].demands = waits[waiter.key][0]
            if not self._asks_again(waiter.key, events.Demanded(waiter.key), self.books.top):
                self._answered(waiter)
                waits[waiter.key] = (entries[waiter.key].demands, waits[waiter.key][1])
        for fetcher in [f for f in self.fetchers if f.key in planner]:
            entries[fetcher.key].fetches = waits[fetcher.key][1]
            demand = events.HostDemanded(fetcher.key, fetcher.purpose)
            if not self._asks_again(fetcher.key, demand, self.books.host):
                self._no_longer_fetched(fetcher)
                waits[fetcher.key] = (waits[fetcher.key][0], entries[fetcher.key].fetches)
        for saver in [s for s in self.savers if s.answer is None and s.key in planner]:
            self.step(events.SaveRequested(saver.key))
        for entry in entries.values():
            entry.demands, entry.fetches = waits[entry.group]

    def _asks_again(self, key: GroupId, demand: events.Event, goal: Tier) -> bool:
        """Return False if the request fails, as when the allowance of shared groups has shrunk."""
        try:
            self.step(demand)
        except BudgetError:
            assert self.books.entries[key].shared, f"{key} waited, so it must be accepted"
            assert self.books.never_comes_up(key, goal), f"{key} would have fitted"
            self.sound = True
            return False
        return True

    def found(self, key: GroupId) -> events.RecoveredGroup:
        entry = self.books.entries[key]
        held = next((holder.purpose for holder in self.holders if holder.key == key), None)
        return events.RecoveredGroup(
            key,
            entry.nbytes,
            tuple(entry.copies),
            tuple((copy.src, copy.dst) for copy in self.books.moving if copy.group == key),
            tuple((access, False) for access in entry.leases),
            held,
            backing=entry.backing,
            use_order=self._order(key),
            visible=not entry.discarded and not entry.claimed,
            claimed=entry.claimed and not entry.discarded,
            shared=entry.shared,
        )

    def finish(self) -> None:
        """Release all leases and complete all transfers: then every request has an answer."""
        for _ in range(ROUNDS):
            left = [*self.waiters, *self.claims, *self.savers, *self.fetchers]
            if not (left or self.leases or self.holders or self.books.moving):
                break
            if not self.round():
                assert self.holders, f"nothing moves, nothing is lent, and these wait: {left}"
                self._assert_no_waiter_is_blocked()
                self.let_go(self.holders[0])
        else:
            raise AssertionError(f"copies still move after {ROUNDS} rounds: {self.books.moving}")
        assert self.planner.idle()
        gone = [key for key, entry in self.books.entries.items() if entry.discarded]
        assert not gone, f"{gone} are discarded but still have copies"

    def _assert_no_waiter_is_blocked(self) -> None:
        """Permanent leases are never returned: requests that need their space get an error."""
        held = {holder.key for holder in self.holders}
        left = [*self.waiters, *self.fetchers, *self.savers]
        vain = [waiter for waiter in left if waiter.key not in held]
        assert not (vain or self.claims), f"nothing moves, and these wait: {vain}, {self.claims}"


# Random histories ------------------------------------------------------------------------------


REMOTE = Tier(3, "REMOTE", persistent=True)
"""Worlds of which some have a tier below the disk."""


class History:
    """Draws steps from a seed.

    With `remote`, there is a persistent tier below the disk; with `routed`, data decide when some
    of the groups are used.
    """

    def __init__(
        self,
        seed: int,
        policy: str,
        planner: Kind = Planner,
        *,
        remote: bool = False,
        routed: bool = False,
    ) -> None:
        self.random = random.Random(seed)
        budgets = self._budgets()
        if remote:
            budgets[REMOTE] = self.random.choice([None, None, 24, 48])
        self.world = World(budgets, policy, planner, routed=routed)
        for _ in range(self.random.randint(2, 8)):
            self.register()

    def _budgets(self) -> dict[Tier, int | None]:
        choice = self.random.choice
        budgets = {Tier.HOST: choice([12, 20, 40, 100]), Tier.DISK: choice([None, None, 12, 24])}
        if self.random.random() < 0.6:
            budgets[Tier.DEVICE] = choice([12, 20, 40])
            if self.random.random() < 0.2:
                budgets[Tier.HOST] = None
        return budgets

    def _size(self) -> int:
        return self.random.randint(1, 14 if self.random.random() < 0.1 else 8)

    def play(self, steps: int) -> None:
        """Make `steps` steps; after each, some of the waiters poll."""
        acts = {
            self.demand: 22,
            self.claim: 10,
            self.prefetch: 8,
            self.offload: 8,
            self.save: 5,
            self.discard: 2,
            self.register: 2,
            self.give_up: 4,
            self.withdraw_claim: 2,
            self.release: 14,
            self.land: 23,
            self.fetch: 10,
            self.withdraw_fetch: 2,
            self.let_go: 7,
            self.put_away: 4,
            self.world.tear: 1,
        }
        for act in self.random.choices(list(acts), list(acts.values()), k=steps):
            act()
            self.look()

    def look(self) -> None:
        """Make each waiter poll with some probability."""
        world, chance = self.world, self.random.random
        for waits, chances, look in (
            (world.waiters, 0.6, world.wake),
            (world.claims, 0.5, world.fill),
            (world.fetchers, 0.6, world.hold),
            (world.savers, 0.5, world.look_saved),
        ):
            for one in list(waits):
                if chance() < chances:
                    look(one)

    def _any_key(self) -> GroupId | None:
        keys = self.world.books.known()
        return self.random.choice(keys) if keys else None

    def register(self) -> None:
        books, nbytes = self.world.books, self._size()
        tier = self.random.choice([Tier.DISK, REMOTE]) if REMOTE in books.budgets else Tier.DISK
        budget = books.budgets[tier]
        room = budget is None or books.used[tier] + nbytes <= budget // 2
        free = budget is None or self.world.planner.used[tier] + nbytes <= budget
        backed = not (room and free) or self.random.random() < 0.7
        self.world.register(nbytes, backed=backed, guided=self.random.random() < 0.3, tier=tier)

    def demand(self) -> None:
        if key := self._any_key():
            access = Access.READ
            if self.random.random() < 0.4:
                access = self.random.choice(list(Access))
            self.world.demand(key, access)

    def claim(self) -> None:
        puts = [k.key for k in self.world.books.known() if k.key.startswith("put")]
        replace = puts and self.random.random() < 0.2
        name = self.random.choice(puts) if replace else "put"
        self.world.claim(self._size(), name, guided=self.random.random() < 0.3)

    def prefetch(self) -> None:
        keys = self.world.books.known()
        top = self.random.choice([None, None, Tier.HOST])
        self.world.prefetch(self.random.sample(keys, min(2, len(keys))), top)

    def offload(self) -> None:
        if key := self._any_key():
            self.world.offload(key)

    def save(self) -> None:
        if key := self._any_key():
            self.world.save(key)

    def discard(self) -> None:
        if key := self._any_key():
            self.world.discard(key)

    def give_up(self) -> None:
        if self.world.waiters:
            self.world.give_up(self.random.choice(self.world.waiters))

    def withdraw_claim(self) -> None:
        if self.world.claims:
            self.world.withdraw_claim(self.random.choice(self.world.claims))

    def release(self) -> None:
        if self.world.leases:
            self.world.release(self.random.choice(self.world.leases))

    def fetch(self) -> None:
        if key := self._any_key():
            purposes = [
                HostAccess.READ,
                HostAccess.UPDATE,
                HostAccess.UPDATE,
                HostAccess.RENEW,
                HostAccess.PERMANENT,
            ]
            self.world.fetch(key, self.random.choice(purposes))

    def withdraw_fetch(self) -> None:
        if self.world.fetchers:
            self.world.withdraw_fetch(self.random.choice(self.world.fetchers))

    def let_go(self) -> None:
        if self.world.holders:
            holder = self.random.choice(self.world.holders)
            if holder.purpose is not HostAccess.PERMANENT or self.random.random() < 0.3:
                self.world.let_go(holder)

    def put_away(self) -> None:
        if key := self._any_key():
            self.world.put_away(key)

    def land(self) -> None:
        if self.world.books.moving:
            move = self.random.choice(self.world.books.moving)
            late = self.random.random() < 0.12
            (self.world.fail if late else self.world.deliver)(move)


def land_all(world: World) -> None:
    """Deliver all copies on their way, and those that start in the meantime."""
    for _ in range(ROUNDS):
        if not world.books.moving:
            return
        world.deliver(world.books.moving[0])
    raise AssertionError(f"copies never stop moving: {world.books.moving}")


def use(world: World, key: GroupId) -> None:
    """Lease a group once it is resident, and release it."""
    waiter = world.demand(key)
    assert waiter is not None
    land_all(world)
    assert waiter in world.leases or world.wake(waiter)
    world.release(waiter)


def play(
    seed: int,
    policy: str,
    steps: int = 50,
    planner: Kind = Planner,
    *,
    remote: bool = False,
    routed: bool = False,
    logs: Path | None = None,
) -> World:
    """Play one random history to its end.

    The error of a failure names the seed and a file with its events, in the folder `logs` or by
    default in a temporary one.
    """
    history = History(seed, policy, planner, remote=remote, routed=routed)
    try:
        history.play(steps)
        history.world.finish()
    except Exception as error:
        folder = Path(tempfile.mkdtemp(prefix="tierstore-history-")) if logs is None else logs
        file = folder / f"{policy}-{seed}.jsonl"
        world = history.world
        write_log(file, world.log, world.books.budgets, policy, MEMORY)
        chosen = f"remote={remote}, routed={routed}"
        error.add_note(f"to repeat: play({seed}, {policy!r}, {steps}, {chosen})")
        error.add_note(f"to look at its events: tests.histories.logs.replay({str(file)!r})")
        raise
    return history.world
