"""One worker of a service: what it has sent, registered, leased, and waits for.

Everything here happens on the thread of the event loop, which never waits: neither for a worker
that does not read (what it should read is kept, up to a limit; then it is let go), nor for a disk,
nor for the file system of what a worker passes (see `FileThread`).
A worker that talks nonsense is let go, with what it had. But what it has leased, it may still be
looking at, and is not told that it must not: that comes back when it hangs up, or its process ends.
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
from tierstore.wire.framing import Incoming, NonsenseError, Outgoing

if TYPE_CHECKING:
    from tierstore.service.server import Server

log = logging.getLogger("tierstore.service")

READ_AT_ONCE = 65536
UNREAD = 4 << 20
"""Bytes that wait for a worker to read them, at most."""

OUTSTANDING = 4096
"""Leases that a worker may have and wait for, together."""

GROUPS = 1 << 17
"""Groups that a worker may have registered."""

LONGEST_NAME = 200
"""Characters of a worker's name that are kept: those of all workers fit into one report."""

CLOSED = "it closed the connection"

OBJECT_KEY = re.compile(r"(weights|casts)/[0-9a-f]{32}")


@dataclass(eq=False)
class Granted:
    """A lease that a worker has, since when (seconds of `time.monotonic`)."""

    lease: Lease
    nbytes: int
    since: float
    named: bool = False  # in the log, for being held while others wait


@dataclass(eq=False)
class Waiting:
    """A lease that a worker waits for."""

    task: asyncio.Task[None]
    group: ServedGroup
    since: float


@dataclass
class Counts:
    """What a worker was granted so far; `hits` were there when it asked."""

    granted: int = 0
    hits: int = 0
    granted_bytes: int = 0


