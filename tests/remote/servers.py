"""An S3 server in a separate process, and a proxy before it that injects faults into answers.

The proxy counts requests, so that a fault can be made at each of them in turn.
"""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BUCKET = "models"
STARTING_SECONDS = 60.0
SIGNED = {
    "Authorization": "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request, "
    "SignedHeaders=host, Signature=0"
}
"""Credentials that moto accepts for full access. It checks no signature."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def s3_server() -> Iterator[str]:
    """Start moto's S3 server with an empty bucket; yield its address."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **quiet) as server:
        try:
            address = f"http://127.0.0.1:{port}"
            wait_for(port, server)
            request = urllib.request.Request(f"{address}/{BUCKET}", data=b"", method="PUT")
            urllib.request.urlopen(request, timeout=STARTING_SECONDS).close()
            yield address
        finally:
            server.kill()


def wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    """Wait until a server of this machine listens."""
    ends = time.monotonic() + STARTING_SECONDS
    while time.monotonic() < ends and server.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise AssertionError("a server did not start: see what it needs in the extra test")


def environment(address: str) -> dict[str, str]:
    """Return the environment variables by which obstore finds the server."""
    return {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": address,
        "AWS_ALLOW_HTTP": "true",
    }


def upload(address: str, name: str, data: bytes) -> None:
    """Put an object into the bucket, or another one in its place."""
    _change(address, name, "PUT", data)


def remove(address: str, name: str) -> None:
    """Remove an object."""
    _change(address, name, "DELETE", None)


def _change(address: str, name: str, method: str, data: bytes | None) -> None:
    headers = {"Content-Type": "application/octet-stream", **SIGNED}
    url = f"{address}/{BUCKET}/{name}"
    request = urllib.request.Request(url, data=data, headers=headers, method=method)
    urllib.request.urlopen(request, timeout=STARTING_SECONDS).close()


@dataclass(frozen=True)
class Answer:
    """The server's answer to one request."""

    status: int
    headers: dict[str, str]
    body: bytes


Fault = Callable[["Handler", Answer], Answer | None]
"""Changes a response, or returns None if it has answered itself or sent nothing."""


@dataclass
class Proxy:
    """Passes requests on to `upstream`, and injects `faults` at requests of these numbers (from 1).

    `requests` lists the method, path and range of each; `etags` those that were sent. Headers in
    `drop_headers`, in lower case, are not passed on.
    """

    upstream: str
    faults: dict[int, Fault] = field(default_factory=dict)
    every: Fault | None = None
    before: Callable[[int], None] = lambda number: None
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    etags: set[str] = field(default_factory=set)
    drop_headers: set[str] = field(default_factory=set)
    sent: int = 0
    address: str = ""
    lock: Any = field(default_factory=threading.Lock)

    def begin(self, method: str, path: str, wanted: str) -> int:
        with self.lock:
            self.requests.append((method, path, wanted))
            return len(self.requests)


class Handler(BaseHTTPRequestHandler):
    """One connection to the proxy."""

    protocol_version = "HTTP/1.1"
    proxy: Proxy

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        self._pass_on()

    def do_HEAD(self) -> None:
        self._pass_on()

    def _pass_on(self) -> None:
        number = self.proxy.begin(self.command, self.path, self.headers.get("Range", ""))
        self.proxy.before(number)
        answer: Answer | None = self._asked()
        fault = self.proxy.faults.get(number, self.proxy.every)
        if fault is not None and answer is not None:
            answer = fault(self, answer)
        if answer is None:
            self.close_connection = True
            return
        self.say(answer, answer.body)
        self.proxy.sent += len(answer.body)

    def _asked(self) -> Answer:
        host = self.proxy.upstream.removeprefix("http://")
        connection = http.client.HTTPConnection(host, timeout=60)
        dropped = {*_OF_THE_CONNECTION, *self.proxy.drop_headers}
        headers = {k: v for k, v in self.headers.items() if k.lower() not in dropped}
        connection.request(self.command, self.path, headers=SIGNED | headers)
        got = connection.getresponse()
        told = {k: v for k, v in got.getheaders() if k.lower() not in _OF_THE_CONNECTION}
        answer = Answer(got.status, told, got.read())
        connection.close()
        if "ETag" in told:
            self.proxy.etags.add(told["ETag"])
        return answer

    def say(self, answer: Answer, body: bytes) -> None:
        """Send a response with only part of its body."""
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if "Content-Length" not in answer.headers:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
            self.wfile.flush()


_OF_THE_CONNECTION = ("connection", "transfer-encoding", "keep-alive", "date", "server")


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The client has disconnected."""


@contextmanager
def proxied(upstream: str) -> Iterator[Proxy]:
    """Start a proxy before a server."""
    proxy = Proxy(upstream)
    handler = type("Bound", (Handler,), {"proxy": proxy})
    with _Server(("127.0.0.1", 0), handler) as server:
        proxy.address = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            server.shutdown()
            thread.join()


# Faults ------------------------------------------------------------------------------------------


def late(handler: Handler, answer: Answer) -> Answer:
    """Delay the response."""
    time.sleep(0.3)
    return answer


def cut_before(handler: Handler, answer: Answer) -> None:
    """Close the connection before the response."""
    handler.connection.shutdown(socket.SHUT_RDWR)


def cut_inside(handler: Handler, answer: Answer) -> None:
    """Close the connection in the middle of the body."""
    handler.say(answer, answer.body[: len(answer.body) // 2])
    handler.connection.shutdown(socket.SHUT_RDWR)


def shorter(handler: Handler, answer: Answer) -> Answer:
    """Send a body shorter than the range, with a matching length."""
    body = answer.body[: len(answer.body) // 2]
    headers = {k: v for k, v in answer.headers.items() if k.lower() != "content-length"}
    if handler.command == "HEAD":
        return answer
    return Answer(answer.status, headers, body)


def error_500(handler: Handler, answer: Answer) -> Answer:
    return Answer(500, {}, b"<Error><Code>InternalError</Code></Error>")


def busy(handler: Handler, answer: Answer) -> Answer:
    return Answer(503, {"Retry-After": "1"}, b"<Error><Code>SlowDown</Code></Error>")


def forbidden(handler: Handler, answer: Answer) -> Answer:
    return Answer(403, {}, b"<Error><Code>AccessDenied</Code></Error>")


def hangs(handler: Handler, answer: Answer) -> None:
    """Send nothing, and keep the connection open."""
    time.sleep(30)


REPAIRED = {f.__name__: f for f in (late, cut_before, cut_inside, shorter, error_500, busy)}
"""Faults that a retry overcomes."""
