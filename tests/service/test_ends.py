"""A service ends at once, cleanly, and its workers keep the bytes they view."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.service.proxy import Fault, Harm, Proxy
from tests.service.service_process import served_by_a_process
from tests.service.serving import ThreadService, serving
from tests.service.test_serving import MIB, checkpoint, same
from tierstore import TierStore
from tierstore.errors import ServiceLostError
from tierstore.service import sockets
from tierstore.tiers.service_link import ServiceLink
from tierstore.wire import messages
from tierstore.wire.framing import Outgoing

RAM = 4 * MIB + 65536
NOTHING = "weights/" + "0" * 32


@pytest.mark.full("a process for each signal", keep="values")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_a_service_with_leases_held(tmp_path: Path, number: int):
    tensors = checkpoint(tmp_path / "m.safetensors", groups=3)
    with (
        served_by_a_process(tmp_path / "served", RAM, "--deadline", "0.3") as service,
        service.connect() as store,
    ):
        store.register_checkpoint(tmp_path / "m.safetensors")
        with store.acquire("w0") as lease:
            service.send_signal(number)
            began = time.monotonic()
            done = service.wait(10)
            assert 0.2 < time.monotonic() - began < 5
            assert same(lease, tensors["w0"], "w0")
            assert done.returncode == 0, done.stderr
            assert not os.path.exists(service.socket)
            with TierStore(RAM, tmp_path / "served", device="cpu") as again:
                assert not again.keys()
        began = time.monotonic()
        with pytest.raises(ServiceLostError):
            store.acquire("w1")
        assert time.monotonic() - began < 1
    came, *others = [line for line in done.stderr.splitlines() if " worker " in line]
    assert re.search(r"INFO worker 2 \(.*, process \d+\) connected$", came)  # 1 sent a query
    assert "the service is stopping" in others[0]
    assert "WARNING" not in done.stderr.replace("WARNING dropped worker 2", "")


def test_worker_connect_and_disconnect_log_one_line_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, logger="tierstore.service")
    checkpoint(tmp_path / "m.safetensors", groups=3)
    with serving(tmp_path / "served", RAM) as service:
        with service.connect() as store:
            store.register_checkpoint(tmp_path / "m.safetensors")
            for name in ("w0", "w1", "w0"):
                with store.acquire(name):
                    pass
        service.wait_until(lambda: len(caplog.records) >= 2)  # its last action
        came, went = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(r"worker 1 \(.*, process \d+\) connected", came)
    assert re.fullmatch(
        r"worker 1 \(.*\) disconnected: it closed the connection; \d leases granted .*", went
    )


def test_worker_closing_during_a_send_is_disconnected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """A send fails before the service has read that the connection ended: no warning is logged."""
    caplog.set_level(logging.INFO, logger="tierstore.service")
    checkpoint(tmp_path / "m.safetensors", groups=3)
    closed = threading.Event()
    with serving(tmp_path / "served", RAM) as service:
        store = service.connect()
        store.register_checkpoint(tmp_path / "m.safetensors")
        with store.acquire("w0"):
            pass
        (connection,) = service.server.connections.values()

        def send_too_late() -> None:
            assert closed.wait(30)  # the service reads nothing meanwhile
            connection.send(messages.Pong())

        service.loop.call_soon_threadsafe(send_too_late)
        store.close()
        closed.set()
        service.wait_until(lambda: not service.server.connections)
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
    assert "it closed the connection" in caplog.records[-1].getMessage()


def test_worker_closing_without_reading_is_disconnected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """The system then resets the connection."""
    caplog.set_level(logging.INFO, logger="tierstore.service")
    with serving(tmp_path / "served", RAM) as service:
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(service.socket)
            raw.sendall(Outgoing().encode(messages.Hello(messages.VERSION, "deaf")))
            service.wait_until(lambda: len(caplog.records) == 1)  # it was welcomed
        service.wait_until(lambda: not service.server.connections)
    assert "deaf" in caplog.records[1].getMessage()
    assert "disconnected: it closed the connection" in caplog.records[1].getMessage()


def test_service_end_without_leases_is_immediate(tmp_path: Path):
    checkpoint(tmp_path / "m.safetensors", groups=3)
    with (
        served_by_a_process(tmp_path / "served", RAM, "--deadline", "30") as service,
        service.connect() as store,
    ):
        store.register_checkpoint(tmp_path / "m.safetensors")
        with store.acquire("w0"):
            pass  # and stays leased, as it may be used again
        began = time.monotonic()
        assert service.end().returncode == 0
        assert time.monotonic() - began < 5


def test_worker_waiting_for_space_ends_at_once(tmp_path: Path):
    for name in ("one", "other"):
        checkpoint(tmp_path / f"{name}.safetensors", groups=1, nbytes=4 * MIB)
    with serving(tmp_path / "served", RAM) as service, service.connect() as one:
        one.register_checkpoint(tmp_path / "one.safetensors")
        with one.acquire("w0"):
            other = service.connect()
            other.register_checkpoint(tmp_path / "other.safetensors")
            other.prefetch("w0")
            service.wait_until(lambda: any(c.waiting for c in service.server.connections.values()))
            began = time.monotonic()
            other.close()
            assert time.monotonic() - began < 5
            service.wait_until(lambda: len(service.server.connections) == 1)


def test_leases_stay_valid_after_the_service_ends(tmp_path: Path):
    tensors = checkpoint(tmp_path / "m.safetensors", groups=4)
    with serving(tmp_path / "served", RAM) as service:
        store = service.connect()
        store.register_checkpoint(tmp_path / "m.safetensors")
        lease = store.acquire("w0")
    assert same(lease, tensors["w0"], "w0")
    store.close()
    assert same(lease, tensors["w0"], "w0")
    lease.release()


def abandon_worker(service: ThreadService) -> None:
    """Make the service disconnect its only worker, which has done nothing wrong."""
    (connection,) = service.server.connections.values()
    service.loop.call_soon_threadsafe(connection.drop, "a test of it")
    service.wait_until(lambda: connection.abandoned)


def test_leases_stay_valid_after_a_disconnect(tmp_path: Path):
    tensors = checkpoint(tmp_path / "m.safetensors", groups=12)
    with serving(tmp_path / "served", RAM) as service, service.connect() as store:
        store.register_checkpoint(tmp_path / "m.safetensors")
        with store.acquire("w0") as lease:
            with store.acquire("w1"):
                pass  # leased and idle
            abandon_worker(service)
            with service.connect() as other:  # would take the space
                other.register_checkpoint(tmp_path / "m.safetensors")
                for i in range(1, 12):
                    with other.acquire(f"w{i}"):
                        pass
            assert same(lease, tensors["w0"], "w0")
            assert torch.equal(store.get("w1"), tensors["w1"])  # over a new connection
            assert same(lease, tensors["w0"], "w0")
            service.wait_until(lambda: len(service.server.connections) == 2)  # without `other`
        with service.connect() as other, service.connect() as third:  # need all of the space
            leases = []
            for each, names in ((other, ("w8", "w9")), (third, ("w10", "w11"))):
                each.register_checkpoint(tmp_path / "m.safetensors")
                leases += [each.acquire(name, timeout=5) for name in names]
            for taken in leases:
                taken.release()
        service.wait_until(lambda: len(service.server.connections) == 1)
        for name, tensor in tensors.items():
            assert torch.equal(store.get(name), tensor)
    assert service.leased() == 0


def test_ending_service_keeps_another_services_socket(tmp_path: Path):
    checkpoint(tmp_path / "m.safetensors", groups=1)
    with served_by_a_process(tmp_path / "served", RAM, "--deadline", "5") as service:
        with service.connect() as store:
            store.register_checkpoint(tmp_path / "m.safetensors")
            with store.acquire("w0"):
                service.send_signal()
                ThreadService.wait_until(lambda: not is_live(service.socket))
                following = sockets.listen(service.socket)  # the next service starts meanwhile
            assert service.wait(10).returncode == 0
        assert is_live(service.socket)
        following.close()


def is_live(path: str) -> bool:
    import socket

    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


def test_ended_connection_fails_one_call_at_most(tmp_path: Path):
    """This holds even if the reading thread notices late: here it is busy until the end."""
    busy, go_on = threading.Event(), threading.Event()

    def allowance(nbytes: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            busy.set()
            assert go_on.wait(30)

    with (
        serving(tmp_path / "served", RAM) as service,
        Proxy(service.socket, Fault(True, -1, Harm.NONE)) as proxy,
    ):
        link = ServiceLink(proxy.path, private=False)
        link.listen(allowance, lambda: None)
        try:
            assert not link.find(NOTHING)
            checkpoint(tmp_path / "m.safetensors", groups=12)
            with service.connect() as one, service.connect() as two:  # there is less for each
                for other in (one, two):
                    other.register_checkpoint(tmp_path / "m.safetensors")
                assert busy.wait(10)
                proxy.cut()
                with pytest.raises(ServiceLostError):
                    link.find(NOTHING)
                assert not link.find(NOTHING)
        finally:
            go_on.set()
            link.close()
