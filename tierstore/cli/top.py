"""`top`: what a service, or the stores of a process, do right now."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import click

from tierstore.cli import completing, options, words
from tierstore.cli.looks import Look, look_at_service, looks_at_page, rates
from tierstore.cli.output import Document, Failure, print_json, remark
from tierstore.cli.ps import NOBODY, units_of
from tierstore.cli.services import ask_all, asker

if TYPE_CHECKING:
    from rich.console import Console, Group, RenderableType
    from rich.table import Table

_BAR = 32
_LONGEST = 3600.0

Source = Callable[[], list[Look]]


@options.command("top", "top", "top /nvme/tierstore --once", "top http://127.0.0.1:9400/metrics")
@click.argument(
    "source", metavar="[SOCKET|DIR|URL]", required=False, shell_complete=completing.sources
)
@click.option("--once", is_flag=True, help="Show one picture, over one interval, and end.")
@click.option(
    "--interval",
    type=click.FloatRange(0.05, _LONGEST),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Between two looks.",
)
def top(source: str | None, once: bool, interval: float, as_json: bool) -> None:
    """Show what a service (tierstore-serve) does right now, until Ctrl-C.

    SOCKET is where the service listens, DIR what it serves; left out: all services of this user.
    URL is the page that any process with a store has for Prometheus. Speeds are those of the last
    interval. With --json, one picture is shown.
    """
    found = _page(source) if source and source.startswith(("http://", "https://")) else None
    look = found or _services(source)
    if look is None:
        if as_json:
            print_json({"pictures": []})
        remark(NOBODY)
    elif once or as_json:
        before = look()
        time.sleep(interval)
        rows = _compared(before, look())
        if as_json:
            print_json({"pictures": rows})
        else:
            _console().print(_picture(rows))
    else:
        _watch(look, interval)


def _page(url: str) -> Source:
    return lambda: looks_at_page(url)


def _services(name: str | None) -> Source | None:
    """Looks at all that answer now; None if nobody does."""
    ask = asker()
    paths = list(ask_all(name, ask))
    return (lambda: [look_at_service(ask(path)) for path in paths]) if paths else None


def _compared(before: Iterable[Look], after: Iterable[Look]) -> list[Document]:
    earlier = {look.name: look for look in before}
    return [rates(earlier.get(look.name), look) for look in after]


def _watch(look: Source, interval: float) -> None:
    """Show a picture after each interval, until Ctrl-C. Whoever is gone may come back."""
    from rich.live import Live

    console = _console()
    before = look()
    try:
        with Live(console=console, auto_refresh=False, redirect_stderr=False) as live:
            while True:
                try:
                    after = look()
                    shown = _picture(_compared(before, after))
                    before = after
                except Failure as failure:
                    shown = _picture([], f"{failure} (looking again every {interval:g} s)")
                if console.is_terminal:
                    live.update(shown, refresh=True)
                else:
                    console.print(shown)
                time.sleep(interval)
    except KeyboardInterrupt:
        pass  # the way to end it


# Drawing ------------------------------------------------------------------------------------------


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False, emoji=False, markup=False)
    if not console.file.isatty():
        console.width = 120
    return console


def _picture(rows: Sequence[Document], problem: str = "") -> Group:
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for row in rows:
        if parts:
            parts.append(Text())
        parts.append(Text(words.printable(row["name"]), style="bold"))
        parts.append(_tiers(row))
        parts.append(Text(_speeds(row)))
        if row["workers"]:
            parts.append(_workers(row["workers"], units_of(row)))
    if problem:
        parts.append(Text(words.printable(problem), style="bold red"))
    return Group(*parts)


def _tiers(row: Document) -> Table:
    from rich.progress_bar import ProgressBar

    table, units = _table("TIER", "USED", "BUDGET", ""), units_of(row)
    for name, tier in row["tiers"].items():
        used, budget = tier["used"], tier["budget"]
        bar = ProgressBar(total=budget, completed=min(used, budget), width=_BAR) if budget else ""
        room = "no limit" if budget is None else words.size(budget, units)
        table.add_row(words.printable(name), words.size(used, units), room, bar)
    return table


def _speeds(row: Document) -> str:
    units = units_of(row)
    parts = [
        f"{words.printable(hop)} {'-' if speed is None else words.size(speed, units) + '/s'}"
        for hop, speed in row["bytes_per_second"].items()
    ]
    hits = f"hits {_rate(row['hits_per_second'])} of {_rate(row['acquires_per_second'])} leases/s"
    return "; ".join([*parts, hits])


def _workers(workers: Iterable[Document], units: words.Units) -> Table:
    table = _table("PID", "NAME", "LEASED", "WAITS", "LEASES/S", "HITS/S")
    for worker in sorted(workers, key=lambda w: (-w["waits"], -w["leased_bytes"])):
        table.add_row(
            words.printable(worker["pid"]),
            words.shorten(words.printable(worker["name"]), 40),
            words.size(worker["leased_bytes"], units),
            f"{worker['waits']:,.0f}",
            _rate(worker["acquires_per_second"]),
            _rate(worker["hits_per_second"]),
        )
    return table


def _table(*titles: str) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for title in titles:
        words_in_it = title in ("TIER", "NAME", "")
        table.add_column(Text(title), justify="left" if words_in_it else "right", no_wrap=True)
    return table


def _rate(per_second: float | None) -> str:
    return "-" if per_second is None else f"{per_second:,.1f}"
