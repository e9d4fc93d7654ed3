"""Random histories of the planner: every promise after every step, and liveness at the end."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.histories.machine import World, play
from tests.histories.mutants import DropsCopiesBeingRead
from tests.lanes import by_lane
from tierstore.model.events import Registered
from tierstore.model.groups import GroupId
from tierstore.model.tiers import Access, HostAccess, Tier, UseOrder
from tierstore.plan.planner import Planner

HISTORIES = 200
"""Number of seeds in the default lane.

The first ones show each fault of test_seeded_faults.py. test_recorded.py plays thousands more on
the same machine with all of its promises.
"""
STEPS = 50


@pytest.mark.parametrize("policy", ["next-use", "lru"])
def test_random_histories_keep_every_promise(policy: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(HISTORIES):
        world = play(seed, policy, STEPS)
        seen.update(type(i).__name__ for i in world.books.followed)
        seen.update(type(error).__name__ for _, error in world.errors)
    # The histories reach the rare cases, not just the common ones.
    for event in ("Copy", "Drop", "Reserve", "Forget", "InjectedError", "BudgetError", "KeyError"):
        assert seen[event] > HISTORIES // 20, f"{event} hardly ever happened: {seen}"


@pytest.mark.full("a third of the seeds shows as much", keep=["next-use-0"])
@pytest.mark.parametrize("first", range(0, 300, 100))
@pytest.mark.parametrize("policy", ["next-use", "lru"])
def test_random_routed_histories_keep_every_promise(policy: str, first: int) -> None:
    chosen = 0
    for seed in range(first, first + 100):
        world = play(seed, policy, STEPS, routed=True)
        chosen += sum(
            isinstance(event, Registered) and event.use_order is UseOrder.ROUTED
            for _, event in world.log
        )
    assert chosen > 100


class PlannerMachine(RuleBasedStateMachine):
    """The same world driven by Hypothesis, which shrinks failures."""

    planner: type[Planner] = Planner
    index = st.integers(0, 20)
    size = st.integers(1, 9)

    @initialize(
        host=st.sampled_from([None, 8, 12, 20]),
        disk=st.sampled_from([None, 20, 40]),
        device=st.sampled_from([0, 8, 12, 20]),
        policy=st.sampled_from(["next-use", "lru"]),
        sizes=st.lists(size, min_size=1, max_size=4),
    )
    def start(
        self, host: int | None, disk: int | None, device: int, policy: str, sizes: list[int]
    ) -> None:
        budgets = {Tier.HOST: host, Tier.DISK: disk}
        if device:
            budgets[Tier.DEVICE] = device
        self.world = World(budgets, policy, self.planner)
        for size in sizes:
            self.world.register(size)

    def _known(self, index: int) -> GroupId | None:
        keys = self.world.books.known()
        return keys[index % len(keys)] if keys else None

    @rule(index=index, access=st.sampled_from(Access))
    def demand(self, index: int, access: Access) -> None:
        if key := self._known(index):
            self.world.demand(key, access)

    @rule(index=index, purpose=st.sampled_from(HostAccess))
    def fetch(self, index: int, purpose: HostAccess) -> None:
        if key := self._known(index):
            self.world.fetch(key, purpose)

    @rule(size=size, index=index, replace=st.booleans(), guided=st.booleans())
    def claim(self, size: int, index: int, replace: bool, guided: bool) -> None:
        puts = [k.key for k in self.world.books.known() if k.key.startswith("put")]
        name = puts[index % len(puts)] if replace and puts else "put"
        self.world.claim(size, name, guided=guided)

    @rule(size=size, guided=st.booleans())
    def register(self, size: int, guided: bool) -> None:
        self.world.register(size, guided=guided)

    @rule(indices=st.lists(index, max_size=3), top=st.sampled_from([None, Tier.HOST]))
    def prefetch(self, indices: list[int], top: Tier | None) -> None:
        keys = [self._known(index) for index in indices]
        self.world.prefetch([key for key in keys if key], top)

    @rule(index=index, act=st.sampled_from(["offload", "save", "discard", "put_away"]))
    def put_away(self, index: int, act: str) -> None:
        if key := self._known(index):
            getattr(self.world, act)(key)

    @precondition(lambda self: self.world.books.moving)
    @rule(index=index, fails=st.booleans())
    def land(self, index: int, fails: bool) -> None:
        moving = self.world.books.moving
        (self.world.fail if fails else self.world.deliver)(moving[index % len(moving)])

    @precondition(lambda self: self.world.waiters)
    @rule(index=index, act=st.sampled_from(["wake", "wake", "give_up"]))
    def wait(self, index: int, act: str) -> None:
        getattr(self.world, act)(self.world.waiters[index % len(self.world.waiters)])

    @precondition(lambda self: self.world.fetchers)
    @rule(index=index, act=st.sampled_from(["hold", "hold", "withdraw_fetch"]))
    def hold(self, index: int, act: str) -> None:
        getattr(self.world, act)(self.world.fetchers[index % len(self.world.fetchers)])

    @precondition(lambda self: self.world.holders)
    @rule(index=index)
    def let_go(self, index: int) -> None:
        self.world.let_go(self.world.holders[index % len(self.world.holders)])

    @precondition(lambda self: self.world.claims)
    @rule(index=index, act=st.sampled_from(["fill", "fill", "withdraw_claim"]))
    def fill(self, index: int, act: str) -> None:
        getattr(self.world, act)(self.world.claims[index % len(self.world.claims)])

    @precondition(lambda self: self.world.savers)
    @rule(index=index)
    def look_saved(self, index: int) -> None:
        self.world.look_saved(self.world.savers[index % len(self.world.savers)])

    @precondition(lambda self: self.world.leases)
    @rule(index=index)
    def release(self, index: int) -> None:
        self.world.release(self.world.leases[index % len(self.world.leases)])

    def teardown(self) -> None:
        if hasattr(self, "world") and self.world.sound:
            self.world.finish()


MODERATE = settings(max_examples=by_lane(100, 300), stateful_step_count=40)
UNSHRUNK = settings(MODERATE, phases=[Phase.generate])


def test_hypothesis_histories_keep_every_promise() -> None:
    run_state_machine_as_test(PlannerMachine, settings=MODERATE)


def test_hypothesis_finds_a_seeded_fault() -> None:
    class Faulty(PlannerMachine):
        planner = DropsCopiesBeingRead

    with pytest.raises(AssertionError, match="dropped while it is read"):
        run_state_machine_as_test(Faulty, settings=UNSHRUNK)
