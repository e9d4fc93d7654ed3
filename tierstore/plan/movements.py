"""How groups get nearer to the fastest tier, and away from it: one move at a time.

Needs are pursued until they are met: a demand to the fastest tier, a claim to its room, an offload
and a save downwards. Hopes are pursued as far as the foresight finds it time, and room that nobody
needs sooner.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized

from tierstore.model.moves import Forget, Reserve
from tierstore.model.tiers import Hold, Tier
from tierstore.plan.foresight import Foresight
from tierstore.plan.matching import Numbers
from tierstore.plan.policy import Policy
from tierstore.plan.records import GroupRecord, State
from tierstore.plan.shelves import Shelves


class Movements(Shelves):
    """What is wanted of the copies on the shelves, and the next move towards it."""

    def __init__(
        self, budgets: dict[Tier, int | None], policy: Policy, foresight: Foresight
    ) -> None:
        super().__init__(budgets, policy, foresight)
        self._numbered: dict[int, GroupRecord] = {}  # the newest version of each name
        self._cramped = False  # there was no room for a hope
        self._saves: dict[str, None] = {}
        self._offloads: dict[str, None] = {}

    def _pull(self, group: GroupRecord) -> bool:
        """Move `group` towards the fastest tier. False if there was no room to set aside."""
        if group.error is not None or group.forgotten or group.present(self.top):
            return True
        if not any(group.present(tier) for tier in group.copies):
            return True
        if self.top not in group.copies and not self._set_aside(group, self.top, None):
            return False
        # Not before: what was saved to make that room may have taken the place of the source.
        fastest = min(tier for tier in group.copies if group.present(tier))
        above = self.tiers[self.tiers.index(fastest) - 1]
        copy = group.copies.get(above)
        if copy is not None and copy.state is State.ARRIVING:
            return True
        if copy is None and not self._set_aside(group, above, None):
            return False
        self._start(group, fastest, above, urgent=True)
        return True

    def _fetch(self, group: GroupRecord) -> bool:
        """Move `group` to host memory. False if there was no room to set aside."""
        host = self.tiers[-2]
        if group.error is not None or group.forgotten or group.exclusive or host in group.copies:
            return True
        source = max((tier for tier in group.copies if group.present(tier)), default=None)
        if source is None:
            return True
        if not self._set_aside(group, host, None):
            return False
        if set(self._fetches[group.key]) == {Hold.RENEW}:
            self._promised.discard(group.key)  # only the room is wanted
            self._in_vain.clear()
        else:
            self._start(group, source, host, urgent=True)
        return True

    def _all_have_room(self) -> bool:
        """Whether nobody waits for room on the fastest tier."""
        wanted: tuple[Sized, ...] = (self._claims, self._saves, self._offloads, self._fetches)
        waiting = any(wanted) or len(self.tiers) < 3
        return not waiting and all(self.top in self._groups[k].copies for k in self._demands)

    def _pursue_hopes(self, tiers: Iterable[Tier]) -> None:
        """Fetch to `tiers` what would be late otherwise."""
        if self._foresight.all_there():
            return
        for dst in tiers:
            while (found := self._foresight.next_missing(dst)) is not None:
                number, sooner = found
                group = self._numbered[number]
                if group.error is not None or not group.copies or not self._fits(group):
                    self._foresight.pass_over(number)
                elif not self._hope(group, dst, sooner):
                    break

    def _hope(self, group: GroupRecord, dst: Tier, sooner: Numbers) -> bool:
        """Copy `group` to `dst`, if it is on the tier below and there is room."""
        src = self.tiers[self.tiers.index(dst) + 1]
        if not group.present(src):
            return False
        self._ahead = set(sooner.tolist())
        if not self._set_aside(group, dst, group.key):
            self._cramped = True
            return False
        self._start(group, src, dst, urgent=False)
        self._foresight.took_early(group.number, dst)
        return True

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

    def spare_bytes(self) -> int:
        """Bytes on the fastest tier that `vacate` would free."""
        return sum(group.cost(self.top) for group in self._idle_on_top())

    def _drop_idle(self) -> None:
        for group in list(self._idle_on_top()):
            self._drop(group, self.top)

    def _idle_on_top(self) -> Iterator[GroupRecord]:
        """What nobody uses, or is about to, on the fastest tier, and is on another, too."""
        for group in self._groups.values():
            idle = group.present(self.top) and not self._in_use(group, self.top)
            if (
                idle
                and group.valid_elsewhere(self.top)
                and not self._is_wanted(group.key, self.top)
            ):
                yield group

    def _pursue_offload(self, group: GroupRecord) -> None:
        copy = group.copies.get(self.top)
        if self._is_wanted(group.key, self.top):
            return
        if copy is None or copy.state is State.RESERVED:
            self._abandon(group)
            del self._offloads[group.key]
        elif copy.state is State.ARRIVING or self._put_away(group, self.top):
            copy.unwanted = True
            self._note_parting(group, self.top)
            del self._offloads[group.key]
            self._tidy(group)

    def spill_early(self, key: str) -> int:
        """Begin to save a group that will have to make room soon. Returns the bytes to be written.

        A hope: if it fails, only those who wait for room are told.
        """
        group, src = self._groups[key], self._put_tier()
        if group.forgotten or not group.present(src) or Tier.DISK in group.copies:
            return 0
        if not self._set_aside(group, Tier.DISK, None):
            return 0
        self._start(group, src, Tier.DISK, urgent=False)
        return group.nbytes

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
        if not group.forgotten and not any(copy.unwanted for copy in group.copies.values()):
            return
        for tier in list(group.copies):
            copy = group.copies[tier]
            if self._in_use(group, tier):
                continue
            if group.forgotten or (copy.unwanted and group.valid_elsewhere(tier)):
                self._drop(group, tier)
            elif copy.unwanted:
                copy.unwanted = False
                if tier is self.top:
                    self._offloads[group.key] = None
        if group.forgotten and not group.copies and group.key in self._groups:
            del self._groups[group.key]
            self._instructions.append(Forget(group.key))

    def _want_again(self, group: GroupRecord) -> None:
        self._offloads.pop(group.key, None)
        for tier in self.tiers[:-1]:
            if tier in group.copies:
                group.copies[tier].unwanted = False
