"""A step of AdamW by itself: with all of its state in RAM, and with most of it on disk

    python tools/bench/optimizer.py [--small] [--layers N] [--rounds N] [--dir DIR] [--markdown M]

The parameters have the shapes of a Llama's layers (308 MB in float32), gradients do not change, and
there is no model around: what is measured is `OffloadOptimizer.step()`.

In RAM, with a budget of twice the state (parameters, gradients, two states), against the step of
torch's own AdamW with the same arguments, in the same process, in turns. On disk, with a budget of
a fifth of the state, against the disk itself: as many bytes, in groups of the same sizes, are read
and written at the same time and in the same proportion, past the page cache, by the store's engine
without a store, and by fio (where it is installed). Whichever is fastest is the reference. A step
also computes, so beside it stands how long the same step takes in RAM.

Parameters and states are compared with those of torch's AdamW after as many steps, bit by bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
from torch import nn

import tierstore
from tools.bench import fio, machine
from tools.bench.disk_mixed import ByFio, Mix, Mixed
from tools.bench.report import Claim, Page

FLAGS: dict[str, dict[str, Any]] = {
    "foreach=False": {"foreach": False},
    "foreach=True": {"foreach": True},
    "fused=True": {"fused": True},
}
"""The first is what torch's own does without any, the last what an OffloadOptimizer does."""
FASTEST = "fused=True"
"""The one that computes the least: its step is as fast as the disk, if any is."""

COPIES = 4
"""Of each parameter: its value, its gradient, two states."""

RAM_SHARE, DISK_SHARE = 2.0, 0.2
WARM_UP = 2
"""Steps before the first that counts: the first one makes the states."""


@dataclass(frozen=True)
class Case:
    hidden: int
    intermediate: int
    layers: int
    rounds: int
    rounds_on_disk: int


FULL = Case(hidden=1024, intermediate=2816, layers=6, rounds=9, rounds_on_disk=5)
SMALL = Case(hidden=128, intermediate=352, layers=4, rounds=1, rounds_on_disk=1)


class Layer(nn.Module):
    """What a layer of a Llama has. It does not run."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        for name in ("query", "key", "value", "output"):
            self.add_module(name, nn.Linear(hidden, hidden, bias=False))
        for name in ("gate", "up"):
            self.add_module(name, nn.Linear(hidden, intermediate, bias=False))
        self.down = nn.Linear(intermediate, hidden, bias=False)
        self.norms = nn.ModuleList([nn.RMSNorm(hidden), nn.RMSNorm(hidden)])


def build(case: Case) -> nn.Module:
    """The parameters, always the same."""
    torch.manual_seed(0)
    return nn.ModuleList([Layer(case.hidden, case.intermediate) for _ in range(case.layers)])


def parameter_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def give_gradients(module: nn.Module) -> None:
    """Have a backward pass leave gradients, always the same."""
    generator = torch.Generator().manual_seed(1)
    parameters = list(module.parameters())
    given = [torch.randn(p.shape, generator=generator) for p in parameters]
    torch.autograd.backward(parameters, given)


# --- contenders -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One step. Bytes are those that the store says it moved, and those that the system counts;
    `reading` and `writing` are the seconds in which anything was on its way."""

    seconds: float
    read: int = 0
    written: int = 0
    counted: int = 0
    reading: float = 0.0
    writing: float = 0.0

    @property
    def speed(self) -> float:
        """Bytes per second, both ways."""
        return (self.read + self.written) / self.seconds


class Stepping:
    """Parameters with gradients, and an optimizer."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module = module
        self.optimizer = optimizer
        give_gradients(module)
        for _ in range(WARM_UP):
            self.step()

    def step(self) -> Step:
        """One step."""
        started = time.perf_counter()
        self.optimizer.step()
        return Step(time.perf_counter() - started)

    def values(self) -> Iterator[torch.Tensor]:
        """Parameters and states."""
        for parameter in self.module.parameters():
            yield parameter.detach()
            yield from (self.optimizer.state[parameter][n] for n in ("exp_avg", "exp_avg_sq"))

    def equals(self, other: Stepping) -> bool:
        """Whether both have come to the same, to the last bit."""
        return all(map(torch.equal, self.values(), other.values()))


class Plain(Stepping):
    """torch's own."""

    def __init__(self, case: Case, flags: Mapping[str, Any]) -> None:
        module = build(case)
        super().__init__(module, torch.optim.AdamW(module.parameters(), **flags))


