"""A simulated run: its clock and its bytes add up, and its budgets hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.errors import BudgetError
from tierstore.model.events import Arrived, Event
from tierstore.model.moves import Copy, Instruction
from tierstore.model.tiers import Tier
from tierstore.plan.planner import Planner
from tierstore.simulation import Clock, Hop, Outcome, Use, planner_with_groups, play, simulate

TO_HOST = (Tier.DISK, Tier.HOST)
TO_DEVICE = (Tier.HOST, Tier.DEVICE)
SPEED = {TO_HOST: 100.0, TO_DEVICE: 400.0}  # bytes per second


def on_host(nbytes: int) -> dict[Tier, int | None]:
    return {Tier.HOST: nbytes, Tier.DISK: None}


def with_device(device: int, host: int) -> dict[Tier, int | None]:
    return {Tier.DEVICE: device, **on_host(host)}


def loop(groups: Mapping[str, int], passes: int, seconds: float) -> list[Use]:
    return [Use(key, seconds) for key in groups] * passes


def equal(count: int, nbytes: int = 100) -> dict[str, int]:
    return {f"g{number}": nbytes for number in range(count)}


# --- the clock ------------------------------------------------------------------------------------


def test_simulated_demand_is_waited_for() -> None:
    outcome = simulate({"a": 250}, [Use("a", 2.0)], on_host(250), bandwidth=SPEED)
    (use,) = outcome.uses
    assert (use.start, use.waited, use.bytes_read, use.found) == (2.5, 2.5, 250, "miss")
    assert (outcome.seconds, outcome.computed_seconds, outcome.stalled_seconds) == (4.5, 2.0, 2.5)
    assert outcome.bytes_moved == {TO_HOST: 250}


def test_simulated_resident_group_is_not_waited_for_again() -> None:
    outcome = simulate({"a": 250}, [Use("a", 1.0)] * 3, on_host(250), bandwidth=SPEED)
    assert [use.waited for use in outcome.uses] == [2.5, 0.0, 0.0]
    assert (outcome.hits, outcome.late, outcome.misses) == (2, 0, 1)


@pytest.mark.parametrize(("seconds", "waited"), [(1.0, 0.0), (3.0, 0.0), (0.25, 0.75), (0.0, 1.0)])
def test_simulated_compute_hides_reads_of_its_length(seconds: float, waited: float) -> None:
    uses = [Use("a", seconds), Use("b", seconds)]
    outcome = simulate(equal_named("a", "b"), uses, on_host(200), bandwidth=SPEED)
    assert [use.waited for use in outcome.uses] == [1.0, waited]
    assert outcome.uses[1].found == ("hit" if not waited else "late")
    assert outcome.seconds == 1.0 + seconds + waited + seconds


def equal_named(*keys: str) -> dict[str, int]:
    return dict.fromkeys(keys, 100)


def test_simulation_without_prefetch_hides_nothing() -> None:
    uses = [Use("a", 3.0), Use("b", 3.0)]
    outcome = simulate(equal_named("a", "b"), uses, on_host(200), bandwidth=SPEED, prefetch=False)
    assert [use.waited for use in outcome.uses] == [1.0, 1.0]
    assert outcome.misses == 2


def test_simulated_wait_covers_both_hops() -> None:
    outcome = simulate({"a": 200}, [Use("a", 1.0)], with_device(200, 200), bandwidth=SPEED)
    assert outcome.uses[0].waited == 2.0 + 0.5
    assert outcome.bytes_moved == {TO_HOST: 200, TO_DEVICE: 200}


def test_simulated_move_without_speed_takes_no_time() -> None:
    groups = equal(5)
    outcome = simulate(groups, loop(groups, 3, 2.0), on_host(200))
    assert outcome.stalled_seconds == 0
    assert outcome.seconds == 15 * 2.0
    assert outcome.bytes_moved[TO_HOST] >= 500


def test_simulated_lru_loop_is_read_whole_each_pass() -> None:
    groups = equal(4)
    outcome = simulate(
        groups,
        loop(groups, 3, 1.0),
        on_host(300),
        bandwidth=SPEED,
        policy="lru",
        prefetch=False,
    )
    assert outcome.misses == 12
    assert outcome.bytes_moved == {TO_HOST: 12 * 100}
    assert outcome.stalled_seconds == 12.0


def test_simulated_compute_as_long_as_reads_hides_them() -> None:
    """Let half of the groups fit, and let reading one take as long as computing with one."""
    groups = equal(20)
    uses = loop(groups, 12, 1.0)
    hidden = simulate(groups, uses, on_host(1000), bandwidth=SPEED)
    shown = simulate(groups, uses, on_host(1000), bandwidth=SPEED, prefetch=False)
    learned = slice(3 * len(groups), None)
    stalled = sum(use.waited for use in hidden.uses[learned])
    computed = 9 * len(groups) * 1.0
    assert stalled <= 0.03 * computed
    assert sum(use.waited for use in shown.uses[learned]) > 0.4 * computed, (
        "the control has nothing to hide"
    )


def test_simulated_group_that_never_fits_raises() -> None:
    with pytest.raises(BudgetError, match="ram_budget"):
        simulate({"a": 300}, [Use("a", 1.0)], on_host(299))


def test_simulated_unknown_group_raises() -> None:
    with pytest.raises(KeyError):
        simulate({"a": 100}, [Use("b", 1.0)], on_host(200))


def test_simulation_is_deterministic() -> None:
    groups = equal(9)
    runs = [simulate(groups, loop(groups, 6, 0.7), on_host(500), bandwidth=SPEED) for _ in range(2)]
    assert runs[0] == runs[1]


# --- invariants -----------------------------------------------------------------------------------


class Watched:
    """A planner that is checked at every event, and whose copies are recorded."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.copies: list[Copy] = []
        self.arrivals: Counter[Hop] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.planner, name)

    def handle(self, event: Event, now: float) -> list[Instruction]:
        found = self.planner.handle(event, now)
        self.planner.check()
        self.copies += [one for one in found if isinstance(one, Copy)]
        if isinstance(event, Arrived):
            arrived = [copy.nbytes for copy in self.copies if copy.group == event.group]
            self.arrivals[event.src, event.dst] += arrived[0]
        return found


