"""The sums of a journal, compared with sums computed second by second."""

from __future__ import annotations

from time import monotonic

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.observe.journal import STALL, Journal, LeaseUse, Ring, Span, SpanTotals

Told = tuple[str, int, int]

spans = st.lists(
    st.tuples(
        st.sampled_from([STALL, "DISK>HOST", "HOST>DISK"]), st.integers(0, 30), st.integers(0, 12)
    ),
    max_size=20,
)


def by_hand(told: list[Told]) -> tuple[dict[str, int], int, int]:
    """Return the seconds by kind, of moving, and of hidden moving, second by second."""
    seconds: dict[str, int] = {}
    moving = hidden = 0
    for second in range(60):
        going = {kind for kind, start, length in told if start <= second < start + length}
        for kind in going:
            seconds[kind] = seconds.get(kind, 0) + 1
        if going - {STALL}:
            moving += 1
            hidden += STALL not in going
    return seconds, moving, hidden


@given(spans)
def test_busy_time_is_the_union_of_intervals(told: list[Told]) -> None:
    totals = SpanTotals()
    for kind, start, length in told:
        totals.add(kind, start, start + length)
    totals.total_up_to(float("inf"))
    assert (totals.seconds, totals.moving, totals.hidden) == by_hand(told)
    assert len(totals) == 0


@given(spans, st.lists(st.integers(0, 45), max_size=5))
def test_settling_early_keeps_earlier_results(told: list[Told], times: list[int]) -> None:
    totals = SpanTotals()
    for kind, start, length in told:
        totals.add(kind, start, start + length)
    for time in sorted(times):
        totals.total_up_to(time)
    copy = totals.copy()
    copy.total_up_to(float("inf"))
    assert (copy.seconds, copy.moving, copy.hidden) == by_hand(told)
    totals.total_up_to(float("inf"))  # the copy removed nothing from it
    assert (totals.seconds, totals.moving, totals.hidden) == by_hand(told)


def test_late_interval_counts_from_then_on() -> None:
    totals = SpanTotals()
    totals.total_up_to(10)
    totals.add("DISK>HOST", 5, 15)
    totals.add("DISK>HOST", 5, 9)
    totals.total_up_to(20)
    assert totals.seconds == {"DISK>HOST": 5}


def test_journal_totals_outlast_its_entries() -> None:
    journal = Journal()
    for i in range(5000):  # settles several times
        journal.end(Span("DISK>HOST", "a", nbytes=10, start=2.0 * i, end=2.0 * i + 1))
        journal.count("DISK>HOST", 10)
        journal.end(Span(STALL, "a", start=2.0 * i + 0.5, end=2.0 * i + 1.5))
    summary = journal.summary()
    assert summary.moved == {"DISK>HOST": 50_000}
    assert summary.busy == pytest.approx({"DISK>HOST": 5000.0})
    assert summary.bandwidth == pytest.approx({"DISK>HOST": 10.0})
    assert summary.stalled == pytest.approx(5000.0)
    assert summary.overlap == pytest.approx(0.5)
    assert len(journal.totals) < 2000, "old entries are still kept"


def test_open_interval_counts_and_is_not_settled() -> None:
    journal = Journal()
    began = monotonic() - 3000  # all of it is over, even if the clock has just begun
    wait, move = Span(STALL, "a", start=began + 1), Span("DISK>HOST", "a", start=began + 1)
    journal.begin(wait)
    journal.begin(move)
    for i in range(2000):
        journal.end(Span("HOST>DISK", "b", start=began + 2 + i, end=began + 2.5 + i))
    assert journal.summary().stalled > 0
    assert journal.summary().overlap == 0.0
    wait.end = began + 2
    journal.end(wait)
    move.end = began + 3
    journal.end(move)
    summary = journal.summary()
    assert summary.stalled == pytest.approx(1.0)
    assert summary.busy["DISK>HOST"] == pytest.approx(2.0)


def test_journal_without_moves_hides_everything() -> None:
    journal = Journal()
    journal.end(Span(STALL, "a", start=1.0, end=2.0))
    assert journal.summary().overlap == 1.0
    assert journal.summary().busy == {}


def test_ring_keeps_the_newest_and_counts_the_rest() -> None:
    ring: Ring[int] = Ring(3)
    for i in range(5):
        ring.add(i)
    assert (ring.events(), ring.dropped) == ([2, 3, 4], 2)


def test_dropped_entries_are_counted_over_all_rings() -> None:
    journal = Journal(uses=Ring(1), levels=Ring(1))
    for i in range(3):
        journal.uses.add(LeaseUse("a", 1, "hit", 0.0))
        journal.levels.add((float(i), (i,)))
    assert journal.dropped == 4
