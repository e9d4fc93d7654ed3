"""Processes: Python in a fresh one, and children that report their progress."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FAILED = 3
"""Exit status of a child of `forked` that raised."""
PATIENCE = 60.0
"""Seconds within which a child must send a message or end."""

Tell = Callable[..., None]


# A fresh interpreter ------------------------------------------------------------------------------


def run_python(
    *arguments: object,
    directory: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run the interpreter in the root of the repository, and capture its output as text."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def output_of(*arguments: object, **options: Any) -> str:
    """Return the output of the interpreter, which must succeed.

    Options are those of `run_python`.
    """
    done = run_python(*arguments, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def results_in(output: str, word: str = "RESULT") -> list[Any]:
    """Return the JSON of the lines that begin with a word."""
    lines = [line for line in output.splitlines() if line.startswith(f"{word} ")]
    return [json.loads(line.removeprefix(f"{word} ")) for line in lines]


def without_kept_addresses(threads: int = 1) -> dict[str, str]:
    """Return an environment for processes under RLIMIT_DATA, which counts addresses.

    The heap of glibc keeps the addresses of freed blocks even after it returned their memory. With
    a fixed threshold, a block of 128 KiB is a map, and its addresses go with it.
    """
    return {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072", "OMP_NUM_THREADS": str(threads)}


def with_the_usual_allocator(threads: int | None = None) -> dict[str, str]:
    """Return an environment with the allocator as users have it.

    `threads` sets the number of torch threads, if not the default.
    """
    usual = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    return usual if threads is None else {**usual, "OMP_NUM_THREADS": str(threads)}


def data_bytes() -> int:
    """Return this process's private writable memory as RLIMIT_DATA counts it, maps included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmData")


# Children -----------------------------------------------------------------------------------------


def forked(do: Callable[[Tell], object]) -> tuple[int, int]:
    """Run a function in a child that sends lists as JSON lines through a pipe.

    Returns the child's process id, and the pipe's end to read. If the function raises, the last
    message is "wrong" and the traceback, and the child exits with `FAILED`.
    """
    source, drain = os.pipe()
    child = os.fork()
    if child:
        os.close(drain)
        return child, source

    def tell(*message: Any) -> None:
        os.write(drain, json.dumps(message).encode() + b"\n")

    code = FAILED
    with contextlib.suppress(BaseException):
        try:
            os.close(source)
            do(tell)
            code = 0
        except BaseException:
            tell("wrong", traceback.format_exc()[-3000:])
    os._exit(code)


def messages_from(
    child: int, source: int, kill: tuple[str, float] | None = None
) -> Iterator[list[Any]]:
    """Yield each list that a child of `forked` sends, and last ["died", its exit code].

    `kill` names a message and the seconds after it at which the child is killed. A child that is
    silent for `PATIENCE` seconds is killed, too, and "wrong" is yielded first.
    """
    unfinished = b""
    ends, hangs = time.monotonic() + PATIENCE, True
    try:
        while True:
            if not select.select([source], [], [], max(0.0, ends - time.monotonic()))[0]:
                if hangs:
                    yield ["wrong", f"it hung for {PATIENCE} seconds"]
                os.kill(child, signal.SIGKILL)
                ends, hangs = time.monotonic() + PATIENCE, True
                continue
            if not (read := os.read(source, 1 << 16)):
                break
            *lines, unfinished = (unfinished + read).split(b"\n")
            for message in map(json.loads, lines):
                if kill is not None and message[0] == kill[0]:
                    ends, hangs, kill = time.monotonic() + kill[1], False, None
                yield message
    finally:
        os.close(source)
    _, status = os.waitpid(child, 0)
    yield ["died", os.waitstatus_to_exitcode(status)]
