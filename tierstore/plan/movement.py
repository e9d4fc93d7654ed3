"""Moves groups towards the fastest tier and away from it, one hop at a time.

Requests are pursued until they are met: a demand up to the fastest tier, a claim until it has
space, an offload and a save downwards. A prefetch is pursued only when the prefetcher finds it
due, into space that is not needed sooner.
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
    """Makes the next move for each request.

    `look_ahead` is set when something has changed since the last prefetch, and `short_of_space`
    when a prefetch found no space.
    """

    _copies: CopyTable
    _requests: Requests
    _eviction: Eviction
    _prefetcher: Prefetcher
    look_ahead: bool = False
    short_of_space: bool = False

    # Up, for requests --------------------------------------------------------------------------

    def move_up(self, group: GroupRecord) -> bool:
        """Move `group` towards the fastest tier. Returns False if there was no space to reserve."""
        copies, reserve_space = self._copies, self._eviction.reserve_space
        top = copies.top
        if group.error is not None or group.forgotten or group.present(top):
            return True
        if not any(group.present(tier) for tier in group.copies):
            return True
        if group.shared and not copies.can_fit(group):
            return True  # it waits for a higher limit, without blocking other requests
        if top not in group.copies and not reserve_space(group, top):
            return False
        # Only now: a save that made this space may have replaced the source.
        fastest = min(tier for tier in group.copies if group.present(tier))
        above = copies.above[fastest]
        copy = group.copies.get(above)
        if copy is not None and copy.state is State.ARRIVING:
            return True
        if copy is None and not reserve_space(group, above):
            return False
        copies.start(group, fastest, above, urgent=True)
        return True

    def move_to_host(self, group: GroupRecord) -> bool:
        """Move `group` towards host memory. Returns False if there was no space to reserve."""
        copies, reserve_space = self._copies, self._eviction.reserve_space
        host = copies.host
        if group.error is not None or group.forgotten or group.exclusive or host in group.copies:
            return True
        present = [tier for tier in group.copies if group.present(tier)]
        if not present:
            return True
        source = min((tier for tier in present if tier > host), default=max(present))
        towards = copies.above[source] if source > host else copies.below[source]
        only_space = self._requests.only_for_new_values(group)
        dst = host if only_space else towards
        if dst in group.copies:
            return True
        if not reserve_space(group, dst):
            return False
        if only_space:
            copies.promised.pop(group, None)
            copies.blocked_sizes.clear()
        else:
            copies.start(group, source, dst, urgent=True)
        return True

    def grant_claim(self, group: GroupRecord) -> bool:
        """Give a put its space. Returns False if there is none."""
        host = self._copies.host
        if group.error is not None or host in group.copies:
            return True
        if not self._eviction.reserve_space(group, host):
            return False
        self._copies.grant(group)
        return True

    # Up, ahead of use --------------------------------------------------------------------------

    def fetch_early(self, tiers: Iterable[Tier]) -> None:
        """Prefetch to `tiers` the groups that would be late otherwise."""
        if self._prefetcher.all_there():
            return
        for dst in tiers:
            blocked = None  # whether the first group without space was shared
            stuck: list[int] = []  # groups not on the tier below yet, if there are several streams
            while (found := self._prefetcher.next_missing(dst, blocked, stuck)) is not None:
                number, sooner = found
                group = self._copies.numbered[number]
                if group.error is not None or not group.copies or not self._copies.can_fit(group):
                    self._prefetcher.pass_over(number)
                elif self._prefetcher.several and not group.present(self._copies.below[dst]):
                    stuck.append(number)
                elif not self._fetch_one_early(group, dst, sooner):
                    others = dst is self._copies.host and self._copies.shared.limit
                    if blocked is not None or not others:
                        break
                    blocked = group.shared  # there may be space for the others

    def _fetch_one_early(self, group: GroupRecord, dst: Tier, sooner: Numbers) -> bool:
        """Copy `group` to `dst` from the tier below. Returns False if no copy or space exists."""
        src = self._copies.below[dst]
        if not group.present(src):
            return False
        self._eviction.needed_sooner = set(sooner.tolist())
        if not self._eviction.reserve_space(group, dst, rival=group):
            self.short_of_space = True
            return False
        self._copies.start(group, src, dst, urgent=False)
        self._prefetcher.fetched_early(group.number, dst)
        return True

    # Down --------------------------------------------------------------------------------------

    def offload(self, group: GroupRecord) -> None:
        """Drop the copy on the fastest tier as soon as another one is valid."""
        top, offloads = self._copies.top, self._requests.offloads
        copy = group.copies.get(top)
        if self._requests.is_waited_for(group, top):
            return
        if copy is None or copy.state is State.RESERVED:
            self._copies.abandon(group)
            del offloads[group]
        elif copy.state is State.ARRIVING or self._eviction.save_below(group, top):
            self._eviction.drop_when_saved(group, top)
            del offloads[group]
            self.tidy(group)

    def spill(self, group: GroupRecord) -> None:
        """Begin to save a group that is in host memory, without a request."""
        host = self._copies.host
        below = self._copies.below[host]
        if group.forgotten or not group.present(host) or below in group.copies:
            return
        if self._eviction.reserve_space(group, below):
            self._copies.start(group, host, below, urgent=False)

    def save(self, group: GroupRecord) -> None:
        """Move a group that is to be saved down by one tier."""
        if group.saved() or group.forgotten or group.error is not None:
            self._requests.saves.pop(group, None)
            return
        if group.exclusive or not group.copies:
            return
        lowest = max((tier for tier in group.copies if group.present(tier)), default=None)
        if lowest is None:
            return
        below = self._copies.below[lowest]
        if below not in group.copies and self._eviction.reserve_space(group, below):
            self._copies.start(group, lowest, below, urgent=True)

    def forget(self, group: GroupRecord) -> None:
        """Forget a group: its copies are dropped as soon as they are not in use."""
        self._copies.forget(group)
        self._requests.drop_all(group)
        self._copies.abandon(group)
        self.tidy(group)

    def tidy(self, group: GroupRecord) -> None:
        """Drop the copies that are unwanted or forgotten and not in use."""
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

    def cancel_drops(self, group: GroupRecord) -> None:
        """Cancel the pending drops of a group's copies, since it is requested again."""
        self._requests.offloads.pop(group, None)
        for tier, copy in group.copies.items():
            if tier in self._copies.below:
                copy.unwanted = False

    # Space -------------------------------------------------------------------------------------

    def shrink_shared(self) -> None:
        """Bring shared groups within their limit, which the service may have lowered.

        Drops idle copies, and frees the space reserved on the fastest tier for groups that no
        longer fit the limit.
        """
        copies = self._copies
        if copies.shared.over_limit():
            self._eviction.drop_idle(copies.shared, copies.shared.limit or 0)
        for group in [group for group in copies.promised if group.shared]:
            if not copies.can_fit(group):
                copies.abandon(group)

    def idle_on_top(self) -> Iterator[GroupRecord]:
        """Yield the groups with an idle copy on the fastest tier that is valid elsewhere."""
        top = self._copies.top
        for group in self._copies.groups.values():
            idle = group.present(top) and not self._copies.in_use(group, top)
            wanted = self._requests.is_waited_for(group, top)
            if idle and group.valid_elsewhere(top) and not wanted:
                yield group

    def abandon_unwanted(self) -> bool:
        """Free the space reserved for groups without a request. Returns whether there was any."""
        unwanted = [
            group
            for group in self._copies.promised
            if group not in self._requests.demands and not group.moving()
        ]
        for group in unwanted:
            self._copies.abandon(group)
        return bool(unwanted)


