"""Which groups stay: as many bytes as before are read per round, but evenly."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Sequence

import numpy as np
import pytest

from tierstore.model.tiers import Tier
from tierstore.plan.retention import EvenLoad, RetentionSet, Visits, even_load, visits
from tierstore.plan.schedule import LearnedOrder
from tierstore.simulation import Outcome, Use, simulate

DISK = 1e9

# --- the choice, by itself ------------------------------------------------------------------------


def chosen(loop: Visits, room: int, ahead: int) -> EvenLoad:
    found = even_load(loop, room=room, ahead=ahead)
    assert found is not None
    return found


def backlog(loop: Visits, staying: Collection[int], ahead: int, speed: float) -> float:
    """Seconds that a round waits: a disk that reads what does not stay, in order, with room for
    `ahead` bytes that nobody asked for yet. The second of two rounds counts."""
    saved, waited = float(ahead), 0.0
    for second in (False, True):
        for number, nbytes, computing in zip(loop.order, loop.nbytes, loop.seconds, strict=True):
            if number not in staying:
                waited += second * max(nbytes - saved, 0.0) / speed
                saved = max(saved - nbytes, 0.0)
            saved = min(float(ahead), saved + computing * speed)
    return waited


def uneven(seed: int, groups: int) -> Visits:
    """A loop over groups of a few sizes, with much or little computing for their bytes."""
    rng = random.Random(seed)
    nbytes = [rng.choice([20, 30, 50, 80]) for _ in range(groups)]
    seconds = [size * rng.choice([0.1, 0.3, 1.0, 2.5]) for size in nbytes]
    return Visits(list(range(groups)), nbytes, seconds)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_no_choice_of_as_many_bytes_waits_much_less(seed: int, share: float) -> None:
    loop = uneven(seed, groups=11)
    total, largest = sum(loop.nbytes), max(loop.nbytes)
    room, ahead = int(share * total), 2 * largest
    found = chosen(loop, room, ahead)
    assert sum(loop.nbytes[i] for i in found.staying) <= room
    # Disk and computing are as fast as each other: the hardest case.
    speed = (total - room) / sum(loop.seconds)
    best = min(
        backlog(loop, some, ahead, speed)
        for count in range(len(loop.order) + 1)
        for some in itertools.combinations(loop.order, count)
        if sum(loop.nbytes[i] for i in some) <= room
    )
    assert backlog(loop, found.staying, ahead, speed) <= best + 1.5 * largest / speed


def test_what_is_visited_more_often_goes_first() -> None:
    # 0 and 1 come three times a round, the others once; there is room for three.
    order = [0, 1, 2, 3, 0, 1, 4, 5, 0, 1, 6, 7]
    found = chosen(Visits(order, [10] * 12, [1.0] * 12), room=30, ahead=20)
    assert {0, 1} <= set(found.staying)
    assert len(found.staying) <= 3
    assert found.missed == 50


def test_nobody_has_to_stay_where_all_fit_or_nothing_is_computed() -> None:
    loop = Visits([0, 1, 2], [10, 10, 10], [1.0, 1.0, 1.0])
    assert even_load(loop, room=30, ahead=10) is None
    assert even_load(Visits([0, 1, 2], [10] * 3, [0.0] * 3), room=20, ahead=10) is None


def test_a_group_that_soon_comes_again_is_the_same_visit() -> None:
    order = np.array([0, 1, 0, 1, 2, 3, 0])
    found = visits(order, np.full(7, 10), np.arange(7.0), near=10)
    assert found.order == [0, 1, 2, 3, 0], "two others came since the latest use of 0"
    assert found.seconds == [0.0, 1.0 + 2.0 + 3.0, 4.0, 5.0, 6.0]
    assert visits(order, np.full(7, 10), np.arange(7.0), near=20).order == [0, 1, 2, 3]


# --- with the planner -----------------------------------------------------------------------------

SIZE = 30_000_000
HEAVY, LIGHT = 36, 60
ROUND = HEAVY + LIGHT
BUDGET = 28 * SIZE


def rounds(count: int) -> list[Use]:
    """A loop whose first part computes little for its bytes, and whose second part much.

    In all, computing takes as long as reading what does not fit. Times vary as on a real machine.
    """
    rng = random.Random(5)
    missing = (ROUND - BUDGET / SIZE) * SIZE / DISK
    light = missing / (0.5 * HEAVY + 1.0 * LIGHT)
    seconds = [0.5 * light] * HEAVY + [light] * LIGHT
    return [
        Use(f"g{i}", s * rng.lognormvariate(0, 0.3))
        for _ in range(count)
        for i, s in enumerate(seconds)
    ]


def played(uses: Sequence[Use], budget: int = BUDGET) -> Outcome:
    groups = dict.fromkeys([use.key for use in uses], SIZE)
    budgets = {Tier.HOST: budget, Tier.DISK: None}
    return simulate(groups, uses, budgets, bandwidth={(Tier.DISK, Tier.HOST): DISK})


def waited(outcome: Outcome, number: int) -> float:
    """The share of its computing that a round waited."""
    served = outcome.uses[number * ROUND : (number + 1) * ROUND]
    computed = outcome.computed_seconds / (len(outcome.uses) // ROUND)
    return sum(use.waited for use in served) / computed


def bytes_read(outcome: Outcome, number: int) -> int:
    """What a round read."""
    first, last = outcome.uses[number * ROUND], outcome.uses[(number + 1) * ROUND]
    return last.bytes_read - first.bytes_read


def settled(outcome: Outcome) -> float:
    """The share of computing that a round of the last ones waits, on average."""
    return sum(waited(outcome, number) for number in range(10, 16)) / 6


def test_an_uneven_loop_soon_waits_for_little() -> None:
    outcome = played(rounds(16))
    assert settled(outcome) <= 0.05
    least = ROUND * SIZE - BUDGET
    for number in range(2, 15):  # nor does any round read much more while the groups change
        assert least <= bytes_read(outcome, number) <= 1.2 * least


def test_by_farthest_next_use_alone_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the retention set makes the difference."""
    monkeypatch.setattr(RetentionSet, "begin_round", lambda *_: None)
    assert settled(played(rounds(16))) >= 0.12


