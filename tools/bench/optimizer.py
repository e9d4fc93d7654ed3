"""A step of AdamW alone: with all of its state in RAM, and with most of it on disk

The parameters have the shapes of a Llama's layers (308 MB in float32), gradients are constant, and
there is no model: the measurement is `OffloadOptimizer.step()`.

In RAM, with a budget of twice the state (parameters, gradients, two states), the reference is a
step of torch's own AdamW with the same arguments, in turns in the same process. On disk, with a
budget of a fifth of the state, the reference is the disk itself: the same bytes, in groups of the
same sizes, are read and written concurrently in the same proportion with direct I/O, by the store's
engine without a store, and by fio (if installed). The fastest of them is the reference. A step also
computes, so the page also lists the duration of the same step in RAM.

Parameters and states must be bit-identical to those of torch's AdamW after equally many steps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tierstore
from tools.bench.disk_mixed import ByFio, Mix, Mixed
from tools.bench.machine import disk_bytes
from tools.bench.models import weight_bytes
from tools.bench.page import Claim
from tools.bench.runner import (
    Bench,
    Run,
    column,
    interleave,
    median,
    middle,
    ranged,
    ratios,
    spread,
)

PACKAGES, ROUNDS = ("torch",), 5
FLAGS: dict[str, dict[str, Any]] = {
    "foreach=False": {"foreach": False},
    "foreach=True": {"foreach": True},
    "fused=True": {"fused": True},
}
"""The first are torch's defaults, the last those of an OffloadOptimizer."""
FASTEST = "fused=True"
"""The arguments with the least computing: its step comes closest to the speed of the disk."""

COPIES = 4
"""State bytes per parameter byte: the value, the gradient and two optimizer states."""

RAM_SHARE, DISK_SHARE = 2.0, 0.2
WARM_UP = 2
"""Uncounted first steps; the first one creates the states."""


@dataclass(frozen=True)
class Case:
    hidden: int
    intermediate: int
    layers: int


FULL = Case(hidden=1024, intermediate=2816, layers=6)
SMALL = Case(hidden=128, intermediate=352, layers=4)


