"""Run a language model in a third of the memory that its weights take, with the same text.

The example writes a sharded checkpoint of a Llama with random weights (nothing is downloaded),
layer by layer, so the model may be larger than memory. Then it

- generates a few tokens with the plain model;
- builds the model without memory, dispatches it with its checkpoint, and generates again;
- merges a LoRA into one layer of each model, and generates with both.

At the end it prints the cost, and whether the tokens are the same.

Takes less than a minute on two cores, and 120 MB of disk. Needs transformers and accelerate; no
GPU, no network.

    python docs/examples/run_larger_than_memory.py
    python docs/examples/run_larger_than_memory.py --size 8GB --ram 2GB --dir /nvme/example

With --dir, the checkpoint is kept and used again. The plain model's weights are mapped from the
files, so it runs in any case, but waits for the disk if memory is too small.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded

import accelerate
import torch
import transformers
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from transformers.generation.streamers import BaseStreamer

from tierstore import Stats, TierStore, edit_weights, load_checkpoint_and_dispatch
from tierstore.model.sizes import parse_size

LAYERS = 16
HEAD = 64
VOCABULARY = 2048
PROMPT = 16
NOT_TIMED = 3  # the first tokens, during which the order of use is learned


def main() -> int:
    """Make the checkpoint if there is none, run it both ways, and compare."""
    options = parse_arguments()
    if options.dir is not None:
        return run(options, options.dir)
    with tempfile.TemporaryDirectory(prefix="tierstore-example-") as directory:
        return run(options, Path(directory))


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--size", type=parse_size, default="100MB", help="of all weights (default: %(default)s)")
    add("--ram", help='RAM for the weights, such as "64MB" (default: a third of them)')
    add("--dir", type=Path, help="where the checkpoint and the store are (default: temporary)")
    add("--tokens", type=int, default=12, help="how many to write (default: %(default)s)")
    options = parser.parse_args()
    if options.tokens <= NOT_TIMED + 1:
        parser.error(f"--tokens must be {NOT_TIMED + 2} or more: the first are not timed")
    return options


def run(options: argparse.Namespace, directory: Path) -> int:
    """Run the plain model, then the dispatched one."""
    checkpoint = directory / f"llama-{options.size}"
    if not (checkpoint / "config.json").exists():
        print(f"writing a Llama to {checkpoint}", flush=True)
        save(config_for(options.size), checkpoint)

    print("running: plain", flush=True)
    model = transformers.LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    expected = [write(model, options.tokens)]
    merge_lora(model)
    expected.append(write(model, options.tokens))
    del model

    print("running: tierstore", flush=True)
    budget = options.ram or f"{weights // 3}B"
    with TierStore(ram_budget=budget, disk_dir=directory / "store", device="cpu") as store:
        with accelerate.init_empty_weights():  # no memory, no values
            model = transformers.LlamaForCausalLM(read_config(checkpoint)).eval()
        load_checkpoint_and_dispatch(model, checkpoint, store)

        found = [write(model, options.tokens, store)]
        before = store.stats()
        merge_lora(model)
        merged = store.stats()
        found.append(write(model, options.tokens, store))
    return report(weights, expected, found, before, merged)


# --- the model ------------------------------------------------------------------------------------


def config_for(size: int) -> transformers.LlamaConfig:
    """Configure a Llama of about `size` bytes (a layer takes some 49 * width**2 bytes)."""
    heads = max(1, round(math.sqrt(size / LAYERS / 49) / HEAD))
    return transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=heads * HEAD,
        intermediate_size=heads * HEAD * 11 // 4,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,  # generates until max_new_tokens
        dtype="float32",
    )


def read_config(checkpoint: Path) -> transformers.LlamaConfig:
    """Read the config of a checkpoint."""
    return transformers.LlamaConfig.from_pretrained(checkpoint)


def save(config: transformers.LlamaConfig, checkpoint: Path) -> None:
    """Write a checkpoint of random weights with a shard per layer and an index, as on the hub."""
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(config).state_dict()
    checkpoint.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    weight_map = {}
    for shard, names in itertools.groupby(empty, key=shard_of):
        tensors = {name: random_weight(empty[name], generator) for name in names}
        save_file(tensors, checkpoint / shard, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, shard))
    index = {"metadata": {}, "weight_map": weight_map}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    config.save_pretrained(checkpoint)  # last: marks the checkpoint as complete


def shard_of(name: str) -> str:
    """Return the file of a weight: `model.layers.3.mlp.up_proj.weight` is in `layers.3`."""
    words = name.split(".")
    part = ".".join(words[1:3]) if words[1] == "layers" else words[-2]
    return f"model-{part}.safetensors"


def random_weight(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a random weight that roughly preserves the scale of activations."""
    if like.ndim == 1:  # a norm
        return torch.ones(like.shape)
    edge = math.sqrt(3 / like.shape[-1])
    return torch.empty(like.shape).uniform_(-edge, edge, generator=generator)


