"""A service serves other workers while one worker's file system hangs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.faults.failing_fs import FailingFileSystem, failing_file_system
from tests.service.raw import PAGE, RawWorker, pages, row_of
from tests.service.serving import ThreadService, serving, wait_until
from tests.service.test_serving import MIB, checkpoint
from tierstore.wire import messages as m

pytestmark = pytest.mark.needs("root", "fuse")

CONTENT = bytes(range(256)) * (PAGE // 256)


@pytest.fixture
def file_system(tmp_path: Path) -> Iterator[FailingFileSystem]:
    with failing_file_system(tmp_path) as file_system:
        yield file_system
        file_system.go_on()


@pytest.fixture
def service(tmp_path: Path, file_system: FailingFileSystem) -> Iterator[ThreadService]:
    with serving(tmp_path / "served", 4 * MIB + 65536) as running:
        yield running


class HungFile:
    """A file that answers until it `hangs`, and its descriptor, which must not be closed then."""

    def __init__(self, file_system: FailingFileSystem) -> None:
        self.path = file_system.at / "data"
        self.path.write_bytes(CONTENT)
        self.hangs, self.goes_on = file_system.hang, file_system.go_on
        self._row = row_of(self.path)
        self._descriptor = os.open(self.path, os.O_RDONLY)

    def send(self, raw: RawWorker) -> None:
        raw.send(m.Open([self._row]), [self._descriptor])

    def close(self) -> None:
        self.goes_on()
        os.close(self._descriptor)


@pytest.fixture
def file(file_system: FailingFileSystem) -> Iterator[HungFile]:
    opened = HungFile(file_system)
    yield opened
    opened.close()


def check_served(service: ThreadService, tmp_path: Path) -> None:
    """Another worker connects, registers and reads."""
    tensors = checkpoint(tmp_path / "m.safetensors", groups=2)
    with service.connect() as store:
        store.register_checkpoint(tmp_path / "m.safetensors")
        for name, tensor in tensors.items():
            assert torch.equal(store.get(name, timeout=5), tensor)


def test_open_of_a_hung_file_stops_its_worker_alone(
    service: ThreadService, file: HungFile, tmp_path: Path
):
    with RawWorker(service.socket) as raw:
        file.hangs()
        file.send(raw)
        raw.send(m.Ping())
        check_served(service, tmp_path)
        raw.socket.settimeout(0.2)
        with pytest.raises(TimeoutError):  # it really hangs
            raw.take(m.Pong)
        file.goes_on()
        raw.socket.settimeout(10)
        raw.take(m.Pong)
        (group,) = raw.register([pages(0)])
        answer = raw.lease(group)
        assert isinstance(answer, m.Leased)
        assert raw.arena(answer) == CONTENT


def test_worker_of_a_hung_file_can_disconnect(
    service: ThreadService, file: HungFile, tmp_path: Path
):
    (tmp_path / "good").write_bytes(CONTENT)
    with RawWorker(service.socket) as raw:
        raw.open(tmp_path / "good")
        (group,) = raw.register([pages(0)])
        assert isinstance(raw.lease(group), m.Leased)
        file.hangs()
        file.send(raw)
    wait_until(lambda: not service.server.connections)
    assert service.leased() == 0
    assert service.server.groups.bytes_registered == 0
    check_served(service, tmp_path)


def test_close_of_a_hung_file_blocks_no_other_worker(
    service: ThreadService, file: HungFile, tmp_path: Path
):
    with RawWorker(service.socket) as raw:
        file.send(raw)
        raw.ping()
        file.hangs()
    wait_until(lambda: not service.server.connections)
    check_served(service, tmp_path)


def test_service_ends_while_a_file_hangs(tmp_path: Path, file: HungFile):
    with serving(tmp_path / "served", MIB) as service, RawWorker(service.socket) as raw:
        file.hangs()
        file.send(raw)
        raw.send(m.Ping())
        wait_until(lambda: any(c.busy for c in service.server.connections.values()))
