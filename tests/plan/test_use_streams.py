"""Several workers share host memory: each one's order is learned separately, and none starves.

Unless stated otherwise, space is counted in groups of equal size. A loop of 50 groups with space
for n of them, one of which is in use, misses at least 51 - n of them in each pass.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from tests.histories.machine import MEMORY, play
from tests.plan.scans import cycle
from tests.plan.workers import Worker, Workers
from tierstore.model import events
from tierstore.model.groups import GroupId
from tierstore.model.moves import Copy
from tierstore.model.tiers import Access, HostAccess, Tier, UseOrder
from tierstore.plan.expected_uses import ExpectedUses
from tierstore.plan.matching import Numbers
from tierstore.plan.planner import NEXT_USE_WITHOUT_PREFETCH, Planner, planner_for
from tierstore.plan.policy import POLICIES, FarthestNextUse, RankingPolicy
from tierstore.plan.schedule import LearnedOrder
from tierstore.plan.use_streams import CONTESTED, MOST, UseStream, UseStreams
from tierstore.simulation import Use, simulate, simulate_together

A, B, C = (cycle(50, 1, prefix) for prefix in "abc")


def sizes(*loops: list[str]) -> dict[str, int]:
    return {key: 1 for loop in loops for key in loop}


def plain(room: int) -> Planner:
    """Return a planner with one order of all uses, which fetches no group early."""
    budgets, schedule = {Tier.HOST: room, Tier.DISK: None}, ForetellsNothing()
    return Planner(budgets, RankingPolicy(FarthestNextUse(schedule), budgets), schedule)


class ForetellsNothing(LearnedOrder):
    def ahead(self, count: int) -> Numbers:
        return super().ahead(0)


# Misses -----------------------------------------------------------------------------------------


def fetched_by_four(seed: int, planner: Planner | None) -> float:
    """Return the groups per pass that four workers fetch in one loop, at most 5 groups apart."""
    drawn = random.Random(seed)
    workers = Workers(sizes(A), 20, planner, seed)
    for stream in range(4):
        workers.add(Worker(stream, A, start=5 * drawn.random(), jitter=0.1))
    workers.run(200)
    before = workers.fetched
    workers.run(200 + 8 * 50)
    return (workers.fetched - before) / 8


def test_one_worker_misses_only_the_excess() -> None:
    workers = Workers(sizes(A), 20)
    workers.add(Worker(0, A))
    workers.run(50 * 12)
    assert workers.misses(0, 0, 1) == 50
    assert workers.misses(0, 2, 12) == 31


@pytest.mark.parametrize("seed", range(3))
def test_four_workers_in_step_fetch_like_one(seed: int) -> None:
    assert fetched_by_four(seed, None) <= 1.2 * 31


def test_merged_uses_of_workers_are_noise() -> None:
    """Check the control of the previous test: with the ordinary schedule it would fail."""
    assert sum(fetched_by_four(seed, plain(20)) for seed in range(3)) > 3 * 1.3 * 31


@pytest.mark.parametrize(
    ("loops", "seconds"),
    [((50, 50), (1.0, 2.0)), ((50, 50), (1.0, 10.0)), ((30, 70), (1.0, 1.0)), ((30, 70), (3, 1))],
)
@pytest.mark.parametrize("holds", [1, 3])
@pytest.mark.parametrize("jitter", [0.0, 0.2])
def test_two_workers_get_half_the_space_each(
    loops: tuple[int, int], seconds: tuple[float, float], holds: int, jitter: float
) -> None:
    """Check this for all paces, and for loops of other lengths."""
    keys = [cycle(length, 1, f"{length} of {n} ") for n, length in enumerate(loops)]
    workers = Workers(sizes(*keys), 40)
    for stream, pace in enumerate(seconds):
        own = Worker(stream, keys[stream], pace, 0.01 * stream, holds=holds, jitter=jitter)
        workers.add(own)
    longest = max(length * pace for length, pace in zip(loops, seconds, strict=True))
    workers.run(10 * longest)
    for stream, (length, pace) in enumerate(zip(loops, seconds, strict=True)):
        passes = int(10 * longest / (length * pace) / (1 + jitter))
        alone = length - (20 - holds)
        assert workers.misses(stream, 3, passes - 1) <= 1.25 * alone


class NoShares(UseStreams):
    """Streams without shares: no group is spared."""

    def spared(self, numbers: Numbers) -> npt.NDArray[np.bool_]:
        return np.zeros_like(super().spared(numbers))


def test_slower_worker_without_shares_gets_no_space() -> None:
    """Check the control of the previous test."""
    budgets = {Tier.HOST: 40, Tier.DISK: None}
    schedule = NoShares(
        lambda: workers.now if made else 0.0,
        lambda number: True,
        lambda: workers.planner.prefetcher.nbytes,
        prefetch=False,
    )
    policy = RankingPolicy(FarthestNextUse(schedule), budgets)
    made = False
    workers = Workers(sizes(A, B), 40, Planner(budgets, policy, schedule))
    made = True
    workers.add(Worker(0, A), Worker(1, B, 2.0, 0.01))
    workers.run(50 * 20)
    assert workers.misses(0, 3, 19) < 15
    assert workers.misses(1, 3, 9) == 50


def test_small_loop_leaves_its_rest_to_others() -> None:
    small = cycle(10, 1, "small")
    workers = Workers(sizes(A, B, small), 60)
    workers.add(Worker(0, A), Worker(1, B, 2.0, 0.1), Worker(2, small, 1.0, 0.2))
    workers.run(50 * 20)
    assert workers.misses(2, 2, 90) == 0
    assert workers.misses(0, 3, 19) <= 27  # space for 25
    assert workers.misses(1, 3, 9) <= 27


@pytest.mark.parametrize("burst", [4, 12])
def test_burst_of_leases_gets_one_share(burst: int) -> None:
    workers = Workers(sizes(A, B), 40)
    for stream, (keys, pace) in enumerate(((A, 1.0), (B, 2.03))):
        workers.add(Worker(stream, keys, pace, 0.01 * stream, holds=8, burst=burst))
    workers.run(50 * 20)
    assert workers.misses(0, 4, 19) <= 1.25 * (50 - 12)
    assert workers.misses(1, 4, 9) <= 1.25 * (50 - 12)


@pytest.mark.parametrize("ends", [True, False])
def test_departed_worker_is_forgotten_after_two_passes(ends: bool) -> None:
    """Report the end of a stream, or stop it in the middle of its fifth pass."""
    workers = Workers(sizes(A, B, C), 60)
    last = Worker(2, C[:-20] if ends else C, 1.0, 0.2, passes=99 if ends else 5)
    workers.add(Worker(0, A), Worker(1, B, 1.0, 0.1), last)
    workers.run(230)
    if ends:
        workers.end(2)
    workers.run(50 * 14)
    during = [workers.missed[stream, 3] for stream in (0, 1)]
    assert min(during) >= 29
    for stream in (0, 1):
        after = [workers.missed[stream, turn] for turn in range(7, 14)]
        assert max(after) <= 21, "space for 30, of which one is in use"


def test_joining_worker_gets_its_share_only() -> None:
    workers = Workers(sizes(A, B, C), 60)
    workers.add(Worker(0, A), Worker(1, B, 1.0, 0.1), Worker(2, C, 1.0, 250.2))
    workers.run(50 * 14)
    for stream in (0, 1):
        before = [workers.missed[stream, turn] for turn in range(2, 5)]
        after = [workers.missed[stream, turn] for turn in range(5, 14)]
        assert max(after) - max(before) <= 10  # the joiner has a third of 60
    assert max(workers.missed[2, turn] for turn in range(1, 9)) <= 32


def test_random_worker_gets_one_share_at_most() -> None:
    drawn = random.Random(3)
    workers = Workers(sizes(A, B, C), 60)
    anyhow = Worker(2, drawn.choices(C, k=700), 1.0, 0.2)
    workers.add(Worker(0, A), Worker(1, B, 1.0, 0.1), anyhow)
    workers.run(50 * 14)
    assert max(workers.missed[stream, turn] for stream in (0, 1) for turn in range(2, 14)) <= 33
    assert workers.missed[2, 0] <= 700 * 0.66, "it has space for 20 of the 50"


def test_shares_are_counted_in_bytes() -> None:
    large = cycle(10, 1, "large")
    workers = Workers(sizes(A) | dict.fromkeys(large, 8), 80)
    workers.add(Worker(0, A), Worker(1, large, 5.0, 0.1))
    workers.run(50 * 12)
    assert workers.misses(0, 3, 11) <= 50 - 30  # half of the space is for 40
    assert workers.misses(1, 3, 11) <= 10 - 4 + 1  # ... and for 5 of the large ones


# Learning of a stream ---------------------------------------------------------------------------


def test_keys_used_long_ago_never_return() -> None:
    """Let their waits grow until they are infinite. That raises no warning."""
    stream = UseStream(LearnedOrder(64), 0.0)
    for number, key in enumerate("abc"):
        stream.use(key, float(number))
    waits = []
    with np.errstate(over="raise"):
        for number in range(3, 3200):
            stream.use("c", float(number))
            waits.append(stream.times(float(number))[0])
    assert waits[0] < 100
    assert waits[-1] == np.inf
    assert all(a <= b for a, b in itertools.pairwise(waits))


def paced(times: list[float]) -> UseStream:
    """Return a stream that used one of three groups at each of these times."""
    stream = UseStream(LearnedOrder(64), times[0])
    for count, now in enumerate(times):
        stream.use(f"g{count % 3}", now)
    return stream


def test_stream_pace_is_a_mean() -> None:
    assert paced([5.0]).seconds_per_use == 0
    assert paced([5.0, 7.0]).seconds_per_use == 2
    assert paced([5.0, 7.0, 13.0]).seconds_per_use == 4
    assert paced([3.0 * n for n in range(17)]).seconds_per_use == 3
    # A quarter of the next sixteen uses' time is learned at their end.
    faster = [48.0 + n for n in range(1, 17)]
    slow = [3.0 * n for n in range(17)]
    assert paced(slow + faster[:-1]).seconds_per_use == 3
    assert paced(slow + faster).seconds_per_use == 2.5


def test_pause_counts_four_times_the_expected_at_most() -> None:
    steady = [float(n) for n in range(32)]
    assert paced([*steady, 1e6]).seconds_per_use == 1 + 0.25 * 3


def test_simultaneous_uses_are_timed_with_the_next() -> None:
    bursts = [8.0 * (n // 8) for n in range(65)]
    assert paced(bursts).seconds_per_use == pytest.approx(1, abs=0.05)


def test_untimed_stream_has_a_pace_once_timed() -> None:
    at_once = paced([0.0] * 17)
    assert at_once.seconds_per_use == 0
    for count in range(16):
        at_once.use(f"g{(count + 17) % 3}", count + 1.0)
    assert at_once.seconds_per_use == 0.25


def test_repeated_use_of_a_group_counts_once() -> None:
    stream = paced([0.0, 1.0, 2.0, 3.0])
    for now in (3.5, 3.75):
        stream.use("g0", now)
    assert (stream.seconds_per_use, stream.latest) == (1, 3.75)
    assert stream.times(3.75).tolist()[:3] == [6.75 + 0, 4.75, 5.75]


def test_late_group_recedes_by_its_delay() -> None:
    stream = paced([float(n) for n in range(7)])  # the latest use was of g0
    for now, late in ((6.0, 0), (7.0, 0), (8.0, 1), (12.0, 5)):
        assert stream.late(now) == late
        assert stream.times(now).tolist()[:3] == [9 + 2 * late, 7 + 2 * late, 8 + 2 * late]
        assert np.isinf(stream.times(now)[3:]).all()
    assert not stream.stopped(10.0, 99)
    assert stream.stopped(10.5, 0)  # late by more than a pass of three uses


def test_stream_without_pace_stops_after_many_other_uses() -> None:
    for stream in (paced([0.0]), paced([0.0] * 9)):
        assert not stream.stopped(100.0, 16)
        assert stream.stopped(0.0, 17)


# The ranking ------------------------------------------------------------------------------------


class Told:
    """A schedule of these keys, with a clock."""

    def __init__(self, keys: str) -> None:
        self.now = 0.0
        self.used: set[int] = set()
        """Numbers of leased groups."""
        self.schedule = UseStreams(
            lambda: self.now, self.used.__contains__, lambda: np.ones(16, dtype=np.int64)
        )
        for key in keys:
            self.schedule.known.introduce(key)

    def use(self, stream: int, key: str) -> int:
        """Use a group, which stays leased. Returns the index of the stream."""
        self.used.add(self.schedule.known.number(key))
        return self.schedule.advance_past(key, stream)

    def loop(self, stream: int, keys: str, seconds: float, passes: int = 3) -> None:
        for key in keys * passes:
            self.use(stream, key)
            self.now += seconds

    def ranks(self, keys: str) -> list[float]:
        numbers = np.array([self.schedule.known.number(key) for key in keys])
        ranks: list[float] = self.schedule.ranks(numbers).tolist()
        return ranks


def test_group_ranks_by_its_earliest_next_use() -> None:
    told = Told("abcdx")
    told.loop(0, "abc", 2.0)  # until 18; "a" comes at 18
    told.now = 17.0
    told.loop(1, "dc", 0.25)  # until 18.5: the other is late by 0.5
    assert told.ranks("abcdx") == [19, 21, 18.75, 18.5, np.inf]
    assert told.schedule.several
    told.schedule.end(7)  # it never began
    assert told.schedule.several


def test_ranks_are_as_of_the_query_time() -> None:
    told = Told("abcd")
    told.loop(0, "abc", 2.0)
    told.loop(1, "d", 2.0)
    told.now = 21.0
    assert told.ranks("abc") == [24, 26, 28]
    assert told.schedule.farther(np.array([24.0]), 4.0).tolist() == [33]


def test_first_pass_expects_least_recent_first() -> None:
    """Expect each after as many uses as before, or up to twice as many; an unused group never."""
    told = Told("abcdxy")
    told.loop(0, "abcd", 1.0, passes=1)
    told.loop(1, "y", 1.0, passes=1)
    ranks = told.ranks("abcdx")
    assert all(told.now + 2 <= rank <= told.now + 3 * 4 for rank in ranks[:4])
    assert ranks[4] == np.inf


def test_discarded_group_may_return() -> None:
    told = Told("abcy")
    told.loop(0, "abc", 2.0)
    told.loop(1, "yb", 2.0)
    told.schedule.known.forget("c")
    told.schedule.known.forget("never there")
    told.loop(0, "ab", 2.0)
    told.schedule.known.introduce("c")
    told.loop(0, "cabc", 2.0, passes=1)
    ranks = told.ranks("abc")
    assert ranks == sorted(ranks)
    assert 0 < ranks[0] < ranks[-1] < np.inf


def test_routed_groups_rank_by_frequency() -> None:
    told = Told("abcdy")
    for key in "often", "seldom":
        told.schedule.known.introduce(key, UseOrder.ROUTED)
    for turn in range(12):
        told.loop(0, "abcd", 1.0, passes=1)
        told.loop(1, "y", 0.0, passes=1)
        told.schedule.note_unordered_use("often", 0)
        if turn % 4 == 0:
            told.schedule.note_unordered_use("seldom", 0)
    told.schedule.note_unordered_use("told by the caller", 0)
    often, seldom = (
        told.schedule.ranks(np.array([told.schedule.known.number(k)]))[0]
        for k in ("often", "seldom")
    )
    assert told.now < often < seldom < np.inf


def test_schedule_expecting_nothing_takes_no_hints() -> None:
    told = Told("abcy")
    told.schedule = UseStreams(
        lambda: told.now,
        told.used.__contains__,
        lambda: np.ones(16, dtype=np.int64),
        prefetch=False,
    )
    for streams in (1, 2):
        told.loop(0, "abc", 1.0)
        if streams == 2:
            told.loop(1, "y", 1.0, passes=1)
        schedule = told.schedule
        assert schedule.several == (streams == 2)
        schedule.known.prefetch(["b"])
        schedule.known.cancel_prefetch("b")
        assert schedule.ahead(9).tolist() == []
        assert schedule.streams(9) == []
        assert schedule.known.prefetched_count() == 0
        assert not schedule.learning


def test_first_stream_begins_anew_when_all_groups_are_gone() -> None:
    told = Told("abc")
    for key in "abc":
        told.schedule.known.forget(key)
    told.schedule.ask("x")
    told.loop(0, "xy", 1.0)
    assert max(told.ranks("xy")) < np.inf


def test_expected_keys_come_before_all_streams() -> None:
    told = Told("abcdxy")
    told.loop(0, "abc", 1.0)
    told.loop(1, "d", 1.0)
    told.schedule.known.prefetch(["y", "x"])
    ranks = told.ranks("yxabcd")
    assert ranks[:2] == sorted(ranks[:2])
    assert ranks[1] < told.now < min(ranks[2:])
    assert told.schedule.known.prefetched_numbers().tolist() == [
        told.schedule.known.number(key) for key in "yx"
    ]
    told.use(1, "y")
    assert told.schedule.known.prefetched_count() == 1


def test_streams_interleave_their_expected_keys() -> None:
    told = Told("abcxyz")
    for one, other in zip("abc" * 3, "xyz" * 3, strict=True):
        told.use(0, one)
        told.use(1, other)
        told.now += 1
    told.schedule.known.prefetch(["y"])
    assert told.schedule.several
    numbers = [told.schedule.known.number(key) for key in "yabxy"]
    assert told.schedule.ahead(2).tolist() == numbers


def test_stream_blocked_does_not_delay_another() -> None:
    several = ExpectedUses(np.array([4, 5, 6, 7]), np.zeros(4), np.array([0, 1, 0, 1]))
    assert several.of_streams_of([5]).tolist() == [False, True, False, True]
    assert not several.of_streams_of([]).any()
    assert not ExpectedUses(np.array([4, 5])).of_streams_of([5]).any()


def test_schedule_before_any_use_has_one_order() -> None:
    told = Told("ab")
    assert told.ranks("ab") == [np.inf, np.inf]
    assert not told.schedule.several
    assert told.schedule.learning


def test_largest_holder_evicts_first_and_spares_shared_keys() -> None:
    told = Told("abcdef")
    for _ in range(12):
        for stream, key in ((0, "abcde"[int(told.now) % 5]), (1, "fe"[int(told.now) % 2])):
            told.use(stream, key)
        told.now += 1
    told.now -= 1
    spared = told.schedule.spared(np.arange(6)).tolist()
    assert spared[:6] == [False] * 4 + [True] * 2
    assert not any(told.schedule.spared(np.array([0, 5]))[:6]), "they have the same groups"


# Assignment of uses to streams --------------------------------------------------------------------


def places(told: Told, uses: list[tuple[int, str]], *, lent: bool) -> list[int]:
    """Return the stream of each use. Groups may stay leased until their user's next use."""
    latest: dict[int, int] = {}
    found = []
    for user, key in uses:
        told.used.discard(latest.get(user, -1))
        told.schedule.ask(key, user)
        found.append(told.use(user, key))
        told.now += 1
        latest[user] = told.schedule.known.number(key)
        if not lent:
            told.used.clear()
    told.used.clear()
    return found


