"""A store and its carriers, played by a test: any caller, any order, any failure.

`World` makes one planner step at a time and keeps the books beside it. `play` draws a random
history of such steps from a seed. `World.finish` asserts liveness.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.histories.books import Books
from tierstore.model.errors import BudgetError
from tierstore.model.groups import name_of, version_id
from tierstore.model.moves import Copy
from tierstore.model.tiers import Access, Hold, Tier
from tierstore.plan.planner import Planner
from tierstore.plan.policy import Policy, policy_named
from tierstore.plan.records import Found
from tierstore.plan.schedule import LearnedOrder

ROUNDS = 2000
"""More rounds than any history needs to come to rest: beyond them it never will."""


@dataclass(eq=False)
class Waiter:
    """Somebody who demanded `key` and has not been answered yet."""

    key: str
    access: Access


@dataclass(eq=False)
class Holder:
    """Somebody who wants to hold `key` in host memory, or does."""

    key: str
    purpose: Hold


@dataclass(eq=False)
class Saver:
    """Somebody who waits for `key` to be on disk. The answer counts when it is first true."""

    key: str
    answer: BaseException | bool | None = None


class InjectedError(Exception):
    """A transfer failed because the test said so."""


class World:
    """The planner, its books, and everybody who waits for something."""

    def __init__(
        self,
        budgets: Mapping[Tier, int | None],
        policy: str | Callable[[LearnedOrder], Policy] = "next-use",
        planner: type[Planner] = Planner,
    ) -> None:
        self.now = 0.0
        self._budgets_given, self._policy, self._kind = dict(budgets), policy, planner
        self.planner = self._new_planner()
        self.books = Books(budgets)
        self.waiters: list[Waiter] = []
        self.leases: list[Waiter] = []
        self.claims: list[str] = []
        self.fetchers: list[Holder] = []
        self.holders: list[Holder] = []
        self.savers: list[Saver] = []
        self.errors: list[tuple[str, BaseException]] = []
        self.sound = True
        self._guided: set[str] = set()
        self._versions = 0
        self._injected: list[BaseException] = []
        self._excused: set[int] = set()

    def _new_planner(self) -> Planner:
        schedule, policy = LearnedOrder(memory=64), self._policy
        chosen = policy_named(policy, schedule) if isinstance(policy, str) else policy(schedule)
        return self._kind(self._budgets_given, chosen, schedule, lambda: self.now)

    # One step ----------------------------------------------------------------------------------

    def _step(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call the planner, do as it says, and see whether all promises hold."""
        self.sound = False
        self.now += 1.0  # every step takes as long: the planner learns times, and plans by them
        answer = method(*args, **options)
        self._follow()
        self.sound = True
        return answer

    def _follow(self) -> None:
        for instruction in self.planner.instructions():
            self.books.follow(instruction)
        self.planner.check()
        self.books.inspect()
        self._compare()
        self._excuse_what_is_full()
        for saver in self.savers:
            saver.answer = saver.answer or self._answer_to(saver.key)

    def _answer_to(self, key: str) -> BaseException | bool | None:
        """Whether a save of `key` is done, or why it never will be."""
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

    def _excuse_what_is_full(self) -> None:
        """A demand may fail for want of room only at a moment at which the disk has none."""
        wanted = {w.key for w in self.waiters} | set(self.claims) | {s.key for s in self.savers}
        wanted |= {f.key for f in self.fetchers}
        for key in wanted & self.books.entries.keys():
            error = self.planner.error_of(key) if key in self.planner else None
            if isinstance(error, BudgetError) and id(error) not in self._excused:
                tight = self.books.disk_is_tight() or not self.fits_beside_what_is_held(key)
                assert tight, f"{key} failed though there is room: {error}"
                self._excused.add(id(error))
                self._injected.append(error)

    def fits_beside_what_is_held(self, key: str) -> bool:
        entries = self.books.entries
        held = sum(entries[h.key].nbytes for h in self.holders if h.purpose is Hold.KEEP)
        above, below = self.books.tiers[:-2], self.books.tiers[-2:]
        # What is only on the device makes room there by way of host memory.
        only_above = [
            entry.nbytes
            for entry in entries.values()
            if any(map(entry.complete, above)) and not any(map(entry.complete, below))
        ]
        return self.books.held_for_good_leave(max([entries[key].nbytes, *only_above]), held)

    # What callers do ---------------------------------------------------------------------------

    def register(self, nbytes: int, *, backed: bool = True, guided: bool = False) -> str:
        key = self._new_key("file")
        self._guided |= {key} if guided else set()
        self.books.registered(key, nbytes, backed)
        self._step(self.planner.register, key, nbytes, backed=backed, guided=guided)
        return key

    def claim(self, nbytes: int, name: str = "put", *, guided: bool = False) -> str | None:
        """Ask for room for a new group, or a new version of `name`. None if it can never fit."""
        key = self._new_key(name)
        self._guided |= {key} if guided else set()
        budget = self.books.budgets[self.books.tiers[-2]]
        never = budget is not None and nbytes > budget
        self.books.claimed(key, nbytes)
        self.claims.append(key)
        try:
            self._step(self.planner.claim, key, nbytes, guided=guided)
        except BudgetError:
            assert never, f"{key} would fit"
            del self.books.entries[key]
            self.claims.remove(key)
            self._follow()
            return None
        assert not never, f"{key} can never fit"
        return key

    def _new_key(self, name: str) -> str:
        self._versions += 1
        if name in ("put", "file"):
            name = f"{name} {self._versions}"
        return version_id(name, self._versions)

    def fill(self, key: str) -> bool:
        """The caller of a claim looks again. True if it has its answer."""
        error = self.planner.error_of(key)
        if error is not None:
            self.withdraw_claim(key)
            self._answer(key, error)
            return True
        if not self.planner.granted(key) or not self.books.entries[key].copies:
            return False
        self.claims.remove(key)
        self.books.filled(key)
        self._step(self.planner.arrived, key, self.books.tiers[-2])
        for older in self.books.known():
            if older != key and name_of(older) == name_of(key):
                self.discard(older)
        return True

    def withdraw_claim(self, key: str) -> None:
        self.claims.remove(key)
        self.books.withdrew_claim(key)
        self._step(self.planner.withdraw, key)

    def demand(self, key: str, access: Access = Access.READ) -> Waiter | None:
        """Somebody waits for `key`. None if it can never fit."""
        entry = self.books.entries[key]
        budgets = [self.books.budgets[tier] for tier in self.books.tiers[:-1]]
        never = any(budget is not None and entry.nbytes > budget for budget in budgets)
        entry.demands += 1
        was = entry.offloaded, entry.away
        self.books.wanted(key)
        waiter = Waiter(key, access)
        self.waiters.append(waiter)
        try:
            self._step(self.planner.demand, key)
        except BudgetError:
            assert never, f"{key} would fit"
            self.waiters.remove(waiter)
            entry.demands -= 1
            entry.offloaded, entry.away = was
            self._follow()
            return None
        assert not never, f"{key} can never fit"
        return waiter

    def wake(self, waiter: Waiter) -> bool:
        """A waiter looks again. True if it has its answer: a lease or an error."""
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
            self.give_up(waiter)  # the store refuses: it would wait for ever
            return True
        return self._lease(waiter)

    def _is_kept(self, key: str) -> bool:
        return any(h.key == key and h.purpose is Hold.KEEP for h in self.holders)

    def _answer(self, key: str, error: BaseException) -> None:
        known = isinstance(error, KeyError) or any(error is e for e in self._injected)
        assert known, f"{key} failed with an error from nowhere: {error!r}"
        self.errors.append((key, error))

    def _lease(self, waiter: Waiter) -> bool:
        expected = self.books.may_lease(waiter.key, waiter.access)
        self.sound = False
        lent = self.planner.lease(waiter.key, waiter.access)
        assert lent == expected, f"{waiter}: the planner says {lent}"
        if lent:
            self.books.leased(waiter.key, waiter.access)
            self.leases.append(waiter)
            self._answered(waiter)
        self._follow()
        self.sound = True
        return lent

    def _answered(self, waiter: Waiter) -> None:
        self.waiters.remove(waiter)
        if waiter.key in self.books.entries:
            self.books.entries[waiter.key].demands -= 1

    def give_up(self, waiter: Waiter) -> None:
        """A waiter was told of an error, or wants nothing any more."""
        self._answered(waiter)
        self._step(self.planner.withdraw, waiter.key)
        others = {w.key for w in [*self.waiters, *self.savers, *self.fetchers]}
        if waiter.key in self.planner and waiter.key not in others:
            error = self.planner.error_of(waiter.key)
            assert error is None, f"{waiter.key} has an error that everybody was told: {error!r}"

    def release(self, lease: Waiter) -> None:
        self.leases.remove(lease)
        self.books.entries[lease.key].leases.remove(lease.access)
        if lease.access is Access.TAKE:
            self.books.discarded(lease.key)
        self._step(self.planner.release, lease.key, lease.access)

    def fetch(self, key: str, purpose: Hold = Hold.UPDATE) -> Holder | None:
        """Somebody waits to hold `key`. None if it can never fit."""
        entry, budget = self.books.entries[key], self.books.budgets[self.books.host]
        never = budget is not None and entry.nbytes > budget
        entry.fetches += 1
        was = entry.offloaded, entry.away
        self.books.wanted(key)
        fetcher = Holder(key, purpose)
        self.fetchers.append(fetcher)
        try:
            self._step(self.planner.fetch, key, purpose)
        except BudgetError:
            assert never, f"{key} would fit"
            self.fetchers.remove(fetcher)
            entry.fetches -= 1
            entry.offloaded, entry.away = was
            self._follow()
            return None
        assert not never, f"{key} can never fit"
        return fetcher

    def hold(self, fetcher: Holder) -> bool:
        """Who wants to hold a group looks again. True if there is an answer."""
        key = fetcher.key
        entry = self.books.entries.get(key)
        gone = entry is None or entry.discarded
        error = KeyError(key) if gone else self.planner.error_of(key)
        if error is not None:
            self.withdraw_fetch(fetcher)
            self._answer(key, error)
            return True
        if self._is_kept(key):
            self.withdraw_fetch(fetcher)  # the store refuses: it would wait for ever
            return True
        expected = self.books.may_hold(key, fetcher.purpose)
        self.sound = False
        held = self.planner.hold(key, fetcher.purpose)
        assert expected in (held, None), f"{fetcher}: the planner says {held}"
        if held:
            self._no_longer_fetched(fetcher)
            self.books.took_hold(key, fetcher.purpose)
            self.holders.append(fetcher)
        self._follow()
        self.sound = True
        return held

    def withdraw_fetch(self, fetcher: Holder) -> None:
        """Somebody was told of an error, or does not want to hold it any more."""
        self._no_longer_fetched(fetcher)
        if fetcher.key in self.planner:
            self._step(self.planner.withdraw_fetch, fetcher.key, fetcher.purpose)

    def _no_longer_fetched(self, fetcher: Holder) -> None:
        self.fetchers.remove(fetcher)
        if fetcher.key in self.books.entries:
            self.books.entries[fetcher.key].fetches -= 1

    def let_go(self, holder: Holder) -> None:
        self.holders.remove(holder)
        self.books.entries[holder.key].held = False
        self._step(self.planner.let_go, holder.key)

    def put_away(self, key: str) -> None:
        """What is on disk is nowhere else from now on, as soon as nobody uses it there."""
        if self.planner.saved(key):
            self.books.put_away(key)
            self._step(self.planner.put_away, key)

    def prefetch(self, keys: list[str], top: Tier | None = None) -> None:
        for key in keys:
            self.books.wanted(key)
        self._step(self.planner.prefetch, keys, top)

    def offload(self, key: str) -> None:
        self.books.offloaded(key)
        self._step(self.planner.offload, key)

    def save(self, key: str) -> Saver:
        saver = Saver(key)
        self.savers.append(saver)
        self._step(self.planner.save, key)
        return saver

    def look_saved(self, saver: Saver) -> bool:
        """Whoever waits for a save looks again. True if it has its answer."""
        if saver.answer is None:
            return False
        self.savers.remove(saver)
        if isinstance(saver.answer, BaseException):
            self._answer(saver.key, saver.answer)
            if saver.key in self.planner:
                self._step(self.planner.forgive, saver.key)
        return True

    def discard(self, key: str) -> None:
        self.books.discarded(key)
        self._step(self.planner.discard, key)

    # What carriers do --------------------------------------------------------------------------

    def deliver(self, move: Copy) -> None:
        self.books.delivered(move)
        self._step(self.planner.arrived, move.key, move.dst, move.src)

    def fail(self, move: Copy) -> None:
        error = InjectedError(f"{move}")
        self._injected.append(error)
        self.books.failed(move)
        self._step(self.planner.failed, move.key, move.dst, move.src, error)

    # The end -----------------------------------------------------------------------------------

    def round(self) -> bool:
        """Everybody does what is left to do, once. False if nobody could do anything."""
        lent = [holder for holder in self.holders if holder.purpose is not Hold.KEEP]
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
        """A step was cut short: a new planner takes stock, and whoever waits asks again."""
        self.planner = self._new_planner()
        entries = self.books.entries.values()
        waits = {entry.key: (entry.demands, entry.fetches) for entry in entries}
        for entry in entries:  # of all this the new planner knows nothing
            entry.demands = entry.fetches = 0
            entry.offloaded, entry.away = False, set()
        self._step(self.planner.take_stock, [self._found(entry.key) for entry in entries])
        self._ask_again(waits)

    def _ask_again(self, waits: dict[str, tuple[int, int]]) -> None:
        entries, planner = self.books.entries, self.planner
        for waiter in [w for w in self.waiters if w.key in planner]:
            entries[waiter.key].demands = waits[waiter.key][0]
            self._step(planner.demand, waiter.key)
        for fetcher in [f for f in self.fetchers if f.key in planner]:
            entries[fetcher.key].fetches = waits[fetcher.key][1]
            self._step(planner.fetch, fetcher.key, fetcher.purpose)
        for saver in [s for s in self.savers if s.answer is None and s.key in planner]:
            self._step(planner.save, saver.key)
        for entry in entries.values():
            entry.demands, entry.fetches = waits[entry.key]

    def _found(self, key: str) -> Found:
        entry = self.books.entries[key]
        held = next((holder.purpose for holder in self.holders if holder.key == key), None)
        return Found(
            key,
            entry.nbytes,
            tuple(entry.copies),
            tuple((copy.src, copy.dst) for copy in self.books.moving if copy.key == key),
            tuple((access, False) for access in entry.leases),
            held,
            backed=entry.backed,
            guided=key in self._guided,
            kept=False,
            shown=not entry.discarded and not entry.claimed,
            claimed=entry.claimed and not entry.discarded,
        )

    def finish(self) -> None:
        """All leases come back, all transfers arrive: then everybody has an answer."""
        for _ in range(ROUNDS):
            left = [*self.waiters, *self.claims, *self.savers, *self.fetchers]
            if not (left or self.leases or self.holders or self.books.moving):
                break
            if not self.round():
                assert self.holders, f"nothing moves, nothing is lent, and these wait: {left}"
                self._assert_nobody_waits_in_vain()
                self.let_go(self.holders[0])
        else:
            raise AssertionError(f"no rest after {ROUNDS} rounds: {self.books.moving}")
        assert self.planner.idle()
        gone = [key for key, entry in self.books.entries.items() if entry.discarded]
        assert not gone, f"{gone} were discarded and are still there"

    def _assert_nobody_waits_in_vain(self) -> None:
        """What is held for good is given back by nobody who waits: who needs it was told so."""
        held = {holder.key for holder in self.holders}
        left = [*self.waiters, *self.fetchers, *self.savers]
        vain = [waiter for waiter in left if waiter.key not in held]
        assert not (vain or self.claims), f"nothing moves, and these wait: {vain}, {self.claims}"