class Layer(nn.Module):
    """The parameters of a Llama layer, without a forward."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        for name in ("query", "key", "value", "output"):
            self.add_module(name, nn.Linear(hidden, hidden, bias=False))
        for name in ("gate", "up"):
            self.add_module(name, nn.Linear(hidden, intermediate, bias=False))
        self.down = nn.Linear(intermediate, hidden, bias=False)
        self.norms = nn.ModuleList([nn.RMSNorm(hidden), nn.RMSNorm(hidden)])


def build(case: Case) -> nn.Module:
    """Return the parameters, always the same."""
    torch.manual_seed(0)
    return nn.ModuleList([Layer(case.hidden, case.intermediate) for _ in range(case.layers)])


def create_gradients(module: nn.Module) -> None:
    """Run a backward pass that leaves gradients, always the same."""
    generator = torch.Generator().manual_seed(1)
    parameters = list(module.parameters())
    given = [torch.randn(p.shape, generator=generator) for p in parameters]
    torch.autograd.backward(parameters, given)


class Stepping:
    """Parameters with gradients, and an optimizer: torch's own, or ours.

    Ours is in a store with RAM for the share `share` of the state.
    """

    def __init__(self, case: Case, flags: str, share: float = 0, place: Path | None = None) -> None:
        self.module, self.store = build(case), None
        self.optimizer: Any
        if place is None:
            self.optimizer = torch.optim.AdamW(self.module.parameters(), **FLAGS[flags])
        else:
            self.budget = int(COPIES * weight_bytes(self.module) * share)
            self.store = tierstore.TierStore(self.budget, place, device="cpu")
            self.module = tierstore.OffloadModel(self.module, self.store)
            self.optimizer = tierstore.OffloadOptimizer(
                self.module, self.store, torch.optim.AdamW, **FLAGS[flags]
            )
        create_gradients(self.module)
        for _ in range(WARM_UP):
            self.step()

    def step(self) -> Run:
        """Run one step. Return its seconds, and the bytes that the store and the system count.

        `reading` and `writing` are the seconds with transfers in flight.
        """
        before, counted = self._counts(), sum(disk_bytes())
        started = time.perf_counter()
        self.optimizer.step()
        seconds = time.perf_counter() - started
        step = {name: after - before[name] for name, after in self._counts().items()}
        step |= {"seconds": seconds, "counted": sum(disk_bytes()) - counted}
        return step | {"speed": (step["read"] + step["written"]) / seconds}

    def _counts(self) -> Run:
        if self.store is None:
            return dict.fromkeys(("read", "written", "reading", "writing"), 0)
        stats = self.store.stats()
        busy = stats.busy_seconds.get
        counts: Run = {"read": stats.bytes_read, "written": stats.bytes_written}
        return counts | {"reading": busy("DISK>HOST", 0.0), "writing": busy("HOST>DISK", 0.0)}

    def streaming(self) -> list[int]:
        """Return the bytes of each streaming group."""
        buffers = [buffer for tile in self.optimizer._tiles for buffer in tile.buffers()]
        return [buffer.nbytes for buffer in buffers if not buffer.host_resident]

    def values(self) -> Iterator[torch.Tensor]:
        """Yield parameters and states."""
        for parameter in self.module.parameters():
            yield parameter.detach()
            yield from (self.optimizer.state[parameter][n] for n in ("exp_avg", "exp_avg_sq"))

    def equals(self, other: Stepping) -> bool:
        """Return True if all parameters and states are bit-identical."""
        return all(map(torch.equal, self.values(), other.values()))

    def close(self) -> None:
        if self.store is not None:
            self.store.close()


def in_ram(case: Case, flags: str, rounds: int, place: Path) -> Run:
    """Run steps of torch's optimizer and of ours in turns, with all state in RAM."""
    plain, ours = Stepping(case, flags), Stepping(case, flags, RAM_SHARE, place)
    with ExitStack() as stack:
        stack.callback(ours.close)
        found = interleave({"plain": plain.step, "ours": ours.step}, rounds)
        equal = ours.equals(plain)
    seconds = {name: column(steps, "seconds") for name, steps in found.items()}
    return seconds | {
        "ratios": ratios(seconds["ours"], seconds["plain"]),
        "moved": sum(column(found["ours"], "counted")),
        "equal": equal,
    }


@dataclass
class OnDisk:
    """Steps by their arguments, and the speeds of the disk alone, the best of which counts."""

    parameters: int
    budget: int
    groups: list[int]
    steps: dict[str, list[Run]]
    rates: dict[str, list[float]]
    equal: dict[str, bool]

    @property
    def best(self) -> list[float]:
        return max(self.rates.values(), key=median)

    def to_disk(self, flags: str) -> list[float]:
        """Return the ratios of the bandwidths of steps and of the disk, round by round."""
        return ratios(column(self.steps[flags], "speed"), self.best)


def on_disk(case: Case, bench: Bench) -> OnDisk:
    """Run steps with most of the state on disk, and measure the disk, in turns."""
    place = bench.scratch
    with ExitStack() as stack:
        ours: dict[str, Stepping] = {}
        for number, flags in enumerate(FLAGS):
            ours[flags] = Stepping(case, flags, DISK_SHARE, place / f"disk-{number}")
            stack.callback(ours[flags].close)
        probe = {flags: each.step() for flags, each in ours.items()}[FASTEST]
        groups = ours[FASTEST].streaming()
        mix = Mix(groups, probe["written"] / max(probe["read"], 1))
        disks = Mixed(place / "engine", mix), ByFio(place / "fio", mix)
        sides: dict[str, Callable[[], Any]] = {name: each.step for name, each in ours.items()}
        for disk in disks:
            stack.callback(disk.close)
            sides |= disk.runs()
        results = bench.turns(sides, cold=True)
        steps = {name: results.pop(name) for name in ours}
        rates = {name: [rate.speed for rate in each] for name, each in results.items()}
        equal = {}
        for flags, each in ours.items():
            plain = Stepping(case, flags)
            for _ in range(1 + bench.rounds):
                plain.step()
            equal[flags] = each.equals(plain)
        one = ours[FASTEST]
        return OnDisk(weight_bytes(one.module), one.budget, groups, steps, rates, equal)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, help="number of layers (51 MB each)")


