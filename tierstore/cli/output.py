"""Exit codes, failures, and printing: text, tables and JSON documents.

Data goes to stdout; questions, remarks and errors go to stderr. For scripts, `--json` prints
documents with sizes in bytes and times in seconds. `schema` is their version: it changes if a field
is removed or changes its meaning, but not if one is added. Tables are drawn from the same rows.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TextIO

import click

from tierstore.model import formatting
from tierstore.model.urls import redact_secrets

SCHEMA = 1

Document = dict[str, Any]

_NARROWEST = 10
_GAP = 2
_LABEL = re.compile(r"( *[\w ]+? {2,})?")
_BAD: dict[str, Any] = {"bold": True, "fg": "red"}
_STYLES = {"damaged": _BAD, "unreadable": {**_BAD, "fg": "yellow"}, "blocks others": _BAD}


class Code(IntEnum):
    """The exit codes. Scripts rely on these numbers."""

    OK = 0
    UNEXPECTED = 1
    USAGE = 2
    DAMAGED = 3
    UNKNOWN_KEY = 4
    LOCKED = 11
    INTERRUPTED = 130


class Failure(Exception):
    """A failure of the command; `advice` says what the user can do about it."""

    def __init__(self, message: str, advice: str, code: Code = Code.USAGE) -> None:
        super().__init__(redact_secrets(message))
        self.advice = redact_secrets(advice)
        self.code = code


def remark(text: str) -> None:
    """Print prose to stderr."""
    click.echo(_fitted(formatting.printable(text), sys.stderr), err=True)


def data(text: str) -> None:
    """Print a line of data to stdout."""
    click.echo(_fitted(formatting.printable(text), sys.stdout))


def _fitted(text: str, stream: TextIO) -> str:
    """Wrap a line for a terminal, between words.

    Long words are not broken: they may be paths to copy.
    """
    if not stream.isatty():
        return text
    found = _LABEL.match(text)
    begin = found.end() if found else 0
    max_width = max(shutil.get_terminal_size().columns - begin, _NARROWEST)
    lines = textwrap.wrap(text[begin:], max_width, break_long_words=False, break_on_hyphens=False)
    return text[:begin] + f"\n{' ' * begin}".join(lines)


def print_json(document: Document) -> None:
    """Print a document. Non-ASCII text is escaped, so keys cannot control a terminal."""
    try:
        click.echo(json.dumps({"schema": SCHEMA, **document}, indent=2, allow_nan=False))
    except ValueError as error:  # Python would write NaN, which is not JSON
        raise Failure(
            "some of the results are infinite",
            "Give realistic speeds and times.",
        ) from error


# Tables -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """A column of a table; `cell` formats its part of a row.

    `right` aligns numbers. Cells of a `flexible` column are shortened to fit. If the terminal is
    too narrow, `spare` columns are omitted.
    """

    title: str
    cell: Callable[[Document], str]
    right: bool = False
    flexible: bool = False
    spare: bool = False


def draw(columns: Sequence[Column], rows: Iterable[Document]) -> None:
    """Print a table to stdout, fitted to the terminal if it is one."""
    for line in lines_of(columns, rows, terminal_width()):
        # Unlike click.echo, print escapes characters that the encoding lacks.
        print(line if sys.stdout.isatty() else click.unstyle(line))


def terminal_width() -> int:
    """Return the columns of the terminal on stdout; a large number if it is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000


def styled(text: str, style: dict[str, Any]) -> str:
    """Colour a text unless `NO_COLOR` is set. `click.echo` strips colours without a terminal."""
    return text if os.environ.get("NO_COLOR") else click.style(text, **style)


def lines_of(columns: Sequence[Column], rows: Iterable[Document], max_width: int) -> Iterator[str]:
    """Yield the lines of a table, the titles first."""
    rows = list(rows)
    table = [[c.title, *(formatting.printable(c.cell(row)) for row in rows)] for c in columns]
    widths = [max(map(formatting.width, cells)) for cells in table]
    kept = _kept(widths, columns, max_width)
    if len(kept) < len(columns):
        left = ", ".join(column.title for i, column in enumerate(columns) if i not in kept)
        remark(f"Columns omitted: {left}. Use a wider terminal, or --json.")
    columns, widths = [columns[i] for i in kept], [widths[i] for i in kept]
    _narrow(widths, columns, max_width - _GAP * (len(columns) - 1))
    encoding = sys.stdout.encoding or "ascii"
    ellipsis = "…" if encoding.lower().startswith("utf") else "..."
    for number, cells in enumerate(zip(*(table[i] for i in kept), strict=True)):
        line = []
        for cell, column, width in zip(cells, columns, widths, strict=True):
            text = formatting.shorten(cell, width, ellipsis)
            gap = " " * (width - formatting.width(text))
            style = _STYLES.get(cell) if number else {"bold": True}
            text = styled(text, style) if style and text else text
            line.append(gap + text if column.right else text + gap)
        yield (" " * _GAP).join(line).rstrip()


def _kept(widths: Sequence[int], columns: Sequence[Column], max_width: int) -> list[int]:
    """Return the columns to show, omitting spare ones from the last until the table fits."""
    least = [min(w, _NARROWEST) if c.flexible else w for w, c in zip(widths, columns, strict=True)]
    kept = list(range(len(columns)))
    for i in reversed([i for i, column in enumerate(columns) if column.spare]):
        if sum(least[j] + _GAP for j in kept) - _GAP > max_width:
            kept.remove(i)
    return kept


def _narrow(widths: list[int], columns: Sequence[Column], max_width: int) -> None:
    """Narrow the widest flexible column until the table fits."""
    flexible = [i for i, column in enumerate(columns) if column.flexible]
    while flexible and sum(widths) > max_width:
        widest = max(flexible, key=lambda i: widths[i])
        if widths[widest] <= _NARROWEST:
            break
        widths[widest] -= 1
