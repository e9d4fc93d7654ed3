"""Who asks a service what it does is no worker of it, and is answered whatever happens."""

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
from tierstore.wire.asking import NoAnswerError, report_of
from tierstore.wire.framing import Outgoing


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ThreadService]:
    with serving(tmp_path / "served", 4 * MIB + 65536) as running:
        yield running


def test_it_tells_of_its_workers(service: ThreadService, tmp_path: Path) -> None:
    checkpoint(tmp_path / "m.safetensors", groups=1)
    with service.connect() as store:
        store.register_checkpoint(tmp_path / "m.safetensors")
        with store.acquire("w0"):
            report = report_of(service.socket)
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
    wait_until(lambda: not report_of(service.socket).workers)


def test_a_connected_store_shows_what_it_has_leased(service: ThreadService, tmp_path: Path) -> None:
    checkpoint(tmp_path / "m.safetensors", groups=1)
    with service.connect() as store:
        store.register_checkpoint(tmp_path / "m.safetensors")
        with store.acquire("w0"):
            stats, shown = store.stats(), store.report()
            assert stats.leased_bytes >= MIB
            units = units_of(stats.allowed_bytes)
            leased, allowed = (size(n, units) for n in (stats.leased_bytes, stats.allowed_bytes))
            assert re.search(rf"^service +{leased} +{allowed} +\d+%$", shown, re.MULTILINE), shown
            assert re.search(r"^HOST +0 B ", shown, re.MULTILINE), shown  # nothing of its own


def test_it_tells_who_waits_and_since_when(service: ThreadService, tmp_path: Path) -> None:
    for name in ("one", "other"):
        checkpoint(tmp_path / f"{name}.safetensors", groups=1, nbytes=4 * MIB)
    with service.connect() as one, service.connect() as other:
        one.register_checkpoint(tmp_path / "one.safetensors")
        other.register_checkpoint(tmp_path / "other.safetensors")
        with one.acquire("w0"):
            thread = threading.Thread(target=lambda: other.acquire("w0").release())
            thread.start()
            wait_until(lambda: any(w.waits for w in report_of(service.socket).workers))
            time.sleep(0.05)
            holder, waiter = report_of(service.socket).workers
            assert (holder.leases, holder.waits, holder.waiting) == (1, 0, 0)
            assert (waiter.leases, waiter.waits) == (0, 1)
            assert 0.05 <= waiter.waiting < 30
            assert holder.longest_lease > waiter.waiting
        thread.join(30)
        waiter = report_of(service.socket).workers[1]
        assert (waiter.waits, waiter.granted, waiter.hits) == (0, 1, 0)


def test_who_asks_is_no_worker(
    service: ThreadService, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    checkpoint(tmp_path / "m.safetensors", groups=12)
    with service.connect() as store:
        store.register_checkpoint(tmp_path / "m.safetensors")
        (connection,) = service.server.connections.values()
        allowance = connection.allowance
        log.clear()
        for _ in range(20):
            assert len(report_of(service.socket).workers) == 1
        wait_until(lambda: len(service.server.connections) == 1)
        assert connection.allowance == allowance
    wait_until(lambda: not service.server.connections)
    (went,) = log.messages  # and not a word of twenty that asked
    assert "went" in went


def test_who_asks_does_not_put_off_that_a_hopeless_wait_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path / "one.safetensors", groups=1, nbytes=4 * MIB)
    shutil.copy(tmp_path / "one.safetensors", tmp_path / "other.safetensors")
    with (
        serving(tmp_path / "served", 4 * MIB + 65536) as service,
        service.connect() as one,
        service.connect() as other,
        asking(service.socket, 0.1),
    ):
        service.server.hopeless_seconds = 0.4
        one.register_checkpoint(tmp_path / "one.safetensors")
        other.register_checkpoint(tmp_path / "other.safetensors")
        with one.acquire("w0"), pytest.raises(TierStoreError, match="no worker has given anything"):
            other.acquire("w0", timeout=5)


