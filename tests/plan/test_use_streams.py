"""Several workers share host memory: each one's order is learned by itself, and none starves.

Rooms and groups are counted in groups of equal size where nothing else is said. A loop of 50 groups
with room for n of them, one of which is in use, misses 51 - n of them in each pass at best.
"""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt
import pytest

from tests.plan.scans import cycle
from tests.plan.workers import Worker, Workers
from tierstore.model import events
from tierstore.model.groups import GroupId
from tierstore.model.tiers import Access, HostAccess, Tier, UseOrder
from tierstore.plan.planner import NEXT_USE_OF_ALL, Planner, planner_for
from tierstore.plan.policy import POLICIES, RankingPolicy
from tierstore.plan.use_history import Ranks
from tierstore.plan.use_streams import EarliestNextUse, UseStream, UseStreams
from tierstore.simulation import Clock, planner_of

A, B, C = (cycle(50, 1, prefix) for prefix in "abc")


def sizes(*loops: list[str]) -> dict[str, int]:
    return {key: 1 for loop in loops for key in loop}


def plain(room: int) -> Planner:
    """One order of all uses, and nothing is fetched early."""
    return planner_of({}, {Tier.HOST: room, Tier.DISK: None}, Clock(), prefetch=False)


# What is missed ---------------------------------------------------------------------------------


def fetched_by_four(seed: int, planner: Planner | None) -> float:
    """Groups per pass that four workers fetch, who go through one loop at most 5 groups apart."""
    drawn = random.Random(seed)
    workers = Workers(sizes(A), 20, planner, seed)
    for stream in range(4):
        workers.add(Worker(stream, A, start=5 * drawn.random(), jitter=0.1))
    workers.run(200)
    before = workers.fetched
    workers.run(200 + 8 * 50)
    return (workers.fetched - before) / 8


def test_one_worker_misses_what_does_not_fit() -> None:
    workers = Workers(sizes(A), 20)
    workers.add(Worker(0, A))
    workers.run(50 * 12)
    assert workers.misses(0, 0, 1) == 50
    assert workers.misses(0, 2, 12) == 31


@pytest.mark.parametrize("seed", range(3))
def test_four_in_step_fetch_little_more_than_one_alone(seed: int) -> None:
    assert fetched_by_four(seed, None) <= 1.2 * 31


def test_as_one_order_their_uses_are_noise() -> None:
    """The control of the test above: with the ordinary schedule it would fail."""
    assert sum(fetched_by_four(seed, plain(20)) for seed in range(3)) > 3 * 1.3 * 31


@pytest.mark.parametrize(
    ("loops", "seconds"),
    [((50, 50), (1.0, 2.0)), ((50, 50), (1.0, 10.0)), ((30, 70), (1.0, 1.0)), ((30, 70), (3, 1))],
)
@pytest.mark.parametrize("holds", [1, 3])
@pytest.mark.parametrize("jitter", [0.0, 0.2])
def test_each_of_two_workers_has_half_the_room(
    loops: tuple[int, int], seconds: tuple[float, float], holds: int, jitter: float
) -> None:
    """However fast it is, and however long its loop."""
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
    """What is used last goes first, whoever uses it."""

    def spared(self, held: Ranks) -> npt.NDArray[np.bool_]:
        return np.zeros_like(super().spared(held))


def test_without_shares_the_slower_of_two_workers_would_have_no_room() -> None:
    """The control of the test above."""
    budgets = {Tier.HOST: 40, Tier.DISK: None}
    schedule = NoShares(lambda: workers.now)
    policy = RankingPolicy(EarliestNextUse(schedule, lambda group: 1), budgets)
    workers = Workers(sizes(A, B), 40, Planner(budgets, policy, schedule))
    workers.add(Worker(0, A), Worker(1, B, 2.0, 0.01))
    workers.run(50 * 20)
    assert workers.misses(0, 3, 19) < 15
    assert workers.misses(1, 3, 9) == 50


def test_what_a_small_loop_leaves_is_for_the_others() -> None:
    small = cycle(10, 1, "small")
    workers = Workers(sizes(A, B, small), 60)
    workers.add(Worker(0, A), Worker(1, B, 2.0, 0.1), Worker(2, small, 1.0, 0.2))
    workers.run(50 * 20)
    assert workers.misses(2, 2, 90) == 0
    assert workers.misses(0, 3, 19) <= 27  # room for 25
    assert workers.misses(1, 3, 9) <= 27


