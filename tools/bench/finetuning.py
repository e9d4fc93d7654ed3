"""A LoRA on a frozen Llama larger than RAM: memory, and seconds per step against the limit

A Llama of 2.1 GB (float32, 18 layers, a sharded checkpoint) and a LoRA of peft (r=8, on the query
and value projections), trained with AdamW on 64 random tokens per step.

Memory: three steps with gradient checkpointing and a budget of 400 MB, in a control group of 1,000
MiB including page cache. Each way is a separate process with a cold page cache. The controls have
no store: one loads the same files, whose pages the system can evict and read again; one loads a
bfloat16 checkpoint, as most are published, and casts it to float32. Accelerate's `disk_offload` is
applied before or after peft.

Speed: budgets of 25 % and 50 % of the base, with and without gradient checkpointing, each of the
two in a separate process. There, the ordinary model (all weights in RAM) and those on a store take
turns step by step, so that a changing load affects all alike. The store bypasses the page cache.
The limit is a lower bound of a step: the longer of the ordinary step and of reading the missing
bytes, 2 x (base - budget) since forward and backward both need each weight, at the speed of direct
reads of the same files in that round.

Bytes that a store reads during another model's turn count for its next step: as bytes, and as the
seconds that direct reads of them take.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import peft
import torch
import transformers

import tierstore
from tools.bench import llama, machine
from tools.bench.anonymous import AnonymousPeak
from tools.bench.apart import Ended, Killed, apart
from tools.bench.memory_group import MemoryGroup
from tools.bench.page import Claim
from tools.bench.runner import Bench, Run, column, interleave, median, ratios, spread

PACKAGES = ("torch", "transformers", "peft", "accelerate")
ROUNDS = 5
FULL = llama.Shape(hidden=1536, intermediate=4096, layers=18)
SMALL = llama.Shape(hidden=256, intermediate=512, layers=6, shard="5MB")
LIMIT = 1000 << 20
SHARES = (0.25, 0.5)
STEPS = 3
PATIENCE = 300  # time limit in seconds of a peer in a control group, where it may thrash
WARM_UP = 2  # steps before the rounds, to learn the order of use

ORDINARY, OURS, CAST = "ordinary", "tierstore", "ordinary, cast to float32"
PEER, PEER_LAST = "disk_offload, then peft", "peft, then disk_offload"
RECOMPUTES, KEEPS = "checkpointing", "no checkpointing"
COUNTS = ("hits", "late", "misses")


def load(checkpoint: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


def with_lora(base: Any, recomputes: bool) -> Any:
    """Add a LoRA in the usual way: peft freezes the base."""
    torch.manual_seed(0)
    model = peft.get_peft_model(base, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def train(model: Any, store: tierstore.TierStore | None) -> Iterator[Run]:
    """Train forever. Yield the figures of each step: seconds, bytes, and numbers of waits."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    generator = torch.Generator().manual_seed(1)

    def now() -> Run:
        read, written = machine.disk_bytes()
        found: Run = {"seconds": time.perf_counter(), "read": read, "written": written}
        found["computing"] = time.process_time()
        if store is not None:
            stats = store.stats().as_dict()
            names = ("bytes_read", "bytes_written", "stalled_seconds", *COUNTS)
            found |= {name: stats[name] for name in names}
        return found

    after = now()
    while True:
        tokens = torch.randint(llama.VOCABULARY, (2, 32), generator=generator)
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


def some_steps(way: str, place: Path, budget: int, directory: Path) -> Run:
    """Train for a few steps with gradient checkpointing."""
    with AnonymousPeak() as peak, contextlib.ExitStack() as stack:
        base = load(place / ("bfloat16" if way == CAST else "checkpoint"))
        nbytes, store = llama.weight_bytes(base), None
        if way == PEER:
            base = accelerate.disk_offload(base, directory, torch.device("cpu"))
        model = with_lora(base, recomputes=True)
        if way == PEER_LAST:
            model = accelerate.disk_offload(model, directory, torch.device("cpu"))
        if way == OURS:
            store = stack.enter_context(tierstore.TierStore(budget, directory, device="cpu"))
            tierstore.dispatch_model(model, store)
        steps = list(itertools.islice(train(model, store), STEPS))
    return {"steps": steps, "base": nbytes, "gained": peak.gained}


def take_turns(how: str, place: Path, rounds: int, scratch: Path) -> Run:
    """Run steps in turns: the ordinary model, one on a store per share, and the disk alone."""
    files = sorted((place / "checkpoint").glob("*.safetensors"))
    with contextlib.ExitStack() as stack:
        ordinary = load(place / "checkpoint")
        base = llama.weight_bytes(ordinary)
        training = {ORDINARY: train(with_lora(ordinary, how == RECOMPUTES), None)}
        for share in SHARES:
            store = tierstore.TierStore(int(share * base), scratch / f"{how} {share}", device="cpu")
            stack.enter_context(store)
            model = with_lora(load(place / "checkpoint"), how == RECOMPUTES)
            training[str(share)] = train(tierstore.dispatch_model(model, store), store)
        for steps in training.values():
            list(itertools.islice(steps, WARM_UP))
        sides: dict[str, Any] = {name: steps.__next__ for name, steps in training.items()}
        found = interleave(sides | {"disk": lambda: machine.direct_reads(files)}, rounds)
    return {"base": base, **found}