def test_users_side_by_side_get_separate_streams() -> None:
    told = Told("abcxyz")
    assert places(told, [(1, "a"), (2, "x"), (1, "b"), (2, "y")], lent=True) == [0, 1, 0, 1]


def test_users_taking_turns_share_a_stream() -> None:
    """Check this whichever of them runs which model."""
    told, drawn = Told("abcxyz"), random.Random(1)
    for _ in range(12):
        for keys in "abc", "xyz":
            user = drawn.randrange(100)
            assert places(told, [(user, key) for key in keys], lent=True) == [0, 0, 0]
    assert next(iter(told.schedule.ahead(1))) == told.schedule.known.number("a")


def test_pool_users_continue_where_others_ended() -> None:
    """Run two models at once on any free threads: each model keeps its stream."""
    told, drawn = Told("abcxyz"), random.Random(2)
    places(told, [(1, "a"), (2, "x"), (1, "b"), (2, "y"), (1, "c"), (2, "z")] * 3, lent=True)
    for _ in range(20):
        one, other = drawn.sample(range(3, 9), 2)
        uses = [
            (user, key)
            for pair in zip("abc", "xyz", strict=True)
            for user, key in zip((one, other), pair, strict=True)
        ]
        assert places(told, uses, lent=True) == [0, 1] * 3


