"""Records: what is true of a new one, where a group is, and who goes by its name."""

from __future__ import annotations

import pytest

from tierstore.model.groups import name_of, version_id
from tierstore.model.tiers import Tier
from tierstore.plan.planner import Planner
from tierstore.plan.policy import policy_named
from tierstore.plan.records import CopyRecord, Found, GroupRecord, State
from tierstore.plan.schedule import LearnedOrder


def test_of_a_new_record_nothing_is_known_but_what_is_said() -> None:
    group, copy = GroupRecord("a", 5), CopyRecord(State.RESERVED)
    assert (group.backed, group.guided, group.kept, group.forgotten) == (False,) * 4
    assert (group.number, group.leases, group.copies) == (-1, 0, {})
    assert group.exclusive is None and group.held is None and group.error is None
    assert (copy.began, copy.readers, copy.unwanted, copy.ending) == (0.0, 0, False, False)


def test_a_record_has_what_is_declared_and_nothing_else() -> None:
    """A name that is spelled wrongly is an error, and no new belief."""
    for record in (GroupRecord("a", 5), CopyRecord(State.RESERVED)):
        with pytest.raises(AttributeError):
            record.reader = 1  # type: ignore[union-attr]


def test_what_was_found_is_not_changed_by_who_finds_it() -> None:
    found = Found("a", 5, (), (), (), None, False, False, False, True, claimed=False)
    with pytest.raises(AttributeError):
        found.nbytes = 6  # type: ignore[misc]


def test_a_group_moves_if_any_of_its_copies_does() -> None:
    group = GroupRecord("a", 5)
    group.copies = {Tier.HOST: CopyRecord(State.PRESENT), Tier.DISK: CopyRecord(State.PRESENT)}
    assert not group.moving()
    for tier in group.copies:
        group.copies[tier].readers = 1
        assert group.moving()
        group.copies[tier] = CopyRecord(State.ARRIVING)
        assert group.moving()
        group.copies[tier] = CopyRecord(State.PRESENT)


@pytest.mark.parametrize("backed", [True, False])
def test_only_what_a_checkpoint_holds_is_free_and_only_on_disk(backed: bool) -> None:
    group = GroupRecord("a", 5, backed=backed)
    expected = {Tier.DEVICE: 5, Tier.HOST: 5, Tier.DISK: 0 if backed else 5}
    assert {tier: group.cost(tier) for tier in Tier} == expected


def test_a_name_is_that_of_its_newest_version() -> None:
    old, new = version_id("a", 1), version_id("a", 2)
    schedule = LearnedOrder()
    budgets = {Tier.HOST: 20, Tier.DISK: None}
    planner = Planner(budgets, policy_named("lru", schedule), schedule)
    planner.register("b", 5, backed=True)
    planner.register(old, 4, backed=True)
    planner.demand(old)
    planner.arrived(old, Tier.HOST, Tier.DISK)
    planner.claim(new, 6)
    number = schedule.number(name_of(new))
    assert planner._numbered[number].key == new
    assert (planner._groups[old].number, planner._groups[new].number) == (-1, number)
    planner.arrived(new, Tier.HOST)
    seen = planner._foresight
    assert (seen._known, seen._known_bytes) == (2, 5 + 6), "one of each name"
    planner.demand("b")
    planner.arrived("b", Tier.HOST, Tier.DISK)
    assert planner.all_there()
    planner.discard(old)
    assert planner.all_there(), "nothing is missing of what its name means now"
    planner.discard(new)
    assert (seen._known, seen._known_bytes) == (1, 5)
    assert number not in planner._numbered
