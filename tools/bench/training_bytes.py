"""Bytes moved by a training step: a Llama with a LoRA, or trained as a whole

A Llama of about 47 MB in float32 with random weights, loaded from its checkpoint, with budgets from
10 to 100 % of its weights: in an `OffloadModel` with a frozen base and a LoRA (peft, rank 8), in a
fully trained `OffloadModel`, and in `dispatch_model` with the same LoRA; each with and without
checkpointing of its blocks. The figures are the bytes that the store reads in forward and backward,
and those that it writes in the whole step, averaged over the counted steps.

The limit of reads is the parameters that do not stay in RAM, once per pass, and three groups.
Frozen parameters stay in the RAM that the trained state leaves free; trained ones stay if they are
resident (see `state_buffers`), as the optimizer's tiles need the rest of the budget. The limit of
writes includes the activations that checkpointing keeps.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from tierstore import OffloadModel, OffloadOptimizer, TierStore, dispatch_model
from tierstore.model.tiers import Tier
from tools.bench.models import weight_bytes
from tools.bench.page import Claim
from tools.bench.runner import Bench, Run, value

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

PACKAGES = ("torch", "transformers", "peft")
WARM_UP, COUNTED = 2, 2
MOST, MOST_WRITTEN, GROUPS = 1.05, 1.1, 3
COPIES = 4
"""State bytes per byte of a trained parameter: the value, the gradient and two AdamW states."""
FROZEN, TRAINED, DISPATCH = "OffloadModel, frozen", "OffloadModel, all trained", "dispatch_model"
SHARES = [n / 10 for n in range(1, 11)]


def save(layers: int, directory: Path) -> Path:
    """Write a checkpoint of a Llama with random weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def load(checkpoint: Path, *, lora: bool) -> Any:
    """Load the model for training."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM.from_pretrained(checkpoint, dtype="auto")
    if lora:
        config = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
        model = peft.get_peft_model(model, config)
    return model.train()


def offloaded(way: str, recompute: bool, model: Any, store: TierStore) -> tuple[Any, Any]:
    """Offload a model to a store. Return it with its optimizer."""
    if way == DISPATCH:
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        dispatch_model(model, store)
        trained = [p for p in model.parameters() if p.requires_grad]
        return model, torch.optim.AdamW(trained, lr=1e-3)
    ours = OffloadModel(model, store, checkpoint_activation=recompute)
    return ours, OffloadOptimizer(ours, store, torch.optim.AdamW, lr=1e-3)


def moved(way: str, recompute: bool, checkpoint: Path, place: Path, share: float) -> Run:
    """Count the bytes that a step moves, with a budget of a `share` of the weights."""
    shutil.rmtree(place, ignore_errors=True)
    model = load(checkpoint, lora=way != TRAINED)
    weights = weight_bytes(model)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    budget, tokens = int(share * weights), torch.arange(2 * 16).reshape(2, 16)
    with TierStore(budget, place, device="cpu") as store:
        begun = store.stats().bytes_written
        ours, optimizer = offloaded(way, recompute, model, store)
        base_written = store.stats().bytes_written - begun
        counts: list[list[int]] = []
        for _ in range(WARM_UP + COUNTED):
            marks = [store.stats()]
            loss = ours(input_ids=tokens, labels=tokens).loss
            marks.append(store.stats())
            loss.backward()
            marks.append(store.stats())
            optimizer.step()
            optimizer.zero_grad()
            marks.append(store.stats())
            reads = [b.bytes_read - a.bytes_read for a, b in itertools.pairwise(marks)]
            written, shipped = (
                count(marks[-1]) - count(marks[0])
                for count in (
                    lambda stats: stats.bytes_written,
                    lambda stats: stats.activations.shipped_bytes,
                )
            )
            counts.append([*reads, written, shipped])
        means = [sum(each) / COUNTED for each in zip(*counts[WARM_UP:], strict=True)]
        group = max(g.nbytes for g in store.snapshot().groups)
        missed, not_kept = without_room(way, store, weights, trained, budget)
    run: Run = dict(zip(("forward", "backward", "step", "written", "shipped"), means, strict=True))
    return run | {
        "read": run["forward"] + run["backward"],
        "most": MOST * (2 * missed + GROUPS * group),
        "most_written": MOST_WRITTEN * not_kept + run["shipped"],
        "base_written": base_written,  # before the first step
        "weights": weights,
    }


def without_room(
    way: str, store: TierStore, weights: int, trained: int, budget: int
) -> tuple[int, int]:
    """Return the bytes of parameters and of trained state that do not stay in RAM.

    Between steps, only resident trained state is in RAM.
    """
    state = [g for g in store.snapshot().groups if g.key.startswith(("training/", "optimizer/"))]
    away = [g for g in state if Tier.HOST.name not in g.tiers and "/frozen" not in g.key]
    written = sum(g.nbytes for g in away)
    if way == TRAINED:
        values = [g for g in away if g.key.startswith("training/") and "gradient" not in g.key]
        return sum(g.nbytes for g in values), written
    copies = COPIES if way == FROZEN else 1
    room = max(budget - copies * trained, 0)
    return max(weights - trained - room, 0), min(written, copies * trained)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", help="run only ways of this name")
    parser.add_argument(
        "--shares", type=float, nargs="+", default=SHARES, help="budgets as shares of the weights"
    )


def measure(bench: Bench) -> Iterator[Claim]:
    checkpoint = save(4 if bench.small else 26, bench.kept / "checkpoint")
    columns = {
        "read: forward, MB": value("forward", 1, 1e-6),
        "backward, MB": value("backward", 1, 1e-6),
        "both": value("read", 1, 1e-6),
        "limit": value("most", 1, 1e-6),
        "optimizer, MB": value("step", 1, 1e-6),
        "written in a step, MB": value("written", 1, 1e-6),
        "limit of writes": value("most_written", 1, 1e-6),
        "written before the first step, MB": value("base_written", 1, 1e-6),
    }
    for way, recompute in itertools.product((FROZEN, TRAINED, DISPATCH), (False, True)):
        if bench.options.only not in (None, way):
            continue
        name, place = f"{way}, checkpointed" if recompute else way, bench.scratch / "store"
        shares = bench.options.shares
        runs = {f"{s:.0%}": moved(way, recompute, checkpoint, place, s) for s in shares}
        bench.page.text(f"## {name}")
        bench.page.compare("budget, of the weights", runs, columns)
        found = list(runs.values())
        over = max(run["read"] / run["most"] for run in found)
        yield Claim(f"{name}: parameters read in a step / limit", over, at_most=1)
        rising = [(b["read"] - a["read"]) / a["weights"] for a, b in itertools.pairwise(found)]
        text = f"{name}: share of the weights read more with a larger budget"
        yield Claim(text, max(rising, default=0), at_most=0.01)
        written = max(run["written"] / (run["most_written"] or 1) for run in found)
        yield Claim(f"{name}: written in a step / limit", written, at_most=1)
        if way != TRAINED:
            base = max(run["base_written"] for run in found) / 1e6
            yield Claim(f"{name}: MB written before the first step", base, at_most=1)
