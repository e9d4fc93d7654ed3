"""The learned order against a slow implementation of its description.

Hundreds of short histories of few keys: loops, interrupted loops and random uses, with memories
that soon overflow, expectations, and keys that are added and forgotten.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from tierstore.plan.matching import Numbers
from tierstore.plan.schedule import LearnedOrder

RATE_OF_LEARNING = 0.1
RATE_OF_GUESSES = 0.05
TRUSTED = 0.5
HINTS = 4
PATIENCE = 64


@dataclass
class SlowOrder:
    """Keys in lists that are scanned from end to end: no numbers, no caches."""

    memory: int
    room: int = 0
    uses: list[str] = field(default_factory=list)
    place: int | None = None
    rival: int | None = None
    confidence: float = 1.0
    guessing: bool = True
    clock: int = 0
    span: int = 1
    known: set[str] = field(default_factory=set)
    told: set[str] = field(default_factory=set)
    rates: dict[str, tuple[float, int]] = field(default_factory=dict)
    registered: list[str] = field(default_factory=list)
    expected: list[tuple[str, int]] = field(default_factory=list)

    @property
    def trusted(self) -> bool:
        return self.place is not None and self.confidence >= TRUSTED

    @property
    def learning(self) -> bool:
        return self.place is None and self.confidence >= TRUSTED

    def know(self, key: str) -> None:
        if key not in self.known:
            self.known.add(key)
            self.span = 1
            while self.span < len(self.known):
                self.span *= 2

    def number(self, key: str) -> None:
        self.told.add(key)
        self.know(key)

    def introduce(self, key: str) -> None:
        self.number(key)
        self.registered = [*(k for k in self.registered if k != key), key]

    def forget(self, key: str) -> None:
        self.registered = [k for k in self.registered if k != key]
        self.told.discard(key)
        self.cancel_prefetch(key)
        self.rates.pop(key, None)
        if key not in self.uses:
            self.known.discard(key)

    def prefetch(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.know(key)
            self.cancel_prefetch(key)
            self.expected.append((key, self.clock + PATIENCE + 2 * len(self.expected)))

    def cancel_prefetch(self, key: str) -> None:
        self.expected = [(k, limit) for k, limit in self.expected if k != key]

    def note_unordered_use(self, key: str) -> None:
        self.clock += 1
        self.expected = [(k, n) for k, n in self.expected if k != key and self.clock <= n]

    def advance_past(self, key: str) -> None:
        again = self.uses[-1:] == [key]
        if len(self.uses) == self.room and not again:
            self.drop_oldest()
        self.know(key)
        self.note_unordered_use(key)
        self.rates[key] = (1 + self.rate(key), self.clock)
        if again:
            return
        foreseen = self.future()[:1] == [key]
        if self.place is not None:
            guessed_wrong = self.guessing and not foreseen
            rate = RATE_OF_GUESSES if guessed_wrong else RATE_OF_LEARNING
            self.confidence += rate * (foreseen - self.confidence)
        self.guessing = not foreseen
        self.uses.append(key)
        if not foreseen or self.place is None:
            self.place, self.rival = self.best_match()
            return
        self.place += 1
        if self.rival is not None:
            self.rival = self.rival + 1 if self.uses[self.rival + 1] == key else None

    def best_match(self) -> tuple[int | None, int | None]:
        lengths = [self.common(end) for end in range(len(self.uses) - 1)]
        longest = max(lengths, default=0)
        if not longest:
            return None, None
        ends = [end for end, length in enumerate(lengths) if length == longest]
        end = ends.pop()
        gap = end - ends[-1] if ends else 0
        if gap > longest:
            return end, ends[-1]
        while ends and gap <= longest and end - ends[-1] == gap:
            end = ends.pop()  # a loop: the pass that has as many before it
        return end, None

    def common(self, end: int) -> int:
        """Return the number of uses up to this position that equal the newest ones."""
        length = 0
        while length <= end and self.uses[end - length] == self.uses[-1 - length]:
            length += 1
        return length

    def drop_oldest(self) -> None:
        kept = max(self.memory, 2 * len(self.registered))
        gone = max(len(self.uses) - kept, 0)
        self.uses, self.room = self.uses[gone:], 2 * kept
        if self.place is not None:
            self.place = self.place - gone if self.place >= gone else None
        if self.rival is not None:
            self.rival = self.rival - gone if self.rival >= gone else None
        needed = {*self.uses, *self.told, *(key for key, _ in self.expected)}
        for key in self.known - needed:
            self.rates.pop(key, None)
        self.known &= needed

    def rate(self, key: str) -> float:
        rate, since = self.rates.get(key, (0.0, 0))
        return rate * math.exp(-(self.clock - since) / self.span)

    def future(self) -> list[str]:
        return [] if self.place is None else self.uses[self.place + 1 :]

    def named(self) -> list[str]:
        return [key for key, _ in self.expected]

    def steps_until(self, key: str) -> float:
        if key in self.named():
            return self.named().index(key) + 1
        if self.learning:
            return math.inf
        if self.trusted:
            rivals = [] if self.rival is None else self.uses[self.rival + 1 :]
            ahead = [self.future(), rivals]
            return min((uses.index(key) + 1 for uses in ahead if key in uses), default=math.inf)
        return self.span / self.rate(key) if self.rate(key) else math.inf

    def upcoming(self, count: int) -> list[str]:
        if self.trusted:
            return self.named() + self.future()[:count]
        hints: list[str] = []
        if self.learning and self.uses and self.uses[-1] in self.registered:
            hints = self.registered[self.registered.index(self.uses[-1]) + 1 :]
        return self.named() + hints[: min(count, HINTS)]


class Pair:
    """The learned order and the slow one, given the same events."""

    def __init__(self, memory: int) -> None:
        self.order, self.slow = LearnedOrder(memory), SlowOrder(memory)
        self.numbers: dict[str, int] = {}  # the assigned numbers

    def do(self, act: str, *arguments: object) -> None:
        epoch, before = self.order.epoch, self.ranks()
        same_keys, was_trusted = set(self.slow.known), self.slow.trusted
        quiet = act == "advance_past" and not self.slow.expected
        quiet = quiet and self.slow.future()[:1] == [arguments[0]]
        quiet = quiet and len(self.slow.uses) < self.slow.room
        rival = self.slow.rival
        quiet = quiet and (rival is None or self.slow.uses[rival + 1] == arguments[0])
        part = self.order if hasattr(self.order, act) else self.order.known
        told = getattr(part, act)(*arguments)
        getattr(self.slow, act)(*arguments)
        if act == "number":
            assert self.numbers.setdefault(str(arguments[0]), told) == told
            assert len(set(self.numbers.values())) == len(self.numbers)
        if act == "forget":
            self.numbers.pop(str(arguments[0]), None)
        assert self.order.epoch >= epoch
        after = self.ranks()
        others = [k for k in before if k in after and k != arguments[0]]
        if any(before[key] != after[key] for key in others):
            assert self.order.epoch > epoch
        if quiet and same_keys == self.slow.known and was_trusted == self.slow.trusted:
            assert self.order.epoch == epoch

    def ranks(self) -> dict[str, float]:
        return dict(zip(self.numbers, self.order.ranks(self.told()).tolist(), strict=True))

    def told(self) -> Numbers:
        return np.array(list(self.numbers.values()), dtype=np.int64)

    def compare(self, keys: Sequence[str], rng: random.Random) -> None:
        order, slow = self.order, self.slow
        assert (order.trusted, order.learning) == (slow.trusted, slow.learning)
        assert order.known.prefetched_count() == len(slow.expected)
        count = rng.randrange(8)
        upcoming = list(order.upcoming(count))
        assert upcoming == slow.upcoming(count)
        ahead = zip(upcoming, order.ahead(count).tolist(), strict=True)
        assert all(number == self.numbers.get(key, number) for key, number in ahead)
        for key in keys:
            assert order.steps_until(key) == pytest.approx(slow.steps_until(key), rel=1e-9)

    def compare_ranks(self) -> None:
        """Compare ranks, which are steps or the logarithms of steps; expected keys come first."""
        named = set(self.slow.named())
        ranks = self.ranks()
        steps = {key: self.slow.steps_until(key) for key in ranks}
        self.compare_scale({k: r for k, r in ranks.items() if k in named}, steps, 0.2)
        self.compare_scale({k: r for k, r in ranks.items() if k not in named}, steps, 1e-6)
        lowest = min((r for k, r in ranks.items() if k not in named), default=math.inf)
        assert all(ranks[key] < lowest for key in named & set(ranks))

    def compare_scale(
        self, ranks: dict[str, float], steps: dict[str, float], tolerance: float
    ) -> None:
        by_steps = self.slow.trusted or bool(set(ranks) & set(self.slow.named()))
        keys = [key for key in ranks if math.isfinite(steps[key])]
        assert all(ranks[key] == math.inf for key in ranks if key not in keys)
        place = {key: steps[key] if by_steps else math.log(steps[key]) for key in keys}
        offsets = [ranks[key] - place[key] for key in keys]
        assert max(offsets, default=0.0) - min(offsets, default=0.0) <= tolerance
        for times in (0.5, 4.0):
            farther = self.order.farther(np.array([ranks[key] for key in keys]), times).tolist()
            for key, rank in zip(keys, farther, strict=True):
                more = (times - 1) * steps[key] if by_steps else math.log(times)
                assert rank - ranks[key] == pytest.approx(more, abs=tolerance)


def uses(rng: random.Random, keys: Sequence[str]) -> Iterator[str]:
    """Yield a loop, now and then another one, with some random uses in between."""
    noise = rng.choice([0.0, 0.02, 0.1, 0.4, 1.0])
    loops = [rng.choices(keys, k=rng.randint(1, 7)) for _ in range(2)]
    while True:
        for key in rng.choice(loops) * rng.randint(1, 4):
            yield rng.choice(keys) if rng.random() < noise else key


def play(seed: int, *, memory: int, keys: Sequence[str], length: int, acts: Sequence[str]) -> None:
    rng = random.Random(seed)
    pair = Pair(memory)
    following = uses(rng, keys)
    often = rng.choice([0.1, 0.5, 1.0])  # seldom-read results are rebuilt on the next read
    for _ in range(length):
        act = rng.choice(acts) if rng.random() < 0.2 else "advance_past"
        if act == "prefetch":
            pair.do(act, rng.sample(keys, rng.randint(0, 3)))
        else:
            pair.do(act, next(following) if act == "advance_past" else rng.choice(keys))
        if rng.random() < often:
            pair.compare(keys, rng)
            pair.compare_ranks()


ALL = [
    "number",
    "introduce",
    "forget",
    "prefetch",
    "cancel_prefetch",
    "note_unordered_use",
    "advance_past",
]


@pytest.mark.parametrize("seed", range(10))
def test_short_history_that_overflows_matches_the_reference(seed: int) -> None:
    for memory in range(1, 13):
        play(100 * seed + memory, memory=memory, keys="abcde", length=60, acts=["number"])


@pytest.mark.parametrize("seed", range(10))
def test_keys_added_and_removed_match_the_reference(seed: int) -> None:
    for memory in (2, 5, 9, 100):
        play(100 * seed + memory, memory=memory, keys="abcdefg", length=150, acts=ALL)


@pytest.mark.parametrize("seed", range(12))
def test_interrupted_long_loops_match_the_reference(seed: int) -> None:
    """Create many positions after long runs, where another search finds the longest."""
    rng = random.Random(seed)
    pair = Pair(memory=rng.choice([120, 400]))
    keys = "abcd"[: rng.randint(1, 4)] + "x"
    for _ in range(6):
        loop = list(keys[:-1]) * rng.randint(1, 40)
        for key in [*loop, rng.choice(keys)]:
            pair.do("advance_past", key)
            pair.compare(keys, rng)


@pytest.mark.parametrize("seed", range(6))
def test_many_keys_match_the_reference(seed: int) -> None:
    """Use more keys than the initial capacity."""
    keys = [f"g{number}" for number in range(20 + 10 * seed)]
    play(seed, memory=40, keys=keys, length=150, acts=ALL)
