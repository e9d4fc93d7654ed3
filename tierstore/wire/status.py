"""Queries the status of a service, without being one of its workers."""

from __future__ import annotations

import socket
import time

from tierstore.errors import TierStoreError
from tierstore.wire import messages
from tierstore.wire.framing import Incoming, Outgoing, ProtocolError
from tierstore.wire.peers import connect_to_own

SECONDS = 5.0
"""Seconds to wait for the answer; a service that has just started still loads its libraries."""

_AT_ONCE = 65536


class NoAnswerError(TierStoreError, ConnectionError):
    """No service answers at a socket, or the answer violates the protocol."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"no service answers at {path}: {reason}")


def query_status(path: str, seconds: float = SECONDS) -> messages.Report:
    """Return the status of the service that listens at `path`. Waits for up to `seconds`.

    Raises NoAnswerError.
    """
    try:
        made = connect_to_own(path, seconds)
    except OSError as error:
        raise NoAnswerError(path, error.strerror or str(error)) from error
    with made:
        try:
            made.sendall(Outgoing().encode(messages.Status(0)))
            answer = _receive_message(made, time.monotonic() + seconds)
        except TimeoutError as error:
            reason = f"no answer within {seconds:g} s; if it was just started, try again"
            raise NoAnswerError(path, reason) from error
        except (OSError, ProtocolError) as error:
            raise NoAnswerError(path, str(error)) from error
    if isinstance(answer, messages.Refused):
        raise NoAnswerError(path, f"it refused: {answer.why}")
    if not isinstance(answer, messages.Report):
        raise NoAnswerError(path, f"it answered with a {type(answer).__name__}")
    return answer


def _receive_message(connected: socket.socket, ends: float) -> messages.Message:
    """Receive one message. Raises TimeoutError, OSError, ProtocolError."""
    incoming = Incoming[messages.Message](messages.FromService)
    while True:
        left = ends - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connected.settimeout(left)
        data = connected.recv(_AT_ONCE)
        if not data:
            raise ProtocolError("it closed the connection: it may be another user's")
        for message in incoming.feed(data):
            return message
