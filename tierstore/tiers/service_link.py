"""A worker's connection to a service, which reconnects after a loss.

A `ServiceLink` has one wire at a time (see `tierstore.tiers.service_wire`). If the service is gone,
calls that need it raise ServiceLostError at once, and the next call tries to reconnect.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tierstore.errors import ClosedError, ServiceLostError
from tierstore.model.groups import TensorSpec
from tierstore.model.locks import RLock, exclusively
from tierstore.system.file_table import FileTable
from tierstore.tiers.entry import SharedGroup
from tierstore.tiers.service_wire import Listener, SharedLease, Wire
from tierstore.wire import messages
from tierstore.wire.messages import Message

logger = logging.getLogger("tierstore.tiers")

BATCH = 64
"""Groups per registration message."""


@dataclass(eq=False)
class ServiceLink:
    """A store's connection to the service at the socket `path`.

    With `private`, leased memory is mapped copy-on-write: writes change only this process's copy,
    until the lease ends; otherwise it is read-only. `table` opens files here. `listener` receives
    the service's unsolicited messages: see `listen`.
    """

    path: str
    private: bool
    table: FileTable | None = None
    listener: Listener = field(default_factory=lambda: Listener(lambda nbytes: None, lambda: None))
    _wire: Wire | None = None
    _closed: bool = False
    _connecting: Any = field(default_factory=RLock)
    # Messages of finalizers, which may run anywhere, even while another message is being sent.
    _deferred: deque[tuple[weakref.ref[Wire], Message]] = field(default_factory=deque)

    def wire(self) -> Wire:
        """Return the connection, after reconnecting if it was lost.

        Raises ServiceLostError, or ClosedError.
        """
        wire = self._wire
        if wire is not None and wire.lost is None:
            return wire
        return exclusively(self._connecting, self._connected)

    def _connected(self) -> Wire:
        self._check_open()
        if self._wire is None or self._wire.lost is not None:
            again = self._wire is not None
            self._wire = Wire(self.path, self.listener, private=self.private)
            try:
                self._check_open()
            except ClosedError:  # closed meanwhile: `stop` may not have seen this wire
                self._wire.close()
                raise
            if again:
                logger.info("reconnected to the service at %s", self.path)
                # Idle leases belong to the old arena, outside the budget of the new one.
                self.listener.reclaim()
            self.listener.allowance(self._wire.welcome.allowance)
        return self._wire

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the store is closed: connect a new one")

    def listen(self, allowance: Callable[[int], None], reclaim: Callable[[], None]) -> None:
        """Connect, and pass the service's unsolicited messages to these callbacks (see `Listener`).

        Raises ServiceLostError, or TierStoreError if the service rejects it.
        """
        self.listener = Listener(allowance, reclaim)
        self.wire()

    @property
    def budget(self) -> int:
        """Bytes of the service's host memory; 0 if unknown."""
        wire = self._wire
        return 0 if wire is None else wire.welcome.budget

    def directory(self) -> str:
        """Return the directory in which the service keeps object files."""
        return self.wire().welcome.directory

    # Groups ------------------------------------------------------------------------------------

    def register(self, groups: Sequence[SharedGroup]) -> None:
        """Register groups with the service. Raises their errors, or ServiceLostError."""
        wire = self.wire()
        for at in range(0, len(groups), BATCH):
            batch = groups[at : at + BATCH]
            # The lock keeps file numbers in the order of the messages that send the files.
            rows = exclusively(self._connecting, functools.partial(self._rows, wire, batch))
            request = wire.new_request()
            message = messages.Register(request, rows)
            answer = wire.ask(request, message, messages.Registered, batch[0].key)
            for group, number in zip(batch, answer.groups, strict=True):
                self._record(wire, group, number)

    def _record(self, wire: Wire, group: SharedGroup, number: int) -> None:
        wire.numbers[group] = number
        left, of = self._deferred, weakref.ref(wire)
        weakref.finalize(group, left.append, (of, messages.Forget(number))).atexit = False

    def _rows(self, wire: Wire, groups: Sequence[SharedGroup]) -> list[messages.Group]:
        return [self._row(wire, group) for group in groups]

    def _row(self, wire: Wire, group: SharedGroup) -> messages.Group:
        assert self.table is not None
        files = {
            path: wire.number_of_file(group.files[path], self.table)
            for path in sorted(group.source.paths)
        }
        source = group.source
        return messages.Group(
            group.nbytes,
            [
                messages.Piece(files[s.extent.path], s.extent.offset, s.extent.nbytes, s.at)
                for s in source.segments
            ],
            [messages.Shift(m.src, m.dst, m.nbytes) for m in source.moves],
            [messages.Checksum(c.name, c.offset, c.nbytes, c.digest) for c in source.checks],
        )

    def lease(self, group: SharedGroup) -> SharedLease:
        """Lease a group. Blocks until it is resident.

        Raises the errors of a failed read, BudgetError if the group can never fit,
        ServiceLostError.
        """
        self._send_deferred()
        wire = self.wire()
        number = wire.numbers.get(group)
        if number is None:  # the service has restarted
            self.register([group])
            number = wire.numbers[group]
        return wire.lease(group, number)

    def release(self, lease: SharedLease) -> None:
        """Release a lease whose memory no view and no device uses any longer."""
        nbytes = lease.memory.nbytes
        if self.private:
            lease.wire.map.refresh(lease.offset, nbytes)
        lease.wire.release(lease.request)
        self._send_deferred()

    def _send_deferred(self) -> None:
        while self._deferred:
            of, message = self._deferred.popleft()
            wire = of()
            if wire is not None and wire.lost is None:
                with contextlib.suppress(ServiceLostError):
                    wire.post(message)

    # Objects -----------------------------------------------------------------------------------

    def find(self, key: str) -> bool:
        """Return whether the service has an object file of this key."""
        wire = self.wire()
        request = wire.new_request()
        return wire.ask(request, messages.Find(request, key), messages.Found, key).there

    def upload(
        self, key: str, tensors: Iterable[TensorSpec], nbytes: int, data: Iterable[memoryview]
    ) -> None:
        """Upload tensors for all workers. `data` yields the `nbytes` bytes that contain them.

        Returns when they are on disk. Raises the errors of a put, or ServiceLostError.
        """
        wire = self.wire()
        request = wire.new_request()
        rows = [
            messages.TensorRow(t.name, t.dtype, list(t.shape), list(t.stride), t.offset)
            for t in tensors
        ]
        wire.ask(request, messages.Upload(request, key, rows, nbytes), messages.Done, key)
        last = None
        for part in _parts(data):
            if last is not None:
                wire.post(last)
            last = messages.Part(request, bytes(part))
        assert last is not None, "an upload has bytes"
        wire.ask(request, last, messages.Done, key)

    def stop(self) -> None:
        """Fail pending requests with ServiceLostError, and later ones with ClosedError.

        Leases stay until `close`.
        """
        # Without a lock: the thread that holds it may be blocked by a suspended service.
        self._closed = True
        wire = self._wire
        if wire is not None:
            wire.end("the store was closed")

    def close(self) -> None:
        """Close the connection, which releases all leases."""
        self.stop()
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()


def _parts(data: Iterable[memoryview]) -> Iterator[memoryview]:
    for block in data:
        for at in range(0, len(block), messages.UPLOAD):
            yield block[at : at + messages.UPLOAD]
