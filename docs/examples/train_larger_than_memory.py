"""Train a transformer whose parameters, gradients and optimizer states do not fit in RAM.

The example builds a Llama with random weights (nothing is downloaded) and trains it for a few
steps with AdamW on generated tokens. It does so twice, each time in a new process:

- plain: as usual;
- tierstore: with ``tierstore.OffloadModel`` and ``tierstore.OffloadOptimizer``, under a RAM budget
  smaller than the training state.

Both recompute each layer in the backward pass, so activations take little memory. At the end the
example prints the cost of each step, and whether losses and weights are equal bit for bit. Memory
is anonymous memory beyond that of the process before the model was built, read from /proc.

Takes some minutes on two cores, and 240 MB of disk. Needs transformers; no GPU, no network.

    python docs/examples/train_larger_than_memory.py
    python docs/examples/train_larger_than_memory.py --size 2GB --ram 1GB --workdir /nvme
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded

import torch
import transformers
from rich.console import Console
from rich.table import Table

from tierstore import OffloadModel, OffloadOptimizer, Stats, TierStore
from tierstore.model.sizes import parse_size

LAYERS = 16
HEAD = 64
VOCABULARY = 2048
USED = 64  # tokens in use
SEQUENCES, TOKENS = 2, 32  # of one batch
RATE = 3e-4
COPIES = 4  # a parameter, its gradient, and the two states of AdamW


def main() -> int:
    """Train both ways and compare."""
    options = parse_arguments()
    if options.role:
        run_child(options)
        return 0
    with tempfile.TemporaryDirectory(prefix="tierstore-example-", dir=options.workdir) as directory:
        arguments = ["--size", f"{options.size}B", "--ram", f"{options.ram}B"]
        arguments += ["--steps", options.steps]
        plain = run_in_fresh_process("plain", Path(directory), arguments)
        ours = run_in_fresh_process("tierstore", Path(directory), arguments)
    return report(plain, ours)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line. ``--role`` and ``--result`` are for the processes that it starts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--size", type=parse_size, default="120MB", help="of all parameters (default: %(default)s)")
    add("--ram", type=parse_size, default="100MB", help="the RAM budget (default: %(default)s)")
    add("--steps", type=int, default=4, help="steps of training (default: %(default)s)")
    add("--workdir", type=Path, help="where temporary files go (default: the system's directory)")
    add("--role", choices=("plain", "tierstore"), help=argparse.SUPPRESS)
    add("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps must be 1 or more")
    return options


# --- the two runs ---------------------------------------------------------------------------------


def run_plain(options: argparse.Namespace) -> dict[str, Any]:
    """Train as usual."""
    with Memory() as memory:
        model = build(options.size)
        recompute(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
        memory.next("training")
        done = []
        for batch in batches(options.steps):
            started = time.perf_counter()
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            done.append({"loss": loss.item(), "seconds": time.perf_counter() - started})
    return {"steps": done, "memory": memory.peaks, "weights": model.state_dict()}


def run_offloaded(options: argparse.Namespace) -> dict[str, Any]:
    """Train with parameters, gradients and states in a store."""
    disk_dir = options.result.parent / "store"
    with Memory() as memory, TierStore(f"{options.ram}B", disk_dir, device="cpu") as store:
        model = OffloadModel(build(options.size), store, checkpoint_activation=True)
        optimizer = OffloadOptimizer(model, store, torch.optim.AdamW, lr=RATE)
        memory.next("training")
        done = []
        for batch in batches(options.steps):
            started, before = time.perf_counter(), store.stats()
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            seconds = time.perf_counter() - started
            done.append({"loss": loss.item(), "seconds": seconds, **moved(before, store.stats())})
        memory.next("saving")
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        stats = store.stats().as_dict()
    return {"steps": done, "memory": memory.peaks, "weights": weights, "stats": stats}


def build(size: int) -> Any:
    """Build a Llama of about `size` bytes (a layer takes some 49 * width**2 bytes)."""
    heads = max(1, round(math.sqrt(size / LAYERS / 49) / HEAD))
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=heads * HEAD,
        intermediate_size=heads * HEAD * 11 // 4,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=TOKENS,
        use_cache=False,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).train()


def recompute(model: Any) -> None:
    """Recompute each layer in the backward pass (under another name before transformers 5)."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)()