@dataclass(eq=False)
class Connection:
    """A worker at the other end of `socket`, known by `number`, of the process `pid`."""

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
    let_go: bool = False
    closed: bool = False
    unfinished: float | None = None  # since when a message has been there in part
    visitor: bool = False
    alarm: asyncio.TimerHandle | None = None  # lets it go if it does not say hello

    def __post_init__(self) -> None:
        self.socket.setblocking(False)
        self._incoming = Incoming[messages.Message](messages.FromWorker)
        self._outgoing = Outgoing()
        self._inbox: deque[Any] = deque()
        self._unread: deque[memoryview] = deque()
        self._unread_bytes = 0
        self.file_thread = FileThread()
        self._files = PassedFiles(self.file_thread)
        self._times: Counter[int] = Counter()  # how often each group was registered
        self._upload: Upload | None = None
        self.busy = False  # at something that takes long: no other message is looked at
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.socket, self._readable)
        self._process: int | None = None
        with contextlib.suppress(OSError):  # in another namespace, it has no number here
            self._process = os.pidfd_open(self.pid)
            # Its children may have the socket, too: it is over when the process is.
            self._loop.add_reader(self._process, lambda: self.close("it ended"))
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
        if self.let_go or not data:
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
        except NonsenseError as error:
            self.drop(str(error))
            return
        self._work()

    def _work(self) -> None:
        """Do what the messages that have come ask for, one by one."""
        with self._failing():
            while self._inbox and not (self.busy or self.let_go or self.closed):
                message = self._inbox.popleft()
                if isinstance(message, messages.Hello):
                    self._greet(message)
                    continue
                if isinstance(message, messages.Status) and not self.name:
                    self.visitor = True  # no worker: it looks, and goes
                elif not self.name:
                    raise NonsenseError(f"it begins with a {type(message).__name__}")
                self._handlers[type(message)](message)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Let the worker go if handling its message fails."""
        try:
            yield
        except NonsenseError as error:
            self.drop(str(error))
        except Exception as error:  # of ours: nobody is to wait for an answer that never comes
            log.exception("a message could not be handled")
            self.drop(f"the service failed: {type(error).__name__}: {error}")

    def _greet(self, hello: messages.Hello) -> None:
        if self.name:
            raise NonsenseError("it says hello twice")
        if hello.version != messages.VERSION:
            self.drop(
                f"it speaks version {hello.version}, not {messages.VERSION}: upgrade tierstore"
            )
            return
        self.name = hello.name[:LONGEST_NAME] or "?"
        if self.alarm is not None:
            self.alarm.cancel()
        self.server.greeted(self)

    def drop(self, why: str) -> None:
        """End the connection of who does what is not allowed, and tell them why."""
        why = printable(why[:1000])
        self.send(messages.Refused(why))
        self.abandon(why)

    def abandon(self, why: str) -> None:
        """Neither listen to the worker any more, nor speak: what it has leased is all that is left
        until it hangs up."""
        if self.closed or self.let_go:
            return
        self.let_go = True
        self.unfinished = None
        self._stop_serving()
        if not self.leases or _has_ended(self.socket):
            self.close(why)
            return
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
        self.server.let_go(self, why)

    # Writing -----------------------------------------------------------------------------------

    def send(self, message: messages.Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message as soon as the worker reads it."""
        if self.closed or self.let_go:
            return
        data = memoryview(self._outgoing.encoded(message))
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
        if self._unread_bytes > UNREAD:
            self.abandon(f"it has not read {self._unread_bytes:,} bytes")

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

    def _take_time(self, work: Coroutine[Any, Any, None]) -> None:
        """Await work that another thread does. Until it is done, nothing else that the worker sends
        is looked at."""
        self.busy = True
        self.unfinished = None
        self._loop.remove_reader(self.socket)
        self.server.keep(self._loop.create_task(self._awaited(work)))

    async def _awaited(self, work: Coroutine[Any, Any, None]) -> None:
        with self._failing():
            await work
        self.busy = False
        if self.closed:
            return
        if self._incoming.unfinished and not self.let_go:
            self.unfinished = time.monotonic()
        self._loop.add_reader(self.socket, self._readable)
        self._work()

    def check_connected(self) -> None:
        """Close a connection that the worker has closed, if nothing is read that would say so."""
        if self.busy and not self.closed and _has_ended(self.socket):
            self.close(CLOSED)

    # Files and groups --------------------------------------------------------------------------

    def _open(self, message: messages.Open) -> None:
        self._take_time(self._examine(self._files.open(message)))

    async def _examine(self, examined: Future[list[HeldFile]]) -> None:
        files = await asyncio.wrap_future(examined)
        if not (self.closed or self.let_go):
            self._files.add(files)

    def _register(self, message: messages.Register) -> None:
        if len(self.groups) + len(message.groups) > GROUPS:
            raise NonsenseError(f"it registers more than {GROUPS:,} groups")
        numbers: list[int] = []
        try:
            for row in message.groups:
                group = self.server.groups.register(row, self._files.files)
                if group.number in self.groups:
                    self.server.groups.leave(group)  # this worker counts once
                self.groups[group.number] = group
                self._times[group.number] += 1
                numbers.append(group.number)
        except TierStoreError as error:
            self.send(messages.failure(message.request, error))
            return
        self.server.share_out()
        self.send(messages.Registered(message.request, numbers))

    def _forget(self, message: messages.Forget) -> None:
        group = self.groups.get(message.group)
        if group is None:
            return
        self._times[message.group] -= 1
        if not self._times[message.group]:
            del self.groups[message.group], self._times[message.group]
            self.server.groups.leave(group)
            self.server.share_out_soon()

    # Leases ------------------------------------------------------------------------------------

    def _lease(self, message: messages.Lease) -> None:
        if self.server.stopping:
            return  # who has leased in advance would do so again; the end of it all is the answer
        request = message.request
        if request in self.leases or request in self.waiting:
            raise NonsenseError(f"request {request} is under way already")
        if len(self.leases) + len(self.waiting) >= OUTSTANDING:
            raise NonsenseError(f"it asks for more than {OUTSTANDING:,} leases at once")
        group = self.groups.get(message.group)
        if group is None:
            raise NonsenseError(f"it has no group {message.group}")
        try:
            lease = self.server.leases.try_for(group.key, self.number)
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
            lease = await self.server.leases.acquire_for(
                group.key, self.number, self.server.reclaim
            )
        except Exception as error:
            self.waiting.pop(request, None)
            self.send(messages.failure(request, error))
            return
        self.waiting.pop(request, None)
        if self.closed or self.let_go:
            lease.release()
        else:
            self._grant(request, group, lease)

    def _grant(self, request: int, group: ServedGroup, lease: Lease) -> None:
        self.leases[request] = Granted(lease, group.nbytes, time.monotonic())
        self.counts.granted += 1
        self.counts.granted_bytes += group.nbytes
        self.server.changed()
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
            self.server.changed()

    def refuse_longest_wait(self, why: Callable[[str, int], BudgetError]) -> None:
        """Tell the worker that what it waits for longest does not come."""
        request, waiting = min(self.waiting.items(), key=lambda item: item[1].since)
        del self.waiting[request]
        waiting.task.cancel()
        self.send(messages.failure(request, why(waiting.group.key, waiting.group.nbytes)))

    # Objects -----------------------------------------------------------------------------------

    def _find(self, message: messages.Find) -> None:
        self._check_object_key(message.key)
        self.send(messages.Found(message.request, self.server.objects.has(message.key)))

    @staticmethod
    def _check_object_key(key: str) -> None:
        if not OBJECT_KEY.fullmatch(key):
            raise NonsenseError(f"it asks for an object {key!r:.60}")

    def _begin_upload(self, message: messages.Upload) -> None:
        self._check_object_key(message.key)
        if self._upload is not None:
            raise NonsenseError("it hands over two objects at once")
        self._upload = Upload(self.server.engine, message)
        self._take_time(self._in_thread(message.request, self._upload.begin))

    def _take_part(self, message: messages.Part) -> None:
        upload = self._upload
        if upload is None or upload.request != message.request:
            return  # it has failed, and the worker was told
        self._take_time(self._in_thread(message.request, lambda: upload.take(message.data)))

    async def _in_thread(self, request: int, action: Callable[[], bool]) -> None:
        """Do a part of an upload. If it gives True, the worker is told that it is done."""
        try:
            done = await self._loop.run_in_executor(None, action)
        except Exception as error:  # whatever it was: the worker waits to be told
            self._upload = None
            self.send(messages.failure(request, error))
        else:
            if done:
                self.send(messages.Done(request))
                if self._upload is not None and self._upload.complete:
                    self._upload = None

    # The end -----------------------------------------------------------------------------------

    def close(self, why: str) -> None:
        """The connection is over: everything that the worker had is given back."""
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
        self.server.gone(self, printable(why))
        self.leases.clear()

    def _stop_serving(self) -> None:
        if self.alarm is not None:
            self.alarm.cancel()
        self._loop.remove_writer(self.socket)
        for waiting in self.waiting.values():
            waiting.task.cancel()
        self.waiting.clear()
        self.server.leave(self.groups.values())
        self.groups.clear()
        self._inbox.clear()
        self._unread.clear()
        self._files.forget()
        self._upload = None


def _reason(error: OSError) -> str:
    """Why nothing can be sent or read. A worker may close a connection before it has read all."""
    closed = isinstance(error, (BrokenPipeError, ConnectionResetError))
    return CLOSED if closed else error.strerror or str(error)


def _has_ended(connected: socket.socket) -> bool:
    """Whether the other end of a connection is closed."""
    ended = select.poll()
    ended.register(connected, 0)  # POLLHUP is always reported
    return bool(ended.poll(0))


def printable(text: str) -> str:
    """What a worker says, for a line of the log."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