def test_users_of_one_model_share_the_learned_order() -> None:
    told = Told("abcde")
    places(told, [(1, key) for key in "abcde" * 3], lent=True)
    uses = [(1, "a"), (1, "b"), (2, "a"), (1, "c"), (2, "b"), (1, "d"), (2, "c")]
    assert places(told, uses, lent=True) == [0, 0, 1, 0, 1, 0, 1]
    (_, first), (_, second) = told.schedule.streams(2)
    assert first.tolist() == [told.schedule.known.number(key) for key in "ea"]
    assert second.tolist() == [told.schedule.known.number(key) for key in "de"]


def test_short_simultaneous_leases_become_streams() -> None:
    told, drawn = Told("abcdexyzuv"), random.Random(3)
    left = {1: "abcde" * 30, 2: "xyzuv" * 30}
    uses = []
    while any(left.values()):
        user = drawn.choice([user for user, keys in left.items() if keys])
        uses.append((user, left[user][0]))
        left[user] = left[user][1:]
    found = places(told, uses, lent=False)
    of = {
        user: {place for (one, _), place in zip(uses, found, strict=True) if one == user}
        for user in (1, 2)
    }
    late = {(user, place) for (user, _), place in list(zip(uses, found, strict=True))[60:]}
    assert of[1] & of[2], "at first they share a stream"
    assert len(late) == 2
    assert CONTESTED > 0


