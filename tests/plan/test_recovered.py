"""A planner recovered from an inventory believes what its predecessor did, except for requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.histories.machine import MEMORY, REMOTE, History, World
from tests.plan.driver import Driver, Name, driver_of, group_of
from tierstore.model.events import Recovered, RecoveredGroup
from tierstore.model.groups import GroupId
from tierstore.model.moves import Copy, Drop, Forget, Reserve
from tierstore.model.tiers import TIERS, Access, HostAccess, Tier, UseOrder
from tierstore.plan.eviction import Eviction
from tierstore.plan.movement import Movement
from tierstore.plan.policy import Policy, policy_named
from tierstore.plan.records import State
from tierstore.plan.registration_events import RegistrationEvents
from tierstore.plan.schedule import LearnedOrder

# --- in random histories --------------------------------------------------------------------------


FOUR = (*TIERS.values(), REMOTE)
FULL = (39, 57)
"""Seeds of `tests/histories/test_four_tiers.py` that fill a disk between two tiers."""


class Policies:
    """Makes policies of a name, and has the latest as `latest`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, schedule: LearnedOrder) -> Policy:
        self.latest = policy_named(self.name, schedule, FOUR)
        return self.latest


def recovered(world: World, policy: str) -> tuple[Driver, Policy]:
    """Return a new planner that knows the inventory and has pursued no request yet."""
    schedule = LearnedOrder(MEMORY)
    ranking = policy_named(policy, schedule, FOUR)
    fresh = driver_of(world.books.budgets, ranking, schedule)
    table, requests, prefetcher = fresh.table, fresh.requests, fresh.prefetcher
    eviction = Eviction(table, requests, ranking, prefetcher)
    movement = Movement(table, requests, eviction, prefetcher)
    known = RegistrationEvents(table, requests, movement, schedule, prefetcher)
    found = tuple(world.found(key) for key in world.books.entries)
    assert known.recovered(Recovered(found)), "there may be requests to pursue"
    return fresh, ranking


def beliefs(planner: Driver, policy: Policy) -> dict[str, Any]:
    """Return the planner's state, without requests or reservations that no copy moves to."""
    table, groups = planner.table, planner.table.groups
    there = {
        key: {t: c for t, c in group.copies.items() if c.state is not State.RESERVED}
        for key, group in groups.items()
    }
    aside = [(g, t) for key, g in groups.items() for t in g.copies if t not in there[key]]
    room = dict(planner.used)
    for group, tier in aside:
        room[tier] -= group.cost(tier)
    numbered = {number: group.id for number, group in table.numbered.items()}
    return {
        "copies": {k: {t: (c.state, c.readers) for t, c in v.items()} for k, v in there.items()},
        "room": room,
        "lent": {k: (g.leases, g.exclusive, g.host_lease) for k, g in groups.items()},
        "what they are": {
            k: (g.nbytes, g.backing, g.use_order, g.sticky) for k, g in groups.items()
        },
        "gone": {k for k, g in groups.items() if g.forgotten},
        "being put": [group.id for group in planner.requests.claims],
        "newest": {key: group.id for key, group in table.newest.items()},
        "numbered": set(numbered.values()),
        "numbers": {key for number, key in numbered.items() if groups[key].number == number},
        "moving": table.in_flight,
        "to come back": table.leased,
        "hops": {way: (hop.copies, hop.nbytes) for way, hop in planner.prefetcher.hops.items()},
        "ranked": {tier: set(policy.victims(tier, None)) for tier in planner.tiers},
    }


NAMES = ("numbered", "numbers", "newest")


def has_lost_a_name(planner: Driver) -> bool:
    """Return whether a newer version took a present group's name, and is gone.

    The old planner no longer finds the group by its name; the new one does.
    """
    groups = [g for g in planner.table.groups.values() if not g.forgotten]
    return any(group.id.key not in planner.table.newest for group in groups)


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("first", range(0, 60, 10))
def test_recovered_planner_equals_its_predecessor(first: int, remote: bool) -> None:
    seen: Counter[str] = Counter()
    for seed in set(range(first, first + 10)).difference(FULL if remote else ()):
        policies = Policies(["next-use", "lru"][seed % 2])
        history = History(seed, policies, remote=remote)
        world = history.world
        for _ in range(4):
            history.play(12)
            fresh, policy = recovered(world, policies.name)
            assert fresh.table.instructions == [], "recovery must instruct no move"
            fresh.check()
            old = Driver(world.planner)
            expected, believed = beliefs(old, policies.latest), beliefs(fresh, policy)
            for what in NAMES if has_lost_a_name(old) else ():
                del expected[what], believed[what]
            assert believed == expected
            for what in ("being put", "moving", "to come back", "newest"):
                seen[what] += bool(expected.get(what))
    assert min(seen.values()) > 1, f"reached too rarely: {seen}"


