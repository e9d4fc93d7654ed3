"""Chooses the groups of a loop that stay on a tier between two uses, and their addresses.

Between two uses, a group either stays or is fetched again. Short waits are worth most: each use
that finds its group saves a copy, and a short wait takes space for a short time (Belady, "A study
of replacement algorithms for a virtual-storage computer", 1966, applied to a cycle). In a plain
loop all waits are equally long, and all choices of equal size save the same bytes. The choice is
then spread evenly over the steps, so that a small ring is enough for the rest:

- Each step fetches the bytes that move while it computes, at the pace of the whole pass; otherwise
  copies would pause, or computing would wait for them.
- Bytes to fetch beyond that are divided equally among the steps: the ring has space for all that
  one step fetches.

The choice is made by tiles first and then rounded to groups, carrying the rounding error of each
step over to the next.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

LEAD = 2
"""Steps before its first use at which a staying group gets its space: it arrives meanwhile."""

ROUNDING = 2048
"""Resolution of subset sums: fractions of the total bytes."""

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TiledGroup:
    """The tiles of a group: the offset and the bytes of each."""

    tiles: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all its tiles."""
        offset, nbytes = self.tiles[-1]
        return offset + nbytes

    def addresses(self, address: int) -> list[int]:
        """Return the address of each tile if the group is at `address`."""
        return [address + offset for offset, _ in self.tiles]


@dataclass(frozen=True, slots=True)
class TierRequest:
    """A request for a group on a tier during steps `first` to `last`.

    `users` has, for each tile, its first reader: the number of a step, or of a copy into the tier
    above. `last_users` has the last readers.
    """

    group: int
    first: int
    last: int
    users: Sequence[int]
    last_users: Sequence[int]


@dataclass(frozen=True, slots=True)
class Stay:
    """A group that stays at an address for some requests (by number, in order).

    All but the first request find it resident; if it stays `for_good`, all do. The requests may
    continue into the next pass.
    """

    group: int
    address: int
    requests: tuple[int, ...]
    for_good: bool


@dataclass(frozen=True, slots=True)
class _Wait:
    """Waits of one group and one length, each from one of `requests` to the next request.

    If the group stays, it takes space during `steps`.
    """

    group: int
    requests: tuple[int, ...]
    length: int  # in steps
    steps: Numbers


def choose_stays(
    requests: Sequence[TierRequest],
    groups: Sequence[TiledGroup],
    floors: Sequence[float],
    capacity: int,
    for_good: int,
) -> list[Stay]:
    """Choose the groups that stay between requests, within `capacity` bytes.

    `floors` has the bytes that move while each step computes. Requests are in the order of their
    steps, and refer to groups by number. First, groups of up to `for_good` bytes, spread evenly
    over the steps, are chosen to stay for good; then others are chosen for their shortest waits.
    """
    count = len(floors)
    by_group: dict[int, list[int]] = {}
    for number, request in enumerate(requests):
        by_group.setdefault(request.group, []).append(number)
    firsts = {group: requests[numbers[0]].first for group, numbers in by_group.items()}
    order = _even_order(groups, firsts, floors)
    stay = _even_part(groups, firsts, order, min(for_good, capacity))
    waits = [
        wait
        for group, numbers in by_group.items()
        if group not in stay
        for wait in _waits_of(requests, numbers, count)
    ]
    left = capacity - sum(groups[group].nbytes for group in stay)
    waits.sort(key=lambda wait: (wait.length, -order[wait.group][-1]))
    kept = {group: set(numbers if group in stay else ()) for group, numbers in by_group.items()}
    for wait in _admitted(waits, groups, left, count):
        kept[wait.group].update(wait.requests)
    return _placed(kept, requests, by_group, groups, count, capacity)


