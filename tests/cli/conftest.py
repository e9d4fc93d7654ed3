"""Store directories as a store writes them, and ways to run the command."""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tierstore.cli.commands import inspector
from tierstore.model.groups import Block, TensorSpec, contiguous_stride, pack
from tierstore.model.objects import StoredObject
from tierstore.model.sizes import PAGE, round_up
from tierstore.tiers.directory import ObjectDirectory

ROOT = Path(__file__).resolve().parents[2]


def float_block(name: str, *shape: int) -> Block:
    """Return a single tensor of float32."""
    spec = TensorSpec(name, "F32", shape, contiguous_stride(shape), 0)
    return Block(name, "F32", shape, spec.nbytes, (spec,))


def put(directory: ObjectDirectory, key: str, *blocks: Block, version: int = 0) -> StoredObject:
    """Write a group whose bytes are derived from its key and version."""
    packing = pack(blocks or (float_block("weight", 64, 64), float_block("bias", 3)))
    buffer = memoryview(mmap.mmap(-1, max(round_up(packing.nbytes, PAGE), PAGE)))
    buffer[: packing.nbytes] = hashlib.shake_128(f"{version} {key}".encode()).digest(packing.nbytes)
    return directory.write(key, packing, buffer, single=False)


def tree(directory: Path) -> dict[str, tuple[Any, ...]]:
    """Return every entry below a directory: kind, times, and content."""
    found: dict[str, tuple[Any, ...]] = {}
    for path in [directory, *sorted(directory.rglob("*"))]:
        status = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        name = str(path.relative_to(directory))
        found[name] = (status.st_mode, status.st_ino, status.st_mtime_ns, content)
    return found


@pytest.fixture
def store(disk_dir: Path) -> Path:
    """Return the directory of a closed store with three groups: a, b and layers/0."""
    directory = ObjectDirectory(disk_dir)
    for key in ("a", "b", "layers/0"):
        put(directory, key)
    directory.close()
    return disk_dir


@pytest.fixture
def locked(store: Path) -> Iterator[Path]:
    """Return the same directory, in use by another process."""
    code = (
        "import sys; from tierstore.tiers.directory import ObjectDirectory;"
        "held = ObjectDirectory(sys.argv[1]); print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, store],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdin is not None and holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    yield store
    holder.communicate()


@dataclass(frozen=True)
class Inspect:
    """Runs the command in this process, without a terminal."""

    runner: CliRunner

    def __call__(self, *args: object, **env: str) -> Result:
        words = [str(arg) for arg in args]
        return self.runner.invoke(inspector, words, env={"COLUMNS": None, **env})

    def json(self, *args: object, code: int = 0) -> Any:
        """Return the document that the command prints; the exit code must be `code`."""
        result = self(*args, "--json")
        assert result.exit_code == code, result.output
        document = json.loads(result.stdout)
        assert document["schema"] == 1
        return document


@pytest.fixture
def inspect() -> Inspect:
    return Inspect(CliRunner())


def command(args: Sequence[object], before: str = "", after: str = "pass") -> list[str]:
    """Return the command in a fresh interpreter, with code that runs before it and at its exit."""
    code = (
        f"import atexit, sys\n{before}\n"
        f"atexit.register(lambda: exec({after!r}))\n"
        "from tierstore.cli import main\nmain()\n"
    )
    return [sys.executable, "-c", code, *map(str, args)]


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a fresh interpreter, without variables that affect tables."""
    kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    return {**kept, "PYTHONPATH": str(ROOT), "TERM": "xterm", **more}


def start(
    *args: object, before: str = "", after: str = "pass", **more: str
) -> subprocess.CompletedProcess[str]:
    """Run the command without a terminal."""
    return subprocess.run(
        command(args, before, after),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=environment(**more),
    )


@dataclass(frozen=True)
class TerminalOutput:
    """Output and exit code of a command on a terminal."""

    exit_code: int
    output: str


def on_terminal(
    *args: object, typed: str = "", interrupt: bool = False, before: str = "", **more: str
) -> TerminalOutput:
    """Run the command on a separate terminal. At its prompt, type an answer or interrupt it."""
    ours, its = os.openpty()
    termios.tcsetwinsize(its, (24, int(more.get("COLUMNS", 80))))
    process = subprocess.Popen(
        command(args, before), stdin=its, stdout=its, stderr=its, env=environment(**more)
    )
    os.close(its)
    output = b""
    typed_to = False
    deadline = time.monotonic() + 60
    try:
        while chunk := _read(ours, deadline):
            output += chunk
            if b"[y/N]" in output and not typed_to:
                typed_to = True
                os.write(ours, typed.encode())
                if interrupt:
                    _interrupt(process, deadline)
        return TerminalOutput(process.wait(60), output.decode().replace("\r\n", "\n"))
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def _interrupt(process: subprocess.Popen[bytes], deadline: float) -> None:
    """Interrupt until it ends.

    A signal between the last check and the read of Python does not end it.
    """
    while process.poll() is None and time.monotonic() < deadline:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2)


def _read(descriptor: int, deadline: float) -> bytes:
    if not select.select([descriptor], [], [], max(deadline - time.monotonic(), 0))[0]:
        raise TimeoutError("the command neither printed anything nor ended")
    try:
        return os.read(descriptor, 4096)
    except OSError:  # the other end was closed
        return b""


def step_of(document: dict[str, Any]) -> dict[str, Any]:
    """Return the step of the only model at the only budget, as `plan` prints it."""
    (plan,) = document["plans"]
    (step,) = plan["steps"]
    found: dict[str, Any] = step
    return found
