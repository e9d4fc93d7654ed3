"""A file system in user space that mirrors a directory, and fails or hangs on command."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.faults.facilities import Unusable, unmount, wait_until_mounted

SERVER = "tests.faults.failing_fs_server"
PATIENCE = 30.0
"""Seconds until it must be mounted."""


@dataclass
class FailingFileSystem:
    """A failing file system mounted at the directory `at`."""

    at: Path
    _orders: Path
    _server: subprocess.Popen[bytes]

    @contextmanager
    def failing(self, **errors: str) -> Iterator[None]:
        """Make these operations fail inside the block: `failing(read="EIO")`."""
        self._order(errors)
        try:
            yield
        finally:
            self._order({})

    def _order(self, errors: dict[str, str]) -> None:
        new = self._orders.with_suffix(".new")
        new.write_text(json.dumps(errors))
        new.replace(self._orders)

    def hang(self) -> None:
        """Stop answering."""
        self._server.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Resume answering; pending requests are answered first."""
        self._server.send_signal(signal.SIGCONT)


@contextmanager
def failing_file_system(place: Path) -> Iterator[FailingFileSystem]:
    """Mount one below `place` until the end of the block. Raises Unusable."""
    shown, at, orders = place / "shown", place / "mounted", place / "orders"
    for directory in (shown, at):
        directory.mkdir()
    (shown / "is mounted").touch()
    orders.write_text("{}")
    arguments = [str(shown), str(at), str(orders)]
    server = subprocess.Popen([sys.executable, "-m", SERVER, *arguments])
    try:
        wait_until_mounted(at / "is mounted", server, PATIENCE)
        yield FailingFileSystem(at, orders, server)
    finally:
        # Kill the server first: every waiter then gets an error, and nothing can hang here.
        server.kill()
        server.wait()
        with suppress(Unusable):
            unmount(at)