def _waits_of(requests: Sequence[TierRequest], numbers: list[int], count: int) -> Iterator[_Wait]:
    by_length: dict[int, list[int]] = {}
    steps: dict[int, npt.NDArray[np.bool_]] = {}
    for number, following in pairwise([*numbers, numbers[0]]):
        one, other = requests[number], requests[following]
        passed = 0 if following > number else count
        length = other.first + passed - one.last
        by_length.setdefault(length, []).append(number)
        taken = steps.setdefault(length, np.zeros(count, dtype=np.bool_))
        first, last = one.first - LEAD, min(other.last + passed, one.first - LEAD + count - 1)
        taken[max(first, 0) : last + 1] = True
        taken[: max(last + 1 - count, 0)] = True
        if first < 0:
            taken[first:] = True
    for length, found in by_length.items():
        group = requests[numbers[0]].group
        yield _Wait(group, tuple(found), length, np.flatnonzero(steps[length]))


# Choosing -----------------------------------------------------------------------------------------


def _even_order(
    groups: Sequence[TiledGroup], firsts: Mapping[int, int], floors: Sequence[float]
) -> dict[int, list[float]]:
    """Return a priority to stay for each tile of each group; higher stays first.

    `firsts` has the first step that needs each group. Up to their floors, all steps fetch the same
    fraction of them; beyond, the same number of bytes. A low-discrepancy sequence offsets
    steps of one kind against each other, so they do not all fetch one more tile at the same point.
    """
    order: dict[int, list[float]] = {}
    before: dict[int, float] = {}
    for group, step in firsts.items():
        order[group] = []
        for _, nbytes in groups[group].tiles:
            fetched = before.get(step, 0.0)
            before[step] = fetched + nbytes
            fetched += nbytes * _van_der_corput(step)
            order[group].append(fetched / floors[step] if fetched < floors[step] else 1 + fetched)
    return order


def _van_der_corput(number: int) -> float:
    """Return the binary digits of a number mirrored at the point (van der Corput, 1935).

    >>> [_van_der_corput(number) for number in range(4)]
    [0.0, 0.5, 0.25, 0.75]
    """
    value, digit = 0.0, 0.5
    while number:
        value += digit * (number & 1)
        number >>= 1
        digit /= 2
    return value


def _even_part(
    groups: Sequence[TiledGroup],
    firsts: Mapping[int, int],
    order: Mapping[int, Sequence[float]],
    capacity: int,
) -> set[int]:
    """Choose groups of up to `capacity` bytes, spread evenly over the steps.

    Tiles are chosen by priority; then, step by step, groups with about as many bytes as the step's
    tiles. The rounding error is carried over to the next step.
    """
    if sum(groups[group].nbytes for group in firsts) <= capacity:
        return set(firsts)
    sizes: dict[int, dict[int, int]] = {}
    for group, step in firsts.items():
        sizes.setdefault(step, {})[group] = groups[group].nbytes
    wanted = dict.fromkeys(sizes, 0)
    left = capacity
    tiles = [
        (-at, group, nbytes)
        for group in firsts
        for at, (_, nbytes) in zip(order[group], groups[group].tiles, strict=True)
    ]
    for _, group, nbytes in sorted(tiles):
        stays = min(nbytes, left)
        left -= stays
        wanted[firsts[group]] += stays
    half = sum(groups[group].nbytes for group in firsts) // len(firsts) // 2  # rounds up, too
    stay = {group: groups[group].nbytes for group in firsts}
    due = half
    for step in sorted(sizes):
        due += sum(sizes[step].values()) - wanted[step]
        for group in largest_sum(sizes[step], due):
            due -= stay.pop(group)
    while due > half:
        group = min(stay, key=lambda group: (stay[group] < due - half, stay[group], -group))
        due -= stay.pop(group)
    return set(stay)


def _admitted(
    waits: Iterable[_Wait], groups: Sequence[TiledGroup], capacity: int, count: int
) -> Iterator[_Wait]:
    """Yield the waits that still fit, in their order."""
    load = np.zeros(count, dtype=np.int64)
    taken: dict[int, npt.NDArray[np.bool_]] = {}
    for wait in waits:
        mask = taken.setdefault(wait.group, np.zeros(count, dtype=np.bool_))
        added, nbytes = wait.steps[~mask[wait.steps]], groups[wait.group].nbytes
        if not len(added) or int(load[added].max()) + nbytes <= capacity:
            load[added] += nbytes
            mask[wait.steps] = True
            yield wait


