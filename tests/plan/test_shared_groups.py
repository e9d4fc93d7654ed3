"""Shared groups: in host memory they take another process's space, which has a separate budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from tests.plan.driver import Driver
from tests.plan.in_words import DEVICE, DISK, HOST, planner_of, told
from tierstore.errors import BudgetError
from tierstore.model import events
from tierstore.model.groups import GroupId
from tierstore.model.tiers import Access, HostAccess, UseOrder


def sharing(
    own: int, allowed: int, names: str = "", device: int | None = None, nbytes: int = 10
) -> Driver:
    """Return a planner: keys in capitals are shared, and none is expected."""
    planner = planner_of(own, device)
    planner.change_shared_budget(allowed)
    for name in names:
        register(planner, name, nbytes)
    return planner


def register(
    planner: Driver, name: str, nbytes: int = 10, use_order: UseOrder = UseOrder.PREFETCHED
) -> None:
    planner.register(name, nbytes, use_order=use_order, shared=name.isupper())


def come(planner: Driver, names: Iterable[str]) -> None:
    """Bring groups to the fastest tier, unused."""
    for name in names:
        lend(planner, name)
        planner.release(name, Access.READ)


def lend(planner: Driver, name: str, *, permanent: bool = False) -> None:
    planner.demand(name)
    if HOST not in planner.residence(planner.record(name).id):
        planner.arrive(name, DISK, HOST)
    if planner.top is DEVICE:
        planner.arrive(name, HOST, DEVICE)
    assert planner.lease(name, Access.READ, permanent=permanent)


def on_host(planner: Driver) -> str:
    planner.check()
    found = [group.key for group in planner.groups() if HOST in planner.residence(group)]
    return "".join(sorted(found))


# Two budgets -------------------------------------------------------------------------------------


def test_shared_and_private_budgets_fill_separately() -> None:
    planner = sharing(20, 20, "abAB")
    come(planner, "abAB")
    assert on_host(planner) == "ABab"
    assert (planner.used[HOST], planner.peak[HOST]) == (40, 40), "a tier counts all copies"
    assert (planner.shared_used, planner.shared_budget) == (20, 20)
    assert planner.budgets[HOST] == 20


def test_shared_demand_evicts_shared_copies_only() -> None:
    planner = sharing(20, 20, "abcABC")
    come(planner, "abAB")
    come(planner, "c")
    assert on_host(planner) == "ABbc"
    come(planner, "C")
    assert on_host(planner) == "BCbc"


def test_device_budget_covers_shared_and_private() -> None:
    planner = sharing(40, 40, "aBcD", device=20)
    come(planner, "aBcD")
    words = told(planner)
    assert [word for word in words if "leaves" in word] == ["B leaves DEVICE", "a leaves DEVICE"]
    assert planner.used[DEVICE] == 20
    assert on_host(planner) == "BDac"


def test_private_demand_does_not_block_shared_waiters() -> None:
    planner = sharing(10, 10, "abAB")
    lend(planner, "a")
    planner.demand("b")
    planner.demand("A")
    told(planner)
    planner.arrive("A", DISK, HOST)
    assert planner.lease("A", Access.READ)
    assert on_host(planner) == "Aa"


# Changing allowances -----------------------------------------------------------------------------


def test_shared_group_before_an_allowance_is_blocked() -> None:
    planner = planner_of(100)
    register(planner, "A")
    assert planner.shared_budget == 0
    with pytest.raises(BudgetError, match="start tierstore-serve with a larger --ram") as refused:
        planner.demand("A")
    assert (refused.value.tier, refused.value.nbytes, refused.value.budget) == ("HOST", 10, 0)
    with pytest.raises(BudgetError, match="tierstore-serve"):
        planner.demand_on_host("A", HostAccess.READ)


def test_shared_allowance_lowered_evicts_by_rank() -> None:
    planner = sharing(20, 40, "aABCD")
    come(planner, "aBDAC")
    told(planner)
    planner.change_shared_budget(25)
    assert told(planner) == ["A leaves HOST", "B leaves HOST"]
    planner.change_shared_budget(20)
    assert told(planner) == []


def test_shared_idle_copies_are_returned() -> None:
    planner = sharing(20, 40, "aABC")
    come(planner, "aABC")
    lend(planner, "B")
    planner.change_shared_budget(0)
    planner.change_shared_budget(40)
    assert on_host(planner) == "Ba"
    come(planner, "A")
    assert on_host(planner) == "ABa"


def test_shared_copy_in_use_stays_until_unused() -> None:
    planner = sharing(20, 40, "ABC")
    for name in "ABC":
        lend(planner, name)
    planner.change_shared_budget(10)
    assert on_host(planner) == "ABC"
    assert planner.shared_budget == 30
    planner.release("B", Access.READ)
    assert on_host(planner) == "AC"
    assert planner.shared_budget == 20
    with pytest.raises(BudgetError):
        register(planner, "D", 15)
        planner.demand("D")
    planner.release("C", Access.READ)
    planner.release("A", Access.READ)
    assert on_host(planner) == "A"
    assert planner.shared_budget == 10


def test_shared_reservation_unwanted_is_returned() -> None:
    """Offload the groups that were to move to the device."""
    planner = sharing(40, 20, "AB", device=20)
    lend(planner, "A")
    planner.demand_on_host("B", HostAccess.READ)
    planner.arrive("B", DISK, HOST)
    assert planner.lease_on_host("B", HostAccess.READ)
    planner.change_shared_budget(0)
    assert on_host(planner) == "B", "B has a host lease; A is needed on the device only"
    planner.release_on_host("B")
    assert on_host(planner) == ""
    assert planner.shared_budget == 0


def test_ram_budget_covers_private_groups_only() -> None:
    planner = sharing(40, 40, "abAB")
    register(planner, "C", 30)
    come(planner, "abAB")
    planner.change_budget(10)
    assert on_host(planner) == "ABb"
    assert planner.budgets[HOST] == 10, "the shared groups are larger, but need no space there"
    assert planner.shared_budget == 40


def test_shared_group_already_near_enough_is_granted() -> None:
    planner = sharing(40, 20, "AB", device=20)
    lend(planner, "A")
    planner.change_shared_budget(0)
    planner.demand("A")
    assert planner.lease("A", Access.READ)
    with pytest.raises(BudgetError):
        planner.demand_on_host("A", HostAccess.READ)
    with pytest.raises(BudgetError):
        planner.demand("B")


def test_shared_group_that_cannot_arrive_frees_device_space() -> None:
    planner = sharing(40, 10, "AaB", device=20, nbytes=10)
    planner.demand_on_host("B", HostAccess.READ)
    planner.arrive("B", DISK, HOST)
    assert planner.lease_on_host("B", HostAccess.READ)
    come(planner, "a")
    lend(planner, "a")
    planner.demand("A")
    assert planner.used[DEVICE] == 20, "space on the device is reserved for it"
    told(planner)
    planner.change_shared_budget(5)
    planner.check()
    assert planner.used[DEVICE] == 10
    planner.change_shared_budget(20)
    assert told(planner) == ["A: DISK to HOST!"]


# Errors of requests that would wait forever ------------------------------------------------------


@pytest.mark.parametrize("device", [None, 40])
def test_shared_waiter_with_lowered_allowance_raises(device: int | None) -> None:
    planner = sharing(40, 20, "AB", device=device)
    lend(planner, "A")
    planner.demand_on_host("B", HostAccess.READ)
    planner.arrive("B", DISK, HOST)
    assert planner.lease_on_host("B", HostAccess.READ)
    register(planner, "C", 20)
    planner.demand("C")
    planner.change_shared_budget(5)
    planner.release_on_host("B")
    assert planner.error_of(planner.record("C").id) is None, "a group is still leased"
    planner.release("A", Access.READ)
    error = planner.error_of(planner.record("C").id)
    assert isinstance(error, BudgetError)
    assert str(error).endswith("is 5 bytes: start tierstore-serve with a larger --ram")
    assert on_host(planner) == ""


def test_shared_waiter_behind_permanent_leases_raises() -> None:
    planner = sharing(40, 20, "aABC")
    lend(planner, "a", permanent=True)
    lend(planner, "A", permanent=True)
    lend(planner, "B", permanent=True)
    more = "20 bytes are in use there permanently; start tierstore-serve with a larger --ram"
    planner.demand("C")
    assert more in str(planner.error_of(planner.record("C").id))
    planner.withdraw("C")
    planner.demand_on_host("C", HostAccess.READ)
    assert more in str(planner.error_of(planner.record("C").id))


def test_private_waiter_error_names_its_budget() -> None:
    planner = sharing(20, 20, "abcA")
    for name in "abA":
        lend(planner, name, permanent=True)
    planner.demand("c")
    error = str(planner.error_of(planner.record("c").id))
    assert "20 bytes are in use there permanently; raise ram_budget to at least 30 bytes" in error


def test_shared_group_reserves_no_device_space_forever() -> None:
    planner = sharing(10, 10, "aA", device=10)
    planner.claim("x", 10)
    planner.fill("x")
    planner.demand("x")
    planner.arrive("x", HOST, DEVICE)
    assert planner.lease("x", Access.UPDATE)
    planner.release("x", Access.UPDATE)
    planner.demand_on_host("a", HostAccess.PERMANENT)
    planner.arrive("a", DISK, HOST)
    assert planner.lease_on_host("a", HostAccess.PERMANENT)
    planner.demand("A")
    error = str(planner.error_of(planner.record("A").id))
    assert "10 bytes are in use there permanently, which leaves no space for group 'x'" in error
    assert error.endswith("raise ram_budget")


# Prefetches --------------------------------------------------------------------------------------


def early(planner: Driver) -> str:
    return "".join(word[0] for word in told(planner) if word.endswith("DISK to HOST"))


@pytest.mark.parametrize(("order", "own", "allowed"), [("aA", 10, 100), ("Aa", 100, 10)])
def test_shared_group_without_space_lets_private_prefetch(
    order: str, own: int, allowed: int
) -> None:
    planner = sharing(own, allowed, "xXaA")
    lend(planner, "x" if order[0] == "a" else "X")
    told(planner)
    planner.expect(order)
    assert early(planner) == order[1]


def test_shared_expected_group_arrives_once_allowed() -> None:
    planner = sharing(10, 0, "A")
    planner.expect("A")
    assert early(planner) == ""
    planner.change_shared_budget(10)
    assert early(planner) == "A"


def test_prefetch_amount_follows_both_budgets() -> None:
    def fetched(allowed: int, *, shared: bool) -> int:
        planner = planner_of(400)
        planner.change_shared_budget(allowed)
        names = "ABCDEFGH" if shared else "abcdefgh"
        for name in names:
            register(planner, name, 50)
        planner.expect(names)
        return len(early(planner))

    assert fetched(400, shared=False) == fetched(0, shared=False), "no group is shared"
    assert fetched(400, shared=True) > fetched(400, shared=False)


# Shared groups are never updated, and always in a file -------------------------------------------


def change_on_top(planner: Driver) -> None:
    planner.release("A", Access.READ)
    planner.lease("A", Access.UPDATE, demanded=False)


def change_on_host(planner: Driver) -> None:
    planner.release("A", Access.READ)
    planner.demand_on_host("A", HostAccess.UPDATE)
    planner.lease_on_host("A", HostAccess.UPDATE)


def register_without_a_file(planner: Driver) -> None:
    planner.register("C", 5, backing=False, shared=True)


def lose_its_file(planner: Driver) -> None:
    planner.record("A").backing = None
    planner.table.used[DISK] += 10
    planner.table.pools[DISK].used += 10
    planner.check()


def miscount_shared_bytes(planner: Driver) -> None:
    planner.table.shared.used -= 10
    planner.check()


def count_it_as_own(planner: Driver) -> None:
    planner.table.pools[HOST].used += 10
    planner.check()


def have_two_budgets(planner: Driver) -> None:
    planner.table.pools[HOST].limit = 41
    planner.check()


@pytest.mark.parametrize(
    ("breakage", "symptom"),
    [
        (change_on_top, "A belongs to another process"),
        (change_on_host, "A belongs to another process"),
        (register_without_a_file, "C is shared but not backed by a file"),
        (lose_its_file, "A is shared but not backed by a file"),
        (miscount_shared_bytes, "HOST: 10 are shared, counts 0"),
        (count_it_as_own, "HOST: 0 are not shared, counts 10"),
        (have_two_budgets, "HOST: a budget of 40, and of 41"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_invariant_check_notices_shared_faults(
    breakage: Callable[[Driver], None], symptom: str
) -> None:
    planner = sharing(40, 40, "A")
    lend(planner, "A")
    planner.check()
    with pytest.raises(AssertionError, match=symptom):
        breakage(planner)


# After an interrupted step -----------------------------------------------------------------------


def test_recovered_planner_knows_shared_groups() -> None:
    found = events.RecoveredGroup(
        GroupId("A", 0), 10, (HOST, DISK), backing=DISK, shared=True, use_order=UseOrder.PREFETCHED
    )
    planner = planner_of(5)
    planner.change_shared_budget(10)
    planner.recover([found])
    assert on_host(planner) == "A"
    assert planner.shared_used == 10

    planner = planner_of(5)
    planner.recover([found])
    assert on_host(planner) == "", "no shared bytes are allowed"


def test_name_may_be_shared_and_then_private() -> None:
    planner = sharing(40, 40, "A")
    come(planner, "A")
    planner.claim(GroupId("A", 1), 10)
    planner.fill(GroupId("A", 1))
    assert (planner.shared_used, planner.used[HOST]) == (10, 20)
    planner.discard("A")
    planner.check()
    assert (planner.shared_used, planner.used[HOST]) == (0, 10)
