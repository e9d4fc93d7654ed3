"""Cost of a unit while the plan of its loop is followed

    python tools/bench/followed.py [--small] [--rounds N] [--dir DIR] [--markdown FILE]

Blocks of 16 tensors run one after the other: plainly, in a store that follows the plan of the loop,
and in one that decides anew at each use. The three take turns in one process. Counted are calls of
Python functions on the caller's thread beyond those of the plain blocks, and timed is how long it
takes from the call of a block to the first line of its forward, and a whole pass. The device is the
pretend accelerator of the tests.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
from torch import nn

from tests.device import pretend
from tests.helpers.calls import calls_of_functions
from tierstore import TierStore, dispatch_model
from tierstore.store import engine_of
from tools.bench import machine
from tools.bench.report import Claim, Page

PLAIN, FOLLOWED, DECIDED = "plain", "followed", "decided anew"
WARM_UP = 10
CALLS = {"all in RAM": 100, "half in RAM": 120, "all on the device": 120, "half on the device": 120}
CALLS_PER_TILE = 12
BEGIN_US, BEGIN_US_PER_TILE = 60, 10


@dataclass(frozen=True)
class Case:
    blocks: int
    width: int
    rounds: int


FULL = Case(blocks=24, width=256, rounds=60)
SMALL = Case(blocks=12, width=64, rounds=2)

PLACES = {
    "all in RAM": ("cpu", 2.0, 0.0),
    "half in RAM": ("cpu", 0.5, 0.0),
    "all on the device": ("pretend", 2.0, 2.0),
    "half on the device": ("pretend", 2.0, 0.5),
}
"""On which device, and shares of the weights that RAM and the device have room for."""


class Block(nn.Module):
    """One unit, whatever the budget, as it has all its weights itself. Notes when it begins."""

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
    """One of the three: its blocks, and what was seen of them."""

    blocks: nn.Sequential
    store: TierStore | None = None
    calls: list[float] = field(default_factory=list)  # by block
    begin: list[float] = field(default_factory=list)  # seconds of each block
    passes: list[float] = field(default_factory=list)  # seconds
    tiles: float = 0.0  # groups that moved, by block

    def run(self, x: torch.Tensor) -> None:
        started = time.perf_counter()
        for block in self.blocks:
            called = time.perf_counter()
            x = block(x)
            self.begin.append(block.began - called)  # type: ignore[operator]
        self.passes.append(time.perf_counter() - started)


def blocks_of(case: Case) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(case.width) for _ in range(case.blocks)))
    return blocks.requires_grad_(False).eval()


def moved(store: TierStore | None) -> int:
    if store is None:
        return 0
    stats = store.stats()
    return stats.bytes_read + stats.bytes_onloaded


def in_a_store(case: Case, place: str, name: str, path: Path) -> Way:
    device, ram, share = PLACES[place]
    blocks = blocks_of(case)
    nbytes = sum(weight.nbytes for weight in blocks.parameters())
    budgets: dict[str, Any] = {} if device == "cpu" else {"device_budget": int(share * nbytes)}
    store = TierStore(int(ram * nbytes), path, device=device, **budgets)
    engine_of(store).loops.enabled = name == FOLLOWED
    dispatch_model(blocks, store)
    return Way(blocks, store)


@torch.no_grad()
def measure(case: Case, place: str, rounds: int, scratch: Path) -> dict[str, Way]:
    """The three ways in turns."""
    device, *_ = PLACES[place]
    plain = blocks_of(case).to(device)
    nbytes = sum(weight.nbytes for weight in plain.parameters())
    x = torch.randn(4, case.width).to(device)
    found = {PLAIN: Way(plain)}
    with ExitStack() as stack:
        for name in (FOLLOWED, DECIDED):
            way = found[name] = in_a_store(case, place, name, scratch / f"{place} {name}")
            assert way.store is not None
            stack.enter_context(way.store)
        take_turns(found, x, rounds)
        for name, way in found.items():
            followed = way.store is not None and way.store.stats().followed_seconds > 0
            assert followed == (name == FOLLOWED), "it goes another way"
            way.tiles /= 2 * rounds * nbytes
            way.calls = [calls / case.blocks for calls in way.calls]
    return found


def take_turns(ways: dict[str, Way], x: torch.Tensor, rounds: int) -> None:
    for _ in range(WARM_UP):
        for way in ways.values():
            way.blocks(x)
    before = {name: moved(way.store) for name, way in ways.items()}
    for _ in range(rounds):
        for way in ways.values():
            way.run(x)
    for _ in range(rounds):
        for way in ways.values():
            way.calls.append(calls_of_functions(partial(way.blocks, x)))
    for name, way in ways.items():
        way.tiles = moved(way.store) - before[name]


def rows(place: str, found: dict[str, Way]) -> Iterator[list[object]]:
    plain = machine.median(found[PLAIN].calls)
    for name, way in found.items():
        yield [
            place,
            name,
            f"{way.tiles:.2f}",
            f"{machine.median(way.calls) - plain:.0f}",
            f"{1e6 * machine.median(way.begin):.0f}",
            machine.spread([1e3 * seconds for seconds in way.passes], 2),
        ]


def claims(place: str, found: dict[str, Way]) -> Iterator[Claim]:
    way = found[FOLLOWED]
    calls = machine.median(way.calls) - machine.median(found[PLAIN].calls)
    most = CALLS[place] + CALLS_PER_TILE * way.tiles
    yield Claim(f"{place}: at most {most:.0f} calls for each block", calls, at_most=most)
    if PLACES[place][0] != "cpu":
        most = BEGIN_US + BEGIN_US_PER_TILE * way.tiles
        begin = 1e6 * machine.median(way.begin)
        yield Claim(f"{place}: a block begins within {most:.0f} us", begin, at_most=most)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a little of it: does it run?")
    parser.add_argument("--rounds", type=int, help="how often each way takes its turn")
    parser.add_argument("--dir", type=Path, help="where stores are kept")
    parser.add_argument("--markdown", type=Path, help="write the page here too")
    options = parser.parse_args()
    if reason := pretend.ready():
        print(f"Nothing was measured: {reason}.")
        return 0
    torch.set_num_threads(1)
    case = SMALL if options.small else FULL
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-", dir=options.dir) as scratch:
        page = Page(__doc__, Path(scratch), ("torch",))
        found = {
            place: measure(case, place, options.rounds or case.rounds, Path(scratch))
            for place in PLACES
        }
        page.table(
            ("place", "way", "groups moved", "calls", "begins after, us", "pass, ms"),
            [row for place, ways in found.items() for row in rows(place, ways)],
        )
        page.claims([claim for place, ways in found.items() for claim in claims(place, ways)])
        page.write(options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