def test_an_even_loop_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    uses = [Use(f"g{i}", 1.1 * SIZE / DISK) for i in range(40)] * 10
    before = played(uses, 20 * SIZE)
    monkeypatch.setattr(RetentionSet, "begin_round", lambda *_: None)
    assert played(uses, 20 * SIZE).reads == before.reads


def test_who_stayed_goes_when_the_loop_is_over() -> None:
    """Another model gets all of the memory."""
    second = [Use(f"other{i}", SIZE / DISK) for i in range(26)] * 12
    uses = [*rounds(12), *second]
    outcome = played(uses)
    reads_of_others = [n for key, n in outcome.reads.items() if key.startswith("other")]
    assert sum(reads_of_others) <= 3 * 26, "they fit, and are read about once"


def residents_after(uses: Sequence[str], budget: int, beside: int = 0) -> RetentionSet:
    """RetentionSet of a schedule that saw `uses`, in which every round computes and waits alike."""
    schedule = LearnedOrder()
    residents = RetentionSet(schedule, budget)
    residents.beside = beside
    for key in uses:
        schedule.advance_past(key)
        residents.passed(computed=1.0, waited=1.0)
        if length := residents.round_of(schedule.known.number(key)):
            order = schedule.ahead(length)
            residents.begin_round(order, np.full(len(order), 10), np.ones(len(order)), 10.0)
    return residents


def test_a_loop_within_a_loop_does_not_count() -> None:
    # Within a round, two groups take turns: small, and soon over.
    once = [f"g{i}" for i in range(20)] + ["a", "b"] * 4
    assert residents_after(once * 6, budget=190).staying
    assert not residents_after(["a", "b"] * 60, budget=190).staying


def test_before_an_order_is_learned_nobody_has_to_stay() -> None:
    keys = [f"g{i}" for i in range(40)]
    assert not residents_after(random.Random(1).choices(keys, k=400), budget=200).staying


def test_who_stays_may_go_once_the_loop_is_over() -> None:
    order = LearnedOrder()
    residents = RetentionSet(order, 190)

    def use_all(keys: Sequence[str]) -> None:
        for key in keys:
            order.advance_past(key)
            residents.passed(computed=1.0, waited=1.0)
            if length := residents.round_of(order.known.number(key)):
                ahead = order.ahead(length)
                sizes = np.full(len(ahead), 10)
                residents.begin_round(ahead, sizes, np.ones(len(ahead)), 10.0)

    loop = [f"g{number}" for number in range(30)]
    use_all(loop * 6)
    assert residents.staying
    use_all([f"once{number}" for number in range(len(loop) - 5)])
    assert residents.staying, "it may go on"
    use_all([f"later{number}" for number in range(2 * len(loop))])
    assert not residents.staying
