"""When it is chosen anew who stays: each rule at its border, told round by round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from tierstore.plan.retention import RetentionSet, even_load, visits
from tierstore.plan.schedule import LearnedOrder


class Told(LearnedOrder):
    """A schedule that says of rounds what it is told to say."""

    length = 0
    repeating = True

    def round(self, number: int) -> int:
        return self.length

    def repeats(self, length: int) -> bool:
        return self.repeating


SIZE = 10
GROUPS = 51
BUDGET = 180
"""Three groups are a sixth of it, which is left to what streams: 15 may stay, 360 bytes do not."""


@dataclass
class Loop:
    """A loop over groups of SIZE bytes, and all there is to say of its rounds."""

    budget: int | None = BUDGET
    groups: int = GROUPS
    schedule: Told = field(default_factory=Told)

    def __post_init__(self) -> None:
        self.retention = RetentionSet(self.schedule, self.budget)
        self.uses = 0
        self.latest = 0  # the length of the latest round

    def use(self, count: int = 1) -> list[int]:
        """The next uses, no group twice in a row: what is said of each."""
        self.uses += count
        return [self.retention.round_of(use % 7) for use in range(self.uses - count, self.uses)]

    def round(
        self,
        computed: float = 100.0,
        waited: float = 700.0,
        *,
        speed: float = 1.0,
        order: Sequence[int] = (),
        size: int = SIZE,
        uses: int = 0,
        seconds: Sequence[float] = (),
    ) -> bool:
        """A round passes and another begins. Whether there is another choice."""
        order = order or range(self.groups)
        before = self.retention.staying
        self.schedule.length = 0
        self.use(max(uses, len(order), self.latest) - 1)
        self.latest = len(order)
        self.retention.passed(computed=computed)
        self.retention.passed(waited=waited)
        self.schedule.length = len(order)
        assert self.use() == [len(order)]
        self.retention.begin_round(
            np.array(order, dtype=np.int64),
            np.full(len(order), size),
            np.array(seconds or [1.0] * len(order)),
            speed,
        )
        return self.retention.staying is not before


def test_a_round_begins_once_as_many_uses_passed_as_it_has() -> None:
    for length, expected in ((5, [0, 0, 0, 0, 5]), (1, [1, 1, 1, 1, 1]), (6, [0] * 5)):
        loop = Loop()
        loop.schedule.length = length
        assert loop.use(5) == expected


def test_where_no_round_is_known_or_the_last_one_was_another_none_begins() -> None:
    loop = Loop()
    assert loop.use(10) == [0] * 10
    loop.schedule.length, loop.schedule.repeating = 3, False
    assert loop.use(10) == [0] * 10
    loop.schedule.repeating = True
    assert loop.use() == [3], "it is asked each time until it does"


def test_without_a_budget_no_round_is_looked_at() -> None:
    loop = Loop(budget=None)
    loop.schedule.length = 1
    assert loop.use(5) == [0] * 5


def test_one_group_many_times_in_a_row_is_one_use() -> None:
    loop = Loop()
    loop.schedule.length = 3
    assert [loop.retention.round_of(n) for n in (0, 0, 1, 1, 1, 0, 0)] == [0, 0, 0, 0, 0, 3, 0]


def test_a_round_that_does_not_count_is_looked_at_once_per_round() -> None:
    loop = Loop()
    loop.schedule.length = 4
    assert loop.use(13) == [0, 0, 0, 4, 0, 0, 0, 4, 0, 0, 0, 4, 0]
    loop.schedule.length = 2
    assert loop.use(5) == [0, 0, 2, 0, 2], "not before the latest one is over"


def test_a_round_counts_from_where_the_one_before_it_began() -> None:
    loop = Loop()
    loop.round()
    loop.schedule.length = GROUPS - 3
    assert loop.use(GROUPS - 1) == [0] * (GROUPS - 1), "a round is under way"
    assert loop.use() == [GROUPS - 3]


def settled_loop() -> Loop:
    """A loop with somebody who stays."""
    loop = Loop()
    assert loop.retention.nearer == 1.0, "as far as ever"
    assert not loop.round(), "there is nothing to compare it with"
    assert loop.retention.staying == []
    assert loop.round()
    assert loop.retention.staying
    return loop


def test_the_choice_is_that_of_an_even_load() -> None:
    """One group comes again after 90 other bytes, half the budget: one visit. One after 100."""
    again = [n for part in range(3) for n in (60, *range(9 * part, 9 * part + 9))]
    anew = [n for part in range(3, 6) for n in (61, *range(10 * part, 10 * part + 10))]
    order = again + anew
    seconds = [1.0 if use < 30 else 4.0 for use in range(len(order))]
    arrays = np.array(order, dtype=np.int64), np.full(len(order), SIZE), np.array(seconds)

    def choice(near: int, room: int, ahead: int) -> set[int]:
        found = even_load(visits(*arrays, near), room=room, ahead=ahead)
        assert found is not None
        return set(found.staying)

    loop = Loop()
    loop.round(order=order, seconds=seconds)
    assert loop.round(order=order, seconds=seconds)
    assert set(loop.retention.staying) == choice(90, room=150, ahead=30)
    assert 61 in loop.retention.staying
    assert 60 not in loop.retention.staying
    for near, room, ahead in ((100, 150, 30), (80, 150, 30), (90, 160, 30), (90, 150, 40)):
        other = choice(near, room, ahead)
        assert other != set(loop.retention.staying), "it would not be noticed"


@pytest.mark.parametrize(("waited", "chosen"), [(560.0, True), (559.9, False), (700.0, True)])
def test_who_waits_eight_tenths_of_what_they_did_has_settled(waited: float, chosen: bool) -> None:
    loop = Loop()
    loop.round(waited=700.0)
    assert loop.round(waited=waited) == chosen


def test_what_a_round_waits_is_compared_with_the_one_before_it() -> None:
    loop = Loop()
    assert [loop.round(waited=w) for w in (700.0, 500.0, 350.0, 300.0)] == [
        *(False, False, False),
        True,
    ]


@pytest.mark.parametrize(("groups", "uses", "chosen"), [(52, 78, True), (52, 79, False)])
def test_a_round_with_more_than_half_of_itself_in_between_says_nothing(
    groups: int, uses: int, chosen: bool
) -> None:
    loop = Loop(groups=groups)
    loop.round()
    assert loop.round(uses=uses) == chosen


# What streams is 360 bytes. A round that takes 800 s now must take at most 720 then.
@pytest.mark.parametrize(
    ("computed", "waited", "speed", "chosen"),
    [
        (400.0, 400.0, 0.5, True),
        (400.0, 400.0, 0.499, False),
        (720.0, 80.0, 1.0, True),
        (721.0, 79.0, 1.0, False),
        (100.0, 700.0, 0.5, True),
        (0.0, 800.0, 0.499, False),
    ],
)
def test_a_choice_must_save_a_tenth_of_the_round(
    computed: float, waited: float, speed: float, chosen: bool
) -> None:
    loop = Loop()
    loop.round(computed, waited, speed=speed)
    assert loop.round(computed, waited, speed=speed) == chosen


def test_what_passed_in_earlier_rounds_does_not_count() -> None:
    loop = Loop()
    loop.round(9000.0, 80.0)
    assert not loop.round(721.0, 79.0)
    assert loop.round(720.0, 80.0)


def test_seconds_add_up() -> None:
    loop = Loop()
    for chosen in (False, True):
        loop.retention.passed(computed=300.0, waited=30.0)
        assert loop.round(420.0, 50.0) == chosen


@pytest.mark.parametrize(("budget", "chosen"), [(BUDGET, True), (BUDGET - 1, False)])
def test_three_groups_must_be_a_sixth_of_the_room_at_most(budget: int, chosen: bool) -> None:
    loop = Loop(budget)
    loop.round()
    assert loop.round() == chosen


def test_a_loop_that_fits_needs_no_choice() -> None:
    for groups, chosen in ((18, False), (19, True)):
        loop = Loop(groups=groups)
        loop.round()
        assert loop.round() == chosen or not loop.retention.staying
        assert bool(loop.retention.staying) == chosen


def test_a_loop_in_half_of_the_room_is_within_a_larger_one() -> None:
    """Each group counts once, however often it comes."""
    for order in (range(9), [*range(9), *range(9)]):
        loop = settled_loop()
        assert not loop.round(order=order)
        assert loop.retention.staying
        assert loop.retention.nearer == pytest.approx(0.7)
    loop = settled_loop()
    assert loop.round(order=range(10)), (
        "it takes more than half of the room: who stays is not in it"
    )
    assert loop.retention.staying == []


@pytest.mark.parametrize(("groups", "goes"), [(18, True), (19, False)])
def test_who_stayed_goes_once_all_fit(groups: int, goes: bool) -> None:
    loop = settled_loop()
    staying = loop.retention.staying
    others = [number for number in range(GROUPS) if number not in staying]
    assert loop.round(order=[*staying, *others[: groups - len(staying)]]) == goes
    assert bool(loop.retention.staying) != goes


def test_who_stayed_goes_if_the_loop_is_another() -> None:
    loop = settled_loop()
    assert not loop.round(order=range(GROUPS))
    loop = settled_loop()
    assert loop.round(order=range(40, 40 + GROUPS))
    assert loop.retention.staying == [], "and nothing else is chosen so soon"


def test_the_choice_changes_after_two_rounds_then_four_then_eight() -> None:
    loop = Loop()
    chosen = [number for number in range(1, 40) if loop.round()]
    assert chosen == [2, 2 + 2, 4 + 4, 8 + 8, 16 + 16]


def test_a_loop_of_another_length_is_not_waited_for() -> None:
    loop = Loop()
    lengths = [GROUPS] * 5 + [GROUPS + 1] * 5
    chosen = [number for number, n in enumerate(lengths, 1) if loop.round(order=range(n))]
    assert chosen == [2, 4, 6, 8]


def test_round_by_round_who_stays_counts_as_needed_sooner() -> None:
    loop = settled_loop()
    nearer = [loop.retention.nearer]
    for _ in range(6):
        loop.round()
        nearer.append(loop.retention.nearer)
    once, twice, thrice, four = 0.7, 0.49, 0.343, 0.2401
    assert nearer == pytest.approx([once, twice, once, twice, thrice, four, once])


def test_who_stays_may_go_when_two_rounds_passed_and_none_began() -> None:
    loop = settled_loop()
    loop.schedule.length = 0
    loop.use(2 * GROUPS)
    assert loop.retention.staying
    loop.use()
    assert loop.retention.staying == []
    assert loop.retention.nearer == pytest.approx(0.7), "whoever is chosen next begins like this"


def test_a_round_that_begins_late_is_no_end_of_the_loop() -> None:
    loop = settled_loop()
    loop.schedule.repeating = False
    loop.use(2 * GROUPS)
    loop.schedule.length, loop.schedule.repeating = GROUPS, True
    assert loop.use() == [GROUPS]
    assert loop.retention.staying


def test_bytes_and_seconds_are_told_of_every_use() -> None:
    three, two = np.arange(3), np.ones(2)
    with pytest.raises(ValueError, match="shorter"):
        RetentionSet(Told(), BUDGET).begin_round(three, two.astype(np.int64), np.ones(3), 1.0)
    with pytest.raises(ValueError, match="shorter"):
        visits(three, np.full(3, SIZE), two, 0)
