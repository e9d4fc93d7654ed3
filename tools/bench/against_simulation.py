"""Steps of a loop as the engine takes them, against the same steps simulated

    python tools/bench/against_simulation.py [--small] [--rounds N] [--dir DIR] [--markdown FILE]

The model has the units of a transformer of FLUX.1-dev's shape, and a fraction of its bytes. The
device, the link and the disk have the memory and the speeds of an H100 and of the disk beside it,
divided by the same number, and so are the bytes that groups have at most. So a step takes as long
as there, and each unit as long as its bytes are of all; what the engine does for a unit weighs as
much as it does there. The device is the pretend accelerator of the tests: its kernels compute
nothing and take their time, and it works on threads of its own. The simulation is what
`tierstore-inspect plan` says of the same file.

Seconds are those of whole runs of some steps, which begin once a plan is followed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.device import pretend
from tests.helpers.processes import output_of
from tierstore import TierStore, enable_group_offload
from tierstore.engine import loop_runner
from tierstore.model import outline, sizes
from tierstore.system import files
from tools.bench import machine
from tools.bench.loop_shapes import H100, TO_DEVICE, TO_HOST
from tools.bench.report import Claim, Page
from tools.bench.slowed import slow_disk

WIDTH = 3072
COMPUTING = 0.168
"""Seconds of a step with all weights on the device."""
DEVICE_SHARE = 12 / 23.73
"""Memory of the device, by the weights."""
LEARNED = 12
"""Steps after a plan was entered that are not counted: it may be left for a better one."""
SHARES = {"all": 1.1, "half": 0.5, "a quarter": 0.25}
"""RAM, as a share of the weights."""
AT_MOST = 1.05


@dataclass(frozen=True)
class Case:
    """Weights are `smaller` times as wide and as high as those of FLUX.1-dev."""

    double: int
    single: int
    smaller: int
    steps: int
    rounds: int

    @property
    def by_bytes(self) -> int:
        return self.smaller**2


FULL = Case(double=19, single=38, smaller=8, steps=10, rounds=5)
SMALL = Case(double=3, single=6, smaller=16, steps=3, rounds=1)


def cut_in_proportion(by: int) -> None:
    """Have groups and slots in this process that are so many times smaller than they would be."""
    for name in ("WELL_READ", "LARGEST_GROUP", "LINK_GROUP", "LARGEST_LEAF_GROUP"):
        setattr(outline, name, getattr(outline, name) // by)
    loop_runner.READ_BLOCK = files.READ_BLOCK // by
    sizes._FINE_FROM //= by
    sizes._FINE_STEP = sizes.PAGE


class Timed(nn.Linear):
    """A layer that computes nothing, and takes as long as its bytes are of all."""

    seconds_per_byte = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nbytes = self.weight.nbytes + self.bias.nbytes
        pretend.occupy(nbytes * self.seconds_per_byte)
        return x


class Parts(nn.Module):
    """Its children, one after the other."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for child in self.children():
            x = child(x)
        return x


