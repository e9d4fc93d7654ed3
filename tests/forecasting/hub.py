"""A local Hugging Face hub that serves and counts the requests of huggingface_hub.

It is a real server. The real client runs in separate processes, with HF_ENDPOINT.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flask import Flask, Response, jsonify, request, send_file
from werkzeug.serving import WSGIRequestHandler, make_server

REVISION = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """Models by id, as directories. `sent` counts the bytes sent of each file."""

    models: dict[str, Path] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    sent: Counter[str] = field(default_factory=Counter)
    requests: list[str] = field(default_factory=list)
    address: str = ""

    def files(self, name: str) -> list[Path]:
        """Return all files of a model."""
        return sorted(path for path in self.models[name].rglob("*") if path.is_file())

    def weights(self, name: str) -> int:
        """Return the bytes of its safetensors files."""
        return sum(p.stat().st_size for p in self.files(name) if p.suffix == ".safetensors")

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """Return the environment of a process that uses this hub, with its cache in `home`."""
        return {
            "HF_ENDPOINT": self.address,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            **more,
        }


class _Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        pass


def _refused(status: int, code: str) -> Response:
    answer = jsonify({"error": code})
    answer.status_code = status
    answer.headers["X-Error-Code"] = code
    answer.headers["X-Error-Message"] = code
    return answer


def application(hub: Hub) -> Flask:
    """Return the routes of the hub that the client requests."""
    app = Flask("hub")

    @app.before_request
    def refuse() -> Response | None:
        hub.requests.append(f"{request.method} {request.path}")
        parts = request.path.removeprefix("/api/models/").strip("/").split("/")
        name = "/".join(parts[:2])
        if name not in hub.models:
            return _refused(401, "RepoNotFound")
        is_file = not request.path.startswith("/api/")
        return _refused(403, "GatedRepo") if name in hub.gated and is_file else None

    @app.get("/api/models/<org>/<name>", defaults={"revision": "main"})
    @app.get("/api/models/<org>/<name>/revision/<revision>")
    def info(org: str, name: str, revision: str) -> Response:
        model = f"{org}/{name}"
        siblings = [
            {
                "rfilename": str(path.relative_to(hub.models[model])),
                "size": path.stat().st_size,
                "blobId": _etag(path),
            }
            for path in hub.files(model)
        ]
        told = {"id": model, "modelId": model, "sha": REVISION, "siblings": siblings}
        return jsonify({**told, "private": False, "gated": False, "tags": [], "downloads": 0})

    @app.get("/api/models/<org>/<name>/tree/<revision>")
    @app.get("/api/models/<org>/<name>/tree/<revision>/")
    def tree(org: str, name: str, revision: str) -> Response:
        model = f"{org}/{name}"
        rows = [
            {
                "type": "file",
                "path": str(path.relative_to(hub.models[model])),
                "size": path.stat().st_size,
                "oid": _etag(path),
            }
            for path in hub.files(model)
        ]
        return jsonify(rows)

    @app.get("/<org>/<name>/resolve/<revision>/<path:file>")
    def resolve(org: str, name: str, revision: str, file: str) -> Response:
        path = hub.models[f"{org}/{name}"] / file
        if not path.is_file():
            return _refused(404, "EntryNotFound")
        answer = send_file(path, conditional=True, etag=_etag(path))
        answer.headers["X-Repo-Commit"] = REVISION
        if request.method == "GET":
            hub.sent[file] += answer.content_length or 0
        return answer

    return app


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@contextmanager
def serving() -> Iterator[Hub]:
    """Serve a hub without models until the end of the block."""
    hub = Hub()
    server = make_server("127.0.0.1", 0, application(hub), threaded=True, request_handler=_Quiet)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
