"""A LoRA on a frozen Llama that does not fit in RAM: memory, and seconds per step against the limit

    python tools/bench/finetuning.py [--small] [--rounds N] --dir DIR [--markdown FILE]

A Llama of 2.1 GB (float32, 18 layers, a sharded checkpoint) and a LoRA of peft (r=8, on the query
and value projections), trained with AdamW on 64 random tokens a step.

Memory: three steps with gradient checkpointing and a budget of 400 MB, in a control group of 1,000
MiB, where page cache counts. Each way is a process of its own with a cold page cache. The controls
have no store. One loads the same files, whose pages the system may take back and read again; one
loads a checkpoint in bfloat16, as most are published, cast to float32. Accelerate's `disk_offload`
comes before peft or after it.

Speed: budgets of 25 % and 50 % of the base, with gradient checkpointing and without it, each of the
two in a process of its own. In it the ordinary model, with all weights in RAM, and those on a store
take turns, step by step, so that a load that changes meets all alike; the store reads past the page
cache. Nobody can be faster than the limit: the longer of the ordinary step and of the reading of
what misses, 2 x (base - budget), as forward and backward both need each weight, at the speed of
direct reads of the same files in that round.

What a store reads while another model has its turn counts for the next step: as bytes, and as the
seconds that direct reads take for them.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import accelerate
import peft
import torch
import transformers

import tierstore
from tools.bench import llama, machine
from tools.bench.anonymous import AnonymousPeak
from tools.bench.denoise import direct_reads
from tools.bench.dispatch import disk_bytes
from tools.bench.memory_group import MemoryGroup
from tools.bench.own_process import answer, start
from tools.bench.report import Claim, Page

SHAPE = llama.Shape(hidden=1536, intermediate=4096, layers=18)
SMALL = llama.Shape(hidden=256, intermediate=512, layers=6, shard="5MB")
LIMIT, BUDGET, SMALL_BUDGET = 1000 << 20, 400_000_000, 8_000_000
SHARES = (0.25, 0.5)
STEPS = 3
PATIENCE = 300  # seconds for what a peer does in a control group, where it may hardly go on
WARM_UP = 2  # steps before the rounds: the order of use is learned
SEQUENCES, TOKENS = 2, 32

ORDINARY, OURS, CAST = "ordinary", "tierstore", "ordinary, cast to float32"
PEER, PEER_LAST = "disk_offload, then peft", "peft, then disk_offload"
RECOMPUTES, KEEPS = "checkpointing", "no checkpointing"
WAYS = (ORDINARY, OURS, CAST, PEER, PEER_LAST)

Found = dict[str, Any]


# --- one run, in a process of its own -------------------------------------------------------------


def with_lora(base: Any, recomputes: bool) -> Any:
    """As everyone makes it: peft freezes the base."""
    torch.manual_seed(0)
    model = peft.get_peft_model(base, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def train(model: Any, store: tierstore.TierStore | None) -> Iterator[Found]:
    """Steps without end: seconds, bytes, and how often and how long each waited for the store."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    generator = torch.Generator().manual_seed(1)

    def now() -> Found:
        read, written = disk_bytes()
        found = {"seconds": time.perf_counter(), "read": read, "written": written}
        found |= {"computing": time.process_time()}
        if store is not None:
            stats = store.stats()
            names = ("bytes_read", "bytes_written", "stalled_seconds", "hits", "late", "misses")
            found |= {name: getattr(stats, name) for name in names}
        return found

    after = now()
    while True:
        tokens = torch.randint(llama.VOCABULARY, (SEQUENCES, TOKENS), generator=generator)
        earlier = after.get("bytes_read", 0)
        before = now()
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        forward = time.perf_counter() - before["seconds"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after = now()
        step = {name: after[name] - before[name] for name in after}
        between = before.get("bytes_read", 0) - earlier
        yield step | {"loss": loss.item(), "forward": forward, "read_between": between}


def run_here(way: str, place: Path, budget: int) -> Found:
    """A few steps with gradient checkpointing. Raises what the training raises."""
    with AnonymousPeak() as peak, contextlib.ExitStack() as stack:
        base = load(place / ("bfloat16" if way == CAST else "checkpoint"))
        nbytes = llama.weight_bytes(base)
        store = None
        if way == PEER:
            base = accelerate.disk_offload(base, place / PEER, torch.device("cpu"))
        model = with_lora(base, recomputes=True)
        if way == PEER_LAST:
            model = accelerate.disk_offload(model, place / PEER_LAST, torch.device("cpu"))
        if way == OURS:
            store = stack.enter_context(tierstore.TierStore(budget, place / "store", device="cpu"))
            tierstore.dispatch_model(model, store)
        steps = list(itertools.islice(train(model, store), STEPS))
    return {"steps": steps, "base": nbytes, "gained": peak.gained}


def take_turns(how: str, place: Path, rounds: int) -> Found:
    """Step by step: the ordinary model, one on a store for each share, and the disk alone."""
    files = sorted((place / "checkpoint").glob("*.safetensors"))
    with contextlib.ExitStack() as stack:
        ordinary = load(place / "checkpoint")
        base = llama.weight_bytes(ordinary)
        training = {ORDINARY: train(with_lora(ordinary, how == RECOMPUTES), None)}
        for share in SHARES:
            directory = place / f"store {share}"
            store = tierstore.TierStore(int(share * base), directory, device="cpu")
            stack.enter_context(store)
            model = with_lora(load(place / "checkpoint"), how == RECOMPUTES)
            training[str(share)] = train(tierstore.dispatch_model(model, store), store)
        runs: dict[str, Any] = {name: steps.__next__ for name, steps in training.items()}
        warm = {name: [step() for _ in range(WARM_UP)] for name, step in runs.items()}
        runs["disk"] = lambda: direct_reads(files)
        found = machine.interleave(runs, rounds, doing=f"Training, {how}")
    return {"base": base, "warm": warm, **found}


def load(checkpoint: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


# --- all runs -------------------------------------------------------------------------------------


def run(way: str, place: Path, budget: int, limit: int | None = LIMIT) -> Found:
    """Nothing but `killed` or `error` if it did not come to an end. `limit`: bytes of RAM."""
    machine.drop_page_cache()
    if limit is None:
        return dict(answer(way, start(__file__, way, place, budget)))
    with MemoryGroup(limit) as group:
        timeout = PATIENCE if way in (PEER, PEER_LAST) else None
        try:
            done = start(__file__, way, place, budget, group, timeout=timeout)
        except subprocess.TimeoutExpired:
            return {"error": f"no {STEPS} steps within {PATIENCE} s"}
        peak = group.peak
    if done.returncode in (-9, 137):
        return {"killed": True}
    if done.returncode and way in (PEER, PEER_LAST):
        return {"error": done.stderr.strip().splitlines()[-1]}
    return dict(answer(way, done)) | {"peak": peak}


def median(steps: Sequence[Found], column: str) -> float:
    return machine.median(step[column] for step in steps)


def prepare(shape: llama.Shape, place: Path) -> None:
    """Both checkpoints."""
    checkpoint = llama.save(shape, place / "checkpoint")
    if not (place / "bfloat16" / "config.json").exists():
        model = load(checkpoint).to(torch.bfloat16)
        model.save_pretrained(place / "bfloat16", max_shard_size=shape.shard)


def memory(place: Path, budget: int, page: Page) -> list[Claim]:
    """What fits a small group, and what does not."""
    reference = run(ORDINARY, place, 0, None)
    found = {way: run(way, place, budget) for way in WAYS}
    page.text(
        f"Memory: {reference['base'] / 1e6:,.0f} MB of base, a budget of {budget / 1e6:,.0f} MB, "
        f"gradient checkpointing, in {LIMIT >> 20:,} MiB."
    )
    page.table(
        ("", "s, each step", "MB read", "MB written", "peak MiB", "anonymous MiB", "losses"),
        [
            memory_row(way, each, reference)
            for way, each in {"no limit": reference, **found}.items()
        ],
    )
    page.text(
        "MB read and written are the process's, for the last step. The peak is that of the group, "
        "page cache included; anonymous memory, over what the process had before."
    )
    ours = found[OURS]["steps"]
    written = sum(step["bytes_written"] for step in ours)
    equal = losses(ours) == losses(reference["steps"])
    return [
        Claim("memory: losses are those of the ordinary run, bit for bit", equal, at_least=1),
        Claim("memory: bytes that the store wrote in all steps", written, at_most=0),
        *(
            Claim(f"memory: killed in the group: {way}", "killed" in found[way], at_least=1)
            for way in (ORDINARY, CAST)
        ),
    ]


def memory_row(name: str, found: Found, reference: Found) -> list[str]:
    if "steps" not in found:
        return [name, "killed" if "killed" in found else f"`{found['error']}`", *[""] * 5]
    steps, other = found["steps"], losses(reference["steps"])
    differs = max(abs(one - two) for one, two in zip(losses(steps), other, strict=True))
    return [
        name,
        ", ".join(f"{step['seconds']:.1f}" for step in steps),
        *(f"{steps[-1][what] / 1e6:,.0f}" for what in ("read", "written")),
        f"{found['peak'] / 2**20:,.0f}" if "peak" in found else "-",
        f"{found['gained'] / 2**20:,.0f}",
        f"differ by {differs:.1e}" if differs else "equal",
    ]


def losses(steps: Sequence[Found]) -> list[float]:
    return [step["loss"] for step in steps]


COLUMNS = (
    "budget",
    "ordinary, s",
    "limit, s",
    "tierstore, s",
    "of it forward",
    "to the limit",
    "missing, MB",
    "read, MB",
    "stalled, s",
    "hits, late, misses",
    "CPU s, ordinary and so",
)


def speed(found: Mapping[str, Found], page: Page) -> Iterator[Claim]:
    """Seconds per step to the limit, by what `take_turns` found with checkpointing and without."""
    rows = []
    for how, share in itertools.product(found, SHARES):
        base, ordinary, ours = (found[how][name] for name in ("base", ORDINARY, str(share)))
        missing = 2 * (base - int(share * base))
        limits = [
            max(step["seconds"], missing / bandwidth)
            for step, bandwidth in zip(ordinary, found[how]["disk"], strict=True)
        ]
        seconds = [
            step["seconds"] + step["read_between"] / bandwidth
            for step, bandwidth in zip(ours, found[how]["disk"], strict=True)
        ]
        read = machine.median(step["bytes_read"] + step["read_between"] for step in ours)
        ratios = machine.ratios(seconds, limits)
        name = f"{share:.0%}, {how}"
        rows.append(
            [
                name,
                machine.spread([step["seconds"] for step in ordinary]),
                machine.spread(limits),
                machine.spread(seconds),
                f"{median(ours, 'forward'):.2f}",
                machine.spread(ratios),
                f"{missing / 1e6:,.0f}",
                f"{read / 1e6:,.0f}",
                machine.spread([step["stalled_seconds"] for step in ours]),
                ", ".join(f"{median(ours, what):.0f}" for what in ("hits", "late", "misses")),
                f"{median(ordinary, 'computing'):.1f}, {median(ours, 'computing'):.1f}",
            ]
        )
        yield Claim(f"{name}: to the limit", machine.median(ratios), at_most=1.15)
        yield Claim(f"{name}: losses are equal", losses(ordinary) == losses(ours), at_least=1)
    page.table(COLUMNS, rows)
    speeds = [b / 1e9 for each in found.values() for b in each["disk"]]
    page.text(
        f"Speed: figures of one step; {len(ordinary)} rounds, in another order each; medians, and "
        f"ranges in parentheses. Direct reads: {machine.spread(speeds)} GB/s."
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, required=True, help="on the disk to be measured (7 GB)")
    parser.add_argument("--small", action="store_true", help="a tiny model, to see that it runs")
    parser.add_argument("--rounds", type=int, default=5, help="of the part on speed")
    parser.add_argument("--markdown", type=Path, help="a page of Markdown to write")
    parser.add_argument("--run", choices=[*WAYS, RECOMPUTES, KEEPS], help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        work = take_turns if given.run in (RECOMPUTES, KEEPS) else run_here
        print(json.dumps(work(given.run, given.dir, given.budget)))
        return 0
    place = given.dir / ("small" if given.small else "full")
    place.mkdir(parents=True, exist_ok=True)
    prepare(SMALL if given.small else SHAPE, place)
    page = Page(__doc__, given.dir, ("torch", "transformers", "peft", "accelerate"))
    # Of `take_turns`, the number that is passed on is that of rounds.
    turns = {how: run(how, place, given.rounds, None) for how in (RECOMPUTES, KEEPS)}
    claims = list(speed(turns, page))
    claims += memory(place, SMALL_BUDGET if given.small else BUDGET, page)
    page.claims(claims)
    page.write(given.markdown)
    return 0 if all(claim.held for claim in claims) or given.small else 1


if __name__ == "__main__":
    sys.exit(main())
