"""Indexes and answers of object stores that are built to be slow or large."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from safetensors.torch import save

from tierstore import TierStore, TransferError
from tierstore.engine.checkpoints import read_checkpoint
from tierstore.engine.mirrors import mirror
from tierstore.errors import InvalidHeaderError
from tierstore.model.weight_files import MAX_INDEX_BYTES
from tierstore.tiers import object_store
from tierstore.tiers.object_store import RemoteDirectory, RemoteObject, memory_store, retry_policy

pytest.importorskip("obstore")

INDEX = "model.safetensors.index.json"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests made: object names, and the bytes of each read."""
    found: list[str] = []
    find, read = RemoteDirectory.find, RemoteObject.read

    def finding(self: RemoteDirectory, name: str) -> RemoteObject | None:
        found.append(name)
        if len(found) > 50:
            raise AssertionError("it asks again and again")
        return find(self, name)

    def reading(self: RemoteObject, start: int, stop: int, *more: Any) -> memoryview:
        found.append(f"{stop - start} bytes")
        return read(self, start, stop, *more)

    monkeypatch.setattr(RemoteDirectory, "find", finding)
    monkeypatch.setattr(RemoteObject, "read", reading)
    return found


def put(names: dict[str, bytes]) -> str:
    """Create a directory with these objects; return its URL."""
    url = f"memory://{uuid4()}"
    for name, data in names.items():
        memory_store(url).put(f"p/{name}", data)
    return f"{url}/p"


def index(*files: str) -> bytes:
    return json.dumps({"weight_map": {f"w{i}": name for i, name in enumerate(files)}}).encode()


def test_index_of_files_is_read(asked: list[str]) -> None:
    files = {f"{i}.safetensors": save({f"w{i}": torch.ones(3)}) for i in range(2)}
    url = put({INDEX: index(*files), **files})
    assert [tensor.name for file in read_checkpoint(url) for tensor in file.tensors] == ["w0", "w1"]
    assert asked[0] == INDEX and len([a for a in asked if a in files]) == 2


@pytest.mark.parametrize(
    ("names", "requests"),
    [
        ({INDEX: index(INDEX)}, 1),
        ({INDEX: index("b.json"), "b.json": index(INDEX)}, 1),
        ({INDEX: index("0.json", "1.json"), **{f"{i}.json": index("0.json") for i in (0, 1)}}, 1),
        ({INDEX: index(*(f"{i}.bin" for i in range(40)))}, 1),
    ],
    ids=["itself", "a circle", "a tree", "no weights"],
)
def test_index_listing_foreign_files_raises_at_once(
    names: dict[str, bytes], requests: int, asked: list[str]
) -> None:
    with pytest.raises(InvalidHeaderError, match=r"which is not a \.safetensors file"):
        read_checkpoint(f"{put(names)}/{INDEX}")
    assert len([name for name in asked if not name.endswith("bytes")]) == requests


def test_index_too_large_raises_before_reading(asked: list[str]) -> None:
    url = put({INDEX: bytes(MAX_INDEX_BYTES + 1)})
    with pytest.raises(InvalidHeaderError, match="an index has"):
        read_checkpoint(url)
    assert asked == [INDEX]
    with pytest.raises(InvalidHeaderError, match="malformed"):
        read_checkpoint(put({INDEX: bytes(1000)}))
    assert asked[-1] == "1000 bytes", "a small one is read"


# Answers ------------------------------------------------------------------------------------------


class Endless(BaseHTTPRequestHandler):
    """A web server with endless responses, which stop after `most` bytes."""

    protocol_version = "HTTP/1.1"
    most = 256 << 20
    sent = 0

    def do_HEAD(self) -> None:
        self._begin(200, 1 << 20)

    def do_GET(self) -> None:
        self._begin(206, self.most)
        block = bytes(1 << 20)
        try:
            while type(self).sent < self.most:
                type(self).sent += self.wfile.write(block)
        except OSError:
            self.close_connection = True

    def _begin(self, status: int, length: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.send_header("ETag", '"x"')
        self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        if wanted := self.headers.get("Range"):
            self.send_header("Content-Range", f"{wanted.replace('=', ' ')}/{1 << 20}")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@contextmanager
def endless() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endless)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_endless_answer_is_not_kept() -> None:
    with (
        endless() as address,
        retry_policy(deadline=0.1, pauses=(1.0,)),
        pytest.raises(TransferError, match="more bytes arrived"),
    ):
        read_checkpoint(f"{address}/model.safetensors")
    assert 0 < Endless.sent < 64 << 20, f"{Endless.sent:,} bytes were read"


def test_endless_list_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = put({f"{i}.json": b"{}" for i in range(30)})
    with TierStore("1MB", tmp_path / "store", device="cpu"):
        assert mirror(url, str(tmp_path / "store"))
    monkeypatch.setattr(object_store, "MAX_OBJECTS", 20)
    with pytest.raises(TransferError, match="more than 20 objects"):
        mirror(url, str(tmp_path / "store"))
