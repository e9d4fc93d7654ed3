"""Passes of planned loops, against the bound

Everything is simulated, with the bandwidths of an H100 machine, and compute times in proportion to
bytes. The models are names and sizes, partitioned as their files would be. Each plan is verified.
The *simple bound* assumes that all memory holds resident groups; the *bound* excludes the largest
unit, which is in use, and two tiles in transit on each tier.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tierstore.model.outline import tile_sizes
from tierstore.plan.loop_check import verify
from tierstore.plan.loop_plan import Loop
from tierstore.plan.loop_planner import plan_loop
from tierstore.plan.loop_timing import seconds_per_pass
from tierstore.simulation import simulate_loop
from tools.bench import loop_shapes as shapes
from tools.bench.loop_shapes import H100, SHAPES, TO_DEVICE, TO_HOST, Budgets, budgets, loop_of
from tools.bench.page import Claim, Page
from tools.bench.runner import Bench

PACKAGES = ("numpy",)
DEVICE = 12e9
CELLS = {"all": (1.1, 1.04), "half": (0.5, 1.15), "quarter": (0.25, 1.08)}
"""RAM as a share of the weights, and the claimed ratio of a pass to the simple bound."""
DEVICES = (0.1, 0.25, 0.5, 0.75)
RAMS = (0.1, 0.25, 0.5, 0.75, 1.1)
SETTLED = 1.01
"""Claimed ratio of the longest pass after the fifth to the median."""
NEAR = 1.10
LEAST_BYTES = 1.05


@dataclass(frozen=True)
class Entered:
    """Passes of FLUX.1-dev, of which the first two are planned use by use.

    In units of the simple bound: the third pass, and the mean from there on. Also, the ratio of the
    longest pass after the fifth to the median.
    """

    third: float
    mean: float
    longest: float


def entered(cell: str, passes: int, *, whole_blocks: bool = False) -> Entered:
    """Simulate passes of FLUX.1-dev with 12 GB of device memory.

    With `whole_blocks`, blocks of any size are units.
    """
    shape = shapes.flux()
    of = budgets(DEVICE, CELLS[cell][0] * shape.nbytes)
    loop = loop_of(shape, of, whole_blocks=whole_blocks)
    played = simulate_loop(loop, of, passes, bandwidth=H100, tile=tile_sizes(of).group)
    least = shapes.simple_bound(loop, of, H100).seconds
    seconds = [one.seconds for one in played]
    mean = statistics.mean(seconds[2:]) / least
    return Entered(seconds[2] / least, mean, max(seconds[5:]) / statistics.median(seconds))


@dataclass(frozen=True)
class Reached:
    """A plan's seconds, its ratio to the bound, and its bytes to the device / the minimum."""

    by_bound: float
    bytes_by_least: float
    seconds: float
    uploaded: int
    read: int


def reached(loop: Loop, of: Budgets) -> Reached:
    """Plan a loop and verify the plan. Raises ValueError if there is none."""
    tile = tile_sizes(of).group
    plan = plan_loop(loop, of, H100, tile)
    if plan is None:
        raise ValueError("the budgets are too small for a plan")
    verify(plan, of)
    seconds = seconds_per_pass(plan, [H100[TO_DEVICE], H100[TO_HOST]])
    least = shapes.bound(loop, of, H100, tile)
    by_least = plan.top.moved / least.uploaded if least.uploaded else 1.0
    return Reached(seconds / least.seconds, by_least, seconds, plan.top.moved, plan.bytes_read)


def reached_by(name: str, device: float, ram: float) -> Reached:
    """Plan a plain loop over a model, with budgets that are shares of its weights."""
    shape = SHAPES[name]()
    of = budgets(device * shape.nbytes, ram * shape.nbytes)
    return reached(loop_of(shape, of), of)


def several(name: str, device: float, ram: float) -> Reached:
    """Plan a loop over two models or passes; budgets are shares of all weights."""
    models, order = {
        "two experts in phases": ([shapes.wan("high"), shapes.wan("low")], [0, 0, 1, 1]),
        "two pipelines in turn": ([shapes.sdxl(), shapes.flux()], [0, 1]),
        "a text encoder, then four passes": ([shapes.t5(), shapes.flux()], [0, 1, 1, 1, 1]),
        "a step of training": ([shapes.flux()], [0]),
    }[name]
    total = sum(shape.nbytes for shape in models)
    of = budgets(device * total, ram * total)
    loop = shapes.joined([loop_of(shape, of) for shape in models], order)
    return reached(shapes.forward_and_backward(loop) if "training" in name else loop, of)


SEVERAL = {
    "two experts in phases": [(0.25, 0.8), (0.25, 0.4)],
    "two pipelines in turn": [(0.4, 0.7), (0.4, 0.3)],
    "a text encoder, then four passes": [(0.4, 0.7), (0.4, 0.3)],
    "a step of training": [(0.5, 1.1), (0.5, 0.25), (0.25, 0.5)],
}

