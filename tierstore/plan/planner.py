"""Who may hold bytes where: a state machine that decides every move and makes none.

Each public method is one step. It changes what the planner believes and leaves instructions that
make the belief true; the caller fetches them with `instructions` and gives them, in that order, to
a carrier. The carrier answers with `arrived` or `failed`. One rule governs all movement:

    A copy may be dropped when another valid copy exists; otherwise it is saved one tier down first.

A copy on its way takes its room from the moment it is planned: budgets hold at every instant.
Room on the fastest tier is set aside before the first hop towards it begins, so nothing that is on
its way up can be stranded half-way by something else that is. A drop takes effect at once, which
is why the order of the instructions matters.

Five promises hold after every step, and `check` asserts them:

1. Every known group has a valid copy on some tier, or is just being put.
2. No tier holds more bytes than its budget, counting copies still arriving.
3. A copy that is leased, or that a transfer reads or writes, is never dropped.
4. A group being changed has exactly one copy.
5. An unwanted copy is in use: had it not been, it would be gone.

And one of liveness: once every lease is back, every demand is met or has failed, with an error
that `error_of` tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from tierstore.model.errors import BudgetError
from tierstore.model.groups import name_of
from tierstore.model.moves import Instruction
from tierstore.model.tiers import Access, Hold, Tier
from tierstore.plan.foresight import Foresight
from tierstore.plan.policy import Policy
from tierstore.plan.records import CopyRecord, GroupRecord, State
from tierstore.plan.schedule import Schedule
from tierstore.plan.stocktaking import Stocktaking


class Planner(Stocktaking):
    """Plans for the tiers of `budgets` (bytes; None for no limit). The disk must be among them.

    `clock` gives seconds; with it the planner learns how long computing and moving take. Without,
    it fetches about two groups ahead. Of a device that works later than it is told to, the planner
    is `told` how long it computes, by `ran`.
    """

    def __init__(
        self,
        budgets: Mapping[Tier, int | None],
        policy: Policy,
        schedule: Schedule,
        clock: Callable[[], float] = lambda: 0.0,
        *,
        told: bool = False,
    ) -> None:
        budgets = dict(budgets)  # one for all: see `resize`
        super().__init__(budgets, policy, schedule, Foresight(schedule, budgets, clock, told=told))

    # Steps -------------------------------------------------------------------------------------

    def register(self, key: str, nbytes: int, *, backed: bool, guided: bool = False) -> None:
        """A group is on disk: in a checkpoint (`backed`), or in a file of the store's own.

        Of a `guided` group the caller always says when it comes next.
        """
        group = GroupRecord(key, nbytes, backed, guided=guided)
        group.copies[Tier.DISK] = CopyRecord(State.PRESENT)
        self._know(group)
        self._take_room(Tier.DISK, group.cost(Tier.DISK))
        self._policy.admitted(key, Tier.DISK)
        if not guided:
            self._schedule.introduce(name_of(key))

    def claim(self, key: str, nbytes: int, *, guided: bool = False) -> None:
        """A caller wants to put a group: find room in host memory. See `granted`.

        Of a `guided` group the caller always says when it comes next.
        """
        self._refuse_what_never_fits(key, nbytes, (self._put_tier(),))
        self._know(GroupRecord(key, nbytes, guided=guided))
        self._claims[key] = None
        self._settle()

    def granted(self, key: str) -> bool:
        """Whether the claimed room is there. Then fill it and call `arrived`."""
        return self._put_tier() in self._groups[key].copies

    def demand(self, key: str) -> None:
        """Somebody insists on `key` on the fastest tier, until `withdraw`."""
        group = self._groups[key]
        self._refuse_what_never_fits(key, group.nbytes, self.tiers[:-1])
        self._demands[key] = self._demands.get(key, 0) + 1
        if not group.guided:
            self._foresight.asked(group.number)
        self._want_again(group)
        if not group.present(self.top):
            self._settle()

    def withdraw(self, key: str) -> None:
        """Take one demand, or a claim that was not filled, back."""
        if key in self._claims:
            self._withdraw_claim(self._groups[key])
        elif self._take_back(key) and key in self._groups:
            self._groups[key].error = None
        self._settle()

    def _take_back(self, key: str) -> bool:
        """Take one demand back. True if it was the last one."""
        if self._demands.get(key) == 1:
            del self._demands[key]
            return True
        if key in self._demands:
            self._demands[key] -= 1
        return False

    def prefetch(self, keys: Iterable[str], top: Tier | None = None) -> None:
        """The caller hopes to use these next, in this order, on tier `top` (None: the fastest)."""
        keys = [key for key in keys if not self._groups[key].forgotten]
        for key in keys:
            self._want_again(self._groups[key])
            self._foresight.aim(self._groups[key].number, self.top if top is None else top)
        self._schedule.expect(name_of(key) for key in keys)
        self._look_ahead = True
        self._settle()

    def lease(self, key: str, access: Access, *, for_good: bool = False) -> bool:
        """Lend `key` out if it is on the fastest tier and nobody uses it in another way.

        If so, one demand for it is met. Nobody may hope to get the room of what is lent `for_good`.
        """
        if not self.lendable(key, access):
            return False
        group = self._groups[key]
        if access is Access.UPDATE:
            self._keep_only(group, self.top)
        group.exclusive = None if access is Access.READ else access
        group.leases += 1
        self._leases += not for_good
        self._note_use(group)
        self._take_back(key)
        self._settle()
        return True

    def lendable(self, key: str, access: Access) -> bool:
        """Whether `lease` would lend it now."""
        group = self._groups[key]
        if not group.present(self.top) or group.exclusive or group.forgotten:
            return False
        return access is Access.READ or not (group.leases or group.held or group.moving())

    def release(self, key: str, access: Access, *, for_good: bool = False) -> None:
        """A lease comes back, which was lent `for_good` or not."""
        group = self._groups[key]
        group.leases -= 1
        self._leases -= not for_good
        group.exclusive = None
        if access is Access.TAKE:
            self._discard(group)
        self._tidy(group)
        self._look_ahead |= self._cramped
        self._settle()

    def offload(self, key: str) -> None:
        """Give up the copy on the fastest tier, saving it one tier down if it is the only one."""
        self._offloads[key] = None
        self._schedule.expect_not(name_of(key))
        self._settle()

    def vacate(self) -> None:
        """Give up what nobody uses on the fastest tier and is on another: its memory is wanted.

        Nothing is fetched early before the next use.
        """
        self._drop_idle()
        self._look_ahead = False
        self._settle()

    def keep(self, key: str) -> None:
        """The group should stay in host memory: no other gets its room as long as there is any."""
        self._groups[key].kept = True

    def resize(self, nbytes: int) -> None:
        """The fastest tier, an accelerator's, has so many bytes from now on.

        If those are fewer: copies go that nobody uses and another tier has, those needed last
        first. The tier keeps room for the copies that are left, and for its largest group.
        """
        tier, before = self.top, self.budgets[self.top]
        assert before is not None
        for group in list(self._candidates(tier, None)) if nbytes < self.used[tier] else ():
            if self._evictable(group, tier, None) and group.valid_elsewhere(tier):
                self._drop(group, tier)
            if self.used[tier] <= nbytes:
                break
        largest = max((group.nbytes for group in self._groups.values()), default=0)
        self.budgets[tier] = max(nbytes, self.used[tier], min(largest, before))
        self._in_vain.clear()
        self._look_ahead = True
        self._settle()

    def save(self, key: str) -> None:
        """See that a copy is on disk. `saved` tells when; `error_of` if it cannot be."""
        self._groups[key].error = None
        self._saves[key] = None
        self._settle()

    def forgive(self, key: str) -> None:
        """The error of a save was told: forget it, so that the group can be used again."""
        self._groups[key].error = None

    def saving(self, key: str) -> bool:
        """Whether a save is still being pursued."""
        return key in self._saves

    def saved(self, key: str) -> bool:
        """Whether a valid copy is on disk."""
        return self._groups[key].present(Tier.DISK)

    def discard(self, key: str) -> None:
        """Forget the group; its copies go as soon as nothing uses them."""
        self._discard(self._groups[key])
        self._settle()

    def ending(self, key: str, dst: Tier, src: Tier) -> None:
        """The last bytes of a copy that was instructed move: soon the hop has nothing to do."""
        copy = self._groups[key].copies[dst]
        if not copy.ending:
            copy.ending = True
            self._foresight.hops[src, dst].ending += 1
            self._look_ahead = True
            self._settle()

    def arrived(self, key: str, dst: Tier, src: Tier | None = None, *, timed: bool = True) -> None:
        """A copy that was instructed (or a claim that was granted: no `src`) is complete.

        If it is not `timed`, it is only queued so far, for who uses it in order with the device;
        `measured` tells later how long its bytes took to move.
        """
        group = self._groups[key]
        group.copies[dst].state = State.PRESENT
        self._policy.admitted(key, dst)
        self._over(group, src, dst, came=True, timed=timed)
        self._claims.pop(key, None)
        self._look_ahead = True
        self._tidy(group)
        self._settle()

    def failed(self, key: str, dst: Tier, src: Tier, error: BaseException) -> None:
        """A copy that was instructed could not be made: `src` is still valid, `dst` is not."""
        group = self._groups[key]
        self._over(group, src, dst, came=False)
        self._release_room(group, dst)
        self._look_ahead = True
        if dst < src:
            group.error = error
            self._abandon(group)
        else:
            self._fail_save(group, src, error)
        self._tidy(group)
        self._settle()

    def measured(self, dst: Tier, src: Tier, nbytes: int, began: float, ended: float) -> None:
        """So many bytes of a copy moved between these times, in seconds of the clock."""
        self._foresight.hops[src, dst].measure(nbytes, began, ended)

    def ran(self, key: str, asked: float, began: float) -> None:
        """On the device a use of `key` began, for which it had waited since it was `asked` for."""
        group = self._groups.get(key)
        self._foresight.ran(-1 if group is None else group.number, asked, began)

    def error_of(self, key: str) -> BaseException | None:
        """Why the group could not be brought or saved; None while all is well."""
        return self._groups[key].error

    def instructions(self) -> list[Instruction]:
        """What to do, in this order, since the last call."""
        pending, self._instructions = self._instructions, []
        return pending

    # Questions ---------------------------------------------------------------------------------

    def __contains__(self, key: str) -> bool:
        return key in self._groups and not self._groups[key].forgotten

    def state_of(self, key: str) -> State | None:
        """How far the copy on the fastest tier is; None if there is none."""
        copy = self._groups[key].copies.get(self.top)
        return None if copy is None else copy.state

    def residence(self, key: str) -> tuple[Tier, ...]:
        """The tiers that hold a complete copy."""
        group = self._groups[key]
        return tuple(tier for tier in self.tiers if group.present(tier))

    def backed(self, key: str) -> bool:
        """Whether a checkpoint holds the group's bytes."""
        return self._groups[key].backed

    def idle(self) -> bool:
        """Whether nothing is on its way."""
        return self._in_flight == 0

    def all_there(self) -> bool:
        """Whether every group has its place on the fastest tier."""
        return self._foresight.all_there()

    # Pursuing what is wanted -------------------------------------------------------------------

    def _settle(self) -> None:
        """Pursue everything that is wanted, the most pressing first."""
        needs = self._demands or self._claims or self._saves or self._offloads or self._promised
        if needs or self._fetches:
            self._settle_needs()
        elif self._look_ahead:
            self._look_ahead = self._cramped = False
            self._pursue_hopes(self.tiers[-2::-1])

    def _settle_needs(self) -> None:
        if self._look_ahead and self._all_have_room():
            # What was fetched early and came half-way goes on before its place is needed again.
            self._pursue_hopes(self.tiers[:1])
        roomy = self._pursue_needs()
        if roomy and self._look_ahead:  # a hope must not take the room that somebody waits for
            self._look_ahead = self._cramped = False
            self._pursue_hopes(self.tiers[-2::-1])
        if self._promised and self._abandon_orphans():
            self._pursue_needs()
        self._fail_what_is_stuck()

    def _pursue_needs(self) -> bool:
        """Pursue what somebody insists on. False if a demand or a claim waits for room."""
        self._in_vain.clear()  # from here to the end, what there was no room for has none
        for key in list(self._offloads):
            self._pursue_offload(self._groups[key])
        roomy = [self._pull(self._groups[key]) for key in list(self._demands)]
        roomy += [self._fetch(self._groups[key]) for key in list(self._fetches)]
        roomy += [self._grant(self._groups[key]) for key in list(self._claims)]
        for key in list(self._saves):
            self._pursue_save(self._groups[key])
        self._in_vain.clear()
        return all(roomy)

    # Giving up ---------------------------------------------------------------------------------

    def _withdraw_claim(self, group: GroupRecord) -> None:
        tier = self._put_tier()
        if tier in group.copies:
            self._in_flight -= 1
            self._release_room(group, tier)
        self._discard(group)

    def _discard(self, group: GroupRecord) -> None:
        group.forgotten = True
        for wanted in (self._demands, self._fetches, self._claims, self._saves, self._offloads):
            wanted.pop(group.key, None)
        name = name_of(group.key)
        if self._newest.get(name) == group.key:
            del self._newest[name]
            self._schedule.forget(name)
            self._unnumber(group)
        self._abandon(group)
        self._tidy(group)

    def _unmet(self) -> list[GroupRecord]:
        demands = [self._groups[key] for key in self._demands]
        claims = [self._groups[key] for key in self._claims]
        waiting = [g for g in demands if not self._on_its_way(g)]
        fetches = [self._groups[key] for key in self._fetches]
        waiting += [g for g in fetches if self._put_tier() not in g.copies]
        return [g for g in waiting + [c for c in claims if not c.copies] if g.error is None]

    def _on_its_way(self, group: GroupRecord) -> bool:
        copy = group.copies.get(self.top)
        return copy is not None and copy.state is not State.RESERVED

    def _fail_save(self, group: GroupRecord, src: Tier, error: BaseException) -> None:
        """The copy on `src` stays; whoever waits for the save, or for its room, is told why."""
        group.copies[src].unwanted = False
        waiting = self._unmet()
        if group.key in self._saves:
            del self._saves[group.key]
            waiting.append(group)
        for other in waiting:
            other.error = error
            self._abandon(other)

    def _fail_what_is_stuck(self) -> None:
        """Nothing is moving and nothing is lent, so whoever still waits would wait for ever.

        The largest is told first: when it does not wait any more, others may get on.
        """
        while not self._in_flight and not self._leases and not self._about_to_wake():
            waiting = self._unmet() + [self._groups[key] for key in self._saves]
            if not waiting:
                return
            group = max(waiting, key=lambda group: group.nbytes)
            group.error = self._no_room(group)
            self._abandon(group)
            self._saves.pop(group.key, None)
            self._pursue_needs()

    def _about_to_wake(self) -> bool:
        """Whether what somebody waits for is there: they will give their lease back."""
        places = [(k, self.top) for k in self._demands if self._on_its_way(self._groups[k])]
        places += [(key, self._put_tier()) for key in self._fetches]
        found = [(self._groups[key], tier) for key, tier in places]
        return any(tier in g.copies and not self._is_kept(g, tier) for g, tier in found)

    def _no_room(self, group: GroupRecord) -> BudgetError:
        held = sum(g.nbytes for g in self._groups.values() if g.held is Hold.KEEP)
        tier = self._put_tier()
        stuck = max(self._unsaved(group), key=lambda g: g.nbytes)
        if held and not self._free(tier, stuck.nbytes):
            advice = f"{held:,} bytes are in use there for good"
            if stuck is not group:
                advice += f", which leaves no room for group {name_of(stuck.key)!r} to go there"
            advice += "; raise ram_budget"
        else:
            tier = Tier.DISK
            advice = (
                f"{self.used[tier]:,} bytes are in use there and nothing may be dropped; raise "
                "disk_budget, or discard groups that are not needed"
            )
        budget = self.budgets[tier]
        limit = self.used[tier] if budget is None else budget
        return BudgetError(name_of(group.key), tier.name, group.nbytes, limit, advice)

    def _unsaved(self, group: GroupRecord) -> Iterator[GroupRecord]:
        """Who may need room in host memory: the group, and what is only on the device."""
        yield group
        if self.top is not self._put_tier():
            for other in self._groups.values():
                if other.present(self.top) and not other.valid_elsewhere(self.top):
                    yield other
