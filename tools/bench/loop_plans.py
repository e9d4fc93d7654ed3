"""Passes of planned loops, against the bound

    python tools/bench/loop_plans.py [--small] [--only PART] [--markdown FILE]

Everything is simulated, with the speeds of an H100 and of the disk beside it, and computing that
takes as long as there are bytes. The models are names and sizes, cut as their files would be. Each
plan is verified. The *simple bound* has all memory full of what stays; the *bound* leaves out of
that the largest unit, which is in use, and two tiles in transit on each tier.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tierstore.model.outline import tile_sizes
from tierstore.plan.loop_check import verify
from tierstore.plan.loop_plan import Loop
from tierstore.plan.loop_planner import plan_loop
from tierstore.plan.loop_timing import seconds_per_pass
from tierstore.simulation import simulate_loop
from tools.bench.loop_shapes import (
    H100,
    SHAPES,
    TO_DEVICE,
    TO_HOST,
    Budgets,
    bound,
    budgets,
    flux,
    forward_and_backward,
    joined,
    loop_of,
    sdxl,
    simple_bound,
    t5,
    wan,
)
from tools.bench.report import Claim, Page

DEVICE = 12e9
CELLS = {"all": (1.1, 1.04), "half": (0.5, 1.15), "quarter": (0.25, 1.08)}
"""RAM as a share of the weights, and how many times the simple bound a pass may take."""
DEVICES = (0.1, 0.25, 0.5, 0.75)
RAMS = (0.1, 0.25, 0.5, 0.75, 1.1)
SETTLED = 1.01
"""No pass after the fifth takes longer than the median by more."""
NEAR = 1.10
LEAST_BYTES = 1.05


@dataclass(frozen=True)
class Entered:
    """Passes of FLUX.1-dev, of which the first two were planned use by use: in units of the simple
    bound, the third and the mean from there on; and the longest after the fifth by the median."""

    third: float
    mean: float
    longest: float


def entered(cell: str, passes: int, *, whole_blocks: bool = False) -> Entered:
    """Play passes of FLUX.1-dev on 12 GB of a device. With `whole_blocks`, its units are those that
    a store has today."""
    shape = flux()
    of = budgets(DEVICE, CELLS[cell][0] * shape.nbytes)
    loop = loop_of(shape, of, whole_blocks=whole_blocks)
    played = simulate_loop(loop, of, passes, bandwidth=H100, tile=tile_sizes(of).group)
    least = simple_bound(loop, of, H100).seconds
    seconds = [one.seconds for one in played]
    mean = statistics.mean(seconds[2:]) / least
    return Entered(seconds[2] / least, mean, max(seconds[5:]) / statistics.median(seconds))


@dataclass(frozen=True)
class Reached:
    """The plan of a loop: seconds by the bound, bytes to the device by the least, and seconds."""

    by_bound: float
    bytes_by_least: float
    seconds: float
    uploaded: int
    read: int


def reached(loop: Loop, of: Budgets) -> Reached:
    """Plan a loop, and verify the plan. Raises ValueError if there is none."""
    tile = tile_sizes(of).group
    plan = plan_loop(loop, of, H100, tile)
    if plan is None:
        raise ValueError("the budgets are too small for a plan")
    verify(plan, of)
    seconds = seconds_per_pass(plan, [H100[TO_DEVICE], H100[TO_HOST]])
    least = bound(loop, of, H100, tile)
    by_least = plan.top.moved / least.uploaded if least.uploaded else 1.0
    return Reached(seconds / least.seconds, by_least, seconds, plan.top.moved, plan.bytes_read)


def reached_by(name: str, device: float, ram: float) -> Reached:
    """Plan a plain loop over a model, with budgets that are shares of its weights."""
    shape = SHAPES[name]()
    of = budgets(device * shape.nbytes, ram * shape.nbytes)
    return reached(loop_of(shape, of), of)


def several(name: str, device: float, ram: float) -> Reached:
    """Plan a loop over two models or passes; budgets are shares of all weights."""
    shapes, order = {
        "two experts in phases": ([wan("high"), wan("low")], [0, 0, 1, 1]),
        "two pipelines in turn": ([sdxl(), flux()], [0, 1]),
        "a text encoder, then four passes": ([t5(), flux()], [0, 1, 1, 1, 1]),
        "a step of training": ([flux()], [0]),
    }[name]
    total = sum(shape.nbytes for shape in shapes)
    of = budgets(device * total, ram * total)
    loop = joined([loop_of(shape, of) for shape in shapes], order)
    return reached(forward_and_backward(loop) if "training" in name else loop, of)


SEVERAL = {
    "two experts in phases": [(0.25, 0.8), (0.25, 0.4)],
    "two pipelines in turn": [(0.4, 0.7), (0.4, 0.3)],
    "a text encoder, then four passes": [(0.4, 0.7), (0.4, 0.3)],
    "a step of training": [(0.5, 1.1), (0.5, 0.25), (0.25, 0.5)],
}

# What is shown ------------------------------------------------------------------------------------


def show_entering(page: Page, small: bool) -> Iterator[Claim]:
    """Passes from the first one on."""
    rows = []
    for whole_blocks, (cell, (ram, at_most)) in itertools.product((True, False), CELLS.items()):
        found = entered(cell, 20 if small else 200, whole_blocks=whole_blocks)
        units = "whole blocks" if whole_blocks else "blocks cut"
        figures = (f"{n:.3f}" for n in (found.third, found.mean, found.longest))
        rows.append([units, f"{ram:.0%}", *figures])
        text = f"FLUX.1-dev, 12 GB, {units}, RAM {cell}"
        if not small:  # of 20 passes, the one that enters the plan is a large part
            mean = f"{text}: mean from the third pass, by the simple bound"
            yield Claim(mean, found.mean, at_most=at_most)
        longest = f"{text}: longest pass after the fifth, by the median"
        yield Claim(longest, found.longest, at_most=SETTLED)
    page.text("## From the first pass on, FLUX.1-dev with 12 GB of the device")
    columns = ["units", "RAM", "third pass", "mean from the third", "longest after the fifth"]
    page.table(columns, rows)


def show_units(page: Page, small: bool) -> Iterator[Claim]:
    """Blocks as units, or cut into leaves where they are large; and larger tiles."""
    shape, rows = flux(), []
    for whole_blocks in (True, False):
        for tile in (16, 32)[: 1 if small else 2]:
            found = []
            for ram, _ in CELLS.values():
                of = budgets(DEVICE, ram * shape.nbytes)
                loop = loop_of(shape, of, whole_blocks=whole_blocks)
                plan = plan_loop(loop, of, H100, tile << 20)
                assert plan is not None
                seconds = seconds_per_pass(plan, [H100[TO_DEVICE], H100[TO_HOST]])
                found.append(seconds / simple_bound(loop, of, H100).seconds)
            rows.append([len(loop.steps), f"{tile} MiB", *(f"{each:.3f}" for each in found)])
    page.text("## A pass once the plan is followed, by the simple bound, FLUX.1-dev with 12 GB")
    page.table(["units", "tiles", *(f"RAM {cell}" for cell in CELLS)], rows)
    worst = max(float(each) for each in rows[len(rows) // 2][2:])
    yield Claim("FLUX.1-dev, 12 GB, blocks cut: a pass, by the simple bound", worst, at_most=1.04)


def show_grid(page: Page, small: bool) -> Iterator[Claim]:
    """Plain loops at all budgets."""
    for name in list(SHAPES)[:1] if small else SHAPES:
        worst, rows = 0.0, []
        for device in DEVICES:
            found = [reached_by(name, device, ram) for ram in RAMS[:: 2 if small else 1]]
            worst = max(worst, *(one.by_bound for one in found))
            rows.append([f"{device:.0%}", *(f"{one.by_bound:.3f}" for one in found)])
        page.text(f"## {name}: seconds of a pass, by the bound")
        page.table(["device", *(f"RAM {ram:.0%}" for ram in RAMS[:: 2 if small else 1])], rows)
        yield Claim(f"{name}: seconds of a pass, by the bound", worst, at_most=NEAR)


def show_several(page: Page, small: bool) -> Iterator[Claim]:
    """Several models, and training."""
    rows = []
    for name, cells in SEVERAL.items():
        for device, ram in cells[:1] if small else cells:
            found = several(name, device, ram)
            rows.append(
                [
                    name,
                    f"{device:.0%}",
                    f"{ram:.0%}",
                    f"{found.seconds:.3f}",
                    f"{found.by_bound:.3f}",
                    f"{found.uploaded / 1e9:.2f}",
                    f"{found.read / 1e9:.2f}",
                    f"{found.bytes_by_least:.3f}",
                ]
            )
            if "training" in name:
                text = f"{name}, {device:.0%} and {ram:.0%}: bytes to the device, by Belady's"
                yield Claim(text, found.bytes_by_least, at_most=LEAST_BYTES)
            else:
                text = f"{name}, {device:.0%} and {ram:.0%}: seconds of a period, by the bound"
                yield Claim(text, found.by_bound, at_most=NEAR)
    page.text("## Several models, and training")
    columns = ["loop", "device", "RAM", "seconds", "by the bound", "GB up", "GB read"]
    page.table([*columns, "bytes up by Belady's"], rows)


PARTS: dict[str, Callable[[Page, bool], Iterator[Claim]]] = {
    "entering": show_entering,
    "units": show_units,
    "grid": show_grid,
    "several": show_several,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a little of everything")
    parser.add_argument("--only", choices=PARTS, action="append", help="only this part")
    parser.add_argument("--markdown", type=Path, help="write the page here too")
    options = parser.parse_args(arguments)
    page = Page(__doc__, Path(), ("numpy",))
    claims = [claim for part in options.only or PARTS for claim in PARTS[part](page, options.small)]
    page.text("## Claims")
    page.claims(claims)
    page.write(options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
