"""A process that asks a service for a report is not a worker, and always gets an answer."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.service.serving import ThreadService, serving, wait_until
from tests.service.test_serving import MIB, checkpoint
from tierstore import TierStoreError
from tierstore.model.formatting import size, units_of
from tierstore.service.metrics import serve_metrics
from tierstore.wire import messages
from tierstore.wire.framing import Outgoing
from tierstore.wire.status import NoAnswerError, query_status


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ThreadService]:
    with serving(tmp_path / "served", 4 * MIB + 65536) as running:
        yield running


def test_report_lists_workers(service: ThreadService, tmp_path: Path) -> None:
    checkpoint(tmp_path / "m.safetensors", groups=1)
    with service.connect() as store:
        store.register_checkpoint(tmp_path / "m.safetensors")
        with store.acquire("w0"):
            report = query_status(service.socket)
            (worker,) = report.workers
            assert worker.pid == os.getpid()
            assert worker.groups == report.groups == 1
            assert worker.leases >= 1
            assert worker.leased_bytes >= MIB
            assert worker.granted_bytes >= worker.leased_bytes
            assert (worker.waits, worker.waiting) == (0, 0)
            assert 0 < worker.longest_lease < 60
        assert report.pid == os.getpid()
        assert report.socket == service.socket
        assert report.directory == str(service.directory)
        assert report.tiers["HOST"][0] >= MIB
        assert report.tiers["HOST"][1] == 4 * MIB + 65536
        assert report.read_bytes >= MIB
    wait_until(lambda: not query_status(service.socket).workers)


def test_report_of_a_connected_store_shows_its_leases(
    service: ThreadService, tmp_path: Path
) -> None:
    checkpoint(tmp_path / "m.safetensors", groups=1)
    with service.connect() as store:
        store.register_checkpoint(tmp_path / "m.safetensors")
        with store.acquire("w0"):
            stats, shown = store.stats(), store.report()
            assert stats.leased_bytes >= MIB
            units = units_of(stats.allowed_bytes)
            leased, allowed = (size(n, units) for n in (stats.leased_bytes, stats.allowed_bytes))
            assert re.search(rf"^service +{leased} +{allowed} +\d+%$", shown, re.MULTILINE), shown
            assert re.search(r"^HOST +0 B ", shown, re.MULTILINE), shown  # nothing private


def test_report_lists_waiters_and_their_wait_times(service: ThreadService, tmp_path: Path) -> None:
    for name in ("one", "other"):
        checkpoint(tmp_path / f"{name}.safetensors", groups=1, nbytes=4 * MIB)
    with service.connect() as one, service.connect() as other:
        one.register_checkpoint(tmp_path / "one.safetensors")
        other.register_checkpoint(tmp_path / "other.safetensors")
        with one.acquire("w0"):
            thread = threading.Thread(target=lambda: other.acquire("w0").release())
            thread.start()
            wait_until(lambda: any(w.waits for w in query_status(service.socket).workers))
            time.sleep(0.05)
            holder, waiter = query_status(service.socket).workers
            assert (holder.leases, holder.waits, holder.waiting) == (1, 0, 0)
            assert (waiter.leases, waiter.waits) == (0, 1)
            assert 0.05 <= waiter.waiting < 30
            assert holder.longest_lease > waiter.waiting
        thread.join(30)
        waiter = query_status(service.socket).workers[1]
        assert (waiter.waits, waiter.granted, waiter.hits) == (0, 1, 0)


def test_report_request_needs_no_worker(
    service: ThreadService, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    checkpoint(tmp_path / "m.safetensors", groups=12)
    with service.connect() as store:
        store.register_checkpoint(tmp_path / "m.safetensors")
        (connection,) = service.server.connections.values()
        allowance = connection.allowance
        log.clear()
        for _ in range(20):
            assert len(query_status(service.socket).workers) == 1
        wait_until(lambda: len(service.server.connections) == 1)
        assert connection.allowance == allowance
    wait_until(lambda: not service.server.connections)
    (went,) = log.messages  # and no line about the twenty queries
    assert "disconnected" in went


def test_report_request_does_not_delay_a_refusal(tmp_path: Path) -> None:
    checkpoint(tmp_path / "one.safetensors", groups=1, nbytes=4 * MIB)
    shutil.copy(tmp_path / "one.safetensors", tmp_path / "other.safetensors")
    with (
        serving(tmp_path / "served", 4 * MIB + 65536) as service,
        service.connect() as one,
        service.connect() as other,
        asking(service.socket, 0.1),
    ):
        service.server.blocked_seconds = 0.4
        one.register_checkpoint(tmp_path / "one.safetensors")
        other.register_checkpoint(tmp_path / "other.safetensors")
        with one.acquire("w0"), pytest.raises(TierStoreError, match="no worker has released"):
            other.acquire("w0", timeout=5)


@contextlib.contextmanager
def asking(path: str, seconds: float) -> Iterator[None]:
    """Query the service's status repeatedly on another thread."""
    stop = threading.Event()

    def ask() -> None:
        while not stop.wait(seconds):
            query_status(path)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_silent_peer_is_logged_but_report_request_is_not(
    service: ThreadService, log: pytest.LogCaptureFixture
) -> None:
    query_status(service.socket)
    with socket.socket(socket.AF_UNIX) as mute:
        mute.connect(service.socket)
    wait_until(lambda: bool(log.messages))
    assert len(log.messages) == 1


