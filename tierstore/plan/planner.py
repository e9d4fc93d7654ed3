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

from collections.abc import Iterable, Mapping

from tierstore.model.errors import BudgetError
from tierstore.model.groups import name_of
from tierstore.model.moves import Copy, Drop, Forget, Instruction, Reserve
from tierstore.model.tiers import Access, Tier
from tierstore.plan.policy import Policy
from tierstore.plan.records import CopyRecord, GroupRecord, State
from tierstore.plan.schedule import Schedule

LOOKAHEAD = 16
"""How many uses ahead are looked at for something to fetch early."""


class Planner:
    """Plans for the tiers of `budgets` (bytes; None for no limit). The disk must be among them."""

    def __init__(
        self,
        budgets: Mapping[Tier, int | None],
        policy: Policy,
        schedule: Schedule,
    ) -> None:
        self.tiers = tuple(sorted(budgets))
        self.top = self.tiers[0]
        self.budgets = dict(budgets)
        self.used = {tier: 0 for tier in self.tiers}
        self.peak = {tier: 0 for tier in self.tiers}
        self._policy = policy
        self._schedule = schedule
        self._largest = 0
        self._groups: dict[str, GroupRecord] = {}
        self._newest: dict[str, str] = {}  # name -> the version of it that was made last
        self._demands: dict[str, int] = {}
        self._claims: dict[str, None] = {}
        self._saves: dict[str, None] = {}
        self._offloads: dict[str, None] = {}
        self._instructions: list[Instruction] = []
        self._parting: set[tuple[str, Tier]] = set()  # copies that go when their save is done
        self._promised: set[str] = set()  # groups with room set aside on the fastest tier
        self._ahead: set[str] = set()  # groups needed sooner than the one being fetched early
        self._leases = 0
        self._in_flight = 0

    # Steps -------------------------------------------------------------------------------------

    def register(self, key: str, nbytes: int, *, backed: bool) -> None:
        """A group is on disk: in a checkpoint (`backed`), or in a file of the store's own."""
        group = GroupRecord(key, nbytes, backed)
        group.copies[Tier.DISK] = CopyRecord(State.PRESENT)
        self._know(group)
        self._take_room(Tier.DISK, group.cost(Tier.DISK))
        self._policy.admitted(key, Tier.DISK)
        self._schedule.introduce(name_of(key))

    def claim(self, key: str, nbytes: int) -> None:
        """A caller wants to put a group: find room in host memory. See `granted`."""
        self._refuse_what_never_fits(key, nbytes, (self._put_tier(),))
        self._know(GroupRecord(key, nbytes))
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
        self._want_again(group)
        self._settle()

    def withdraw(self, key: str) -> None:
        """Take one demand, or a claim that was not filled, back."""
        if key in self._claims:
            self._withdraw_claim(self._groups[key])
        elif self._demands.get(key, 0) > 1:
            self._demands[key] -= 1
        elif self._demands.pop(key, None) and key in self._groups:
            self._groups[key].error = None
        self._settle()

    def prefetch(self, keys: Iterable[str]) -> None:
        """The caller hopes to use these next, in this order."""
        keys = [key for key in keys if not self._groups[key].forgotten]
        for key in keys:
            self._want_again(self._groups[key])
        self._schedule.expect(name_of(key) for key in keys)
        self._settle()

    def lease(self, key: str, access: Access) -> bool:
        """Lend `key` out if it is on the fastest tier and nobody uses it in another way."""
        group = self._groups[key]
        if not group.present(self.top) or group.exclusive or group.forgotten:
            return False
        if access is not Access.READ:
            if group.leases or group.moving():
                return False
        if access is Access.UPDATE:
            self._keep_only(group, self.top)
        group.exclusive = None if access is Access.READ else access
        group.leases += 1
        self._leases += 1
        self._policy.used(key)
        self._schedule.advance_past(name_of(key))
        self._settle()
        return True

    def release(self, key: str, access: Access) -> None:
        """A lease comes back."""
        group = self._groups[key]
        group.leases -= 1
        self._leases -= 1
        group.exclusive = None
        if access is Access.TAKE:
            self._discard(group)
        self._tidy(group)
        self._settle()

    def offload(self, key: str) -> None:
        """Give up the copy on the fastest tier, saving it one tier down if it is the only one."""
        self._offloads[key] = None
        self._settle()

    def save(self, key: str) -> None:
        """See that a copy is on disk. `saved` tells when; `error_of` if it cannot be."""
        self._groups[key].error = None
        self._saves[key] = None
        self._settle()

    def forgive(self, key: str) -> None:
        """The error of a save was told: forget it, so that the group can be used again."""
        self._groups[key].error = None

    def saved(self, key: str) -> bool:
        """Whether a valid copy is on disk."""
        return self._groups[key].present(Tier.DISK)

    def discard(self, key: str) -> None:
        """Forget the group; its copies go as soon as nothing uses them."""
        self._discard(self._groups[key])
        self._settle()

    def arrived(self, key: str, dst: Tier, src: Tier | None = None) -> None:
        """A copy that was instructed (or a claim that was granted: no `src`) is complete."""
        group = self._groups[key]
        group.copies[dst].state = State.PRESENT
        self._in_flight -= 1
        self._policy.admitted(key, dst)
        self._done_reading(group, src)
        self._claims.pop(key, None)
        self._tidy(group)
        self._settle()

    def failed(self, key: str, dst: Tier, src: Tier, error: BaseException) -> None:
        """A copy that was instructed could not be made: `src` is still valid, `dst` is not."""
        group = self._groups[key]
        self._release_room(group, dst)
        self._in_flight -= 1
        self._done_reading(group, src)
        if dst < src:
            group.error = error
            self._abandon(group)
        else:
            self._fail_save(group, src, error)
        self._tidy(group)
        self._settle()

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

    # Bringing groups nearer --------------------------------------------------------------------

    def _settle(self) -> None:
        """Pursue everything that is wanted, the most pressing first."""
        roomy = self._pursue_needs()
        self._pursue_hopes(begin=roomy)  # a hope must not take the room that somebody waits for
        if self._abandon_orphans():
            self._pursue_needs()
        if not self._in_flight and not self._leases:
            self._fail_what_is_stuck()

    def _pursue_needs(self) -> bool:
        """Pursue what somebody insists on. False if a demand or a claim waits for room."""
        for key in list(self._offloads):
            self._pursue_offload(self._groups[key])
        roomy = [self._pull(self._groups[key], None) for key in list(self._demands)]
        roomy += [self._grant(self._groups[key]) for key in list(self._claims)]
        for key in list(self._saves):
            self._pursue_save(self._groups[key])
        return all(roomy)

    def _pull(self, group: GroupRecord, rival: str | None) -> bool:
        """Move `group` towards the fastest tier. False if there was no room to set aside."""
        if group.error is not None or group.forgotten or group.present(self.top):
            return True
        fastest = min((t for t in group.copies if group.present(t)), default=None)
        if fastest is None:
            return True
        if self.top not in group.copies and not self._set_aside(group, self.top, rival):
            return False
        above = self.tiers[self.tiers.index(fastest) - 1]
        copy = group.copies.get(above)
        if copy is not None and copy.state is State.ARRIVING:
            return True
        if copy is None and not self._set_aside(group, above, rival):
            return False
        self._start(group, fastest, above, urgent=rival is None)
        return True

    def _pursue_hopes(self, *, begin: bool) -> None:
        """Fetch what is needed next, as far ahead as two large groups, but no further.

        Unless `begin`, only finish what has its room on the fastest tier already.

        A longer horizon would fetch sooner what could stay on disk for longer: a scan that does
        not fit would then be read whole on every pass.
        """
        self._ahead.clear()
        ahead = 0
        for name in self._schedule.upcoming(LOOKAHEAD):
            group = self._hope(name)
            if group is None or not (begin or group.key in self._promised):
                continue
            if ahead and ahead + group.nbytes > self._horizon():
                return
            if not self._pull(group, group.key):
                return
            if group.key not in self._ahead:
                ahead += group.nbytes
                self._ahead.add(group.key)

    def _hope(self, name: str) -> GroupRecord | None:
        group = self._groups.get(self._newest.get(name, ""))
        usable = group is not None and group.error is None and self._fits(group)
        return group if usable else None

    def _horizon(self) -> int:
        budget = self.budgets[self.top]
        return 2 * self._largest if budget is None else min(2 * self._largest, budget // 4)

    def _fits(self, group: GroupRecord) -> bool:
        budgets = (self.budgets[tier] for tier in self.tiers[:-1])
        return all(budget is None or group.nbytes <= budget for budget in budgets)

    def _grant(self, group: GroupRecord) -> bool:
        tier = self._put_tier()
        if group.error is not None or tier in group.copies:
            return True
        if not self._set_aside(group, tier, None):
            return False
        group.copies[tier].state = State.ARRIVING
        self._promised.discard(group.key)
        self._in_flight += 1
        self._instructions.append(Reserve(group.key, group.nbytes, tier))
        return True

    def _put_tier(self) -> Tier:
        return self.tiers[-2]

    def _start(self, group: GroupRecord, src: Tier, dst: Tier, *, urgent: bool) -> None:
        group.copies[dst].state = State.ARRIVING
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

    def _abandon_orphans(self) -> bool:
        """Give up room set aside for what nobody wants any more. True if there was any."""
        orphans = [
            self._groups[key]
            for key in self._promised
            if key not in self._demands and not self._groups[key].moving()
        ]
        for group in orphans:
            self._abandon(group)
        return bool(orphans)

    # Putting groups away -----------------------------------------------------------------------

    def _pursue_offload(self, group: GroupRecord) -> None:
        copy = group.copies.get(self.top)
        if group.key in self._demands:
            return
        if copy is None or copy.state is State.RESERVED:
            self._abandon(group)
            del self._offloads[group.key]
        elif copy.state is State.ARRIVING or self._put_away(group, self.top):
            copy.unwanted = True
            self._note_parting(group, self.top)
            del self._offloads[group.key]
            self._tidy(group)

    def _put_away(self, group: GroupRecord, tier: Tier) -> bool:
        """See that the copy on `tier` may go: True if it may, or will when a save is done."""
        if group.valid_elsewhere(tier) or group.exclusive:
            return True
        below = self.tiers[self.tiers.index(tier) + 1]
        if below in group.copies:
            return True
        if not self._set_aside(group, below, None):
            return False
        self._start(group, tier, below, urgent=True)
        return True

    def _pursue_save(self, group: GroupRecord) -> None:
        if group.present(Tier.DISK) or group.forgotten or group.error is not None:
            self._saves.pop(group.key, None)
            return
        if group.exclusive or not group.copies:
            return
        lowest = max((t for t in group.copies if group.present(t)), default=None)
        if lowest is None:
            return
        below = self.tiers[self.tiers.index(lowest) + 1]
        if below not in group.copies and self._set_aside(group, below, None):
            self._start(group, lowest, below, urgent=True)

    def _tidy(self, group: GroupRecord) -> None:
        """Let go of what is unwanted or forgotten and no longer in use."""
        for tier in list(group.copies):
            copy = group.copies[tier]
            if self._in_use(group, tier):
                continue
            if group.forgotten:
                self._drop(group, tier)
            elif copy.unwanted and group.valid_elsewhere(tier):
                self._drop(group, tier)
            elif copy.unwanted:
                copy.unwanted = False
                if tier is self.top:
                    self._offloads[group.key] = None
        if group.forgotten and not group.copies and self._groups.pop(group.key, None):
            self._instructions.append(Forget(group.key))

    def _in_use(self, group: GroupRecord, tier: Tier) -> bool:
        copy = group.copies[tier]
        leased = tier is self.top and group.leases > 0
        return leased or copy.readers > 0 or copy.state is State.ARRIVING

    def _withdraw_claim(self, group: GroupRecord) -> None:
        tier = self._put_tier()
        if tier in group.copies:
            self._in_flight -= 1
            self._release_room(group, tier)
        self._discard(group)

    def _discard(self, group: GroupRecord) -> None:
        group.forgotten = True
        for wanted in (self._demands, self._claims, self._saves, self._offloads):
            wanted.pop(group.key, None)
        name = name_of(group.key)
        if self._newest.get(name) == group.key:
            del self._newest[name]
            self._schedule.forget(name)
        self._abandon(group)
        self._tidy(group)

    def _want_again(self, group: GroupRecord) -> None:
        self._offloads.pop(group.key, None)
        for tier in self.tiers[:-1]:
            if tier in group.copies:
                group.copies[tier].unwanted = False

    def _keep_only(self, group: GroupRecord, tier: Tier) -> None:
        for other in [t for t in group.copies if t is not tier]:
            self._drop(group, other)
        group.backed = False

    # Room --------------------------------------------------------------------------------------

    def _set_aside(self, group: GroupRecord, tier: Tier, rival: str | None) -> bool:
        """Take room for a copy of `group` on `tier`, evicting what must and may go."""
        nbytes = group.cost(tier)
        if not self._free(tier, nbytes) and not self._evict(tier, nbytes, rival, group):
            return False
        group.copies[tier] = CopyRecord(State.RESERVED)
        if tier is self.top:
            self._promised.add(group.key)
        self._take_room(tier, nbytes)
        return True

    def _free(self, tier: Tier, nbytes: int) -> bool:
        budget = self.budgets[tier]
        return budget is None or self.used[tier] + nbytes <= budget

    def _evict(self, tier: Tier, nbytes: int, rival: str | None, keep: GroupRecord) -> bool:
        """Make room on `tier`. True if it is there now; False if it is not, or not yet."""
        short = self.used[tier] + nbytes - (self.budgets[tier] or 0)
        chosen = []
        ranked = self._policy.victims(tier, rival)
        for key in sorted(ranked, key=self._to_go_up):  # a demand's own source last
            if short <= 0:
                break
            group = self._groups[key]
            if group is keep or not self._evictable(group, tier, rival):
                continue
            chosen.append(group)
            short -= group.cost(tier)
        if rival is None:
            short -= self._leaving(tier)
        if short > 0:
            return False
        for group in chosen:
            if self._free(tier, nbytes):
                break
            self._evict_copy(group, tier, nbytes)
        return self._free(tier, nbytes)

    def _evict_copy(self, group: GroupRecord, tier: Tier, nbytes: int) -> None:
        if group.valid_elsewhere(tier):
            self._drop(group, tier)
        elif not self._free(tier, nbytes - self._leaving(tier)) and self._put_away(group, tier):
            group.copies[tier].unwanted = True
            self._note_parting(group, tier)

    def _note_parting(self, group: GroupRecord, tier: Tier) -> None:
        self._parting.add((group.key, tier))

    def _evictable(self, group: GroupRecord, tier: Tier, rival: str | None) -> bool:
        copy = group.copies[tier]
        if self._in_use(group, tier) or copy.unwanted or tier is Tier.DISK:
            return False
        if group.key in self._promised or (rival is not None and group.key in self._ahead):
            return False  # it is the source of a copy on its way up, or needed sooner
        if tier is self.top and group.key in self._demands:
            return False  # its waiter is about to wake up and lease it
        return rival is None or group.valid_elsewhere(tier)

    def _to_go_up(self, key: str) -> bool:
        return key in self._demands and not self._groups[key].present(self.top)

    def _leaving(self, tier: Tier) -> int:
        """Bytes of `tier` that go as soon as a save that is under way is done."""
        self._parting = {(key, t) for key, t in self._parting if self._is_parting(key, t)}
        return sum(self._groups[key].nbytes for key, t in self._parting if t is tier)

    def _is_parting(self, key: str, tier: Tier) -> bool:
        group = self._groups.get(key)
        copy = group.copies.get(tier) if group else None
        return group is not None and copy is not None and copy.unwanted and copy.readers > 0

    def _take_room(self, tier: Tier, nbytes: int) -> None:
        self.used[tier] += nbytes
        self.peak[tier] = max(self.peak[tier], self.used[tier])

    def _release_room(self, group: GroupRecord, tier: Tier) -> None:
        self.used[tier] -= group.cost(tier)
        copy = group.copies.pop(tier)
        if copy.state is not State.RESERVED:
            self._instructions.append(Drop(group.key, group.nbytes, tier))

    def _drop(self, group: GroupRecord, tier: Tier) -> None:
        self._release_room(group, tier)
        self._policy.dropped(group.key, tier)

    def _done_reading(self, group: GroupRecord, src: Tier | None) -> None:
        if src is not None:
            group.copies[src].readers -= 1

    # Giving up ---------------------------------------------------------------------------------

    def _refuse_what_never_fits(self, key: str, nbytes: int, tiers: Iterable[Tier]) -> None:
        for tier in tiers:
            budget = self.budgets[tier]
            if budget is not None and nbytes > budget:
                name = "ram_budget" if tier is Tier.HOST else "device_budget"
                advice = f"raise {name} to at least {nbytes:,} bytes, or use smaller groups"
                raise BudgetError(name_of(key), tier.name, nbytes, budget, advice)

    def _unmet(self) -> list[GroupRecord]:
        demands = [self._groups[key] for key in self._demands]
        claims = [self._groups[key] for key in self._claims]
        waiting = [g for g in demands if not self._on_its_way(g)]
        return [g for g in waiting + [c for c in claims if not c.copies] if g.error is None]

    def _on_its_way(self, group: GroupRecord) -> bool:
        copy = group.copies.get(self.top)
        return copy is not None and copy.state is not State.RESERVED

    def _fail_save(self, group: GroupRecord, src: Tier, error: BaseException) -> None:
        """The copy on `src` stays; whoever waits for the save, or for its room, is told why."""
        group.copies[src].unwanted = False
        waiting = self._unmet()
        if self._saves.pop(group.key, False) is None:
            waiting.append(group)
        for other in waiting:
            other.error = error
            self._abandon(other)

    def _fail_what_is_stuck(self) -> None:
        """Nothing is moving and nothing is lent, so whoever still waits would wait for ever."""
        if any(self._groups[key].present(self.top) for key in self._demands):
            return  # a waiter is about to wake up, and will give its lease back
        waiting = self._unmet() + [self._groups[key] for key in self._saves]
        for group in waiting:
            group.error = self._no_room(group)
            self._abandon(group)
            self._saves.pop(group.key, None)

    def _no_room(self, group: GroupRecord) -> BudgetError:
        tier = Tier.DISK
        advice = (
            f"{self.used[tier]:,} bytes are in use there and nothing may be dropped; raise "
            "disk_budget, or discard groups that are not needed"
        )
        budget = self.budgets[tier] or 0
        return BudgetError(name_of(group.key), tier.name, group.nbytes, budget, advice)

    def _know(self, group: GroupRecord) -> None:
        self._groups[group.key] = group
        self._largest = max(self._largest, group.nbytes)
        self._newest[name_of(group.key)] = group.key

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