class Ours(Stepping):
    """The same in a store that may have so much of the state in RAM."""

    def __init__(self, case: Case, flags: Mapping[str, Any], share: float, place: Path) -> None:
        module = build(case)
        self.budget = int(COPIES * parameter_bytes(module) * share)
        self.store = tierstore.TierStore(self.budget, place, device="cpu")
        model = tierstore.OffloadModel(module, self.store)
        optimizer = tierstore.OffloadOptimizer(model, self.store, torch.optim.AdamW, **flags)
        self._tiles = optimizer._tiles
        super().__init__(model, optimizer)

    def step(self) -> Step:
        """One step, and what it moved."""
        before, counted = self.store.stats(), disk_bytes()
        step = super().step()
        after = self.store.stats()
        busy = (
            after.busy_seconds.get(way, 0.0) - before.busy_seconds.get(way, 0.0)
            for way in ("DISK>HOST", "HOST>DISK")
        )
        return Step(
            step.seconds,
            after.bytes_read - before.bytes_read,
            after.bytes_written - before.bytes_written,
            disk_bytes() - counted,
            *busy,
        )

    def streaming(self) -> list[int]:
        """Bytes of the groups that do not stay in RAM."""
        buffers = [buffer for tile in self._tiles for buffer in tile.buffers()]
        return [buffer.nbytes for buffer in buffers if not buffer.host_resident]

    def close(self) -> None:
        """End it."""
        self.store.close()