class Transformer(nn.Module):
    """The blocks of Flux, by the names of its files."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        w = WIDTH // case.smaller

        def stream() -> Parts:
            return Parts(
                modulation=Timed(w, 6 * w),
                qkv=Timed(w, 3 * w),
                out=Timed(w, w),
                wide=Timed(w, 4 * w),
                narrow=Timed(4 * w, w),
            )

        def single() -> Parts:
            return Parts(
                modulation=Timed(w, 3 * w),
                qkv=Timed(w, 3 * w),
                wide=Timed(w, 4 * w),
                out=Timed(5 * w, w),
            )

        double = (Parts(image=stream(), text=stream()) for _ in range(case.double))
        self.transformer_blocks = nn.ModuleList(double)
        self.single_transformer_blocks = nn.ModuleList(single() for _ in range(case.single))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.transformer_blocks, *self.single_transformer_blocks):
            x = block(x)
        return x


def transformer(case: Case) -> Transformer:
    with torch.device("meta"):
        return Transformer(case).requires_grad_(False).bfloat16()


def checkpoint(case: Case, directory: Path) -> tuple[Path, int]:
    """A file of weights, and their bytes."""
    path = directory / "model.safetensors"
    weights = {
        name: torch.zeros(weight.shape, dtype=weight.dtype)
        for name, weight in transformer(case).state_dict().items()
    }
    save_file(weights, path)
    return path, sum(weight.nbytes for weight in weights.values())


@dataclass(frozen=True)
class Steps:
    """Of one run, by step."""

    seconds: float
    read: float  # bytes
    onloaded: float  # bytes


@dataclass(frozen=True)
class Cell:
    """A model of `nbytes`, in a store with RAM for a share of them."""

    case: Case
    path: Path
    nbytes: int
    share: float

    @property
    def computing(self) -> float:
        """Seconds of a step with all weights on the device."""
        of_all = sum(weight.nbytes for weight in transformer(FULL).parameters())
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

    def simulated(self) -> Steps:
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
            "from tools.bench.against_simulation import cut_in_proportion\n"
            f"cut_in_proportion({self.case.by_bytes})\n"
            "from tierstore.cli import main\nmain()"
        )
        printed = output_of("-c", script, "plan", self.path, *words, "--json", timeout=300)
        step = json.loads(printed)["plans"][0]["steps"][0]
        return Steps(step["seconds"], step["read"], step["onloaded"])

    def measured(self, scratch: Path, rounds: int) -> list[Steps]:
        """Runs, once a plan is followed."""
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
def run(store: TierStore, model: nn.Module, steps: int) -> Steps:
    x = torch.ones(1, device="pretend")
    torch.accelerator.synchronize(0)
    before, began = store.stats(), time.perf_counter()
    for _ in range(steps):
        model(x)
    torch.accelerator.synchronize(0)
    seconds, after = time.perf_counter() - began, store.stats()
    return Steps(
        seconds / steps,
        (after.bytes_read - before.bytes_read) / steps,
        (after.bytes_onloaded - before.bytes_onloaded) / steps,
    )


Found = dict[str, tuple[Steps, list[Steps]]]


def rows(found: Found) -> Iterator[list[str]]:
    for name, (simulated, runs) in found.items():
        yield [
            name,
            f"{simulated.seconds:.3f}",
            machine.spread([one.seconds for one in runs], 3),
            machine.spread([one.seconds / simulated.seconds for one in runs], 3),
            f"{simulated.read / 1e6:.1f} / {runs[-1].read / 1e6:.1f}",
            f"{simulated.onloaded / 1e6:.1f} / {runs[-1].onloaded / 1e6:.1f}",
        ]


def claims(found: Found) -> Iterator[Claim]:
    for name, (simulated, runs) in found.items():
        took = machine.median(one.seconds for one in runs) / simulated.seconds
        text = f"RAM for {name} of the weights: at most {AT_MOST} times the simulated step"
        yield Claim(text, took, at_most=AT_MOST)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a little of it: does it run?")
    parser.add_argument("--rounds", type=int, help="runs of each cell")
    parser.add_argument("--dir", type=Path, help="where the file with the weights is kept")
    parser.add_argument("--markdown", type=Path, help="write the page here too")
    options = parser.parse_args()
    if reason := pretend.ready():
        print(f"Nothing was measured: {reason}.")
        return 0
    torch.set_num_threads(1)
    case = SMALL if options.small else FULL
    cut_in_proportion(case.by_bytes)
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-", dir=options.dir) as scratch:
        place = Path(scratch)
        page = Page(__doc__, place, ("torch",))
        path, nbytes = checkpoint(case, place)
        found: Found = {}
        for name, share in SHARES.items():
            cell, directory = Cell(case, path, nbytes, share), place / name.replace(" ", "-")
            found[name] = cell.simulated(), cell.measured(directory, options.rounds or case.rounds)
        page.text(
            f"{nbytes / 1e6:.0f} MB of weights, {DEVICE_SHARE:.0%} of which the device has room "
            f"for; all speeds are divided by {case.by_bytes}."
        )
        page.table(
            (
                "RAM for",
                "simulated, s",
                "measured, s",
                "measured / simulated",
                "MB read",
                "MB onloaded",
            ),
            rows(found),
        )
        page.claims(claims(found))
        page.write(options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
