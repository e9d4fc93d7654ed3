"""Displays stores, statistics and handles: as one line, text, a rich table, or HTML.

A debugger, a log or a notebook may request these at any moment, on any thread. So nothing here
blocks or raises: it only formats a sample taken earlier (see `Reporting.overview`).
rich is imported only when a table is requested.
"""

from __future__ import annotations

import functools
import html
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tierstore.model.formatting import count, printable, size, units_of, units_of_tiers

if TYPE_CHECKING:
    from tierstore.observe.stats import Stats

Row = tuple[str, ...]

_TITLE = "overflow-wrap:anywhere"
_TABLE = "margin:0.3em 0;border-collapse:collapse"
_CELL = "padding:0.1em 1.2em 0.1em 0"

_TIER_TITLES: Row = ("tier", "used", "peak", "budget", "full")


@dataclass(frozen=True)
class Description:
    """An object as it is displayed: a title, and its numbers if they are known.

    `tiers` has the name, the bytes used and the budget of each tier; if `stats` is given, its
    tiers are shown instead. `facts` are names and values. `rows` are further names and values,
    left out of the one-line form because they would make it too long.
    """

    title: str
    stats: Stats | None = None
    tiers: tuple[tuple[str, int, int | None], ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    rows: tuple[tuple[str, str], ...] = ()


_Method = Callable[[Any], Any]
SizeFormat = Callable[[float], str]


def display_methods(
    describe: Callable[[Any], Description],
) -> tuple[Callable[[Any], str], _Method, Callable[[Any], str]]:
    """Return `__repr__`, `__rich__` and `_repr_html_` for a class, given how to describe it."""

    def as_line(self: Any) -> str:
        return line(describe(self))

    def as_table(self: Any) -> Any:
        return table(describe(self))

    def as_html(self: Any) -> str:
        return fragment(describe(self))

    return as_line, as_table, as_html


# The four forms ----------------------------------------------------------------------------------


def line(description: Description) -> str:
    """Return everything but the `rows` in one line.

    >>> line(Description("TierStore on cpu"))
    '<TierStore on cpu>'
    """
    return f"<{': '.join([printable(description.title), *_summary(description)])}>"


def text(description: Description) -> str:
    """Return a few short lines for logs, without a trailing newline."""
    tiers, facts = _tier_table(description), _facts(description)
    lines = [printable(description.title)]
    if tiers:
        lines += _aligned(tiers, right=True)
    return "\n".join(lines + (_aligned(facts) if facts else []))


def table(description: Description) -> Any:
    """Return a rich renderable. No text in it is interpreted as markup."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[Any] = [Text(printable(description.title), style="bold")]
    tiers = _tier_table(description)
    for titles, rows in ((tiers[:1], tiers[1:]), ([], _facts(description))):
        if rows:
            drawn = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=bool(titles))
            for column, title in enumerate([*titles, rows[0]][0]):
                right = bool(titles) and column > 0
                drawn.add_column(Text(title), justify="right" if right else "left")
            for row in rows:
                drawn.add_row(*map(Text, row))
            parts.append(drawn)
    return Group(*parts)


def fragment(description: Description) -> str:
    """Return HTML for a notebook. All text is escaped.

    Colours are inherited from the page, light or dark. Each cell sets its alignment, because
    notebooks align all cells of a table to the right.
    """
    tiers, facts = _tier_table(description), _facts(description)
    parts = [f'<strong style="{_TITLE}">{_escaped(description.title)}</strong>']
    if tiers:
        head = _html_row("th", tiers[0], "right")
        body = "".join(_html_row("td", row, "right") for row in tiers[1:])
        parts.append(f'<table style="{_TABLE}"><thead>{head}</thead><tbody>{body}</tbody></table>')
    if facts:
        body = "".join(_html_row("td", row, "left") for row in facts)
        parts.append(f'<table style="{_TABLE}"><tbody>{body}</tbody></table>')
    return f'<div style="overflow-x:auto">{"".join(parts)}</div>'


# Shared by the forms -----------------------------------------------------------------------------


def _tier_table(description: Description) -> list[Row]:
    """Return the titles and a row for each tier, without the columns that are empty."""
    rows = _tiers(description)
    kept = [column for column in range(len(_TIER_TITLES)) if any(row[column] for row in rows)]
    return [tuple(row[column] for column in kept) for row in (_TIER_TITLES, *rows)] if rows else []


def _tiers(description: Description) -> list[Row]:
    """Return a row for each tier, and one for the memory leased from a service."""
    stats = description.stats
    if stats is None:
        units = units_of_tiers({name: budget for name, _, budget in description.tiers})
        sizes: SizeFormat = functools.partial(size, units=units)
        return [_tier(name, used, None, budget, sizes) for name, used, budget in description.tiers]
    peaks, budgets, sizes = stats.peak_bytes, stats.budget_bytes, _sizes(stats)
    rows = [
        _tier(name, used, peaks.get(name), budgets.get(name), sizes)
        for name, used in stats.used_bytes.items()
    ]
    if stats.allowed_bytes:
        rows.append(_tier("service", stats.leased_bytes, None, stats.allowed_bytes, sizes))
    return rows


def _sizes(stats: Stats) -> SizeFormat:
    """Return a formatter for sizes, in the units of the RAM budget or of the service's."""
    budget = stats.budget_bytes.get("HOST") or stats.allowed_bytes
    return functools.partial(size, units=units_of(budget))


def _tier(name: str, used: int, peak: int | None, budget: int | None, sizes: SizeFormat) -> Row:
    allowed = "no limit" if budget is None else sizes(budget)
    most = "" if peak is None else sizes(peak)
    return (name, sizes(used), most, allowed, f"{used / budget:.0%}" if budget else "")


def _facts(description: Description) -> list[Row]:
    """Return names and values: those given, and those of the statistics."""
    given = [
        (printable(name), printable(value))
        for name, value in (*description.facts, *description.rows)
    ]
    return [*given, *(_done(description.stats) if description.stats is not None else [])]


def _done(stats: Stats) -> list[Row]:
    """Return the statistics as names and values."""
    sizes = _sizes(stats)
    facts = [
        ("acquires", acquires(stats.hits, stats.late, stats.misses)),
        ("stalled", f"{stats.stalled_seconds:.2f} s in total"),
    ]
    if stats.busy_seconds:
        facts.append(("overlap", f"{stats.overlap:.0%} of transfer time hidden"))
    facts += [(hop, _moved(stats, hop, nbytes)) for hop, nbytes in stats.moved().items()]
    if stats.plans_followed:
        now = f"for {stats.followed_seconds:.2f} s" if stats.followed_seconds else "no longer"
        facts.append(("plan", f"entered {count(stats.plans_followed, 'time')}, followed {now}"))
    if stats.routed_uses:
        read = f"{sizes(stats.routed_bytes_read)} read for {sizes(stats.routed_bytes_used)}"
        facts.append(("experts", f"{stats.routed_uses:,} uses, {read}"))
    if stats.activations.saved_bytes:
        away = f"{sizes(stats.activations.shipped_bytes)} of {sizes(stats.activations.saved_bytes)}"
        facts.append(("activations", f"{away} in the store"))
    if stats.reserved_bytes:
        facts.append(
            ("torch reserved", ", ".join(sizes(each) for each in stats.reserved_bytes.values()))
        )
    return [(name, value) for name, value in facts]


def acquires(hits: int, late: int, misses: int) -> str:
    """Format the numbers of acquires by outcome.

    >>> acquires(1200, 3, 1)
    '1,200 hits, 3 late, 1 miss'
    """
    missed = "1 miss" if misses == 1 else f"{misses:,} misses"
    return f"{count(hits, 'hit')}, {late:,} late, {missed}"


def _moved(stats: Stats, hop: str, nbytes: int) -> str:
    seconds = stats.busy_seconds.get(hop)
    sizes = _sizes(stats)
    return f"{sizes(nbytes)} at {sizes(nbytes / seconds)}/s" if seconds else sizes(nbytes)


def _summary(description: Description) -> Iterator[str]:
    """Yield the part of the one-line form after the title, if any."""
    facts = [f"{printable(name)} {printable(value)}" for name, value in description.facts]
    tiers = [
        f"{name} {used}"
        + ("" if budget == "no limit" else f" of {budget}")
        + (f" (peak {peak})" if peak not in ("", used) else "")
        for name, used, peak, budget, _ in _tiers(description)
    ]
    parts = [", ".join(facts), ", ".join(tiers)]
    parts += [] if description.stats is None else [totals_of(description.stats)]
    if any(parts):
        yield "; ".join(part for part in parts if part)


def totals_of(stats: Stats) -> str:
    """Return the totals in one line: acquires, seconds stalled, and bytes moved by hop."""
    moved = [f"{hop} {_moved(stats, hop, nbytes)}" for hop, nbytes in stats.moved().items()]
    counts = acquires(stats.hits, stats.late, stats.misses)
    done = f"{counts}, {stats.stalled_seconds:.2f} s stalled"
    return "; ".join([done, ", ".join(moved)] if moved else [done])


def _aligned(rows: list[Row], *, right: bool = False) -> list[str]:
    """Pad the rows into columns. With `right`, all but the first are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        aligned = [first.ljust(widths[0])]
        for cell, width in zip(others, widths[1:], strict=True):
            aligned.append(cell.rjust(width) if right else cell.ljust(width))
        lines.append("  ".join(aligned).rstrip())
    return lines


def _escaped(text: str) -> str:
    return html.escape(printable(text))


def _html_row(cell: str, row: Iterable[str], side: str) -> str:
    """Return a row: the first cell aligned left, the others to `side`."""
    first, *others = (_escaped(each) for each in row)
    cells = [("left", first), *((side, each) for each in others)]
    aligned = (f'<{cell} style="text-align:{to};{_CELL}">{each}</{cell}>' for to, each in cells)
    return f"<tr>{''.join(aligned)}</tr>"
