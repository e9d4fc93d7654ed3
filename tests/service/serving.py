"""Services for tests: one on a thread of this process, or one in a separate process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tierstore import TierStore
from tierstore.observe.stats import Stats
from tierstore.service import sockets
from tierstore.service.server import Server, settings_of


@dataclass
class LeftOver:
    """The resources of a service: workers, leases, descriptors, threads, bytes of memory."""

    workers: int
    leases: int
    descriptors: int
    threads: int
    resident: int


def wait_until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait until another thread makes a condition true."""
    ends = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends, "the condition did not become true"
        time.sleep(0.005)


class ThreadService:
    """A service on a thread of this process: the real one, without the command around it."""

    def __init__(self, directory: Path, ram: int, disk: int | None = None) -> None:
        # A socket's path must be short; that of a test's directory is not.
        self._place = tempfile.TemporaryDirectory(prefix="ts-")
        os.chmod(self._place.name, 0o700)
        self.socket = os.path.join(self._place.name, "s")
        self.directory = directory
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._listening = sockets.listen(self.socket)
        self._thread = threading.Thread(target=self._main, args=(ram, disk), daemon=True)
        self._thread.start()
        assert self._ready.wait(30)
        if self._error is not None:
            raise self._error

    def _main(self, ram: int, disk: int | None) -> None:
        async def serve() -> None:
            try:
                settings = settings_of(self.directory, ram, disk)
                self.server = Server(settings, self._listening, self.socket)
                self.loop = asyncio.get_running_loop()
            except BaseException as error:
                self._error = error
                return
            finally:
                self._ready.set()
            try:
                await self.server.run()
            finally:
                await self.server.end(1.0)

        asyncio.run(serve())

    def connect(self, **options: object) -> TierStore:
        """Connect a store to this service."""
        return TierStore.connect(self.socket, device="cpu", **options)  # type: ignore[arg-type]

    wait_until = staticmethod(wait_until)

    def stats(self) -> Stats:
        """Return the statistics of its store."""
        return self.server.engine.reporting.stats()

    def leased(self) -> int:
        """Return the number of current leases."""
        return sum(len(c.leases) for c in list(self.server.connections.values()))

    def stop(self) -> None:
        """End it, as SIGTERM does."""
        self.loop.call_soon_threadsafe(self.server.stop)
        self._thread.join(30)
        assert not self._thread.is_alive()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.socket)
        self._place.cleanup()


@contextlib.contextmanager
def serving(directory: Path, ram: int, disk: int | None = None) -> Iterator[ThreadService]:
    """Run a service of this directory inside the context."""
    service = ThreadService(directory, ram, disk)
    try:
        yield service
    finally:
        service.stop()
