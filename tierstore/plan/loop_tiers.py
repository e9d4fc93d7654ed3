"""Drafts one tier of a loop plan: addresses, copies, and their waits.

Some groups stay between two requests (`loop_waits`). The others pass through a ring in the order of
the loop: as a whole on the fastest tier, where they are used, and tile by tile on the tiers below,
where each tile is only in transit. A pass goes around the ring a whole number of times, in rounds
of about equal bytes, so each tile gets the same address in every pass.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, islice

from tierstore.model.tiers import Tier
from tierstore.plan.loop_plan import Loop, PlannedStep, Resident, TierPlan, TileCopy
from tierstore.plan.loop_waits import Stay, TierRequest, TiledGroup, choose_stays


class TierDraft:
    """Drafts one tier: serves `requests` for some of the `groups`.

    The requests come from `users` steps, or copies into the tier above, and are referred to by
    number. A group that passes through the ring is contiguous there if the tier `is_fastest`.
    """

    def __init__(
        self,
        tier: Tier,
        requests: Sequence[TierRequest],
        users: int,
        groups: Sequence[TiledGroup],
        *,
        is_fastest: bool,
    ) -> None:
        self._tier = tier
        self._requests = requests
        self._users = users
        self._groups = groups
        self._is_fastest = is_fastest
        self._nbytes = 0
        self._start: list[Resident] = []
        self._addresses: dict[int, list[int]] = {}  # of each tile, by request
        self._fetched_for = list(
            range(len(requests))
        )  # the request that fetches its group; -1: none does
        self._last = list(range(len(requests)))  # the last request that finds its copy
        self._first_copy: dict[int, int] = {}  # by request that fetches
        self._copied: list[tuple[int, int, int, int]] = []  # group, offset, bytes, target
        self._afters: list[int] = []
        self._sources: list[tuple[int | None, int | None]] = []  # address; by which copy

    def fill(self, limit: int, ring: int, floors: Sequence[float], for_good: int) -> bool:
        """Decide what stays and what passes through a ring of `ring` bytes, within `limit` bytes.

        For `floors` and `for_good`, see `choose_stays`. Returns False if the ring is too small.
        """
        asked = {request.group for request in self._requests}
        if sum(self._groups[group].nbytes for group in asked) <= limit:
            ring = 0
        if len(asked) == len(self._requests):
            for_good = limit  # all waits are equally long
        stays = choose_stays(self._requests, self._groups, floors, limit - ring, for_good)
        self._note_stays(stays)
        return self._pass_through(ring) and self._list_copies()

    def _note_stays(self, stays: Sequence[Stay]) -> None:
        """Record the requests that find their group resident, and its address."""
        for stay in stays:
            group, numbers = self._groups[stay.group], stay.requests
            self._nbytes = max(self._nbytes, stay.address + group.nbytes)
            if stay.for_good or numbers[-1] < numbers[0]:
                self._start.append(Resident(stay.group, 0, group.nbytes, stay.address))
            for number in numbers:
                self._addresses[number] = group.addresses(stay.address)
                self._fetched_for[number] = -1 if stay.for_good else numbers[0]
                self._last[number] = numbers[-1]

    def _pass_through(self, ring: int) -> bool:
        """Assign addresses in the ring to the groups that do not stay."""
        passing = [n for n in range(len(self._requests)) if n not in self._addresses]
        groups = [self._groups[self._requests[number].group] for number in passing]
        if self._is_fastest:
            sizes = [group.nbytes for group in groups]
        else:
            sizes = [nbytes for group in groups for _, nbytes in group.tiles]
        offsets = ring_offsets(sizes, ring)
        if offsets is None:
            return False
        base = self._nbytes
        places = iter([base + offset for offset in offsets])
        for number, group in zip(passing, groups, strict=True):
            if self._is_fastest:
                self._addresses[number] = group.addresses(next(places))
            else:
                self._addresses[number] = list(islice(places, len(group.tiles)))
        ends = (base + offset + nbytes for offset, nbytes in zip(offsets, sizes, strict=True))
        self._nbytes = max(ends, default=base)
        return True

    def _list_copies(self) -> bool:
        """List the copies, and the user that each has to wait for.

        Returns False if a copy would have to wait for the user that needs it.
        """
        for number, request in enumerate(self._requests):
            if self._fetched_for[number] == number:
                self._first_copy[number] = len(self._copied)
                tiles, targets = self._groups[request.group].tiles, self._addresses[number]
                for (offset, nbytes), target in zip(tiles, targets, strict=True):
                    self._copied.append((request.group, offset, nbytes, target))
        self._afters = [0] * len(self._copied)
        self._sources = [(None, None)] * len(self._copied)
        occupied, released = _Occupied(), 0
        for begin in (0, self._users):  # the second pass starts with what the first one left
            for number, first in self._first_copy.items():
                last = self._last[number]
                later = self._users if last < number else 0
                for tile, user in enumerate(self._requests[number].users):
                    _, _, nbytes, target = self._copied[first + tile]
                    until = begin + later + self._requests[last].last_users[tile]
                    released = max(released, occupied.take(target, target + nbytes, until))
                    if begin and released >= begin + user:
                        return False
                    self._afters[first + tile] = released - begin
        return True

    @property
    def count(self) -> int:
        """Number of copies."""
        return len(self._copied)

    # For the other tiers -----------------------------------------------------------------------

    def fetched(self) -> list[TierRequest]:
        """Return the requests to the tier below."""
        found = []
        for number, first in self._first_copy.items():
            group, step = self._requests[number].group, self._requests[number].first
            users = range(first, first + len(self._groups[group].tiles))
            found.append(TierRequest(group, step, step, users, users))
        return found

    def read_from(self, below: TierDraft) -> None:
        """Set the sources of the copies into this tier, given the draft of the tier below."""
        for number, request in enumerate(below._requests):
            fetched, ready = below._fetched_for[number], None
            if fetched >= 0:
                ready = below._first_copy[fetched]
                if fetched > number:
                    ready -= below.count
            for tile, copy in enumerate(request.users):
                source = below._addresses[number][tile]
                self._sources[copy] = source, None if ready is None else ready + tile

    def seconds_with_copies(self, seconds: Sequence[float], pace: float) -> list[float]:
        """Return the least seconds of each step, given the copies of its groups to this tier."""
        copied = [0.0] * len(seconds)
        for number in self._first_copy:
            request = self._requests[number]
            copied[request.first] += self._groups[request.group].nbytes / pace
        return [max(pair) for pair in zip(seconds, copied, strict=True)]

    def steps(self, loop: Loop) -> tuple[PlannedStep, ...]:
        """Return the addresses of each step's groups on this tier."""
        where = {
            (step, request.group): self._addresses[number][0]
            for number, request in enumerate(self._requests)
            for step in range(request.first, request.last + 1)
        }
        arrivals = [0] * len(loop.steps)
        for number, first in self._first_copy.items():
            arrivals[self._requests[number].first] = first + len(self._requests[number].users)
        return tuple(
            PlannedStep(tuple(where[number, group] for group in step.groups), count)
            for number, (step, count) in enumerate(
                zip(loop.steps, accumulate(arrivals, max), strict=True)
            )
        )

    def plan(self) -> TierPlan:
        """Return the plan of this tier."""
        released = tuple(
            bisect_right(self._afters, user) + bisect_right(self._afters, user - self._users)
            for user in range(self._users)
        )
        rows = zip(self._copied, self._afters, self._sources, strict=True)
        copies = tuple(TileCopy(*copied, after, *source) for copied, after, source in rows)
        return TierPlan(self._tier, self._nbytes, tuple(self._start), copies, released)