def watched_run(
    groups: Mapping[str, int],
    uses: Sequence[Use],
    budgets: Mapping[Tier, int | None],
    bandwidth: Mapping[Hop, float] | None = None,
    **options: Any,
) -> tuple[Outcome, Watched]:
    """Run `simulate`. Returns the outcome and the planner."""
    clock = Clock()
    watched = Watched(planner_with_groups(groups, budgets, clock, **options))
    return play(cast(Planner, watched), clock, uses, bandwidth or {}), watched


@st.composite
def runs(draw: st.DrawFn) -> tuple[dict[str, int], list[Use], dict[Tier, int | None]]:
    sizes = draw(st.lists(st.integers(1, 60), min_size=1, max_size=7))
    groups = {f"g{number}": nbytes for number, nbytes in enumerate(sizes)}
    seconds = st.sampled_from([0.0, 0.1, 0.5, 2.0])
    uses = [
        Use(key, draw(seconds))
        for key in draw(st.lists(st.sampled_from(list(groups)), min_size=1, max_size=12))
    ] * draw(st.integers(1, 5))
    room = st.integers(max(sizes), sum(sizes) + 10)
    budgets = on_host(draw(room))
    if draw(st.booleans()):
        budgets = with_device(draw(room), draw(room))
    return groups, uses, budgets


@settings(deadline=None, max_examples=150)
@given(
    run=runs(),
    policy=st.sampled_from(["next-use", "lru"]),
    prefetch=st.booleans(),
    timed=st.booleans(),
)
def test_simulation_totals_add_up_within_budgets(
    run: tuple[dict[str, int], list[Use], dict[Tier, int | None]],
    policy: str,
    prefetch: bool,
    timed: bool,
) -> None:
    groups, uses, budgets = run
    bandwidth = SPEED if timed else None
    outcome, planner = watched_run(
        groups, uses, budgets, bandwidth, policy=policy, prefetch=prefetch
    )
    assert outcome == simulate(
        groups, uses, budgets, bandwidth=bandwidth, policy=policy, prefetch=prefetch
    )
    check_clock(outcome, uses)
    check_bytes(outcome, planner, groups)
    assert_within(outcome, budgets)
    if not timed:
        assert outcome.stalled_seconds == 0


def check_clock(outcome: Outcome, uses: Sequence[Use]) -> None:
    """Check that on one thread every second is computing or waiting."""
    now = 0.0
    for use, served in zip(uses, outcome.uses, strict=True):
        assert served.key == use.key
        assert served.start == pytest.approx(now + served.waited)
        assert served.waited >= 0
        now = served.start + use.seconds
    assert outcome.seconds == pytest.approx(now)
    spent = outcome.computed_seconds + outcome.stalled_seconds
    assert outcome.seconds == pytest.approx(spent)
    found = Counter(served.found for served in outcome.uses)
    assert found == +Counter(hit=outcome.hits, late=outcome.late, miss=outcome.misses)


def check_bytes(outcome: Outcome, planner: Watched, groups: Mapping[str, int]) -> None:
    """Check that exactly the instructed moves arrived, and every group."""
    assert outcome.bytes_moved == dict(planner.arrivals)
    instructed: Counter[Hop] = Counter()
    for copy in planner.copies:
        assert copy.nbytes == groups[copy.group.key]
        instructed[copy.src, copy.dst] += copy.nbytes
    assert all(planner.arrivals[way] <= nbytes for way, nbytes in instructed.items())
    read = [served.bytes_read for served in outcome.uses]
    assert read == sorted(read)
    assert outcome.bytes_moved[TO_HOST] >= read[-1]
    seen: dict[str, None] = {}
    for served in outcome.uses:
        seen[served.key] = None
        assert served.bytes_read >= sum(groups[key] for key in seen), "it cannot have arrived"


def assert_within(outcome: Outcome, budgets: Mapping[Tier, int | None]) -> None:
    for tier, budget in budgets.items():
        assert budget is None or outcome.peak_bytes[tier] <= budget, tier.name


def test_simulation_notices_an_overfull_planner() -> None:
    """Check the control: a planner that believes in too much space fails."""
    groups = equal(3)
    outcome, _ = watched_run(groups, loop(groups, 2, 1.0), on_host(200))
    assert_within(outcome, on_host(200))
    with pytest.raises(AssertionError, match="HOST"):
        assert_within(outcome, on_host(199))