def test_streams_are_bounded_for_any_number_of_users() -> None:
    told = Told("abc")
    for user in range(3 * MOST):
        told.use(user, "abc"[user % 3])
    assert len(told.schedule.streams(1)) <= MOST
    ever = Told("abc")
    for user in range(1000):
        assert set(places(ever, [(user, key) for key in "abc"], lent=True)) == {0}


def test_stopped_stream_takes_no_part() -> None:
    told = Told("abcxyz")
    alone = Told("abcxyz")
    places(told, [(1, "a"), (2, "x"), (1, "b"), (2, "y"), (1, "c"), (2, "z")] * 3, lent=True)
    for one in told, alone:
        places(one, [(1, key) for key in "abc" * 4], lent=True)
    assert not told.schedule.several
    assert told.schedule.ahead(9).tolist() == alone.schedule.ahead(9).tolist() != []
    assert told.ranks("xyz") == [np.inf] * 3


def test_stream_unused_beyond_history_is_forgotten() -> None:
    told = Told("abcxyz")
    told.schedule = UseStreams(
        lambda: told.now,
        told.used.__contains__,
        lambda: np.ones(16, dtype=np.int64),
        memory=32,
    )
    places(told, [(1, "a"), (2, "x")] * 3, lent=True)
    for _ in range(40):
        told.use(1, "a")
        told.use(1, "b")
    told.use(2, "x")
    assert told.use(3, "c") == 2, "all groups are leased, so a new stream begins"
    for _ in range(40):
        told.use(1, "a")
        told.use(1, "b")
    assert told.use(4, "z") == 1, "it reuses the index of an ended stream"