def ring_offsets(sizes: Sequence[int], capacity: int) -> list[int] | None:
    """Return offsets for items of these sizes that pass one after the other through a ring.

    The ring has `capacity` bytes. There are as few rounds as possible, of about equal bytes.
    Returns None if an item is larger than the ring.

    >>> ring_offsets([3, 3, 3, 3, 3], 10)
    [0, 3, 6, 0, 3]
    """
    if max(sizes, default=0) > capacity:
        return None
    rounds, end = 1, 0
    for nbytes in sizes:
        rounds, end = (rounds, end + nbytes) if end + nbytes <= capacity else (rounds + 1, nbytes)
    share = sum(sizes) / rounds
    offsets = []
    end, total, round_ends = 0, 0, share
    for nbytes in sizes:
        if end and (end + nbytes > capacity or total + nbytes / 2 > round_ends):
            round_ends = max(round_ends, total) + share
            end = 0
        offsets.append(end)
        end += nbytes
        total += nbytes
    return offsets


class _Occupied:
    """The used bytes of a memory, and the last user of each."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._spans: list[tuple[int, int]] = []  # (end, user)

    def take(self, start: int, stop: int, user: int) -> int:
        """Use bytes until `user` has ended. Returns the last user of the previous contents.

        The result is negative if there was none. A previous span is forgotten even if only a part
        of it is taken, so the caller must wait for the returned user before all its later copies.
        """
        first = bisect_left(self._starts, start)
        if first and self._spans[first - 1][0] > start:
            first -= 1
        last = bisect_left(self._starts, stop)
        freed = max((user for _, user in self._spans[first:last]), default=-1)
        self._starts[first:last] = [start]
        self._spans[first:last] = [(stop, user)]
        return freed
