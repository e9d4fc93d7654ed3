"""A service continues to work after hostile messages."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.lanes import by_lane
from tests.service.mangling import TENSOR, bodies_of, mangled, stream_of
from tests.service.raw import PAGE, RawWorker, pages, row_of
from tests.service.service_process import ServiceProcess, served_by_a_process
from tests.service.serving import ThreadService
from tests.service.test_serving import MIB, checkpoint
from tierstore.engine.in_place_groups import content_hash
from tierstore.service.shared_groups import MAX_UNUSED
from tierstore.wire import messages as m

DECOY = "/etc/hostname"
"""The claimed name of the file that is passed: no process opens it."""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * (64 * PAGE // 256))
    return path


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    return tmp_path / "notes"


@pytest.fixture
def service(tmp_path: Path, notes: Path) -> Iterator[ServiceProcess]:
    with served_by_a_process(tmp_path / "served", 4 * MIB + 65536, notes=notes) as running:
        yield running


def session(data: Path) -> list[m.Message]:
    """Return the messages of an honest session; the descriptor is sent with the first bytes."""
    content = bytes(range(48))
    named = content_hash(
        {"w": torch.frombuffer(bytearray(content), dtype=torch.float32).view(3, 4)}
    )
    key = f"weights/{named}"
    return [
        m.Hello(m.VERSION, "attacker"),
        m.Open([row_of(data, path=DECOY)]),
        m.Register(1, [pages(0, 2), pages(5, 3)]),
        m.Lease(2, 0),
        m.Lease(3, 1),
        m.Release(2),
        m.Lease(4, 0),
        m.Cancel(4),
        m.Find(5, key),
        m.Upload(6, key, [TENSOR], len(content)),
        m.Part(6, content),
        m.Ping(),
        m.Status(7),
        m.CloseFile(0),
        m.Forget(0),
    ]


def send(service: ServiceProcess, data: bytes, descriptor: int) -> bytes:
    """Send a stream to the service over a separate connection. Returns the reply."""
    said = b""
    with socket.socket(socket.AF_UNIX) as made:
        made.settimeout(20)
        made.connect(service.socket)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sent = socket.send_fds(made, [data], [descriptor]) if data else 0
            made.sendall(data[sent:])
            made.shutdown(socket.SHUT_WR)
            while got := made.recv(1 << 20):
                said += got
    return said


def attack(service: ServiceProcess, data: Path, chance: random.Random, times: int) -> int:
    """Send mutated sessions. Returns how many were served to their end."""
    bodies = bodies_of(session(data))
    served = 0
    with data.open("rb") as file:
        for _ in range(times):
            said = send(service, mangled(bodies, chance), file.fileno())
            served += b"Refused" not in said
    return served


def test_mutated_sessions_are_contained(
    service: ServiceProcess, notes: Path, data: Path, tmp_path: Path
):
    with data.open("rb") as file:  # an unchanged session is served to its end
        said = send(service, stream_of(bodies_of(session(data))), file.fileno())
    assert said.count(b"Leased") >= 2 and said.count(b"Done") == 2 and b"Report" in said
    assert b"Refused" not in said and b"Failed" not in said
    chance = random.Random(5)
    # The store's event record grows up to a limit.
    attack(service, data, chance, by_lane(100, 2000, 20_000))
    service.send_signal(signal.SIGUSR1)
    ThreadService.wait_until(lambda: notes.stat().st_size > 0)
    held = [name for name in service.descriptors() if name != str(data)]
    resident = service.resident_bytes()

    times = by_lane(600, 3000, 30_000)
    served = attack(service, data, chance, times)

    assert times * 0.05 < served < times * 0.7
    ThreadService.wait_until(lambda: not service.report().workers)
    ThreadService.wait_until(lambda: others(service, data) == held)
    assert service.descriptors().count(str(data)) <= MAX_UNUSED  # files of groups that are kept
    assert service.resident_bytes() - resident < 16 * MIB
    opened = notes.read_text().split("\n")
    assert any(name.startswith("/proc/self/fd/") for name in opened)  # the arena: the control
    allowed = (str(tmp_path / "served"), "/proc/self/fd/")
    # Files not yet linked are in the service's directory, by descriptor.
    assert not [n for n in opened if n.startswith("/") and not n.startswith(allowed)]
    assert well(service, tmp_path)
    done = service.end()
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


def others(service: ServiceProcess, data: Path) -> list[str]:
    return [name for name in service.descriptors() if name != str(data)]


def well(service: ServiceProcess, place: Path) -> bool:
    """Return whether an honest worker gets correct values."""
    tensors = checkpoint(place / "m.safetensors", groups=8)
    with service.connect() as store:
        store.register_checkpoint(place / "m.safetensors")
        return all(torch.equal(store.get(name), value) for name, value in tensors.items())


# Floods -------------------------------------------------------------------------------------------


def lease_and_release(honest: RawWorker, group: int) -> None:
    answer = honest.lease(group)
    assert isinstance(answer, m.Leased)
    honest.send(m.Release(answer.request))


def honest_worker(service: ServiceProcess, data: Path) -> tuple[RawWorker, int]:
    honest = RawWorker(service.socket, "honest")
    honest.open(data)
    (group,) = honest.register([pages(20, 2)])
    return honest, group


@pytest.mark.full("waits until the worker is disconnected")
def test_worker_that_never_reads_is_disconnected(service: ServiceProcess, data: Path):
    honest, group = honest_worker(service, data)
    with honest, RawWorker(service.socket, "deaf") as raw:
        raw.open(data)
        raw.register([pages(0)])
        pid = os.fork()
        if pid == 0:  # so that this process's time is unaffected
            with contextlib.suppress(OSError):
                while True:
                    raw.send(m.Status(1))
            os._exit(0)
        served = 0
        ends = time.monotonic() + 20
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            lease_and_release(honest, group)
            served += 1
            assert time.monotonic() < ends
        assert served > 20, "the service waited for the worker that never reads"
        assert {row.name for row in service.report().workers} == {"honest"}
    assert "it did not read" in service.end().stderr