@pytest.mark.parametrize("burst", [4, 12])
def test_who_takes_many_at_once_has_a_share_like_others(burst: int) -> None:
    workers = Workers(sizes(A, B), 40)
    for stream, (keys, pace) in enumerate(((A, 1.0), (B, 2.03))):
        workers.add(Worker(stream, keys, pace, 0.01 * stream, holds=8, burst=burst))
    workers.run(50 * 20)
    assert workers.misses(0, 4, 19) <= 1.25 * (50 - 12)
    assert workers.misses(1, 4, 9) <= 1.25 * (50 - 12)


@pytest.mark.parametrize("ends", [True, False])
def test_two_passes_after_a_worker_is_gone_it_is_as_if_it_had_never_been(ends: bool) -> None:
    """Whether somebody says so, or it stops in the middle of its fifth pass and is silent."""
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
        assert max(after) <= 21, "room for 30, of which one is in use"


def test_a_worker_that_joins_takes_its_share_and_no_more() -> None:
    workers = Workers(sizes(A, B, C), 60)
    workers.add(Worker(0, A), Worker(1, B, 1.0, 0.1), Worker(2, C, 1.0, 250.2))
    workers.run(50 * 14)
    for stream in (0, 1):
        before = [workers.missed[stream, turn] for turn in range(2, 5)]
        after = [workers.missed[stream, turn] for turn in range(5, 14)]
        assert max(after) - max(before) <= 10  # the joiner has a third of 60
    assert max(workers.missed[2, turn] for turn in range(1, 9)) <= 32


def test_who_follows_no_order_takes_no_more_than_a_share() -> None:
    drawn = random.Random(3)
    workers = Workers(sizes(A, B, C), 60)
    anyhow = Worker(2, drawn.choices(C, k=700), 1.0, 0.2)
    workers.add(Worker(0, A), Worker(1, B, 1.0, 0.1), anyhow)
    workers.run(50 * 14)
    assert max(workers.missed[stream, turn] for stream in (0, 1) for turn in range(2, 14)) <= 33
    assert workers.missed[2, 0] <= 700 * 0.66, "it has room for 20 of the 50"


def test_shares_are_counted_in_bytes() -> None:
    large = cycle(10, 1, "large")
    workers = Workers(sizes(A) | dict.fromkeys(large, 8), 80)
    workers.add(Worker(0, A), Worker(1, large, 5.0, 0.1))
    workers.run(50 * 12)
    assert workers.misses(0, 3, 11) <= 50 - 30  # half of the room is for 40
    assert workers.misses(1, 3, 11) <= 10 - 4 + 1  # ... and for 5 of the large ones


# What is learned of a stream --------------------------------------------------------------------


def paced(times: list[float]) -> UseStream:
    """A stream that used one of three groups at each of these times."""
    stream = UseStream(64, times[0])
    for count, now in enumerate(times):
        stream.use(f"g{count % 3}", count % 3, now)
    return stream


def test_the_pace_of_a_stream_is_a_mean() -> None:
    assert paced([5.0]).seconds_per_use == 0
    assert paced([5.0, 7.0]).seconds_per_use == 2
    assert paced([5.0, 7.0, 13.0]).seconds_per_use == 4
    assert paced([3.0 * n for n in range(17)]).seconds_per_use == 3
    # A quarter of what the next sixteen take is learned when they are over.
    faster = [48.0 + n for n in range(1, 17)]
    slow = [3.0 * n for n in range(17)]
    assert paced(slow + faster[:-1]).seconds_per_use == 3
    assert paced(slow + faster).seconds_per_use == 2.5


def test_a_pause_counts_four_times_what_was_expected_at_most() -> None:
    steady = [float(n) for n in range(32)]
    assert paced([*steady, 1e6]).seconds_per_use == 1 + 0.25 * 3


