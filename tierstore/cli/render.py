"""Tables for people. They need rich, which is imported only when one is drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from tierstore.cli import words

T = TypeVar("T")

_NARROWEST = 10
_GAP = 2
_STYLES = {"damaged": "bold red", "unreadable": "bold yellow"}


@dataclass(frozen=True)
class Column(Generic[T]):
    """A column, and what it says of a row.

    `right` aligns numbers; cells of a `flexible` one are shortened to fit.
    """

    title: str
    cell: Callable[[T], str]
    right: bool = False
    flexible: bool = False


def draw(columns: Sequence[Column[T]], rows: Iterable[T]) -> None:
    """Print a table to stdout. Cells are plain text: nothing in them is taken for markup."""
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, emoji=False, markup=False)
    if not console.file.isatty():  # rich takes some pipes for terminals: FORCE_COLOR
        console.width = 10_000  # a file or another program gets whole names
    cells = [[words.printable(column.cell(row)) for column in columns] for row in rows]
    widths = [
        max([cell_len(column.title), *(cell_len(row[i]) for row in cells)])
        for i, column in enumerate(columns)
    ]
    gaps = _GAP * len(columns)
    widths = _narrowed(widths, columns, console.width - gaps)
    # Where even that is too wide, the terminal shall wrap lines: rich would leave columns out.
    console.width = max(console.width, sum(widths) + gaps)
    ellipsis = "…" if console.encoding.lower().startswith("utf") else "..."
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
    for column, width in zip(columns, widths, strict=True):
        table.add_column(
            Text(column.title),
            justify="right" if column.right else "left",
            no_wrap=True,
            min_width=width,
        )
    for row in cells:
        shown = (words.shorten(c, w, ellipsis, cell_len) for c, w in zip(row, widths, strict=True))
        table.add_row(*(Text(text, style=_STYLES.get(text, "")) for text in shown))
    console.print(table, soft_wrap=False)


def _narrowed(widths: list[int], columns: Sequence[Column[T]], room: int) -> list[int]:
    """Take what is missing from the widest flexible column, again and again."""
    widths = list(widths)
    flexible = [i for i, column in enumerate(columns) if column.flexible]
    while flexible and sum(widths) > room:
        widest = max(flexible, key=lambda i: widths[i])
        if widths[widest] <= _NARROWEST:
            break
        widths[widest] -= 1
    return widths
