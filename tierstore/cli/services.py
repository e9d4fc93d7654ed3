"""The services of this machine, as they tell of themselves."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import TYPE_CHECKING

from tierstore.cli.output import Code, Document, Failure, remark
from tierstore.service import sockets

if TYPE_CHECKING:
    from tierstore.wire.messages import Report

_OTHERS_WAIT = 1.0
"""Seconds after which a wait is for another worker, rather than for the disk."""


def sockets_named(name: str | None) -> list[str]:
    """The sockets to ask at: of a socket's or a served directory's name, or all of this user."""
    if name is None:
        return sockets.running()
    try:
        mode = os.stat(name).st_mode
    except OSError as error:
        raise Failure(
            f"{name} is neither a socket nor a directory that is served: {error.strerror}",
            "Give the socket that tierstore-serve names when it starts, or its DIR.",
        ) from error
    return [sockets.default_socket(name) if stat.S_ISDIR(mode) else name]


def asker() -> Callable[[str], Document]:
    """Asks the service at a socket for what it does; raises Failure if none answers there.

    Raises Failure if a package is missing.
    """
    try:
        from tierstore.wire.asking import NoAnswerError, report_of
    except ModuleNotFoundError as error:
        raise Failure(
            f"to ask a service takes a package that is missing ({error.name})",
            "Install it: pip install 'tierstore[serve]'",
        ) from error

    def ask(path: str) -> Document:
        try:
            return {**service_row(report_of(path)), "socket": os.path.abspath(path)}
        except NoAnswerError as error:
            raise Failure(
                str(error),
                "Start it: tierstore-serve DIR --ram SIZE. If it has a --socket of its own, give "
                "that one.",
                Code.UNEXPECTED,
            ) from error

    return ask


def ask_all(name: str | None, ask: Callable[[str], Document]) -> dict[str, Document]:
    """What the services do at `name` (see `sockets_named`), by their sockets: those that answer.

    Raises Failure if `name` is given and nobody answers there.
    """
    found = {}
    for path in sockets_named(name):
        try:
            found[path] = ask(path)
        except Failure as failure:
            if name is not None:
                raise
            remark(f"{failure}. If its service was killed, the next one there replaces it.")
    return found


def service_row(report: Report) -> Document:
    """A service and its workers: bytes, seconds, and moments in seconds since 1970."""
    workers = [
        {
            "pid": worker.pid,
            "name": worker.name,
            "since": worker.since,
            "groups": worker.groups,
            "leases": worker.leases,
            "leased_bytes": worker.leased_bytes,
            "waits": worker.waits,
            "waiting_seconds": worker.waiting,
            "longest_lease_seconds": worker.longest_lease,
            "granted": worker.granted,
            "granted_bytes": worker.granted_bytes,
            "hits": worker.hits,
            "holds_up": _holds_up(number, report),
        }
        for number, worker in enumerate(report.workers)
    ]
    return {
        "directory": report.directory,
        "socket": report.socket,  # as the service sees it
        "pid": report.pid,
        "since": report.since,
        "tiers": {
            tier: {"used": used, "budget": budget} for tier, (used, budget) in report.tiers.items()
        },
        "bytes_read": report.read_bytes,
        "bytes_written": report.written_bytes,
        "groups": report.groups,
        "workers": workers,
    }


def _holds_up(number: int, report: Report) -> bool:
    """Whether a worker has had a lease for long while another one waits for room."""
    from tierstore.wire.messages import HELD_SECONDS

    others = (other for at, other in enumerate(report.workers) if at != number)
    waiting = max((other.waiting for other in others if other.waits), default=0.0)
    return waiting > _OTHERS_WAIT and report.workers[number].longest_lease > HELD_SECONDS
