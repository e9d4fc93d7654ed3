"""One connection of a worker to a service: requests, answers and unsolicited messages.

Leased memory stays readable after the connection is lost: the arena lives as long as a process has
it mapped, and the service does not reuse leased memory until the worker hangs up. A worker whose
connection is ended by a live service therefore hangs up only after it has released all leases of
that connection.
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
from tierstore.wire.framing import Incoming, Outgoing, ProtocolError
from tierstore.wire.messages import FromService, Message
from tierstore.wire.peers import ForeignServiceError, connect_to_own

AT_MOST = 65536
"""Bytes per read from the socket."""

HELLO_SECONDS = 60.0
"""Seconds to wait for the service's greeting; it may still load its libraries."""

PING_SECONDS = 1.0
"""Seconds without an answer after which a waiter sends a ping, which detects lost messages."""

FULL_SECONDS = 0.1
"""Seconds between checks of the connection while the send buffer is full."""

UNFINISHED_SECONDS = 10.0
"""Seconds within which a message must arrive completely while a waiter needs it."""

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
    """Callbacks for unsolicited messages.

    The reading thread calls them: they must not wait for an answer of the service. `allowance`: new
    limit of leased bytes. `reclaim`: another worker needs memory.
    """

    allowance: Callable[[int], None]
    reclaim: Callable[[], None]


