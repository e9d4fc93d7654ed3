"""Decides when to prefetch: as late as possible without a stall.

The rule is FORESTALL (Kimbrel et al., OSDI 1996). Fetching everything as soon as possible evicts
groups that are still needed: a scan that does not fit is then read completely on every pass.
Fetching only the next group or two stalls when several missing groups are close together. So the
prefetcher compares, for each missing group among the expected uses, the computing left before it
with the time to move all bytes missing up to it. Only if those bytes could be late is the first of
them fetched now.

Times are measured, as moving averages: the computing that follows a use of each group, and the
bandwidth of each hop. Until they are known, about two groups are fetched ahead.

If several streams of uses are active, each has its own time: a use is expected after the computing
of its own stream before it. The expected uses of all streams are merged in the order of time.

Each hop is decided separately. Disk to host needs space in host memory, host to device needs space
on the device. The disk is slower than the link, so its hop automatically looks further ahead.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tierstore.model import shares
from tierstore.model.tiers import Tier, in_memory
from tierstore.plan.expected_uses import NEAR, ExpectedUses, values_of
from tierstore.plan.hop_speed import HopSpeed
from tierstore.plan.matching import Numbers
from tierstore.plan.pools import Sizes
from tierstore.plan.schedule import Schedule

WINDOW = 400
"""Number of expected uses to consider, over all streams."""
LEAST = 50
"""Minimum number of expected uses to consider for each stream."""
AT_ONCE = 4
"""Copies in flight over one hop, however small."""
STEADY = 0.1
"""Mean relative error of the expected times below which they count as steady."""
CAUTION = 1.15
"""Factor by which a transfer may take longer than measured."""
SLACK = 0.5
"""Further allowance, as a fraction of the group's own transfer time."""

_WEIGHT = 0.25
_OUTLIER = 4.0
_SURPRISED = 0.05
_INITIAL_SIZE = 16


@dataclass
class _Use:
    """The current use of a stream: `spent` seconds of computing before it `resumed`."""

    number: int
    resumed: float
    spent: float = 0.0


