"""Models on threads of their own, in one store: what they miss, read and wait for

    python tools/bench/models_on_threads.py [--small] [--rounds N] [--dir DIR] [--markdown FILE]

Each model runs on its own thread, pass after pass, as the threads happen to come; and, to compare,
with one lock around each pass. RAM has room for two fifths of all weights. A layer computes for
some milliseconds, and no two layers do at the same time, as models share a device or the cores.
The disk is slowed down: to read what does not fit takes a part of the time of computing. So nobody
has to wait, if what comes next is foretold. Told are misses, bytes read and seconds stalled, per
pass of all models, from the fourth pass on. `late` are uses of what was on its way.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
from torch import nn

from tests.device import pretend
from tierstore import TierStore, enable_group_offload
from tools.bench import machine
from tools.bench.report import Claim, Page
from tools.bench.slowed import slow_disk

LEARNED = 3
"""Passes of each model that are not counted."""
FITS = 0.4
"""The part of all weights that RAM has room for."""
TOGETHER, IN_TURN = "as they come", "one lock around each pass"


@dataclass(frozen=True)
class Case:
    """Models of so many layers with `width` squared float32 weights, which compute for `seconds`
    each. What has to be read takes the `disk` this part of the time of computing."""

    layers: int
    width: int
    seconds: float
    passes: int
    rounds: int
    disk: float = 0.7

    @property
    def layer_bytes(self) -> int:
        return self.width**2 * 4

    @property
    def speed(self) -> float:
        """Bytes per second that the disk reads."""
        return (1 - FITS) * self.layer_bytes / (self.disk * self.seconds)


FULL = Case(layers=64, width=768, seconds=0.006, passes=9, rounds=3)
SMALL = Case(layers=12, width=256, seconds=0.002, passes=5, rounds=1)


class Layer(nn.Linear):
    """A layer that computes for some time, in which no other does."""

    computing = threading.Lock()
    seconds = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.computing:
            time.sleep(self.seconds)
        return torch.tanh(super().forward(x))


@dataclass
class Passes:
    """Of a pass of all models."""

    misses: float
    late: float
    nbytes: float
    stalled: float
    seconds: float


def models(case: Case, count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    layers = [
        nn.Sequential(*(Layer(case.width, case.width, bias=False) for _ in range(case.layers)))
        for _ in range(count)
    ]
    return [each.eval().requires_grad_(False) for each in layers]


class Runners:
    """The threads of models that run so many passes each."""

    def __init__(self, case: Case, found: list[nn.Module], way: str) -> None:
        self.ready, self.go = (threading.Barrier(len(found) + 1) for _ in range(2))
        self._case, self._models, self._in_turn = case, found, way == IN_TURN
        self._turn, self._turns = threading.Condition(), 0

    def run(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """All passes of one model. Returns its latest output."""
        for done in range(self._case.passes):
            if done == LEARNED:
                self.ready.wait()
                self.go.wait()
            with self._alone(number), torch.no_grad():
                output = self._models[number](x).cpu()
        return output

    @contextlib.contextmanager
    def _alone(self, number: int) -> Iterator[None]:
        """With a lock around each pass, the models come one after the other, in the same order."""
        if not self._in_turn:
            yield
            return
        with self._turn:
            self._turn.wait_for(lambda: self._turns % len(self._models) == number)
            yield
            self._turns += 1
            self._turn.notify_all()


def run(case: Case, place: Path, device: str, count: int, way: str) -> Passes:
    found, x = models(case, count), torch.ones(4, case.width)
    with torch.no_grad():
        expected = [model(x) for model in found]
    computing = threading.Lock()
    for layer in (layer for model in found for layer in model):
        layer.computing, layer.seconds = computing, case.seconds
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
        before, began = store.stats(), time.perf_counter()
        runners.go.wait()
        outputs = [each.result() for each in running]
        seconds, after = time.perf_counter() - began, store.stats()
    assert all(torch.equal(one, right) for one, right in zip(outputs, expected, strict=True))
    passes = case.passes - LEARNED
    return Passes(
        (after.misses - before.misses) / passes,
        (after.late - before.late) / passes,
        (after.bytes_read - before.bytes_read) / passes,
        (after.stalled_seconds - before.stalled_seconds) / passes,
        seconds / passes,
    )


Found = dict[tuple[str, int, str], list[Passes]]


def measure(case: Case, place: Path, rounds: int, devices: list[str]) -> Found:
    """All devices and numbers of models, both ways interleaved."""
    found: Found = {}
    for device in devices:
        for count in (2, 4):
            for _ in range(rounds):
                for way in (IN_TURN, TOGETHER):
                    done = run(case, place, device, count, way)
                    found.setdefault((device, count, way), []).append(done)
    return found


def rows(found: Found) -> Iterator[list[str]]:
    for (device, count, way), passes in found.items():
        yield [
            device,
            f"{count}",
            way,
            machine.spread([one.misses for one in passes], 1),
            machine.spread([one.late for one in passes], 1),
            machine.spread([one.nbytes / 1e6 for one in passes], 1),
            machine.spread([one.stalled for one in passes]),
            machine.spread([one.seconds for one in passes]),
        ]


def claims(case: Case, found: Found) -> Iterator[Claim]:
    for device, count, way in found:
        if way == IN_TURN:
            continue
        both = [found[device, count, each] for each in (IN_TURN, TOGETHER)]
        misses, nbytes, stalled = (
            [machine.median(getattr(one, name) for one in passes) for passes in both]
            for name in ("misses", "nbytes", "stalled")
        )
        what = f"{device}, {count} models"
        uses, seconds = count * case.layers, count * case.layers * case.seconds
        yield Claim(
            f"{what}: misses, by 1.15 times those in turn, and one in a hundred uses",
            misses[1] / (1.15 * misses[0] + uses / 100),
            at_most=1,
        )
        yield Claim(f"{what}: bytes read, by those in turn", nbytes[1] / nbytes[0], at_most=1.1)
        yield Claim(
            f"{what}: seconds stalled, by 1.1 times those in turn, and a hundredth of computing",
            stalled[1] / (1.1 * stalled[0] + seconds / 100),
            at_most=1,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a little of it: does it run?")
    parser.add_argument("--rounds", type=int, help="how often each way runs")
    parser.add_argument("--dir", type=Path, help="where files are kept meanwhile")
    parser.add_argument("--markdown", type=Path, help="write the page here too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    case = SMALL if options.small else FULL
    devices = ["cpu"] if pretend.ready() else ["cpu", "pretend"]
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-", dir=options.dir) as scratch:
        page = Page(__doc__, Path(scratch), ("torch",))
        found = measure(case, Path(scratch), options.rounds or case.rounds, devices)
        page.text(
            f"Each model has {case.layers} layers of {case.layer_bytes / 2**20:.2f} MiB, which "
            f"compute for {case.seconds * 1e3:g} ms. The disk reads {case.speed / 1e6:.0f} MB/s."
        )
        columns = ("device", "models", "they run", "misses", "late", "MB read", "s stalled", "s")
        page.table(columns, rows(found))
        page.claims(claims(case, found))
        page.write(options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
