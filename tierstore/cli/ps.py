"""`ps`: who works with the services of this machine."""

from __future__ import annotations

import click

from tierstore.cli import completing, options, words
from tierstore.cli.output import Column, Document, data, draw, print_json, remark
from tierstore.cli.services import ask_all, asker

NOBODY = "No service of this user runs on this machine. Start one: tierstore-serve DIR --ram SIZE"

_WORKERS = (
    Column("PID", lambda w: str(w["pid"]), right=True),
    Column("NAME", lambda w: w["name"], flexible=True),
    Column("SINCE", lambda w: words.ago(w["since"]), spare=True),
    Column("GROUPS", lambda w: f"{w['groups']:,}", right=True, spare=True),
    Column("LEASES", lambda w: f"{w['leases']:,}", right=True),
    Column("LEASED", lambda w: words.size(w["leased_bytes"], w["units"]), right=True),
    Column("LONGEST", lambda w: _seconds(w["longest_lease_seconds"], w["leases"]), right=True),
    Column("WAITS", lambda w: f"{w['waits']:,}", right=True),
    Column("WAITING", lambda w: _seconds(w["waiting_seconds"], w["waits"]), right=True),
    Column("GRANTED", lambda w: f"{w['granted']:,}", right=True, spare=True),
    Column("HITS", lambda w: f"{w['hits']:,}", right=True, spare=True),
    Column("STATE", lambda w: state_of(w)),
)


@options.command("ps", "ps", "ps /nvme/tierstore", "ps --json")
@click.argument("socket", metavar="[SOCKET|DIR]", required=False, shell_complete=completing.sources)
def list_workers(socket: str | None, as_json: bool) -> None:
    """List the workers of a service (tierstore-serve): what each leases, and waits for.

    SOCKET is where the service listens, DIR what it serves; left out: all services of this user.
    LONGEST is how long a worker has had its oldest lease, WAITING how long it has waited for the
    one that it waits for longest. Of the leases GRANTED, HITS were in memory when they were asked
    for. A worker that has had a lease for more than 30 s while another one waits holds others up.
    """
    services = list(ask_all(socket, asker()).values())
    if as_json:
        print_json({"services": services})
        return
    for number, service in enumerate(services):
        if number:
            data("")
        _show(service)
    if not services:
        remark(NOBODY)


def _show(service: Document) -> None:
    data(told(service))
    units = units_of(service)
    if service["workers"]:
        draw(_WORKERS, [{**worker, "units": units} for worker in service["workers"]])
    used = [
        f"{name} {words.size(tier['used'], units)}{_budget(tier, units)}"
        for name, tier in service["tiers"].items()
    ]
    read, written = (words.size(service[name], units) for name in ("bytes_read", "bytes_written"))
    data(
        f"{words.count(len(service['workers']), 'worker')}, "
        f"{words.count(service['groups'], 'group')}; {', '.join(used)}; "
        f"{read} read, {written} written"
    )


def told(service: Document) -> str:
    """A service in one line."""
    since = words.moment(service["since"])
    return (
        f"{service['directory']} by process {service['pid']} at {service['socket']}, since {since}"
    )


def state_of(worker: Document) -> str:
    """What a worker does, in two words."""
    if worker["holds_up"]:
        return "holds others up"
    return "waits" if worker["waits"] else "ok"


def units_of(service: Document) -> words.Units:
    """The units in which somebody wrote its budget."""
    return words.units_of_tiers({name: tier["budget"] for name, tier in service["tiers"].items()})


def _budget(tier: Document, units: words.Units) -> str:
    return "" if tier["budget"] is None else f" of {words.size(tier['budget'], units)}"


def _seconds(seconds: float, count: int) -> str:
    return f"{seconds:.1f} s" if count else "-"
