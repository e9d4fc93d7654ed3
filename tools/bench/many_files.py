"""A directory of 100,000 groups of 100 bytes

Groups of 25 floats are put durably, each in its own file. Then the store is opened again, and
`tierstore-inspect ls` and `df` list it: with a cold page cache (if this process may drop it), and
with a warm one, as the median of three. Each run is a separate process.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tierstore import TierStore
from tools.bench import machine
from tools.bench.apart import apart
from tools.bench.page import Claim
from tools.bench.runner import Bench, median

PACKAGES = ("torch",)
TIMES, WRITERS = 3, 16


def fill(count: int, place: Path) -> None:
    """Put `count` durable groups, several at a time, because each put waits for the disk."""
    with (
        TierStore(64 << 20, place, device="cpu") as store,
        ThreadPoolExecutor(WRITERS) as writers,
    ):
        puts = [
            writers.submit(store.put, f"k{n}", torch.full((25,), float(n)), durable=True)
            for n in range(count)
        ]
        for put in puts:
            put.result()


def opened(place: Path) -> float:
    """Return the seconds to open the directory."""
    began = time.perf_counter()
    with TierStore(64 << 20, place, device="cpu"):
        return time.perf_counter() - began


def listed(command: str, place: Path) -> float:
    """Return the seconds of a command of `tierstore-inspect` on the directory."""
    words = [sys.executable, "-m", "tierstore.cli", command, str(place)]
    began = time.perf_counter()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def measure(bench: Bench) -> Iterator[Claim]:
    count, place = 500 if bench.small else 100_000, bench.scratch / "durable"
    apart(fill, count, place)
    ways: dict[str, tuple[Callable[[], float], float]] = {
        "opened": (lambda: apart(opened, place), 8.0),
        "`ls`": (lambda: listed("ls", place), 5.0),
        "`df`": (lambda: listed("df", place), 5.0),
    }
    rows, claims = [], []
    for name, (look, limit) in ways.items():
        cold = f"{look():.1f}" if not bench.small and machine.drop_page_cache() else "-"
        warm = median(look() for _ in range(TIMES))
        rows.append([name, f"{count:,}", cold, f"{warm:.1f}"])
        claims.append(Claim(f"{name}: seconds, warm", warm, at_most=limit))
    bench.page.table(("directory", "groups", "s, cold", "s, warm"), rows)
    yield from claims
