"""Belady's algorithm is a bound for every policy, and is attained."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.processes import output_of
from tools.bench import traces
from tools.bench.traces import MB, Trace, belady, least_missed, trace_of

ROOT = Path(__file__).resolve().parents[2]


def fewest_misses(keys: tuple[str, ...], room: int) -> int:
    """Return the fewest misses with space for `room` equal groups, by trying every choice."""
    reached = {frozenset[str](): 0}
    for key in keys:
        following: dict[frozenset[str], int] = {}
        for held, misses in reached.items():
            cost = misses + (key not in held)
            others = held - {key}
            for count in range(min(room - 1, len(others)) + 1):
                for kept in itertools.combinations(sorted(others), count):
                    state = frozenset((*kept, key))
                    following[state] = min(cost, following.get(state, cost))
        reached = following
    return min(reached.values())


some_uses = st.lists(st.sampled_from("abcde"), min_size=1, max_size=9).map(tuple)


@settings(deadline=None)
@given(keys=some_uses, room=st.integers(1, 4))
def test_belady_is_optimal_for_equal_groups(keys: tuple[str, ...], room: int) -> None:
    trace = trace_of("drawn", keys, lambda key: 3)
    best = 3 * MB * fewest_misses(keys, room)
    assert belady(trace, 3 * MB * room) == best
    assert least_missed(trace, 3 * MB * room) <= best * (1 + 1e-9)


@settings(deadline=None)
@given(keys=some_uses, sizes=st.tuples(*[st.integers(1, 5)] * 5), more=st.integers(0, 12))
def test_bound_holds_for_groups_of_any_size(
    keys: tuple[str, ...], sizes: tuple[int, ...], more: int
) -> None:
    trace = trace_of("drawn", keys, lambda key: sizes["abcde".index(key)])
    budget = trace.largest + more * MB
    once = sum(trace.groups.values())
    assert least_missed(trace, budget) <= belady(trace, budget) * (1 + 1e-9)
    assert once <= belady(trace, budget) <= trace.sizes.sum()


def test_bound_of_a_loop_reads_only_the_excess() -> None:
    trace = traces.cyclic(6, 5)
    assert belady(trace, 4 * 400 * MB) == 400 * MB * fewest_misses(trace.keys, 4)
    assert belady(trace, 6 * 400 * MB) == least_missed(trace, 6 * 400 * MB) == 6 * 400 * MB


@pytest.mark.parametrize(
    "trace",
    [*traces.deterministic(), *traces.irregular(), *traces.by_chance()],
    ids=lambda trace: trace.name,
)
def test_trace_uses_only_groups_it_has(trace: Trace) -> None:
    assert set(trace.keys) == set(trace.groups)
    assert all(nbytes >= 20 * MB for nbytes in trace.groups.values())
    assert len(trace.keys) > 3 * len(trace.groups), "too few uses to learn from"


@pytest.mark.full("a whole benchmark; its planner and its carrier are in test_simulation.py")
def test_policy_claims_hold() -> None:
    """Check bytes and virtual seconds only: the bench itself measures the cost of planning."""
    parts = [word for part in ("missed", "hierarchy", "prefetch") for word in ("--only", part)]
    output = output_of("-m", "tools.bench", "policies", "--small", *parts)
    claims = [line for line in output.split("## Claims")[1].splitlines() if line]
    assert len(claims) == 7
    # A recorded run is short, so its misses until the order is learned exceed the claimed
    # twentieth, as the bench reports. They must not grow.
    others = [line for line in claims if "recorded traces" not in line]
    assert len(others) == 6
    assert all(line.startswith("- held: ") for line in others), "\n".join(claims)
    rows = [line.split("|") for line in output.splitlines() if line.startswith("| recorded")]
    assert len(rows) == 2
    assert all(float(row[4].strip(" !")) <= 1.06 for row in rows), "\n".join(claims)
