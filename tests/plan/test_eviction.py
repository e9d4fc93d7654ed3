"""Evictions: which copies leave to free space, and in which order."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate

import pytest

from tests.plan.driver import Driver
from tests.plan.in_words import (
    DEVICE,
    DISK,
    HOST,
    bring,
    change,
    hold,
    planner_of,
    put,
    raise_up,
    register,
    told,
)
from tierstore.model.tiers import Access, HostAccess, Tier, UseOrder

MUCH = 1000
SCENES = 100


# Victims -----------------------------------------------------------------------------------------


@dataclass
class Thing:
    """A group in host memory, by the actions that are allowed there."""

    key: str
    nbytes: int
    kind: str
    kept: bool


MAY_GO = {"clean", "dirty", "rising", "risen"}
BOTH = ["clean", "clean", "dirty", "dirty", "held", "wanted", "being saved"]


def place(planner: Driver, thing: Thing) -> None:
    key, nbytes = thing.key, thing.nbytes
    match thing.kind:
        case "dirty" | "being saved" | "leaving":
            put(planner, key, nbytes)
        case "risen":
            raise_up(planner, key, nbytes)
        case _:
            bring(planner, key, nbytes)
    match thing.kind:
        case "held" | "wanted":
            planner.demand_on_host(key, HostAccess.READ)
            assert thing.kind == "wanted" or planner.lease_on_host(key, HostAccess.READ)
        case "being saved":
            planner.save(key)
        case "leaving":
            planner.offload(key)
        case "rising":
            planner.demand(key)
    if thing.kept:
        planner.make_sticky(key)


def scene(rng: random.Random, tiers: int, kinds: list[str]) -> tuple[Driver, list[Thing]]:
    """Return a planner and its things: host memory is almost full, the disk has little space."""
    planner = planner_of(MUCH, MUCH if tiers == 3 else None)
    if tiers == 3:
        change(planner, "blocker", 5)
    keys = rng.sample("abcdefgh", rng.randint(1, 6))
    kept = rng.random() < 0.5
    things = [
        Thing(key, rng.randint(1, 5), rng.choice(kinds), kept and rng.random() < 0.5)
        for key in keys
    ]
    things.sort(key=lambda thing: thing.kind == "rising")
    for thing in things:
        if thing.kind == "rising":
            planner.table.change_budget(DEVICE, planner.used[DEVICE])
        place(planner, thing)
    told(planner)
    planner.table.change_budget(HOST, planner.used[HOST] + rng.randint(0, 2))
    if rng.random() < 0.5:
        planner.table.change_budget(DISK, planner.used[DISK] + rng.randint(0, 6))
    return planner, sorted(things, key=lambda thing: thing.key)


def free_on(planner: Driver, tier: Tier) -> int:
    budget = planner.budgets[tier]
    return MUCH if budget is None else budget - planner.used[tier]


def expected_of_a_need(planner: Driver, things: list[Thing], nbytes: int) -> list[str]:
    """Return the victims that the promises require.

    Candidates go in order, sticky ones late, and demanded ones last. None goes unless everything
    fits afterwards, with the copies that already leave. A copy that is on disk is dropped at once;
    the others are saved, if the space being freed is not enough. If the disk has no space for one
    of them, it stays, and others are chosen.
    """
    room, disk = free_on(planner, HOST), free_on(planner, DISK)
    leaving = sum(thing.nbytes for thing in things if thing.kind == "leaving")
    may_go = [thing for thing in things if thing.kind in MAY_GO]
    may_go.sort(key=lambda t: (t.kind == "rising", t.kind != "rising" and t.kept, t.key))
    words: list[str] = []
    while room < nbytes:
        needed = first_of(may_go, nbytes - room)
        if room + leaving + sum(thing.nbytes for thing in needed) < nbytes:
            return words
        unsaved: list[Thing] = []
        for thing in needed:
            if thing.kind != "dirty":
                words.append(f"{thing.key} leaves HOST")
                room += thing.nbytes
            elif room + leaving < nbytes and thing.nbytes > disk:
                unsaved.append(thing)
            elif room + leaving < nbytes:
                words.append(f"{thing.key}: HOST to DISK!")
                leaving += thing.nbytes
                disk -= thing.nbytes
        if not unsaved:
            break
        may_go = [thing for thing in may_go if thing not in needed]
    return [*words, "z gets room on HOST"] if room >= nbytes else words


def first_of(things: list[Thing], nbytes: int) -> list[Thing]:
    """Return the shortest prefix that takes `nbytes` in total; all if they take fewer."""
    sums = accumulate((thing.nbytes for thing in things), initial=0)
    return [thing for thing, before in zip(things, sums, strict=False) if before < nbytes]


@pytest.mark.parametrize("tiers", [2, 3])
def test_demand_evicts_the_right_victims(tiers: int) -> None:
    seen: set[str] = set()
    kinds = [*BOTH, "leaving"] if tiers == 2 else [*BOTH, "rising", "risen"]
    for seed in range(SCENES):
        rng = random.Random(seed)
        planner, things = scene(rng, tiers, kinds)
        nbytes = rng.randint(1, planner.budgets[HOST] or 1)
        expected = expected_of_a_need(planner, things, nbytes)
        planner.claim("z", nbytes, use_order=UseOrder.PREFETCHED)
        assert told(planner) == expected, (seed, nbytes, things)
        seen.update(word.split(maxsplit=1)[1] for word in expected)
    assert seen == {"leaves HOST", "HOST to DISK!", "gets room on HOST"}


@pytest.mark.parametrize("tiers", [2, 3])
def test_prefetch_evicts_copies_on_disk_or_nothing(tiers: int) -> None:
    met = 0
    kinds = [*BOTH, "leaving"] if tiers == 2 else [*BOTH, "risen"]
    for seed in range(SCENES):
        rng = random.Random(seed)
        planner, things = scene(rng, tiers, kinds)
        nbytes, kept = rng.randint(1, planner.budgets[HOST] or 1), rng.random() < 0.5
        may_go = [t for t in things if t.kind in ("clean", "risen") and (kept or not t.kept)]
        may_go.sort(key=lambda thing: (thing.kept, thing.key))
        needed = first_of(may_go, nbytes - free_on(planner, HOST))
        expected = [f"{thing.key} leaves HOST" for thing in needed]
        enough = free_on(planner, HOST) + sum(thing.nbytes for thing in may_go) >= nbytes
        register(planner, "z", nbytes)
        if kept:
            planner.make_sticky("z")
        planner.expect(["z"], HOST)
        assert told(planner) == ([*expected, "z: DISK to HOST"] if enough else []), (seed, things)
        met += enough and bool(expected)
    assert met > SCENES // 10


def test_copy_that_cannot_be_saved_leaves_others_evictable() -> None:
    """Fill the disk: a group that is only in host memory must stay, and another may leave."""
    planner = planner_of(10, disk=5)
    register(planner, "fills the disk", 5, backing=False)
    put(planner, "a", 6)
    bring(planner, "b", 4)
    planner.claim("c", 4, use_order=UseOrder.PREFETCHED)
    assert told(planner) == ["b leaves HOST", "c gets room on HOST"]
    assert planner.error_of("c") is None


def test_device_evicts_beside_a_permanent_host_lease() -> None:
    planner = planner_of(10, 10)
    change(planner, "a", 6)
    planner.release("a", Access.UPDATE)
    raise_up(planner, "b", 4)
    planner.withdraw("b")
    hold(planner, "held", 5, HostAccess.PERMANENT)
    bring(planner, "c", 1)
    told(planner)
    planner.demand("c")
    assert told(planner) == ["b leaves DEVICE", "c: HOST to DEVICE!"]


@pytest.mark.parametrize("device", [None, 20])
def test_copy_may_take_space_already_reserved_for_it(device: int | None) -> None:
    """Request a renewal, which needs space only, and a demand, which needs the old bytes there."""
    planner = planner_of(5, device)
    register(planner, "a", 5)
    planner.demand_on_host("a", HostAccess.RENEW)
    assert told(planner) == [] and planner.used[HOST] == 5
    planner.demand("a")
    assert told(planner) == ["a: DISK to HOST!"]
    assert planner.used[HOST] == 5


def test_offload_takes_space_already_reserved_for_it() -> None:
    planner = planner_of(5, 5)
    change(planner, "a", 5)
    planner.demand_on_host("a", HostAccess.RENEW)
    assert planner.used[HOST] == 0, "it is being changed"
    planner.release("a", Access.UPDATE)
    assert told(planner) == [] and planner.used[HOST] == 5
    planner.offload("a")
    assert told(planner) == ["a: DEVICE to HOST!"]
    assert planner.used[HOST] == 5


@pytest.mark.parametrize("first", [2, 3])
def test_eviction_frees_no_byte_more_than_needed(first: int) -> None:
    """Request three bytes: evicting three is enough, two is not."""
    planner = planner_of(10)
    bring(planner, "a", first)
    bring(planner, "b", 4 - first)
    hold(planner, "held", 6)
    planner.claim("c", 3, use_order=UseOrder.PREFETCHED)
    gone = ["a leaves HOST"] if first == 3 else ["a leaves HOST", "b leaves HOST"]
    assert told(planner) == [*gone, "c gets room on HOST"]
