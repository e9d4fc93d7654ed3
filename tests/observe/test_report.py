"""Figures as a line, a text, a table and HTML: all four agree."""

from __future__ import annotations

import io
import re
import threading
from typing import Any

import pytest
from rich.console import Console

from tierstore.model.locks import RLock, if_free
from tierstore.observe.journal import Journal, Span
from tierstore.observe.report import Description, fragment, line, table, text
from tierstore.observe.stats import ActivationStats, Stats

MIB = 1 << 20


def stats(**others: Any) -> Stats:
    given: dict[str, Any] = {
        "hits": 1200,
        "late": 3,
        "misses": 1,
        "stalled_seconds": 0.5,
        "overlap": 0.75,
        "busy_seconds": {"DISK>HOST": 2.0},
        "bytes_read": 3 * MIB,
        "bytes_written": 0,
        "bytes_onloaded": 0,
        "bytes_offloaded": 0,
        "used_bytes": {"HOST": 6 * MIB, "DISK": 1536},
        "peak_bytes": {"HOST": 7 * MIB, "DISK": 1536},
        "budget_bytes": {"HOST": 8 * MIB, "DISK": None},
    }
    return Stats(**{**given, **others})


def drawn(look: Any, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(look)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_line_has_tiers_acquires_stalls_and_bandwidths() -> None:
    assert repr(stats()) == (
        "<Stats: HOST 6.0 MiB of 8.0 MiB (peak 7.0 MiB), DISK 1.5 KiB; 1,200 hits, 3 late, 1 miss, "
        "0.50 s stalled; DISK>HOST 3.0 MiB at 1.5 MiB/s>"
    )


def test_text_lists_the_figures_vertically() -> None:
    assert text(Description("Stats", stats())).split("\n") == [
        "Stats",
        "tier     used     peak    budget  full",
        "HOST  6.0 MiB  7.0 MiB   8.0 MiB   75%",
        "DISK  1.5 KiB  1.5 KiB  no limit",
        "acquires   1,200 hits, 3 late, 1 miss",
        "stalled    0.50 s in total",
        "overlap    75% of transfer time hidden",
        "DISK>HOST  3.0 MiB at 1.5 MiB/s",
    ]


@pytest.mark.parametrize("width", [80, 120])
def test_table_equals_the_text_and_fits(width: int) -> None:
    shown = drawn(stats(), width).splitlines()
    assert [re.split(r"\s{2,}", each.strip()) for each in shown] == [
        re.split(r"\s{2,}", each.strip())
        for each in text(Description("Stats", stats())).split("\n")
    ]
    assert max(map(len, shown)) <= width


def test_html_has_each_cell_of_the_text() -> None:
    shown = stats()._repr_html_()
    cells = set(re.findall(r"<(?:td|th|strong)[^>]*>([^<]*)</", shown))
    for each in text(Description("Stats", stats())).replace(">", "&gt;").split("\n"):
        assert set(re.split(r"\s{2,}", each.strip())) <= cells


def test_html_aligns_words_left_and_numbers_right() -> None:
    """Override the notebook's own table style for the alignment, but not for colours."""
    shown = stats()._repr_html_()
    sides = {text: side for side, text in re.findall(r"align:(\w+);[^>]*>([^<]*)</t", shown)}
    for told in ("tier", "HOST", "acquires", "0.50 s in total", "DISK&gt;HOST"):
        assert sides[told] == "left", told
    for told in ("used", "budget", "6.0 MiB", "no limit", "75%"):
        assert sides[told] == "right", told
    assert "color" not in shown and "background" not in shown


def test_html_is_escaped() -> None:
    shown = fragment(Description("<script>&'\"", stats(used_bytes={"<b>": 1}, budget_bytes={})))
    assert "<script>" not in shown
    assert "<b>" not in shown
    assert "&lt;script&gt;&amp;&#x27;&quot;" in shown


def test_report_is_free_of_control_codes_and_markup() -> None:
    look = Description("store in [red]\x1b[31m\u202e")
    for shown in (line(look), text(look), drawn(table(look)), fragment(look)):
        assert "[red]\\x1b[31m\\u202e" in shown


def test_optional_figures_are_shown_where_present() -> None:
    shown = text(
        Description(
            "Stats",
            stats(
                leased_bytes=MIB,
                allowed_bytes=4 * MIB,
                routed_uses=10,
                routed_bytes_used=8 * MIB,
                routed_bytes_read=2 * MIB,
                activations=ActivationStats(saved_bytes=4 * MIB, shipped_bytes=MIB),
                reserved_bytes={"DEVICE": 2 * MIB},
            ),
        )
    )
    assert re.search(r"^service +1.0 MiB +4.0 MiB +25%$", shown, re.MULTILINE)
    assert re.search(r"^experts +10 uses, 2.0 MiB read for 8.0 MiB$", shown, re.MULTILINE)
    assert re.search(r"^activations +1.0 MiB of 4.0 MiB in the store$", shown, re.MULTILINE)
    assert re.search(r"^torch reserved +2.0 MiB$", shown, re.MULTILINE)
    for name in ("service", "experts", "activations", "torch reserved"):
        assert name not in text(Description("Stats", stats()))


def test_bytes_without_a_time_have_no_speed() -> None:
    assert "DISK>HOST 3.0 MiB>" in repr(stats(busy_seconds={}))
    assert "/s" not in repr(stats(busy_seconds={"DISK>HOST": 0.0}))


def test_budget_of_zero_has_no_percentage() -> None:
    assert "HOST 0 B of 0 B" in repr(stats(used_bytes={"HOST": 0}, budget_bytes={"HOST": 0}))


def test_stats_count_the_bytes_moved() -> None:
    assert stats(bytes_fetched=5).moved() == {"REMOTE>DISK": 5, "DISK>HOST": 3 * MIB}


# Without waiting ----------------------------------------------------------------------------------


def test_lock_held_by_another_thread_is_not_awaited() -> None:
    lock, taken, over = RLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            over.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    taken.wait(60)
    try:
        assert if_free(lock, lambda: "done", 0.01) is None
    finally:
        over.set()
        holder.join()
    assert if_free(lock, lambda: "done", 0.01) == "done"
    with lock:  # in the middle of a call
        assert if_free(lock, lambda: "done", 0.01) is None
        assert lock._is_owned()
    with pytest.raises(ZeroDivisionError):
        if_free(lock, lambda: 1 / 0, 0.01)
    assert not lock._is_owned()


def test_journal_report_equals_its_summary() -> None:
    journal = Journal()
    journal.count("DISK>HOST", 10)
    journal.end(Span("DISK>HOST", "a", nbytes=10, start=1.0, end=3.0))
    assert journal.sample() == journal.summary()
    assert journal.sample().busy == {"DISK>HOST": 2.0}