# Prefetching ------------------------------------------------------------------------------------


WAYS = {(Tier.DISK, Tier.HOST): 1.0, (Tier.HOST, Tier.DEVICE): 10.0}
"""A group is read in a second."""


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("jitter", [0.0, 0.3])
def test_simultaneous_models_wait_as_little_as_alone(
    count: int, device: bool, jitter: float
) -> None:
    """Compute for twice as long as reading takes, with space for less than half."""
    drawn = random.Random(count)
    loops = [cycle(40, 1, f"{model} ") for model in range(count)]
    budgets: dict[Tier, int | None] = {Tier.HOST: 10 * count, Tier.DISK: None}
    if device:
        budgets[Tier.DEVICE] = 4 * count

    def uses(keys: list[str], seconds: float) -> list[Use]:
        return [Use(key, seconds * (1 + jitter * drawn.random())) for key in keys]

    def steady(threads: Callable[[int], list[list[Use]]]) -> tuple[float, float, float]:
        few, many = (
            simulate_together(sizes(*loops), threads(passes), budgets, bandwidth=WAYS)
            for passes in (5, 10)
        )
        read = sum(many.reads.values()) - sum(few.reads.values())
        stalled = many.stalled_seconds - few.stalled_seconds
        return many.misses - few.misses, read, stalled / many.seconds

    one_by_one = steady(lambda n: [[use for _ in range(n) for k in loops for use in uses(k, 2)]])
    at_once = steady(lambda n: [uses(keys * n, 2 * count) for keys in loops])
    assert at_once[0] <= 1.15 * one_by_one[0] + 10
    assert at_once[1] <= 1.1 * one_by_one[1]
    assert at_once[2] <= one_by_one[2] + 0.01


