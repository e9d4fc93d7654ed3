"""Train a transformer with its activations in a store, and get the same weights.

The example builds a WanTransformer3DModel (the trained part of a video pipeline) with random
weights, and trains it for a few steps with AdamW. It does so twice, each time in a new process:

- plain: as usual;
- tierstore: with ``tierstore.offload_activations`` around the forward, under a RAM budget.

At the end it prints the cost of each run, and whether losses and weights are equal bit for bit.
Memory is anonymous memory above a baseline, read from /proc. The baseline is taken after a step on
a tiny batch: it has weights, gradients and AdamW's state, so the rest is activations.

Takes some minutes on two cores, and 50 MB of disk. Needs diffusers; no GPU, no network.

    python docs/examples/train_offloaded.py
    python docs/examples/train_offloaded.py --budget 32MB --steps 5
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import diffusers
import torch
from rich.console import Console
from rich.table import Table

CHANNELS, FRAMES, SIDE = 16, 4, 32  # latents; a patch is 1x2x2, so these are 1,024 tokens
TEXT_TOKENS, TEXT_WIDTH = 32, 256


def main() -> int:
    """Train both ways and compare."""
    options = parse_arguments()
    if options.role:
        run_child(options)
        return 0
    with tempfile.TemporaryDirectory(prefix="tierstore-example-", dir=options.workdir) as directory:
        arguments = ["--budget", options.budget, "--steps", options.steps]
        arguments += ["--min-size", options.min_size]
        plain = run_in_fresh_process("plain", Path(directory), arguments)
        offloaded = run_in_fresh_process("tierstore", Path(directory), arguments)
    return report(plain, offloaded, options.budget)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line. ``--role`` and ``--result`` are for the processes that it starts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--budget", default="64MB", help="RAM for activations (default: %(default)s)")
    add("--min-size", default="1MB", help="offload no smaller tensors (default: %(default)s)")
    add("--steps", type=int, default=3, help="steps of training (default: %(default)s)")
    add("--workdir", type=Path, help="where temporary files go (default: the system's directory)")
    add("--role", choices=("plain", "tierstore"), help=argparse.SUPPRESS)
    add("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps must be 1 or more")
    return options


# --- the two runs ---------------------------------------------------------------------------------


def run_plain(training: Training, steps: int) -> dict[str, Any]:
    """Train as usual."""
    with measure_memory() as memory:
        done = [training.step() for _ in range(steps)]
    return {"steps": done, **memory}


def run_offloaded(training: Training, steps: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train with saved activations in a store, within the budget."""
    import tierstore

    disk_dir = options.result.parent / "store"
    with (
        measure_memory() as memory,
        tierstore.TierStore(options.budget, disk_dir, device="cpu") as store,
    ):
        offload = tierstore.offload_activations(
            store, min_size=options.min_size, model=training.model
        )
        done = [training.step(offload) for _ in range(steps)]
        stats = store.stats().as_dict()
    return {"steps": done, **memory, **stats}


class Training:
    """The model, its optimizer and its data, with the same random numbers in every run."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = diffusers.WanTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=128,
            ffn_dim=1024,
            num_layers=10,
            text_dim=TEXT_WIDTH,
            freq_dim=256,
            rope_max_seq_len=32,
        ).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._update(self._loss(side=2))  # allocates gradients and AdamW's state

    def step(self, around: AbstractContextManager[Any] | None = None) -> tuple[float, float]:
        """Take a step, with the forward inside `around`. Return the loss and the seconds."""
        started = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=False)
        with around or nullcontext():
            loss = self._loss(SIDE)
        value = self._update(loss)
        return value, time.perf_counter() - started

    def _loss(self, side: int) -> torch.Tensor:
        """Compute the loss of flow matching: predict the velocity from the video to noise."""
        video, noise = torch.randn(2, 1, CHANNELS, FRAMES, side, side)
        timestep = torch.randint(1, 1000, (1,))
        share = timestep / 1000
        velocity = self.model(
            hidden_states=(1 - share) * video + share * noise,
            timestep=timestep,
            encoder_hidden_states=torch.randn(1, TEXT_TOKENS, TEXT_WIDTH),
            return_dict=False,
        )[0]
        return torch.nn.functional.mse_loss(velocity, noise - video)

    def _update(self, loss: torch.Tensor) -> float:
        loss.backward()
        self.optimizer.step()
        return loss.item()


# --- measuring ------------------------------------------------------------------------------------


@contextlib.contextmanager
def measure_memory() -> Iterator[dict[str, int]]:
    """Sample memory every 5 ms; after the block, the dict has the peak above the start."""
    start = peak = anonymous_memory()
    done = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, anonymous_memory())

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    gained: dict[str, int] = {}
    try:
        yield gained
    finally:
        done.set()
        sampler.join()
        gained["anon"] = peak - start


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
    training = Training()
    if options.role == "plain":
        figures = run_plain(training, options.steps)
    else:
        figures = run_offloaded(training, options.steps, options)
    figures["weights"] = training.model.state_dict()
    torch.save(figures, options.result)


# --- the table ------------------------------------------------------------------------------------


def report(plain: dict[str, Any], offloaded: dict[str, Any], budget: str) -> int:
    """Print the table, then whether the example succeeded, and return the exit code."""
    losses = [[loss for loss, _ in run["steps"]] for run in (plain, offloaded)]
    identical = {
        "losses": losses[0] == losses[1],
        "weights": all(
            torch.equal(tensor, offloaded["weights"][name])
            for name, tensor in plain["weights"].items()
        ),
    }
    count = len(losses[0])
    table = Table(title=f"WanTransformer3DModel, activations in {budget} of RAM")
    table.add_column(f"{count} steps; bytes are of one")
    table.add_column("plain", justify="right")
    table.add_column("tierstore", justify="right")
    table.add_row(
        "peak RAM over weights, AdamW", megabytes(plain["anon"]), megabytes(offloaded["anon"])
    )
    for name, total in activation_rows(offloaded["activations"]):
        table.add_row(name, "-", megabytes(total / count))
    table.add_row("written to disk", "-", megabytes(offloaded["bytes_written"] / count))
    table.add_row("read from disk", "-", megabytes(offloaded["bytes_read"] / count))
    for tier, peak in offloaded["peak_bytes"].items():
        table.add_row(f"peak of the store, {tier}", "-", megabytes(peak))
    seconds = [min(seconds for _, seconds in run["steps"]) for run in (plain, offloaded)]
    table.add_row("seconds per step, the fastest", *(f"{each:.2f}" for each in seconds))
    for name, same in identical.items():
        table.add_row(f"identical {name}", "-", "yes" if same else "NO")
    Console().print(table)
    same = all(identical.values())
    outcome = "OK: the same losses and weights, bit for bit," if same else "FAILED: they differ,"
    print(f"{outcome} with {megabytes(offloaded['anon'])} instead of {megabytes(plain['anon'])}")
    return 0 if same else 1


def activation_rows(figures: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield how many saved bytes were offloaded, kept (by reason) and shared."""
    yield "saved by autograd", figures["saved_bytes"]
    yield "  shipped to the store", figures["shipped_bytes"]
    for reason, nbytes in figures["skipped"].items():
        yield f"  left alone: {reason}", nbytes
    yield "shared with what was saved", figures["deduplicated_bytes"]


def megabytes(count: float) -> str:
    """Format bytes as MB (1,000,000 bytes)."""
    return f"{count / 1e6:,.1f} MB"


if __name__ == "__main__":
    diffusers.utils.logging.set_verbosity_error()
    sys.exit(main())
