"""When to fetch early: as late as possible, but before a stall would follow.

The rule is FORESTALL (Kimbrel et al., OSDI 1996). Fetching everything as soon as possible evicts
what is still needed: a scan that does not fit is then read whole on every pass. Fetching only the
next group or two stalls where several that are missing lie close together. So one looks at the
predicted uses: the computing that is left before each missing group against the time that all
bytes missing up to there take to come. Only if the bytes could be late, the first of them is
fetched now.

Times are measured, not assumed: the computing that follows the use of a group, and the bytes per
second of each hop, as moving averages. Until they are known, about two groups are fetched ahead.

Where several streams of uses go on beside each other, each has its own time: a use is expected
after the computing of its own stream before it. What they foretell is looked at in the order of
these times, as if it were one order.

Hops are looked at one by one. Disk to host needs room in host memory, host to device room on the
device. As the disk is the slower of the two, its hop looks further ahead all by itself.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tierstore.model import shares
from tierstore.model.tiers import Tier, in_memory
from tierstore.plan.foreseen import NEAR, Foreseen, values_of
from tierstore.plan.hop_speed import HopSpeed
from tierstore.plan.matching import Numbers
from tierstore.plan.pools import Sizes
from tierstore.plan.schedule import Schedule

WINDOW = 400
"""Uses that are looked ahead at, of all streams together, ..."""
LEAST = 50
"""... and of each at least."""
AT_ONCE = 4
"""Copies on their way over one hop, however small."""
STEADY = 0.1
"""How far, on average, the latest times may be from what was expected."""
CAUTION = 1.15
"""How much longer than measured a transfer may take, ..."""
SLACK = 0.5
"""... and how many times the group itself beyond that."""

_WEIGHT = 0.25
_OUTLIER = 4.0
_SURPRISED = 0.05
_ROOM = 16


@dataclass
class _Use:
    """The use that goes on: seconds of computing that were `spent` until it was resumed."""

    number: int
    resumed: float
    spent: float = 0.0


class Prefetcher:
    """What will be missing, and whether it should be fetched now.

    Groups go by the numbers of the schedule. `budgets` are the planner's; `now` is the time of the
    latest event, in seconds. Where groups are used on a device that works later than it is told to,
    that time says only how long its caller takes to tell it; then uses are `timed_by_device`, which
    tells (`ran`) how long it computes. A stream goes by its place in the schedule.
    """

    def __init__(
        self,
        schedule: Schedule,
        budgets: Mapping[Tier, int | None],
        *,
        timed_by_device: bool = False,
    ) -> None:
        self.now = 0.0
        self._timed_by_device = timed_by_device
        self._running: _Use | None = None  # on the device
        self._schedule = schedule
        self.hops = {(src, dst): HopSpeed() for src in budgets for dst in budgets if src is not dst}
        tiers = sorted(budgets)
        self._tiers = tuple(tiers[:-1])
        self._way_to = {dst: (src, dst) for dst, src in pairwise(tiers)}
        self._host = in_memory(tiers)[-1]
        self.sizes = Sizes(budgets, self._host)
        # By number: bytes, seconds of computing after a use, on which tiers it has room, and for
        # how many bytes it should have some, had it time.
        self.nbytes = np.zeros(_ROOM, dtype=np.int64)
        self._seconds = np.zeros(_ROOM)
        self._held = {tier: np.zeros(_ROOM, dtype=np.bool_) for tier in self._tiers}
        self._lacking = {tier: np.zeros(_ROOM) for tier in self._tiers}
        self._fetchable = np.zeros(_ROOM, dtype=np.bool_)  # known, and not passed over
        self._highest = np.zeros(_ROOM, dtype=np.int64)  # the fastest tier that it is hoped for on
        self._early: dict[Tier, dict[int, int]] = {tier: {} for tier in self._tiers}
        self._known = 0
        self._known_bytes = 0
        self._on_top = 0
        self._surprise = 1.0  # how far the latest times were from what was expected
        self._uses: dict[int, _Use] = {}  # by stream: the use that goes on

    # Books -------------------------------------------------------------------------------------

    def know(self, number: int, nbytes: int, *, shared: bool = False) -> None:
        """A group of `nbytes` bytes is known by this number."""
        if number >= len(self.nbytes) - 1:  # the last place is nobody's
            more = number  # at least as much again
            self.nbytes, self._seconds, self._fetchable, self._highest = (
                np.append(array, np.zeros(more, array.dtype))
                for array in (self.nbytes, self._seconds, self._fetchable, self._highest)
            )
            for by_tier in (self._held, self._lacking):
                for tier, array in by_tier.items():
                    by_tier[tier] = np.append(array, np.zeros(more, array.dtype))
        self.nbytes[number] = nbytes
        self._fetchable[number] = True
        if shared:
            self.sizes.shared.add(number)
        self._highest[number] = 0
        self._seconds[number] = 0.0
        self._see(number)
        self._known += 1
        self._known_bytes += nbytes

    def forget(self, number: int) -> None:
        """The group is gone, or another now goes by its number."""
        self._known -= 1
        self._known_bytes -= int(self.nbytes[number])
        self.sizes.shared.discard(number)
        for tier in self._tiers:
            self.gave_up(number, tier)
        self.nbytes[number] = 0
        self._fetchable[number] = False
        self._see(number)
        for stream in [s for s, use in self._uses.items() if use.number == number]:
            del self._uses[stream]
        if self._running is not None and self._running.number == number:
            self._running = None

    def took(self, number: int, tier: Tier) -> None:
        """The group has room on `tier`, whether or not the bytes are there."""
        if tier in self._held and not self._held[tier][number]:
            self._held[tier][number] = True
            self._fetchable[number] = True
            self._see(number)
            self._on_top += tier is self._tiers[0]

    def took_early(self, number: int, tier: Tier) -> None:
        """The group is being copied to `tier` before anybody asked for it."""
        self._early[tier][number] = int(self.nbytes[number])

    def gave_up(self, number: int, tier: Tier) -> None:
        """The group has no room on `tier` any more."""
        if tier in self._held and self._held[tier][number]:
            self._held[tier][number] = False
            self._see(number)
            self._early[tier].pop(number, None)
            self._on_top -= tier is self._tiers[0]

    def aim(self, number: int, highest: Tier) -> None:
        """The group is hoped for on tiers up to this one."""
        if number >= 0:
            self._highest[number] = highest
            self._see(number)

    def pass_over(self, number: int, *, ended: bool = False) -> None:
        """Fetch the group no more until somebody insists on it, or this has `ended`: it cannot be
        had."""
        self._fetchable[number] = ended
        self._see(number)

    def check(self, nbytes: Mapping[int, int], held: Mapping[Tier, set[int]]) -> None:
        """Assert that these groups are known, with their bytes, and have room on these tiers."""
        assert (self._known, self._known_bytes) == (len(nbytes), sum(nbytes.values()))
        assert all(self.nbytes[number] == known for number, known in nbytes.items())
        for tier, on_tier in self._held.items():
            assert set(np.flatnonzero(on_tier).tolist()) == held[tier], tier.name
        assert self._on_top == len(held[self._tiers[0]])

    def _see(self, number: int) -> None:
        """Note where the group is missing: not where it is nearer already."""
        wanted, highest = self._fetchable.item(number), self._highest.item(number)
        nbytes = max(self.nbytes.item(number), 1)  # it is missing even if it has none
        for tier in self._tiers:
            wanted = wanted and not self._held[tier].item(number)
            self._lacking[tier][number] = nbytes if wanted and highest <= tier else 0

    # Times -------------------------------------------------------------------------------------

    def asked(self, number: int, stream: int = 0) -> None:
        """A stream asks for a group: the computing after its last use is over."""
        now, use = self.now, self._uses.get(stream)
        if use is None:
            return
        use.spent += now - use.resumed
        use.resumed = now
        if use.number != number:
            if not self._timed_by_device:
                self._learn(use.number, use.spent)
            del self._uses[stream]

    def _learn(self, number: int, spent: float) -> None:
        """A use is over: so many seconds of computing followed it."""
        old = self._seconds.item(number)
        if not old:
            self._seconds[number] = spent
            return
        off = abs(spent - old) / max(spent, old)
        self._surprise += _SURPRISED * (off - self._surprise)
        # A pause, as between two prompts, is no computing.
        self._seconds[number] = old + _WEIGHT * (min(spent, _OUTLIER * old) - old)

    def computing_seconds(self, number: int) -> float:
        """The seconds of computing that follow a use."""
        return self._seconds.item(number)

    def used(self, number: int, stream: int = 0) -> None:
        """A group was lent: the computing of a stream goes on."""
        self.came(number)
        now, use = self.now, self._uses.get(stream)
        if number < 0:
            self._uses.pop(stream, None)  # nothing is foreseen of an older version
        elif use is None or use.number != number:
            self._uses[stream] = _Use(number, now)
        else:
            use.resumed = now

    def ran(self, number: int, asked: float, began: float) -> None:
        """On the device a use began, for which it had waited since it was `asked` for."""
        last = self._running
        if last is not None:
            last.spent += max(asked - last.resumed, 0.0)  # streams are told of in any order
            last.resumed = began
            if last.number == number:
                return
            self._learn(last.number, last.spent)
        self._running = _Use(number, began) if number >= 0 else None

    def came(self, number: int) -> None:
        """A group was lent. Nothing is learned from that."""
        for early in self._early.values():
            early.pop(number, None)

    def _remaining(self, stream: int) -> float:
        """Seconds of computing that are left of the use that goes on."""
        use = self._uses.get(stream)
        if use is None:
            return 0.0
        spent = use.spent + self.now - use.resumed
        return max(self._seconds.item(use.number) - spent, 0.0)

    @property
    def several(self) -> bool:
        """Whether several streams of uses go on beside each other."""
        return self._schedule.several

    # The question ------------------------------------------------------------------------------

    def all_there(self) -> bool:
        """Whether every known group is on the fastest tier: nothing is left to foresee."""
        return self._on_top == self._known

    def about_as_far(self, number: int, farthest: int) -> bool:
        """Whether one group is used next no sooner than in a quarter of the time until another is.

        Within a loop that is so for most of them; not for what comes only after the loop, nor for
        what nobody expects, or knows by a number (from 0).
        """
        if min(number, farthest) < 0:
            return False
        ranks = self._schedule.ranks(np.array([number, farthest]))
        return bool(
            math.isfinite(ranks[1]) and self._schedule.farther(ranks[:1], 4.0)[0] >= ranks[1]
        )

    def next_missing(
        self, dst: Tier, without: bool | None = None, stuck: Collection[int] = ()
    ) -> tuple[int, Numbers] | None:
        """The group to copy to `dst` now, if any, and those that are used before it.

        None: nothing is missing, or there is time. A group that is nearer than `dst` already is
        not missing. `without`: those that are shared, if it is true, or those that are not, are not
        to be fetched now. Nor is what follows in a stream that waits for a `stuck` group.
        """
        hop = self.hops[self._way_to[dst]]
        if hop.copies >= AT_ONCE:
            return None
        foreseen = self._foreseen(dst)
        ahead = foreseen.numbers
        lacking = values_of(self._lacking[dst], ahead)
        if without is not None:
            lacking[np.isin(ahead, list(self.sizes.shared)) == without] = 0
        if stuck:
            lacking[foreseen.of_streams_of(stuck)] = 0
        first = int((lacking > 0).argmax()) if len(ahead) else 0
        if not len(ahead) or not lacking.item(first):
            return None
        number = ahead.item(first)
        nbytes, foretold = self.nbytes.item(number), self._schedule.known.foretold()
        sure = first < foretold + foreseen.sure
        most = hop.most_bytes(self.sizes.of(dst), named=sure)
        if hop.copies and hop.nbytes + nbytes > most:
            return None
        if self._is_early_enough(dst, nbytes, sure):
            return None
        if not self._now_or_never(hop, dst, foreseen, first, foretold):
            return None
        return number, ahead[:first]

    def _foreseen(self, dst: Tier) -> Foreseen:
        """What the caller named, and what is foretold, soonest first. Of several streams, nothing
        if they miss nothing on `dst`."""
        streams = self._schedule.streams(WINDOW) if self._schedule.several else ()
        if not streams:
            return Foreseen(self._schedule.ahead(WINDOW))
        window = max(WINDOW // len(streams), LEAST)
        streams = [(stream, numbers[:window]) for stream, numbers in streams]
        named = self._schedule.known.named()
        merged = np.concatenate([numbers for _, numbers in streams])
        if not values_of(self._lacking[dst], merged).any() and not len(named):
            return Foreseen(merged[:0])  # as it is nearly always: all that follows takes time
        # What a device computes for one stream, it does beside what it computes for the others.
        slower = len(streams) if self._timed_by_device else 1
        until, places = [], []
        for stream, numbers in streams:
            computing = values_of(self._seconds, numbers)
            # A use comes after the computing of those before it: the last has no part in that.
            before = np.concatenate([[self._remaining(stream)], computing])[: len(numbers)]
            until.append(slower * before.cumsum())
            places.append(np.full(len(numbers), stream))
        times = np.concatenate(until)
        turns = np.concatenate([np.arange(len(numbers)) for _, numbers in streams])
        # What each stream uses next is near, whatever is known of times: who computes on a device
        # asks for it long before the device gets there.
        near = turns < NEAR
        times[near] = 0.0
        soonest = np.lexsort((turns, times))[:WINDOW]
        return Foreseen(
            np.concatenate([named, merged[soonest]]),
            np.concatenate([np.zeros(len(named)), times[soonest]]),
            np.concatenate([np.full(len(named), -1), np.concatenate(places)[soonest]]),
            int(near.sum()),
            int(near.sum()),
        )

    def _is_early_enough(self, dst: Tier, nbytes: int, sure: bool) -> bool:
        """Whether what was fetched early, and waits to be used, takes all that it may take. That is
        more for what is `sure` to come next: what the caller named, or one group of each stream."""
        early, budget = self._early[dst], self.sizes.of(dst)
        if not early or budget is None:
            return False
        share = shares.EARLY_IF_STEADY if self._surprise < STEADY else shares.EARLY
        if sure:
            share = shares.EARLY_IF_NAMED
        return sum(early.values()) + nbytes > budget // share

    def _now_or_never(
        self,
        hop: HopSpeed,
        dst: Tier,
        foreseen: Foreseen,
        first: int,
        foretold: int,
    ) -> bool:
        """Whether the first that is missing must be fetched now."""
        ahead = foreseen.numbers
        if first < foretold:
            return self._is_within(dst, ahead[: first + 1])
        bandwidth = hop.bandwidth
        if bandwidth is None or self._schedule.learning:
            return self._is_near(dst, ahead[foretold : first + 1])
        if first - foretold < foreseen.near:
            return True
        # Late is a missing group if the bytes missing up to it, and half of it besides, take longer
        # than the computing before it. Compared as bytes, with few arrays: this is asked with each
        # use and each arrival. What is not missing is never later than the missing group before it.
        until = foreseen.until
        if until is None:
            computing = values_of(self._seconds, ahead)
            until_first = self._remaining(self._schedule.place) + float(computing[:first].sum())
            computing = computing[first:] * bandwidth
        else:
            until_first = until.item(first)
            computing = np.diff(until[first:], append=until[-1]) * bandwidth
        coming = values_of(self._lacking[dst], ahead[first:])
        behind = coming * CAUTION
        behind -= computing
        late = behind.cumsum()
        late -= behind
        coming *= CAUTION + SLACK
        late += coming
        return bool(late.max() >= until_first * bandwidth - CAUTION * hop.nbytes)

    def _is_within(self, dst: Tier, numbers: Numbers) -> bool:
        """Whether the groups take a small enough share of the tier, or are only one."""
        budget = self.sizes.of(dst)
        if budget is None or len(numbers) < 2:
            return True
        return _sum(self.nbytes, numbers, set(numbers.tolist())) <= budget // shares.NAMED_AHEAD

    def _is_near(self, dst: Tier, numbers: Numbers) -> bool:
        """Whether the groups are few, and take a small enough share of the tier, or are only one.

        At most two are few, or no more bytes than two average groups have.
        """
        if len(numbers) < 2:
            return True
        different, budget = set(numbers.tolist()), self.sizes.of(dst)
        nbytes = _sum(self.nbytes, numbers, different)
        few = len(different) <= 2 or nbytes * self._known <= 2 * self._known_bytes
        return few and (budget is None or nbytes <= budget // shares.UNTIMED_AHEAD)


def _sum(nbytes: Numbers, numbers: Numbers, different: set[int]) -> int:
    """The bytes of different groups."""
    if len(different) < len(numbers):
        numbers = np.array(list(different))
    return sum(values_of(nbytes, numbers).tolist())