class Prefetcher:
    """Finds the groups that will be missing, and decides whether to fetch them now.

    Groups and streams are referred to by the schedule's numbers and places. `budgets` are the
    planner's; `now` is the time of the latest event, in seconds. If a device runs behind its
    caller, that time only measures how long the caller takes to queue work. Then uses are
    `timed_by_device`, and `ran` reports the device's times.
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
        # By number: bytes, seconds of computing after a use, the tiers with space for it, and the
        # bytes missing on each tier.
        self.nbytes = np.zeros(_INITIAL_SIZE, dtype=np.int64)
        self._seconds = np.zeros(_INITIAL_SIZE)
        self._held = {tier: np.zeros(_INITIAL_SIZE, dtype=np.bool_) for tier in self._tiers}
        self._missing = {tier: np.zeros(_INITIAL_SIZE) for tier in self._tiers}
        self._fetchable = np.zeros(_INITIAL_SIZE, dtype=np.bool_)  # known, and not passed over
        self._highest = np.zeros(
            _INITIAL_SIZE, dtype=np.int64
        )  # the fastest tier to prefetch it to
        self._early: dict[Tier, dict[int, int]] = {tier: {} for tier in self._tiers}
        self._known = 0
        self._known_bytes = 0
        self._on_top = 0
        self._surprise = 1.0  # mean relative error of the latest times
        self._uses: dict[int, _Use] = {}  # by stream: its current use

    # Bookkeeping -------------------------------------------------------------------------------

    def know(self, number: int, nbytes: int, *, shared: bool = False) -> None:
        """Add a group of `nbytes` bytes under this number."""
        if number >= len(self.nbytes) - 1:  # the last entry belongs to unknown numbers
            more = number  # at least doubles the arrays
            self.nbytes, self._seconds, self._fetchable, self._highest = (
                np.append(array, np.zeros(more, array.dtype))
                for array in (self.nbytes, self._seconds, self._fetchable, self._highest)
            )
            for by_tier in (self._held, self._missing):
                for tier, array in by_tier.items():
                    by_tier[tier] = np.append(array, np.zeros(more, array.dtype))
        self.nbytes[number] = nbytes
        self._fetchable[number] = True
        if shared:
            self.sizes.shared.add(number)
        self._highest[number] = 0
        self._seconds[number] = 0.0
        self._update_missing(number)
        self._known += 1
        self._known_bytes += nbytes

    def forget(self, number: int) -> None:
        """Remove a group that is gone, or whose number now belongs to another group."""
        self._known -= 1
        self._known_bytes -= int(self.nbytes[number])
        self.sizes.shared.discard(number)
        for tier in self._tiers:
            self.removed(number, tier)
        self.nbytes[number] = 0
        self._fetchable[number] = False
        self._update_missing(number)
        for stream in [s for s, use in self._uses.items() if use.number == number]:
            del self._uses[stream]
        if self._running is not None and self._running.number == number:
            self._running = None

    def placed(self, number: int, tier: Tier) -> None:
        """Note that the group has space on `tier`, whether or not its bytes have arrived."""
        if tier in self._held and not self._held[tier][number]:
            self._held[tier][number] = True
            self._fetchable[number] = True
            self._update_missing(number)
            self._on_top += tier is self._tiers[0]

    def fetched_early(self, number: int, tier: Tier) -> None:
        """Note that the group is being prefetched to `tier`."""
        self._early[tier][number] = int(self.nbytes[number])

    def removed(self, number: int, tier: Tier) -> None:
        """Note that the group no longer has space on `tier`."""
        if tier in self._held and self._held[tier][number]:
            self._held[tier][number] = False
            self._update_missing(number)
            self._early[tier].pop(number, None)
            self._on_top -= tier is self._tiers[0]

    def aim(self, number: int, highest: Tier) -> None:
        """Set the fastest tier to prefetch the group to."""
        if number >= 0:
            self._highest[number] = highest
            self._update_missing(number)

    def pass_over(self, number: int, *, ended: bool = False) -> None:
        """Exclude a group that cannot be moved from prefetching; with `ended`, readmit it.

        A group that gets space on a tier is readmitted, too.
        """
        self._fetchable[number] = ended
        self._update_missing(number)

    def check(self, nbytes: Mapping[int, int], held: Mapping[Tier, set[int]]) -> None:
        """Assert that exactly these groups are known, with these bytes and space on these tiers."""
        assert (self._known, self._known_bytes) == (len(nbytes), sum(nbytes.values()))
        assert all(self.nbytes[number] == known for number, known in nbytes.items())
        for tier, on_tier in self._held.items():
            assert set(np.flatnonzero(on_tier).tolist()) == held[tier], tier.name
        assert self._on_top == len(held[self._tiers[0]])

    def _update_missing(self, number: int) -> None:
        """Update the tiers on which the group is missing: only those faster than all its copies."""
        wanted, highest = self._fetchable.item(number), self._highest.item(number)
        nbytes = max(self.nbytes.item(number), 1)  # an empty group can be missing, too
        for tier in self._tiers:
            wanted = wanted and not self._held[tier].item(number)
            self._missing[tier][number] = nbytes if wanted and highest <= tier else 0

    # Times -------------------------------------------------------------------------------------

    def asked(self, number: int, stream: int = 0) -> None:
        """Note that a stream requests a group: the computing after its previous use has ended."""
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
        """Learn the seconds of computing that followed a use."""
        old = self._seconds.item(number)
        if not old:
            self._seconds[number] = spent
            return
        off = abs(spent - old) / max(spent, old)
        self._surprise += _SURPRISED * (off - self._surprise)
        # A pause, such as between two prompts, is not computing.
        self._seconds[number] = old + _WEIGHT * (min(spent, _OUTLIER * old) - old)

    def computing_seconds(self, number: int) -> float:
        """Return the learned seconds of computing after a use."""
        return self._seconds.item(number)

    def used(self, number: int, stream: int = 0) -> None:
        """Note that a group was leased: the computing of the stream continues."""
        self.leased(number)
        now, use = self.now, self._uses.get(stream)
        if number < 0:
            self._uses.pop(stream, None)  # older versions are not expected
        elif use is None or use.number != number:
            self._uses[stream] = _Use(number, now)
        else:
            use.resumed = now

    def ran(self, number: int, asked: float, began: float) -> None:
        """Note that a use began on the device, which had waited for it since `asked`."""
        last = self._running
        if last is not None:
            last.spent += max(asked - last.resumed, 0.0)  # streams are reported in any order
            last.resumed = began
            if last.number == number:
                return
            self._learn(last.number, last.spent)
        self._running = _Use(number, began) if number >= 0 else None

    def leased(self, number: int) -> None:
        """Note that a group was leased, without learning from it."""
        for early in self._early.values():
            early.pop(number, None)

    def _remaining(self, stream: int) -> float:
        """Return the seconds of computing left of a stream's current use."""
        use = self._uses.get(stream)
        if use is None:
            return 0.0
        spent = use.spent + self.now - use.resumed
        return max(self._seconds.item(use.number) - spent, 0.0)

    @property
    def several(self) -> bool:
        """True if several streams of uses are active."""
        return self._schedule.several

    # Decisions ---------------------------------------------------------------------------------

    def all_there(self) -> bool:
        """Return whether every known group has space on the fastest tier: nothing is missing."""
        return self._on_top == self._known

    def about_as_far(self, number: int, farthest: int) -> bool:
        """Return whether a group's next use is at least a quarter as far ahead as another's.

        Within a loop this holds for most groups. It does not for groups that come only after the
        loop, that are not expected, or that have no number (below 0).
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
        """Return the group to copy to `dst` now, and the groups that are used before it.

        None if nothing is missing, or if there is time. A group on a tier faster than `dst` is not
        missing. `without` excludes shared groups (True) or all others (False). Groups that follow a
        `stuck` group in its stream are excluded too.
        """
        hop = self.hops[self._way_to[dst]]
        if hop.copies >= AT_ONCE:
            return None
        expected = self._expected_uses(dst)
        ahead = expected.numbers
        missing = values_of(self._missing[dst], ahead)
        if without is not None:
            missing[np.isin(ahead, list(self.sizes.shared)) == without] = 0
        if stuck:
            missing[expected.of_streams_of(stuck)] = 0
        first = int((missing > 0).argmax()) if len(ahead) else 0
        if not len(ahead) or not missing.item(first):
            return None
        number = ahead.item(first)
        nbytes, prefetched = self.nbytes.item(number), self._schedule.known.prefetched_count()
        sure = first < prefetched + expected.sure
        most = hop.most_bytes(self.sizes.of(dst), prefetched=sure)
        if hop.copies and hop.nbytes + nbytes > most:
            return None
        if self._has_fetched_enough(dst, nbytes, sure):
            return None
        if not self._is_due(hop, dst, expected, first, prefetched):
            return None
        return number, ahead[:first]

    def _expected_uses(self, dst: Tier) -> ExpectedUses:
        """Return the prefetched groups and then the expected uses, soonest first.

        If several streams miss nothing on `dst`, returns no uses.
        """
        streams = self._schedule.streams(WINDOW) if self._schedule.several else ()
        if not streams:
            return ExpectedUses(self._schedule.ahead(WINDOW))
        window = max(WINDOW // len(streams), LEAST)
        streams = [(stream, numbers[:window]) for stream, numbers in streams]
        prefetched = self._schedule.known.prefetched_numbers()
        merged = np.concatenate([numbers for _, numbers in streams])
        if not values_of(self._missing[dst], merged).any() and not len(prefetched):
            return ExpectedUses(merged[:0])  # the usual case; the rest is slow
        # A device divides its time among the streams.
        slower = len(streams) if self._timed_by_device else 1
        until, places = [], []
        for stream, numbers in streams:
            computing = values_of(self._seconds, numbers)
            # A use comes after the computing of those before it, not after its own.
            before = np.concatenate([[self._remaining(stream)], computing])[: len(numbers)]
            until.append(slower * before.cumsum())
            places.append(np.full(len(numbers), stream))
        times = np.concatenate(until)
        turns = np.concatenate([np.arange(len(numbers)) for _, numbers in streams])
        # Each stream's next use is near, whatever its time: a caller of a device requests it long
        # before the device gets there.
        near = turns < NEAR
        times[near] = 0.0
        soonest = np.lexsort((turns, times))[:WINDOW]
        return ExpectedUses(
            np.concatenate([prefetched, merged[soonest]]),
            np.concatenate([np.zeros(len(prefetched)), times[soonest]]),
            np.concatenate([np.full(len(prefetched), -1), np.concatenate(places)[soonest]]),
            int(near.sum()),
            int(near.sum()),
        )

    def _has_fetched_enough(self, dst: Tier, nbytes: int, sure: bool) -> bool:
        """Return whether prefetched groups that were not used yet take their share of the tier.

        The share is larger for a group that is `sure` to come next: one that the caller prefetched,
        or the next one of a stream.
        """
        early, budget = self._early[dst], self.sizes.of(dst)
        if not early or budget is None:
            return False
        share = shares.EARLY_IF_STEADY if self._surprise < STEADY else shares.EARLY
        if sure:
            share = shares.EARLY_IF_PREFETCH
        return sum(early.values()) + nbytes > budget // share

    def _is_due(
        self,
        hop: HopSpeed,
        dst: Tier,
        expected: ExpectedUses,
        first: int,
        prefetched: int,
    ) -> bool:
        """Return whether the first missing group must be fetched now to arrive in time."""
        ahead = expected.numbers
        if first < prefetched:
            return self._is_within(dst, ahead[: first + 1])
        bandwidth = hop.bandwidth
        if bandwidth is None or self._schedule.learning:
            return self._is_near(dst, ahead[prefetched : first + 1])
        if first - prefetched < expected.near:
            return True
        # A missing group is late if the bytes missing up to it, plus half of its own, take longer
        # than the computing before it. The comparison is in bytes, with few arrays, because it runs
        # with each use and arrival. A group that is not missing is never later than the missing
        # group before it.
        until = expected.until
        if until is None:
            computing = values_of(self._seconds, ahead)
            until_first = self._remaining(self._schedule.place) + float(computing[:first].sum())
            computing = computing[first:] * bandwidth
        else:
            until_first = until.item(first)
            computing = np.diff(until[first:], append=until[-1]) * bandwidth
        coming = values_of(self._missing[dst], ahead[first:])
        behind = coming * CAUTION
        behind -= computing
        late = behind.cumsum()
        late -= behind
        coming *= CAUTION + SLACK
        late += coming
        return bool(late.max() >= until_first * bandwidth - CAUTION * hop.nbytes)

    def _is_within(self, dst: Tier, numbers: Numbers) -> bool:
        """Return whether there is only one group, or the groups take a small enough share."""
        budget = self.sizes.of(dst)
        if budget is None or len(numbers) < 2:
            return True
        return _sum(self.nbytes, numbers, set(numbers.tolist())) <= budget // shares.PREFETCH_AHEAD

    def _is_near(self, dst: Tier, numbers: Numbers) -> bool:
        """Return whether there is only one group, or few that take a small share of the tier.

        Few means at most two groups, or no more bytes than two average groups.
        """
        if len(numbers) < 2:
            return True
        different, budget = set(numbers.tolist()), self.sizes.of(dst)
        nbytes = _sum(self.nbytes, numbers, different)
        few = len(different) <= 2 or nbytes * self._known <= 2 * self._known_bytes
        return few and (budget is None or nbytes <= budget // shares.UNTIMED_AHEAD)


def _sum(nbytes: Numbers, numbers: Numbers, different: set[int]) -> int:
    """Return the total bytes of the `different` groups among `numbers`."""
    if len(different) < len(numbers):
        numbers = np.array(list(different))
    return sum(values_of(nbytes, numbers).tolist())