@dataclass(eq=False, slots=True)
class Fixpoint:
    """Pursues all requests, the most pressing first."""

    _copies: CopyTable
    _requests: Requests
    _movement: Movement

    def run(self) -> None:
        """Make the next move for every request, and fail the requests that can never be met."""
        requests = self._requests  # checked here, because this runs after every use
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
            self._movement.shrink_shared()
        if self._movement.look_ahead:
            self._fetch_early()

    def _pursue_all(self) -> None:
        copies, movement = self._copies, self._movement
        movement.shrink_shared()
        beside_an_accelerator = copies.top is not copies.host
        if movement.look_ahead and beside_an_accelerator and self._requests.only_need_the_top():
            # Prefetched groups that are half-way move on before their space is needed again.
            movement.fetch_early((copies.top,))
        has_space = self._pursue_needs()
        if has_space and movement.look_ahead:  # a prefetch must not take space from a waiter
            self._fetch_early()
        if copies.promised and movement.abandon_unwanted():
            movement.shrink_shared()
            self._pursue_needs()
        self._fail_blocked()

    def _fetch_early(self) -> None:
        self._movement.look_ahead = self._movement.short_of_space = False
        self._movement.fetch_early(self._copies.tiers[-2::-1])

    def _pursue_needs(self) -> bool:
        """Pursue the requests. Returns False if a demand or a claim waits for space."""
        requests, movement = self._requests, self._movement
        blocked_sizes = self._copies.blocked_sizes
        blocked_sizes.clear()  # valid until the end: no space is freed meanwhile
        for group in list(requests.offloads):
            movement.offload(group)
        has_space = [movement.move_up(group) for group in list(requests.demands)]
        has_space += [movement.move_to_host(group) for group in list(requests.host_demands)]
        has_space += [movement.grant_claim(group) for group in list(requests.claims)]
        for group in list(requests.saves):
            movement.save(group)
        blocked_sizes.clear()
        return all(has_space)

    def _fail_blocked(self) -> None:
        """Fail requests that would wait for ever, as nothing is moving and nothing is leased.

        The largest group fails first, which may unblock the others.
        """
        copies = self._copies
        if any(copies.carved_out.values()):
            return  # that memory will be returned
        while not copies.in_flight and not copies.leased and not self._about_to_wake():
            waiting = [*self._requests.unmet(), *self._requests.saves]
            if not waiting:
                return
            group = max(waiting, key=lambda group: group.nbytes)
            group.error = self._no_space(group)
            self._copies.abandon(group)
            self._requests.saves.pop(group, None)
            self._pursue_needs()

    def _about_to_wake(self) -> bool:
        """Return whether a request is met: its waiter will lease the group, then release it."""
        copies, requests = self._copies, self._requests
        coming = [(group, copies.top) for group in requests.demands if requests.is_in_flight(group)]
        coming += [(group, copies.host) for group in requests.host_demands]
        return any(
            tier in group.copies
            and not (tier is copies.host and group.host_lease is HostAccess.PERMANENT)
            for group, tier in coming
        )

    def _no_space(self, group: GroupRecord) -> BudgetError:
        copies = self._copies
        shared = copies.shared
        if group.shared and shared.tier not in group.copies and group.nbytes > (shared.limit or 0):
            return _budget_error(group, shared, shared.advice())
        pool = copies.pool(group, copies.top)
        needed = self._kept(pool) + group.nbytes
        if group in self._requests.demands and pool.limit is not None and needed > pool.limit:
            kept = needed - group.nbytes
            advice = f"{kept:,} bytes are in use there permanently; {pool.advice(needed)}"
            return _budget_error(group, pool, advice)
        stuck = max(self._may_need_host_memory(group), key=lambda g: g.nbytes)
        pool = copies.pool(stuck, copies.host)
        kept = self._kept(pool)
        if kept and not pool.has_space(stuck.nbytes):
            advice = f"{kept:,} bytes are in use there permanently"
            if stuck is not group:
                advice += f", which leaves no space for group {stuck.id.key!r}"
            advice += f"; {pool.advice()}"
            return _budget_error(group, pool, advice)
        pool = copies.pools[copies.below[copies.host]]
        advice = (
            f"{pool.used:,} bytes are in use there and nothing may be dropped; raise "
            "disk_budget, or discard groups that are not needed"
        )
        return _budget_error(group, pool, advice)

    def _kept(self, pool: Pool) -> int:
        """Return the bytes of a pool that are leased permanently. There are no other leases."""
        copies, tier = self._copies, pool.tier
        top, host = tier is copies.top, tier is copies.host
        return sum(
            group.nbytes
            for group in copies.groups.values()
            if ((top and group.leases) or (host and group.host_lease is HostAccess.PERMANENT))
            and copies.pool(group, tier) is pool
        )

    def _may_need_host_memory(self, group: GroupRecord) -> Iterator[GroupRecord]:
        """Yield the groups that are only on the device, and the group itself."""
        only_above = [other for other in self._copies.groups.values() if self._is_only_above(other)]
        yield from only_above
        if not (group.shared and only_above):  # shared space is of no use to the others
            yield group

    def _is_only_above(self, group: GroupRecord) -> bool:
        top = self._copies.top
        above = top is not self._copies.host and group.present(top)
        return above and not group.valid_elsewhere(top)


def _budget_error(group: GroupRecord, pool: Pool, advice: str) -> BudgetError:
    limit = pool.used if pool.limit is None else pool.limit
    return BudgetError(group.id.key, pool.tier.name, group.nbytes, limit, advice)
