"""Models on separate threads in one store: misses, bytes read and stalls

Each model runs on its own thread, pass after pass, without coordination; and, for comparison, with
one lock around each pass. RAM holds two fifths of all weights. A layer computes for some
milliseconds, and no two layers compute at a time, as models share a device or the cores. The disk
is slowed down, so that reading the rest takes a fraction of the compute time. So with correct
predictions, no model has to wait. The figures are misses, bytes read and seconds stalled, per pass
of all models, from the fourth pass on. `late` counts uses of groups in transit.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from tests.device import pretend
from tierstore import TierStore, enable_group_offload
from tools.bench.page import Claim
from tools.bench.runner import Bench, Run, column, median, ranged
from tools.bench.slowed import slow_disk

PACKAGES, ROUNDS = ("torch",), 3
LEARNED = 3
"""Uncounted first passes of each model."""
FITS = 0.4
"""Share of all weights that RAM holds."""
DISK = 0.7
"""Time of the necessary reads, as a share of the compute time."""
TOGETHER, IN_TURN = "as they come", "one lock around each pass"


@dataclass(frozen=True)
class Case:
    """Models of `layers` layers of `width` x `width` float32 weights that compute for `seconds`."""

    layers: int
    width: int
    seconds: float
    passes: int

    @property
    def layer_bytes(self) -> int:
        return self.width**2 * 4

    @property
    def speed(self) -> float:
        """Read bandwidth of the disk in bytes per second."""
        return (1 - FITS) * self.layer_bytes / (DISK * self.seconds)


FULL = Case(layers=64, width=768, seconds=0.006, passes=9)
SMALL = Case(layers=12, width=256, seconds=0.002, passes=5)


class Layer(nn.Linear):
    """A layer that computes for some time, exclusively."""

    computing = threading.Lock()
    seconds = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.computing:
            time.sleep(self.seconds)
        return torch.tanh(super().forward(x))


class Runners:
    """Threads that each run the passes of one model."""

    def __init__(self, case: Case, found: list[nn.Module], way: str) -> None:
        self.ready, self.go = (threading.Barrier(len(found) + 1) for _ in range(2))
        self._case, self._models, self._in_turn = case, found, way == IN_TURN
        self._turn, self._turns = threading.Condition(), 0

    def run(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """Run all passes of one model. Return its latest output."""
        for done in range(self._case.passes):
            if done == LEARNED:
                self.ready.wait()
                self.go.wait()
            with self._alone(number), torch.no_grad():
                output = self._models[number](x).cpu()
        return output

    @contextlib.contextmanager
    def _alone(self, number: int) -> Iterator[None]:
        """With a lock around each pass, let the models run one at a time, in a fixed order."""
        if not self._in_turn:
            yield
            return
        with self._turn:
            self._turn.wait_for(lambda: self._turns % len(self._models) == number)
            yield
            self._turns += 1
            self._turn.notify_all()


def run(case: Case, place: Path, device: str, count: int, way: str) -> Run:
    """Run all models. Return figures per pass of all models."""
    torch.manual_seed(0)
    sizes = case.width, case.width
    found: list[nn.Module] = [
        nn.Sequential(*(Layer(*sizes, bias=False) for _ in range(case.layers)))
        .eval()
        .requires_grad_(False)
        for _ in range(count)
    ]
    x = torch.ones(4, case.width)
    Layer.seconds = 0.0
    with torch.no_grad():
        expected = [model(x) for model in found]
    Layer.seconds = case.seconds
    runners = Runners(case, found, way)
    ram = int(FITS * count * case.layers * case.layer_bytes)
    budgets = {} if device == "cpu" else {"device_budget": ram // 4}
    with (
        tempfile.TemporaryDirectory(dir=place) as scratch,
        TierStore(ram, Path(scratch) / "store", device=device, **budgets) as store,
        contextlib.ExitStack() as offloaded,
        ThreadPoolExecutor(count) as pool,
        slow_disk(case.speed),
    ):
        for model in found:
            offloaded.enter_context(enable_group_offload(model, store, offload_type="leaf_level"))
        running = [pool.submit(runners.run, number, x.to(device)) for number in range(count)]
        runners.ready.wait()
        before, began = store.stats().as_dict(), time.perf_counter()
        runners.go.wait()
        outputs = [each.result() for each in running]
        seconds, after = time.perf_counter() - began, store.stats().as_dict()
    assert all(torch.equal(one, right) for one, right in zip(outputs, expected, strict=True))
    passes = case.passes - LEARNED
    names = ("misses", "late", "bytes_read", "stalled_seconds")
    figures: Run = {name: (after[name] - before[name]) / passes for name in names}
    return figures | {"seconds": seconds / passes}


def measure(bench: Bench) -> Iterator[Claim]:
    torch.set_num_threads(1)
    case = SMALL if bench.small else FULL
    devices = ["cpu"] if pretend.ready() else ["cpu", "pretend"]
    found: dict[tuple[str, int, str], list[Run]] = {}
    for device in devices:
        for count in (2, 4):
            for _ in range(bench.rounds):
                for way in (IN_TURN, TOGETHER):
                    done = run(case, bench.scratch, device, count, way)
                    found.setdefault((device, count, way), []).append(done)
    bench.page.text(
        f"Each model has {case.layers} layers of {case.layer_bytes / 2**20:.2f} MiB, which "
        f"compute for {case.seconds * 1e3:g} ms. The disk reads {case.speed / 1e6:.0f} MB/s."
    )
    columns = {
        "misses": ranged("misses", 1),
        "late": ranged("late", 1),
        "MB read": ranged("bytes_read", 1, 1e-6),
        "s stalled": ranged("stalled_seconds"),
        "s": ranged("seconds"),
    }
    bench.page.compare(("device", "models", "they run"), found, columns)
    for device, count, way in found:
        if way == IN_TURN:
            continue
        sides = [found[device, count, each] for each in (IN_TURN, TOGETHER)]
        misses, nbytes, stalled = (
            [median(column(runs, name)) for runs in sides]
            for name in ("misses", "bytes_read", "stalled_seconds")
        )
        what, uses = f"{device}, {count} models", count * case.layers
        text = f"{what}: misses / (1.15 x those in turn + 1 % of uses)"
        yield Claim(text, misses[1] / (1.15 * misses[0] + uses / 100), at_most=1)
        yield Claim(f"{what}: bytes read / those in turn", nbytes[1] / nbytes[0], at_most=1.1)
        text = f"{what}: seconds stalled / (1.1 x those in turn + 1 % of computing)"
        allowed = 1.1 * stalled[0] + uses * case.seconds / 100
        yield Claim(text, stalled[1] / allowed, at_most=1)
