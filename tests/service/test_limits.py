"""Limits of a service on its workers, and the errors beyond them."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lanes import by_lane
from tests.service.limits import set_limit
from tests.service.raw import PAGE, RawWorker, pages
from tests.service.serving import ThreadService, serving
from tests.service.test_serving import MIB
from tierstore.service import connection, passed_files, server, shared_groups
from tierstore.wire import messages as m
from tierstore.wire.framing import Outgoing


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ThreadService]:
    with serving(tmp_path / "served", 4 * MIB) as running:
        yield running


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(bytes(64 * PAGE))
    return path


def all_are_disconnected(service: ThreadService) -> bool:
    service.wait_until(lambda: not service.server.connections)
    return service.leased() == 0 and service.server.groups.bytes_registered == 0


def test_silent_connection_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
):
    set_limit(monkeypatch, server, "HELLO_SECONDS", 0.2)
    with serving(tmp_path / "served", MIB) as service, RawWorker(service.socket) as polite:
        began = time.monotonic()
        with RawWorker(service.socket, name=None) as silent:
            assert "has not sent a hello" in silent.why_refused()
        assert 0.1 < time.monotonic() - began < 2
        polite.ping()
    assert f"dropped process {os.getpid()}: it has not sent a hello" in log.text


def test_unfinished_message_is_disconnected(
    service: ThreadService, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
):
    set_limit(monkeypatch, server, "UNFINISHED_SECONDS", 0.1)
    set_limit(monkeypatch, server, "CHECK_SECONDS", 0.05)
    with RawWorker(service.socket) as slow, RawWorker(service.socket) as quick:
        slow.send_bytes(b"\x90\0\0")
        assert "the rest of a message" in slow.why_refused()
        time.sleep(0.3)  # a worker that sent whole messages may be silent
        quick.ping()
    assert all_are_disconnected(service)
    assert "the rest of a message" in log.text


def test_slow_upload_is_allowed(service: ThreadService, monkeypatch: pytest.MonkeyPatch):
    set_limit(monkeypatch, server, "UNFINISHED_SECONDS", 1.0)
    set_limit(monkeypatch, server, "CHECK_SECONDS", 0.05)
    with RawWorker(service.socket) as raw:
        row = m.TensorRow("w", "U8", [3 * m.UPLOAD], [1], 0)
        raw.send(m.Upload(1, "casts/" + "0" * 32, [row], 3 * m.UPLOAD))
        raw.take(m.Done)
        for _ in range(3):  # each takes less than the limit, all together more
            time.sleep(0.4)
            raw.send(m.Part(1, bytes(m.UPLOAD)))
        raw.take(m.Done)
        raw.ping()


def test_workers_above_the_limit_are_refused(
    service: ThreadService, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
):
    set_limit(monkeypatch, server, "MAX_CONNECTIONS", 3)
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(RawWorker(service.socket))
        with RawWorker(service.socket, name=None) as more:
            assert "already has 3 connections" in more.why_refused()
    assert all_are_disconnected(service)
    assert "already has 3 connections" in log.text
    with RawWorker(service.socket) as raw:
        raw.ping()


def test_files_above_the_limit_are_refused(
    service: ThreadService,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    log: pytest.LogCaptureFixture,
):
    set_limit(monkeypatch, passed_files, "MAX_FILES", 5)
    with RawWorker(service.socket) as raw, pytest.raises(ConnectionError):
        for number in range(20):  # files of groups count, even when closed
            raw.open(data)
            raw.register([pages(number, file=number)])
            raw.send(m.CloseFile(number))
    assert number == 5
    assert all_are_disconnected(service)
    with RawWorker(service.socket) as raw:
        for number in range(20):  # files without groups do not
            raw.open(data)
            raw.send(m.CloseFile(number))
            raw.ping()
    assert "more than 5 files" in log.text


def test_groups_above_the_limit_are_refused(
    service: ThreadService,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    log: pytest.LogCaptureFixture,
):
    set_limit(monkeypatch, connection, "MAX_GROUPS", 10)
    with RawWorker(service.socket) as raw:
        raw.open(data)
        raw.register([pages(i) for i in range(10)])
        raw.send(m.Register(2, [pages(30)]))
        assert "more than 10 groups" in raw.why_refused()
    assert all_are_disconnected(service)
    assert "more than 10 groups" in log.text


def test_leases_above_the_limit_are_refused(
    service: ThreadService,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    log: pytest.LogCaptureFixture,
):
    set_limit(monkeypatch, connection, "MAX_LEASES", 10)
    with RawWorker(service.socket) as raw:
        raw.open(data)
        (group,) = raw.register([pages(0)])
        for _ in range(10):
            assert isinstance(raw.lease(group), m.Leased)
        raw.send(m.Lease(99, group))
        assert "more than 10 leases" in raw.why_refused()
        assert service.leased() == 10  # it may still view them
    assert all_are_disconnected(service)
    assert "more than 10 leases" in log.text


def test_abandoned_groups_expire(
    service: ThreadService, data: Path, monkeypatch: pytest.MonkeyPatch
):
    set_limit(monkeypatch, shared_groups, "MAX_UNUSED", 8)
    for turn in range(3):
        with RawWorker(service.socket) as raw:
            raw.open(data)
            numbers = raw.register([pages(20 * turn + i) for i in range(20)])
            for number in numbers:
                assert isinstance(raw.lease(number), m.Leased)
        assert all_are_disconnected(service)
        assert len(service.server.groups) == 8


def test_cancelled_leases_leave_nothing(service: ThreadService, data: Path):
    with RawWorker(service.socket) as raw:
        raw.open(data)
        groups = raw.register([pages(i) for i in range(60)])
        for _ in range(3):
            requests = [raw.request() for _ in groups]
            for request, group in zip(requests, groups, strict=True):
                raw.send(m.Lease(request, group))
                raw.send(m.Cancel(request))
            raw.ping()
        service.wait_until(lambda: service.leased() == 0)
        (worker,) = service.server.connections.values()
        assert not worker.waiting
    assert all_are_disconnected(service)


def test_hundreds_of_disconnects_at_once_are_handled(
    service: ThreadService, data: Path, caplog: pytest.LogCaptureFixture
):
    """Each disconnect changes the allowance of all others, and reveals further disconnects."""
    number = by_lane(60, 400)
    os.truncate(data, number * 32 * PAGE)
    workers = [RawWorker(service.socket) for _ in range(number)]
    for i, worker in enumerate(workers):
        worker.open(data)
        worker.register([pages(32 * i + k) for k in range(32)])
    allowances = {c.allowance for c in service.server.connections.values()}
    assert len(service.server.connections) == number
    assert max(allowances) < MIB  # they share
    paused, go_on = pause(service)
    for worker in workers:
        worker.close()
    go_on.set()
    assert paused
    assert all_are_disconnected(service)
    assert "Traceback" not in caplog.text
    with RawWorker(service.socket) as raw:
        raw.ping()


def pause(service: ThreadService) -> tuple[bool, threading.Event]:
    """Block the service until the returned event is set."""
    stopped, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        stopped.set()
        go_on.wait(10)

    service.loop.call_soon_threadsafe(wait)
    return stopped.wait(10), go_on


def test_workers_wait_when_descriptors_run_out(
    service: ThreadService, log: pytest.LogCaptureFixture
):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with RawWorker(service.socket) as raw:
        raw.ping()
        waiting = socket.socket(socket.AF_UNIX)
        paused, go_on = pause(service)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # fewer than are open
            waiting.connect(service.socket)
            go_on.set()
            began = time.process_time()
            service.wait_until(lambda: "too many open files" in log.text)
            time.sleep(0.3)
            assert time.process_time() - began < 0.25  # it does not retry in a busy loop
            raw.ping()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert paused
        waiting.settimeout(10)
        waiting.sendall(Outgoing().encode(m.Hello(m.VERSION, "late")))
        assert waiting.recv(100)
        waiting.close()
    assert all_are_disconnected(service)