# Parts of the page -------------------------------------------------------------------------------


def show_entering(page: Page, small: bool) -> Iterator[Claim]:
    """Add passes from the first one on."""
    found = {}
    for whole_blocks, (cell, (ram, at_most)) in itertools.product((True, False), CELLS.items()):
        one = entered(cell, 20 if small else 200, whole_blocks=whole_blocks)
        units = "whole blocks" if whole_blocks else "blocks cut"
        found[units, f"{ram:.0%}"] = one
        text = f"FLUX.1-dev, 12 GB, {units}, RAM {cell}"
        if not small:  # of 20 passes, the one that enters the plan is a large part
            mean = f"{text}: mean from the third pass / the simple bound"
            yield Claim(mean, one.mean, at_most=at_most)
        longest = f"{text}: longest pass after the fifth / the median"
        yield Claim(longest, one.longest, at_most=SETTLED)
    page.text("## From the first pass on, FLUX.1-dev with 12 GB of the device")
    columns = {
        "third pass": lambda one: f"{one.third:.3f}",
        "mean from the third": lambda one: f"{one.mean:.3f}",
        "longest after the fifth": lambda one: f"{one.longest:.3f}",
    }
    page.compare(("units", "RAM"), found, columns)


def show_units(page: Page, small: bool) -> Iterator[Claim]:
    """Add passes with blocks as units, with large blocks split into leaves, and larger tiles."""
    shape, found = shapes.flux(), {}
    for whole_blocks, tile in itertools.product((True, False), (16,) if small else (16, 32)):
        cells = []
        for ram, _ in CELLS.values():
            of = budgets(DEVICE, ram * shape.nbytes)
            loop = loop_of(shape, of, whole_blocks=whole_blocks)
            plan = plan_loop(loop, of, H100, tile << 20)
            assert plan is not None
            seconds = seconds_per_pass(plan, [H100[TO_DEVICE], H100[TO_HOST]])
            cells.append(seconds / shapes.simple_bound(loop, of, H100).seconds)
        found[whole_blocks, tile] = (len(loop.steps), f"{tile} MiB", *(f"{x:.3f}" for x in cells))
        if (whole_blocks, tile) == (False, 16):
            text = "FLUX.1-dev, 12 GB, blocks split: a pass / the simple bound"
            yield Claim(text, max(cells), at_most=1.04)
    page.text("## A pass once the plan is followed, by the simple bound, FLUX.1-dev with 12 GB")
    page.table(["units", "tiles", *(f"RAM {cell}" for cell in CELLS)], found.values())


def show_grid(page: Page, small: bool) -> Iterator[Claim]:
    """Add plain loops at all budgets."""
    rams = RAMS[:: 2 if small else 1]
    for name in list(SHAPES)[:1] if small else SHAPES:
        found = {d: [reached_by(name, d, ram).by_bound for ram in rams] for d in DEVICES}
        page.text(f"## {name}: seconds of a pass, by the bound")
        rows = [[f"{d:.0%}", *(f"{one:.3f}" for one in row)] for d, row in found.items()]
        page.table(["device", *(f"RAM {ram:.0%}" for ram in rams)], rows)
        worst = max(map(max, found.values()))
        yield Claim(f"{name}: seconds of a pass, by the bound", worst, at_most=NEAR)


def show_several(page: Page, small: bool) -> Iterator[Claim]:
    """Add loops over several models, and training."""
    found = {}
    for name, cells in SEVERAL.items():
        for device, ram in cells[:1] if small else cells:
            one = found[name, f"{device:.0%}", f"{ram:.0%}"] = several(name, device, ram)
            text = f"{name}, {device:.0%} and {ram:.0%}"
            if "training" in name:
                text = f"{text}: bytes to the device / Belady's"
                yield Claim(text, one.bytes_by_least, at_most=LEAST_BYTES)
            else:
                yield Claim(f"{text}: seconds of a period / the bound", one.by_bound, at_most=NEAR)
    page.text("## Several models, and training")
    columns: dict[str, Callable[[Reached], object]] = {
        "seconds": lambda one: f"{one.seconds:.3f}",
        "by the bound": lambda one: f"{one.by_bound:.3f}",
        "GB up": lambda one: f"{one.uploaded / 1e9:.2f}",
        "GB read": lambda one: f"{one.read / 1e9:.2f}",
        "bytes up by Belady's": lambda one: f"{one.bytes_by_least:.3f}",
    }
    page.compare(("loop", "device", "RAM"), found, columns)


PARTS: dict[str, Callable[[Page, bool], Iterator[Claim]]] = {
    "entering": show_entering,
    "units": show_units,
    "grid": show_grid,
    "several": show_several,
}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=PARTS, action="append", help="run only this part")


def measure(bench: Bench) -> Iterator[Claim]:
    for part in bench.options.only or PARTS:
        yield from PARTS[part](bench.page, bench.small)
    bench.page.text("## Claims")
