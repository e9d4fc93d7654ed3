"""Fine-tune a LoRA on a language model that does not fit in RAM.

The example makes a checkpoint of a Llama with random weights (nothing is downloaded), adds a LoRA
with peft, and trains it for a few steps with AdamW. It does so twice:

- plain: as usual;
- tierstore: after ``tierstore.dispatch_model``, under a RAM budget smaller than the model. The
  frozen weights are read from the checkpoint in the forward and backward pass, and never written.

At the end the example prints the cost of each step, the peak memory of weights, and whether losses
and the LoRA are equal bit for bit.

Takes about a minute on two cores, and 100 MB of disk. Needs peft and transformers; no GPU, no
network.

    python docs/examples/finetune_lora.py
    python docs/examples/finetune_lora.py --layers 20 --width 1024 --ram 256MB  # 1 GB of weights
    python docs/examples/finetune_lora.py --layers 32 --width 2048 --ram 2GB --workdir /nvme
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded

import peft
import torch
import transformers
from rich.console import Console
from rich.table import Table

from tierstore import TierStore, dispatch_model
from tierstore.model.sizes import parse_size

HEAD = 64
VOCABULARY = 512
SEQUENCES, TOKENS = 2, 32  # of one batch


def main() -> int:
    """Train both ways and compare."""
    options = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="tierstore-example-", dir=options.workdir) as directory:
        checkpoint = Path(directory) / "checkpoint"
        build(options).save_pretrained(checkpoint)
        plain = train(load(checkpoint), options.steps)
        with TierStore(f"{options.ram}B", Path(directory) / "store", device="cpu") as store:
            model = dispatch_model(load(checkpoint), store)
            ours = train(model, options.steps, store)
            stats = store.stats()
            memory = stats.peak_bytes["HOST"], stats.budget_bytes["HOST"] or 0
        weights = sum(parameter.nbytes for parameter in model.parameters())
    return report(plain, ours, weights, memory)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--layers", type=int, default=8, help="of the Llama (default: %(default)s)")
    add("--width", type=int, default=512, help="of a layer (default: %(default)s)")
    add("--ram", type=parse_size, default="30MB", help="the RAM budget (default: %(default)s)")
    add("--steps", type=int, default=4, help="steps of training (default: %(default)s)")
    add("--workdir", type=Path, help="where temporary files go (default: the system's directory)")
    options = parser.parse_args()
    if options.steps < 1 or options.width % HEAD:
        parser.error(f"--steps must be 1 or more, and --width a multiple of {HEAD}")
    return options


def build(options: argparse.Namespace) -> Any:
    """Build a Llama with random weights."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.width,
        intermediate_size=options.width * 11 // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=options.width // HEAD,
        num_key_value_heads=options.width // HEAD,
        max_position_embeddings=TOKENS,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def load(checkpoint: Path) -> Any:
    """Load the model and add a LoRA; peft freezes the rest."""
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    torch.manual_seed(0)
    return peft.get_peft_model(base, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))


def train(model: Any, steps: int, store: TierStore | None = None) -> dict[str, Any]:
    """Train the LoRA as usual."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    done = []
    for _ in range(steps):
        started, before = time.perf_counter(), store and store.stats()
        tokens = torch.randint(VOCABULARY, (SEQUENCES, TOKENS), generator=generator)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step = {"loss": loss.item(), "seconds": time.perf_counter() - started}
        if store is not None and before is not None:
            after = store.stats()
            step["read"] = after.bytes_read - before.bytes_read
            step["written"] = after.bytes_written - before.bytes_written
        done.append(step)
    return {"steps": done, "lora": {name: p.detach().clone() for name, p in trained.items()}}


def report(
    plain: dict[str, Any], ours: dict[str, Any], weights: int, memory: tuple[int, int]
) -> int:
    """Print a table, then whether the example succeeded, and return the exit code."""
    peak, budget = map(megabytes, memory)
    table = Table(
        title=f"Steps of {megabytes(weights)} of weights: {peak} in memory at most, of {budget}"
    )
    for name in ("step", "loss, plain", "loss", "read", "written", "seconds, plain", "seconds"):
        table.add_column(name, justify="right")
    for number, (one, other) in enumerate(zip(plain["steps"], ours["steps"], strict=True), 1):
        table.add_row(
            str(number),
            f"{one['loss']:.6f}",
            f"{other['loss']:.6f}",
            megabytes(other["read"]),
            megabytes(other["written"]),
            f"{one['seconds']:.2f}",
            f"{other['seconds']:.2f}",
        )
    Console().print(table)
    losses = [[step["loss"] for step in run["steps"]] for run in (plain, ours)]
    same = losses[0] == losses[1] and all(
        torch.equal(value, ours["lora"][name]) for name, value in plain["lora"].items()
    )
    read, written = (sum(step[what] for step in ours["steps"]) for what in ("read", "written"))
    if not same:
        print("FAILED: losses or the LoRA differ")
    elif not read:
        print("FAILED: everything fits the budget; use less --ram, or more --layers")
    elif written:
        print("FAILED: frozen weights were written")
    else:
        print("OK: the same losses and LoRA, bit for bit, and nothing written")
    return 0 if same and read and not written else 1


def megabytes(count: float) -> str:
    """Format bytes as MB (1,000,000 bytes)."""
    return f"{count / 1e6:,.1f} MB"


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    sys.exit(main())