def measure(bench: Bench) -> Iterator[Claim]:
    page, case = bench.page, SMALL if bench.small else FULL
    case = replace(case, layers=bench.options.layers or case.layers)
    ram = {f: in_ram(case, f, bench.rounds, bench.scratch / f"ram-{f}") for f in FLAGS}
    page.text(f"## All in RAM: a budget of {RAM_SHARE:g} times the state")
    columns: dict[str, Callable[[Any], object]] = {
        "torch, s": lambda one: spread(one["plain"], 3),
        "tierstore, s": lambda one: spread(one["ours"], 3),
        "tierstore / torch": lambda one: spread(one["ratios"]),
        "values": lambda one: "equal" if one["equal"] else "DIFFER",
    }
    page.compare("AdamW with", ram, columns)
    disk = on_disk(case, bench)
    page.text(f"## On disk: a budget of {DISK_SHARE:g} times the state")
    page.text(
        f"{disk.parameters / 1e6:,.0f} MB of parameters, {COPIES * disk.parameters / 1e6:,.0f} MB "
        f"of state, a budget of {disk.budget / 1e6:,.0f} MB. {len(disk.groups)} groups of "
        f"{min(disk.groups) / 1e6:,.1f} to {max(disk.groups) / 1e6:,.1f} MB are on disk, "
        f"{sum(disk.groups) / 1e6:,.0f} MB in all; the rest stays in RAM. The bytes of a step are "
        "per byte of the parameters."
    )

    def of(steps: list[Run], *names: str) -> float:
        return sum(median(column(steps, name)) for name in names)

    rows = {flags: (flags, steps) for flags, steps in disk.steps.items()}
    by_bytes = 1 / disk.parameters
    columns = {
        "a step, s": lambda one: ranged("seconds")(one[1]),
        "disk alone, s": lambda one: f"{of(one[1], 'read', 'written') / median(disk.best):.2f}",
        "the step in RAM, s": lambda one: f"{median(ram[one[0]]['ours']):.2f}",
        "reading, writing, s": lambda one: ", ".join(
            f"{of(one[1], name):.2f}" for name in ("reading", "writing")
        ),
        "read": lambda one: middle("read", 2, by_bytes)(one[1]),
        "written": lambda one: middle("written", 2, by_bytes)(one[1]),
        "both, counted by the system": lambda one: middle("counted", 2, by_bytes)(one[1]),
        "GB/s": lambda one: middle("speed", 2, 1e-9)(one[1]),
        "bandwidth / disk alone": lambda one: spread(disk.to_disk(one[0])),
        "values": lambda one: "equal" if disk.equal[one[0]] else "DIFFER",
    }
    page.compare("AdamW with", rows, columns)
    page.text("The disk alone, with the same bytes read and written concurrently:")
    by_name = {n: spread([speed / 1e9 for speed in speeds]) for n, speeds in disk.rates.items()}
    page.table(("by", "GB/s"), by_name.items())
    for flags, each in ram.items():
        text = f"in RAM with {flags}: time / torch's time"
        yield Claim(text, median(each["ratios"]), at_most=1.15)
    share = median(disk.to_disk(FASTEST))
    yield Claim(f"on disk with {FASTEST}: bandwidth / that of the disk", share, at_least=0.85)
    equal = all(each["equal"] for each in ram.values()) and all(disk.equal.values())
    yield Claim("parameters and states are bit-identical to torch's", float(equal), at_least=1)
    moved = sum(each["moved"] for each in ram.values())
    yield Claim("everything fits: bytes read and written on disk", moved, at_most=0)