def test_other_requests_require_a_hello(service: ThreadService) -> None:
    outgoing = Outgoing()
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(service.socket)
        raw.sendall(outgoing.encode(messages.Status(1)))
        assert raw.recv(1 << 16)
        raw.sendall(outgoing.encode(messages.Find(2, "weights/" + "0" * 32)))
        assert b"its first message is a Find" in raw.recv(1 << 16)
        assert raw.recv(1 << 16) == b""


def test_report_with_all_workers_fits_a_message() -> None:
    name = "\N{GRINNING FACE}" * 200
    row = messages.WorkerRow(2**22, name, 1e9, 2**17, 4096, 2**50, 4096, 1e9, 1e9, *[2**60] * 3)
    tiers = {"HOST": (2**50, 2**50), "DISK": (2**50, None)}
    paths = "/" + "x" * 4095
    report = messages.Report(0, 1, paths, paths, 1e9, tiers, 2**60, 2**60, 2**17, [row] * 512)
    assert len(Outgoing().encode(report)) < messages.MAX_MESSAGE


def test_worker_names_are_truncated(service: ThreadService) -> None:
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(service.socket)
        raw.sendall(Outgoing().encode(messages.Hello(messages.VERSION, "x" * 4096)))
        wait_until(lambda: bool(query_status(service.socket).workers))
        assert query_status(service.socket).workers[0].name == "x" * 200


# Silent services ---------------------------------------------------------------------------------


@pytest.fixture
def listening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A socket `s` in this directory, on which another program listens."""
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("s")
        made.listen()
        yield made


def test_report_without_a_service_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NoAnswerError, match="No such file"):
        query_status("s")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind("s")
    with pytest.raises(NoAnswerError, match="refused"):
        query_status("s")
    with pytest.raises(NoAnswerError, match="too long"):
        query_status("x" * 200)


def test_report_from_a_silent_service_times_out(listening: socket.socket) -> None:
    with pytest.raises(NoAnswerError, match=r"within 0\.05 s"):
        query_status("s", 0.05)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"", "closed the connection"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "would have"),
        (Outgoing().encode(messages.Refused("it is full")), "refused: it is full"),
        (Outgoing().encode(messages.Pong()), "answered with a Pong"),
    ],
    ids=["nothing", "another protocol", "refusal", "another message"],
)
def test_report_with_a_malformed_answer_raises(
    listening: socket.socket, answer: bytes, told: str
) -> None:
    def reply() -> None:
        made, _ = listening.accept()
        with made:
            made.recv(1 << 16)
            made.sendall(answer)

    thread = threading.Thread(target=reply)
    thread.start()
    with pytest.raises(NoAnswerError, match=told):
        query_status("s", 5)
    thread.join()


def test_report_trickling_slowly_times_out(listening: socket.socket) -> None:
    stop = threading.Event()

    def reply() -> None:
        made, _ = listening.accept()
        with made:
            for byte in Outgoing().encode(messages.Refused("x" * 100)):
                if stop.wait(0.02):
                    return
                made.sendall(bytes([byte]))

    thread = threading.Thread(target=reply)
    thread.start()
    with pytest.raises(NoAnswerError, match="no answer within"):
        query_status("s", 0.2)
    stop.set()
    thread.join()


# Metrics -----------------------------------------------------------------------------------------


def test_two_stores_of_a_process_are_one_prometheus_worker(
    service: ThreadService, tmp_path: Path
) -> None:
    checkpoint(tmp_path / "m.safetensors", groups=2)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve_metrics(service.server, port)
    with service.connect() as one, service.connect() as other:
        for store in (one, other):
            store.register_checkpoint(tmp_path / "m.safetensors")
            with store.acquire("w0"):
                pass
        page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    samples = [s for family in text_string_to_metric_families(page) for s in family.samples]
    named = [(s.name, tuple(sorted(s.labels.items()))) for s in samples]
    assert len(named) == len(set(named))
    granted = [s for s in samples if s.name == "tierstore_worker_leases_total"]
    assert {s.labels["worker"] for s in granted} == {str(os.getpid())}
    assert sum(s.value for s in granted) >= 2
