"""The prefetcher against a slow reference that follows the descriptions word by word.

The reference has sets and lists instead of arrays, and keeps every measurement instead of averages.
Both get the same random histories, and must give the same answers at every step.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest

from tierstore.model.tiers import TIERS, Tier
from tierstore.plan.known_keys import KnownKeys
from tierstore.plan.matching import Numbers
from tierstore.plan.prefetch import Prefetcher
from tierstore.plan.schedule import LearnedOrder

MIB = 1 << 20


class ScriptedKeys(KnownKeys):
    def __init__(self) -> None:
        super().__init__()
        self.script: list[int] = []

    def prefetched_count(self) -> int:
        return len(self.script)

    def prefetched_numbers(self) -> Numbers:
        return np.array(self.script, dtype=np.int64)


class Scripted(LearnedOrder):
    """Expects fixed keys: first those that the caller `named`, then the `learned` ones."""

    def __init__(self) -> None:
        super().__init__(memory=1, known=ScriptedKeys())
        self.learned: list[int] = []
        self.is_learning = False

    @property
    def learning(self) -> bool:
        return self.is_learning

    def ahead(self, count: int) -> Numbers:
        return np.array(self.named + self.learned[:count], dtype=np.int64)

    @property
    def named(self) -> list[int]:
        assert isinstance(self.known, ScriptedKeys)
        return self.known.script


@dataclass
class Way:
    """A hop: the sizes of copies on their way, and every measurement, as bytes and seconds."""

    moving: list[int] = field(default_factory=list)
    ending: int = 0
    free_at: float = 0.0
    measured: list[tuple[int, float]] = field(default_factory=list)

    def end(self, nbytes: int, began: float, now: float, counts: bool) -> None:
        self.moving.remove(nbytes)
        seconds = now - max(began, self.free_at)
        self.free_at = now
        if counts and seconds > 0:
            self.measured.insert(0, (nbytes, seconds))

    def bandwidth(self) -> float | None:
        """Return the mean; each measurement weighs 0.8 times as much as the next one."""
        weights = [0.8**age for age in range(len(self.measured))]
        rows = list(zip(weights, self.measured, strict=True))
        seconds = sum(weight * s for weight, (_, s) in rows)
        return sum(weight * b for weight, (b, _) in rows) / seconds if rows else None


class Reference:
    """Follow the descriptions in `prefetcher`. Also gives the reason for a missing fetch."""

    def __init__(
        self,
        schedule: Scripted,
        budgets: Mapping[Tier, int | None],
    ) -> None:
        self.schedule, self.budgets, self.now = schedule, budgets, 0.0
        self.tiers = sorted(budgets)[:-1]
        self.ways = {tier: Way() for tier in self.tiers}
        self.nbytes: dict[int, int] = {}
        self.room: set[tuple[int, Tier]] = set()
        self.hopeless: set[int] = set()
        self.aims: dict[int, Tier] = {}
        self.early: dict[tuple[int, Tier], int] = {}
        self.computing: dict[int, float] = {}
        self.surprise = 1.0
        self.running: int | None = None
        self.resumed = self.spent = 0.0

    def know(self, number: int, nbytes: int) -> None:
        self.nbytes[number] = nbytes
        self.hopeless.discard(number)
        self.computing.pop(number, None)
        self.aims.pop(number, None)

    def forget(self, number: int) -> None:
        del self.nbytes[number]
        for tier in self.tiers:
            self.removed(number, tier)
        if self.running == number:
            self.running = None

    def placed(self, number: int, tier: Tier) -> None:
        if tier in self.tiers and (number, tier) not in self.room:
            self.room.add((number, tier))
            self.hopeless.discard(number)

    def fetched_early(self, number: int, tier: Tier) -> None:
        self.early[number, tier] = self.nbytes[number]

    def removed(self, number: int, tier: Tier) -> None:
        self.room.discard((number, tier))
        self.early.pop((number, tier), None)

    def aim(self, number: int, highest: Tier) -> None:
        self.aims[number] = highest

    def pass_over(self, number: int) -> None:
        self.hopeless.add(number)

    def asked(self, number: int) -> None:
        if self.running is None:
            return
        self.spent += self.now - self.resumed
        self.resumed = self.now
        if self.running == number:
            return
        before = self.computing.get(self.running, 0.0)
        if before == 0.0:
            self.computing[self.running] = self.spent
        else:
            difference = abs(self.spent - before) / max(self.spent, before)
            self.surprise = 0.95 * self.surprise + 0.05 * difference
            told = min(self.spent, 4 * before)
            self.computing[self.running] = 0.75 * before + 0.25 * told
        self.running = None

    def used(self, number: int) -> None:
        self.leased(number)
        if number != self.running:
            self.running, self.spent = (number, 0.0) if number >= 0 else (None, 0.0)
        self.resumed = self.now

    def leased(self, number: int) -> None:
        for tier in self.tiers:
            self.early.pop((number, tier), None)

    def all_there(self) -> bool:
        return all((number, self.tiers[0]) in self.room for number in self.nbytes)

    def is_missing(self, number: int, dst: Tier) -> bool:
        """Return whether it is wanted on `dst` and is on no tier as near."""
        there = any((number, tier) in self.room for tier in self.tiers if tier <= dst)
        wanted = number in self.nbytes and number not in self.hopeless
        return wanted and not there and self.aims.get(number, Tier.DEVICE) <= dst

    def size(self, numbers: Sequence[int]) -> int:
        return sum(self.nbytes.get(number, 0) for number in set(numbers))

    def next_missing(self, dst: Tier) -> tuple[str, int | None, list[int]]:
        """Return the reason, the group to fetch, and those before it."""
        uses = self.schedule.ahead(400).tolist()
        missing = [place for place in range(len(uses)) if self.is_missing(uses[place], dst)]
        if not missing:
            return "nothing is missing", None, []
        first = missing[0]
        foretold = len(self.schedule.named)
        no = self.why_not(uses[first], dst, first < foretold)
        if no is None:
            why = self.why_now(uses, missing, dst)
            no, yes = why if isinstance(why, tuple) else ("", why)
            if yes:
                return yes, uses[first], uses[:first]
        return no, None, []

    def why_not(self, number: int, dst: Tier, foretold: bool) -> str | None:
        way, budget, nbytes = self.ways[dst], self.budgets[dst], self.nbytes[number]
        if len(way.moving) >= 4:
            return "four are on their way"
        if way.moving:
            most = math.inf if budget is None else budget // 8
            if foretold:
                most *= 2
            elif way.ending < len(way.moving):
                most = min(most, 32 * MIB)
            if sum(way.moving) + nbytes > most:
                return "enough is on its way" + ", as it is foretold" * foretold
        waiting = [size for (_, tier), size in self.early.items() if tier is dst]
        if waiting and budget is not None:
            share = 2 if foretold else 4 if self.surprise < 0.1 else 6
            if sum(waiting) + nbytes > budget // share:
                return "enough waits to be used"
        return None

    def why_now(
        self, uses: Sequence[int], missing: Sequence[int], dst: Tier
    ) -> str | tuple[str, str]:
        """Return the reason to fetch now, or a pair: the reason not to, and an empty text."""
        first, foretold = missing[0], len(self.schedule.named)
        budget, speed = self.budgets[dst], self.ways[dst].bandwidth()
        room = math.inf if budget is None else budget
        if first < foretold:
            half = first == 0 or self.size(uses[: first + 1]) <= room / 2
            return "foretold" if half else ("foretold for too much", "")
        if speed is None or self.schedule.learning:
            until = uses[foretold : first + 1]
            mean = sum(self.nbytes.values()) / len(self.nbytes)
            near = len(set(until)) <= 2 or self.size(until) <= 2 * mean
            quarter = len(until) == 1 or self.size(until) <= room / 4
            return "near" if near and quarter else ("far", "")
        if first == foretold:
            return "comes next"
        for place in missing:
            before = self.remaining() + sum(self.computing.get(n, 0.0) for n in uses[:place])
            nbytes = sum(self.nbytes[uses[p]] for p in missing if p <= place)
            coming = (sum(self.ways[dst].moving) + nbytes) / speed
            if 1.15 * coming + 0.5 * self.nbytes[uses[place]] / speed >= before:
                return "the first would be late" if place == first else "a later one would be late"
        return "there is time", ""

    def remaining(self) -> float:
        if self.running is None:
            return 0.0
        spent = self.spent + self.now - self.resumed
        return max(self.computing.get(self.running, 0.0) - spent, 0.0)


# Both get the same events ------------------------------------------------------------------------


@dataclass
class Flight:
    """A copy on its way."""

    number: int
    nbytes: int
    dst: Tier
    began: float
    ending: bool = False


class History:
    """A random life of groups, reported to both. `seen` counts the reasons of the answers."""

    def __init__(self, rng: random.Random, seen: Counter[str]) -> None:
        self.rng, self.seen = rng, seen
        self.steady = rng.random() < 0.3  # computing always takes the same time
        self.unit, self.largest = rng.choice([1, 2 * MIB]), rng.choice([3, 12])
        room = {tier: rng.choice([None, 60, 100, 200]) for tier in TIERS.values()}
        self.budgets = {t: b and b * self.unit for t, b in room.items()}
        if rng.random() < 0.5:
            del self.budgets[Tier.DEVICE]
        self.tiers = sorted(self.budgets)[:-1]
        self.below = dict(pairwise(sorted(self.budgets)))
        self.schedule = Scripted()
        self.ours = Prefetcher(self.schedule, self.budgets)
        self.reference = Reference(self.schedule, self.budgets)
        self.flights: list[Flight] = []
        for _ in range(rng.randint(1, 20)):
            self.know()
        for _ in range(90 if self.steady else 0):
            self.use()

    def pass_time(self, seconds: float) -> None:
        self.ours.now += seconds
        self.reference.now += seconds

    def wait(self) -> None:
        if not self.steady:
            self.pass_time(self.rng.choice([0.0, 0.1, 0.5]) * self.rng.random())

    def tell(self, what: str, *args: object) -> None:
        """Report an event to both."""
        getattr(self.ours, what)(*args)
        getattr(self.reference, what)(*args)

    def know(self) -> None:
        free = [n for n in range(40) if n not in self.reference.nbytes]
        if free:
            # Numbers come in any order here: the first may be far above the initial capacity.
            self.tell("know", self.rng.choice(free), self.rng.randint(1, self.largest) * self.unit)

    def known(self) -> int:
        return self.rng.choice(list(self.reference.nbytes) or [-1])

    def forget(self) -> None:
        if len(self.reference.nbytes) > 1:
            self.tell("forget", self.known())

    def expect(self) -> None:
        """Expect groups that may be forgotten already; the caller names only existing ones."""
        known = list(self.reference.nbytes)
        ever = [*known, *range(12)]
        self.schedule.named[:] = self.rng.sample(
            known, min(len(known), self.rng.choice([0, 0, 1, 5]))
        )
        self.schedule.learned = self.rng.choices(ever, k=self.rng.choice([0, 3, 8, 20]))
        self.schedule.is_learning = self.rng.random() < 0.15

    def use(self) -> None:
        number = self.rng.choice([self.known(), self.known(), self.known(), -1])
        if self.steady and number == self.reference.running:
            return  # a group used twice in a row computes for longer
        if self.rng.random() < 0.9:
            self.tell("asked", number)
            self.wait()
            if self.rng.random() < 0.2:
                self.tell("asked", self.known())
                self.wait()
        self.tell("used", number)
        self.pass_time(0.25 if self.steady else self.rng.random())

    def change_room(self) -> None:
        number, tier = self.known(), self.rng.choice([*self.budgets, Tier.HOST])
        if number >= 0:
            self.tell(self.rng.choice(["placed", "placed", "removed"]), number, tier)

    def hint(self) -> None:
        self.tell("leased", self.rng.choice([self.known(), -1]))
        self.tell("aim", self.rng.choice([self.known(), -1]), self.rng.choice(self.tiers))
        if self.rng.random() < 0.2 and self.reference.nbytes:
            self.tell("pass_over", self.known())

    def fly(self, number: int, dst: Tier, *, early: bool) -> None:
        flight = Flight(number, self.reference.nbytes[number], dst, self.ours.now)
        self.flights.append(flight)
        self.tell("placed", number, dst)
        if early:
            self.tell("fetched_early", number, dst)
        self.ours.hops[self.below[dst], dst].begin(flight.nbytes)
        self.reference.ways[dst].moving.append(flight.nbytes)

    def land(self) -> None:
        if not self.flights:
            return
        flight = self.rng.choice(self.flights)
        way = self.reference.ways[flight.dst]
        hop = self.ours.hops[self.below[flight.dst], flight.dst]
        if not flight.ending and self.rng.random() < 0.5:
            flight.ending = True
            hop.ending += 1
            way.ending += 1
            return
        self.flights.remove(flight)
        counts = self.rng.random() < 0.9
        hop.end(flight.nbytes)
        hop.measure(flight.nbytes, flight.began, self.ours.now, counts=counts)
        way.end(flight.nbytes, flight.began, self.ours.now, counts)
        hop.ending -= flight.ending
        way.ending -= flight.ending

    def compare(self) -> None:
        assert self.ours.all_there() == self.reference.all_there()
        for dst in self.tiers:
            why, number, sooner = self.reference.next_missing(dst)
            self.seen[why] += 1
            found = self.ours.next_missing(dst)
            assert (found and (found[0], found[1].tolist())) == (
                None if number is None else (number, sooner)
            ), why
            if number is not None and self.rng.random() < 0.5:
                self.fly(number, dst, early=self.rng.random() < 0.7)

    def play(self, steps: int) -> None:
        acts = [self.know, self.forget, self.expect, self.change_room, self.hint]
        acts += [self.use, self.use, self.change_room, *[self.land] * 4, self.wait]
        for _ in range(steps):
            self.rng.choice(acts)()
            self.compare()


SEEDS = range(12)
OFTEN = [
    "nothing is missing",
    "four are on their way",
    "enough is on its way",
    "enough waits to be used",
    "foretold",
    "near",
    "comes next",
    "the first would be late",
    "there is time",
]


@pytest.mark.parametrize("seed", SEEDS)
def test_prefetch_matches_the_reference(seed: int) -> None:
    seen: Counter[str] = Counter()
    rng = random.Random(seed)
    for _ in range(12):
        History(rng, seen).play(150)
    for why in OFTEN:
        assert seen[why], f"no history reaches this reason: {why}"