def test_uses_at_once_are_timed_with_those_after_them() -> None:
    bursts = [8.0 * (n // 8) for n in range(65)]
    assert paced(bursts).seconds_per_use == pytest.approx(1, abs=0.05)


def test_a_stream_that_was_never_timed_has_a_pace_when_it_was() -> None:
    at_once = paced([0.0] * 17)
    assert at_once.seconds_per_use == 0
    for count in range(16):
        at_once.use(f"g{(count + 17) % 3}", (count + 17) % 3, count + 1.0)
    assert at_once.seconds_per_use == 0.25


def test_a_use_of_the_same_group_again_is_no_other_use() -> None:
    stream = paced([0.0, 1.0, 2.0, 3.0])
    for now in (3.5, 3.75):
        stream.use("g0", 0, now)
    assert (stream.seconds_per_use, stream.latest) == (1, 3.75)
    assert stream.times(3.75).tolist()[:3] == [6.75 + 0, 4.75, 5.75]


def test_what_is_late_recedes_by_as_much() -> None:
    stream = paced([float(n) for n in range(7)])  # the latest use was of g0
    for now, late in ((6.0, 0), (7.0, 0), (8.0, 1), (12.0, 5)):
        assert stream.late(now) == late
        assert stream.times(now).tolist()[:3] == [9 + 2 * late, 7 + 2 * late, 8 + 2 * late]
        assert np.isinf(stream.times(now)[3:]).all()
    assert not stream.stopped(10.0)
    assert stream.stopped(10.5)  # late by more than a pass of three uses
    assert not paced([0.0]).stopped(100.0)


# The ranking ------------------------------------------------------------------------------------


class Told:
    """A schedule of these keys on a clock."""

    def __init__(self, keys: str) -> None:
        self.now = 0.0
        self.schedule = UseStreams(lambda: self.now)
        for key in keys:
            self.schedule.introduce(key)

    def loop(self, stream: int, keys: str, seconds: float, passes: int = 3) -> None:
        for key in keys * passes:
            self.schedule.advance_past(key, stream)
            self.now += seconds

    def ranks(self, keys: str) -> list[float]:
        numbers = np.array([self.schedule.number(key) for key in keys])
        ranks: list[float] = self.schedule.ranks(numbers).tolist()
        return ranks


def test_a_group_is_ranked_by_the_earliest_of_its_next_uses() -> None:
    told = Told("abcdx")
    told.loop(0, "abc", 2.0)  # until 18; "a" comes at 18
    assert told.ranks("abcdx") == [18, 20, 22, np.inf, np.inf]
    told.now = 17.0
    told.loop(1, "cd", 0.25)  # until 18.5: the other is late by 0.5
    assert told.ranks("abcdx") == [19, 21, 18.5, 18.75, np.inf]
    told.schedule.end(1)
    assert told.ranks("abcdx") == [19, 21, 23, np.inf, np.inf]
    told.schedule.end(7)  # it never began
    assert told.ranks("abcdx") == [19, 21, 23, np.inf, np.inf]


def test_ranks_are_as_of_the_time_at_which_they_are_asked_for() -> None:
    told = Told("abc")
    told.loop(0, "abc", 2.0)
    told.now = 21.0
    assert told.ranks("abc") == [24, 26, 28]
    assert told.schedule.farther(np.array([24.0]), 4.0).tolist() == [33]


def test_in_a_first_pass_what_was_used_longest_ago_comes_again_first_or_later() -> None:
    """After as many uses as there were, or up to twice as many; never is what nobody used."""
    told = Told("abcdx")
    told.loop(0, "abcd", 1.0, passes=1)
    ranks = told.ranks("abcdx")
    assert all(told.now + 3 <= rank <= told.now + 3 * 4 for rank in ranks[:4])
    assert ranks[4] == np.inf


def test_a_group_that_is_gone_is_not_expected_and_may_come_again() -> None:
    told = Told("abc")
    told.loop(0, "abc", 2.0)
    told.loop(1, "ab", 2.0)
    told.schedule.forget("c")
    told.schedule.forget("never there")
    told.schedule.advance_past("c", 0)  # of an older version: nothing is learned
    told.schedule.introduce("d")
    told.now += 1
    told.loop(0, "d", 2.0, passes=1)
    assert np.isfinite(told.ranks("d")[0])
    told.schedule.introduce("c")
    assert told.ranks("c") == [np.inf]
    told.loop(0, "abc", 2.0)
    assert told.now < told.ranks("a")[0] < told.ranks("b")[0] < told.ranks("c")[0] < np.inf


def test_groups_that_data_choose_are_ranked_by_how_often_they_are_used() -> None:
    told = Told("abcd")
    for key in "often", "seldom":
        told.schedule.introduce(key, UseOrder.ROUTED)
    for turn in range(12):
        told.loop(0, "abcd", 1.0, passes=1)
        told.schedule.come("often", 0)
        if turn % 4 == 0:
            told.schedule.come("seldom", 0)
    told.schedule.come("told by the caller", 0)
    often, seldom = (
        told.schedule.ranks(np.array([told.schedule.number(k)]))[0] for k in ("often", "seldom")
    )
    assert told.now < often < seldom < np.inf


def test_it_foretells_nothing() -> None:
    told = Told("abc")
    told.loop(0, "abc", 1.0)
    schedule = told.schedule
    schedule.expect(["b"])
    schedule.expect_not("b")
    assert schedule.ahead(9).tolist() == []
    assert (schedule.foretold(), schedule.round(0), schedule.repeats(1)) == (0, 0, False)
    assert not schedule.learning


def test_what_is_new_has_a_rank_at_once() -> None:
    told = Told("ab")
    told.loop(0, "ab", 1.0)
    assert told.ranks("ab") == [6, 7]
    assert told.ranks("bc") == [7, np.inf]


def test_before_anybody_used_anything_nobody_is_spared() -> None:
    told = Told("ab")
    assert told.ranks("ab") == [np.inf, np.inf]
    assert not told.schedule.spared(np.ones(2)).any()


def test_who_holds_most_gives_up_first_and_what_others_use_too_is_spared() -> None:
    told = Told("abcdef")
    for _ in range(12):
        for stream, key in ((0, "abcde"[int(told.now) % 5]), (1, "ef"[int(told.now) % 2])):
            told.schedule.advance_past(key, stream)
        told.now += 1
    told.now -= 1
    spared = told.schedule.spared(np.ones(6)).tolist()
    assert spared[:6] == [False] * 4 + [True] * 2
    assert not any(told.schedule.spared(np.array([1.0, 0, 0, 0, 0, 1]))[:6]), "they hold the same"
    told.now += 100  # both stopped
    assert not any(told.schedule.spared(np.ones(6)))


def test_an_order_for_other_tiers_has_nothing_that_is_out_of_reach() -> None:
    told = Told("ab")
    order = EarliestNextUse(told.schedule, lambda group: 1)
    assert order.out_of_reach(GroupId("a", 0)) == -np.inf


# The planner ------------------------------------------------------------------------------------


def test_nobody_is_offered_this_policy() -> None:
    assert NEXT_USE_OF_ALL not in POLICIES


def test_it_plans_for_a_device_too() -> None:
    planner = planner_for({Tier.DEVICE: 2, Tier.HOST: 3, Tier.DISK: None}, NEXT_USE_OF_ALL)
    workers = Workers({}, 0, planner)
    for key in "abcde":
        workers.tell(events.Registered(GroupId(key, 0), 1, backing=True))
    workers.add(Worker(0, "abc"), Worker(1, "cde", 1.0, 0.5))
    workers.run(30)
    assert workers.missed[0, 8] <= 3


@pytest.mark.parametrize("policy", POLICIES)
def test_with_one_order_for_all_the_stream_is_ignored(policy: str) -> None:
    instructed = []
    for streams in (1, 3):
        workers = Workers(sizes(A), 20, planner_for({Tier.HOST: 20, Tier.DISK: None}, policy))
        drawn = random.Random(5)
        for turn in range(300):
            group = GroupId(A[drawn.randrange(5) + turn % 40], 0)
            workers.now += 1
            workers.tell(events.Demanded(group))
            workers.tell(events.Leased(group, Access.READ, stream=turn % streams))
            workers.tell(events.Released(group, Access.READ))
        workers.tell(events.StreamEnded(streams - 1))
        instructed.append(workers.instructions)
    assert instructed[0] == instructed[1] != []


@pytest.mark.parametrize("seed", range(20))
def test_every_promise_holds_in_random_histories_of_several_streams(seed: int) -> None:
    history = History(seed)
    for _ in range(400):
        history.step()
    history.finish()
    assert history.leased > 50


class History:
    """Registers, puts, uses, changes and discards groups at random, in streams that come and go."""

    def __init__(self, seed: int) -> None:
        self.leased = 0
        self._random = random.Random(seed)
        self._workers = Workers({}, 30)
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
        order = self._random.choice((UseOrder.LEARNED, UseOrder.ROUTED, UseOrder.ANNOUNCED))
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
        self._tell(events.Demanded(group))
        if self._workers.planner.leasable(group, Access.READ):
            stream = self._random.randrange(4)
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
