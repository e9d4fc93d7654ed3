"""The service: a store, and the workers that lease groups in its memory.

The store is an ordinary one on the CPU, whose host memory lies in an arena that other processes can
read. Its planner ranks a group by the earliest expected use of any worker.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable

import torch

from tierstore.engine.directories import resolved_directory
from tierstore.engine.engine import Engine
from tierstore.engine.settings import Settings, TierSettings
from tierstore.errors import BudgetError
from tierstore.lease import Lease
from tierstore.model.tiers import Tier
from tierstore.plan.planner import NEXT_USE_WITHOUT_PREFETCH
from tierstore.service.allowances import allowances
from tierstore.service.connection import Connection, Waiting, printable
from tierstore.service.file_thread import FileThread
from tierstore.service.shared_groups import ServedGroup, SharedGroups
from tierstore.system.files import close_quietly
from tierstore.tiers.shared_memory import SharedArena
from tierstore.wire import messages
from tierstore.wire.messages import HELD_SECONDS
from tierstore.wire.peers import peer_of

log = logging.getLogger("tierstore.service")

MAX_CONNECTIONS = 512
"""Maximum number of connections."""

HELLO_SECONDS = 10.0
"""Seconds within which a new connection must send its hello."""

RECLAIM_SECONDS = 0.01
"""Minimum seconds between two rounds of `Reclaim` messages."""

CHECK_SECONDS = 1.0
"""Seconds between checks for stalled connections and blocked requests."""

UNFINISHED_SECONDS = 10.0
"""Seconds within which a message must arrive completely."""

UNREGISTER_BATCH = 100
"""Maximum groups of disconnected workers that are unregistered per event loop iteration."""

BLOCKED_SECONDS = 60.0
"""Seconds without any grant or release after which the longest wait fails."""


class Server:
    """Serves workers on a listening Unix socket, until `stop`.

    `settings` are the store's: its device is the CPU.
    """

    def __init__(self, settings: Settings, listening: socket.socket, path: str) -> None:
        assert settings.tiers.shared_arena is not None
        self.arena: SharedArena = settings.tiers.shared_arena
        self.engine = Engine(settings)
        self.objects = self.engine.objects
        self.leases = self.engine.leases
        self.groups = SharedGroups(self.engine)
        self.connections: dict[int, Connection] = {}
        self.path = path
        self.since = time.time()
        self.blocked_seconds = BLOCKED_SECONDS
        self._listening = listening
        self._budget = settings.tiers.budgets[Tier.HOST] or 0
        self._numbers = 0
        self._to_unregister: deque[ServedGroup] = deque()  # of workers that are not served
        self._reclaimed = 0.0
        self._reclaim_due = False
        self._allowances_due = False
        self._changed = time.monotonic()
        self._tasks: set[asyncio.Task[None]] = set()
        self._file_threads: set[FileThread] = set()  # of closed connections; they may hang
        self._stopping = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        """Serve until `stop` is called or the task is cancelled."""
        self._listening.setblocking(False)
        self._loop.add_reader(self._listening, self._accept)
        try:
            while not self.stopping:
                self._check_connections()
                try:
                    await asyncio.wait_for(self._stopping.wait(), CHECK_SECONDS)
                except TimeoutError:
                    continue
        finally:
            self._loop.remove_reader(self._listening)
            self._listening.close()

    @property
    def stopping(self) -> bool:
        """True once the service no longer accepts connections or grants leases."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """Accept no more connections, and let `run` return."""
        self._stopping.set()

    async def end(self, deadline: float) -> None:
        """Wait up to `deadline` seconds for leases, disconnect everybody, and close the store.

        Raises the errors of `TierStore.close`.
        """
        ends = time.monotonic() + deadline
        while self._leased() and time.monotonic() < ends:
            self.reclaim()
            await asyncio.sleep(0.05)
        for connection in list(self.connections.values()):
            connection.drop("the service is stopping")
            for granted in connection.leases.values():  # the worker may still read them
                self.arena.keep(self._memory_of(granted.lease))
        for task in list(self._tasks):
            task.cancel()
        try:
            await self._loop.run_in_executor(None, self.engine.close)
        finally:
            for connection in list(self.connections.values()):
                connection.close("the service has stopped")

    def _leased(self) -> int:
        return sum(len(connection.leases) for connection in self.connections.values())

    # Workers come and go -----------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            made, _ = self._listening.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                log.warning("too many open files: new connections wait")
                self._loop.remove_reader(self._listening)
                self._loop.call_later(CHECK_SECONDS, self._accept_again)
            return  # otherwise the client has disconnected again
        pid, user = peer_of(made)
        if user != os.geteuid():
            log.warning("refused process %d of another user (%d)", pid, user)
            made.close()
            return
        connection = Connection(self, made, self._next_number(), pid)
        self.connections[connection.number] = connection
        connection.hello_timer = self._loop.call_later(
            HELLO_SECONDS, connection.drop, "it has not sent a hello"
        )
        hung = sum(thread.running for thread in self._file_threads)
        if len(self.connections) + hung > MAX_CONNECTIONS:
            connection.drop(f"the service already has {MAX_CONNECTIONS} connections")
            return

    def _accept_again(self) -> None:
        if not self.stopping:
            self._loop.add_reader(self._listening, self._accept)

    def _next_number(self) -> int:
        self._numbers += 1  # from 1: stream 0 is the service's own
        return self._numbers

    def on_hello(self, connection: Connection) -> None:
        """Welcome a worker."""
        connection.allowance = self._allowances()[connection.number]
        descriptor = self.arena.read_only_descriptor()
        try:
            connection.send(
                messages.Welcome(
                    messages.VERSION,
                    self.engine.core.directory.path,
                    self._budget,
                    self.arena.size,
                    connection.allowance,
                ),
                [descriptor],
            )
        finally:
            close_quietly(descriptor)
        self.send_allowances_soon()
        log.info("worker %s connected", describe(connection))

    def on_abandoned(self, connection: Connection, reason: str) -> None:
        """Log that a worker is no longer served, though it has not hung up."""
        if not self.stopping:
            self.send_allowances_soon()
        log.warning(
            "dropped worker %s: %s; it still holds %d leases",
            describe(connection),
            reason,
            len(connection.leases),
        )

    def on_closed(self, connection: Connection, reason: str) -> None:
        """Remove a closed connection, whose leases have been released."""
        self.connections.pop(connection.number, None)
        self.leases.end_stream(connection.number)
        self._file_threads.add(connection.file_thread)
        self._file_threads = {thread for thread in self._file_threads if thread.running}
        if connection.name:
            self.record_change()
        if not self.stopping:
            self.send_allowances_soon()
        if connection.name:
            counts = connection.counts
            log.info(
                "worker %s disconnected: %s; %d leases granted (%d at once), %d open",
                describe(connection),
                reason,
                counts.granted,
                counts.hits,
                len(connection.leases),
            )
        elif not connection.visitor:
            log.warning("dropped process %d: %s", connection.pid, reason)

    def unregister(self, groups: Iterable[ServedGroup]) -> None:
        """Unregister the groups of a worker that is no longer served, in batches.

        Other workers are served meanwhile. A group counts as registered until its batch, even if it
        is registered again before that.
        """
        if self.stopping:
            return  # no group will be leased again
        waiting = bool(self._to_unregister)
        self._to_unregister += groups
        if not waiting:
            self._unregister_some()

    def _unregister_some(self) -> None:
        if self.stopping:
            return
        for _ in range(min(UNREGISTER_BATCH, len(self._to_unregister))):
            self.groups.unregister(self._to_unregister.popleft())
        if self._to_unregister:
            self._loop.call_soon(self._unregister_some)
        else:
            self.send_allowances_soon()

    # Sharing -----------------------------------------------------------------------------------

    def _allowances(self) -> dict[int, int]:
        largest = {
            number: max((group.nbytes for group in connection.groups.values()), default=0)
            for number, connection in self.connections.items()
        }
        return allowances(self._budget, self.groups.bytes_registered, largest)

    def send_allowances_soon(self) -> None:
        """Schedule `send_allowances` once for all pending changes.

        It must not run at once: sending may close the connections of more workers.
        """
        if not self._allowances_due:
            self._allowances_due = True
            self._loop.call_soon(self.send_allowances)

    def send_allowances(self) -> None:
        """Send each worker its allowance if that has changed."""
        self._allowances_due = False
        for number, nbytes in self._allowances().items():
            connection = self.connections.get(number)
            if connection is not None and nbytes != connection.allowance and connection.name:
                connection.allowance = nbytes
                connection.send(messages.Allowance(nbytes))

    def reclaim(self) -> None:
        """Ask lease holders to release unused leases, at most once per `RECLAIM_SECONDS`."""
        if not self._reclaim_due:
            self._reclaim_due = True
            due = self._reclaimed + RECLAIM_SECONDS - time.monotonic()
            self._loop.call_later(max(due, 0.0), self._reclaim)

    def _reclaim(self) -> None:
        self._reclaim_due = False
        self._reclaimed = time.monotonic()
        # A dropped process may have connected again, and still hold leases of the old connection.
        holders = {connection.pid for connection in self.connections.values() if connection.leases}
        for connection in list(self.connections.values()):
            if connection.pid in holders and connection.name:
                connection.send(messages.Reclaim())

    def offset_of(self, lease: Lease) -> int:
        """Return the offset of a leased group in the arena."""
        return self.arena.offset_of(self._memory_of(lease))

    def _memory_of(self, lease: Lease) -> torch.Tensor:
        slot = self.engine.core.mover.entry(lease.group).slots[Tier.HOST]
        assert slot.memory is not None
        return slot.memory

    def record_change(self) -> None:
        """Record that a lease was granted or released."""
        self._changed = time.monotonic()

    def hold_task(self, task: asyncio.Task[None]) -> None:
        """Hold a reference to a task until it is done."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Watching ----------------------------------------------------------------------------------

    def _check_connections(self) -> None:
        """Drop stalled connections, log workers that block others, and fail blocked requests."""
        now = time.monotonic()
        for connection in list(self.connections.values()):
            connection.check_connected()
            since = connection.unfinished
            if since is not None and now - since > UNFINISHED_SECONDS:
                connection.drop("the rest of a message did not arrive")
        waiting = [c for c in self.connections.values() if c.waiting]
        if not waiting or not self.engine.core.planner.idle():
            return
        for connection in self.connections.values():
            late = [g for g in connection.leases.values() if now - g.since > HELD_SECONDS]
            if any(not granted.logged for granted in late):
                for granted in late:
                    granted.logged = True
                log.warning(
                    "worker %s has held %d leases (%s bytes) for more than %.0f s while others "
                    "wait for memory",
                    describe(connection),
                    len(late),
                    f"{sum(granted.nbytes for granted in late):,}",
                    HELD_SECONDS,
                )
        if now - self._changed > self.blocked_seconds:
            self.record_change()
            longest = min(waiting, key=lambda c: min(w.since for w in c.waiting.values()))
            longest.fail_longest_wait(self._blocked_error)

    def _blocked_error(self, key: str, nbytes: int) -> BudgetError:
        held = ", ".join(
            f"{describe(c)} {sum(g.nbytes for g in c.leases.values()):,} bytes"
            for c in self.connections.values()
            if c.leases
        )
        return BudgetError(
            key,
            Tier.HOST.name,
            nbytes,
            self._budget,
            f"no worker has released a lease for {self.blocked_seconds:g} s ({held}): release "
            "leases, or start tierstore-serve with a larger --ram",
        )

    def report(self, request: int) -> messages.Report:
        """Return the state of the service. May be called by any thread."""
        core = self.engine.core
        stats = self.engine.reporting.stats()
        tiers = {
            tier.name: (core.planner.used[tier], core.planner.budgets[tier])
            for tier in core.planner.tiers
        }
        return messages.Report(
            request,
            os.getpid(),
            core.directory.path,
            self.path,
            self.since,
            tiers,
            stats.bytes_read,
            stats.bytes_written,
            len(self.groups),
            [_row(connection) for connection in list(self.connections.values()) if connection.name],
        )


