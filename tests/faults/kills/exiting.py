"""Processes that end with much work under way, each in a different way.

    python -m tests.faults.kills.exiting DIRECTORY WAYS

All are forked from this process, which starts no thread, and end as an interpreter does: at the end
of the program, after all its exit handlers. Prints a line of JSON for each: an `Ending`.
"""

from __future__ import annotations

import gc
import json
import os
import select
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.kills import late

PATIENCE = 60.0

Tell = Callable[..., None]


@dataclass
class Ending:
    """The end of a process, its seconds after the main program, and the state found afterwards."""

    way: str
    seconds: float = -1.0
    code: int | None = None
    told: dict[str, Any] = field(default_factory=dict)
    errors: str = ""
    found: dict[str, Any] = field(default_factory=dict)


def hear(source: int, child: int, until: float) -> tuple[list[Any], int | None, float]:
    """Return a child's output, its exit status (None: timed out), and the time of its end."""
    said = b""
    while select.select([source], [], [], max(0.0, until - time.monotonic()))[0]:
        if not (read := os.read(source, 1 << 16)):
            break
        said += read
    lines = [json.loads(line) for line in said.splitlines()]
    while (now := time.monotonic()) < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return lines, os.waitstatus_to_exitcode(status), now
        time.sleep(0.002)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return lines, None, now


def fork(do: Callable[[Tell], None], errors: Path) -> tuple[int, int] | None:
    """Return the pipe to read and the child's id; in the child, None once it has finished."""
    source, drain = os.pipe()
    child = os.fork()
    if child:
        os.close(drain)
        return source, child
    os.close(source)
    os.dup2(os.open(errors, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 2)
    do(lambda *told: os.write(drain, json.dumps(told).encode() + b"\n") and None)
    return None


def main(root: Path, ways: list[str]) -> None:
    late.register()
    from tests.faults.kills import endings

    gc.collect()
    gc.freeze()  # each exit need not scan the imported modules for garbage
    for way in ways:
        ending = Ending(way)
        errors = root / f"{way}.errors"
        child = fork(lambda tell, way=way: endings.end(way, root / way, tell), errors)
        if child is None:
            return
        lines, ending.code, ended = hear(*child, time.monotonic() + PATIENCE)
        ending.told = dict(lines)
        ending.seconds = ended - ending.told.get("ends", ended + 1)
        ending.errors = errors.read_text()
        child = fork(lambda tell, way=way: endings.look(root / way, tell), errors)
        if child is None:
            return
        lines, _, _ = hear(*child, time.monotonic() + PATIENCE)
        ending.found = dict(lines)
        print("ENDING " + json.dumps(asdict(ending)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
