"""One worker of a service: its messages, registered groups, leases and pending requests.

Everything here runs on the event loop's thread, which never blocks: neither on a worker that does
not read (its messages are buffered, up to a limit, then it is disconnected), nor on a disk, nor on
the file system of a file that a worker passes (see `FileThread`).

A worker that violates the protocol receives an error and is disconnected. It may still read its
leased memory, since a mapping cannot be revoked: the leases are released when it hangs up or
its process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import select
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tierstore.errors import BudgetError, TierStoreError
from tierstore.lease import Lease
from tierstore.service.file_thread import FileThread
from tierstore.service.passed_files import PassedFiles
from tierstore.service.shared_groups import ServedGroup
from tierstore.service.uploads import Upload
from tierstore.system.file_table import HeldFile
from tierstore.wire import messages
from tierstore.wire.framing import Incoming, Outgoing, ProtocolError

if TYPE_CHECKING:
    from tierstore.service.server import Server

log = logging.getLogger("tierstore.service")

READ_AT_ONCE = 65536
MAX_UNREAD_BYTES = 4 << 20
"""Maximum bytes that are buffered for a worker."""

MAX_LEASES = 4096
"""Maximum number of leases and lease requests of a worker."""

MAX_GROUPS = 1 << 17
"""Maximum number of groups that a worker may register."""

LONGEST_NAME = 200
"""Characters of a worker's name that are kept: all names must fit into one report."""

CLOSED = "it closed the connection"

OBJECT_KEY = re.compile(r"(weights|casts)/[0-9a-f]{32}")


@dataclass(eq=False)
class Granted:
    """A lease of a worker, and when it was granted (seconds of `time.monotonic`)."""

    lease: Lease
    nbytes: int
    since: float
    logged: bool = False  # reported as held while others wait


@dataclass(eq=False)
class Waiting:
    """A lease request that is pending."""

    task: asyncio.Task[None]
    group: ServedGroup
    since: float


@dataclass
class Counts:
    """Totals of a worker's leases; `hits` were resident when requested."""

    granted: int = 0
    hits: int = 0
    granted_bytes: int = 0


