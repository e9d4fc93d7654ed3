"""One connection of a worker to a service: what it asks, and what it is told unasked.

What was leased over a wire that is lost stays readable: the arena's memory lives as long as
somebody has it mapped, and the service leaves alone what was leased until the worker hangs up. So
who is let go by a service that is alive hangs up only when it has given all leases of that wire
back.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import sys
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from tierstore.errors import ServiceLostError, TierStoreError
from tierstore.model.locks import RLock, serve, under
from tierstore.system.file_table import FileTable, HeldFile
from tierstore.system.files import close_quietly
from tierstore.tiers.entry import SharedGroup
from tierstore.tiers.shared_memory import SharedMap
from tierstore.wire import messages
from tierstore.wire.framing import Incoming, NonsenseError, Outgoing
from tierstore.wire.messages import FromService, Message
from tierstore.wire.peers import ForeignServiceError, connect_to_own

AT_MOST = 65536
"""Bytes that are read from the socket at once."""

HELLO_SECONDS = 60.0
"""Seconds for the service to answer who connects; it may be at loading its libraries."""

PING_SECONDS = 1.0
"""Seconds after which who waits for an answer asks whether the messages arrive."""

FULL_SECONDS = 0.1
"""Seconds between checks, while the service reads nothing, whether the connection has ended."""

UNFINISHED_SECONDS = 10.0
"""Seconds in which a message must have come as a whole, where somebody waits for one."""

M = TypeVar("M")


@dataclass(eq=False)
class SharedLease:
    """A group in the service's arena, as `memory` (uint8) here, until it is released."""

    wire: Wire
    request: int
    offset: int
    memory: torch.Tensor


@dataclass(frozen=True)
class Listener:
    """Who is told what a service says unasked, by the thread that reads: it must not wait for an
    answer of the service.

    `allowance`: how many bytes may be leased from now on. `reclaim`: others need room.
    """

    allowance: Callable[[int], None]
    reclaim: Callable[[], None]