def in_a_group(way: str, place: Path, budget: int, directory: Path) -> Run:
    """Train with little memory. If training fails, return only `ended`, the reason."""
    peer = way in (PEER, PEER_LAST)
    with MemoryGroup(LIMIT) as group:
        try:
            timeout = PATIENCE if peer else None
            words = way, place, budget, directory
            found: Run = apart(some_steps, *words, group=group, timeout=timeout)
        except Killed:
            return {"ended": "killed"}
        except Ended as error:
            if not peer:
                raise
            return {"ended": f"`{str(error).splitlines()[-2:][0]}`"}
        return found | {"peak": group.peak}


def memory(bench: Bench) -> Iterator[Claim]:
    """Measure which ways fit in a small control group."""
    place, budget = bench.kept, 8_000_000 if bench.small else 400_000_000
    reference: Run = apart(some_steps, ORDINARY, place, 0, bench.scratch / "none")
    expected = column(reference["steps"], "loss")
    found = {}
    for way in (ORDINARY, OURS, CAST, PEER, PEER_LAST):
        bench.drop_cache()
        found[way] = in_a_group(way, place, budget, bench.scratch / way)
    bench.page.text(
        f"Memory: {reference['base'] / 1e6:,.0f} MB of base, a budget of {budget / 1e6:,.0f} MB, "
        f"gradient checkpointing, in {LIMIT >> 20:,} MiB."
    )

    def row(name: str, run: Run) -> list[str]:
        if "ended" in run:
            return [name, run["ended"], *[""] * 5]
        steps = run["steps"]
        off = max(abs(a - b) for a, b in zip(column(steps, "loss"), expected, strict=True))
        return [
            name,
            ", ".join(f"{seconds:.1f}" for seconds in column(steps, "seconds")),
            *(f"{steps[-1][way] / 1e6:,.0f}" for way in ("read", "written")),
            f"{run['peak'] / 2**20:,.0f}" if "peak" in run else "-",
            f"{run['gained'] / 2**20:,.0f}",
            f"differ by {off:.1e}" if off else "equal",
        ]

    titles = ("", "s, each step", "MB read", "MB written", "peak MiB", "anonymous MiB", "losses")
    rows = [row(name, run) for name, run in {"no limit": reference, **found}.items()]
    bench.page.table(titles, rows)
    bench.page.text(
        "MB read and written are those of the process in the last step. The peak is that of the "
        "control group including page cache; anonymous memory is relative to the process before."
    )
    ours = found[OURS]["steps"]
    equal = column(ours, "loss") == expected
    yield Claim("memory: losses are bit-identical to those of the ordinary run", equal, at_least=1)
    written = sum(column(ours, "bytes_written"))
    yield Claim("memory: bytes that the store wrote in all steps", written, at_most=0)
    for way in (ORDINARY, CAST):
        killed = found[way].get("ended") == "killed"
        yield Claim(f"memory: killed in the group: {way}", killed, at_least=1)


def speed(bench: Bench) -> Iterator[Claim]:
    """Compare seconds per step to the limit, with and without checkpointing."""
    rows, speeds = [], []
    for how in (RECOMPUTES, KEEPS):
        found = apart(take_turns, how, bench.kept, bench.rounds, bench.scratch)
        base, ordinary, disk = (found[name] for name in ("base", ORDINARY, "disk"))
        speeds += [each / 1e9 for each in disk]
        for share in SHARES:
            ours, missing = found[str(share)], 2 * (base - int(share * base))
            usual = column(ordinary, "seconds")
            limits = [max(s, missing / d) for s, d in zip(usual, disk, strict=True)]
            between = column(ours, "read_between")
            took = zip(column(ours, "seconds"), between, disk, strict=True)
            seconds = [s + nbytes / d for s, nbytes, d in took]
            read = [a + b for a, b in zip(column(ours, "bytes_read"), between, strict=True)]
            to_limit = ratios(seconds, limits)
            name = f"{share:.0%}, {how}"
            row = {
                "budget": name,
                "ordinary, s": spread(usual),
                "limit, s": spread(limits),
                "tierstore, s": spread(seconds),
                "forward": f"{median(column(ours, 'forward')):.2f}",
                "step / limit": spread(to_limit),
                "missing, MB": f"{missing / 1e6:,.0f}",
                "read, MB": f"{median(read) / 1e6:,.0f}",
                "stalled, s": spread(column(ours, "stalled_seconds")),
                ", ".join(COUNTS): ", ".join(f"{median(column(ours, n)):.0f}" for n in COUNTS),
                "CPU s: ordinary, store": ", ".join(
                    f"{median(column(steps, 'computing')):.1f}" for steps in (ordinary, ours)
                ),
            }
            rows.append(row)
            yield Claim(f"{name}: step / limit", median(to_limit), at_most=1.15)
            equal = column(ordinary, "loss") == column(ours, "loss")
            yield Claim(f"{name}: losses are equal", equal, at_least=1)
    bench.page.table(list(rows[0]), [list(row.values()) for row in rows])
    bench.page.text(
        f"Speed: figures per step; {bench.rounds} rounds in varying order; medians, and ranges in "
        f"parentheses. Direct reads: {spread(speeds)} GB/s."
    )


def measure(bench: Bench) -> Iterator[Claim]:
    shape, place = SMALL if bench.small else FULL, bench.kept
    llama.save(shape, place / "checkpoint")
    if not (place / "bfloat16" / "config.json").exists():
        model = load(place / "checkpoint").to(torch.bfloat16)
        model.save_pretrained(place / "bfloat16", max_shard_size=shape.shard)
    yield from speed(bench)
    yield from memory(bench)
