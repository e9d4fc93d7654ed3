"""A planner with steps as text, which evicts in a known order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from tests.plan.driver import Driver, driver_of
from tierstore.model.groups import GroupId
from tierstore.model.moves import Copy, Drop, Forget, Instruction
from tierstore.model.tiers import TIERS, Access, HostAccess, Tier, UseOrder
from tierstore.plan.schedule import LearnedOrder

DEVICE, HOST, DISK = TIERS.values()


class ByName:
    """Evicts copies in alphabetical order, regardless of use."""

    def __init__(self) -> None:
        self._there: defaultdict[Tier, set[GroupId]] = defaultdict(set)

    def admitted(self, group: GroupId, tier: Tier) -> None:
        self._there[tier].add(group)

    def used(self, group: GroupId) -> None:
        pass

    def dropped(self, group: GroupId, tier: Tier) -> None:
        self._there[tier].remove(group)

    def victims(self, tier: Tier, rival: GroupId | None) -> Iterator[GroupId]:
        return iter(sorted(self._there[tier] - {rival}))


def planner_of(host: int, device: int | None = None, disk: int | None = None) -> Driver:
    budgets: dict[Tier, int | None] = {HOST: host, DISK: disk}
    if device is not None:
        budgets[DEVICE] = device
    return driver_of(budgets, ByName(), LearnedOrder())


def in_words(instruction: Instruction) -> str:
    match instruction:
        case Copy(key, _, src, dst, urgent):
            return f"{key}: {src.name} to {dst.name}{'!' if urgent else ''}"
        case Drop(key, _, tier):
            return f"{key} leaves {tier.name}"
        case Forget(key):
            return f"{key} is gone"
    return f"{instruction.group} gets room on {instruction.tier.name}"


def told(planner: Driver) -> list[str]:
    planner.check()
    return [in_words(instruction) for instruction in planner.instructions()]


def put(planner: Driver, key: str, nbytes: int) -> None:
    """Put a group, which is then only in host memory."""
    planner.claim(key, nbytes, use_order=UseOrder.PREFETCHED)
    assert told(planner)[-1] == f"{key} gets room on HOST"
    planner.fill(key)


def register(planner: Driver, key: str, nbytes: int, *, backing: bool = True) -> None:
    planner.register(key, nbytes, backing=backing, use_order=UseOrder.PREFETCHED)


def bring(planner: Driver, key: str, nbytes: int, *, backing: bool = True) -> None:
    """Bring a group to disk and host memory, without a demand."""
    register(planner, key, nbytes, backing=backing)
    planner.demand_on_host(key, HostAccess.READ)
    assert told(planner)[-1] == f"{key}: DISK to HOST!"
    planner.arrive(key, DISK, HOST)
    planner.withdraw_on_host(key, HostAccess.READ)


def raise_up(planner: Driver, key: str, nbytes: int) -> None:
    """Demand a group, which is then on the device, in host memory and on disk."""
    bring(planner, key, nbytes)
    planner.demand(key)
    assert told(planner) == [f"{key}: HOST to DEVICE!"]
    planner.arrive(key, HOST, DEVICE)


def change(planner: Driver, key: str, nbytes: int) -> None:
    """Lease a group for update: it is then only on the device."""
    raise_up(planner, key, nbytes)
    assert planner.lease(key, Access.UPDATE)
    assert told(planner) == [f"{key} leaves DISK", f"{key} leaves HOST"]


def lend(planner: Driver, key: str, nbytes: int) -> None:
    """Lease a group, without a further demand."""
    bring(planner, key, nbytes)
    planner.demand(key)
    if planner.top is DEVICE:
        planner.arrive(key, HOST, DEVICE)
    assert planner.lease(key, Access.READ)
    told(planner)


def hold(planner: Driver, key: str, nbytes: int, purpose: HostAccess = HostAccess.READ) -> None:
    """Lease a group in host memory, which is also on disk."""
    bring(planner, key, nbytes)
    planner.demand_on_host(key, purpose)
    assert planner.lease_on_host(key, purpose)
    told(planner)