@contextlib.contextmanager
def asking(path: str, seconds: float) -> Iterator[None]:
    """Somebody asks what the service does, again and again."""
    stop = threading.Event()

    def ask() -> None:
        while not stop.wait(seconds):
            report_of(path)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_who_says_nothing_is_logged_but_who_asks_is_not(
    service: ThreadService, log: pytest.LogCaptureFixture
) -> None:
    report_of(service.socket)
    with socket.socket(socket.AF_UNIX) as mute:
        mute.connect(service.socket)
    wait_until(lambda: bool(log.messages))
    assert len(log.messages) == 1


def test_anything_else_still_takes_a_hello(service: ThreadService) -> None:
    outgoing = Outgoing()
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(service.socket)
        raw.sendall(outgoing.encoded(messages.Status(1)))
        assert raw.recv(1 << 16)
        raw.sendall(outgoing.encoded(messages.Find(2, "weights/" + "0" * 32)))
        assert b"it begins with a Find" in raw.recv(1 << 16)
        assert raw.recv(1 << 16) == b""


def test_a_report_with_all_workers_fits_a_message() -> None:
    name = "\N{GRINNING FACE}" * 200
    row = messages.WorkerRow(2**22, name, 1e9, 2**17, 4096, 2**50, 4096, 1e9, 1e9, *[2**60] * 3)
    tiers = {"HOST": (2**50, 2**50), "DISK": (2**50, None)}
    paths = "/" + "x" * 4095
    report = messages.Report(0, 1, paths, paths, 1e9, tiers, 2**60, 2**60, 2**17, [row] * 512)
    assert len(Outgoing().encoded(report)) < messages.MAX_MESSAGE


def test_names_of_workers_are_cut(service: ThreadService) -> None:
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(service.socket)
        raw.sendall(Outgoing().encoded(messages.Hello(messages.VERSION, "x" * 4096)))
        wait_until(lambda: bool(report_of(service.socket).workers))
        assert report_of(service.socket).workers[0].name == "x" * 200


# Where nobody answers ----------------------------------------------------------------------------


@pytest.fixture
def listening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A socket called `s` in this directory, at which somebody else listens."""
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("s")
        made.listen()
        yield made


def test_nobody_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NoAnswerError, match="No such file"):
        report_of("s")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind("s")
    with pytest.raises(NoAnswerError, match="refused"):
        report_of("s")
    with pytest.raises(NoAnswerError, match="too long"):
        report_of("x" * 200)


def test_silence_ends_in_time(listening: socket.socket) -> None:
    with pytest.raises(NoAnswerError, match=r"nothing for 0\.05 s"):
        report_of("s", 0.05)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"", "closed the connection"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "would have"),
        (Outgoing().encoded(messages.Refused("it is full")), "refuses: it is full"),
        (Outgoing().encoded(messages.Pong()), "answers with a Pong"),
    ],
    ids=["nothing", "another protocol", "refusal", "another message"],
)
def test_another_answer_is_no_report(listening: socket.socket, answer: bytes, told: str) -> None:
    def reply() -> None:
        made, _ = listening.accept()
        with made:
            made.recv(1 << 16)
            made.sendall(answer)

    thread = threading.Thread(target=reply)
    thread.start()
    with pytest.raises(NoAnswerError, match=told):
        report_of("s", 5)
    thread.join()


def test_a_slow_trickle_ends_in_time(listening: socket.socket) -> None:
    stop = threading.Event()

    def reply() -> None:
        made, _ = listening.accept()
        with made:
            for byte in Outgoing().encoded(messages.Refused("x" * 100)):
                if stop.wait(0.02):
                    return
                made.sendall(bytes([byte]))

    thread = threading.Thread(target=reply)
    thread.start()
    with pytest.raises(NoAnswerError, match="said nothing"):
        report_of("s", 0.2)
    stop.set()
    thread.join()


# Metrics -----------------------------------------------------------------------------------------


def test_two_stores_of_one_process_are_one_worker_for_prometheus(
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
