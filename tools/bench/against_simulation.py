"""Measured steps of a planned loop, against the simulation

The model has the units of FLUX.1-dev's transformer and a fraction of its bytes. The memory and
bandwidths of an H100, its link and its disk are divided by the same number, and so is the largest
size of groups. So a step takes as long as on the H100, each unit in proportion to its bytes, and
the engine's overhead per unit has the same weight. The device is the pretend accelerator of the
tests: its kernels only wait, on separate threads. The simulation is that of `tierstore-inspect
plan` for the same file.

Seconds are those of runs of several steps, which begin once a plan is followed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.device import pretend
from tests.helpers.processes import output_of
from tierstore import TierStore, enable_group_offload
from tierstore.engine import loop_runner
from tierstore.model import outline, sizes
from tierstore.system import files
from tools.bench import loop_shapes
from tools.bench.loop_shapes import H100, TO_DEVICE, TO_HOST
from tools.bench.models import weight_bytes
from tools.bench.page import Claim
from tools.bench.runner import Bench, Run, column, median, spread
from tools.bench.slowed import slow_disk

PACKAGES, ROUNDS, PRETEND = ("torch",), 5, True
COMPUTING = 0.168
"""Seconds of a step with all weights on the device."""
DEVICE_SHARE = 12 / 23.73
"""Memory of the device, as a share of the weights."""
LEARNED = 12
"""Uncounted steps after the first plan is followed, since a better plan may replace it."""
SHARES = {"all": 1.1, "half": 0.5, "a quarter": 0.25}
"""RAM, as a share of the weights."""
AT_MOST = 1.05


@dataclass(frozen=True)
class Case:
    """A model whose weights have 1/`smaller` of the width and height of those of FLUX.1-dev."""

    double: int
    single: int
    smaller: int
    steps: int

    @property
    def by_bytes(self) -> int:
        return self.smaller**2


FULL = Case(double=19, single=38, smaller=8, steps=10)
SMALL = Case(double=3, single=6, smaller=16, steps=3)


def scale_down_groups(by: int) -> None:
    """Divide the sizes of groups and slots in this process by `by`."""
    groups = ("EFFICIENT_READ", "LARGEST_GROUP", "LINK_GROUP", "LARGEST_LEAF_GROUP")
    for name in (*groups, "TILE", "LEAST_TILE"):
        setattr(outline, name, getattr(outline, name) // by)
    loop_runner.READ_BLOCK = files.READ_BLOCK // by
    sizes._FINE_FROM //= by
    sizes._FINE_STEP = sizes.PAGE


class Parts(nn.Module):
    """Runs its children in sequence."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for child in self.children():
            x = child(x)
        return x


class Timed(nn.Module):
    """A layer that only waits, for its share of the model's bytes."""

    seconds_per_byte = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pretend.occupy(weight_bytes(self) * self.seconds_per_byte)
        return x


