"""Records: the state of a new one, the places of a group, and the group that a name refers to."""

from __future__ import annotations

import pytest

from tests.plan.driver import driver_of, group_of
from tierstore.model.events import RecoveredGroup
from tierstore.model.groups import GroupId
from tierstore.model.tiers import TIERS, Tier, UseOrder
from tierstore.plan.policy import policy_named
from tierstore.plan.records import CopyRecord, GroupRecord, State
from tierstore.plan.schedule import LearnedOrder


def test_record_new_has_only_given_fields() -> None:
    group, copy = GroupRecord(GroupId("a", 1), 5), CopyRecord(State.RESERVED)
    assert (group.sticky, group.forgotten) == (False,) * 2
    assert group.use_order is UseOrder.LEARNED
    assert (group.number, group.leases, group.copies) == (-1, 0, {})
    assert group.exclusive is None and group.host_lease is None and group.error is None
    assert group.backing is None
    assert (copy.began, copy.readers, copy.unwanted, copy.ending) == (0.0, 0, False, False)


def test_record_has_only_declared_fields() -> None:
    """Misspell a name: it is an error, not a new attribute."""
    for record in (GroupRecord(GroupId("a", 1), 5), CopyRecord(State.RESERVED)):
        with pytest.raises(AttributeError):
            record.reader = 1  # type: ignore[union-attr]


def test_record_lookup_changes_nothing() -> None:
    found = RecoveredGroup(GroupId("a", 0), 5, ())
    with pytest.raises(AttributeError):
        found.nbytes = 6  # type: ignore[misc]


def test_group_moves_if_any_copy_moves() -> None:
    group = GroupRecord(GroupId("a", 1), 5)
    group.copies = {Tier.HOST: CopyRecord(State.PRESENT), Tier.DISK: CopyRecord(State.PRESENT)}
    assert not group.moving()
    for tier in group.copies:
        group.copies[tier].readers = 1
        assert group.moving()
        group.copies[tier] = CopyRecord(State.ARRIVING)
        assert group.moving()
        group.copies[tier] = CopyRecord(State.PRESENT)


@pytest.mark.parametrize("backing", [None, Tier.DISK])
def test_copy_on_a_checkpoints_tier_alone_is_free(backing: Tier | None) -> None:
    group = GroupRecord(GroupId("a", 1), 5, backing)
    expected = {Tier.DEVICE: 5, Tier.HOST: 5, Tier.DISK: 0 if backing else 5}
    assert {tier: group.cost(tier) for tier in TIERS.values()} == expected


def test_name_means_its_newest_version() -> None:
    old, new = GroupId("a", 1), GroupId("a", 2)
    schedule = LearnedOrder()
    budgets = {Tier.HOST: 20, Tier.DISK: None}
    planner = driver_of(budgets, policy_named("lru", schedule), schedule)
    planner.register("b", 5)
    planner.register(old, 4)
    planner.demand(old)
    planner.arrive(old, Tier.DISK, Tier.HOST)
    planner.claim(new, 6)
    number = schedule.known.number(new.key)
    assert planner.table.numbered[number].id == new
    assert (planner.record(old).number, planner.record(new).number) == (-1, number)
    planner.fill(new)
    assert {g.id for g in planner.table.numbered.values()} == {group_of("b"), new}, "one per name"
    planner.check()
    planner.demand("b")
    planner.arrive("b", Tier.DISK, Tier.HOST)
    assert planner.all_there()
    planner.discard(old)
    assert planner.all_there(), "the group that the name now refers to is resident"
    planner.discard(new)
    assert number not in planner.table.numbered
    planner.check()


def test_record_counts_valid_and_moving_copies() -> None:
    group = GroupRecord(GroupId("a", 1), 7, Tier.DISK)
    group.copies[Tier.DISK] = CopyRecord(State.PRESENT)
    assert not group.valid_elsewhere(Tier.DISK)
    assert not group.moving()
    group.copies[Tier.HOST] = CopyRecord(State.RESERVED)
    assert not group.moving(), "no copy moves to space that is only reserved"
    assert not group.present(Tier.HOST)
    group.copies[Tier.HOST].state = State.ARRIVING
    assert group.moving()
    assert group.valid_elsewhere(Tier.HOST) and not group.valid_elsewhere(Tier.DISK)
    group.copies[Tier.HOST].state = State.PRESENT
    assert group.valid_elsewhere(Tier.DISK)
    group.copies[Tier.DISK].readers = 1
    assert group.moving()
    assert (group.cost(Tier.DISK), group.cost(Tier.HOST)) == (0, 7)