class Wire:
    """One connection to the service that listens at `path`, from its greeting to its end.

    Raises ServiceLostError if nobody listens there, TierStoreError if the service refuses, or is
    another user's.
    """

    def __init__(self, path: str, listener: Listener, *, private: bool) -> None:
        self.path = path
        self.lost: str | None = None  # why
        self.numbers: weakref.WeakKeyDictionary[SharedGroup, int] = weakref.WeakKeyDictionary()
        self._files: weakref.WeakKeyDictionary[HeldFile, int] = weakref.WeakKeyDictionary()
        self._opened = 0
        self._held: set[int] = set()  # requests whose leases are here, or may come
        self._over = False  # nobody reads any more
        self._unfinished: float | None = None  # since when a message has been there in part
        self._listener = listener
        self._private = private
        self._outgoing = Outgoing()
        self._incoming = Incoming[Message](FromService)
        self._waiting: dict[int, Future[Any]] = {}
        self._requests = itertools.count(1)
        self._sending = RLock()
        self._socket = _connected(path)
        try:
            self.welcome, self.map = self._greet()
        except BaseException:
            self._socket.close()
            raise
        self._reader = threading.Thread(
            target=serve, args=(self._read,), name="tierstore-service", daemon=True
        )
        self._reader.start()

    def _greet(self) -> tuple[messages.Welcome, SharedMap]:
        """Say hello. Returns the answer, and the arena."""
        name = os.path.basename(sys.argv[0] if sys.argv else "") or "python"
        hello = messages.Hello(messages.VERSION, _shown(name)[:200])
        descriptors: list[int] = []
        self._socket.settimeout(HELLO_SECONDS)
        try:
            self._socket.sendall(self._outgoing.encoded(hello))
            welcome, *more = self._first_messages(descriptors)
            if isinstance(welcome, messages.Refused):
                raise TierStoreError(f"the service at {self.path} refuses: {welcome.why}")
            if not isinstance(welcome, messages.Welcome) or not descriptors:
                raise NonsenseError("whoever listens there is no service")
            for message in more:
                self._take(message)
            self._socket.settimeout(None)
            return welcome, SharedMap(descriptors[0], welcome.arena, private=self._private)
        except (OSError, ValueError) as error:  # also of a map that cannot be
            raise ServiceLostError(self.path, str(error) or type(error).__name__) from error
        finally:
            for descriptor in descriptors:
                close_quietly(descriptor)

    def _first_messages(self, descriptors: list[int]) -> list[Any]:
        """What comes first, at least one message, and the descriptors with it."""
        while True:
            data, passed, _, _ = socket.recv_fds(self._socket, AT_MOST, 1)
            descriptors += passed
            if not data:
                raise NonsenseError("it closed the connection")
            if arrived := list(self._incoming.feed(data)):
                return arrived

    # Asking ------------------------------------------------------------------------------------

    def new_request(self) -> int:
        """A number for a request."""
        return next(self._requests)

    def ask(self, request: int, message: Message, kind: type[M], key: str = "") -> M:
        """Send a request, and wait for its answer, which is of this kind.

        Raises the error that the service answers with (about the group `key`), or ServiceLostError.
        """
        self._waiting[request] = future = Future[Any]()
        try:
            self.post(message)
            while True:
                with contextlib.suppress(TimeoutError):
                    answer = future.result(PING_SECONDS)
                    break
                self._expect_the_rest()
                self.post(messages.Ping())  # if a message was lost, this shows it
        finally:
            self._waiting.pop(request, None)
        if isinstance(answer, messages.Failed):
            raise messages.error_of(answer, key)
        if not isinstance(answer, kind):
            raise ServiceLostError(self.path, f"it answered with a {type(answer).__name__}")
        return answer

    def post(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message. Raises ServiceLostError."""
        try:
            under(self._sending, lambda: self._send(message, descriptors))
        except ServiceLostError:
            raise
        except OSError as error:
            # A part of it may have been sent: nothing can follow. The next call must not meet
            # this connection again, however late the thread that reads learns of its end.
            self.end(str(error))
            raise ServiceLostError(self.path, str(error)) from error

    def _send(self, message: Message, descriptors: Sequence[int]) -> None:
        self._check_connected()
        data = memoryview(self._outgoing.encoded(message))
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))
        beside = [rights] if descriptors else []
        while data:
            try:
                sent = self._socket.sendmsg([data], beside, socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._wait_for_room()
            else:
                data, beside = data[sent:], []

    def _wait_for_room(self) -> None:
        """Wait until the service reads on. Raises ServiceLostError once the connection has ended:
        a service that is stopped reads nothing, and `close` must not wait for it."""
        room = select.poll()
        room.register(self._socket, select.POLLOUT)
        while not room.poll(FULL_SECONDS * 1000):
            self._check_connected()
        self._check_connected()

    def _check_connected(self) -> None:
        if self.lost is not None:
            raise ServiceLostError(self.path, self.lost)

    def _expect_the_rest(self) -> None:
        since = self._unfinished
        if since is not None and time.monotonic() - since > UNFINISHED_SECONDS:
            self.end("the rest of a message does not come")

    # Leases ------------------------------------------------------------------------------------

    def lease(self, group: SharedGroup, number: int) -> SharedLease:
        """A lease on the group that the service knows by this number. See `ServiceLink.lease`."""
        request = self.new_request()
        self._held.add(request)
        try:
            message = messages.Lease(request, number)
            answer = self.ask(request, message, messages.Leased, group.key)
            if answer.nbytes != group.nbytes:
                raise ServiceLostError(self.path, "it leased other bytes than were asked for")
            memory = self.map.view(answer.offset, answer.nbytes)
        except BaseException:
            self._give_back(messages.Cancel(request))
            raise
        return SharedLease(self, request, answer.offset, memory)

    def release(self, request: int) -> None:
        """Give a lease back. If the service is gone, so is the lease."""
        self._give_back(messages.Release(request))

    def _give_back(self, message: messages.Release | messages.Cancel) -> None:
        with contextlib.suppress(ServiceLostError):
            self.post(message)
        self._held.discard(message.request)
        self._hang_up()

    # Files and groups --------------------------------------------------------------------------

    def number_of_file(self, held: HeldFile, table: FileTable) -> int:
        """The number by which the service knows a file, which is sent if it does not yet.

        Raises StaleCheckpointError or TransferError if the file is not what it was.
        """
        found = self._files.get(held)
        if found is not None:
            return found
        file = table.open(held)
        descriptors = file.descriptors
        stamp = held.stamp
        times = messages.time_of(stamp.modified_ns), messages.time_of(stamp.changed_ns)
        row = messages.File(
            _shown(held.path),
            (stamp.device, stamp.inode, stamp.size, *times),
            held.header_digest,
            len(descriptors) > 1,
        )
        self.post(messages.Open([row]), descriptors)
        number, self._opened = self._opened, self._opened + 1
        self._files[held] = number
        return number

    # What comes --------------------------------------------------------------------------------

    def _read(self) -> None:
        """Take what comes, until the connection ends."""
        why = "its messages cannot be read any more"
        try:
            while data := self._socket.recv(AT_MOST):
                came = False
                for message in self._incoming.feed(data):
                    self._take(message)
                    came = True
                if came or self._unfinished is None:
                    self._unfinished = time.monotonic() if self._incoming.unfinished else None
            why = "it closed the connection"
        except OSError as error:
            why = str(error)
        except NonsenseError as error:
            why = str(error)
            self._give_back_idle(why)
        finally:
            self.end(why)
            self._over = True
            self._hang_up()

    def _give_back_idle(self, why: str) -> None:
        """The service may be alive, and others may need the room of what nobody uses here."""
        self.end(why)
        self._listener.reclaim()

    def _take(self, message: Any) -> None:
        if isinstance(message, messages.Allowance):
            self._listener.allowance(message.nbytes)
        elif isinstance(message, messages.Reclaim):
            self._listener.reclaim()
        elif isinstance(message, messages.Refused):
            raise NonsenseError(message.why)
        elif isinstance(message, messages.Pong):
            pass
        elif isinstance(message, messages.Welcome):
            raise NonsenseError("it welcomes this worker twice")
        else:
            future = self._waiting.get(message.request)
            if future is not None and not future.done():
                future.set_result(message)
            elif isinstance(message, messages.Leased):
                self.release(message.request)  # whoever asked for it does not wait any more

    def end(self, why: str) -> None:
        """End the connection: whoever waits for an answer, or for room to send, is told why.

        Takes no lock: a thread that waits for room has `_sending`.
        """
        if self.lost is None:
            self.lost = why
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)  # nobody reads on; the service keeps leases
        for future in list(self._waiting.values()):
            with contextlib.suppress(Exception):  # it has just been answered
                future.set_exception(ServiceLostError(self.path, self.lost or why))

    def _hang_up(self) -> None:
        """Once the connection is over and no lease of it is left here, have the service know."""
        if self._over and not self._held:
            with self._sending:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)  # a child may have it, too
                self._socket.close()

    def close(self) -> None:
        """End the connection. What is still looked at stays mapped."""
        self.end("the store was closed")
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._reader:
            self._reader.join(HELLO_SECONDS)
        self._socket.close()
        self.map.close()


def _shown(text: str) -> str:
    """A name for people to read: one of files need not be text."""
    return text.encode("utf-8", "backslashreplace").decode()


def _connected(path: str) -> socket.socket:
    try:
        return connect_to_own(path)
    except ForeignServiceError as error:
        raise TierStoreError(f"{path} is no service of this user: {error}") from error
    except OSError as error:
        why = error.strerror or str(error)
        raise ServiceLostError(path, why) from error
