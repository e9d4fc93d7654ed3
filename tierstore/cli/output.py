"""What every command shares: exit codes, failures, and how text, tables and documents are printed.

Data goes to stdout; questions, remarks and errors go to stderr. What `--json` prints are documents
of raw bytes and seconds, for scripts, and `schema` is their version: a new field does not change
it; a field that goes away or changes its meaning does. Tables are drawn from the same rows. They
need rich, which is imported only when one is drawn.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TextIO

import click

from tierstore.cli import words
from tierstore.model.urls import without_secrets

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = 1

Document = dict[str, Any]

_NARROWEST = 10
_GAP = 2
_LABEL = re.compile(r"( *[\w ]+? {2,})?")
_STYLES = {"damaged": "bold red", "unreadable": "bold yellow", "holds others up": "bold red"}


class Code(IntEnum):
    """What the command's exit code means. Scripts rely on these numbers."""

    OK = 0
    UNEXPECTED = 1
    USAGE = 2
    DAMAGED = 3
    UNKNOWN_KEY = 4
    LOCKED = 11
    INTERRUPTED = 130


class Failure(Exception):
    """The command cannot do what it was asked for; `advice` is what the user can do about it."""

    def __init__(self, message: str, advice: str, code: Code = Code.USAGE) -> None:
        super().__init__(without_secrets(message))
        self.advice = without_secrets(advice)
        self.code = code


def system_failure(error: OSError, doing: str) -> Failure:
    """The failure for an error of the system."""
    return Failure(
        f"{doing} failed: {error.strerror or error}",
        "Check that the directory is there and that you may read (or change) it.",
        Code.UNEXPECTED,
    )


@contextmanager
def system_failures(doing: str) -> Iterator[None]:
    """An OSError in the block becomes a failure of what is being done there."""
    try:
        yield
    except OSError as error:
        raise system_failure(error, doing) from error


def remark(text: str) -> None:
    """Print prose to stderr."""
    click.echo(_fitted(words.printable(text), sys.stderr), err=True)


def data(text: str) -> None:
    """Print a line of data to stdout."""
    click.echo(_fitted(words.printable(text), sys.stdout))


def _fitted(text: str, stream: TextIO) -> str:
    """The line, broken between words where a terminal would break it anywhere.

    Words stay whole, however long: they may be paths that somebody copies.
    """
    if not stream.isatty():
        return text
    found = _LABEL.match(text)
    begin = found.end() if found else 0
    room = max(shutil.get_terminal_size().columns - begin, _NARROWEST)
    lines = textwrap.wrap(text[begin:], room, break_long_words=False, break_on_hyphens=False)
    return text[:begin] + f"\n{' ' * begin}".join(lines)


def print_json(document: Document) -> None:
    """Print a document. Whatever is not ASCII is escaped, so keys cannot steer a terminal."""
    try:
        click.echo(json.dumps({"schema": SCHEMA, **document}, indent=2, allow_nan=False))
    except ValueError as error:  # Python would write NaN, which no other reader takes
        raise Failure(
            "some of what is to be told is a number without end",
            "Give speeds and times that a machine can have.",
        ) from error


# Tables -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """A column, and what it says of a row.

    `right` aligns numbers; cells of a `flexible` one are shortened to fit. A `spare` one is left
    out of a terminal that is too narrow for all.
    """

    title: str
    cell: Callable[[Document], str]
    right: bool = False
    flexible: bool = False
    spare: bool = False


def draw(columns: Sequence[Column], rows: Iterable[Document]) -> None:
    """Print a table to stdout. Cells are plain text: nothing in them is taken for markup."""
    from rich.console import Console

    console = Console(highlight=False, emoji=False, markup=False)
    if not console.file.isatty():  # rich takes some pipes for terminals: FORCE_COLOR
        console.width = 10_000  # a file or another program gets whole names
    rows = list(rows)
    table = [[words.printable(column.cell(row)) for row in rows] for column in columns]
    widths = [
        max([_width(column.title), *map(_width, cells)])
        for column, cells in zip(columns, table, strict=True)
    ]
    kept = _kept(widths, columns, console.width)
    if len(kept) < len(columns):
        left = ", ".join(column.title for i, column in enumerate(columns) if i not in kept)
        remark(f"No room for {left}: a wider terminal shows that, and --json has it.")
        columns, widths = [columns[i] for i in kept], [widths[i] for i in kept]
        table = [table[i] for i in kept]
    gaps = _GAP * (len(columns) - 1)
    wanted = list(widths)
    _narrow(widths, columns, console.width - gaps)
    # Where even that is too wide, the terminal shall wrap lines: rich would leave columns out.
    console.width = max(console.width, sum(widths) + gaps)
    ellipsis = "…" if console.encoding.lower().startswith("utf") else "..."
    for i, (width, full) in enumerate(zip(widths, wanted, strict=True)):
        if width < full:
            table[i] = [words.shorten(cell, width, ellipsis, _width) for cell in table[i]]
    aligned = map(_aligned, columns, widths, table)
    titles, *lines = zip(*aligned, strict=True)
    write = console.file.write
    write(_styled(console, titles, ["bold"] * len(columns)))
    for cells, line in zip(zip(*table, strict=True), lines, strict=True):
        if _STYLES.keys().isdisjoint(cells):
            write((" " * _GAP).join(line).rstrip() + "\n")
        else:
            write(_styled(console, line, [_STYLES.get(cell, "") for cell in cells]))


def _width(text: str) -> int:
    """The columns that a text takes in a terminal."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _aligned(column: Column, width: int, cells: Iterable[str]) -> list[str]:
    """The title and the cells of a column, padded."""
    align = str.rjust if column.right else str.ljust
    return [
        align(cell, width if cell.isascii() else width - _width(cell) + len(cell))
        for cell in (column.title, *cells)
    ]


def _styled(console: Console, cells: Iterable[str], styles: Iterable[str]) -> str:
    """A line of a table. All lines from rich would take ten times as long for many rows."""
    from rich.text import Text

    line = Text(" " * _GAP).join(Text(c, style) for c, style in zip(cells, styles, strict=True))
    line.rstrip()
    with console.capture() as drawn:
        console.print(line, soft_wrap=True)
    return drawn.get()


def _kept(widths: Sequence[int], columns: Sequence[Column], room: int) -> list[int]:
    """The columns to show: without spare ones, the last first, as far as there is no room."""
    least = [min(w, _NARROWEST) if c.flexible else w for w, c in zip(widths, columns, strict=True)]
    kept = list(range(len(columns)))
    for i in reversed([i for i, column in enumerate(columns) if column.spare]):
        if sum(least[j] + _GAP for j in kept) - _GAP > room:
            kept.remove(i)
    return kept


def _narrow(widths: list[int], columns: Sequence[Column], room: int) -> None:
    """Take what is missing from the widest flexible column, again and again."""
    flexible = [i for i, column in enumerate(columns) if column.flexible]
    while flexible and sum(widths) > room:
        widest = max(flexible, key=lambda i: widths[i])
        if widths[widest] <= _NARROWEST:
            break
        widths[widest] -= 1
