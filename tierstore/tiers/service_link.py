"""A worker's side of a service: what it asks for, and where it connects again.

A `ServiceLink` has one wire at a time (see `tierstore.tiers.service_wire`): if the service is gone,
every call that needs it raises ServiceLostError at once, and the next one looks whether it is back.
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
"""Groups that are registered with one message."""


@dataclass(eq=False)
class ServiceLink:
    """What a store knows of the service at the socket `path`.

    With `private`, leased memory is mapped so that whoever writes to it changes only a copy of
    their own, until the lease ends; else it can only be read. `table` opens files here. `listener`
    is told what the service says: see `listen`.
    """

    path: str
    private: bool
    table: FileTable | None = None
    listener: Listener = field(default_factory=lambda: Listener(lambda nbytes: None, lambda: None))
    _wire: Wire | None = None
    _closed: bool = False
    _connecting: Any = field(default_factory=RLock)
    # What finalizers have left to say: they may run anywhere, also where a message is being sent.
    _left: deque[tuple[weakref.ref[Wire], Message]] = field(default_factory=deque)

    def wire(self) -> Wire:
        """The connection, made anew if it was lost. Raises ServiceLostError, or ClosedError."""
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
            except ClosedError:  # since then: `stop` may not have seen this wire
                self._wire.close()
                raise
            if again:
                logger.info("connected again to the service at %s", self.path)
                # What is leased and idle was of another arena, beside the budget of this one.
                self.listener.reclaim()
            self.listener.allowance(self._wire.welcome.allowance)
        return self._wire

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the store is closed: connect again")

    def listen(self, allowance: Callable[[int], None], reclaim: Callable[[], None]) -> None:
        """Have these told what the service says unasked (see `Listener`), and connect.

        Raises ServiceLostError, or TierStoreError if the service refuses.
        """
        self.listener = Listener(allowance, reclaim)
        self.wire()

    @property
    def budget(self) -> int:
        """Bytes of the service's host memory, as far as is known."""
        wire = self._wire
        return 0 if wire is None else wire.welcome.budget

    def directory(self) -> str:
        """Where the service keeps object files."""
        return self.wire().welcome.directory

    # Groups ------------------------------------------------------------------------------------

    def register(self, groups: Sequence[SharedGroup]) -> None:
        """Have the service know groups. Raises what is wrong with them, or ServiceLostError."""
        wire = self.wire()
        for at in range(0, len(groups), BATCH):
            batch = groups[at : at + BATCH]
            # Files are numbered in the order in which they are sent.
            rows = exclusively(self._connecting, functools.partial(self._rows, wire, batch))
            request = wire.new_request()
            message = messages.Register(request, rows)
            answer = wire.ask(request, message, messages.Registered, batch[0].key)
            for group, number in zip(batch, answer.groups, strict=True):
                self._know(wire, group, number)

    def _know(self, wire: Wire, group: SharedGroup, number: int) -> None:
        wire.numbers[group] = number
        left, of = self._left, weakref.ref(wire)
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
        """A lease on a group. Waits until it is there.

        Raises the errors of a read that failed, BudgetError if it can never fit, ServiceLostError.
        """
        self._say_what_was_left()
        wire = self.wire()
        number = wire.numbers.get(group)
        if number is None:  # the service was started again since
            self.register([group])
            number = wire.numbers[group]
        return wire.lease(group, number)

    def release(self, lease: SharedLease) -> None:
        """Give a lease back: nobody looks at its memory any more, nor does a device."""
        nbytes = lease.memory.nbytes
        if self.private:
            lease.wire.map.refresh(lease.offset, nbytes)
        lease.wire.release(lease.request)
        self._say_what_was_left()

    def _say_what_was_left(self) -> None:
        while self._left:
            of, message = self._left.popleft()
            wire = of()
            if wire is not None and wire.lost is None:
                with contextlib.suppress(ServiceLostError):
                    wire.post(message)

    # Objects -----------------------------------------------------------------------------------

    def find(self, key: str) -> bool:
        """Whether the service has an object file of this key."""
        wire = self.wire()
        request = wire.new_request()
        return wire.ask(request, messages.Find(request, key), messages.Found, key).there

    def upload(
        self, key: str, tensors: Iterable[TensorSpec], nbytes: int, data: Iterable[memoryview]
    ) -> None:
        """Hand tensors over that lie in `nbytes` bytes, the parts of `data`, to be kept for all.

        Returns when they are on disk. Raises what a put raises, or ServiceLostError.
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
        """Ask for nothing any more: whoever waits for an answer gets ServiceLostError, and whoever
        asks from now on ClosedError. What is leased stays leased until `close`."""
        # Without a lock: a thread that connects, or sends a file, may wait for a stopped service.
        self._closed = True
        wire = self._wire
        if wire is not None:
            wire.end("the store was closed")

    def close(self) -> None:
        """End the connection: all leases are given back."""
        self.stop()
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()


def _parts(data: Iterable[memoryview]) -> Iterator[memoryview]:
    for block in data:
        for at in range(0, len(block), messages.UPLOAD):
            yield block[at : at + messages.UPLOAD]
