"""Cost of a unit while the plan of its loop is followed

Blocks of 16 tensors run in sequence: without a store, in a store that follows the plan of the loop,
and in one that decides at each use. The three take turns in one process. Figures are the Python
function calls on the caller's thread beyond those of the plain blocks, the time from the call of a
block to the first line of its forward, and the time of a whole pass. The device is the pretend
accelerator of the tests.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.helpers.calls import calls_of_functions
from tierstore import TierStore, dispatch_model
from tierstore.store import engine_of
from tools.bench.models import weight_bytes
from tools.bench.page import Claim
from tools.bench.runner import Bench, median, spread

PACKAGES, ROUNDS, PRETEND = ("torch",), 60, True
PLAIN, FOLLOWED, DECIDED = "plain", "followed", "decided anew"
WARM_UP = 10
CALLS_PER_TILE = 12
BEGIN_US, BEGIN_US_PER_TILE = 60, 10
PLACES = {
    "all in RAM": ("cpu", 2.0, 0.0, 100),
    "half in RAM": ("cpu", 0.5, 0.0, 120),
    "all on the device": ("pretend", 2.0, 2.0, 120),
    "half on the device": ("pretend", 2.0, 0.5, 120),
}
"""The device, the shares of the weights that RAM and the device hold, and the claimed calls."""


class Block(nn.Module):
    """One unit at any budget, since it has all its weights itself. Records when it begins."""

    began = 0.0

    def __init__(self, width: int) -> None:
        super().__init__()
        for number in range(8):
            layer = nn.Linear(width, width)
            self.register_parameter(f"weight{number}", layer.weight)
            self.register_parameter(f"bias{number}", layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.began = time.perf_counter()
        weights = list(self._parameters.values())
        for weight, bias in zip(weights[::2], weights[1::2], strict=True):
            assert weight is not None
            x = torch.tanh(nn.functional.linear(x, weight, bias))
        return x


@dataclass
class Way:
    """Blocks, and their figures: calls, seconds until a block begins, moved groups, pass times."""

    blocks: nn.Sequential
    store: TierStore | None = None
    calls: list[float] = field(default_factory=list)
    begin: list[float] = field(default_factory=list)
    passes: list[float] = field(default_factory=list)
    tiles: float = 0.0

    def run(self, x: torch.Tensor) -> None:
        started = time.perf_counter()
        for block in self.blocks:
            called = time.perf_counter()
            x = block(x)
            self.begin.append(block.began - called)  # type: ignore[operator]
        self.passes.append(time.perf_counter() - started)

    def moved(self) -> int:
        if self.store is None:
            return 0
        stats = self.store.stats()
        return stats.bytes_read + stats.bytes_onloaded


def blocks_of(count: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(count))).requires_grad_(False).eval()


@torch.no_grad()
def take_turns(ways: dict[str, Way], x: torch.Tensor, rounds: int) -> None:
    """Run all ways in turns, and record their figures."""
    for _ in range(WARM_UP):
        for way in ways.values():
            way.blocks(x)
    before = {name: way.moved() for name, way in ways.items()}
    for _ in range(rounds):
        for way in ways.values():
            way.run(x)
    for _ in range(rounds):
        for way in ways.values():
            way.calls.append(calls_of_functions(partial(way.blocks, x)) / len(way.blocks))
    for name, way in ways.items():
        way.tiles = (way.moved() - before[name]) / (2 * rounds * weight_bytes(way.blocks))
        followed = way.store is not None and way.store.stats().followed_seconds > 0
        assert followed == (name == FOLLOWED), "the store does not follow the expected way"


def three_ways(place: str, count: int, width: int, rounds: int, scratch: Path) -> dict[str, Way]:
    """Run blocks without a store, and in two stores."""
    device, ram, share, _ = PLACES[place]
    ways = {PLAIN: Way(blocks_of(count, width).to(device))}
    nbytes = weight_bytes(ways[PLAIN].blocks)
    with ExitStack() as stack:
        for name in (FOLLOWED, DECIDED):
            budgets: dict[str, Any] = {"device": device}
            if device != "cpu":
                budgets["device_budget"] = int(share * nbytes)
            store = TierStore(int(ram * nbytes), scratch / f"{place} {name}", **budgets)
            engine_of(stack.enter_context(store)).loops.enabled = name == FOLLOWED
            ways[name] = Way(blocks_of(count, width), store)
            dispatch_model(ways[name].blocks, store)
        take_turns(ways, torch.randn(4, width).to(device), rounds)
    return ways


def measure(bench: Bench) -> Iterator[Claim]:
    torch.set_num_threads(1)
    count, width = (12, 64) if bench.small else (24, 256)
    found = {}
    for place in PLACES:
        ways = three_ways(place, count, width, max(bench.rounds, 2), bench.scratch)
        plain = median(ways[PLAIN].calls)
        found |= {(place, name): (way, median(way.calls) - plain) for name, way in ways.items()}
    columns = {
        "groups moved": lambda one: f"{one[0].tiles:.2f}",
        "calls": lambda one: f"{one[1]:.0f}",
        "begins after, us": lambda one: f"{1e6 * median(one[0].begin):.0f}",
        "pass, ms": lambda one: spread([1e3 * seconds for seconds in one[0].passes]),
    }
    bench.page.compare(("place", "way"), found, columns)
    for place, (device, *_, allowed) in PLACES.items():
        way, calls = found[place, FOLLOWED]
        most = allowed + CALLS_PER_TILE * way.tiles
        yield Claim(f"{place}: calls per block", calls, at_most=most)
        if device != "cpu":
            most = BEGIN_US + BEGIN_US_PER_TILE * way.tiles
            begin = 1e6 * median(way.begin)
            yield Claim(f"{place}: us until a block begins", begin, at_most=most)
