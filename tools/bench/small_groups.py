"""A million groups of 100 bytes in RAM

    python tools/bench/small_groups.py [--small] [--dir DIR] [--markdown FILE]

Groups of 25 floats are put that need not outlive the store, into a RAM budget that has room for a
sixty-fourth of them, and into one that has room for half; the rest goes to disk. Each run is a
process of its own. Told are the seconds, the memory of the process beside the budget's pages, and
the most memory maps that it had. Then a thousand groups, drawn at random, are read and compared.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch

from tierstore import TierStore
from tools.bench import own_process
from tools.bench.report import Claim, Page

GROUPS, SMALL_GROUPS = 1_000_000, 2_000
BUDGETS = {"64 MiB": 64 << 20, "2 GiB": 2 << 30}
READ = 1000
STEPS = 200
MOST_MAPS = 65_530


def memory() -> int:
    """Bytes of this process that are in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def maps() -> int:
    """Memory maps of this process."""
    with open("/proc/self/maps") as lines:
        return sum(1 for _ in lines)


def value(number: int) -> torch.Tensor:
    """100 bytes, of which one group can be told from another."""
    return torch.full((25,), float(number))


def put_and_read(count: int, budget: int, place: Path) -> dict[str, float]:
    """Put so many groups, and read some of them."""
    with TierStore(budget, place / "transient", device="cpu") as store:
        before, most, began = memory(), maps(), time.perf_counter()
        for number in range(count):
            store.put(f"k{number}", value(number), durable=False)
            if number % max(count // STEPS, 1) == 0:
                most = max(most, maps())
        put = time.perf_counter() - began
        in_slots = min(budget, count * 4096)
        beside = memory() - before - in_slots
        began = time.perf_counter()
        wrong = 0
        for number in random.Random(0).sample(range(count), min(READ, count)):
            wrong += not torch.equal(store.get(f"k{number}"), value(number))
        read = time.perf_counter() - began
    return {"put": put, "read": read, "beside": beside, "maps": most, "wrong": wrong}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a little of it: does it run?")
    parser.add_argument("--dir", type=Path, help="where the store's files go")
    parser.add_argument("--markdown", type=Path, help="write the page here too")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(put_and_read(int(options.run), options.budget, options.dir)))
        return 0
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-", dir=options.dir) as scratch:
        place = Path(scratch)
        page = Page(__doc__, place, ("torch",))
        page.claims(many_groups(SMALL_GROUPS if options.small else GROUPS, place, page))
        page.write(options.markdown)
    return 0


def many_groups(count: int, place: Path, page: Page) -> list[Claim]:
    """A table of what many transient groups take."""
    rows, claims = [], []
    for name, budget in BUDGETS.items():
        found = own_process.measured(__file__, str(count), place, budget)
        rows.append(
            [
                name,
                f"{count:,}",
                f"{found['put']:,.0f}",
                f"{1e6 * found['put'] / count:,.0f}",
                f"{found['beside'] / count:,.0f}",
                f"{found['maps']:,.0f}",
                f"{1e6 * found['read'] / min(READ, count):,.0f}",
            ]
        )
        claims += [
            Claim(f"wrong values with {name}", found["wrong"], at_most=0),
            Claim(f"memory maps with {name}", found["maps"], at_most=MOST_MAPS // 2),
        ]
    columns = ("RAM budget", "groups", "s", "us for each", "bytes beside its page", "most maps")
    page.table((*columns, "us to read one"), rows)
    return claims


if __name__ == "__main__":
    sys.exit(main())