def test_each_stream_may_prefetch_its_next_read_when_full() -> None:
    """Let one stream prefetch a little more than one group, as far as space allows."""
    loops = [cycle(12, 1, f"{model} ") for model in range(2)]
    planner = planner_for({Tier.HOST: 10, Tier.DISK: None}, "next-use")
    on_their_way: set[GroupId] = set()
    held: dict[int, GroupId] = {}
    most = now = 0

    def tell(event: events.Event) -> None:
        copies = [told for told in planner.handle(event, now) if isinstance(told, Copy)]
        on_their_way.update(copy.group for copy in copies)

    for key in {key: None for keys in loops for key in keys}:
        tell(events.Registered(GroupId(key, 0), 1, backing=True))
    for now in range(12 * 16):
        stream = now % 2
        group = GroupId(loops[stream][now // 2 % 12], 0)
        if stream in held:
            tell(events.Released(held[stream], Access.READ))
        tell(events.Demanded(group, stream))
        if group in on_their_way:  # it arrives when it is demanded
            on_their_way.remove(group)
            tell(events.Arrived(group, Tier.DISK, Tier.HOST))
        tell(events.Leased(group, Access.READ, stream=stream))
        held[stream] = group
        most = max(most, len(on_their_way))
    assert most == 2


def test_simultaneous_models_as_one_order_wait() -> None:
    """Check the control of the previous test: with one order for all it would fail."""
    drawn = random.Random(1)
    left = {model: cycle(40, 15, f"{model} ") for model in range(2)}
    uses = []
    while any(left.values()):
        model = drawn.choice([model for model, keys in left.items() if keys])
        uses.append(Use(left[model].pop(0), 2.0))
    groups = sizes(*(cycle(40, 1, f"{model} ") for model in range(2)))
    noise = simulate(groups, uses, {Tier.HOST: 24, Tier.DISK: None}, bandwidth=WAYS)
    assert noise.misses > 200


@pytest.mark.parametrize("users", [1, 3])
def test_alternating_users_are_planned_as_one(users: int) -> None:
    """Compare every instruction, including prefetches."""
    instructed = []
    for last in (1, users):
        planner = planner_for({Tier.HOST: 20, Tier.DISK: None}, "next-use")
        workers = Workers(sizes(A, B), 20, planner)
        for turn in range(600):
            user = turn // 50 % last
            group = GroupId((A + B)[turn % 100], 0)
            workers.now += 1
            workers.tell(events.Demanded(group, user))
            workers.tell(events.Leased(group, Access.READ, stream=user))
            workers.tell(events.Released(group, Access.READ))
        instructed.append(workers.instructions)
    assert instructed[0] == instructed[1] != []


# The planner ------------------------------------------------------------------------------------


def test_policy_for_streams_is_not_offered_by_name() -> None:
    assert NEXT_USE_WITHOUT_PREFETCH not in POLICIES


def test_streams_plan_for_a_device() -> None:
    planner = planner_for(
        {Tier.DEVICE: 2, Tier.HOST: 3, Tier.DISK: None}, NEXT_USE_WITHOUT_PREFETCH
    )
    workers = Workers({}, 0, planner)
    for key in "abcde":
        workers.tell(events.Registered(GroupId(key, 0), 1, backing=True))
    workers.add(Worker(0, "abc"), Worker(1, "cde", 1.0, 0.5))
    workers.run(30)
    assert workers.missed[0, 8] <= 3


@pytest.mark.parametrize("policy", POLICIES)
def test_single_user_is_planned_as_one_order(policy: str) -> None:
    """Compare every instruction with those of one order, in random histories."""
    followed = 0
    for seed in range(60):
        world = play(seed, policy, 60)
        planner = planner_for(world.books.budgets, policy, memory=MEMORY)
        assert [planner.handle(event, now) for now, event in world.log] == world.told
        followed += sum(map(len, world.told))
    assert followed > 1000


@pytest.mark.parametrize("policy", [NEXT_USE_WITHOUT_PREFETCH, *POLICIES])
@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_streams_in_random_histories_keep_every_promise(
    seed: int, device: bool, policy: str
) -> None:
    budgets: dict[Tier, int | None] = {Tier.HOST: 30, Tier.DISK: None}
    history = History(seed, planner_for({Tier.DEVICE: 25} | budgets if device else budgets, policy))
    for _ in range(400):
        history.step()
    history.finish()
    assert history.leased > 50


class History:
    """Registers, uses, changes and discards groups at random, in streams that begin and end."""

    def __init__(self, seed: int, planner: Planner) -> None:
        self.leased = 0
        self._random = random.Random(seed)
        self._workers = Workers({}, 30, planner)
        self._known: list[GroupId] = []
        self._held: list[tuple[GroupId, Access]] = []
        self._made = 0

    def _tell(self, event: events.Event) -> None:
        self._workers.tell(event)
        self._workers.planner.check()

    def step(self) -> None:
        steps = [self._register, self._discard, self._end, self._change, *[self._use] * 12]
        self._workers.now += self._random.choice((0.0, 0.1, 1.0))
        self._random.choice(steps)()

    def _register(self) -> None:
        self._made += 1
        order = self._random.choice((UseOrder.LEARNED, UseOrder.ROUTED, UseOrder.PREFETCHED))
        key = f"g{self._random.randrange(12)}"
        if all(group.key != key for group in self._known):
            group = GroupId(key, self._made)
            nbytes = self._random.randint(1, 8)
            self._tell(events.Registered(group, nbytes, True, order))
            self._known.append(group)

    def _idle(self) -> list[GroupId]:
        held = {group for group, _ in self._held}
        return [group for group in self._known if group not in held]

    def _discard(self) -> None:
        if idle := self._idle():
            group = self._random.choice(idle)
            self._known.remove(group)
            self._tell(events.Discarded(group))

    def _end(self) -> None:
        self._tell(events.StreamEnded(self._random.randrange(4)))

    def _change(self) -> None:
        if idle := self._idle():
            group = self._random.choice(idle)
            self._tell(events.HostDemanded(group, HostAccess.UPDATE))
            if self._workers.planner.host_leasable(group, HostAccess.UPDATE):
                self._tell(events.HostLeased(group, HostAccess.UPDATE))
                self._tell(events.HostReleased(group))
            else:
                self._tell(events.HostWithdrawn(group, HostAccess.UPDATE))

    def _use(self) -> None:
        while len(self._held) > self._random.randrange(4):
            self._give_back()
        if not self._known:
            return
        group = self._random.choice(self._known)
        stream = self._random.randrange(4)
        self._tell(events.Demanded(group, stream))
        if self._workers.planner.leasable(group, Access.READ):
            self._tell(events.Leased(group, Access.READ, stream=stream))
            self._held.append((group, Access.READ))
            self.leased += 1
        else:
            self._tell(events.Withdrawn(group))

    def _give_back(self) -> None:
        self._tell(events.Released(*self._held.pop(0)))

    def finish(self) -> None:
        while self._held:
            self._give_back()
        for group in self._known:
            self._tell(events.Discarded(group))
        assert self._workers.planner.idle()
        assert self._workers.planner.groups() == set()


def test_groups_come_and_go_while_streams_continue() -> None:
    """Check that each key has a rank at once, however many there are."""
    told, drawn = Told("abcxyz"), random.Random(4)
    more = [f"more {number}" for number in range(200)]
    there: set[str] = set()
    for turn in range(400):
        place = turn % 2
        told.use(place, ("abc", "xyz")[place][turn // 2 % 3])
        told.now += drawn.choice([0.0, 1.0])
        key = drawn.choice(more)
        if key in there:
            told.schedule.known.forget(key)
            there.remove(key)
        else:
            told.schedule.known.introduce(key)
            there.add(key)
        assert told.schedule.several or turn == 0
        numbers = np.array(
            [told.schedule.known.number(each) for each in sorted(there)], dtype=np.int64
        )
        assert told.schedule.ranks(numbers).tolist() == [np.inf] * len(there)
        assert max(told.ranks("abcxyz")) < np.inf or turn < 8
