"""Which groups of a loop wait on a tier between two uses, and at which addresses.

Between two uses a group either stays or is fetched again. To stay for a short time is worth most:
each use that finds its group saves a copy, and a short wait takes room for a short time (Belady, "A
study of replacement algorithms for a virtual-storage computer", 1966, on a cycle). In a plain loop
all waits are equally long, and any choice of as many bytes saves as much.
It is spread evenly then, so that a small ring is enough for the rest:

- A step fetches what moves while it computes, at the pace of the whole pass: else the copies would
  pause, or computing would wait for them.
- What has to be fetched beyond that is spread over the steps in equal parts: the ring has room for
  all that one step fetches.

That is worked out for single tiles first, and then rounded to groups, so that what is rounded off
in one step is made good in the next.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

LEAD = 2
"""Steps before its first use from which a group that stays for some uses has its room: it takes
that long to arrive."""

ROUNDING = 2048
"""Sums of bytes are looked for in so many steps up to the bytes of all."""

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TiledGroup:
    """The tiles of a group: the first byte and the bytes of each."""

    tiles: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all its tiles."""
        offset, nbytes = self.tiles[-1]
        return offset + nbytes

    def addresses(self, address: int) -> list[int]:
        """Return where each tile is if all of the group is at `address`."""
        return [address + offset for offset, _ in self.tiles]


@dataclass(frozen=True, slots=True)
class TierRequest:
    """Steps `first` to `last` need a group on a tier.

    `users` tells by tile who reads it there first: the number of the step, or of the copy into the
    tier above; `last_users` tells who does so last.
    """

    group: int
    first: int
    last: int
    users: Sequence[int]
    last_users: Sequence[int]


@dataclass(frozen=True, slots=True)
class Stay:
    """A group stays at an address for some requests (by number, in order). All but the first find
    it there; all of them, if it stays `for_good`. They may go on in the next pass."""

    group: int
    address: int
    requests: tuple[int, ...]
    for_good: bool


@dataclass(frozen=True, slots=True)
class _Wait:
    """The waits of a group that are equally long: from each of some requests to the next one. Its
    room is taken in some `steps` if it stays."""

    group: int
    requests: tuple[int, ...]
    length: int  # in steps
    steps: Numbers


def choose_stays(
    requests: Sequence[TierRequest],
    groups: Sequence[TiledGroup],
    floors: Sequence[float],
    room: int,
    for_good: int,
) -> list[Stay]:
    """Choose what stays between requests, within `room` bytes.

    `floors` are the bytes that move while each step computes. Requests come in the order of their
    steps, and name groups by number. First, up to `for_good` bytes are chosen that stay for good,
    evenly; then others for their shortest waits.
    """
    count = len(floors)
    by_group: dict[int, list[int]] = {}
    for number, request in enumerate(requests):
        by_group.setdefault(request.group, []).append(number)
    firsts = {group: requests[numbers[0]].first for group, numbers in by_group.items()}
    order = _even_order(groups, firsts, floors)
    stay = _even_part(groups, firsts, order, min(for_good, room))
    waits = [
        wait
        for group, numbers in by_group.items()
        if group not in stay
        for wait in _waits_of(requests, numbers, count)
    ]
    left = room - sum(groups[group].nbytes for group in stay)
    waits.sort(key=lambda wait: (wait.length, -order[wait.group][-1]))
    kept = {group: set(numbers if group in stay else ()) for group, numbers in by_group.items()}
    for wait in _admitted(waits, groups, left, count):
        kept[wait.group].update(wait.requests)
    return _placed(kept, requests, by_group, groups, count, room)


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


# What stays ---------------------------------------------------------------------------------------


def _even_order(
    groups: Sequence[TiledGroup], firsts: Mapping[int, int], floors: Sequence[float]
) -> dict[int, list[float]]:
    """For each tile of a group, a number: the higher, the rather it should stay. `firsts` are the
    steps that need each group first.

    Up to its floor, each step fetches the same share of it; beyond, as many bytes as the others.
    Steps of one kind are shifted against each other by a sequence of low discrepancy, so that they
    do not all fetch one tile more at once.
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
    """The binary digits of a number, mirrored at the point (van der Corput, 1935).

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
    room: int,
) -> set[int]:
    """Items of up to `room` bytes, spread evenly over the steps.

    For that, tiles are chosen in their order; then, step by step, groups that have about as many
    bytes as those tiles. What is rounded off is for the next step.
    """
    if sum(groups[group].nbytes for group in firsts) <= room:
        return set(firsts)
    sizes: dict[int, dict[int, int]] = {}
    for group, step in firsts.items():
        sizes.setdefault(step, {})[group] = groups[group].nbytes
    wanted = dict.fromkeys(sizes, 0)
    left = room
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
    waits: Iterable[_Wait], groups: Sequence[TiledGroup], room: int, count: int
) -> Iterator[_Wait]:
    """Those of the waits for which there is still room, in their order."""
    load = np.zeros(count, dtype=np.int64)
    taken: dict[int, npt.NDArray[np.bool_]] = {}
    for wait in waits:
        mask = taken.setdefault(wait.group, np.zeros(count, dtype=np.bool_))
        added, nbytes = wait.steps[~mask[wait.steps]], groups[wait.group].nbytes
        if not len(added) or int(load[added].max()) + nbytes <= room:
            load[added] += nbytes
            mask[wait.steps] = True
            yield wait


def largest_sum(sizes: Mapping[int, int], room: int) -> list[int]:
    """The keys of sizes whose sum comes closest to `room` without being more. Sizes are counted in
    multiples of one in `ROUNDING` of them all, rounded up.

    >>> largest_sum({1: 50, 2: 30, 3: 40}, 75)
    [2, 3]
    """
    reached = [1]  # bit n: some of the sizes so far add up to n
    grain = max(sum(sizes.values()) // ROUNDING, 1)
    rounded = [(key, -(-nbytes // grain)) for key, nbytes in sizes.items()]
    limit = (1 << room // grain + 1) - 1
    for _, nbytes in rounded:
        reached.append((reached[-1] | reached[-1] << nbytes) & limit)
    left = reached[-1].bit_length() - 1
    found = []
    for (key, nbytes), without in zip(reversed(rounded), reversed(reached[:-1]), strict=True):
        if not without >> left & 1:
            found.append(key)
            left -= nbytes
    return found[::-1]


# Where it is --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Arc:
    """Waits that follow each other: a group stays for all of these requests, at one address."""

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
    room: int,
) -> list[Stay]:
    """Give each group that stays an address: no two are at the same bytes at the same time.

    `kept` tells of each group the requests after which it stays. Those that stay for good come
    first, one behind the other. The others go where they fit, the longest first. One that fits
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
        if address + nbytes <= room:
            spans[placed] = arc.first, arc.length, address, nbytes
            placed += 1
            stays.append(Stay(arc.group, address, arc.requests, for_good=False))
    return stays


def _arcs(
    requests: Sequence[TierRequest], numbers: Sequence[int], kept: Container[int], count: int
) -> Iterator[_Arc]:
    """The requests of a group that follow each other, where it is kept from one to the next."""
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
    """The first address from `start` on with so many bytes beside those that are taken."""
    for address, there in sorted(taken):
        if address - start >= nbytes:
            break
        start = max(start, address + there)
    return start