def largest_sum(sizes: Mapping[int, int], capacity: int) -> list[int]:
    """Return the keys of sizes whose sum is the largest that fits into `capacity`.

    Sizes are rounded up to multiples of a `ROUNDING`-th of their total.

    >>> largest_sum({1: 50, 2: 30, 3: 40}, 75)
    [2, 3]
    """
    reached = [1]  # bit n: some of the sizes so far add up to n
    grain = max(sum(sizes.values()) // ROUNDING, 1)
    rounded = [(key, -(-nbytes // grain)) for key, nbytes in sizes.items()]
    limit = (1 << capacity // grain + 1) - 1
    for _, nbytes in rounded:
        reached.append((reached[-1] | reached[-1] << nbytes) & limit)
    left = reached[-1].bit_length() - 1
    found = []
    for (key, nbytes), without in zip(reversed(rounded), reversed(reached[:-1]), strict=True):
        if not without >> left & 1:
            found.append(key)
            left -= nbytes
    return found[::-1]


# Addresses ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Arc:
    """Consecutive waits: a group stays at one address for all of these requests."""

    group: int
    first: int  # step; the last one is `first + length`
    length: int
    requests: tuple[int, ...]


def _placed(
    kept: Mapping[int, Container[int]],
    requests: Sequence[TierRequest],
    by_group: Mapping[int, list[int]],
    groups: Sequence[TiledGroup],
    count: int,
    capacity: int,
) -> list[Stay]:
    """Assign addresses to the groups that stay, without overlap at any time.

    `kept` has the requests after which each group stays. Groups that stay for good come first, one
    after the other. The others are placed where they fit, the longest first. A group that fits
    nowhere does not stay.
    """
    stays: list[Stay] = []
    end = 0
    arcs: list[_Arc] = []
    for group, numbers in by_group.items():
        if all(number in kept[group] for number in numbers):
            stays.append(Stay(group, end, tuple(numbers), for_good=True))
            end += groups[group].nbytes
        else:
            arcs += _arcs(requests, numbers, kept[group], count)
    spans = np.zeros((len(arcs), 4), dtype=np.int64)  # first step, length, address, bytes
    placed = 0
    for arc in sorted(arcs, key=lambda arc: (-arc.length, -groups[arc.group].nbytes, arc.first)):
        there, nbytes = spans[:placed], groups[arc.group].nbytes
        behind, ahead = (there[:, 0] - arc.first) % count, (arc.first - there[:, 0]) % count
        meet = (behind <= arc.length + LEAD) | (ahead <= there[:, 1] + LEAD)
        address = _first_gap(there[meet, 2:].tolist(), end, nbytes)
        if address + nbytes <= capacity:
            spans[placed] = arc.first, arc.length, address, nbytes
            placed += 1
            stays.append(Stay(arc.group, address, arc.requests, for_good=False))
    return stays


def _arcs(
    requests: Sequence[TierRequest], numbers: Sequence[int], kept: Container[int], count: int
) -> Iterator[_Arc]:
    """Yield the runs of consecutive requests between which a group is kept."""
    following = dict(pairwise([*numbers, numbers[0]]))
    reached = {following[number] for number in numbers if number in kept}
    for begin in numbers:
        if begin not in kept or begin in reached:
            continue
        found = [begin]
        while found[-1] in kept:
            found.append(following[found[-1]])
        first, last = requests[begin].first, requests[found[-1]].last
        length = last - first if found[-1] > begin else last - first + count
        yield _Arc(requests[begin].group, first, length, tuple(found))


def _first_gap(taken: Iterable[list[int]], start: int, nbytes: int) -> int:
    """Return the first address from `start` with `nbytes` free bytes."""
    for address, there in sorted(taken):
        if address - start >= nbytes:
            break
        start = max(start, address + there)
    return start
