"""How groups get nearer to the fastest tier, and away from it: one move at a time.

Needs are pursued until they are met: a demand to the fastest tier, a claim to its room, an offload
and a save downwards. What is fetched early is pursued as far as the prefetcher finds it time, and
room that nobody needs sooner.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tierstore.errors import BudgetError
from tierstore.model.tiers import HostAccess, Tier
from tierstore.plan.copies import CopyTable
from tierstore.plan.eviction import Eviction
from tierstore.plan.matching import Numbers
from tierstore.plan.pools import Pool
from tierstore.plan.prefetch import Prefetcher
from tierstore.plan.records import GroupRecord, State
from tierstore.plan.requests import Requests


@dataclass(eq=False, slots=True)
class Movement:
    """The next move towards what is wanted of a group.

    `look_ahead` is set when something has changed since anything was last fetched early, and
    `short_of_room` when there was none for that.
    """

    _copies: CopyTable
    _requests: Requests
    _eviction: Eviction
    _prefetcher: Prefetcher
    look_ahead: bool = False
    short_of_room: bool = False

    # Towards who needs it ----------------------------------------------------------------------

    def pull_up(self, group: GroupRecord) -> bool:
        """Move `group` towards the fastest tier. False if there was no room to set aside."""
        copies, set_aside = self._copies, self._eviction.set_aside
        top = copies.top
        if group.error is not None or group.forgotten or group.present(top):
            return True
        if not any(group.present(tier) for tier in group.copies):
            return True
        if group.shared and not copies.can_ever_hold(group):
            return True  # it waits until others allow more, and keeps nobody from the top meanwhile
        if top not in group.copies and not set_aside(group, top):
            return False
        # Not before: what was saved to make that room may have taken the place of the source.
        fastest = min(tier for tier in group.copies if group.present(tier))
        above = copies.above[fastest]
        copy = group.copies.get(above)
        if copy is not None and copy.state is State.ARRIVING:
            return True
        if copy is None and not set_aside(group, above):
            return False
        copies.start(group, fastest, above, urgent=True)
        return True

    def bring_to_host(self, group: GroupRecord) -> bool:
        """Move `group` towards host memory. False if there was no room to set aside."""
        copies, set_aside = self._copies, self._eviction.set_aside
        host = copies.host
        if group.error is not None or group.forgotten or group.exclusive or host in group.copies:
            return True
        present = [tier for tier in group.copies if group.present(tier)]
        if not present:
            return True
        source = min((tier for tier in present if tier > host), default=max(present))
        towards = copies.above[source] if source > host else copies.below[source]
        only_room = self._requests.only_for_new_values(group)
        dst = host if only_room else towards
        if dst in group.copies:
            return True
        if not set_aside(group, dst):
            return False
        if only_room:
            copies.promised.pop(group, None)
            copies.in_vain.clear()
        else:
            copies.start(group, source, dst, urgent=True)
        return True

    def grant_claim(self, group: GroupRecord) -> bool:
        """Give a put its room. False if there is none."""
        host = self._copies.host
        if group.error is not None or host in group.copies:
            return True
        if not self._eviction.set_aside(group, host):
            return False
        self._copies.grant(group)
        return True

    # Ahead of who will need it -----------------------------------------------------------------

    def fetch_early(self, tiers: Iterable[Tier]) -> None:
        """Fetch to `tiers` what would be late otherwise."""
        if self._prefetcher.all_there():
            return
        for dst in tiers:
            blocked = None  # the first group that had no room
            stuck: list[int] = []  # what is not on the tier below yet, by streams of uses
            while (found := self._prefetcher.next_missing(dst, blocked, stuck)) is not None:
                number, sooner = found
                group = self._copies.numbered[number]
                if (
                    group.error is not None
                    or not group.copies
                    or not self._copies.can_ever_hold(group)
                ):
                    self._prefetcher.pass_over(number)
                elif self._prefetcher.several and not group.present(self._copies.below[dst]):
                    stuck.append(number)
                elif not self._fetch_one_early(group, dst, sooner):
                    others = dst is self._copies.host and self._copies.shared.limit
                    if blocked is not None or not others:
                        break
                    blocked = group.shared  # there may be room for the others

    def _fetch_one_early(self, group: GroupRecord, dst: Tier, sooner: Numbers) -> bool:
        """Copy `group` to `dst`, if it is on the tier below and there is room."""
        src = self._copies.below[dst]
        if not group.present(src):
            return False
        self._eviction.needed_sooner = set(sooner.tolist())
        if not self._eviction.set_aside(group, dst, rival=group):
            self.short_of_room = True
            return False
        self._copies.start(group, src, dst, urgent=False)
        self._prefetcher.took_early(group.number, dst)
        return True

    # Away --------------------------------------------------------------------------------------

    def offload(self, group: GroupRecord) -> None:
        """Give up the copy on the fastest tier as soon as that loses nothing."""
        top, offloads = self._copies.top, self._requests.offloads
        copy = group.copies.get(top)
        if self._requests.is_waited_for(group, top):
            return
        if copy is None or copy.state is State.RESERVED:
            self._copies.abandon(group)
            del offloads[group]
        elif copy.state is State.ARRIVING or self._eviction.save_below(group, top):
            self._eviction.leave_when_saved(group, top)
            del offloads[group]
            self.tidy(group)

    def spill(self, group: GroupRecord) -> None:
        """Begin to save a group in host memory that nobody has asked to save."""
        host = self._copies.host
        below = self._copies.below[host]
        if group.forgotten or not group.present(host) or below in group.copies:
            return
        if self._eviction.set_aside(group, below):
            self._copies.start(group, host, below, urgent=False)

    def save(self, group: GroupRecord) -> None:
        """Move a group that is to be saved one tier down."""
        if group.saved() or group.forgotten or group.error is not None:
            self._requests.saves.pop(group, None)
            return
        if group.exclusive or not group.copies:
            return
        lowest = max((tier for tier in group.copies if group.present(tier)), default=None)
        if lowest is None:
            return
        below = self._copies.below[lowest]
        if below not in group.copies and self._eviction.set_aside(group, below):
            self._copies.start(group, lowest, below, urgent=True)

    def forget(self, group: GroupRecord) -> None:
        """Nobody can ask for a group any more; its copies go as soon as nothing uses them."""
        self._copies.forget(group)
        self._requests.drop_all(group)
        self._copies.abandon(group)
        self.tidy(group)

    def tidy(self, group: GroupRecord) -> None:
        """Let go of what is unwanted or forgotten and no longer in use."""
        if not group.forgotten and not any([copy.unwanted for copy in group.copies.values()]):
            return
        copies = self._copies
        for tier in list(group.copies):
            copy = group.copies[tier]
            if copies.in_use(group, tier):
                continue
            if group.forgotten or (copy.unwanted and group.valid_elsewhere(tier)):
                copies.drop(group, tier)
            elif copy.unwanted:
                copy.unwanted = False
                if tier is copies.top:
                    self._requests.offloads[group] = None
        if group.forgotten and not group.copies and group.id in copies.groups:
            copies.remove(group)

    def want_again(self, group: GroupRecord) -> None:
        """What was to leave may stay."""
        self._requests.offloads.pop(group, None)
        for tier, copy in group.copies.items():
            if tier in self._copies.below:
                copy.unwanted = False

    # Room --------------------------------------------------------------------------------------

    def give_back_shared_room(self) -> None:
        """Others may allow less room for shared groups than these take: what is idle goes. What
        can come no more gives up the room that was set aside for it on the fastest tier."""
        copies = self._copies
        if copies.shared.is_over():
            self._eviction.drop_idle(copies.shared, copies.shared.limit or 0)
        for group in [group for group in copies.promised if group.shared]:
            if not copies.can_ever_hold(group):
                copies.abandon(group)

    def idle_on_top(self) -> Iterator[GroupRecord]:
        """What nobody uses, or is about to, on the fastest tier, and is on another, too."""
        top = self._copies.top
        for group in self._copies.groups.values():
            idle = group.present(top) and not self._copies.in_use(group, top)
            wanted = self._requests.is_waited_for(group, top)
            if idle and group.valid_elsewhere(top) and not wanted:
                yield group

    def abandon_orphans(self) -> bool:
        """Give up room set aside for what nobody wants any more. True if there was any."""
        orphans = [
            group
            for group in self._copies.promised
            if group not in self._requests.demands and not group.moving()
        ]
        for group in orphans:
            self._copies.abandon(group)
        return bool(orphans)


@dataclass(eq=False, slots=True)
class Fixpoint:
    """Pursues everything that is wanted, the most pressing first."""

    _copies: CopyTable
    _requests: Requests
    _movement: Movement

    def run(self) -> None:
        """Make the next move of everything that is wanted, and fail what can never be met."""
        requests = self._requests  # looked through here: this is asked after every use
        if (
            requests.demands
            or requests.claims
            or requests.saves
            or requests.offloads
            or requests.host_demands
            or self._copies.promised
        ):
            self._pursue_all()
            return
        if self._copies.shared.used:
            self._movement.give_back_shared_room()
        if self._movement.look_ahead:
            self._fetch_early()

    def _pursue_all(self) -> None:
        copies, movement = self._copies, self._movement
        movement.give_back_shared_room()
        beside_an_accelerator = copies.top is not copies.host
        if movement.look_ahead and beside_an_accelerator and self._requests.only_need_the_top():
            # What was fetched early and came half-way goes on before its place is needed again.
            movement.fetch_early((copies.top,))
        roomy = self._pursue_needs()
        if roomy and movement.look_ahead:  # a hope must not take the room that somebody waits for
            self._fetch_early()
        if copies.promised and movement.abandon_orphans():
            movement.give_back_shared_room()
            self._pursue_needs()
        self._fail_what_is_stuck()

    def _fetch_early(self) -> None:
        self._movement.look_ahead = self._movement.short_of_room = False
        self._movement.fetch_early(self._copies.tiers[-2::-1])

    def _pursue_needs(self) -> bool:
        """Pursue what somebody insists on. False if a demand or a claim waits for room."""
        requests, movement = self._requests, self._movement
        in_vain = self._copies.in_vain
        in_vain.clear()  # from here to the end, what there was no room for has none
        for group in list(requests.offloads):
            movement.offload(group)
        roomy = [movement.pull_up(group) for group in list(requests.demands)]
        roomy += [movement.bring_to_host(group) for group in list(requests.host_demands)]
        roomy += [movement.grant_claim(group) for group in list(requests.claims)]
        for group in list(requests.saves):
            movement.save(group)
        in_vain.clear()
        return all(roomy)

    def _fail_what_is_stuck(self) -> None:
        """Nothing is moving and nothing is lent, so whoever still waits would wait for ever.

        The largest is told first: when it does not wait any more, others may get on.
        """
        copies = self._copies
        if any(copies.borrowed.values()):
            return  # it comes back before anybody waits for ever
        while not copies.in_flight and not copies.leased and not self._about_to_wake():
            waiting = [*self._requests.unmet(), *self._requests.saves]
            if not waiting:
                return
            group = max(waiting, key=lambda group: group.nbytes)
            group.error = self._no_room(group)
            self._copies.abandon(group)
            self._requests.saves.pop(group, None)
            self._pursue_needs()

    def _about_to_wake(self) -> bool:
        """Whether what somebody waits for is there: they will give their lease back."""
        copies, requests = self._copies, self._requests
        coming = [(group, copies.top) for group in requests.demands if requests.is_coming(group)]
        coming += [(group, copies.host) for group in requests.host_demands]
        return any(
            tier in group.copies
            and not (tier is copies.host and group.host_lease is HostAccess.PERMANENT)
            for group, tier in coming
        )

    def _no_room(self, group: GroupRecord) -> BudgetError:
        copies = self._copies
        shared = copies.shared
        if group.shared and shared.tier not in group.copies and group.nbytes > (shared.limit or 0):
            return _budget_error(group, shared, shared.advice())
        pool = copies.pool(group, copies.top)
        needed = self._kept(pool) + group.nbytes
        if group in self._requests.demands and pool.limit is not None and needed > pool.limit:
            kept = needed - group.nbytes
            advice = f"{kept:,} bytes are in use there for good; {pool.advice(needed)}"
            return _budget_error(group, pool, advice)
        stuck = max(self._may_need_host_memory(group), key=lambda g: g.nbytes)
        pool = copies.pool(stuck, copies.host)
        kept = self._kept(pool)
        if kept and not pool.has_room(stuck.nbytes):
            advice = f"{kept:,} bytes are in use there for good"
            if stuck is not group:
                advice += f", which leaves no room for group {stuck.id.key!r} to go there"
            advice += f"; {pool.advice()}"
            return _budget_error(group, pool, advice)
        pool = copies.pools[copies.below[copies.host]]
        advice = (
            f"{pool.used:,} bytes are in use there and nothing may be dropped; raise "
            "disk_budget, or discard groups that are not needed"
        )
        return _budget_error(group, pool, advice)

    def _kept(self, pool: Pool) -> int:
        """The bytes that somebody has in a pool for good. Nothing else is leased."""
        copies, tier = self._copies, pool.tier
        top, host = tier is copies.top, tier is copies.host
        return sum(
            group.nbytes
            for group in copies.groups.values()
            if ((top and group.leases) or (host and group.host_lease is HostAccess.PERMANENT))
            and copies.pool(group, tier) is pool
        )

    def _may_need_host_memory(self, group: GroupRecord) -> Iterator[GroupRecord]:
        """The group, and what is only on the device."""
        only_above = [other for other in self._copies.groups.values() if self._is_only_above(other)]
        yield from only_above
        if not (group.shared and only_above):  # room for what is shared makes none for them
            yield group

    def _is_only_above(self, group: GroupRecord) -> bool:
        top = self._copies.top
        above = top is not self._copies.host and group.present(top)
        return above and not group.valid_elsewhere(top)


def _budget_error(group: GroupRecord, pool: Pool, advice: str) -> BudgetError:
    limit = pool.used if pool.limit is None else pool.limit
    return BudgetError(group.id.key, pool.tier.name, group.nbytes, limit, advice)
