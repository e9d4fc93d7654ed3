"""Policies: their rankings, and their misses against an exact optimum (Belady, 1966)."""

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
    """Return the number of misses of a cache of `room` equal groups, without prefetch."""
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
    """Return the misses of the optimum, which knows the future and evicts the farthest use."""
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


def test_optimum_is_belady() -> None:
    # a b c with space for 2: a, b, c miss (c replaces b), a hits, b misses (replaces a), c hits.
    assert fewest_misses(["a", "b", "c", "a", "b", "c"], 2) == 4


TRACES = {
    "cycle, half": (cycle(57, 14), 28),
    "cycle, nearly all": (cycle(57, 20), 51),
    "prompts": (prompts(6, encoder=12, blocks=40, steps=6), 26),
    "two experts": (two_experts(8, blocks=20, steps=8), 12),
    "forward and backward": (forward_backward(40, 12), 28),
}


@pytest.mark.parametrize("name", TRACES)
def test_next_use_misses_at_most_a_tenth_above_optimum(name: str) -> None:
    trace, room = TRACES[name]
    assert misses(trace, room, "next-use") <= 1.10 * fewest_misses(trace, room)


def test_next_use_two_alternating_experts_reads_the_optimum() -> None:
    early, late = (two_experts(runs, blocks=20, steps=8) for runs in (9, 10))
    assert misses(late, 20, "next-use") - misses(early, 20, "next-use") == 40
    assert fewest_misses(late, 20) - fewest_misses(early, 20) == 40


def test_lru_oversized_cycle_misses_everything() -> None:
    """Check the control: on these traces only some policies come near the optimum."""
    trace, room = TRACES["cycle, half"]
    assert misses(trace, room, "lru") == len(trace)
    assert misses(trace, room, "lru") > 1.5 * fewest_misses(trace, room)


def test_lru_ranks_by_last_use() -> None:
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


def test_key_keeps_its_rank_while_any_tier_holds_it() -> None:
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
    """Return a policy after two passes over a, b, c, d, e: a is next. `present` are on the host."""
    schedule = LearnedOrder() if schedule is None else schedule
    policy = RankingPolicy(FarthestNextUse(schedule), tiers)
    for key in present:
        policy.admitted(GroupId(key, 1), Tier.HOST)
    for key in "abcde" * 2:
        schedule.advance_past(key)
    return policy


def names(groups: Iterable[GroupId]) -> list[str]:
    return [group.key for group in groups]


def test_next_use_versions_rank_by_their_names_schedule() -> None:
    policy = learned_cycle("bade")
    assert names(policy.victims(Tier.HOST, None)) == ["e", "d", "b", "a"]


def test_prefetch_evicts_only_keys_needed_much_later() -> None:
    policy = learned_cycle("bcde")
    assert HARMLESS == 3
    assert names(policy.victims(Tier.HOST, GroupId("a", 1))) == ["e", "d"]
    assert names(policy.victims(Tier.HOST, GroupId("b", 1))) == []
    assert names(policy.victims(Tier.HOST, None)) == ["e", "d", "c", "b"]


def twice_there(policy: RankingPolicy, on_host: str, saved: Tier = Tier.DISK) -> RankingPolicy:
    """Return the policy with all but c on the device and on disk, and `on_host` in host memory."""
    for key in "abde":
        policy.admitted(GroupId(key, 1), Tier.DEVICE)
        policy.admitted(GroupId(key, 1), saved)
    for key in on_host:
        policy.admitted(GroupId(key, 1), Tier.HOST)
    return policy


def test_host_copy_of_device_resident_group_goes_first() -> None:
    """Keep host copies of e, d and b, which leave the device next, for longer than that of a."""
    policy = twice_there(learned_cycle(""), "abcde")
    assert names(policy.victims(Tier.HOST, None)) == ["a", "e", "d", "c", "b"]


def test_host_copy_without_a_file_goes_last() -> None:
    policy = twice_there(learned_cycle(""), "abcde")
    policy.dropped(GroupId("a", 1), Tier.DISK)
    assert names(policy.victims(Tier.HOST, None)) == ["e", "d", "c", "b", "a"]


def test_host_copy_backed_by_a_lower_tier_goes_early() -> None:
    remote = Tier(3, "REMOTE", persistent=True)
    tiers = (*TIERS.values(), remote)
    policy = twice_there(learned_cycle("", tiers=tiers), "abcde", saved=remote)
    assert names(policy.victims(Tier.HOST, None)) == ["a", "e", "d", "c", "b"]
    policy.dropped(GroupId("a", 1), remote)
    assert names(policy.victims(Tier.HOST, None)) == ["e", "d", "c", "b", "a"]


def test_device_prefers_to_evict_groups_in_host_memory() -> None:
    """Evict b, whose next use comes in 2 uses, but which is a link away; e is 5 away, on disk."""
    policy = twice_there(learned_cycle(""), "b")
    assert names(policy.victims(Tier.DEVICE, None)) == ["b", "e", "d", "a"]


def test_three_device_copies_are_about_to_leave() -> None:
    policy = twice_there(learned_cycle(""), "abde")
    policy.dropped(GroupId("b", 1), Tier.DEVICE)
    assert names(policy.victims(Tier.HOST, None)) == ["e", "d", "b", "a"]


def test_link_speed_is_four_times_the_disks() -> None:
    """Use a in 1 use; as the host has it too, it counts as 4: before e, and after c."""
    policy = twice_there(learned_cycle(""), "a")
    policy.dropped(GroupId("d", 1), Tier.DEVICE)
    policy.admitted(GroupId("c", 1), Tier.DEVICE)
    assert DISK_COSTS == 4
    assert names(policy.victims(Tier.DEVICE, None)) == ["e", "a", "c", "b"]


def test_expected_keys_go_last_soonest_last() -> None:
    schedule = LearnedOrder()
    policy = learned_cycle("abcde", schedule)
    assert names(policy.victims(Tier.HOST, None)) == ["e", "d", "c", "b", "a"]
    schedule.known.prefetch(["d", "b"])
    assert names(policy.victims(Tier.HOST, None)) == ["e", "c", "a", "b", "d"]


def test_unexpected_keys_go_first_oldest_first() -> None:
    policy = learned_cycle("xbya")
    assert names(policy.victims(Tier.HOST, None)) == ["x", "y", "b", "a"]


def test_prefetch_before_learning_replaces_least_recently_used() -> None:
    schedule = LearnedOrder()
    policy = RankingPolicy(FarthestNextUse(schedule))
    for key in "abc":
        policy.admitted(GroupId(key, 1), Tier.HOST)
        schedule.advance_past(key)
    assert names(policy.victims(Tier.HOST, GroupId("d", 1))) == ["a", "b", "c"]


@pytest.mark.parametrize("policy", POLICIES)
def test_policy_has_a_name(policy: str) -> None:
    assert misses(["a", "b", "a"], 2, policy) == 2


def test_policy_unknown_name_raises_with_known_names() -> None:
    with pytest.raises(ValueError, match="unknown policy 'mru': choose one of next-use, lru"):
        policy_named("mru", LearnedOrder())


def test_policy_unseen_keys_change_nothing() -> None:
    schedule = LearnedOrder()
    for name in ("next-use", "lru"):
        policy = policy_named(name, schedule)
        policy.admitted(GroupId("a", 1), Tier.HOST)
        policy.used(GroupId("never seen", 1))
        policy.dropped(GroupId("never seen", 1), Tier.HOST)
        assert names(policy.victims(Tier.HOST, None)) == ["a"]


def test_victim_order_forgets_keys_that_are_gone() -> None:
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