class Wire:
    """One connection to the service that listens at `path`, from its greeting to its end.

    Raises ServiceLostError if no process listens there, TierStoreError if the service rejects it,
    or is another user's.
    """

    def __init__(self, path: str, listener: Listener, *, private: bool) -> None:
        self.path = path
        self.lost: str | None = None  # the reason
        self.numbers: weakref.WeakKeyDictionary[SharedGroup, int] = weakref.WeakKeyDictionary()
        self._files: weakref.WeakKeyDictionary[HeldFile, int] = weakref.WeakKeyDictionary()
        self._opened = 0
        self._held: set[int] = set()  # requests with a lease, or that may still get one
        self._reader_done = False
        self._unfinished: float | None = None  # when a part of a message arrived
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
        """Send a hello. Returns the answer, and the arena."""
        name = os.path.basename(sys.argv[0] if sys.argv else "") or "python"
        hello = messages.Hello(messages.VERSION, _printable(name)[:200])
        descriptors: list[int] = []
        self._socket.settimeout(HELLO_SECONDS)
        try:
            self._socket.sendall(self._outgoing.encode(hello))
            welcome, *more = self._first_messages(descriptors)
            if isinstance(welcome, messages.Refused):
                raise TierStoreError(f"the service at {self.path} refused: {welcome.why}")
            if not isinstance(welcome, messages.Welcome) or not descriptors:
                raise ProtocolError("the process that listens there is not a service")
            for message in more:
                self._take(message)
            self._socket.settimeout(None)
            return welcome, SharedMap(descriptors[0], welcome.arena, private=self._private)
        except (OSError, ValueError) as error:  # includes a failed mapping
            raise ServiceLostError(self.path, str(error) or type(error).__name__) from error
        finally:
            for descriptor in descriptors:
                close_quietly(descriptor)

    def _first_messages(self, descriptors: list[int]) -> list[Any]:
        """Return the first messages, at least one; append their descriptors."""
        while True:
            data, passed, _, _ = socket.recv_fds(self._socket, AT_MOST, 1)
            descriptors += passed
            if not data:
                raise ProtocolError("it closed the connection")
            if arrived := list(self._incoming.feed(data)):
                return arrived

    # Asking ------------------------------------------------------------------------------------

    def new_request(self) -> int:
        """Return the number of the next request."""
        return next(self._requests)

    def ask(self, request: int, message: Message, kind: type[M], key: str = "") -> M:
        """Send a request, and wait for its answer, which must be a `kind`.

        Raises the error that the service answers with (about the group `key`), or ServiceLostError.
        """
        self._waiting[request] = future = Future[Any]()
        try:
            self.post(message)
            while True:
                with contextlib.suppress(TimeoutError):
                    answer = future.result(PING_SECONDS)
                    break
                self._check_partial_message()
                self.post(messages.Ping())  # its sequence number reveals a lost message
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
            # It may have been sent in part, so nothing can follow. End the connection now: the
            # next call must not use it, however late the reading thread notices.
            self.end(str(error))
            raise ServiceLostError(self.path, str(error)) from error

    def _send(self, message: Message, descriptors: Sequence[int]) -> None:
        self._check_connected()
        data = memoryview(self._outgoing.encode(message))
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))
        beside = [rights] if descriptors else []
        while data:
            try:
                sent = self._socket.sendmsg([data], beside, socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._wait_writable()
            else:
                data, beside = data[sent:], []

    def _wait_writable(self) -> None:
        """Wait until the service reads again. Raises ServiceLostError if the connection has ended.

        A suspended service reads nothing, and `close` must not wait for it.
        """
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        while not poll.poll(FULL_SECONDS * 1000):
            self._check_connected()
        self._check_connected()

    def _check_connected(self) -> None:
        if self.lost is not None:
            raise ServiceLostError(self.path, self.lost)

    def _check_partial_message(self) -> None:
        since = self._unfinished
        if since is not None and time.monotonic() - since > UNFINISHED_SECONDS:
            self.end("the rest of a message did not arrive")

    # Leases ------------------------------------------------------------------------------------

    def lease(self, group: SharedGroup, number: int) -> SharedLease:
        """Lease the group that the service knows by this number. See `ServiceLink.lease`."""
        request = self.new_request()
        self._held.add(request)
        try:
            message = messages.Lease(request, number)
            answer = self.ask(request, message, messages.Leased, group.key)
            if answer.nbytes != group.nbytes:
                raise ServiceLostError(self.path, "it leased a group of another size")
            memory = self.map.view(answer.offset, answer.nbytes)
        except BaseException:
            self._end_lease(messages.Cancel(request))
            raise
        return SharedLease(self, request, answer.offset, memory)

    def release(self, request: int) -> None:
        """Release a lease. If the service is gone, so is the lease."""
        self._end_lease(messages.Release(request))

    def _end_lease(self, message: messages.Release | messages.Cancel) -> None:
        with contextlib.suppress(ServiceLostError):
            self.post(message)
        self._held.discard(message.request)
        self._hang_up()

    # Files and groups --------------------------------------------------------------------------

    def number_of_file(self, held: HeldFile, table: FileTable) -> int:
        """Return the service's number of a file; send the file if it has none.

        Raises StaleCheckpointError or TransferError if the file has changed.
        """
        found = self._files.get(held)
        if found is not None:
            return found
        file = table.open(held)
        descriptors = file.descriptors
        stamp = held.stamp
        times = messages.time_of(stamp.modified_ns), messages.time_of(stamp.changed_ns)
        row = messages.File(
            _printable(held.path),
            (stamp.device, stamp.inode, stamp.size, *times),
            held.header_digest,
            len(descriptors) > 1,
        )
        self.post(messages.Open([row]), descriptors)
        number, self._opened = self._opened, self._opened + 1
        self._files[held] = number
        return number

    # Receiving ---------------------------------------------------------------------------------

    def _read(self) -> None:
        """Process messages until the connection ends."""
        reason = "reading its messages failed"
        try:
            while data := self._socket.recv(AT_MOST):
                came = False
                for message in self._incoming.feed(data):
                    self._take(message)
                    came = True
                if came or self._unfinished is None:
                    self._unfinished = time.monotonic() if self._incoming.unfinished else None
            reason = "it closed the connection"
        except OSError as error:
            reason = str(error)
        except ProtocolError as error:
            reason = str(error)
            self._reclaim_idle(reason)
        finally:
            self.end(reason)
            self._reader_done = True
            self._hang_up()

    def _reclaim_idle(self, reason: str) -> None:
        """Release unused leases: the service may be alive, and others may need the memory."""
        self.end(reason)
        self._listener.reclaim()

    def _take(self, message: Any) -> None:
        if isinstance(message, messages.Allowance):
            self._listener.allowance(message.nbytes)
        elif isinstance(message, messages.Reclaim):
            self._listener.reclaim()
        elif isinstance(message, messages.Refused):
            raise ProtocolError(message.why)
        elif isinstance(message, messages.Pong):
            pass
        elif isinstance(message, messages.Welcome):
            raise ProtocolError("it sent a second welcome")
        else:
            future = self._waiting.get(message.request)
            if future is not None and not future.done():
                future.set_result(message)
            elif isinstance(message, messages.Leased):
                self.release(message.request)  # the request was abandoned

    def end(self, reason: str) -> None:
        """End the connection: waiters for answers or for the send buffer get ServiceLostError.

        Takes no lock: a thread that waits for the send buffer holds `_sending`.
        """
        if self.lost is None:
            self.lost = reason
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)  # stops the reader; the service keeps leases
        for future in list(self._waiting.values()):
            with contextlib.suppress(Exception):  # it has just been answered
                future.set_exception(ServiceLostError(self.path, self.lost or reason))

    def _hang_up(self) -> None:
        """Close the socket once the reader is done and all leases are released."""
        if self._reader_done and not self._held:
            with self._sending:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)  # a child may have inherited it
                self._socket.close()

    def close(self) -> None:
        """Close the connection. Memory with views stays mapped."""
        self.end("the store was closed")
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._reader:
            self._reader.join(HELLO_SECONDS)
        self._socket.close()
        self.map.close()


def _printable(text: str) -> str:
    """Escape a name that is not valid text, such as a file's."""
    return text.encode("utf-8", "backslashreplace").decode()


def _connected(path: str) -> socket.socket:
    try:
        return connect_to_own(path)
    except ForeignServiceError as error:
        raise TierStoreError(f"{path} is not a service of this user: {error}") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise ServiceLostError(path, reason) from error