def describe(connection: Connection) -> str:
    """Describe a worker for the log."""
    return f"{connection.number} ({printable(connection.name)}, process {connection.pid})"


def _row(connection: Connection) -> messages.WorkerRow:
    now = time.monotonic()
    leases, waiting = list(connection.leases.values()), list(connection.waiting.values())
    waits: Callable[[Waiting], float] = lambda one: now - one.since  # noqa: E731
    return messages.WorkerRow(
        connection.pid,
        connection.name,
        connection.since,
        len(connection.groups),
        len(leases),
        sum(granted.nbytes for granted in leases),
        len(waiting),
        max(map(waits, waiting), default=0.0),
        max((now - granted.since for granted in leases), default=0.0),
        connection.counts.granted,
        connection.counts.hits,
        connection.counts.granted_bytes,
    )


def settings_of(directory: str | os.PathLike[str], ram: int, disk: int | None) -> Settings:
    """Return the settings of a service's store. Budgets are in bytes."""
    budgets: dict[Tier, int | None] = {Tier.HOST: ram, Tier.DISK: disk}
    return Settings(
        tiers=TierSettings(
            device=torch.device("cpu"),
            budgets=budgets,
            verify="first",
            shared_arena=SharedArena(ram),
        ),
        disk_dir=resolved_directory(directory),
        policy=NEXT_USE_WITHOUT_PREFETCH,
    )
