"""A million groups of 100 bytes in RAM

Groups of 25 floats, not durable, are put with a RAM budget that holds a sixty-fourth of them, and
with one that holds half; the rest goes to disk. Each run is a separate process. Then a thousand
random groups are read and compared.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from tierstore import TierStore
from tools.bench.apart import apart
from tools.bench.page import Claim
from tools.bench.runner import Bench, Run, value

PACKAGES = ("torch",)
BUDGETS = {"64 MiB": 64 << 20, "2 GiB": 2 << 30}
READ, LOOKS, MOST_MAPS = 1000, 200, 65_530


def maps() -> int:
    with open("/proc/self/maps") as lines:
        return sum(1 for _ in lines)


def put_and_read(count: int, budget: int, place: Path) -> Run:
    """Put `count` groups, and read some of them."""
    memory = psutil.Process().memory_info
    with TierStore(budget, place, device="cpu") as store:
        before, most, began = memory().rss, maps(), time.perf_counter()
        for number in range(count):
            store.put(f"k{number}", torch.full((25,), float(number)), durable=False)
            if number % max(count // LOOKS, 1) == 0:
                most = max(most, maps())
        put = time.perf_counter() - began
        beside = memory().rss - before - min(budget, count * 4096)
        began, wrong = time.perf_counter(), 0
        chosen = random.Random(0).sample(range(count), min(READ, count))
        for number in chosen:
            wrong += not torch.equal(store.get(f"k{number}"), torch.full((25,), float(number)))
        read = time.perf_counter() - began
    found = {"groups": count, "put": put, "each": put / count, "beside": beside / count}
    return found | {"maps": most, "read": read / len(chosen), "wrong": wrong}


def measure(bench: Bench) -> Iterator[Claim]:
    count = 2_000 if bench.small else 1_000_000
    found = {n: apart(put_and_read, count, b, bench.scratch / n) for n, b in BUDGETS.items()}
    columns = {
        "groups": value("groups"),
        "s": value("put"),
        "us for each": value("each", scale=1e6),
        "bytes beside its page": value("beside"),
        "most maps": value("maps"),
        "us to read one": value("read", scale=1e6),
    }
    bench.page.compare("RAM budget", found, columns)
    for name, run in found.items():
        yield Claim(f"wrong values with {name}", run["wrong"], at_most=0)
        yield Claim(f"memory maps with {name}", run["maps"], at_most=MOST_MAPS // 2)