class Transformer(nn.Module):
    """The blocks of Flux, with the tensor names of its files."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        width = loop_shapes.FLUX_WIDTH // case.smaller
        for tensor in loop_shapes.flux(width, case.double, case.single).tensors:
            at: nn.Module = self
            *path, name = tensor.name.split(".")
            for depth, part in enumerate(path):
                if part not in at._modules:
                    kinds = Timed if depth == len(path) - 1 else Parts if depth else nn.ModuleList
                    at.add_module(part, kinds())
                at = at.get_submodule(part)
            weight = torch.empty(tensor.shape, dtype=torch.bfloat16)
            at.register_parameter(name, nn.Parameter(weight, requires_grad=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (block for blocks in self.children() for block in blocks.children()):
            x = block(x)
        return x


def transformer(case: Case) -> Transformer:
    with torch.device("meta"):
        return Transformer(case)


@dataclass(frozen=True)
class Cell:
    """A model of `nbytes` bytes, in a store with RAM for a share of them."""

    case: Case
    path: Path
    nbytes: int
    share: float

    @property
    def computing(self) -> float:
        """Seconds of a step with all weights on the device."""
        of_all = weight_bytes(transformer(FULL))
        return COMPUTING * self.nbytes * self.case.by_bytes / (of_all * FULL.by_bytes)

    @property
    def ram(self) -> int:
        return int(self.share * self.nbytes)

    @property
    def device(self) -> int:
        return int(DEVICE_SHARE * self.nbytes)

    @property
    def link(self) -> float:
        return H100[TO_DEVICE] / self.case.by_bytes

    @property
    def disk(self) -> float:
        return H100[TO_HOST] / self.case.by_bytes

    def simulated(self) -> Run:
        options: dict[str, object] = {
            "--ram": f"{self.ram}B",
            "--device": f"{self.device}B",
            "--compute": self.computing,
            "--link-bandwidth": f"{self.link:.0f}B/s",
            "--disk-bandwidth": f"{self.disk:.0f}B/s",
            "--steps": 200,
        }
        words = [str(word) for pair in options.items() for word in pair]
        script = (
            "from tools.bench.against_simulation import scale_down_groups\n"
            f"scale_down_groups({self.case.by_bytes})\n"
            "from tierstore.cli import main\nmain()"
        )
        printed = output_of("-c", script, "plan", self.path, *words, "--json", timeout=300)
        step = json.loads(printed)["plans"][0]["steps"][0]
        return dict(step)

    def measured(self, scratch: Path, rounds: int) -> list[Run]:
        """Run the model, once a plan is followed. Return the figures of each run."""
        Timed.seconds_per_byte = self.computing / self.nbytes
        pretend.set_link_speed(self.link)
        with (
            slow_disk(self.disk),
            pretend.working(),
            TierStore(
                self.ram, scratch / "store", device="pretend", device_budget=self.device
            ) as store,
        ):
            model = transformer(self.case)
            model.load_state_dict(load_file(self.path), assign=True)
            enable_group_offload(model, store)
            while not store.stats().followed_seconds:
                run(store, model, 1)
            run(store, model, LEARNED)
            return [run(store, model, self.case.steps) for _ in range(rounds)]


@torch.no_grad()
def run(store: TierStore, model: nn.Module, steps: int) -> Run:
    """Run some steps. Return figures per step."""
    x = torch.ones(1, device="pretend")
    torch.accelerator.synchronize(0)
    before, began = store.stats(), time.perf_counter()
    for _ in range(steps):
        model(x)
    torch.accelerator.synchronize(0)
    seconds, after = time.perf_counter() - began, store.stats()
    return {
        "seconds": seconds / steps,
        "read": (after.bytes_read - before.bytes_read) / steps,
        "onloaded": (after.bytes_onloaded - before.bytes_onloaded) / steps,
    }


def measure(bench: Bench) -> Iterator[Claim]:
    torch.set_num_threads(1)
    case, path = SMALL if bench.small else FULL, bench.scratch / "model.safetensors"
    scale_down_groups(case.by_bytes)
    weights = {
        name: torch.zeros(weight.shape, dtype=weight.dtype)
        for name, weight in transformer(case).state_dict().items()
    }
    save_file(weights, path)
    nbytes = weight_bytes(transformer(case))
    found = {}
    for name, share in SHARES.items():
        cell = Cell(case, path, nbytes, share)
        runs = cell.measured(bench.scratch / name.replace(" ", "-"), bench.rounds)
        found[name] = cell.simulated(), runs
    bench.page.text(
        f"{nbytes / 1e6:.0f} MB of weights; the device holds {DEVICE_SHARE:.0%} of them; all "
        f"speeds are divided by {case.by_bytes}."
    )

    def both(name: str) -> Callable[[tuple[Run, list[Run]]], str]:
        return lambda one: f"{one[0][name] / 1e6:.1f} / {one[1][-1][name] / 1e6:.1f}"

    def ratios(one: tuple[Run, list[Run]]) -> list[float]:
        return [run["seconds"] / one[0]["seconds"] for run in one[1]]

    columns: dict[str, Callable[[tuple[Run, list[Run]]], object]] = {
        "simulated, s": lambda one: f"{one[0]['seconds']:.3f}",
        "measured, s": lambda one: spread(column(one[1], "seconds"), 3),
        "measured / simulated": lambda one: spread(ratios(one), 3),
        "MB read": both("read"),
        "MB onloaded": both("onloaded"),
    }
    bench.page.compare("RAM for", found, columns)
    for name, one in found.items():
        text = f"RAM for {name} of the weights: time of a step / simulated"
        yield Claim(text, median(ratios(one)), at_most=AT_MOST)
