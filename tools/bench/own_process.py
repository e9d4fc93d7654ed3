"""One way of several that a script measures, in a process of its own: nothing of the others is in
its memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tools.bench.memory_group import MemoryGroup


def start(
    script: str,
    way: str,
    place: Path,
    budget: int,
    group: MemoryGroup | None = None,
    *,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a script with `--dir`, `--run` and `--budget` (bytes), with the allocator's defaults; in
    a memory control group if one is given. Raises TimeoutExpired after `timeout` seconds."""
    words = [sys.executable, str(Path(script).resolve()), "--dir", str(place)]
    words += ["--run", way, "--budget", str(budget)]
    environment = {n: v for n, v in os.environ.items() if not n.startswith("MALLOC_")}
    command = words if group is None else group.command(words)
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False, timeout=timeout
    )


def measured(script: str, way: str, place: Path, budget: int) -> dict[str, float]:
    """What a script prints last of one way, which it runs to the end. Raises SystemExit."""
    return answer(way, start(script, way, place, budget))


def answer(way: str, done: subprocess.CompletedProcess[str]) -> dict[str, float]:
    """What it printed last, as JSON. Raises SystemExit if it failed."""
    if done.returncode:
        raise SystemExit(f"the run of {way!r} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found
