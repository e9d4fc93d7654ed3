"""Tables for people. This imports rich, so it is imported only when a table is drawn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tierstore.cli import words
from tierstore.cli.report import Contents, Group, total
from tierstore.cli.tensors import StoredTensor

_NARROWEST = 10
_GAP = 2
_STYLES = {"damaged": "bold red", "unreadable": "bold yellow"}


@dataclass(frozen=True)
class Column:
    """A column. `right` aligns numbers; cells of a `flexible` one are shortened to fit."""

    title: str
    right: bool = False
    flexible: bool = False


def _console() -> Console:
    console = Console(highlight=False, emoji=False, markup=False)
    if not console.file.isatty():  # rich takes some pipes for terminals: FORCE_COLOR
        console.width = 10_000  # a file or another program gets whole names
    return console


def draw(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> None:
    """Print a table to stdout. Cells are plain text: nothing in them is taken for markup."""
    console = _console()
    cells = [[words.printable(cell) for cell in row] for row in rows]
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
        table.add_row(*(_cell(c, w, ellipsis) for c, w in zip(row, widths, strict=True)))
    console.print(table, soft_wrap=False)


def _cell(text: str, width: int, ellipsis: str) -> Text:
    return Text(words.shorten(text, width, ellipsis, cell_len), style=_STYLES.get(text, ""))


def _narrowed(widths: list[int], columns: Sequence[Column], room: int) -> list[int]:
    """Take what is missing from the widest flexible column, again and again."""
    widths = list(widths)
    flexible = [i for i, column in enumerate(columns) if column.flexible]
    while flexible and sum(widths) > room:
        widest = max(flexible, key=lambda i: widths[i])
        if widths[widest] <= _NARROWEST:
            break
        widths[widest] -= 1
    return widths


def groups(rows: Iterable[Group]) -> None:
    """The table of `ls`."""
    columns = [
        Column("KEY", flexible=True),
        Column("TENSORS", right=True),
        Column("DTYPES"),
        Column("SIZE", right=True),
        Column("MODIFIED"),
        Column("STATE"),
    ]
    draw(
        columns,
        (
            (
                group.item.name if group.key is None else group.key,
                f"{len(group.tensors):,}" if group.stored else "?",
                ",".join(group.dtypes) if group.stored else "?",
                words.size(group.item.nbytes),
                words.moment(group.item.modified),
                group.state,
            )
            for group in rows
        ),
    )


def tensors(rows: Iterable[StoredTensor]) -> None:
    """The table of `show`."""
    columns = [
        Column("NAME", flexible=True),
        Column("DTYPE"),
        Column("SHAPE"),
        Column("STRIDE"),
        Column("TIED"),
        Column("SIZE", right=True),
        Column("OFFSET", right=True),
        Column("XXH3"),
    ]
    draw(
        columns,
        (
            (
                tensor.spec.name,
                tensor.spec.dtype,
                _sizes(tensor.spec.shape),
                "" if tensor.contiguous else _sizes(tensor.spec.stride),
                "" if tensor.tied is None else f"#{tensor.tied}",
                words.size(tensor.spec.nbytes),
                str(tensor.offset),
                tensor.digest,
            )
            for tensor in rows
        ),
    )


def _sizes(sizes: Sequence[int]) -> str:
    return f"[{', '.join(map(str, sizes))}]"


def directories(rows: Iterable[tuple[Contents, str | None]]) -> None:
    """The table of `df`."""
    columns = [
        Column("DIRECTORY", flexible=True),
        Column("GROUPS", right=True),
        Column("OBJECTS", right=True),
        Column("RECLAIMABLE", right=True),
        Column("QUARANTINE", right=True),
        Column("FREE", right=True),
        Column("FILE SYSTEM"),
    ]
    draw(
        columns,
        (
            (
                contents.directory,
                f"{len(contents.groups):,}",
                words.size(total(group.item for group in contents.groups)),
                words.size(reclaimable(contents)),
                words.size(total(contents.quarantine)),
                words.size(contents.free),
                file_system or "?",
            )
            for contents, file_system in rows
        ),
    )


def reclaimable(contents: Contents) -> int:
    """Bytes that hold no group."""
    return total(
        (*contents.temporary, *contents.stray, *(group.item for group in contents.damaged))
    )