# Random histories ------------------------------------------------------------------------------


class History:
    """Draws steps from a seed."""

    def __init__(self, seed: int, policy: str, planner: type[Planner] = Planner) -> None:
        self.random = random.Random(seed)
        self.world = World(self._budgets(), policy, planner)
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
        """Make `steps` steps; after each, some of those who wait look again."""
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
        """Each waiter wakes up sooner or later."""
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

    def _any_key(self) -> str | None:
        keys = self.world.books.known()
        return self.random.choice(keys) if keys else None

    def register(self) -> None:
        books, nbytes = self.world.books, self._size()
        budget = books.budgets[Tier.DISK]
        room = budget is None or books.used[Tier.DISK] + nbytes <= budget // 2
        free = budget is None or self.world.planner.used[Tier.DISK] + nbytes <= budget
        backed = not (room and free) or self.random.random() < 0.7
        self.world.register(nbytes, backed=backed, guided=self.random.random() < 0.3)

    def demand(self) -> None:
        if key := self._any_key():
            access = Access.READ
            if self.random.random() < 0.4:
                access = self.random.choice(list(Access))
            self.world.demand(key, access)

    def claim(self) -> None:
        puts = [name_of(k) for k in self.world.books.known() if k.startswith("put")]
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
            purposes = [Hold.READ, Hold.UPDATE, Hold.UPDATE, Hold.RENEW, Hold.KEEP]
            self.world.fetch(key, self.random.choice(purposes))

    def withdraw_fetch(self) -> None:
        if self.world.fetchers:
            self.world.withdraw_fetch(self.random.choice(self.world.fetchers))

    def let_go(self) -> None:
        if self.world.holders:
            holder = self.random.choice(self.world.holders)
            if holder.purpose is not Hold.KEEP or self.random.random() < 0.3:
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
    """Deliver all that is on its way, and what sets out meanwhile."""
    for _ in range(ROUNDS):
        if not world.books.moving:
            return
        world.deliver(world.books.moving[0])
    raise AssertionError(f"it never comes to rest: {world.books.moving}")


def play(seed: int, policy: str, steps: int = 50, planner: type[Planner] = Planner) -> World:
    """One random history, up to and including its end. The error of a failure names the seed."""
    try:
        history = History(seed, policy, planner)
        history.play(steps)
        history.world.finish()
    except Exception as error:
        error.add_note(f"to repeat: play({seed}, {policy!r}, {steps})")
        raise
    return history.world
