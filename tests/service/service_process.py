"""Services in separate processes, which start at once: torch is already imported."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests.fresh import run_fresh
from tierstore import TierStore
from tierstore.wire.messages import Report
from tierstore.wire.status import NoAnswerError, query_status

PROGRAM = Path(__file__).with_name("served.py")


class ServiceProcess:
    """`tierstore-serve DIRECTORY` with these options; one at a time per test process."""

    def __init__(self, directory: Path, *options: str, notes: Path | None = None) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="ts-")
        os.chmod(self._place.name, 0o700)
        self.socket = os.path.join(self._place.name, "s")
        self._words = (
            str(notes or "-"),
            str(directory),
            "--socket",
            self.socket,
            *options,
        )
        self._done: subprocess.CompletedProcess[str] | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.pid = self._wait_until_ready().pid

    def _run(self) -> None:
        self._done = run_fresh(PROGRAM, *self._words, directory=Path(self._place.name))

    def _wait_until_ready(self) -> Report:
        ends = time.monotonic() + 30
        while True:
            with contextlib.suppress(NoAnswerError):
                return query_status(self.socket)
            assert time.monotonic() < ends, "the service does not start"
            assert self._thread.is_alive(), self._done
            time.sleep(0.01)

    def report(self) -> Report:
        return query_status(self.socket)

    def connect(self, **options: object) -> TierStore:
        """Connect a store to this service."""
        return TierStore.connect(self.socket, device="cpu", **options)  # type: ignore[arg-type]

    def resident_bytes(self) -> int:
        """Return its private memory, in bytes: neither files nor the arena."""
        with open(f"/proc/{self.pid}/status") as status:
            lines = dict(line.split(":", 1) for line in status)
        return int(lines["RssAnon"].split()[0]) << 10

    def descriptors(self) -> list[str]:
        """Return its open descriptors, except connections."""
        found = []
        for name in os.listdir(f"/proc/{self.pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                found.append(os.readlink(f"/proc/{self.pid}/fd/{name}"))
        return sorted(found)

    def send_signal(self, number: int = signal.SIGTERM) -> None:
        os.kill(self.pid, number)

    def wait(self, seconds: float = 30.0) -> subprocess.CompletedProcess[str]:
        """Return its result. Raises if it does not end in time."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "it is still running"
        assert self._done is not None
        return self._done

    def end(self, number: int = signal.SIGTERM) -> subprocess.CompletedProcess[str]:
        """End it, if it is still running, and return its result."""
        if self._thread.is_alive():
            self.send_signal(number)
        done = self.wait()
        self._place.cleanup()
        return done


@contextlib.contextmanager
def served_by_a_process(
    directory: Path, ram: int, *options: str, notes: Path | None = None
) -> Iterator[ServiceProcess]:
    """Run a service of this directory inside the context."""
    service = ServiceProcess(directory, "--ram", f"{ram >> 10}KiB", *options, notes=notes)
    try:
        yield service
    finally:
        service.end()
