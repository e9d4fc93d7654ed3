"""A proxy between workers and a service that harms one message of one connection.

Messages are passed on one by one, with their descriptors. The first connection through a `Proxy`
has the fault; all others are passed on as they are.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from tierstore.wire.framing import HEAD


class Harm(Enum):
    """Functions that change a message."""

    NONE = "passed on"
    LOST = "lost"
    DOUBLED = "doubled"
    SHORT = "its second half is lost"
    ENDED = "the connection ends in the middle of it"
    GARBLED = "a bit of its body, or of its checksum, is another"
    LONGER = "its head says that it is longer"
    RENUMBERED = "its head has another number"


@dataclass(frozen=True)
class Fault:
    """Harm to message `number` (from 0) to the service (`up`), or from it."""

    up: bool
    number: int
    harm: Harm


@dataclass(eq=False)
class Proxy:
    """Listens at `path`, and forwards to the service at `target`."""

    target: str
    fault: Fault
    done: int = 0  # messages that were harmed
    passed: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})

    def __post_init__(self) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="tp-")
        self.path = os.path.join(self._place.name, "p")
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(self.path)
        self._listening.listen(8)
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                worker, _ = self._listening.accept()
                service = socket.socket(socket.AF_UNIX)
                service.connect(self.target)
                first = not self._ends
                self._ends += [worker, service]
                for up, source, target in ((True, worker, service), (False, service, worker)):
                    words = source, target, up, first
                    thread = threading.Thread(target=self._pass_on, args=words)
                    self._threads.append(thread)
                    thread.start()

    def _pass_on(
        self, source: socket.socket, target: socket.socket, up: bool, faulty: bool
    ) -> None:
        with contextlib.suppress(OSError):
            for number, (message, descriptors) in enumerate(messages_from(source)):
                harm = Harm.NONE
                if faulty:
                    self.passed[up] += 1
                    if (up, number) == (self.fault.up, self.fault.number):
                        harm = self.fault.harm
                try:
                    self._send(target, message, descriptors, harm)
                finally:
                    for descriptor in descriptors:
                        os.close(descriptor)
                if harm is Harm.ENDED:
                    with contextlib.suppress(OSError):
                        source.shutdown(socket.SHUT_RDWR)
                    break
        # The end of one side closes the other, in this direction only.
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def _send(
        self, target: socket.socket, message: bytes, descriptors: list[int], harm: Harm
    ) -> None:
        what = harmed(message, harm)
        if harm is not Harm.NONE:
            assert what != message
            self.done += 1
        if what and descriptors:
            sent = socket.send_fds(target, [what], descriptors)
            what = what[sent:]
        target.sendall(what)
        if harm is Harm.ENDED:
            target.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """End all current connections."""
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End all connections, and stop listening."""
        self._listening.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
        for end in [self._listening, *self._ends]:
            end.close()
        self._place.cleanup()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def messages_from(source: socket.socket) -> Iterator[tuple[bytes, list[int]]]:
    """Yield each message with its head, and the descriptors that came with it."""
    buffer, descriptors = b"", []
    while True:
        while len(buffer) >= HEAD.size:
            end = HEAD.size + HEAD.unpack_from(buffer)[0]
            if len(buffer) < end:
                break
            message, buffer = buffer[:end], buffer[end:]
            yield message, descriptors
            descriptors = []
        data, passed, _, _ = socket.recv_fds(source, 65536, 128)
        if not data:
            return
        buffer += data
        descriptors += passed


def harmed(message: bytes, harm: Harm) -> bytes:
    """Return the changed message, with its head."""
    nbytes, number, checksum = HEAD.unpack_from(message)
    body = message[HEAD.size :]
    if harm is Harm.LOST:
        return b""
    if harm is Harm.DOUBLED:
        return message * 2
    if harm in (Harm.SHORT, Harm.ENDED):
        return message[: len(message) // 2]
    if harm is Harm.GARBLED:
        changed = bytearray(message)
        changed[len(message) * 2 // 3] ^= 4
        return bytes(changed)
    if harm is Harm.LONGER:
        return HEAD.pack(nbytes + 1000, number, checksum) + body
    if harm is Harm.RENUMBERED:
        return HEAD.pack(nbytes, number + 1, checksum) + body
    return message
