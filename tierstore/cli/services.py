"""The commands `ps` and `top`: the services of this machine, and the activity of stores."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from tierstore.cli import options
from tierstore.cli.output import (
    Code,
    Column,
    Document,
    Failure,
    data,
    draw,
    lines_of,
    print_json,
    remark,
    styled,
    terminal_width,
)
from tierstore.cli.sampling import Sample, rates, sample_of_service, samples_at
from tierstore.model.formatting import (
    Units,
    ago,
    count,
    moment,
    printable,
    shorten,
    size,
    units_of_tiers,
)
from tierstore.service import sockets

if TYPE_CHECKING:
    from tierstore.wire.messages import Report

NO_SERVICE = (
    "This user runs no service on this machine. Start one with: tierstore-serve DIR --ram SIZE"
)

_BLOCKED_AFTER = 1.0
"""Seconds after which a wait is attributed to another worker instead of the disk."""
_BAR = 32
_LONGEST = 3600.0

# Queries ------------------------------------------------------------------------------------------


def service_row(report: Report) -> Document:
    """Describe a service and its workers: bytes, seconds, and moments in seconds since 1970."""
    same = [
        "pid",
        "name",
        "since",
        "groups",
        "leases",
        "leased_bytes",
        "waits",
        "granted",
        "granted_bytes",
        "hits",
    ]
    tiers = report.tiers.items()
    return {
        "directory": report.directory,
        "socket": report.socket,  # as the service sees it
        "pid": report.pid,
        "since": report.since,
        "tiers": {tier: {"used": used, "budget": budget} for tier, (used, budget) in tiers},
        "bytes_read": report.read_bytes,
        "bytes_written": report.written_bytes,
        "groups": report.groups,
        "workers": [
            {
                **{name: getattr(worker, name) for name in same},
                "waiting_seconds": worker.waiting,
                "longest_lease_seconds": worker.longest_lease,
                "holds_up": _holds_up(number, report),
            }
            for number, worker in enumerate(report.workers)
        ],
    }


def _holds_up(number: int, report: Report) -> bool:
    """Return whether a worker has a long-lived lease while another one waits for space."""
    from tierstore.wire.messages import HELD_SECONDS

    others = (other for at, other in enumerate(report.workers) if at != number)
    waiting = max((other.waiting for other in others if other.waits), default=0.0)
    return waiting > _BLOCKED_AFTER and report.workers[number].longest_lease > HELD_SECONDS


def _check_packages() -> None:
    try:
        import msgspec  # noqa: F401
    except ModuleNotFoundError as error:
        raise Failure(
            f"querying a service requires a missing package ({error.name})",
            "Install it: pip install 'tierstore[serve]'",
        ) from error


def _query(path: str) -> Document:
    """Query the service at a socket. Raises Failure."""
    from tierstore.wire.status import NoAnswerError, query_status

    try:
        return {**service_row(query_status(path)), "socket": os.path.abspath(path)}
    except NoAnswerError as error:
        advice = "Start it with: tierstore-serve DIR --ram SIZE. If it has a --socket, give that."
        raise Failure(str(error), advice, Code.UNEXPECTED) from error


def _query_all(name: str | None) -> dict[str, Document]:
    """Query the service at a socket or of a served directory, or all services of this user.

    Returns the answers by socket. Raises Failure if a package is missing, or if no service answers
    at `name`.
    """
    _check_packages()
    if name is not None:
        try:
            is_directory = stat.S_ISDIR(os.stat(name).st_mode)
        except OSError as error:
            missing = isinstance(error, FileNotFoundError | NotADirectoryError)
            problem = f"{name} cannot be accessed: {error.strerror}"
            raise Failure(
                f"there is no socket or directory {name}" if missing else problem,
                "Give the socket that tierstore-serve prints at startup, or its DIR.",
            ) from error
        path = sockets.default_socket(name) if is_directory else name
        return {path: _query(path)}
    found = {}
    for path in sockets.running():
        try:
            found[path] = _query(path)
        except Failure as failure:
            remark(f"{failure}. If its service was killed, the next one replaces the socket.")
    return found


# ps -----------------------------------------------------------------------------------------------


def _seconds(seconds: float, number: int) -> str:
    return f"{seconds:.1f} s" if number else "-"


def _state(worker: Document) -> str:
    if worker["holds_up"]:
        return "blocks others"
    return "waiting" if worker["waits"] else "ok"


_WORKERS = (
    Column("PID", lambda w: str(w["pid"]), right=True),
    Column("NAME", lambda w: w["name"], flexible=True),
    Column("SINCE", lambda w: ago(w["since"]), spare=True),
    Column("GROUPS", lambda w: f"{w['groups']:,}", right=True, spare=True),
    Column("LEASES", lambda w: f"{w['leases']:,}", right=True),
    Column("LEASED", lambda w: size(w["leased_bytes"], w["units"]), right=True),
    Column("LONGEST", lambda w: _seconds(w["longest_lease_seconds"], w["leases"]), right=True),
    Column("WAITS", lambda w: f"{w['waits']:,}", right=True),
    Column("WAITING", lambda w: _seconds(w["waiting_seconds"], w["waits"]), right=True),
    Column("GRANTED", lambda w: f"{w['granted']:,}", right=True, spare=True),
    Column("HITS", lambda w: f"{w['hits']:,}", right=True, spare=True),
    Column("STATE", _state),
)


@options.command("ps", "ps", "ps /nvme/tierstore", "ps --json")
@click.argument(
    "socket", metavar="[SOCKET|DIR]", required=False, shell_complete=options.complete_files
)
def list_workers(socket: str | None, as_json: bool) -> None:
    """List the workers of a service (tierstore-serve): their leases and waits.

    SOCKET is the service's socket, DIR the directory that it serves (default: all services of this
    user). LONGEST is the age of a worker's oldest lease, WAITING its longest current wait. HITS is
    the number of GRANTED leases that were in memory already. A worker "blocks others" if it has had
    a lease for more than 30 s while another one waits.
    """
    services = list(_query_all(socket).values())
    if as_json:
        print_json({"services": services})
        return
    for number, service in enumerate(services):
        if number:
            data("")
        _show(service)
    if not services:
        remark(NO_SERVICE)


def _show(service: Document) -> None:
    since, units = moment(service["since"]), _units(service)
    where = f"{service['directory']} by process {service['pid']} at {service['socket']}"
    data(f"{where}, since {since}")
    if service["workers"]:
        draw(_WORKERS, [{**worker, "units": units} for worker in service["workers"]])
    used = [
        f"{name} {size(tier['used'], units)}"
        + ("" if tier["budget"] is None else f" of {size(tier['budget'], units)}")
        for name, tier in service["tiers"].items()
    ]
    read, written = (size(service[name], units) for name in ("bytes_read", "bytes_written"))
    counts = f"{count(len(service['workers']), 'worker')}, {count(service['groups'], 'group')}"
    data(f"{counts}; {', '.join(used)}; {read} read, {written} written")


def _units(service: Document) -> Units:
    return units_of_tiers({name: tier["budget"] for name, tier in service["tiers"].items()})


# top ----------------------------------------------------------------------------------------------


@options.command("top", "top", "top /nvme/tierstore --once", "top http://127.0.0.1:9400/metrics")
@click.argument(
    "source", metavar="[SOCKET|DIR|URL]", required=False, shell_complete=options.complete_files
)
@click.option("--once", is_flag=True, help="Show one interval and exit.")
@click.option(
    "--interval",
    type=click.FloatRange(0.05, _LONGEST),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two samples.",
)
def top(source: str | None, once: bool, interval: float, as_json: bool) -> None:
    """Show the activity of a service (tierstore-serve) until Ctrl-C.

    SOCKET is the service's socket, DIR the directory that it serves (default: all services of this
    user). URL is the Prometheus page of any process with a store. Rates are averages over the last
    interval. With --json, prints one interval and exits.
    """
    poll = _poller(source)
    if poll is None:
        if as_json:
            print_json({"pictures": []})
        remark(NO_SERVICE)
        return
    before = poll()
    if as_json or once:
        time.sleep(interval)
        rows = _compare(before, poll())
        if as_json:
            print_json({"pictures": rows})
        else:
            click.echo("\n".join(_picture(rows)))
        return
    with suppress(KeyboardInterrupt):
        _watch(poll, before, interval)


def _poller(source: str | None) -> Callable[[], list[Sample]] | None:
    """Return a function that samples the source; None if no service answers."""
    if source and source.startswith(("http://", "https://")):
        return lambda: samples_at(source)
    paths = list(_query_all(source))
    return (lambda: [sample_of_service(_query(path)) for path in paths]) if paths else None


def _compare(before: Sequence[Sample], after: Sequence[Sample]) -> list[Document]:
    earlier = {sample.name: sample for sample in before}
    return [rates(earlier.get(sample.name), sample) for sample in after]


def _watch(poll: Callable[[], list[Sample]], before: list[Sample], interval: float) -> None:
    """Show the rates of each interval. A source that fails is retried."""
    drawn = 0
    while True:
        try:
            after = poll()
            lines = list(_picture(_compare(before, after)))
            before = after
        except Failure as failure:
            text = f"{failure} (retrying every {interval:g} s)"
            lines = [styled(printable(text), {"fg": "red", "bold": True})]
        # Move up to the first line, and clear the terminal from there.
        click.echo((f"\x1b[{drawn}A\r\x1b[J" if drawn else "") + "\n".join(lines))
        width = terminal_width()
        drawn = sum(max(-(-len(click.unstyle(line)) // width), 1) for line in lines)
        time.sleep(interval)


def _picture(rows: Sequence[Document]) -> Iterator[str]:
    for number, row in enumerate(rows):
        if number:
            yield ""
        units, width = _units(row), terminal_width()
        yield styled(printable(row["name"]), {"bold": True})
        tiers = [{"name": name, **tier} for name, tier in row["tiers"].items()]
        yield from lines_of(_tier_columns(units), tiers, width)
        moved = row["bytes_per_second"].items()
        parts = [
            f"{hop} {'-' if speed is None else size(speed, units) + '/s'}" for hop, speed in moved
        ]
        hits, leases = (_rate(row[name]) for name in ("hits_per_second", "acquires_per_second"))
        yield printable("; ".join([*parts, f"hits {hits} of {leases} leases/s"]))
        if row["workers"]:
            busiest = sorted(row["workers"], key=lambda w: (-w["waits"], -w["leased_bytes"]))
            yield from lines_of(_worker_columns(units), busiest, width)


def _tier_columns(units: Units) -> tuple[Column, ...]:
    def budget(tier: Document) -> str:
        return "no limit" if tier["budget"] is None else size(tier["budget"], units)

    def bar(tier: Document) -> str:
        share = min(tier["used"] / tier["budget"], 1.0) if tier["budget"] else 0.0
        return "#" * round(share * _BAR)

    return (
        Column("TIER", lambda tier: tier["name"]),
        Column("USED", lambda tier: size(tier["used"], units), right=True),
        Column("BUDGET", budget, right=True),
        Column("", bar),
    )


def _worker_columns(units: Units) -> tuple[Column, ...]:
    return (
        Column("PID", lambda worker: worker["pid"], right=True),
        Column("NAME", lambda worker: shorten(printable(worker["name"]), 40), flexible=True),
        Column("LEASED", lambda worker: size(worker["leased_bytes"], units), right=True),
        Column("WAITS", lambda worker: f"{worker['waits']:,.0f}", right=True),
        Column("LEASES/S", lambda worker: _rate(worker["acquires_per_second"]), right=True),
        Column("HITS/S", lambda worker: _rate(worker["hits_per_second"]), right=True),
    )


def _rate(per_second: float | None) -> str:
    return "-" if per_second is None else f"{per_second:,.1f}"
