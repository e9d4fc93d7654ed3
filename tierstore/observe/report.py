"""What a store, its numbers and its handles look like: a line, a text, a table, a page's fragment.

A debugger, a log or a notebook may ask for these at any moment, in any thread. So nothing here
waits, and nothing raises: it is all made of numbers that were taken before (see `Reporting.look`).
rich draws the table, and is imported only where it asks for one.
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
class Shown:
    """Something as it is shown: what it is, and its numbers, if it has any that can be told.

    `tiers` are bytes that are used, and may be, by the name of a tier; where there are `stats`,
    theirs are shown. `facts` are names and values. `rows` are such as would make a line too long.
    """

    title: str
    stats: Stats | None = None
    tiers: tuple[tuple[str, int, int | None], ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    rows: tuple[tuple[str, str], ...] = ()


Asked = Callable[[Any], Any]
Told = Callable[[float], str]


def shown_by(
    look: Callable[[Any], Shown],
) -> tuple[Callable[[Any], str], Asked, Callable[[Any], str]]:
    """`__repr__`, `__rich__` and `_repr_html_` for a class of whose objects `look` takes a look."""

    def shown_as_line(self: Any) -> str:
        return line(look(self))

    def shown_as_table(self: Any) -> Any:
        return table(look(self))

    def shown_as_html(self: Any) -> str:
        return fragment(look(self))

    return shown_as_line, shown_as_table, shown_as_html


# The four forms ----------------------------------------------------------------------------------


def line(look: Shown) -> str:
    """All of it in one line.

    >>> line(Shown("TierStore on cpu"))
    '<TierStore on cpu>'
    """
    return f"<{': '.join([printable(look.title), *_summary(look)])}>"


def text(look: Shown) -> str:
    """A few short lines, for logs and people. No line break at the end."""
    tiers, facts = _tier_table(look), _facts(look)
    lines = [printable(look.title)]
    if tiers:
        lines += _aligned(tiers, right=True)
    return "\n".join(lines + (_aligned(facts) if facts else []))


def table(look: Shown) -> Any:
    """What rich draws. Nothing in it is taken for markup."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[Any] = [Text(printable(look.title), style="bold")]
    tiers = _tier_table(look)
    for titles, rows in ((tiers[:1], tiers[1:]), ([], _facts(look))):
        if rows:
            drawn = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=bool(titles))
            for column, title in enumerate([*titles, rows[0]][0]):
                right = bool(titles) and column > 0
                drawn.add_column(Text(title), justify="right" if right else "left")
            for row in rows:
                drawn.add_row(*map(Text, row))
            parts.append(drawn)
    return Group(*parts)


def fragment(look: Shown) -> str:
    """HTML for a notebook. All text is escaped.

    Colours are the page's, light or dark. Sides are said for each cell, as notebooks have tables of
    numbers in mind and put all to the right.
    """
    tiers, facts = _tier_table(look), _facts(look)
    parts = [f'<strong style="{_TITLE}">{_escaped(look.title)}</strong>']
    if tiers:
        head = _html_row("th", tiers[0], "right")
        body = "".join(_html_row("td", row, "right") for row in tiers[1:])
        parts.append(f'<table style="{_TABLE}"><thead>{head}</thead><tbody>{body}</tbody></table>')
    if facts:
        body = "".join(_html_row("td", row, "left") for row in facts)
        parts.append(f'<table style="{_TABLE}"><tbody>{body}</tbody></table>')
    return f'<div style="overflow-x:auto">{"".join(parts)}</div>'


# What the forms have in common ------------------------------------------------------------------


def _tier_table(look: Shown) -> list[Row]:
    """Titles, and a row for each tier; without columns of which nothing is known."""
    rows = _tiers(look)
    told = [column for column in range(len(_TIER_TITLES)) if any(row[column] for row in rows)]
    return [tuple(row[column] for column in told) for row in (_TIER_TITLES, *rows)] if rows else []


def _tiers(look: Shown) -> list[Row]:
    """Each tier: what is used of its budget. Of a service's host memory, what is leased there."""
    stats = look.stats
    if stats is None:
        units = units_of_tiers({name: budget for name, _, budget in look.tiers})
        told = functools.partial(size, units=units)
        return [_tier(name, used, None, budget, told) for name, used, budget in look.tiers]
    peaks, budgets, tells = stats.peak_bytes, stats.budget_bytes, _sizes(stats)
    rows = [
        _tier(name, used, peaks.get(name), budgets.get(name), tells)
        for name, used in stats.used_bytes.items()
    ]
    if stats.allowed_bytes:
        rows.append(_tier("service", stats.leased_bytes, None, stats.allowed_bytes, tells))
    return rows


