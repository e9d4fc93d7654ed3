"""The workers, files and messages that a service accepts, and those it refuses."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from tests.service.raw import PAGE, RawWorker, pages, row_of
from tests.service.serving import ThreadService, serving
from tests.service.test_serving import MIB, checkpoint
from tierstore import TierStoreError
from tierstore.engine.in_place_groups import content_hash
from tierstore.errors import StoreLockedError
from tierstore.service import sockets
from tierstore.wire import messages as m

KEY = "weights/" + "0" * 32


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ThreadService]:
    with serving(tmp_path / "served", 4 * MIB + 65536) as running:
        yield running


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A file of 16 pages."""
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * (16 * PAGE // 256))
    return path


def well(service: ThreadService, data: Path) -> bool:
    """Return whether the service serves an honest worker, and has released all others."""
    with RawWorker(service.socket) as raw:
        raw.open(data)
        (number,) = raw.register([pages(1, 2)])
        answer = raw.lease(number)
        assert isinstance(answer, m.Leased)
        right = raw.arena(answer) == data.read_bytes()[PAGE : 3 * PAGE]
    service.wait_until(lambda: not service.server.connections)
    return right and service.leased() == 0


# Connecting ---------------------------------------------------------------------------------------


def test_socket_is_reachable_by_its_user_only(service: ThreadService):
    assert stat.S_IMODE(os.stat(service.socket).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(os.path.dirname(service.socket)).st_mode) == 0o700


def test_socket_directory_is_created_private(tmp_path: Path):
    with tempfile.TemporaryDirectory(prefix="ts-") as place:
        path = os.path.join(place, "new", "s")
        sockets.listen(path).close()
        assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700
        for mode in (0o750, 0o701, 0o777):
            os.chmod(os.path.dirname(path), mode)
            with pytest.raises(TierStoreError, match="chmod 700"):
                sockets.listen(path)
            assert os.path.exists(path)


CONNECT = """
import os, socket, sys
os.setgid(65534)
os.setuid(65534)
made = socket.socket(socket.AF_UNIX)
made.connect(sys.argv[1])
made.settimeout(5)
try:
    print(made.recv(100))
except ConnectionResetError:
    print(b"")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_other_user_is_refused_on_an_open_socket(
    service: ThreadService, log: pytest.LogCaptureFixture
):
    os.chmod(os.path.dirname(service.socket), 0o755)
    os.chmod(service.socket, 0o666)
    command = [sys.executable, "-S", "-c", CONNECT, service.socket]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout.strip() == "b''", done.stderr
    assert "of another user (65534)" in log.text
    assert not service.server.connections


def test_foreign_file_at_the_socket_path_raises(service: ThreadService):
    with pytest.raises(StoreLockedError, match="already listens"):
        sockets.listen(service.socket)
    place = os.path.dirname(service.socket)
    left = os.path.join(place, "left")
    for _ in range(2):  # the second one finds the remains of the first
        made = sockets.listen(left)
        made.close()
    os.unlink(left)
    Path(left).write_text("mine")
    with pytest.raises(TierStoreError, match="not a socket"):
        sockets.listen(left)
    assert Path(left).read_text() == "mine"
    os.unlink(left)
    os.symlink(service.socket, left)
    with pytest.raises(TierStoreError, match="not a socket"):
        sockets.listen(left)
    with pytest.raises(TierStoreError, match="too long"):
        sockets.listen("/tmp/" + "x" * 200)
    os.unlink(left)


def test_service_with_a_full_queue_counts_as_alive():
    with tempfile.TemporaryDirectory(prefix="ts-") as place:
        path = os.path.join(place, "s")
        made = sockets.listen(path)
        made.listen(0)
        waiting = socket.socket(socket.AF_UNIX)
        waiting.connect(path)
        with pytest.raises(StoreLockedError):
            sockets.listen(path)
        waiting.close()
        made.close()


# Leases -------------------------------------------------------------------------------------------


def test_arena_is_read_only_for_workers(service: ThreadService, data: Path):
    with RawWorker(service.socket) as raw:
        (descriptor,) = raw.descriptors
        size = os.fstat(descriptor).st_size
        assert size == raw.welcome.arena
        with pytest.raises(OSError):
            os.pwrite(descriptor, b"x", 0)
        for change in (0, size // 2, size * 2):
            with pytest.raises(OSError):
                os.ftruncate(descriptor, change)
        with pytest.raises(OSError):
            mmap.mmap(descriptor, PAGE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(OSError):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        with mmap.mmap(descriptor, PAGE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as own:
            own[:4] = b"mine"
            assert os.pread(descriptor, 4, 0) != b"mine"
    assert well(service, data)


# Registering files --------------------------------------------------------------------------------


def pass_descriptor(service: ThreadService, row: m.File, descriptors: list[int]) -> str:
    """Return the service's reason for refusing this."""
    with RawWorker(service.socket) as raw:
        raw.send(m.Open([row]), descriptors)
        return raw.why_refused()


def test_only_readable_regular_files_are_accepted(
    service: ThreadService, data: Path, tmp_path: Path
):
    reader, writer = os.pipe()
    os.mkfifo(tmp_path / "fifo")
    listening = socket.socket(socket.AF_UNIX)
    opened = [
        (tmp_path, os.open(tmp_path, os.O_RDONLY)),
        (Path("/dev/zero"), os.open("/dev/zero", os.O_RDONLY)),
        (tmp_path / "fifo", os.open(tmp_path / "fifo", os.O_RDWR)),
        (Path(f"/proc/self/fd/{reader}"), reader),
        (Path(f"/proc/self/fd/{listening.fileno()}"), listening.fileno()),
        (data, os.open(data, os.O_WRONLY)),
        (data, os.open(data, os.O_PATH)),
    ]
    for path, descriptor in opened:
        assert "not of the regular file" in pass_descriptor(service, row_of(path), [descriptor])
        if descriptor not in (reader, listening.fileno()):
            os.close(descriptor)
    for descriptor in (reader, writer):
        os.close(descriptor)
    listening.close()
    assert well(service, data)


def test_descriptor_of_another_file_is_refused(service: ThreadService, data: Path, tmp_path: Path):
    other = tmp_path / "other"
    other.write_bytes(data.read_bytes())
    with other.open("rb") as file, data.open("rb") as right:
        assert "regular file" in pass_descriptor(service, row_of(data), [file.fileno()])
        row = row_of(data, direct=True)
        both = [right.fileno(), file.fileno()]
        assert "regular file" in pass_descriptor(service, row, both)
        assert "missing" in pass_descriptor(service, row, both[:1])
        assert "missing" in pass_descriptor(service, row_of(data), [])
    assert well(service, data)


def test_descriptors_without_a_message_are_closed(service: ThreadService, data: Path):
    before = len(os.listdir("/proc/self/fd"))
    with data.open("rb") as file, RawWorker(service.socket) as raw:
        with pytest.raises((ConnectionError, AssertionError)):
            for _ in range(40):
                raw.send(m.Ping(), [file.fileno()] * 50)
                raw.take(m.Pong)
            raise AssertionError
        service.wait_until(lambda: not service.server.connections)
    assert well(service, data)
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # the file of the honest worker's group


def test_file_unlike_its_description_is_not_served(service: ThreadService, data: Path):
    size = data.stat().st_size
    with RawWorker(service.socket) as raw:
        device, inode, nbytes, modified, changed = row_of(data).stamp
        times = (modified[0] + 16, modified[1]), (changed[0] + 16, changed[1])
        raw.open(data, stamp=(device, inode, nbytes + 16 * PAGE, *times))
        (number,) = raw.register([pages(size // PAGE, 4)])  # the group would lie there
        answer = raw.lease(number)
        assert isinstance(answer, m.Failed) and answer.error == "StaleCheckpointError"
        raw.ping()
    assert well(service, data)


def test_file_that_shrinks_raises(service: ThreadService, data: Path):
    with RawWorker(service.socket) as raw:
        raw.open(data)
        first, second = raw.register([pages(0, 2), pages(14, 2)])
        assert isinstance(raw.lease(first), m.Leased)
        os.truncate(data, PAGE)
        answer = raw.lease(second)
        assert isinstance(answer, m.Failed) and answer.error == "StaleCheckpointError"
        raw.ping()
        data.write_bytes(bytes(16 * PAGE))
    assert well(service, data)


BEYOND = {
    "the file": pages(15, 2),
    "the group": m.Group(PAGE, [m.Piece(0, 0, 2 * PAGE, 0)], [], []),
    "its pages": m.Group(PAGE, [m.Piece(0, 1, 10, 0)], [], []),
    "whole pages": m.Group(PAGE + 1, [m.Piece(0, 0, 10, 0)], [], []),
    "its end": m.Group(PAGE, [m.Piece(0, 0, PAGE, 0)], [m.Shift(0, 1, PAGE)], []),
    "its start": m.Group(PAGE, [m.Piece(0, 0, PAGE, 0)], [m.Shift(1 << 61, 0, 1)], []),
    "its bytes": m.Group(PAGE, [m.Piece(0, 0, PAGE, 0)], [], [m.Checksum("w", PAGE, 1, "0")]),
    "the files": pages(0, 1, file=1),
    "addresses": m.Group(1 << 61, [m.Piece(0, 0, 1 << 61, 0)], [], []),
}


@pytest.mark.parametrize("what", BEYOND)
def test_group_beyond_its_file_raises(service: ThreadService, data: Path, what: str):
    with RawWorker(service.socket) as raw:
        raw.open(data)
        raw.send(m.Register(1, [pages(0), BEYOND[what]]))
        why = raw.why_refused()
        assert "exceeds" in why or "not sent" in why
    assert well(service, data)


def test_group_larger_than_every_budget_raises(service: ThreadService, data: Path):
    with RawWorker(service.socket) as raw:
        raw.open(data)
        (number,) = raw.register([m.Group(1 << 40, [m.Piece(0, 0, PAGE, 0)], [], [])])
        answer = raw.lease(number)
        assert isinstance(answer, m.Failed) and answer.error == "BudgetError"
    assert well(service, data)


def test_wrong_checksums_raise_for_their_worker_only(service: ThreadService, data: Path):
    piece = m.Piece(0, PAGE, 2 * PAGE, 0)
    with RawWorker(service.socket) as raw:
        raw.open(data)
        check = m.Checksum("w", 0, PAGE, "f" * 16)
        (number,) = raw.register([m.Group(2 * PAGE, [piece], [], [check])])
        answer = raw.lease(number)
        assert isinstance(answer, m.Failed) and answer.error == "CorruptDataError"
        assert well_beside(service, data)
    assert well(service, data)


def well_beside(service: ThreadService, data: Path) -> bool:
    with RawWorker(service.socket) as raw:
        raw.open(data)
        (number,) = raw.register([pages(1, 2)])
        return isinstance(raw.lease(number), m.Leased)


NONSENSE = {
    "two hellos": ([m.Hello(m.VERSION, "a")], "second hello"),
    "no such group": ([m.Lease(1, 7)], "not registered group 7"),
    "a request twice": ([m.Lease(9, 0), m.Lease(9, 0)], "already in use"),
    "another object": ([m.Find(1, "../../etc/passwd")], "requests object"),
    "a group's object": ([m.Find(1, "blocks.0")], "requests object"),
    "no hash": ([m.Find(1, "weights/../" + "0" * 29)], "requests object"),
    "an upload to a key": ([m.Upload(1, "x", [], 1)], "Expected"),
    "an upload elsewhere": (
        [m.Upload(1, "casts/../../x", [m.TensorRow("w", "U8", [1], [1], 0)], 1)],
        "requests object",
    ),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_protocol_error_disconnects(
    service: ThreadService, data: Path, what: str, log: pytest.LogCaptureFixture
):
    sent, why = NONSENSE[what]
    with RawWorker(service.socket) as raw:
        raw.open(data)
        assert raw.register([pages(0)]) == [0]
        for message in sent:
            raw.send(message)
        assert why in raw.why_refused()
    assert well(service, data)
    assert why in log.text


def test_other_protocol_version_must_upgrade(service: ThreadService, data: Path):
    with RawWorker(service.socket, name=None) as raw:
        raw.send(m.Hello(m.VERSION + 1, "new"))
        assert "upgrade" in raw.why_refused()
    with RawWorker(service.socket, name=None) as raw:
        raw.send(m.Ping())
        assert "first message is a Ping" in raw.why_refused()
    assert well(service, data)


def test_names_stay_on_one_line_of_the_log(
    service: ThreadService, data: Path, log: pytest.LogCaptureFixture
):
    with RawWorker(service.socket, name="a\nworker 7 came\x1b[2J") as raw:
        tag = b"Nothing\nworker 8 came"
        body = msgspec.msgpack.encode([tag.decode(), 1])
        raw.send_bytes(numbered(body, 1))
        raw.why_refused()
    assert well(service, data)
    lines = [record.getMessage() for record in log.records]
    assert any("worker 8" in line for line in lines) and any("worker 7" in line for line in lines)
    assert all(line.isprintable() for line in lines)


def numbered(body: bytes, number: int) -> bytes:
    import zlib

    from tierstore.wire.framing import HEAD

    return HEAD.pack(len(body), number, zlib.crc32(body)) + body


# Uploads ------------------------------------------------------------------------------------------


def upload(raw: RawWorker, key: str, row: m.TensorRow, data: bytes, nbytes: int) -> m.Message:
    """Return the service's answer to an upload of this tensor."""
    request = raw.request()
    raw.send(m.Upload(request, key, [row], nbytes))
    answer = raw.take(m.Message)
    if isinstance(answer, m.Done):
        raw.send(m.Part(request, data))
        answer = raw.take(m.Message)
    return answer


def test_uploaded_group_is_named_by_its_content(service: ThreadService, data: Path):
    tensor = torch.arange(100, dtype=torch.float32)
    content = tensor.numpy().tobytes()
    row = m.TensorRow("w", "F32", [100], [1], 0)
    key = "weights/" + content_hash({"w": tensor})
    with RawWorker(service.socket) as raw:
        wrong = upload(raw, KEY, row, content, len(content))
        assert isinstance(wrong, m.Failed) and wrong.error == "CorruptDataError"
        changed = upload(raw, key, row, b"\1" + content[1:], len(content))
        assert isinstance(changed, m.Failed) and changed.error == "CorruptDataError"
        for name, there in ((KEY, False), (key, False)):
            raw.send(m.Find(raw.request(), name))
            assert raw.take(m.Found).there is there
        assert isinstance(upload(raw, key, row, content, len(content)), m.Done)
        raw.send(m.Find(raw.request(), key))
        assert raw.take(m.Found).there
        raw.ping()
    assert well(service, data)


NO_TENSORS = {
    "beyond": m.TensorRow("w", "F32", [101], [1], 0),
    "far beyond": m.TensorRow("w", "F32", [2, 2], [1 << 47, 1], 0),
    "behind": m.TensorRow("w", "F32", [1], [1], 400),
    "between": m.TensorRow("w", "F32", [1], [1], 2),
    "strides": m.TensorRow("w", "F32", [1], [], 0),
    "unknown": m.TensorRow("w", "F33", [1], [1], 0),
    "nothing, of a size": m.TensorRow("w", "F32", [0, 1 << 47, 1 << 47], [1, 1, 1], 0),
}


@pytest.mark.parametrize("what", NO_TENSORS)
def test_impossible_tensor_raises(service: ThreadService, data: Path, what: str):
    with RawWorker(service.socket) as raw:
        answer = upload(raw, "casts/" + "0" * 32, NO_TENSORS[what], bytes(400), 400)
        assert isinstance(answer, m.Failed)
        assert "text" in answer.parts
        raw.ping()
        row = m.TensorRow("w", "F32", [100], [1], 0)
        answer = upload(raw, "casts/" + "1" * 32, row, bytes(401), 400)
        assert isinstance(answer, m.Failed)  # more bytes than announced
        raw.ping()
    assert well(service, data)


def test_upload_above_the_disk_budget_is_refused(tmp_path: Path, data: Path):
    row = m.TensorRow("w", "U8", [1 << 40], [1], 0)
    with serving(tmp_path / "served", 4 * MIB, disk=MIB) as service:
        with RawWorker(service.socket) as raw:
            answer = upload(raw, "casts/" + "0" * 32, row, b"1", 1 << 40)
            assert isinstance(answer, m.Failed) and answer.error == "BudgetError"
        assert well(service, data)


def test_directory_name_of_any_bytes_is_shown(service: ThreadService, tmp_path: Path):
    place = os.path.join(os.fsencode(tmp_path), b"caf\xe9")
    os.mkdir(place)
    path = Path(os.fsdecode(place)) / "m.safetensors"
    tensors = checkpoint(tmp_path / "m.safetensors", groups=1)
    os.rename(tmp_path / "m.safetensors", path)
    with service.connect() as store:
        store.register_checkpoint(path)
        assert torch.equal(store.get("w0"), tensors["w0"])
