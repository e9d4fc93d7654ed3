"""Runs a function in a separate process, whose memory can be limited.

    Apart(function, 1, 2).answer()

The process imports the function's module, calls the function and sends back its result. A generator
function is a worker: each message is sent into it, and each value that it yields is an answer. The
process uses the allocator's defaults, regardless of `malloc` settings in the environment.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from tools.bench.memory_group import MemoryGroup

ROOT = Path(__file__).resolve().parents[2]
FRUGAL = {"MALLOC_MMAP_THRESHOLD_": "131072"}
"""Environment in which glibc returns freed blocks over 128 KiB to the system."""


class Killed(Exception):
    """Raised if the system killed the process for lack of memory."""


class Ended(Exception):
    """Raised if the process failed. The message is the end of its output."""


class Late(Ended):
    """Raised if the process took too long and was killed."""


class Apart:
    def __init__(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        group: MemoryGroup | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._connection, theirs = Pipe()
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in __exit__
        words = [sys.executable, "-m", "tools.bench.apart", str(theirs.fileno())]
        kept = {n: v for n, v in os.environ.items() if not n.startswith("MALLOC_")}
        self.process = subprocess.Popen(
            words if group is None else group.command(words),
            cwd=ROOT,
            env={**kept, **(environment or {})},
            stdout=self._output,
            stderr=self._output,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        _send(self._connection, (function, arguments))

    def send(self, message: Any = None) -> None:
        """Send a message to a worker."""
        _send(self._connection, message)

    def answer(self, timeout: float | None = None) -> Any:
        """Wait for the next result of the function, and return it. Raises Killed or Ended."""
        try:
            if timeout is None or self._connection.poll(timeout):
                return _receive(self._connection)
        except (EOFError, ConnectionError):
            status = self.process.wait()
            if status in (-9, 137):
                raise Killed(str(self.process.args)) from None
            self._output.seek(0)
            raise Ended(f"{self._output.read()[-4000:]}\nit ended with {status}") from None
        kill(self.process)
        raise Late(f"it took longer than {timeout} s")

    def ask(self, message: Any = None) -> Any:
        """Send a message, and return the answer."""
        self.send(message)
        return self.answer()

    def __enter__(self) -> Apart:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        if self.process.poll() is None:
            kill(self.process)
        self._output.close()


def kill(process: subprocess.Popen[Any]) -> None:
    """Kill a process and its children."""
    if process.returncode is None:  # otherwise its PID may have been reused
        with suppress(psutil.NoSuchProcess):
            started = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            for each in started:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
    process.wait()


def apart(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Run a function in a separate process, and return its result. Raises Killed or Ended."""
    timeout = options.pop("timeout", None)
    with Apart(function, *arguments, **options) as process:
        return process.answer(timeout)


def limited(nbytes: int | None, function: Callable[..., Any], *arguments: Any) -> tuple[Any, int]:
    """Run a function in a separate process that may use `nbytes` bytes of RAM with page cache.

    Returns its result and its peak in bytes. If the system does not support the limit, or `nbytes`
    is None, memory is not limited and the peak is 0. If the process is killed, it runs again with
    `FRUGAL`, and the result has `frugal` set.
    """
    if nbytes is None or unlimited(nbytes):
        return apart(function, *arguments), 0
    for environment in ({}, FRUGAL):
        with MemoryGroup(nbytes) as group:
            try:
                found = apart(function, *arguments, group=group, environment=environment)
            except Killed:
                continue
            return found | {"frugal": bool(environment)}, group.peak
    raise Killed(f"{function.__name__}{arguments} does not run in {nbytes >> 20} MiB")


def unlimited(nbytes: int) -> str:
    """Return why memory cannot be limited here; empty if it can."""
    try:
        with MemoryGroup(nbytes):
            return ""
    except OSError as error:
        return f"RAM was not limited ({error})."


def _send(connection: Connection, message: Any) -> None:
    """Send with plain pickle. `Connection.send` makes torch share memory, which ends with us."""
    connection.send_bytes(pickle.dumps(message))


def _receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


def _work(connection: Connection) -> None:
    function, arguments = _receive(connection)
    result = function(*arguments)
    if not inspect.isgenerator(result):
        _send(connection, result)
        return
    _send(connection, next(result))
    while True:
        try:
            message = _receive(connection)
        except EOFError:
            result.close()
            return
        _send(connection, result.send(message))


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the parent
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    _work(Connection(int(sys.argv[1])))