# --- step by step ---------------------------------------------------------------------------------


def found(key: Name, *tiers: Tier, nbytes: int = 5, **facts: Any) -> RecoveredGroup:
    return RecoveredGroup(group_of(key), nbytes, tiers, **facts)


def taken(
    *stock: RecoveredGroup,
    host: int | None = 20,
    disk: int | None = None,
    policy: str = "next-use",
    clock: Callable[[], float] = lambda: 0.0,
) -> Driver:
    schedule = LearnedOrder()
    budgets = {Tier.HOST: host, Tier.DISK: disk}
    planner = driver_of(budgets, policy_named(policy, schedule), schedule, clock)
    planner.recover(stock)
    planner.check()
    return planner


def test_recovered_without_groups_has_nothing_to_do() -> None:
    planner = taken()
    assert planner.instructions() == []
    assert planner.idle() and planner.all_there()
    assert planner.used == planner.peak == {Tier.HOST: 0, Tier.DISK: 0}


def test_recovered_space_counts_as_taken() -> None:
    stock = [
        found("a", Tier.HOST, Tier.DISK, nbytes=3),
        found("b", Tier.DISK, nbytes=4, backing=Tier.DISK),
        found("c", Tier.HOST, Tier.DISK, nbytes=5, moves=((Tier.DISK, Tier.HOST),)),
    ]
    planner = taken(*stock)
    assert planner.used == planner.peak == {Tier.HOST: 8, Tier.DISK: 8}
    assert [planner.backed(key) for key in "abc"] == [False, True, False]
    assert planner.residence("a") == (Tier.HOST, Tier.DISK)
    assert planner.residence("c") == (Tier.DISK,)
    assert not planner.idle()


def test_recovered_copy_is_measured_from_the_inventory() -> None:
    now = [100.0]
    stock = found("a", Tier.HOST, Tier.DISK, nbytes=6, moves=((Tier.DISK, Tier.HOST),))
    planner = taken(stock, clock=lambda: now[0])
    now[0] = 102.0
    planner.arrive("a", Tier.DISK, Tier.HOST)
    assert planner.bandwidth(Tier.DISK, Tier.HOST) == 3.0
    assert planner.idle() and planner.all_there()
    planner.check()


def test_recovered_all_resident_counts_arrivals() -> None:
    both = Tier.HOST, Tier.DISK
    coming = ((Tier.DISK, Tier.HOST),)
    assert taken(found("a", *both), found("b", *both, moves=coming)).all_there()
    assert not taken(found("a", *both), found("b", Tier.DISK)).all_there()
    assert not taken(found("a", Tier.DISK), found("b", *both)).all_there()
    old = found("a", Tier.DISK, visible=False)
    assert taken(old, found("b", *both)).all_there(), "an old version does not count as missing"


def test_recovered_put_request_gets_its_space() -> None:
    planner = taken(found("a", claimed=True, visible=False))
    assert planner.instructions() == [Reserve("a", 5, Tier.HOST)]
    assert planner.granted("a")
    planner.fill("a")
    assert planner.residence("a") == (Tier.HOST,) and planner.idle()
    planner.check()


def test_recovered_put_being_filled_has_its_space() -> None:
    planner = taken(found("a", Tier.HOST, claimed=True, visible=False))
    assert planner.instructions() == []
    assert planner.granted("a") and planner.residence("a") == () and not planner.idle()
    planner.withdraw("a")
    assert planner.idle() and "a" not in planner
    assert planner.instructions() == [Drop("a", 5, Tier.HOST), Forget("a")]


def test_recovered_readable_group_was_put() -> None:
    """Interrupt the step that made it readable before it took the claim off the list."""
    planner = taken(found("a", Tier.HOST, claimed=True))
    assert planner.residence("a") == (Tier.HOST,) and planner.idle()
    planner.demand("a")
    assert planner.lease("a", Access.READ)
    planner.check()


def test_recovered_unreadable_group_goes_after_its_last_use() -> None:
    old, new = GroupId("a", 1), GroupId("a", 2)
    both, read = (Tier.HOST, Tier.DISK), (Access.READ, False)
    planner = taken(found(old, *both, leases=(read, read), visible=False), found(new, Tier.DISK))
    assert planner.instructions() == [Drop(old, 5, Tier.DISK)], "only the unread copy is dropped"
    assert old not in planner and new in planner
    planner.release(old, Access.READ)
    assert planner.instructions() == []
    planner.release(old, Access.READ)
    assert planner.instructions() == [Drop(old, 5, Tier.HOST), Forget(old)]
    planner.check()


def test_recovered_unreadable_unused_group_goes_at_once() -> None:
    planner = taken(found("a", Tier.HOST, Tier.DISK, visible=False), found("b", Tier.DISK))
    drops = [Drop("a", 5, Tier.HOST), Drop("a", 5, Tier.DISK), Forget("a")]
    assert planner.instructions() == drops
    assert planner.used == {Tier.HOST: 0, Tier.DISK: 5}


