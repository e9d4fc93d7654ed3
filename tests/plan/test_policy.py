"""Policies: their rankings, and what they miss against an exact optimum (Belady, 1966)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import pytest

from tests.plan.scans import cycle, forward_backward, prompts, two_experts
from tierstore.model.groups import GroupId
from tierstore.model.tiers import TIERS, Tier
from tierstore.plan.policy import (
    DISK_COSTS,
    HARMLESS,
    POLICIES,
    FarthestNextUse,
    LeastRecentlyUsed,
    RankingPolicy,
    policy_named,
)
from tierstore.plan.schedule import LearnedOrder


def misses(trace: Sequence[str], room: int, policy: str) -> int:
    """How often a cache of `room` equal groups misses. No prefetch."""
    schedule = LearnedOrder()
    ranking = policy_named(policy, schedule)
    here: set[GroupId] = set()
    missed = 0
    for key in trace:
        group = GroupId(key, 1)
        if group not in here:
            missed += 1
            if len(here) == room:
                victim = next(ranking.victims(Tier.HOST, None))
                here.remove(victim)
                ranking.dropped(victim, Tier.HOST)
            here.add(group)
            ranking.admitted(group, Tier.HOST)
        ranking.used(group)
        schedule.advance_past(key)
    return missed


def fewest_misses(trace: Sequence[str], room: int) -> int:
    """The optimum, knowing the future: evict what is used farthest ahead."""
    here: set[str] = set()
    missed = 0
    for now, key in enumerate(trace):
        if key in here:
            continue
        missed += 1
        if len(here) == room:
            ahead = {k: next_use(trace, k, now) for k in here}
            here.remove(max(ahead, key=ahead.__getitem__))
        here.add(key)
    return missed


def next_use(trace: Sequence[str], key: str, now: int) -> float:
    try:
        return trace.index(key, now + 1)
    except ValueError:
        return math.inf


def test_the_optimum_is_one() -> None:
    # a b c with room for 2: a, b, c miss (c replaces b), a hits, b misses (replaces a), c hits.
    assert fewest_misses(["a", "b", "c", "a", "b", "c"], 2) == 4


TRACES = {
    "cycle, half": (cycle(57, 14), 28),
    "cycle, nearly all": (cycle(57, 20), 51),
    "prompts": (prompts(6, encoder=12, blocks=40, steps=6), 26),
    "two experts": (two_experts(8, blocks=20, steps=8), 12),
    "forward and backward": (forward_backward(40, 12), 28),
}


@pytest.mark.parametrize("name", TRACES)
def test_next_use_misses_at_most_a_tenth_more_than_the_optimum(name: str) -> None:
    trace, room = TRACES[name]
    assert misses(trace, room, "next-use") <= 1.10 * fewest_misses(trace, room)


def test_once_learned_two_experts_that_fit_one_at_a_time_are_read_as_the_optimum_reads_them() -> (
    None
):
    early, late = (two_experts(runs, blocks=20, steps=8) for runs in (9, 10))
    assert misses(late, 20, "next-use") - misses(early, 20, "next-use") == 40
    assert fewest_misses(late, 20) - fewest_misses(early, 20) == 40


def test_lru_misses_all_of_a_cycle_that_does_not_fit() -> None:
    """The control: on these traces it takes more than any policy to come near the optimum."""
    trace, room = TRACES["cycle, half"]
    assert misses(trace, room, "lru") == len(trace)
    assert misses(trace, room, "lru") > 1.5 * fewest_misses(trace, room)


def test_lru_ranks_by_the_last_use() -> None:
    lru = RankingPolicy(LeastRecentlyUsed())
    a, b, c, d = (GroupId(key, 1) for key in "abcd")
    for group in (a, b, c, d):
        lru.admitted(group, Tier.HOST)
    lru.used(b)
    lru.used(a)
    lru.dropped(c, Tier.HOST)
    assert list(lru.victims(Tier.HOST, None)) == [d, b, a]
    assert list(lru.victims(Tier.HOST, b)) == [d, a]
    assert list(lru.victims(Tier.DEVICE, None)) == []


def test_a_key_keeps_its_rank_while_any_tier_holds_it() -> None:
    lru = RankingPolicy(LeastRecentlyUsed())
    a, b = GroupId("a", 1), GroupId("b", 1)
    for group in (a, b):
        lru.admitted(group, Tier.DISK)
    lru.admitted(a, Tier.HOST)
    lru.dropped(a, Tier.HOST)
    assert list(lru.victims(Tier.DISK, None)) == [b, a]


def learned_cycle(
    present: str, schedule: LearnedOrder | None = None, tiers: Iterable[Tier] = TIERS.values()
) -> RankingPolicy:
    """After two passes over a, b, c, d, e: a comes next. `present` are on the host."""
    schedule = LearnedOrder() if schedule is None else schedule
    policy = RankingPolicy(FarthestNextUse(schedule), tiers)
    for key in present:
        policy.admitted(GroupId(key, 1), Tier.HOST)
    for key in "abcde" * 2:
        schedule.advance_past(key)
    return policy


def names(groups: Iterable[GroupId]) -> list[str]:
    return [group.key for group in groups]


def test_next_use_ranks_versions_by_the_schedule_of_their_names() -> None:
    policy = learned_cycle("bade")
    assert names(policy.victims(Tier.HOST, None)) == ["e", "d", "b", "a"]


def test_a_prefetch_gets_only_what_is_needed_much_later() -> None:
    policy = learned_cycle("bcde")
    assert HARMLESS == 3
    assert names(policy.victims(Tier.HOST, GroupId("a", 1))) == ["e", "d"]
    assert names(policy.victims(Tier.HOST, GroupId("b", 1))) == []
    assert names(policy.victims(Tier.HOST, None)) == ["e", "d", "c", "b"]


def twice_there(policy: RankingPolicy, on_host: str, saved: Tier = Tier.DISK) -> RankingPolicy:
    """All but c are on the device and on disk; `on_host` are in host memory, too."""
    for key in "abde":
        policy.admitted(GroupId(key, 1), Tier.DEVICE)
        policy.admitted(GroupId(key, 1), saved)
    for key in on_host:
        policy.admitted(GroupId(key, 1), Tier.HOST)
    return policy


def test_of_host_copies_those_go_first_whose_group_stays_on_the_device() -> None:
    """e, d and b are the next to leave the device: they keep their copies for longer than a."""
    policy = twice_there(learned_cycle(""), "abcde")
    assert names(policy.victims(Tier.HOST, None)) == ["a", "e", "d", "c", "b"]


def test_a_host_copy_that_no_file_backs_is_not_given_up_before_others() -> None:
    policy = twice_there(learned_cycle(""), "abcde")
    policy.dropped(GroupId("a", 1), Tier.DISK)
    assert names(policy.victims(Tier.HOST, None)) == ["e", "d", "c", "b", "a"]


def test_a_tier_below_the_disk_is_as_good_a_reason_to_give_up_a_host_copy() -> None:
    remote = Tier(3, "REMOTE", persistent=True)
    tiers = (*TIERS.values(), remote)
    policy = twice_there(learned_cycle("", tiers=tiers), "abcde", saved=remote)
    assert names(policy.victims(Tier.HOST, None)) == ["a", "e", "d", "c", "b"]
    policy.dropped(GroupId("a", 1), remote)
    assert names(policy.victims(Tier.HOST, None)) == ["e", "d", "c", "b", "a"]


def test_the_device_rather_gives_up_what_the_host_has_too() -> None:
    """b comes in 2 uses and e in 5, but b is only a link away, where e must be read from disk."""
    policy = twice_there(learned_cycle(""), "b")
    assert names(policy.victims(Tier.DEVICE, None)) == ["b", "e", "d", "a"]


def test_three_copies_on_the_device_are_all_about_to_leave_it() -> None:
    policy = twice_there(learned_cycle(""), "abde")
    policy.dropped(GroupId("b", 1), Tier.DEVICE)
    assert names(policy.victims(Tier.HOST, None)) == ["e", "d", "b", "a"]


def test_a_link_is_four_times_as_fast_as_the_disk() -> None:
    """a comes in 1 use, and the host has it too: as if in 4. That is before e, and after c."""
    policy = twice_there(learned_cycle(""), "a")
    policy.dropped(GroupId("d", 1), Tier.DEVICE)
    policy.admitted(GroupId("c", 1), Tier.DEVICE)
    assert DISK_COSTS == 4
    assert names(policy.victims(Tier.DEVICE, None)) == ["e", "a", "c", "b"]


def test_what_the_caller_expects_goes_last_the_soonest_last() -> None:
    schedule = LearnedOrder()
    policy = learned_cycle("abcde", schedule)
    assert names(policy.victims(Tier.HOST, None)) == ["e", "d", "c", "b", "a"]
    schedule.known.expect(["d", "b"])
    assert names(policy.victims(Tier.HOST, None)) == ["e", "c", "a", "b", "d"]


def test_what_the_schedule_does_not_expect_goes_first_the_oldest_first() -> None:
    policy = learned_cycle("xbya")
    assert names(policy.victims(Tier.HOST, None)) == ["x", "y", "b", "a"]


def test_before_anything_is_known_a_prefetch_may_replace_the_least_recently_used() -> None:
    schedule = LearnedOrder()
    policy = RankingPolicy(FarthestNextUse(schedule))
    for key in "abc":
        policy.admitted(GroupId(key, 1), Tier.HOST)
        schedule.advance_past(key)
    assert names(policy.victims(Tier.HOST, GroupId("d", 1))) == ["a", "b", "c"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_has_a_name(policy: str) -> None:
    assert misses(["a", "b", "a"], 2, policy) == 2


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no policy 'mru': choose one of next-use, lru"):
        policy_named("mru", LearnedOrder())


def test_what_the_policy_was_never_told_of_changes_nothing() -> None:
    schedule = LearnedOrder()
    for name in ("next-use", "lru"):
        policy = policy_named(name, schedule)
        policy.admitted(GroupId("a", 1), Tier.HOST)
        policy.used(GroupId("never seen", 1))
        policy.dropped(GroupId("never seen", 1), Tier.HOST)
        assert names(policy.victims(Tier.HOST, None)) == ["a"]


def test_keys_that_come_and_go_leave_no_trace_in_the_order_of_victims() -> None:
    schedule = LearnedOrder()
    for name in ("next-use", "lru"):
        policy = policy_named(name, schedule)
        for key in "abcdef":
            policy.admitted(GroupId(key, 1), Tier.HOST)
        for number in range(1000):
            policy.admitted(GroupId("passing", number), Tier.HOST)
            policy.dropped(GroupId("passing", number), Tier.HOST)
        assert names(policy.victims(Tier.HOST, None)) == list("abcdef")
        policy.used(GroupId("b", 1))
        assert names(policy.victims(Tier.HOST, None)) == list("acdefb")
