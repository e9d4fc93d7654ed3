"""What `fio` makes of the same files: the reference of the disk benchmark."""

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
"""Its buffers, 256 MiB in all, do not stay in the processor's caches, nor do those of anybody who
keeps what was read. The others read into the same few MiB again and again, which some machines do
faster."""

ROOM = 256 * MIB
"""Bytes of its buffers: there must be as much to read."""

LOOPS = 3
"""How often everything is moved in one run, by fio and by the store alike."""

WRITES = ("psync 8M x4", "psync 32M x2", "libaio 4M q4", "libaio 8M q4", "io_uring 8M q4")


@dataclass(frozen=True)
class Rate:
    """What one run reached: bytes per second, and CPU seconds for each 10⁹ bytes."""

    speed: float
    cpu: float


def available() -> bool:
    """Whether fio is installed."""
    return shutil.which("fio") is not None


def version() -> str:
    """The installed version."""
    return subprocess.run(["fio", "--version"], capture_output=True, text=True).stdout.strip()


def run(path: Path, configuration: str, nbytes: int, *options: str) -> Rate:
    """Read or write `nbytes` bytes of a file, or some of each, past the page cache.

    A configuration is an engine, a block size, and a queue depth (q) or number of threads (x). With
    `--loops` it is moved more than once, and the time that fio needs to make its buffers counts for
    less; the store's slots are there already.
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
    # Its buffers shall lie in huge pages too: the C library's malloc asks for them then.
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    ways = [job[way] for way in ("read", "write") if job[way]["io_bytes"]]
    used = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    moved = sum(way["io_bytes"] for way in ways)
    return Rate(sum(way["bw_bytes"] for way in ways), used / moved * 1e9)
