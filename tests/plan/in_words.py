"""A planner whose steps are told in words, and which gives copies up in a known order."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from tierstore.model.moves import Copy, Drop, Forget, Instruction
from tierstore.model.tiers import Access, Hold, Tier
from tierstore.plan.planner import Planner
from tierstore.plan.schedule import LearnedOrder

DEVICE, HOST, DISK = Tier


class ByName:
    """Gives copies up in the order of the alphabet, whatever is used."""

    def __init__(self) -> None:
        self._there: dict[Tier, set[str]] = {tier: set() for tier in Tier}

    def admitted(self, key: str, tier: Tier) -> None:
        self._there[tier].add(key)

    def used(self, key: str) -> None:
        pass

    def dropped(self, key: str, tier: Tier) -> None:
        self._there[tier].remove(key)

    def keep(self, numbers: Collection[int], nearer: float) -> None:
        pass

    def victims(self, tier: Tier, rival: str | None) -> Iterator[str]:
        return iter(sorted(self._there[tier] - {rival}))


def planner_of(host: int, device: int | None = None, disk: int | None = None) -> Planner:
    budgets: dict[Tier, int | None] = {HOST: host, DISK: disk}
    if device is not None:
        budgets[DEVICE] = device
    return Planner(budgets, ByName(), LearnedOrder())


def in_words(instruction: Instruction) -> str:
    match instruction:
        case Copy(key, _, src, dst, urgent):
            return f"{key}: {src.name} to {dst.name}{'!' if urgent else ''}"
        case Drop(key, _, tier):
            return f"{key} leaves {tier.name}"
        case Forget(key):
            return f"{key} is gone"
    return f"{instruction.key} gets room on {instruction.tier.name}"


def told(planner: Planner) -> list[str]:
    planner.check()
    return [in_words(instruction) for instruction in planner.instructions()]


def put(planner: Planner, key: str, nbytes: int) -> None:
    """It is in host memory only."""
    planner.claim(key, nbytes, guided=True)
    assert told(planner)[-1] == f"{key} gets room on HOST"
    planner.arrived(key, HOST)


def register(planner: Planner, key: str, nbytes: int, *, backed: bool = True) -> None:
    planner.register(key, nbytes, backed=backed, guided=True)


def bring(planner: Planner, key: str, nbytes: int, *, backed: bool = True) -> None:
    """It is on disk and in host memory, and nobody wants it."""
    register(planner, key, nbytes, backed=backed)
    planner.fetch(key, Hold.READ)
    assert told(planner)[-1] == f"{key}: DISK to HOST!"
    planner.arrived(key, HOST, DISK)
    planner.withdraw_fetch(key, Hold.READ)


def raise_up(planner: Planner, key: str, nbytes: int) -> None:
    """It is demanded, and is on the device, in host memory and on disk."""
    bring(planner, key, nbytes)
    planner.demand(key)
    assert told(planner) == [f"{key}: HOST to DEVICE!"]
    planner.arrived(key, DEVICE, HOST)


def change(planner: Planner, key: str, nbytes: int) -> None:
    """It is on the device only, lent to who changes it."""
    raise_up(planner, key, nbytes)
    assert planner.lease(key, Access.UPDATE)
    assert told(planner) == [f"{key} leaves DISK", f"{key} leaves HOST"]


def lend(planner: Planner, key: str, nbytes: int) -> None:
    """It is lent, and nobody demands it any more."""
    bring(planner, key, nbytes)
    planner.demand(key)
    if planner.top is DEVICE:
        planner.arrived(key, DEVICE, HOST)
    assert planner.lease(key, Access.READ)
    told(planner)


def hold(planner: Planner, key: str, nbytes: int, purpose: Hold = Hold.READ) -> None:
    """Somebody has it in host memory, and it is on disk."""
    bring(planner, key, nbytes)
    planner.fetch(key, purpose)
    assert planner.hold(key, purpose)
    told(planner)
