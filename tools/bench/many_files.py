"""A directory of 100,000 groups of 100 bytes

    python tools/bench/many_files.py [--small] [--dir DIR] [--markdown FILE]

Groups of 25 floats are put that last, each in a file of its own. Then the store is opened again,
and `tierstore-inspect ls` and `df` list it: with a cold page cache (where this process may drop
it), and with a warm one, three times, of which the median counts. Each run is a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch

from tierstore import TierStore
from tools.bench import own_process
from tools.bench.report import Claim, Page

FILES, SMALL_FILES = 100_000, 500
OPENED_WITHIN, LISTED_WITHIN = 8.0, 5.0
TIMES = 3
WRITERS = 16
DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def fill(count: int, place: Path) -> None:
    """A directory with so many groups that last. Several at once: each put waits for the disk."""
    with (
        TierStore(64 << 20, place / "durable", device="cpu") as store,
        ThreadPoolExecutor(WRITERS) as writers,
    ):

        def put(number: int) -> None:
            store.put(f"k{number}", torch.full((25,), float(number)), durable=True)

        for _ in writers.map(put, range(count)):
            pass


def opened(place: Path) -> dict[str, float]:
    """Seconds to open that directory."""
    began = time.perf_counter()
    store = TierStore(64 << 20, place / "durable", device="cpu")
    seconds = time.perf_counter() - began
    with store:
        return {"seconds": seconds, "groups": len(store)}


def listed(command: str, place: Path) -> float:
    """Seconds of a command of `tierstore-inspect` on that directory."""
    words = [sys.executable, "-m", "tierstore.cli", command, str(place / "durable")]
    began = time.perf_counter()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def drop_caches() -> bool:
    """Have the system forget the files that it has in RAM. Returns whether it did."""
    os.sync()
    with contextlib.suppress(OSError):
        DROP_CACHES.write_text("3")
        return True
    return False


def run(way: str, number: int, place: Path) -> dict[str, float]:
    """In a process of its own: fill the directory with so many groups, or open it."""
    if way == "fill":
        fill(number, place)
        return {}
    return opened(place)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a little of it: does it run?")
    parser.add_argument("--dir", type=Path, help="where the store's files go")
    parser.add_argument("--markdown", type=Path, help="write the page here too")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(run(options.run, options.budget, options.dir)))
        return 0
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-", dir=options.dir) as scratch:
        place = Path(scratch)
        page = Page(__doc__, place, ("torch",))
        page.claims(many_files(SMALL_FILES if options.small else FILES, place, page))
        page.write(options.markdown)
    return 0


def many_files(count: int, place: Path, page: Page) -> list[Claim]:
    """A table of how long a directory of many groups takes to open and to list."""
    own_process.measured(__file__, "fill", place, count)
    ways: dict[str, Callable[[], float]] = {
        "opened": lambda: own_process.measured(__file__, "open", place, 0)["seconds"],
        "`ls`": lambda: listed("ls", place),
        "`df`": lambda: listed("df", place),
    }
    rows, claims = [], []
    for name, look in ways.items():
        cold = look() if drop_caches() else None
        warm = statistics.median(look() for _ in range(TIMES))
        rows.append([name, f"{count:,}", "-" if cold is None else f"{cold:.1f}", f"{warm:.1f}"])
        limit = OPENED_WITHIN if name == "opened" else LISTED_WITHIN
        claims.append(Claim(f"{name}: seconds, warm", warm, at_most=limit))
    page.table(("directory", "groups", "s, cold", "s, warm"), rows)
    return claims


if __name__ == "__main__":
    sys.exit(main())