def test_recovered_newer_version_is_found_by_name() -> None:
    old, new = GroupId("a", 1), GroupId("a", 2)
    planner = taken(found(old, Tier.DISK), found(new, Tier.HOST, claimed=True, visible=False))
    planner.fill(new)
    planner.discard(old)
    assert planner.all_there(), "the newer one is there, and the older one does not count"
    planner.demand(new)
    assert planner.lease(new, Access.READ)
    planner.check()


@pytest.mark.parametrize("access", Access)
def test_recovered_lease_can_be_released(access: Access) -> None:
    tiers = (Tier.HOST,) if access is Access.UPDATE else (Tier.HOST, Tier.DISK)
    planner = taken(found("a", *tiers, leases=((access, False),)))
    planner.demand("a")
    assert planner.lease("a", Access.READ) == (access is Access.READ)
    if access is Access.READ:
        planner.release("a", access)
    planner.release("a", access)
    planner.check()
    assert ("a" in planner) == (access is not Access.TAKE)
    assert planner.table.leased == 0


LENT: dict[str, tuple[dict[str, Any], bool]] = {
    "a lease": ({"leases": ((Access.READ, False),)}, True),
    "a lease for good": ({"leases": ((Access.READ, True),)}, False),
    "one of each": ({"leases": ((Access.READ, True), (Access.READ, False))}, True),
    "held": ({"host_lease": HostAccess.UPDATE}, True),
    "held to be looked at": ({"host_lease": HostAccess.READ}, True),
    "held for good": ({"host_lease": HostAccess.PERMANENT}, False),
    "nothing lent": ({}, False),
}


@pytest.mark.parametrize("lent", LENT)
def test_recovered_waiter_waits_only_for_returnable_space(lent: str) -> None:
    options, waits = LENT[lent]
    # The disk is full, too: groups in host memory cannot go there.
    planner = taken(found("a", Tier.HOST, nbytes=8, **options), host=10, disk=0)
    planner.claim("b", 5)
    assert (planner.error_of("b") is None) == waits


def test_recovered_host_lease_stays_until_released() -> None:
    planner = taken(found("a", Tier.HOST, nbytes=8, host_lease=HostAccess.UPDATE), host=10)
    planner.claim("b", 5)
    assert planner.instructions() == []
    assert not planner.lease_on_host("a", HostAccess.READ) and not planner.kept("a")
    planner.release_on_host("a")
    assert planner.instructions() == [Copy("a", 8, Tier.HOST, Tier.DISK, urgent=True)]
    assert taken(found("a", Tier.HOST, host_lease=HostAccess.PERMANENT)).kept("a")


def test_recovered_sticky_group_goes_last() -> None:
    both = Tier.HOST, Tier.DISK
    for kept in "ab":
        stock = (found(key, *both, sticky=key == kept) for key in "ab")
        planner = taken(*stock, found("c", Tier.DISK), host=10, policy="lru")
        planner.demand("c")
        assert Tier.HOST in planner.residence(kept)
        assert Tier.HOST not in planner.residence("b" if kept == "a" else "a")


def test_recovered_oldest_goes_first() -> None:
    both = Tier.HOST, Tier.DISK
    planner = taken(*(found(key, *both) for key in "bac"), host=15, policy="lru")
    planner.claim("d", 15)
    assert [i.group for i in planner.instructions() if isinstance(i, Drop)] == ["b", "a", "c"]
    planner = taken(*(found(key, Tier.DISK) for key in "bac"), host=15)
    planner.demand("b")
    planner.arrive("b", Tier.DISK, Tier.HOST)
    planner.instructions()
    assert planner.lease("b", Access.READ)
    assert planner.instructions()[0] == Copy("a", 5, Tier.DISK, Tier.HOST), "a is the next in order"


def test_recovered_unscheduled_group_order_is_ignored() -> None:
    stock = (
        found(key, Tier.DISK, use_order=UseOrder.PREFETCHED if key != "b" else UseOrder.LEARNED)
        for key in "abcd"
    )
    planner = taken(*stock, found("e", Tier.DISK), host=25)
    planner.demand("b")
    planner.arrive("b", Tier.DISK, Tier.HOST)
    planner.instructions()
    assert planner.lease("b", Access.READ)
    hopes = [i.group for i in planner.instructions() if isinstance(i, Copy)]
    assert hopes == ["e"], "the others arrive only when prefetched"


def test_recovered_put_is_still_under_way() -> None:
    planner = taken(found("a", Tier.HOST, visible=False, claimed=True))
    assert planner.granted("a")
    assert planner.used[Tier.HOST] == 5
    assert planner.residence("a") == () and not planner.idle()
    planner.fill("a")
    assert planner.residence("a") == (Tier.HOST,) and planner.idle()
    planner.check()
