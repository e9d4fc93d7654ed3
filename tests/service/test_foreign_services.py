"""A worker talks only to services of its user: others get no byte and no descriptor."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.service.serving import serving
from tierstore import TierStore, TierStoreError
from tierstore.errors import ServiceLostError
from tierstore.service import sockets
from tierstore.wire import peers
from tierstore.wire.framing import Outgoing
from tierstore.wire.messages import Welcome
from tierstore.wire.status import NoAnswerError, query_status

NOBODY = 65534
LISTEN = r"""
import contextlib, os, socket, sys
if int(sys.argv[2]):
    os.setgid(int(sys.argv[2]))
    os.setuid(int(sys.argv[2]))
listening = socket.socket(socket.AF_UNIX)
listening.bind(sys.argv[1])
listening.listen(4)
print("ready", flush=True)
connected, _ = listening.accept()
connected.settimeout(10)
with open("/dev/null", "rb") as arena, contextlib.suppress(OSError):
    socket.send_fds(connected, [bytes.fromhex(sys.argv[3])], [arena.fileno()])
data, descriptors = b"", []
with contextlib.suppress(ConnectionResetError):
    data, descriptors, _, _ = socket.recv_fds(connected, 1 << 16, 16)
print(len(data), len(descriptors), flush=True)
"""


@contextmanager
def impostor(user: int) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A false service that accepts every worker, and records its messages."""
    with tempfile.TemporaryDirectory(prefix="ts-") as place:
        os.chmod(place, 0o777)
        path = os.path.join(place, "s")
        welcome = Outgoing().encode(Welcome(2, "/tmp", 4096, 4096, 4096)).hex()
        command = [sys.executable, "-S", "-c", LISTEN, path, str(user), welcome]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
            assert running.stdout is not None and running.stdout.readline() == "ready\n"
            os.chmod(path, 0o666)
            try:
                yield path, running
            finally:
                running.kill()


def received(running: subprocess.Popen[str]) -> list[int]:
    """Return how many bytes and descriptors the impostor got."""
    assert running.stdout is not None
    return [int(word) for word in running.stdout.readline().split()]


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@as_root
def test_foreign_users_service_gets_nothing_of_a_worker() -> None:
    with impostor(NOBODY) as (path, running):
        with pytest.raises(TierStoreError, match=f"of user {NOBODY} listens") as error:
            TierStore.connect(path, device="cpu")
        assert path in str(error.value)
        assert received(running) == [0, 0]


def test_impostor_of_the_same_user_is_greeted() -> None:
    with impostor(0) as (path, running):
        with pytest.raises(ServiceLostError):  # no service, as it turns out
            TierStore.connect(path, device="cpu")
        nbytes, _ = received(running)
        assert nbytes > 10, "the control: the listener gets the worker's messages"


@as_root
def test_foreign_users_service_is_not_asked_for_a_report() -> None:
    with impostor(NOBODY) as (path, running):
        with pytest.raises(NoAnswerError, match=f"of user {NOBODY}"):
            query_status(path, 5.0)
        assert received(running) == [0, 0]


def test_user_with_another_kernel_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path / "served", 1 << 20) as service:
        service.connect().close()
        ours = peers.peer_of
        monkeypatch.setattr(peers, "peer_of", lambda made: (ours(made)[0], NOBODY))
        with pytest.raises(TierStoreError, match="shared with no other user"):
            service.connect()
        service.wait_until(lambda: not service.server.connections)


@as_root
@pytest.mark.parametrize("kind", ["directory", "link"])
def test_default_directory_of_another_user_is_not_used(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="ts-") as place:
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        monkeypatch.setattr(tempfile, "tempdir", place)
        default = sockets.runtime_directory()
        sockets.listen(os.path.join(default, "mine.sock")).close()
        assert sockets.running() == [os.path.join(default, "mine.sock")]
        if kind == "link":  # to our directory, which another user then replaces
            os.rename(default, os.path.join(place, "ours"))
            os.symlink(os.path.join(place, "ours"), default)
        os.chown(default, NOBODY, NOBODY, follow_symlinks=False)
        assert sockets.running() == []
        with pytest.raises(TierStoreError, match=f"belongs to user {NOBODY}"):
            sockets.listen(os.path.join(default, "other.sock"))
        os.chown(default, 0, 0, follow_symlinks=False)
        assert sockets.running() == [os.path.join(default, "mine.sock")]


def test_socket_directories_are_private_under_any_umask() -> None:
    for mask in (0o000, 0o002, 0o077):
        with tempfile.TemporaryDirectory(prefix="ts-") as place:
            before = os.umask(mask)
            try:
                sockets.listen(os.path.join(place, "a", "b", "s")).close()
            finally:
                os.umask(before)
            modes = [
                stat.S_IMODE(os.lstat(os.path.join(place, name)).st_mode)
                for name in ("a", "a/b", "a/b/s")
            ]
            assert modes == [0o700, 0o700, 0o600], f"umask {mask:03o}: {modes}"
