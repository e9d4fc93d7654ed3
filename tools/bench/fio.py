"""Runs `fio` on the same files, as the reference of the disk benchmark."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20

READS = ("psync 16M x4", "psync 32M x2", "libaio 1M q16", "libaio 8M q4", "io_uring 1M q16",
         "io_uring 4M q4", "io_uring 8M q4")  # fmt: skip
ROOMY = "psync 16M x16"
"""A configuration whose buffers, 256 MiB in all, exceed the CPU caches.

The buffers of any program that keeps the data do so too. The others read into the same few MiB
repeatedly, which is faster on some machines.
"""

ROOM = 256 * MIB
"""Bytes of its buffers, which is also the minimum to read."""

LOOPS = 3
"""Number of times that one run moves everything, for fio and the store alike."""

WRITES = ("psync 8M x4", "psync 32M x2", "libaio 4M q4", "libaio 8M q4", "io_uring 8M q4")


@dataclass(frozen=True)
class Rate:
    """The result of one run: bytes per second, and CPU seconds per 10⁹ bytes."""

    speed: float
    cpu: float


def available() -> bool:
    """Return True if fio is installed."""
    return shutil.which("fio") is not None


def version() -> str:
    """Return the installed version."""
    return subprocess.run(["fio", "--version"], capture_output=True, text=True).stdout.strip()


def run(path: Path, configuration: str, nbytes: int, *options: str) -> Rate:
    """Read or write `nbytes` bytes of a file, or both, with direct I/O.

    A configuration is an engine, a block size, and a queue depth (q) or number of threads (x). With
    `--loops`, everything moves several times, which reduces the weight of fio's buffer setup; the
    store's slots already exist.
    """
    engine, block, depth = configuration.split()
    threads = int(depth[1:]) if depth[0] == "x" else 1
    share = nbytes // threads
    command = [
        "fio", "--name=bench", f"--filename={path}", f"--ioengine={engine}", f"--bs={block}",
        f"--iodepth={depth[1:] if depth[0] == 'q' else 1}", f"--numjobs={threads}", "--thread",
        f"--offset_increment={share}", f"--io_size={share}", f"--size={share}", "--direct=1",
        "--group_reporting", "--output-format=json", "--invalidate=1", *options,
    ]  # fmt: skip
    # Make the C library's malloc request huge pages for fio's buffers, too.
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    ways = [job[way] for way in ("read", "write") if job[way]["io_bytes"]]
    used = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    moved = sum(way["io_bytes"] for way in ways)
    return Rate(sum(way["bw_bytes"] for way in ways), used / moved * 1e9)
