"""What the store costs when everything fits in RAM

    python tools/bench/overhead.py [--small] [--rounds N] [--dir DIR] [--markdown FILE]

Two copies of one Flux transformer run in one process, step by step in turns: one as
`from_pretrained` left it, one with its weights in a store whose budget is above the model. What the
second takes longer is the cost of acquiring groups, of showing their tensors to the modules and
putting them back, and of looking for changed weights. The medium model is 500 MB of bf16; the tiny
one computes next to nothing, so that the cost of each wrapped module shows.

Then groups that are in RAM are acquired and released, with nothing else going on.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch

from tierstore import TierStore, enable_group_offload
from tierstore.adapters.unit_use import StandIn
from tools.bench import flux, machine
from tools.bench.report import Claim, Page

SHAPES = {
    "medium": flux.Shape(heads=6, double=5, single=16, shard="100MB"),
    "tiny": flux.Shape(heads=4, double=3, single=6, head_dim=16),
}
WARM_UP = 4
STEPS_AT_ONCE = 5
GROUPS = 57


@dataclass(frozen=True)
class Case:
    shapes: tuple[str, ...]
    rounds: int
    acquires: int


FULL = Case(("medium", "tiny"), rounds=30, acquires=20_000)
SMALL = Case(("tiny",), rounds=2, acquires=1_000)


@dataclass
class Pair:
    """Seconds of steps without and with the store, in turns; how many modules are wrapped."""

    usual: list[float]
    ours: list[float]
    modules: int
    equal: bool

    @property
    def ratio(self) -> float:
        return machine.median(self.ours) / machine.median(self.usual)


def step_seconds(model: Any) -> float:
    started = time.perf_counter()
    for _ in flux.denoise(model, STEPS_AT_ONCE):
        pass
    return (time.perf_counter() - started) / STEPS_AT_ONCE


def pair(name: str, offload_type: str, rounds: int, place: Path) -> Pair:
    checkpoint = flux.save(SHAPES[name], place / name)
    usual, ours = flux.load(checkpoint).eval(), flux.load(checkpoint).eval()
    with (
        tempfile.TemporaryDirectory(dir=place) as scratch,
        TierStore(2 * flux.weight_bytes(ours), Path(scratch) / "store", device="cpu") as store,
        enable_group_offload(ours, store, offload_type=offload_type),
    ):
        images = [list(flux.denoise(model, WARM_UP))[-1] for model in (usual, ours)]
        read = store.stats().bytes_read
        runs = {"usual": lambda: step_seconds(usual), "ours": lambda: step_seconds(ours)}
        found = machine.interleave(runs, rounds, doing=f"{name}, {offload_type}")
        wrapped = [m for m in ours.modules() if isinstance(vars(m).get("forward"), StandIn)]
        assert store.stats().bytes_read == read, "it was to fit"
    return Pair(found["usual"], found["ours"], len(wrapped), torch.equal(*images))


def acquire_seconds(times: int, scratch: Path) -> list[float]:
    """Seconds of an acquire and a release of a group that is there, in lots of `GROUPS`."""
    with TierStore("64MiB", scratch / "store", device="cpu") as store:
        keys = [f"blocks.{i}" for i in range(GROUPS)]
        for key in keys:
            store.put(key, {f"t{i}": torch.zeros(64) for i in range(12)}, durable=False)
        lots = []
        for _ in range(max(times // GROUPS, 5)):
            started = time.perf_counter()
            for key in keys:
                store.acquire(key).release()
            lots.append((time.perf_counter() - started) / GROUPS)
    return lots[3:]  # by then the order is known


def rows(pairs: dict[tuple[str, str], Pair]) -> Iterator[list[str]]:
    for (name, offload_type), found in pairs.items():
        more = machine.median(found.ours) - machine.median(found.usual)
        yield [
            name,
            offload_type,
            str(found.modules),
            machine.spread([1e3 * s for s in found.usual], 1),
            machine.spread([1e3 * s for s in found.ours], 1),
            f"{found.ratio:.3f}",
            f"{1e6 * more / found.modules:.0f}",
            "equal" if found.equal else "DIFFERS",
        ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a little of it: does it run?")
    parser.add_argument("--rounds", type=int, help="how often each model takes its turn")
    parser.add_argument("--dir", type=Path, help="where checkpoints are kept")
    parser.add_argument("--markdown", type=Path, help="write the page here too")
    options = parser.parse_args()
    case = SMALL if options.small else FULL
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-") as scratch:
        place = options.dir or Path(scratch)
        place.mkdir(parents=True, exist_ok=True)
        page = Page(__doc__, place, ("torch", "diffusers"))
        pairs = {
            (name, offload_type): pair(name, offload_type, options.rounds or case.rounds, place)
            for name in case.shapes
            for offload_type in ("block_level", "leaf_level")
        }
        page.table(
            (
                "model",
                "offload_type",
                "modules",
                "usual, ms",
                "tierstore, ms",
                "ratio",
                "us per module",
                "image",
            ),
            rows(pairs),
        )
        lots = acquire_seconds(case.acquires, Path(scratch))
        page.text(
            "Acquiring and releasing a group that is there, in microseconds: "
            f"{machine.spread([1e6 * seconds for seconds in lots], 1)}."
        )
        claims = [
            Claim("acquire and release take at most 30 us", 1e6 * machine.median(lots), at_most=30)
        ]
        if ("medium", "block_level") in pairs:
            ratio = pairs["medium", "block_level"].ratio
            claims.append(Claim("a step costs at most 1.02 of the usual one", ratio, at_most=1.02))
        page.claims(claims)
        page.write(options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