# --- running it -----------------------------------------------------------------------------------


class Written(BaseStreamer):
    """Generated tokens, with the time and the bytes read so far after each."""

    def __init__(self, store: TierStore | None) -> None:
        self.store = store
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.read: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        """Called by transformers, with the prompt first."""
        self.times.append(time.perf_counter())
        self.read.append(self.store.stats().bytes_read if self.store else 0)

    def end(self) -> None:
        """Called by transformers."""

    def seconds_per_token(self) -> float:
        """Median seconds of the timed tokens."""
        return statistics.median(differences(self.times)[NOT_TIMED:])

    def read_per_token(self) -> float:
        """Mean bytes read per timed token (a prefetch may read for the next token)."""
        return statistics.mean(differences(self.read)[NOT_TIMED:])


def differences(values: list[Any]) -> list[Any]:
    """Return the differences of neighbouring values."""
    return [after - before for before, after in itertools.pairwise(values)]


@torch.no_grad()
def write(model: Any, count: int, store: TierStore | None = None) -> Written:
    """Generate greedily, with a plain or a dispatched model."""
    written = Written(store)
    prompt = torch.arange(1, PROMPT + 1)[None]
    tokens = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=count,
        do_sample=False,
        streamer=written,
    )
    written.tokens = tokens[0, PROMPT:].tolist()
    return written


def merge_lora(model: Any) -> None:
    """Add a product of rank 4 to one weight, of a plain or a dispatched model."""
    generator = torch.Generator().manual_seed(1)
    with edit_weights(model.model.layers[LAYERS // 2].mlp.down_proj) as layer:
        height, width = layer.weight.shape
        up = torch.randn(height, 4, generator=generator)
        down = torch.randn(4, width, generator=generator)
        layer.weight.data += (up @ down / math.sqrt(width)).to(layer.weight.device)


# --- the table ------------------------------------------------------------------------------------


def report(
    weights: int, expected: list[Written], found: list[Written], before: Stats, merged: Stats
) -> int:
    """Print the table, then whether the example succeeded, and return the exit code."""
    same = [a.tokens == b.tokens for a, b in zip(expected, found, strict=True)]
    differs = expected[0].tokens != expected[1].tokens
    plain, ours = expected[0], found[0]
    table = Table(title="A Llama, plain and dispatched")
    table.add_column(f"{len(ours.tokens)} tokens")
    table.add_column("plain", justify="right")
    table.add_column("tierstore", justify="right")
    table.add_row("weights", megabytes(weights), megabytes(weights))
    table.add_row("RAM budget", "-", megabytes(before.budget_bytes["HOST"] or 0))
    for tier, peak in before.peak_bytes.items():
        table.add_row(f"peak of the store, {tier}", "-", megabytes(peak))
    table.add_row("read per token", "-", megabytes(ours.read_per_token()))
    table.add_row("written per token", "-", megabytes(before.bytes_written / len(ours.tokens)))
    seconds = (f"{each.seconds_per_token():.3f}" for each in (plain, ours))
    table.add_row("seconds per token", *seconds)
    table.add_row("same tokens", "-", "yes" if same[0] else "NO")
    table.add_row(
        "written by the merge", "-", megabytes(merged.bytes_written - before.bytes_written)
    )
    table.add_row("same tokens, LoRA merged", "-", "yes" if same[1] else "NO")
    Console().print(table)
    if all(same) and differs:
        print("OK: the same tokens, before and after a layer was changed")
        return 0
    print("FAILED: other tokens" if differs else "FAILED: the merge changed nothing")
    return 1


def megabytes(count: float) -> str:
    """Format bytes as MB (1,000,000 bytes)."""
    return f"{count / 1e6:,.1f} MB"


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    sys.exit(main())
