"""A connection belongs to the process that made it, even if others inherit its socket."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.processes import ROOT
from tests.service.raw import PAGE, RawWorker, pages
from tests.service.serving import ThreadService, serving
from tests.service.test_serving import MIB, checkpoint, same
from tierstore import TierStore
from tierstore.errors import ClosedError
from tierstore.wire import messages as m


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ThreadService]:
    with serving(tmp_path / "served", 4 * MIB + 65536) as running:
        yield running


def ends_well(pid: int, seconds: float = 10.0) -> bool:
    """Return whether a child ends in time, with status 0."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def forked(action: Callable[[], None]) -> int:
    """Fork a child that runs an action, and ends with status 0 if it succeeded."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    with contextlib.suppress(BaseException):
        action()
        status = 0
    os._exit(status)


def use_in_child(store: TierStore) -> None:
    """Use the parent's store in a child: every call raises, without effect."""
    for use in (lambda: store.acquire("w1"), lambda: store.discard("w1"), store.close):
        try:
            use()
        except ClosedError:
            continue
        raise AssertionError("it can be used")


def test_childs_end_leaves_the_parent_connected(service: ThreadService, tmp_path: Path):
    tensors = checkpoint(tmp_path / "m.safetensors", groups=3)
    with service.connect() as store:
        store.register_checkpoint(tmp_path / "m.safetensors")
        with store.acquire("w0") as lease:
            (connection,) = service.server.connections.values()
            assert ends_well(forked(lambda: None))
            assert ends_well(forked(lambda: lease.release()))
            inheriting = [sys.executable, "-S", "-c", "pass"]
            subprocess.run(inheriting, close_fds=False, check=True)
            assert same(lease, tensors["w0"], "w0")
            with store.acquire("w1") as other:
                assert same(other, tensors["w1"], "w1")
            assert list(service.server.connections.values()) == [connection]
            assert connection.leases


def test_child_cannot_use_the_parents_store(service: ThreadService, tmp_path: Path):
    tensors = checkpoint(tmp_path / "m.safetensors", groups=3)
    with service.connect() as store:
        store.register_checkpoint(tmp_path / "m.safetensors")
        with store.acquire("w0"):
            (connection,) = service.server.connections.values()
            assert ends_well(forked(lambda: use_in_child(store)))
            with store.acquire("w1") as other:
                assert same(other, tensors["w1"], "w1")
            assert list(service.server.connections.values()) == [connection]


PARENT = """
import os, sys, time
from pathlib import Path
from tests.service.raw import RawWorker, pages
raw = RawWorker(sys.argv[1], "parent")
raw.open(Path(sys.argv[2]))
for group in raw.register([pages(0), pages(1)]):
    raw.lease(group)
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(60)
"""


def test_killed_worker_with_a_live_child_returns_everything(service: ThreadService, tmp_path: Path):
    data = tmp_path / "data"
    data.write_bytes(bytes(4 * PAGE))
    with RawWorker(service.socket) as other:
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, service.socket, str(data)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            assert service.leased() == 2
            parent.kill()
            parent.wait(10)
            began = time.monotonic()
            service.wait_until(lambda: service.leased() == 0, seconds=2)
            assert time.monotonic() - began < 0.5
            assert Path(f"/proc/{child}").exists()
            assert len(service.server.connections) == 1
            other.ping()
        finally:
            os.kill(child, signal.SIGKILL)
            parent.stdout.close()


def test_worker_hanging_up_with_a_live_child_is_gone(service: ThreadService, tmp_path: Path):
    data = tmp_path / "data"
    data.write_bytes(bytes(4 * PAGE))
    checkpoint(tmp_path / "m.safetensors", groups=1)
    store = service.connect()
    store.register_checkpoint(tmp_path / "m.safetensors")
    with store.acquire("w0"):
        pass
    child = forked(lambda: time.sleep(60))
    try:
        store.close()
        service.wait_until(lambda: not service.server.connections)
        with RawWorker(service.socket) as raw:
            raw.open(data)
            assert isinstance(raw.lease(*raw.register([pages(0)])), m.Leased)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
