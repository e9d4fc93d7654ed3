"""Loads a model that is larger than RAM in every way that a library offers, and runs three steps.

    python tools/bench/loading.py --dir /nvme/scratch

A Flux transformer of 3.6 GB in float32 (6 double and 12 single blocks of 12 heads), in a control
group of 1,100 MiB, page cache included, with a budget of 500 MB. Each load is a process of its own
that begins without page cache. The control loads in the library's usual way, with a cast, and
offloads what it has then.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from tierstore import TierStore, enable_group_offload, from_pretrained, from_single_file
from tools.bench import flux, machine
from tools.bench.anonymous import AnonymousPeak
from tools.bench.memory_group import MemoryGroup
from tools.bench.own_process import answer, start
from tools.bench.report import Claim, Page

SHAPE = flux.Shape(heads=12, double=6, single=12, dtype="float32")
SMALL = flux.Shape(heads=2, double=2, single=2, dtype="float32")
LIMIT, BUDGET = 1100 << 20, 500_000_000
STEPS = 3
MARGIN = 120
"""MiB over the budget: two groups while one is cast, and what the process has for itself."""

Load = Callable[[Path, TierStore], Any]


def _cast(checkpoint: Path, store: TierStore) -> Any:
    return from_pretrained(flux.CLASS, checkpoint, store, torch_dtype=torch.bfloat16)


def _as_it_is(checkpoint: Path, store: TierStore) -> Any:
    return from_pretrained(flux.CLASS, checkpoint, store, torch_dtype=torch.float32)


def _single_file(checkpoint: Path, store: TierStore) -> Any:
    (file,) = (checkpoint / "single").glob("*.safetensors")
    config, dtype = str(checkpoint), torch.bfloat16
    return from_single_file(flux.CLASS, str(file), store, config=config, torch_dtype=dtype)


def _usual(checkpoint: Path, store: TierStore) -> Any:
    model = flux.CLASS.from_pretrained(checkpoint, torch_dtype=torch.bfloat16)
    enable_group_offload(model, store)
    return model


CASTS, AS_IT_IS, SINGLE, USUAL = (
    "bfloat16",
    "its own dtype",
    "bfloat16, single file",
    "the usual way",
)
WAYS: dict[str, Load] = {
    CASTS: _cast,
    AS_IT_IS: _as_it_is,
    SINGLE: _single_file,
    USUAL: _usual,
}
SECOND = {f"{name}, again": name for name in (CASTS, AS_IT_IS, SINGLE)}


def load_and_run(way: str, place: Path, budget: int) -> dict[str, float]:
    """In a process of its own. Bytes and seconds."""
    directory = place / f"store of {way}"
    with AnonymousPeak() as peak, TierStore(budget, directory, device="cpu") as store:
        begun = time.monotonic()
        model = WAYS[way](place / "checkpoint", store)
        loaded = time.monotonic() - begun
        steps, image = [], torch.empty(0)
        for image in flux.denoise(model, STEPS):  # noqa: B007 - the last one is looked at
            steps.append(time.monotonic() - begun)
        written = store.stats().bytes_written
        assert torch.isfinite(image.float()).all()
    return {
        "loaded": loaded,
        "first": steps[0],
        "later": (steps[-1] - steps[0]) / (STEPS - 1),
        "anonymous": peak.gained,
        "written": written,
        "checksum": float(image.double().sum()),
    }


def prepare(shape: flux.Shape, place: Path) -> int:
    """The checkpoint, sharded and as one file. Returns its bytes."""
    checkpoint = flux.save(shape, place / "checkpoint")
    model = flux.load(checkpoint)
    if not (checkpoint / "single").exists():
        model.save_pretrained(checkpoint / "single", max_shard_size="100GB")
    return flux.weight_bytes(model)


def run(way: str, place: Path, budget: int, limit: int) -> dict[str, float] | None:
    """None if the system ended it, for want of memory."""
    machine.drop_page_cache()
    with MemoryGroup(limit) as group:
        done = start(__file__, way, place, budget, group)
    return None if done.returncode in (-9, 137) else answer(way, done)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="on the disk to be measured")
    parser.add_argument("--small", action="store_true", help="a tiny model, to see that it runs")
    parser.add_argument("--page", type=Path, help="a page of Markdown to write")
    parser.add_argument("--run", choices=[*WAYS], help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, default=BUDGET, help="bytes")
    given = parser.parse_args()
    if given.run:
        print(json.dumps(load_and_run(given.run, given.dir, given.budget)))
        return 0
    given.dir = given.dir / ("small" if given.small else "large")
    given.dir.mkdir(parents=True, exist_ok=True)
    nbytes = prepare(SMALL if given.small else SHAPE, given.dir)
    for way in WAYS:
        shutil.rmtree(given.dir / f"store of {way}", ignore_errors=True)
    found = {
        name: run(SECOND.get(name, name), given.dir, given.budget, LIMIT)
        for name in (*WAYS, *SECOND)
    }
    page = Page("Loading what does not fit", given.dir, ["torch", "diffusers", "safetensors"])
    page.text(
        f"Checkpoint {nbytes / 1e6:,.0f} MB, budget {given.budget / 1e6:,.0f} MB, control group "
        f"{LIMIT >> 20:,} MiB, page cache included. Seconds count from the open store on."
    )
    columns = ("", "loaded, s", "first step, s", "later, s", "RssAnon gained, MB", "written, MB")
    page.table(columns, [_row(name, result) for name, result in found.items()])
    claims = list(_claims(found, given.budget))
    page.claims(claims)
    page.write(given.page)
    return 0 if all(claim.held for claim in claims) or given.small else 1


def _row(name: str, result: dict[str, float] | None) -> list[str]:
    if result is None:
        return [name, "killed", "", "", "", ""]
    seconds = [f"{result[what]:.1f}" for what in ("loaded", "first", "later")]
    return [name, *seconds, *(f"{result[what] / 1e6:,.0f}" for what in ("anonymous", "written"))]


def _claims(found: dict[str, dict[str, float] | None], budget: int) -> list[Claim]:
    claims = [Claim("the usual way is killed", float(found[USUAL] is None), at_least=1)]
    done = {name: result for name, result in found.items() if result is not None}
    for name in (*WAYS, *SECOND):
        if name != USUAL:
            claims.append(Claim(f"{name}: it runs", float(name in done), at_least=1))
    for name, result in done.items():
        if name != USUAL:
            over = (result["anonymous"] - budget) / 2**20
            claims.append(Claim(f"{name}: anonymous MiB over the budget", over, at_most=MARGIN))
    for name, first in SECOND.items():
        if {name, first} <= done.keys():
            claims.append(Claim(f"{name}: bytes written", done[name]["written"], at_most=0))
            same = done[name]["checksum"] == done[first]["checksum"]
            claims.append(Claim(f"{name}: the same image", float(same), at_least=1))
    again, plain = (done.get(f"{name}, again") for name in (CASTS, AS_IT_IS))
    if again and plain:
        ratio = again["first"] / plain["first"]
        claims.append(Claim("first step, cast before, to its own dtype", ratio, at_most=1.2))
    return claims


if __name__ == "__main__":
    sys.exit(main())
