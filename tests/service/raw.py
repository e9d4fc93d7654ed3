"""Workers that behave as no store does: they talk to a service message by message."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from tierstore.wire import messages as m
from tierstore.wire.framing import Incoming, Outgoing

M = TypeVar("M", bound=m.Message)
PAGE = 4096


class RawWorker:
    """A connection to the service at `path`. Its messages may be invalid."""

    def __init__(self, path: str, name: str | None = "raw") -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        self.socket.settimeout(10)
        self.descriptors: list[int] = []
        self.came: list[m.Message] = []
        self._outgoing = Outgoing()
        self._incoming = Incoming[m.Message](m.FromService)
        self._requests = 0
        if name is not None:
            self.send(m.Hello(m.VERSION, name))
            self.welcome = self.take(m.Welcome)

    def send(self, message: m.Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message, with these descriptors."""
        self.send_bytes(self._outgoing.encode(message), descriptors)

    def send_bytes(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        if descriptors:
            sent = socket.send_fds(self.socket, [data], list(descriptors))
            data = data[sent:]
        if data:
            self.socket.sendall(data)

    def take(self, kind: type[M]) -> M:
        """Return the next message of this kind; earlier ones of other kinds are kept in `came`.

        Raises ConnectionError if the connection ends before.
        """
        while True:
            for number, message in enumerate(self.came):
                if isinstance(message, kind):
                    return self.came.pop(number)  # type: ignore[return-value]
            data, passed, _, _ = socket.recv_fds(self.socket, 65536, 4)
            self.descriptors += passed
            if not data:
                raise ConnectionError(f"it has ended; what came before: {self.came}")
            self.came += self._incoming.feed(data)

    def why_refused(self) -> str:
        """Return the service's last message to this worker; it must close the connection then."""
        why = self.take(m.Refused).why
        with contextlib.suppress(ConnectionResetError):  # it has not read everything that was sent
            assert not self.socket.recv(1)
        return why

    def ended(self, seconds: float = 10.0) -> bool:
        """Return whether the service closes the connection within this time."""
        ends = time.monotonic() + seconds
        self.socket.settimeout(seconds)
        with contextlib.suppress(ConnectionResetError, TimeoutError):
            while self.socket.recv(1 << 20):
                if time.monotonic() > ends:
                    return False
            return True
        return time.monotonic() < ends

    def open(self, path: Path, /, **changes: object) -> None:
        """Send a file with its true description, except for the changes."""
        with open(path, "rb") as file:
            self.send(m.Open([row_of(path, **changes)]), [file.fileno()])

    def request(self) -> int:
        self._requests += 1
        return self._requests

    def register(self, groups: Sequence[m.Group]) -> list[int]:
        """Register groups; return their numbers. Raises ConnectionError if the service refuses."""
        self.send(m.Register(self.request(), list(groups)))
        return self.take(m.Registered).groups

    def lease(self, group: int) -> m.Leased | m.Failed:
        """Return the service's answer."""
        request = self.request()
        self.send(m.Lease(request, group))
        while True:
            answer = self.take(m.Message)
            if isinstance(answer, m.Leased | m.Failed) and answer.request == request:
                return answer

    def arena(self, answer: m.Leased) -> bytes:
        """Return the bytes at the place in the service's memory that its answer names."""
        return os.pread(self.descriptors[0], answer.nbytes, answer.offset)

    def ping(self) -> None:
        """Check that the service answers."""
        self.send(m.Ping())
        self.take(m.Pong)

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()
        self.socket.close()

    def __enter__(self) -> RawWorker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def row_of(path: Path, /, **changes: object) -> m.File:
    """Return the description of a file as a service gets it."""
    status = path.stat()
    stamp = (
        status.st_dev,
        status.st_ino,
        status.st_size,
        m.time_of(status.st_mtime_ns),
        m.time_of(status.st_ctime_ns),
    )
    fields = {"path": str(path), "stamp": stamp, "header_digest": None, "direct": False}
    return m.File(**(fields | changes))  # type: ignore[arg-type]


def pages(first: int, number: int = 1, file: int = 0) -> m.Group:
    """Return a group of `number` pages of a file, from page `first` on."""
    nbytes = number * PAGE
    return m.Group(nbytes, [m.Piece(file, first * PAGE, nbytes, 0)], [], [])
