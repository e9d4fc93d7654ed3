"""Holding copies in host memory: who wants what, who gets it when, and what is learned from it."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from tests.histories.machine import Holder, World, land_all
from tierstore.model.errors import BudgetError
from tierstore.model.moves import Copy, Drop, Reserve
from tierstore.model.tiers import Access, Hold, Tier
from tierstore.plan.foresight import Foresight
from tierstore.plan.planner import Planner
from tierstore.plan.policy import FarthestNextUse, policy_named
from tierstore.plan.schedule import LearnedOrder

TWO = {Tier.HOST: 20, Tier.DISK: None}
THREE = {Tier.DEVICE: 20, Tier.HOST: 20, Tier.DISK: None}
BOTH = pytest.mark.parametrize("budgets", [TWO, THREE])

Budgets = dict[Tier, int | None]


def fetched(world: World, key: str, purpose: Hold) -> Holder:
    fetcher = world.fetch(key, purpose)
    assert fetcher is not None
    return fetcher


def held(world: World, key: str, purpose: Hold) -> Holder:
    fetcher = fetched(world, key, purpose)
    land_all(world)
    assert world.hold(fetcher)
    assert fetcher in world.holders
    return fetcher


def with_planner(
    budgets: Budgets, policy: str = "next-use", **groups: int
) -> tuple[Planner, LearnedOrder]:
    schedule = LearnedOrder()
    planner = Planner(budgets, policy_named(policy, schedule), schedule)
    for key, nbytes in groups.items():
        planner.register(key, nbytes, backed=True)
    return planner, schedule


def hold(planner: Planner, key: str, purpose: Hold = Hold.READ) -> None:
    """Holds what is there or comes at once."""
    planner.fetch(key, purpose)
    for instruction in planner.instructions():
        if isinstance(instruction, Copy):
            planner.arrived(instruction.key, instruction.dst, instruction.src)
    assert planner.hold(key, purpose)


# Wanting to hold ---------------------------------------------------------------------------------


@pytest.mark.parametrize("budgets", [TWO, THREE | {Tier.DEVICE: 30}])
def test_what_never_fits_host_memory_is_refused_with_advice(budgets: Budgets) -> None:
    planner, _ = with_planner(budgets, a=21)
    with pytest.raises(BudgetError, match="raise ram_budget to at least 21 bytes") as caught:
        planner.fetch("a", Hold.READ)
    error = caught.value
    assert (error.key, error.tier, error.nbytes, error.budget) == ("a", "HOST", 21, 20)
    assert planner.instructions() == []


def test_of_the_device_the_advice_is_another() -> None:
    planner, _ = with_planner({Tier.DEVICE: 20, Tier.HOST: None, Tier.DISK: None}, a=21)
    with pytest.raises(BudgetError, match="raise device_budget to at least 21 bytes"):
        planner.demand("a")
    planner.fetch("a", Hold.READ)
    assert planner.instructions() == [Copy("a", 21, Tier.DISK, Tier.HOST, urgent=True)]


@BOTH
def test_what_just_fits_is_fetched(budgets: Budgets) -> None:
    planner, _ = with_planner(budgets, a=20)
    planner.fetch("a", Hold.READ)
    assert planner.instructions() == [Copy("a", 20, Tier.DISK, Tier.HOST, urgent=True)]


@BOTH
def test_several_who_want_to_look_hold_one_after_the_other(budgets: Budgets) -> None:
    world = World(budgets)
    key = world.register(5)
    first, second = (fetched(world, key, Hold.READ) for _ in range(2))
    land_all(world)
    assert world.hold(first)
    assert not world.hold(second), "one at a time"
    world.let_go(first)
    blocker = world.claim(20)
    assert blocker is not None and not world.fill(blocker), "the second still wants it there"
    assert world.hold(second)
    world.let_go(second)
    assert world.fill(blocker)
    world.finish()


@BOTH
def test_who_wants_it_again_may_have_it_though_it_was_to_be_put_away(budgets: Budgets) -> None:
    world = World(budgets)
    key = world.register(5)
    holder = held(world, key, Hold.READ)
    world.put_away(key)
    assert world.planner.residence(key) == (Tier.HOST, Tier.DISK), "somebody holds it"
    again = fetched(world, key, Hold.READ)
    world.let_go(holder)
    assert world.hold(again), "it would have to be read again"
    assert len([i for i in world.books.followed if isinstance(i, Copy)]) == 1
    world.finish()


def test_who_gives_up_takes_the_error_with_them() -> None:
    world = World(TWO)
    key = world.register(5)
    fetcher = fetched(world, key, Hold.READ)
    world.fail(world.books.moving[0])
    assert world.planner.error_of(key) is not None
    world.withdraw_fetch(fetcher)
    assert world.planner.error_of(key) is None
    held(world, key, Hold.READ)
    world.finish()


def test_who_never_wanted_to_hold_it_has_nothing_to_withdraw() -> None:
    planner, _ = with_planner(TWO, a=5)
    planner.demand("a")
    planner.failed("a", Tier.HOST, Tier.DISK, OSError())
    planner.withdraw_fetch("a", Hold.READ)
    assert planner.error_of("a") is not None, "who demands it was not told yet"


# Room for new values -----------------------------------------------------------------------------


@BOTH
def test_room_for_new_values_stays_while_anybody_wants_to_make_them(budgets: Budgets) -> None:
    world = World(budgets)
    key = world.register(5)
    first, second = (fetched(world, key, Hold.RENEW) for _ in range(2))
    world.withdraw_fetch(first)
    assert not world.books.moving
    assert world.planner.used[Tier.HOST] == 5
    assert world.hold(second)
    world.finish()


@BOTH
def test_once_only_others_want_it_the_old_values_come(budgets: Budgets) -> None:
    world = World(budgets)
    key = world.register(5)
    renewing, looking = fetched(world, key, Hold.RENEW), fetched(world, key, Hold.READ)
    assert not world.books.moving, "the room is there for new values"
    world.withdraw_fetch(renewing)
    assert [(m.src, m.dst) for m in world.books.moving] == [(Tier.DISK, Tier.HOST)]
    land_all(world)
    assert world.hold(looking)
    world.finish()


def test_who_leaves_gives_up_no_copy_that_is_there_or_coming() -> None:
    world = World(TWO)
    key = world.register(5)
    looking = fetched(world, key, Hold.READ)
    world.withdraw_fetch(looking)
    assert world.planner.arriving(key), "it may as well be kept"
    land_all(world)
    world.withdraw_fetch(fetched(world, key, Hold.READ))
    assert world.planner.residence(key) == (Tier.HOST, Tier.DISK)
    world.finish()


@BOTH
def test_room_for_new_values_is_reserved_and_counts_as_a_copy(budgets: Budgets) -> None:
    planner, _ = with_planner(budgets, policy="lru", a=5)
    planner.fetch("a", Hold.RENEW)
    assert planner.instructions() == [], "they who make them may be waiting for somebody"
    assert not planner.hold("a", Hold.KEEP), "there is nothing in it yet"
    assert planner.hold("a", Hold.RENEW)
    assert planner.instructions() == [Reserve("a", 5, Tier.HOST), Drop("a", 5, Tier.DISK)]
    assert planner.residence("a") == (Tier.HOST,) and not planner.backed("a")
    planner.let_go("a")
    planner.claim("b", 20)
    assert planner.instructions() == [Copy("a", 5, Tier.HOST, Tier.DISK, urgent=True)], "a victim"
    planner.check()


# Holding -----------------------------------------------------------------------------------------


def test_what_is_lent_moves_or_is_not_there_is_not_held() -> None:
    planner, _ = with_planner(THREE, a=5)
    assert not planner.hold("a", Hold.READ), "it is not there"
    planner.demand("a")
    planner.fetch("a", Hold.READ)
    assert not planner.hold("a", Hold.READ), "it is on its way"
    planner.arrived("a", Tier.HOST, Tier.DISK)
    assert not planner.hold("a", Hold.READ), "it is on its way further up"
    planner.arrived("a", Tier.DEVICE, Tier.HOST)
    assert planner.lease("a", Access.READ)
    assert not planner.hold("a", Hold.READ), "it is lent"
    planner.release("a", Access.READ)
    assert planner.hold("a", Hold.READ)
    assert not planner.hold("a", Hold.READ), "it is held already"


@pytest.mark.parametrize("purpose", Hold)
def test_only_who_looks_leaves_the_other_copies_valid(purpose: Hold) -> None:
    planner, _ = with_planner(THREE, a=5)
    hold(planner, "a", purpose)
    looks = purpose is Hold.READ
    assert planner.residence("a") == ((Tier.HOST, Tier.DISK) if looks else (Tier.HOST,))
    assert planner.backed("a") == looks
    planner.let_go("a")
    assert planner.residence("a") == ((Tier.HOST, Tier.DISK) if looks else (Tier.HOST,))
    planner.check()


@pytest.mark.parametrize(("purpose", "waits"), [(Hold.UPDATE, True), (Hold.KEEP, False)])
def test_nobody_waits_for_what_is_held_for_good(purpose: Hold, waits: bool) -> None:
    planner, _ = with_planner({Tier.HOST: 20, Tier.DISK: 0}, a=18)
    hold(planner, "a", purpose)
    planner.register("b", 2, backed=True)
    planner.claim("c", 5)
    assert (planner.error_of("c") is None) == waits
    planner.let_go("a")
    hold(planner, "b")
    planner.claim("d", 5)
    assert planner.error_of("d") is None, "b comes back, and is counted right"
    planner.let_go("b")
    assert planner.error_of("d") is not None


def test_who_wants_what_is_held_for_good_gives_nothing_back() -> None:
    """They will not wake up, so nobody should wait for them."""
    planner, _ = with_planner({Tier.HOST: 20, Tier.DISK: 0}, a=18)
    hold(planner, "a", Hold.KEEP)
    planner.fetch("a", Hold.READ)
    planner.claim("c", 5)
    assert planner.error_of("c") is not None


def test_of_what_is_held_for_good_a_copy_on_the_device_is_lent_and_comes_back() -> None:
    planner, _ = with_planner({Tier.DEVICE: 20, Tier.HOST: 20, Tier.DISK: 0}, a=18)
    hold(planner, "a", Hold.KEEP)
    planner.demand("a")
    planner.arrived("a", Tier.DEVICE, Tier.HOST)
    planner.claim("c", 5)
    assert planner.error_of("c") is None, "who demanded a is about to wake up"
    assert planner.lease("a", Access.READ)
    assert planner.error_of("c") is None, "and has it now"
    planner.release("a", Access.READ)
    assert planner.error_of("c") is not None


def test_what_is_held_is_not_given_up_for_others_until_it_is_let_go() -> None:
    planner, _ = with_planner(TWO, a=15, b=10)
    hold(planner, "a")
    planner.demand("b")
    assert planner.instructions() == [], "a is held"
    planner.let_go("a")
    assert planner.instructions() == [
        Drop("a", 15, Tier.HOST),
        Copy("b", 10, Tier.DISK, Tier.HOST, urgent=True),
    ]


def test_a_hope_that_had_no_room_is_pursued_again_when_something_is_let_go() -> None:
    planner, _ = with_planner(TWO, a=15, b=10)
    hold(planner, "a")
    planner.prefetch(["b"])
    assert planner.instructions() == []
    planner.let_go("a")
    assert planner.instructions() == [
        Drop("a", 15, Tier.HOST),
        Copy("b", 10, Tier.DISK, Tier.HOST, urgent=False),
    ]


# What is learned from it -------------------------------------------------------------------------


def test_who_holds_uses() -> None:
    planner, schedule = with_planner(TWO, policy="lru", a=5, b=5, c=5)
    for key in "abca":
        hold(planner, key)
        planner.let_go(key)
    assert list(planner._policy.victims(Tier.HOST, None)) == ["b", "c", "a"]
    assert [schedule.steps_until(key) for key in "bca"] == [1, 2, 3], "an order like any other"


def test_the_computing_after_a_hold_is_measured() -> None:
    now, schedule = [0.0], LearnedOrder()
    planner = Planner(TWO, policy_named("lru", schedule), schedule, lambda: now[0])
    for key in "ab":
        planner.register(key, 5, backed=True)
    hold(planner, "a")
    planner.let_go("a")
    now[0] = 4.0
    planner.demand("b")
    hold(planner, "a")
    assert planner._foresight._remaining() == 4.0, "as long as the last time"


@pytest.mark.parametrize("news", [True, False])
def test_the_policy_is_told_who_should_stay_once_it_is_news(
    news: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[list[int], float]] = []

    class Listens(FarthestNextUse):
        def keep(self, numbers: Collection[int], nearer: float) -> None:
            told.append((list(numbers), nearer))

    monkeypatch.setattr(Foresight, "choose_residents", lambda self, number: news)
    schedule = LearnedOrder()
    planner = Planner(TWO, Listens(schedule), schedule)
    planner.register("a", 5, backed=True)
    told.clear()
    planner._foresight.residents.staying, planner._foresight.residents.nearer = [7], 0.5
    hold(planner, "a")
    assert told == ([([7], 0.5)] if news else [])


def test_of_what_is_guided_nothing_is_learned_and_it_is_expected_no_more() -> None:
    planner, schedule = with_planner(TWO, a=5)
    planner.register("g", 5, backed=True, guided=True)
    planner.prefetch(["g"])
    assert schedule.foretold() == 1
    hold(planner, "g")
    assert schedule.foretold() == 0, "it has come"
    assert not planner._foresight._early[Tier.HOST], "it was used"
    planner.let_go("g")
    for _ in range(3):
        hold(planner, "a")
        planner.let_go("a")
        hold(planner, "g")
        planner.let_go("g")
    assert schedule.learning, "one group after another was never seen"


def test_after_it_is_held_the_next_is_fetched() -> None:
    planner, _ = with_planner(TWO, a=5, b=5)
    hold(planner, "a")
    assert planner.instructions() == [Copy("b", 5, Tier.DISK, Tier.HOST, urgent=False)]


# Putting away ------------------------------------------------------------------------------------


@BOTH
def test_what_is_put_away_leaves_every_tier_but_the_disk(budgets: Budgets) -> None:
    world = World(budgets)
    key = world.register(5)
    waiter = world.demand(key)
    land_all(world)
    assert waiter is not None and world.wake(waiter)
    world.put_away(key)
    assert world.planner.residence(key) == (world.planner.top, Tier.DISK), "it is lent"
    world.release(waiter)
    assert world.planner.residence(key) == (Tier.DISK,)
    world.finish()


@BOTH
def test_what_somebody_waits_for_is_not_put_away(budgets: Budgets) -> None:
    world = World(budgets)
    key = world.register(5)
    fetcher, waiter = fetched(world, key, Hold.READ), world.demand(key)
    assert waiter is not None
    land_all(world)
    world.put_away(key)
    assert world.planner.residence(key) == tuple(budgets)
    assert world.wake(waiter)
    world.release(waiter)
    assert Tier.HOST in world.planner.residence(key)
    assert world.hold(fetcher)
    world.finish()


def test_room_that_was_set_aside_for_what_is_put_away_is_free_at_once() -> None:
    planner, _ = with_planner(THREE, a=5)
    planner.demand("a")
    assert planner.used[Tier.DEVICE] == 5
    planner.withdraw("a")
    planner.put_away("a")
    assert planner.used[Tier.DEVICE] == 0
    planner.arrived("a", Tier.HOST, Tier.DISK)
    assert planner.residence("a") == (Tier.DISK,)
    assert planner.used[Tier.HOST] == 0


def test_that_room_is_given_to_who_waits_for_it() -> None:
    planner, _ = with_planner({Tier.DEVICE: 15, Tier.HOST: 20, Tier.DISK: None}, a=11, b=9)
    planner.demand("a")
    planner.withdraw("a")
    planner.instructions()
    planner.demand("b")
    assert planner.instructions() == [], "a is still on its way"
    planner.put_away("a")
    assert planner.instructions() == [Copy("b", 9, Tier.DISK, Tier.HOST, urgent=True)]


def test_what_is_put_away_is_not_expected_any_more() -> None:
    planner, schedule = with_planner(TWO, a=5, b=20)
    hold(planner, "b")
    planner.prefetch(["a"])
    assert schedule.foretold() == 1
    planner.put_away("a")
    assert schedule.foretold() == 0
    planner.let_go("b")
    assert planner.instructions() == [], "nobody hopes for it"


def test_only_a_copy_above_the_disk_is_arriving() -> None:
    planner, _ = with_planner(THREE, a=5)
    planner.fetch("a", Hold.READ)
    assert planner.arriving("a"), "one of its copies is there, one is on its way"
    planner.arrived("a", Tier.HOST, Tier.DISK)
    assert not planner.arriving("a")
    planner.fetch("a", Hold.UPDATE)
    assert planner.hold("a", Hold.UPDATE)
    planner.let_go("a")
    planner.save("a")
    assert not planner.arriving("a"), "it goes down"
