"""Closing a store while its service is stopped, as by SIGSTOP: it never waits for the service."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.service.serving import ThreadService, serving, wait_until
from tierstore.errors import ClosedError, ServiceLostError
from tierstore.tiers.service_link import ServiceLink
from tierstore.wire import messages

NOTHING = "weights/" + "0" * 32


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ThreadService]:
    with serving(tmp_path / "served", 1 << 20) as running:
        yield running


@contextlib.contextmanager
def stopped(service: ThreadService) -> Iterator[None]:
    """Block the service inside the context: it reads and answers nothing."""
    stops, go_on = threading.Event(), threading.Event()

    def stop() -> None:
        stops.set()
        go_on.wait(30)

    service.loop.call_soon_threadsafe(stop)
    assert stops.wait(10)
    try:
        yield
    finally:
        go_on.set()


class Caller:
    """A call on a separate thread, and the error that it ends with."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.error: BaseException | None = None
        self._call = call
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self.error = error

    def over(self, seconds: float) -> bool:
        self.thread.join(seconds)
        return not self.thread.is_alive()


class Sender:
    """Sends parts of an upload until the connection ends."""

    def __init__(self, link: ServiceLink) -> None:
        self._wire = link.wire()
        self.sent = 0
        self._latest = time.monotonic()
        self.caller = Caller(self._send)

    def _send(self) -> None:
        part = messages.Part(1, bytes(messages.UPLOAD))
        while True:
            self._wire.post(part)
            self.sent += 1
            self._latest = time.monotonic()

    def waits(self) -> bool:
        """Return whether it has sent nothing for a while."""
        return time.monotonic() - self._latest > 0.5


def test_close_of_a_link_ends_a_blocked_send(service: ThreadService):
    link = ServiceLink(service.socket, private=False)
    assert not link.find(NOTHING)
    with stopped(service):
        sender = Sender(link)
        wait_until(sender.waits)
        closer = Caller(link.close)
        assert closer.over(5)
        assert sender.caller.over(5)
    assert closer.error is None
    assert isinstance(sender.caller.error, ServiceLostError)
    assert "the store was closed" in str(sender.caller.error)


def test_blocked_send_continues_with_the_service(service: ThreadService):
    link = ServiceLink(service.socket, private=False)
    assert not link.find(NOTHING)
    with stopped(service):
        sender = Sender(link)
        wait_until(sender.waits)
        sent = sender.sent
        assert not sender.caller.over(0.3)
    wait_until(lambda: sender.sent > sent + 4)  # parts without an upload are ignored
    link.close()
    assert sender.caller.over(5)


def test_close_of_a_link_does_not_wait_for_a_greeting(service: ThreadService):
    link = ServiceLink(service.socket, private=False)
    assert not link.find(NOTHING)
    with stopped(service):
        link.wire().end("a test of it")
        asker = Caller(lambda: link.find(NOTHING))
        assert not asker.over(0.3)
        assert Caller(link.close).over(5)
        assert not asker.over(0.1)
    assert asker.over(10)
    assert isinstance(asker.error, ClosedError)
    wait_until(lambda: not service.server.connections)
