"""How groups get nearer to the fastest tier, and away from it: one move at a time.

Needs are pursued until they are met: a demand to the fastest tier, a claim to its room, an offload
and a save downwards. What is fetched early is pursued as far as the prefetcher finds it time, and
room that nobody needs sooner.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tierstore.model.tiers import Tier
from tierstore.plan.copies import CopyTable
from tierstore.plan.eviction import Eviction
from tierstore.plan.matching import Numbers
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
            while (found := self._prefetcher.next_missing(dst)) is not None:
                number, sooner = found
                group = self._copies.numbered[number]
                if (
                    group.error is not None
                    or not group.copies
                    or not self._copies.can_ever_hold(group)
                ):
                    self._prefetcher.pass_over(number)
                elif not self._fetch_one_early(group, dst, sooner):
                    break

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
        if not group.forgotten and not any(copy.unwanted for copy in group.copies.values()):
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

    # Room on the fastest tier ------------------------------------------------------------------

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