def _sizes(stats: Stats) -> Told:
    """Tells sizes, in the units in which somebody wrote the budget, or the service's."""
    budget = stats.budget_bytes.get("HOST") or stats.allowed_bytes
    return functools.partial(size, units=units_of(budget))


def _tier(name: str, used: int, peak: int | None, budget: int | None, told: Told) -> Row:
    allowed = "no limit" if budget is None else told(budget)
    most = "" if peak is None else told(peak)
    return (name, told(used), most, allowed, f"{used / budget:.0%}" if budget else "")


def _facts(look: Shown) -> list[Row]:
    """Each fact with its name: what it is told of, and what was done."""
    told = [(printable(name), printable(value)) for name, value in (*look.facts, *look.rows)]
    return [*told, *(_done(look.stats) if look.stats is not None else [])]


def _done(stats: Stats) -> list[Row]:
    """What was done: each fact with its name."""
    told = _sizes(stats)
    facts = [
        ("acquires", _acquires(stats)),
        ("stalled", f"{stats.stalled_seconds:.2f} s in all"),
    ]
    if stats.busy_seconds:
        facts.append(
            ("overlap", f"{stats.overlap:.0%} of the time that bytes moved, nobody waited")
        )
    facts += [(hop, _moved(stats, hop, nbytes)) for hop, nbytes in stats.moved().items()]
    if stats.plans_followed:
        now = f"for {stats.followed_seconds:.2f} s" if stats.followed_seconds else "not now"
        facts.append(("plan", f"entered {count(stats.plans_followed, 'time')}, followed {now}"))
    if stats.routed_uses:
        read = f"{told(stats.routed_bytes_read)} read for {told(stats.routed_bytes_used)}"
        facts.append(("experts", f"{stats.routed_uses:,} uses, {read}"))
    if stats.activations.saved_bytes:
        away = f"{told(stats.activations.shipped_bytes)} of {told(stats.activations.saved_bytes)}"
        facts.append(("activations", f"{away} kept in the store"))
    if stats.reserved_bytes:
        facts.append(("torch has", ", ".join(told(each) for each in stats.reserved_bytes.values())))
    return [(name, value) for name, value in facts]


def _acquires(stats: Stats) -> str:
    misses = "1 miss" if stats.misses == 1 else f"{stats.misses:,} misses"
    return f"{count(stats.hits, 'hit')}, {stats.late:,} late, {misses}"


def _moved(stats: Stats, hop: str, nbytes: int) -> str:
    seconds = stats.busy_seconds.get(hop)
    told = _sizes(stats)
    return f"{told(nbytes)} at {told(nbytes / seconds)}/s" if seconds else told(nbytes)


def _summary(look: Shown) -> Iterator[str]:
    """What stands in the line after what it is."""
    facts = [f"{printable(name)} {printable(value)}" for name, value in look.facts]
    tiers = [
        f"{name} {used}"
        + ("" if budget == "no limit" else f" of {budget}")
        + (f" (peak {peak})" if peak not in ("", used) else "")
        for name, used, peak, budget, _ in _tiers(look)
    ]
    parts = [", ".join(facts), ", ".join(tiers)]
    parts += [] if look.stats is None else [totals_of(look.stats)]
    if any(parts):
        yield "; ".join(part for part in parts if part)


def totals_of(stats: Stats) -> str:
    """What was done in all: how acquires were met, what they waited, and what moved."""
    moved = [f"{hop} {_moved(stats, hop, nbytes)}" for hop, nbytes in stats.moved().items()]
    done = f"{_acquires(stats)}, {stats.stalled_seconds:.2f} s stalled"
    return "; ".join([done, ", ".join(moved)] if moved else [done])


def _aligned(rows: list[Row], *, right: bool = False) -> list[str]:
    """The rows with their columns below each other; all but the first column maybe at its right."""
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
    """A row whose first cell is to the left, and whose others are to one side."""
    first, *others = (_escaped(each) for each in row)
    cells = [("left", first), *((side, each) for each in others)]
    told = (f'<{cell} style="text-align:{to};{_CELL}">{each}</{cell}>' for to, each in cells)
    return f"<tr>{''.join(told)}</tr>"
