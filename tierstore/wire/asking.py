"""Asks a service what it does, as somebody who is no worker of it."""

from __future__ import annotations

import socket
import time

from tierstore.errors import TierStoreError
from tierstore.wire import messages
from tierstore.wire.framing import Incoming, NonsenseError, Outgoing
from tierstore.wire.peers import connect_to_own

SECONDS = 5.0
"""Seconds for the answer; a service that has just been started is still loading its libraries."""

_AT_ONCE = 65536


class NoAnswerError(TierStoreError, ConnectionError):
    """Nobody answers at a socket, or not as a service does."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"no service answers at {path}: {why}")


def report_of(path: str, seconds: float = SECONDS) -> messages.Report:
    """What the service does that listens at `path`. Waits for up to `seconds`.

    Raises NoAnswerError.
    """
    try:
        made = connect_to_own(path, seconds)
    except OSError as error:
        raise NoAnswerError(path, error.strerror or str(error)) from error
    with made:
        try:
            made.sendall(Outgoing().encoded(messages.Status(0)))
            answer = _first(made, time.monotonic() + seconds)
        except TimeoutError as error:
            why = f"it has said nothing for {seconds:g} s; if it was just started, ask again"
            raise NoAnswerError(path, why) from error
        except (OSError, NonsenseError) as error:
            raise NoAnswerError(path, str(error)) from error
    if isinstance(answer, messages.Refused):
        raise NoAnswerError(path, f"it refuses: {answer.why}")
    if not isinstance(answer, messages.Report):
        raise NoAnswerError(path, f"it answers with a {type(answer).__name__}")
    return answer


def _first(connected: socket.socket, ends: float) -> messages.Message:
    """The first message that comes. Raises TimeoutError, OSError, NonsenseError."""
    incoming = Incoming[messages.Message](messages.FromService)
    while True:
        left = ends - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connected.settimeout(left)
        data = connected.recv(_AT_ONCE)
        if not data:
            raise NonsenseError("it closed the connection: it may be another user's")
        for message in incoming.feed(data):
            return message
