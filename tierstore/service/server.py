"""The service: a store of its own, and the workers that lease groups in its memory.

The store is an ordinary one on the CPU, whose host memory lies in an arena that other processes can
read. Its planner ranks a group by the earliest use that is expected of any worker.
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
from tierstore.plan.planner import NEXT_USE_UNFORETOLD
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

WORKERS = 512
"""Connections at once, at most."""

HELLO_SECONDS = 10.0
"""Seconds in which who connects must have said hello."""

RECLAIM_SECONDS = 0.01
"""Seconds between two messages to all workers that somebody needs room."""

LOOK_SECONDS = 1.0
"""Seconds between looks at who waits, and for whom."""

UNFINISHED_SECONDS = 10.0
"""Seconds in which a message must have come as a whole."""

LEFT_AT_ONCE = 100
"""Groups of workers that are gone which are left in one turn of the event loop, at most."""

HOPELESS_SECONDS = 60.0
"""Seconds without any change after which the longest wait is refused: nobody gives anything back.
"""


class Server:
    """Serves workers on a listening Unix socket, until `stop`.

    `settings` are those of the store: its device is the CPU.
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
        self.hopeless_seconds = HOPELESS_SECONDS
        self._listening = listening
        self._budget = settings.tiers.budgets[Tier.HOST] or 0
        self._numbers = 0
        self._leaving: deque[ServedGroup] = deque()  # of workers that are gone
        self._reclaimed = 0.0
        self._to_reclaim = False
        self._to_share_out = False
        self._changed = time.monotonic()
        self._tasks: set[asyncio.Task[None]] = set()
        self._file_threads: set[FileThread] = set()  # of workers that are gone, which may hang
        self._stopping = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        """Serve until `stop` was called, or the task is cancelled."""
        self._listening.setblocking(False)
        self._loop.add_reader(self._listening, self._accept)
        try:
            while not self.stopping:
                self._look()
                try:
                    await asyncio.wait_for(self._stopping.wait(), LOOK_SECONDS)
                except TimeoutError:
                    continue
        finally:
            self._loop.remove_reader(self._listening)
            self._listening.close()

    @property
    def stopping(self) -> bool:
        """Whether nobody is taken in any more, and nothing is leased."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """Take nobody in any more, and have `run` return."""
        self._stopping.set()

    async def end(self, deadline: float) -> None:
        """Wait for leases to come back, up to `deadline` seconds, let everybody go, and close the
        store. Raises what `TierStore.close` raises."""
        ends = time.monotonic() + deadline
        while self._leased() and time.monotonic() < ends:
            self.reclaim()
            await asyncio.sleep(0.05)
        for connection in list(self.connections.values()):
            connection.drop("the service ends")
            for granted in connection.leases.values():  # it may still be looking at it
                self.arena.keep(self._memory_of(granted.lease))
        for task in list(self._tasks):
            task.cancel()
        try:
            await self._loop.run_in_executor(None, self.engine.close)
        finally:
            for connection in list(self.connections.values()):
                connection.close("the service has ended")

    def _leased(self) -> int:
        return sum(len(connection.leases) for connection in self.connections.values())

    # Workers come and go -----------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            made, _ = self._listening.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                log.warning("too many files are open for another worker: it waits")
                self._loop.remove_reader(self._listening)
                self._loop.call_later(LOOK_SECONDS, self._accept_again)
            return  # else whoever connected is gone again
        pid, user = peer_of(made)
        if user != os.geteuid():
            log.warning("refused process %d of user %d: it is another user's", pid, user)
            made.close()
            return
        connection = Connection(self, made, self._next_number(), pid)
        self.connections[connection.number] = connection
        connection.alarm = self._loop.call_later(
            HELLO_SECONDS, connection.drop, "it has not said hello"
        )
        hung = sum(thread.running for thread in self._file_threads)
        if len(self.connections) + hung > WORKERS:
            connection.drop(f"it has {WORKERS} workers already")
            return

    def _accept_again(self) -> None:
        if not self.stopping:
            self._loop.add_reader(self._listening, self._accept)

    def _next_number(self) -> int:
        self._numbers += 1  # from 1: stream 0 is the service's own
        return self._numbers

    def greeted(self, connection: Connection) -> None:
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
        self.share_out_soon()
        log.info("worker %s came", described(connection))

    def let_go(self, connection: Connection, why: str) -> None:
        """A worker is not served any more, and has not hung up yet."""
        if not self.stopping:
            self.share_out_soon()
        log.warning(
            "worker %s was let go: %s; it has not given back %d leases yet",
            described(connection),
            why,
            len(connection.leases),
        )

    def gone(self, connection: Connection, why: str) -> None:
        """A connection is over; what it had was given back."""
        self.connections.pop(connection.number, None)
        self.leases.end_stream(connection.number)
        self._file_threads.add(connection.file_thread)
        self._file_threads = {thread for thread in self._file_threads if thread.running}
        if connection.name:
            self.changed()
        if not self.stopping:
            self.share_out_soon()
        if connection.name:
            counts = connection.counts
            log.info(
                "worker %s went: %s; it was granted %d leases (%d at once), gave back %d",
                described(connection),
                why,
                counts.granted,
                counts.hits,
                len(connection.leases),
            )
        elif not connection.visitor:
            log.warning("process %d was let go: %s", connection.pid, why)

    def leave(self, groups: Iterable[ServedGroup]) -> None:
        """A worker that had groups registered is served no more. Others are, while this goes on:
        until its turn, a group counts as registered, also if the worker registers it again."""
        if self.stopping:
            return  # nothing is leased any more
        waiting = bool(self._leaving)
        self._leaving += groups
        if not waiting:
            self._leave_some()

    def _leave_some(self) -> None:
        if self.stopping:
            return
        for _ in range(min(LEFT_AT_ONCE, len(self._leaving))):
            self.groups.leave(self._leaving.popleft())
        if self._leaving:
            self._loop.call_soon(self._leave_some)
        else:
            self.share_out_soon()

    # Sharing -----------------------------------------------------------------------------------

    def _allowances(self) -> dict[int, int]:
        largest = {
            number: max((group.nbytes for group in connection.groups.values()), default=0)
            for number, connection in self.connections.items()
        }
        return allowances(self._budget, self.groups.bytes_registered, largest)

    def share_out_soon(self) -> None:
        """`share_out`, once for all changes until then: it may show that more workers are gone."""
        if not self._to_share_out:
            self._to_share_out = True
            self._loop.call_soon(self.share_out)

    def share_out(self) -> None:
        """Tell workers what they may lease, if that has changed."""
        self._to_share_out = False
        for number, nbytes in self._allowances().items():
            connection = self.connections.get(number)
            if connection is not None and nbytes != connection.allowance and connection.name:
                connection.allowance = nbytes
                connection.send(messages.Allowance(nbytes))

    def reclaim(self) -> None:
        """Somebody waits for room: ask all for what they do not use, soon if it was just done."""
        if not self._to_reclaim:
            self._to_reclaim = True
            due = self._reclaimed + RECLAIM_SECONDS - time.monotonic()
            self._loop.call_later(max(due, 0.0), self._reclaim)

    def _reclaim(self) -> None:
        self._to_reclaim = False
        self._reclaimed = time.monotonic()
        # A process that was let go may have connected again, and have leases from before, too.
        holders = {connection.pid for connection in self.connections.values() if connection.leases}
        for connection in list(self.connections.values()):
            if connection.pid in holders and connection.name:
                connection.send(messages.Reclaim())

    def offset_of(self, lease: Lease) -> int:
        """Where a leased group lies in the arena."""
        return self.arena.offset_of(self._memory_of(lease))

    def _memory_of(self, lease: Lease) -> torch.Tensor:
        slot = self.engine.core.mover.entry(lease.group).slots[Tier.HOST]
        assert slot.memory is not None
        return slot.memory

    def changed(self) -> None:
        """A lease was granted, or came back."""
        self._changed = time.monotonic()

    def keep(self, task: asyncio.Task[None]) -> None:
        """Have a task that nobody waits for live until it is done."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Watching ----------------------------------------------------------------------------------

    def _look(self) -> None:
        """Name who holds what others wait for, and refuse what nobody can give."""
        now = time.monotonic()
        for connection in list(self.connections.values()):
            connection.check_connected()
            since = connection.unfinished
            if since is not None and now - since > UNFINISHED_SECONDS:
                connection.drop("the rest of a message does not come")
        waiting = [c for c in self.connections.values() if c.waiting]
        if not waiting or not self.engine.core.planner.idle():
            return
        for connection in self.connections.values():
            late = [g for g in connection.leases.values() if now - g.since > HELD_SECONDS]
            if any(not granted.named for granted in late):
                for granted in late:
                    granted.named = True
                log.warning(
                    "worker %s has had %d leases (%s bytes) for more than %.0f s while others "
                    "wait for room",
                    described(connection),
                    len(late),
                    f"{sum(granted.nbytes for granted in late):,}",
                    HELD_SECONDS,
                )
        if now - self._changed > self.hopeless_seconds:
            self.changed()
            longest = min(waiting, key=lambda c: min(w.since for w in c.waiting.values()))
            longest.refuse_longest_wait(self._hopeless)

    def _hopeless(self, key: str, nbytes: int) -> BudgetError:
        held = ", ".join(
            f"{described(c)} {sum(g.nbytes for g in c.leases.values()):,} bytes"
            for c in self.connections.values()
            if c.leases
        )
        return BudgetError(
            key,
            Tier.HOST.name,
            nbytes,
            self._budget,
            f"for {self.hopeless_seconds:g} s no worker has given anything back ({held}): release "
            "leases, or start tierstore-serve with a larger --ram",
        )

    def report(self, request: int) -> messages.Report:
        """What the service does at this moment. May be called by any thread."""
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


def described(connection: Connection) -> str:
    """A worker as the log calls it."""
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
    """What the store of a service works with: budgets in bytes."""
    budgets: dict[Tier, int | None] = {Tier.HOST: ram, Tier.DISK: disk}
    return Settings(
        tiers=TierSettings(
            device=torch.device("cpu"),
            budgets=budgets,
            verify="first",
            shared_arena=SharedArena(ram),
        ),
        disk_dir=resolved_directory(directory),
        policy=NEXT_USE_UNFORETOLD,
    )
