"""Copies in host memory that somebody has, to look at them or to change them.

On the fastest tier groups are leased. In host memory, which on the CPU is the same, they are held:
by an optimizer, say, which works there whatever the model computes on.
"""

from __future__ import annotations

from collections.abc import Iterable

from tierstore.model.errors import BudgetError
from tierstore.model.groups import name_of
from tierstore.model.moves import Reserve
from tierstore.model.tiers import Hold, Tier
from tierstore.plan.foresight import Foresight
from tierstore.plan.movements import Movements
from tierstore.plan.policy import Policy
from tierstore.plan.records import GroupRecord, State
from tierstore.plan.schedule import Schedule


class Holding(Movements):
    """What is held in host memory, what somebody wants to hold there, and for what."""

    def __init__(
        self,
        budgets: dict[Tier, int | None],
        policy: Policy,
        schedule: Schedule,
        foresight: Foresight,
    ) -> None:
        super().__init__(budgets, policy, foresight)
        self._schedule = schedule
        self._look_ahead = False  # something has changed since hopes were last pursued
        self._leases = 0  # those that somebody may wait for
        self._newest: dict[str, str] = {}  # name -> the version of it that was made last

    def _settle(self) -> None:
        """Pursue everything that is wanted."""
        raise NotImplementedError

    def _know(self, group: GroupRecord) -> None:
        name = name_of(group.key)
        self._groups[group.key] = group
        self._newest[name] = group.key
        number = self._schedule.number(name)
        if number in self._numbered:
            self._unnumber(self._numbered[number])
        group.number = number
        self._numbered[number] = group
        self._foresight.know(number, group.nbytes)

    def _unnumber(self, group: GroupRecord) -> None:
        """The number is another's, or nobody's, from now on."""
        self._foresight.forget(group.number)
        del self._numbered[group.number]
        group.number = -1

    def fetch(self, key: str, purpose: Hold) -> None:
        """Somebody wants to hold `key` in host memory, until `hold` or `withdraw_fetch`."""
        group = self._groups[key]
        self._refuse_what_never_fits(key, group.nbytes, (self._put_tier(),))
        self._fetches.setdefault(key, []).append(purpose)
        self._want_again(group)
        self._settle()

    def withdraw_fetch(self, key: str, purpose: Hold) -> None:
        """One of those who want to hold it does so no more."""
        if key in self._fetches:
            self._groups[key].error = None
            self._fetched(key, purpose)
            self._settle()

    def _fetched(self, key: str, purpose: Hold) -> None:
        purposes = self._fetches[key]
        purposes.remove(purpose)
        if not purposes:
            del self._fetches[key]
        if set(purposes) != {Hold.RENEW}:
            self._give_up_room_for_new_values(self._groups[key])

    def _give_up_room_for_new_values(self, group: GroupRecord) -> None:
        host = self._put_tier()
        copy = group.copies.get(host)
        if copy is not None and copy.state is State.RESERVED:
            self._release_room(group, host)

    def hold(self, key: str, purpose: Hold) -> bool:
        """Give the copy in host memory to one who has called `fetch`, until `let_go`.

        If it is to be changed it is the only one then; but copies of it may be made meanwhile, by
        who knows when it does not change. False if it is not there yet, or is in use.
        """
        group, host = self._groups[key], self._put_tier()
        if group.held or group.leases or group.moving() or host not in group.copies:
            return False
        if group.copies[host].state is State.RESERVED:
            if purpose is not Hold.RENEW:
                return False
            group.copies[host].state = State.PRESENT
            self._policy.admitted(key, host)
            self._instructions.append(Reserve(key, group.nbytes, host))
        group.held = purpose
        self._fetched(key, purpose)
        self._leases += group.held is not Hold.KEEP
        if group.held is not Hold.READ:
            self._keep_only(group, host)
        self._note_use(group)
        self._settle()
        return True

    def kept(self, key: str) -> bool:
        """Whether somebody holds it for good: nobody else may change it, or hold it."""
        return self._groups[key].held is Hold.KEEP

    def let_go(self, key: str) -> None:
        """What was held in host memory comes back."""
        group = self._groups[key]
        self._leases -= group.held is not Hold.KEEP
        group.held = None
        self._tidy(group)
        self._look_ahead |= self._cramped
        self._settle()

    def put_away(self, key: str) -> None:
        """Give up every copy above the disk of a group that is `saved`, once nobody uses it."""
        group = self._groups[key]
        self._schedule.expect_not(name_of(key))
        self._abandon(group)
        for tier, copy in group.copies.items():
            copy.unwanted |= tier is not Tier.DISK and not self._is_wanted(key, tier)
        self._tidy(group)
        self._settle()

    def arriving(self, key: str) -> bool:
        """Whether a copy above the disk is on its way."""
        copies = self._groups[key].copies.items()
        return any(t is not Tier.DISK and c.state is State.ARRIVING for t, c in copies)

    def _note_use(self, group: GroupRecord) -> None:
        self._policy.used(group.key)
        self._look_ahead = True
        if group.guided:
            self._schedule.come(name_of(group.key))
            self._foresight.came(group.number)
            return
        self._schedule.advance_past(name_of(group.key))
        self._foresight.used(group.number)
        if self._foresight.choose_residents(group.number):
            residents = self._foresight.residents
            self._policy.keep(residents.staying, residents.nearer)

    def _refuse_what_never_fits(self, key: str, nbytes: int, tiers: Iterable[Tier]) -> None:
        for tier in tiers:
            budget = self.budgets[tier]
            if budget is not None and nbytes > budget:
                name = "ram_budget" if tier is Tier.HOST else "device_budget"
                advice = f"raise {name} to at least {nbytes:,} bytes, or use smaller groups"
                raise BudgetError(name_of(key), tier.name, nbytes, budget, advice)

    def _is_kept(self, group: GroupRecord, tier: Tier) -> bool:
        return tier is self._put_tier() and group.held is Hold.KEEP