def batches(count: int) -> list[torch.Tensor]:
    """Make sequences of a few tokens that count up in steps, so there is something to learn."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(count):
        first = torch.randint(USED, (SEQUENCES, 1), generator=generator)
        stride = torch.randint(1, 4, (SEQUENCES, 1), generator=generator)
        made.append((first + stride * torch.arange(TOKENS)) % USED)
    return made


def moved(before: Stats, after: Stats) -> dict[str, int]:
    """Return the bytes read from disk and written to it between two `stats()`."""
    return {
        "read": after.bytes_read - before.bytes_read,
        "written": after.bytes_written - before.bytes_written,
    }


# --- measuring ------------------------------------------------------------------------------------


class Memory:
    """Samples memory every 5 ms. `peaks` has the peak above the start for each part of a run."""

    def __init__(self) -> None:
        self.peaks = {"building": 0}
        self._part = "building"
        self._done = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Memory:
        self._start = anonymous_memory()
        self._sampler.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._sampler.join()

    def next(self, part: str) -> None:
        """Begin another part of the run."""
        self.peaks[part] = 0
        self._part = part

    def _sample(self) -> None:
        while not self._done.wait(0.005):
            part = self._part
            self.peaks[part] = max(self.peaks[part], anonymous_memory() - self._start)


def anonymous_memory() -> int:
    """Return the bytes of this process's anonymous memory in RAM."""
    status = Path("/proc/self/status").read_text()
    lines = dict(line.split(":", 1) for line in status.splitlines())
    return int(lines["RssAnon"].split()[0]) * 1024


def run_in_fresh_process(role: str, directory: Path, arguments: list[Any]) -> dict[str, Any]:
    """Run this file in a new process, so that earlier allocations are not in its figures."""
    print(f"running: {role}", flush=True)
    result = directory / f"{role}.pt"
    command = [sys.executable, __file__, "--role", role, "--result", result, *arguments]
    subprocess.run([str(word) for word in command], check=True)
    figures: dict[str, Any] = torch.load(result)
    return figures


def run_child(options: argparse.Namespace) -> None:
    """Do one run, in the process started for it."""
    figures = run_plain(options) if options.role == "plain" else run_offloaded(options)
    torch.save(figures, options.result)


# --- the tables -----------------------------------------------------------------------------------


def report(plain: dict[str, Any], ours: dict[str, Any]) -> int:
    """Print the tables, then whether the example succeeded, and return the exit code."""
    parameters = sum(tensor.nbytes for tensor in plain["weights"].values())
    Console().print(table_of_steps(plain["steps"], ours["steps"]))
    Console().print(table_of_memory(parameters, plain["memory"], ours["memory"], ours["stats"]))
    losses = [[step["loss"] for step in run["steps"]] for run in (plain, ours)]
    same = losses[0] == losses[1] and all(
        torch.equal(tensor, ours["weights"][name]) for name, tensor in plain["weights"].items()
    )
    streamed = sum(step["read"] for step in ours["steps"])
    if not same:
        print("FAILED: losses or weights differ")
    elif not streamed:
        print("FAILED: everything fits the budget; use less --ram, or a larger --size")
    else:
        with_less = [megabytes(run["memory"]["training"]) for run in (ours, plain)]
        print(
            "OK: the same losses and weights, bit for bit, with "
            f"{with_less[0]} instead of {with_less[1]}"
        )
    return 0 if same and streamed else 1


def table_of_steps(plain: list[dict[str, Any]], ours: list[dict[str, Any]]) -> Table:
    """Make a table with a row per step."""
    table = Table(title="Steps of a Llama, plain and with tierstore")
    for name in ("step", "loss, plain", "loss", "read", "written", "seconds, plain", "seconds"):
        table.add_column(name, justify="right")
    for number, (one, other) in enumerate(zip(plain, ours, strict=True), 1):
        table.add_row(
            str(number),
            f"{one['loss']:.6f}",
            f"{other['loss']:.6f}",
            megabytes(other["read"]),
            megabytes(other["written"]),
            f"{one['seconds']:.2f}",
            f"{other['seconds']:.2f}",
        )
    return table


def table_of_memory(
    parameters: int, plain: dict[str, int], ours: dict[str, int], stats: dict[str, Any]
) -> Table:
    """Make a table of peak memory, in the process and per tier."""
    table = Table(title="Memory")
    table.add_column("bytes")
    table.add_column("plain", justify="right")
    table.add_column("tierstore", justify="right")
    table.add_row("parameters", *[megabytes(parameters)] * 2)
    table.add_row("with gradients and AdamW's states", *[megabytes(COPIES * parameters)] * 2)
    table.add_row("RAM budget", "-", megabytes(stats["budget_bytes"]["HOST"]))
    table.add_row("peak RAM while building", *(megabytes(x["building"]) for x in (plain, ours)))
    table.add_row("peak RAM while training", *(megabytes(x["training"]) for x in (plain, ours)))
    for tier, peak in stats["peak_bytes"].items():
        table.add_row(f"peak of the store, {tier}", "-", megabytes(peak))
    return table


def megabytes(count: float) -> str:
    """Format bytes as MB (1,000,000 bytes)."""
    return f"{count / 1e6:,.1f} MB"


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    sys.exit(main())