@dataclass(eq=False)
class Connection:
    """The connection of process `pid` at the other end of `socket`, known by `number`."""

    server: Server
    socket: socket.socket
    number: int
    pid: int
    name: str = ""
    since: float = field(default_factory=time.time)
    allowance: int = 0
    groups: dict[int, ServedGroup] = field(default_factory=dict)
    leases: dict[int, Granted] = field(default_factory=dict)
    waiting: dict[int, Waiting] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    abandoned: bool = False
    closed: bool = False
    unfinished: float | None = None  # when the first part of an incomplete message arrived
    visitor: bool = False
    hello_timer: asyncio.TimerHandle | None = None  # disconnects it if no hello arrives

    def __post_init__(self) -> None:
        self.socket.setblocking(False)
        self._incoming = Incoming[messages.Message](messages.FromWorker)
        self._outgoing = Outgoing()
        self._inbox: deque[Any] = deque()
        self._unread: deque[memoryview] = deque()
        self._unread_bytes = 0
        self.file_thread = FileThread()
        self._files = PassedFiles(self.file_thread)
        self._times: Counter[int] = Counter()  # registrations of each group
        self._upload: Upload | None = None
        self.busy = False  # during `_run_slow`, when no other message is handled
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.socket, self._readable)
        self._process: int | None = None
        with contextlib.suppress(OSError):  # in another namespace, it has no pid here
            self._process = os.pidfd_open(self.pid)
            # Children may inherit the socket: the end of the process ends the connection.
            self._loop.add_reader(self._process, lambda: self.close("its process ended"))
        self._handlers: dict[type, Callable[[Any], None]] = {
            messages.Open: self._open,
            messages.CloseFile: self._files.close,
            messages.Register: self._register,
            messages.Forget: self._forget,
            messages.Lease: self._lease,
            messages.Cancel: self._cancel,
            messages.Release: self._release,
            messages.Find: self._find,
            messages.Upload: self._begin_upload,
            messages.Part: self._take_part,
            messages.Ping: lambda _: self.send(messages.Pong()),
            messages.Status: lambda m: self.send(self.server.report(m.request)),
        }

    # Reading -----------------------------------------------------------------------------------

    def _readable(self) -> None:
        try:
            data, passed, _, _ = socket.recv_fds(
                self.socket, READ_AT_ONCE, messages.MAX_DESCRIPTORS
            )
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.close(_reason(error))
            return
        if self.abandoned or not data:
            self._files.drop(passed)
            if not data:
                self.close(CLOSED)
            return
        try:
            self._files.take(passed)
            before = len(self._inbox)
            self._inbox += self._incoming.feed(data)
            if self.unfinished is None or len(self._inbox) > before:
                self.unfinished = time.monotonic() if self._incoming.unfinished else None
        except ProtocolError as error:
            self.drop(str(error))
            return
        self._process_inbox()

    def _process_inbox(self) -> None:
        """Handle the received messages, one by one."""
        with self._dropping_on_error():
            while self._inbox and not (self.busy or self.abandoned or self.closed):
                message = self._inbox.popleft()
                if isinstance(message, messages.Hello):
                    self._greet(message)
                    continue
                if isinstance(message, messages.Status) and not self.name:
                    self.visitor = True  # queries the status only
                elif not self.name:
                    raise ProtocolError(f"its first message is a {type(message).__name__}")
                self._handlers[type(message)](message)

    @contextlib.contextmanager
    def _dropping_on_error(self) -> Iterator[None]:
        """Disconnect the worker if handling its message fails."""
        try:
            yield
        except ProtocolError as error:
            self.drop(str(error))
        except Exception as error:  # our bug: the worker must not wait for an answer forever
            log.exception("a message could not be handled")
            self.drop(f"the service failed: {type(error).__name__}: {error}")

    def _greet(self, hello: messages.Hello) -> None:
        if self.name:
            raise ProtocolError("it sent a second hello")
        if hello.version != messages.VERSION:
            self.drop(
                f"its protocol version is {hello.version}, not {messages.VERSION}: upgrade "
                "tierstore"
            )
            return
        self.name = hello.name[:LONGEST_NAME] or "?"
        if self.hello_timer is not None:
            self.hello_timer.cancel()
        self.server.on_hello(self)

    def drop(self, reason: str) -> None:
        """Send the worker the reason, and end the connection."""
        reason = printable(reason[:1000])
        self.send(messages.Refused(reason))
        self.abandon(reason)

    def abandon(self, reason: str) -> None:
        """Stop serving the worker and discard its messages. Its leases stay until it hangs up."""
        if self.closed or self.abandoned:
            return
        self.abandoned = True
        self.unfinished = None
        self._stop_serving()
        if not self.leases or _has_ended(self.socket):
            self.close(reason)
            return
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
        self.server.on_abandoned(self, reason)

    # Writing -----------------------------------------------------------------------------------

    def send(self, message: messages.Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message, or buffer what the socket does not accept yet."""
        if self.closed or self.abandoned:
            return
        data = memoryview(self._outgoing.encode(message))
        if not self._unread:
            try:
                sent = (
                    socket.send_fds(self.socket, [data], list(descriptors))
                    if descriptors
                    else self.socket.send(data)
                )
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError as error:
                self.abandon(_reason(error))
                return
            if sent == len(data):
                return
            data = data[sent:]
            self._loop.add_writer(self.socket, self._writable)
        self._unread.append(data)
        self._unread_bytes += len(data)
        if self._unread_bytes > MAX_UNREAD_BYTES:
            self.abandon(f"it did not read {self._unread_bytes:,} buffered bytes")

    def _writable(self) -> None:
        try:
            while self._unread:
                data = self._unread[0]
                sent = self.socket.send(data)
                self._unread_bytes -= sent
                if sent < len(data):
                    self._unread[0] = data[sent:]
                    return
                self._unread.popleft()
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.abandon(_reason(error))
            return
        self._loop.remove_writer(self.socket)

    # Work that takes long ----------------------------------------------------------------------

    def _run_slow(self, work: Coroutine[Any, Any, None]) -> None:
        """Await work on another thread. The worker's other messages wait until it is done."""
        self.busy = True
        self.unfinished = None
        self._loop.remove_reader(self.socket)
        self.server.hold_task(self._loop.create_task(self._awaited(work)))

    async def _awaited(self, work: Coroutine[Any, Any, None]) -> None:
        with self._dropping_on_error():
            await work
        self.busy = False
        if self.closed:
            return
        if self._incoming.unfinished and not self.abandoned:
            self.unfinished = time.monotonic()
        self._loop.add_reader(self.socket, self._readable)
        self._process_inbox()

    def check_connected(self) -> None:
        """Close the connection if the worker hung up while its socket is not being read."""
        if self.busy and not self.closed and _has_ended(self.socket):
            self.close(CLOSED)

    # Files and groups --------------------------------------------------------------------------

    def _open(self, message: messages.Open) -> None:
        self._run_slow(self._examine(self._files.open(message)))

    async def _examine(self, examined: Future[list[HeldFile]]) -> None:
        files = await asyncio.wrap_future(examined)
        if not (self.closed or self.abandoned):
            self._files.add(files)

    def _register(self, message: messages.Register) -> None:
        if len(self.groups) + len(message.groups) > MAX_GROUPS:
            raise ProtocolError(f"it registers more than {MAX_GROUPS:,} groups")
        numbers: list[int] = []
        try:
            for row in message.groups:
                group = self.server.groups.register(row, self._files.files)
                if group.number in self.groups:
                    self.server.groups.unregister(group)  # count each worker once
                self.groups[group.number] = group
                self._times[group.number] += 1
                numbers.append(group.number)
        except TierStoreError as error:
            self.send(messages.failure(message.request, error))
            return
        self.server.send_allowances()
        self.send(messages.Registered(message.request, numbers))

    def _forget(self, message: messages.Forget) -> None:
        group = self.groups.get(message.group)
        if group is None:
            return
        self._times[message.group] -= 1
        if not self._times[message.group]:
            del self.groups[message.group], self._times[message.group]
            self.server.groups.unregister(group)
            self.server.send_allowances_soon()

    # Leases ------------------------------------------------------------------------------------

    def _lease(self, message: messages.Lease) -> None:
        if self.server.stopping:
            return  # a prefetching worker would ask again; the end of the connection answers it
        request = message.request
        if request in self.leases or request in self.waiting:
            raise ProtocolError(f"request number {request} is already in use")
        if len(self.leases) + len(self.waiting) >= MAX_LEASES:
            raise ProtocolError(f"it requests more than {MAX_LEASES:,} leases at once")
        group = self.groups.get(message.group)
        if group is None:
            raise ProtocolError(f"it has not registered group {message.group}")
        try:
            lease = self.server.leases.try_acquire_for_worker(group.key, self.number)
        except TierStoreError as error:
            self.send(messages.failure(request, error))
            return
        if lease is not None:
            self.counts.hits += 1
            self._grant(request, group, lease)
            return
        task = self._loop.create_task(self._wait_for(request, group))
        self.waiting[request] = Waiting(task, group, time.monotonic())

    async def _wait_for(self, request: int, group: ServedGroup) -> None:
        try:
            lease = await self.server.leases.acquire_for_worker(
                group.key, self.number, self.server.reclaim
            )
        except Exception as error:
            self.waiting.pop(request, None)
            self.send(messages.failure(request, error))
            return
        self.waiting.pop(request, None)
        if self.closed or self.abandoned:
            lease.release()
        else:
            self._grant(request, group, lease)

    def _grant(self, request: int, group: ServedGroup, lease: Lease) -> None:
        self.leases[request] = Granted(lease, group.nbytes, time.monotonic())
        self.counts.granted += 1
        self.counts.granted_bytes += group.nbytes
        self.server.record_change()
        offset = self.server.offset_of(lease)
        self.send(messages.Leased(request, offset, group.nbytes))

    def _cancel(self, message: messages.Cancel) -> None:
        waiting = self.waiting.pop(message.request, None)
        if waiting is not None:
            waiting.task.cancel()
        self._release(message)

    def _release(self, message: messages.Release | messages.Cancel) -> None:
        granted = self.leases.pop(message.request, None)
        if granted is not None:
            granted.lease.release()
            self.server.record_change()

    def fail_longest_wait(self, make_error: Callable[[str, int], BudgetError]) -> None:
        """Fail the worker's oldest lease request with the error that `make_error` returns."""
        request, waiting = min(self.waiting.items(), key=lambda item: item[1].since)
        del self.waiting[request]
        waiting.task.cancel()
        self.send(messages.failure(request, make_error(waiting.group.key, waiting.group.nbytes)))

    # Objects -----------------------------------------------------------------------------------

    def _find(self, message: messages.Find) -> None:
        self._check_object_key(message.key)
        self.send(messages.Found(message.request, self.server.objects.has(message.key)))

    @staticmethod
    def _check_object_key(key: str) -> None:
        if not OBJECT_KEY.fullmatch(key):
            raise ProtocolError(f"it requests object {key!r:.60}: invalid name")

    def _begin_upload(self, message: messages.Upload) -> None:
        self._check_object_key(message.key)
        if self._upload is not None:
            raise ProtocolError("it uploads two objects at once")
        self._upload = Upload(self.server.engine, message)
        self._run_slow(self._in_thread(message.request, self._upload.begin))

    def _take_part(self, message: messages.Part) -> None:
        upload = self._upload
        if upload is None or upload.request != message.request:
            return  # the upload has failed, and the worker was notified
        self._run_slow(self._in_thread(message.request, lambda: upload.take(message.data)))

    async def _in_thread(self, request: int, action: Callable[[], bool]) -> None:
        """Run a step of an upload on a thread, and answer if it returns True or raises."""
        try:
            done = await self._loop.run_in_executor(None, action)
        except Exception as error:  # of any kind: the worker waits for an answer
            self._upload = None
            self.send(messages.failure(request, error))
        else:
            if done:
                self.send(messages.Done(request))
                if self._upload is not None and self._upload.complete:
                    self._upload = None

    # The end -----------------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """Close the connection, and release everything that the worker had."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self.socket)
        self._stop_serving()
        if self._process is not None:
            self._loop.remove_reader(self._process)
            os.close(self._process)
        self.socket.close()
        for granted in self.leases.values():
            granted.lease.release()
        self.server.on_closed(self, printable(reason))
        self.leases.clear()

    def _stop_serving(self) -> None:
        if self.hello_timer is not None:
            self.hello_timer.cancel()
        self._loop.remove_writer(self.socket)
        for waiting in self.waiting.values():
            waiting.task.cancel()
        self.waiting.clear()
        self.server.unregister(self.groups.values())
        self.groups.clear()
        self._inbox.clear()
        self._unread.clear()
        self._files.forget()
        self._upload = None


def _reason(error: OSError) -> str:
    """Return why sending or reading failed. Closing with unread data counts as a close."""
    closed = isinstance(error, (BrokenPipeError, ConnectionResetError))
    return CLOSED if closed else error.strerror or str(error)


def _has_ended(connected: socket.socket) -> bool:
    """Return whether the other end of a connection is closed."""
    ended = select.poll()
    ended.register(connected, 0)  # POLLHUP is always reported
    return bool(ended.poll(0))


def printable(text: str) -> str:
    """Escape a worker's text for the log."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
