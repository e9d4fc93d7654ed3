"""A planner that takes stock believes what the one before it did, but for wishes and hopes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.histories.machine import History
from tierstore.model.groups import name_of, version_id
from tierstore.model.moves import Copy, Drop, Forget, Reserve
from tierstore.model.tiers import Access, Hold, Tier
from tierstore.plan.planner import Planner
from tierstore.plan.policy import policy_named
from tierstore.plan.records import Found, State
from tierstore.plan.schedule import LearnedOrder

# --- in random histories --------------------------------------------------------------------------


class Still(Planner):
    """Takes stock and pursues nothing."""

    def _settle(self) -> None:
        pass


def beliefs(planner: Planner) -> dict[str, Any]:
    """All that a planner believes, but for wishes, and for room that nothing is on its way to."""
    seen, groups = planner._foresight, planner._groups
    there = {
        key: {t: c for t, c in group.copies.items() if c.state is not State.RESERVED}
        for key, group in groups.items()
    }
    aside = [(g, t) for key, g in groups.items() for t in g.copies if t not in there[key]]
    room = dict(planner.used)
    for group, tier in aside:
        room[tier] -= group.cost(tier)
    numbered = {number: group.key for number, group in planner._numbered.items()}
    return {
        "copies": {k: {t: (c.state, c.readers) for t, c in v.items()} for k, v in there.items()},
        "room": room,
        "lent": {k: (g.leases, g.exclusive, g.held) for k, g in groups.items()},
        "what they are": {k: (g.nbytes, g.backed, g.guided, g.kept) for k, g in groups.items()},
        "gone": {k for k, g in groups.items() if g.forgotten},
        "being put": list(planner._claims),
        "newest": planner._newest,
        "numbered": set(numbered.values()),
        "numbers": {key for number, key in numbered.items() if groups[key].number == number},
        "moving": planner._in_flight,
        "to come back": planner._leases,
        "hops": {way: (hop.copies, hop.nbytes) for way, hop in seen.hops.items()},
        "foreseen": {
            tier: {key for n, key in numbered.items() if held[n] and tier in there[key]}
            for tier, held in seen._held.items()
        },
        "sizes": {key: int(seen._nbytes[n]) for n, key in numbered.items()},
        "known": (seen._known, seen._known_bytes),
        "ranked": {tier: set(planner._policy.victims(tier, None)) for tier in planner.tiers},
    }


NAMES = ("numbered", "numbers", "newest", "sizes", "known", "foreseen")


def has_lost_a_name(planner: Planner) -> bool:
    """Whether a newer version had the name of a group that is there, and is gone.

    The old planner does not know the group by its name again; the new one does.
    """
    groups = [g for g in planner._groups.values() if not g.forgotten]
    return any(name_of(group.key) not in planner._newest for group in groups)


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_it_believes_what_the_one_before_it_did(first: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first, first + 10):
        history = History(seed, ["next-use", "lru"][seed % 2])
        world = history.world
        for _ in range(4):
            history.play(12)
            world._kind = Still
            fresh = world._new_planner()
            world._kind = Planner
            fresh.take_stock([world._found(key) for key in world.books.entries])
            assert fresh.instructions() == [], "what there is was as it should be"
            fresh.check()
            expected, believed = beliefs(world.planner), beliefs(fresh)
            for what in NAMES if has_lost_a_name(world.planner) else ():
                del expected[what], believed[what]
            assert believed == expected
            for what in ("being put", "moving", "to come back", "newest"):
                seen[what] += bool(expected.get(what))
    assert min(seen.values()) > 1, f"hardly ever reached: {seen}"


# --- step by step ---------------------------------------------------------------------------------


def found(
    key: str,
    *tiers: Tier,
    nbytes: int = 5,
    moves: tuple[tuple[Tier, Tier], ...] = (),
    leases: tuple[tuple[Access, bool], ...] = (),
    held: Hold | None = None,
    **flags: bool,
) -> Found:
    usual = dict.fromkeys(("backed", "guided", "kept", "claimed"), False) | {"shown": True}
    return Found(key, nbytes, tiers, moves, leases, held, **(usual | flags))


def taken(
    *stock: Found,
    host: int | None = 20,
    disk: int | None = None,
    policy: str = "next-use",
    clock: Callable[[], float] = lambda: 0.0,
) -> Planner:
    schedule = LearnedOrder()
    budgets = {Tier.HOST: host, Tier.DISK: disk}
    planner = Planner(budgets, policy_named(policy, schedule), schedule, clock)
    planner.take_stock(stock)
    planner.check()
    return planner


def test_without_anything_there_is_nothing_to_do() -> None:
    planner = taken()
    assert planner.instructions() == []
    assert planner.idle() and planner.all_there()
    assert planner.used == planner.peak == {Tier.HOST: 0, Tier.DISK: 0}


def test_room_is_counted_as_it_is_taken() -> None:
    stock = [
        found("a", Tier.HOST, Tier.DISK, nbytes=3),
        found("b", Tier.DISK, nbytes=4, backed=True),
        found("c", Tier.HOST, Tier.DISK, nbytes=5, moves=((Tier.DISK, Tier.HOST),)),
    ]
    planner = taken(*stock)
    assert planner.used == planner.peak == {Tier.HOST: 8, Tier.DISK: 8}
    assert [planner.backed(key) for key in "abc"] == [False, True, False]
    assert planner.residence("a") == (Tier.HOST, Tier.DISK)
    assert planner.residence("c") == (Tier.DISK,)
    assert not planner.idle()


def test_a_copy_under_way_is_measured_from_when_stock_was_taken() -> None:
    now = [100.0]
    stock = found("a", Tier.HOST, Tier.DISK, nbytes=6, moves=((Tier.DISK, Tier.HOST),))
    planner = taken(stock, clock=lambda: now[0])
    now[0] = 102.0
    planner.arrived("a", Tier.HOST, Tier.DISK)
    assert planner._foresight.hops[Tier.DISK, Tier.HOST].bandwidth == 3.0
    assert planner.idle() and planner.all_there()
    planner.check()


def test_all_is_there_if_it_was_or_is_arriving() -> None:
    both = Tier.HOST, Tier.DISK
    coming = ((Tier.DISK, Tier.HOST),)
    assert taken(found("a", *both), found("b", *both, moves=coming)).all_there()
    assert not taken(found("a", *both), found("b", Tier.DISK)).all_there()
    assert not taken(found("a", Tier.DISK), found("b", *both)).all_there()
    old = found("a", Tier.DISK, shown=False)
    assert taken(old, found("b", *both)).all_there(), "what is gone is missed by nobody"


def test_what_somebody_wants_to_put_gets_its_room() -> None:
    planner = taken(found("a", claimed=True, shown=False))
    assert planner.instructions() == [Reserve("a", 5, Tier.HOST)]
    assert planner.granted("a")
    planner.arrived("a", Tier.HOST)
    assert planner.residence("a") == (Tier.HOST,) and planner.idle()
    planner.check()


def test_what_somebody_fills_has_its_room_already() -> None:
    planner = taken(found("a", Tier.HOST, claimed=True, shown=False))
    assert planner.instructions() == []
    assert planner.granted("a") and planner.residence("a") == () and not planner.idle()
    planner.withdraw("a")
    assert planner.idle() and "a" not in planner
    assert planner.instructions() == [Drop("a", 5, Tier.HOST), Forget("a")]


def test_what_readers_see_was_put() -> None:
    """The step that showed it was cut short before the claim was taken off the list."""
    planner = taken(found("a", Tier.HOST, claimed=True))
    assert planner.residence("a") == (Tier.HOST,) and planner.idle()
    planner.demand("a")
    assert planner.lease("a", Access.READ)
    planner.check()


def test_what_nobody_sees_goes_once_nobody_uses_it() -> None:
    old, new = version_id("a", 1), version_id("a", 2)
    both, read = (Tier.HOST, Tier.DISK), (Access.READ, False)
    planner = taken(found(old, *both, leases=(read, read), shown=False), found(new, Tier.DISK))
    assert planner.instructions() == [Drop(old, 5, Tier.DISK)], "the copy that nobody reads"
    assert old not in planner and new in planner
    planner.release(old, Access.READ)
    assert planner.instructions() == []
    planner.release(old, Access.READ)
    assert planner.instructions() == [Drop(old, 5, Tier.HOST), Forget(old)]
    planner.check()


def test_what_nobody_sees_or_uses_goes_at_once() -> None:
    planner = taken(found("a", Tier.HOST, Tier.DISK, shown=False), found("b", Tier.DISK))
    drops = [Drop("a", 5, Tier.HOST), Drop("a", 5, Tier.DISK), Forget("a")]
    assert planner.instructions() == drops
    assert planner.used == {Tier.HOST: 0, Tier.DISK: 5}


def test_a_newer_version_is_known_by_the_name() -> None:
    old, new = version_id("a", 1), version_id("a", 2)
    planner = taken(found(old, Tier.DISK), found(new, Tier.HOST, claimed=True, shown=False))
    planner.arrived(new, Tier.HOST)
    planner.discard(old)
    assert planner.all_there(), "the newer one is there, and the older one is not missed"
    planner.demand(new)
    assert planner.lease(new, Access.READ)
    planner.check()


@pytest.mark.parametrize("access", Access)
def test_what_is_lent_comes_back(access: Access) -> None:
    tiers = (Tier.HOST,) if access is Access.UPDATE else (Tier.HOST, Tier.DISK)
    planner = taken(found("a", *tiers, leases=((access, False),)))
    planner.demand("a")
    assert planner.lease("a", Access.READ) == (access is Access.READ)
    if access is Access.READ:
        planner.release("a", access)
    planner.release("a", access)
    planner.check()
    assert ("a" in planner) == (access is not Access.TAKE)
    assert planner._leases == 0


LENT: dict[str, tuple[dict[str, Any], bool]] = {
    "a lease": ({"leases": ((Access.READ, False),)}, True),
    "a lease for good": ({"leases": ((Access.READ, True),)}, False),
    "one of each": ({"leases": ((Access.READ, True), (Access.READ, False))}, True),
    "held": ({"held": Hold.UPDATE}, True),
    "held to be looked at": ({"held": Hold.READ}, True),
    "held for good": ({"held": Hold.KEEP}, False),
    "nothing lent": ({}, False),
}


@pytest.mark.parametrize("lent", LENT)
def test_who_finds_no_room_waits_for_what_will_come_back_only(lent: str) -> None:
    options, waits = LENT[lent]
    # The disk is full, too: what is in host memory cannot go there.
    planner = taken(found("a", Tier.HOST, nbytes=8, **options), host=10, disk=0)
    planner.claim("b", 5)
    assert (planner.error_of("b") is None) == waits


def test_what_is_held_stays_until_it_is_let_go() -> None:
    planner = taken(found("a", Tier.HOST, nbytes=8, held=Hold.UPDATE), host=10)
    planner.claim("b", 5)
    assert planner.instructions() == []
    assert not planner.hold("a", Hold.READ) and not planner.kept("a")
    planner.let_go("a")
    assert planner.instructions() == [Copy("a", 8, Tier.HOST, Tier.DISK, urgent=True)]
    assert taken(found("a", Tier.HOST, held=Hold.KEEP)).kept("a")


def test_what_should_be_kept_goes_last() -> None:
    both = Tier.HOST, Tier.DISK
    for kept in "ab":
        stock = (found(key, *both, kept=key == kept) for key in "ab")
        planner = taken(*stock, found("c", Tier.DISK), host=10, policy="lru")
        planner.demand("c")
        assert Tier.HOST in planner.residence(kept)
        assert Tier.HOST not in planner.residence("b" if kept == "a" else "a")


def test_the_oldest_goes_first_and_was_registered_first() -> None:
    both = Tier.HOST, Tier.DISK
    planner = taken(*(found(key, *both) for key in "bac"), host=15, policy="lru")
    assert list(planner._policy.victims(Tier.HOST, None)) == ["b", "a", "c"]
    planner = taken(*(found(key, Tier.DISK) for key in "bac"), host=15)
    planner.demand("b")
    planner.arrived("b", Tier.HOST, Tier.DISK)
    planner.instructions()
    assert planner.lease("b", Access.READ)
    assert planner.instructions()[0] == Copy("a", 5, Tier.DISK, Tier.HOST), "next in line"


def test_of_a_guided_group_its_order_says_nothing() -> None:
    stock = (found(key, Tier.DISK, guided=key != "b") for key in "abcd")
    planner = taken(*stock, found("e", Tier.DISK), host=25)
    planner.demand("b")
    planner.arrived("b", Tier.HOST, Tier.DISK)
    planner.instructions()
    assert planner.lease("b", Access.READ)
    hopes = [i.key for i in planner.instructions() if isinstance(i, Copy)]
    assert hopes == ["e"], "what is guided comes when its user says so"
