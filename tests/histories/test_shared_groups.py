"""Random histories with groups shared by another process: host memory then has two budgets."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.histories.logs import replay, write_log
from tests.histories.machine import MEMORY, History, Kind, World, land_all
from tests.lanes import by_lane
from tests.plan.driver import Driver
from tierstore.model.events import Event, SharedBudgetChanged
from tierstore.model.groups import GroupId
from tierstore.model.moves import Drop, Instruction
from tierstore.model.tiers import Access, HostAccess, Tier
from tierstore.plan.planner import Planner

SEEDS = by_lane(60, 150, 3000)
ALLOWED = (0, 4, 8, 8, 12, 20, 40)


class Sharing(History):
    """Half of the registered groups are shared, and their allowance changes occasionally."""

    def __init__(self, seed: int, policy: str, planner: Kind = Planner) -> None:
        self.seen: Counter[str] = Counter()
        super().__init__(seed, policy, planner)

    def register(self) -> None:
        if self.random.random() < 0.5:
            self.world.register(self._size(), guided=self.random.random() < 0.3, shared=True)
        else:
            super().register()

    def demand(self) -> None:
        if key := self._any_key():
            ways = [Access.READ, Access.READ, Access.TAKE]
            self.world.demand(
                key, self.random.choice(ways if self.is_shared(key) else list(Access))
            )

    def fetch(self) -> None:
        if key := self._any_key():
            ways = [HostAccess.READ] if self.is_shared(key) else list(HostAccess)
            self.world.fetch(key, self.random.choice(ways))

    def is_shared(self, key: GroupId) -> bool:
        return self.world.books.entries[key].shared

    def look(self) -> None:
        if self.random.random() < 0.2:
            self.allow(self.random.choice(ALLOWED))
        super().look()
        self.assert_idle_copies_left()

    def allow(self, nbytes: int) -> None:
        books, planner = self.world.books, self.world.planner
        used = books.shared_used
        self.world.allow(nbytes)
        self.seen["made room"] += books.shared_used < used
        self.seen["in use"] += planner.shared_used > nbytes
        allowed = planner.shared_budget
        assert allowed == max(nbytes, planner.shared_used), f"it says that {allowed} are allowed"

    def assert_idle_copies_left(self) -> None:
        """Check that excess copies leave when idle, even if in use when the allowance shrank."""
        books, inside = self.world.books, Driver(self.world.planner)
        if self.world.planner.shared_used <= books.shared_budget:
            return
        host, requests = books.host, inside.requests
        for group in inside.table.groups.values():
            if group.shared and group.present(host):
                kept = inside.table.in_use(group, host) or group in inside.table.promised
                assert kept or requests.is_waited_for(group, host), f"{group.id} should be gone"


def play(seed: int, policy: str, planner: Kind = Planner) -> Sharing:
    history = Sharing(seed, policy, planner)
    try:
        history.play(50)
        history.world.finish()
    except Exception as error:
        error.add_note(f"to repeat: play({seed}, {policy!r})")
        raise
    return history


@pytest.mark.parametrize("policy", ["next-use", "lru"])
def test_shared_groups_keep_every_promise(policy: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        history = play(seed, policy)
        world = history.world
        seen.update(history.seen)
        seen["on a device" if Tier.DEVICE in world.books.budgets else "on the CPU"] += 1
        seen.update(type(error).__name__ for _, error in world.errors)
    for what in ("made room", "in use", "on a device", "on the CPU", "BudgetError", "KeyError"):
        assert seen[what] >= SEEDS // 15, f"{what} hardly ever happened: {seen}"


@pytest.mark.parametrize("policy", ["next-use", "lru"])
def test_shared_history_replayed_gives_the_same_instructions(policy: str, tmp_path: Path) -> None:
    history = play(3, policy)
    world = history.world
    assert any(isinstance(event, SharedBudgetChanged) for _, event in world.log)
    file = tmp_path / "history.jsonl"
    write_log(file, world.log, world.books.budgets, policy, MEMORY)
    assert [instructions for _, instructions in replay(file)] == world.told


class HasMore(Planner):
    """Assumes a larger allowance than it has."""

    def handle(self, event: Event, now: float = 0.0) -> list[Instruction]:
        if isinstance(event, SharedBudgetChanged):
            event = SharedBudgetChanged(event.nbytes + 8)
        return super().handle(event, now)


class NeverHasLess(Planner):
    """Assumes the largest allowance that it ever had."""

    most = 0

    def handle(self, event: Event, now: float = 0.0) -> list[Instruction]:
        if isinstance(event, SharedBudgetChanged):
            self.most = max(self.most, event.nbytes)
            event = SharedBudgetChanged(self.most)
        return super().handle(event, now)


class ReturnsNothing(Planner):
    """Respects a smaller allowance for new copies, but keeps those that it has."""

    def handle(self, event: Event, now: float = 0.0) -> list[Instruction]:
        if isinstance(event, SharedBudgetChanged) and event.nbytes < self.shared_used:
            self.copies.shared.limit = event.nbytes
            return []
        return super().handle(event, now)


@pytest.mark.parametrize(
    ("planner", "symptom"),
    [
        (HasMore, "others lent"),
        (NeverHasLess, "are allowed"),
        (ReturnsNothing, "should be gone"),
    ],
)
def test_state_machine_notices_an_exceeded_allowance(planner: type[Planner], symptom: str) -> None:
    found = set()
    for seed in range(40):
        try:
            Sharing(seed, "lru", planner).play(50)
        except AssertionError as error:
            found.add(str(error))
    assert any(symptom in text for text in found), found


# Each budget separately --------------------------------------------------------------------------


def world_of(own: int, allowed: int, *, device: int = 0) -> World:
    world = World({Tier.HOST: own, Tier.DISK: None} | ({Tier.DEVICE: device} if device else {}))
    world.allow(allowed)
    return world


@pytest.mark.parametrize("device", [0, 16])
@pytest.mark.parametrize("shared", [True, False])
def test_shared_and_private_groups_never_wait_for_each_other(shared: bool, device: int) -> None:
    """Permanent leases hold all of one budget, and requests for the other one succeed."""
    world = world_of(8, 8, device=device)
    if shared:
        held = world.register(8)
        holder = world.fetch(held, HostAccess.PERMANENT)
        land_all(world)
        assert holder is not None
        assert world.hold(holder)
    else:
        held = world.register(8, shared=True)
        reader = world.fetch(held, HostAccess.READ)
        land_all(world)
        assert reader is not None
        assert world.hold(reader)
    for _ in range(2):
        waiter = world.demand(world.register(8, shared=shared))
        assert waiter is not None
        land_all(world)
        assert world.wake(waiter)
        world.release(waiter)
    drops = {(one.group, one.tier) for one in world.books.followed if isinstance(one, Drop)}
    assert (held, Tier.HOST) not in drops
    world.finish()
