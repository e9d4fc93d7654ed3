"""Programs in fresh processes that need not import torch first.

Importing torch takes seconds, and dozens of tests start a Python program that begins with it. One
process has imported it, and done nothing else; each program runs in a fork of that process: with
separate memory, threads, directory and environment, as if the command line had started it.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LATE = 124
"""Exit status of a program that took too long, as for `timeout`."""


def run_fresh(
    program: Path,
    *words: str,
    directory: Path,
    seconds: float = 300,
    environment: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a Python file in `directory` with these arguments, and return its result.

    It gets this process's environment, with `environment` in addition. After `seconds` it is
    killed; its exit status is then `LATE`.
    """
    request = {
        "program": str(program),
        "words": words,
        "directory": str(directory),
        "seconds": seconds,
        "environment": {**os.environ, **(environment or {})},
    }
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    answer = json.loads(server.stdout.readline())
    command = [sys.executable, str(program), *words]
    return subprocess.CompletedProcess(command, answer["status"], answer["out"], answer["err"])


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Return the process that has imported torch: one for all tests of this process."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.fresh"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.terminate)
    return server


# In the process that has imported torch -----------------------------------------------------------


def serve() -> None:
    """Answer each request of standard input with a line on standard output."""
    import safetensors.torch  # noqa: F401
    import torch

    torch.empty(0)
    for line in sys.stdin:
        request = json.loads(line)
        outputs = [os.memfd_create(name) for name in ("out", "err")]
        child = os.fork()
        if child == 0:
            os._exit(in_a_fork(lambda request=request: run_program(**request), outputs))
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status)
        code = -os.WTERMSIG(status) if killed else os.waitstatus_to_exitcode(status)
        out, err = (_all_of(descriptor) for descriptor in outputs)
        print(json.dumps({"status": code, "out": out, "err": err}), flush=True)


def in_a_fork(action: Callable[[], None], outputs: Sequence[int]) -> int:
    """Run an action with other outputs; return the exit status of an interpreter."""
    os.setpgid(0, 0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, descriptor in enumerate(outputs, start=1):
        os.dup2(descriptor, number)
    try:
        action()
        status: object = 0
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
        status = 1
    if isinstance(status, str):
        print(status, file=sys.stderr)
    return _end(status if isinstance(status, int) else 0 if status is None else 1)


def _end(status: int) -> int:
    """Do as the interpreter does at exit: join threads and run exit handlers."""
    import threading

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def run_program(
    program: str,
    words: Sequence[str],
    directory: str,
    seconds: float,
    environment: dict[str, str],
) -> None:
    import signal

    signal.signal(signal.SIGALRM, lambda *_: os._exit(LATE))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.argv = [program, *words]
    sys.path.insert(0, str(Path(program).parent))
    runpy.run_path(program, run_name="__main__")


def _all_of(descriptor: int) -> str:
    with os.fdopen(descriptor, "rb") as file:
        file.seek(0)
        return file.read().decode(errors="replace")


if __name__ == "__main__":
    serve()