def disk_bytes() -> int:
    """Bytes that the system says this process had the disk read and write."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]) + int(lines["write_bytes"])


# --- in RAM ---------------------------------------------------------------------------------------


@dataclass
class InRam:
    """Seconds of all steps with the same arguments, and whether both came to the same."""

    plain: list[float]
    ours: list[float]
    equal: bool
    moved: int

    @property
    def ratios(self) -> list[float]:
        return machine.ratios(self.ours, self.plain)


def in_ram(case: Case, flags: str, place: Path) -> InRam:
    plain = Plain(case, FLAGS[flags])
    ours = Ours(case, FLAGS[flags], RAM_SHARE, place / "ram")
    try:
        runs: dict[str, Callable[[], Step]] = {"plain": plain.step, "ours": ours.step}
        found = machine.interleave(runs, case.rounds, doing=f"In RAM, {flags}")
        seconds = {name: [step.seconds for step in steps] for name, steps in found.items()}
        moved = sum(step.counted for step in found["ours"])
        return InRam(seconds["plain"], seconds["ours"], ours.equals(plain), moved)
    finally:
        ours.close()


def rows_in_ram(found: Mapping[str, InRam]) -> Iterator[list[str]]:
    for flags, each in found.items():
        yield [
            flags,
            machine.spread(each.plain, 3),
            machine.spread(each.ours, 3),
            machine.spread(each.ratios),
            "equal" if each.equal else "DIFFER",
        ]


# --- on disk --------------------------------------------------------------------------------------


@dataclass
class OnDisk:
    """All steps by their arguments, and what the disk gave by itself."""

    parameters: int
    budget: int
    groups: Sequence[int] = ()
    steps: dict[str, list[Step]] = field(default_factory=dict)
    rates: dict[str, list[fio.Rate]] = field(default_factory=dict)
    equal: dict[str, bool] = field(default_factory=dict)
    cold: bool = True

    @property
    def best(self) -> str:
        """What the disk is measured by."""
        return max(self.rates, key=lambda n: machine.median(rate.speed for rate in self.rates[n]))

    def to_disk(self, flags: str) -> list[float]:
        """Bytes per second of steps to those of the disk, round by round."""
        disk = [rate.speed for rate in self.rates[self.best]]
        return machine.ratios([step.speed for step in self.steps[flags]], disk)


def on_disk(case: Case, place: Path) -> OnDisk:
    with ExitStack() as stack:
        ours: dict[str, Ours] = {}
        for flags, arguments in FLAGS.items():
            ours[flags] = Ours(case, arguments, DISK_SHARE, place / f"disk-{len(ours)}")
            stack.callback(ours[flags].close)
        one = ours[FASTEST]
        found = OnDisk(parameter_bytes(one.module), one.budget, one.streaming())
        probe = one.step()  # every one of them does as many steps
        for flags in ours.keys() - {FASTEST}:
            ours[flags].step()
        mix = Mix(found.groups, probe.written / max(probe.read, 1))
        disks = Mixed(place / "engine", mix), ByFio(place / "fio", mix)
        for disk in disks:
            stack.callback(disk.close)
        runs: dict[str, Callable[[], Any]] = {name: each.step for name, each in ours.items()}
        for disk in disks:
            runs.update(disk.runs())
        found.cold = machine.drop_page_cache()
        results = machine.interleave(
            runs, case.rounds_on_disk, before=machine.drop_page_cache, doing="On disk"
        )
        found.steps = {name: results.pop(name) for name in ours}
        found.rates = results
        for flags, each in ours.items():
            plain = Plain(case, FLAGS[flags])
            for _ in range(1 + case.rounds_on_disk):
                plain.step()
            found.equal[flags] = each.equals(plain)
    return found


def rows_on_disk(found: OnDisk, computing: Mapping[str, InRam]) -> Iterator[list[str]]:
    for flags, steps in found.steps.items():
        middle = {
            name: machine.median(getattr(step, name) for step in steps)
            for name in ("read", "written", "counted", "reading", "writing")
        }
        moved = middle["read"] + middle["written"]
        disk = machine.median(rate.speed for rate in found.rates[found.best])
        yield [
            flags,
            machine.spread([step.seconds for step in steps]),
            f"{moved / disk:.2f}",
            f"{machine.median(computing[flags].ours):.2f}",
            f"{middle['reading']:.2f}, {middle['writing']:.2f}",
            f"{middle['read'] / found.parameters:.2f}",
            f"{middle['written'] / found.parameters:.2f}",
            f"{middle['counted'] / found.parameters:.2f}",
            f"{machine.median(step.speed for step in steps) / 1e9:.2f}",
            machine.spread(found.to_disk(flags)),
            "equal" if found.equal[flags] else "DIFFER",
        ]


# --- the page -------------------------------------------------------------------------------------


def tell_in_ram(page: Page, found: Mapping[str, InRam]) -> None:
    page.text(f"## All in RAM: a budget of {RAM_SHARE:g} times the state")
    columns = ("AdamW with", "torch, s", "tierstore, s", "tierstore / torch", "values")
    page.table(columns, rows_in_ram(found))


def tell_on_disk(page: Page, found: OnDisk, computing: Mapping[str, InRam]) -> None:
    state = COPIES * found.parameters
    page.text(f"## On disk: a budget of {DISK_SHARE:g} times the state")
    page.text(
        f"{found.parameters / 1e6:,.0f} MB of parameters, {state / 1e6:,.0f} MB of state, a budget "
        f"of {found.budget / 1e6:,.0f} MB. {len(found.groups)} groups of "
        f"{min(found.groups) / 1e6:,.1f} to {max(found.groups) / 1e6:,.1f} MB are on disk, "
        f"{sum(found.groups) / 1e6:,.0f} MB in all; the rest stays in RAM. What a step moves is "
        "given in bytes for each byte of the parameters. "
        + ("" if found.cold else "The page cache could not be dropped.")
    )
    columns = (
        "AdamW with",
        "a step, s",
        "the disk alone, s",
        "the step in RAM, s",
        "reading, writing, s",
        "read",
        "written",
        "both, by the system's count",
        "GB/s",
        "GB/s to the disk's",
        "values",
    )
    page.table(columns, rows_on_disk(found, computing))
    page.text("The disk alone, with as many bytes read and written at the same time:")
    rows = (
        [f"**{n}**" if n == found.best else n, machine.spread([rate.speed / 1e9 for rate in rates])]
        for n, rates in found.rates.items()
    )
    page.table(("by", "GB/s"), rows)


def claims(ram: Mapping[str, InRam], disk: OnDisk) -> Iterator[Claim]:
    for flags, each in ram.items():
        text = f"in RAM with {flags}, at most 1.15 times torch's time"
        yield Claim(text, machine.median(each.ratios), at_most=1.15)
    share = machine.median(disk.to_disk(FASTEST))
    yield Claim(f"on disk with {FASTEST}, 0.85 of what the disk gives", share, at_least=0.85)
    equal = all(each.equal for each in ram.values()) and all(disk.equal.values())
    yield Claim("parameters and states are torch's, bit for bit", float(equal), at_least=1)
    moved = sum(each.moved for each in ram.values())
    yield Claim("where all fits, no step reads or writes the disk (bytes)", moved, at_most=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a little of it: does it run?")
    parser.add_argument("--layers", type=int, help="how many layers there are (51 MB each)")
    parser.add_argument("--rounds", type=int, help="how often each contender takes its turn")
    parser.add_argument("--dir", type=Path, help="where the stores have their files")
    parser.add_argument("--markdown", type=Path, help="write the page here too")
    options = parser.parse_args()
    case = SMALL if options.small else FULL
    if options.layers:
        case = dataclasses.replace(case, layers=options.layers)
    if options.rounds:
        case = dataclasses.replace(case, rounds=options.rounds, rounds_on_disk=options.rounds)
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-", dir=options.dir) as scratch:
        place = Path(scratch)
        page = Page(__doc__, place, ("torch",))
        ram = {flags: in_ram(case, flags, place) for flags in FLAGS}
        tell_in_ram(page, ram)
        disk = on_disk(case, place)
        tell_on_disk(page, disk, ram)
        page.claims(claims(ram, disk))
        page.write(options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
