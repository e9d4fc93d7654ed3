"""Train a model that FSDP2 spreads over processes, with each rank's shards in its own store.

Every rank trains the model twice: with FSDP2 alone, and on a store that is smaller than its shards,
gradients and states. Losses, norms and weights are the same to the last bit. The processes
communicate over gloo and compute on the CPU. Nothing is downloaded.

Takes less than a minute on two cores, and a few MB of disk. Needs only torch; no GPU, no network.

    python docs/examples/train_in_several_processes.py
    python docs/examples/train_in_several_processes.py --processes 4 --width 512 --ram 32MB
    torchrun --nproc-per-node 2 docs/examples/train_in_several_processes.py

Without `torchrun`, the example starts `--processes` ranks. `--ram` is the budget of each rank: at
least ten times the largest shard.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tierstore import OffloadModel, OffloadOptimizer, TierStore
from tierstore.model.sizes import parse_size

BLOCKS, BATCH = 12, 16


def main() -> int:
    """Start the ranks, unless torchrun did."""
    options = parse_arguments()
    if "RANK" in os.environ:
        return rank_of_torchrun(options)
    with tempfile.TemporaryDirectory(prefix="tierstore-example-") as folder:
        started: Any = torch.multiprocessing
        started.spawn(rank, (options.processes, folder, options), nprocs=options.processes)
        results = [torch.load(Path(folder) / f"{n}.pt") for n in range(options.processes)]
    show(results, options)
    return 0


def rank_of_torchrun(options: argparse.Namespace) -> int:
    """Run as a rank that torchrun started."""
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory(prefix="tierstore-example-") as folder:
        found = train(folder, options)
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, found)
    if dist.get_rank() == 0:
        show(results, options)
    dist.destroy_process_group()
    return 0


def rank(number: int, world: int, folder: str, options: argparse.Namespace) -> None:
    """Run as a rank that this example started."""
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=number, world_size=world)
    torch.save(train(f"{folder}/store-{number}", options), Path(folder) / f"{number}.pt")
    dist.destroy_process_group()


def sharded(width: int) -> nn.Module:
    """Build the same model in each rank, sharded over all ranks by blocks."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(BLOCKS)]
    model = nn.Sequential(*blocks)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(directory: str, options: argparse.Namespace) -> dict[str, float]:
    """Train both ways at once, compare, and return this rank's figures."""
    torch.set_num_threads(1)
    plain = sharded(options.width)
    usual = torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)

    module = sharded(options.width)
    with TierStore(ram_budget=options.ram, disk_dir=directory, device="cpu") as store:
        model = OffloadModel(module, store)
        optimizer = OffloadOptimizer(model, store, torch.optim.AdamW, lr=1e-3)
        loss = torch.zeros(())
        for step in range(options.steps):
            torch.manual_seed(1000 * step + dist.get_rank())  # each rank has its own batch
            x, y = torch.randn(BATCH, options.width), torch.randn(BATCH, options.width)

            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            norm = optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()

            expected = nn.functional.mse_loss(plain(x), y)
            expected.backward()
            norm_of_all: Any = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            usual.step()
            usual.zero_grad()
            assert torch.equal(loss, expected) and torch.equal(norm, norm_of_all.full_tensor())

        shards = [parameter.to_local() for parameter in model.parameters()]  # type: ignore[operator]
        for ours, other in zip(shards, plain.parameters(), strict=True):
            assert torch.equal(ours, other.to_local())  # type: ignore[operator]
        stats = store.stats()
        return {
            "loss": loss.item(),
            "state": 4 * sum(shard.nbytes for shard in shards),
            "peak": stats.peak_bytes["HOST"],
            "read": stats.bytes_read,
            "written": stats.bytes_written,
        }


def show(results: list[dict[str, float]], options: argparse.Namespace) -> None:
    """Print the state, the peak of RAM and the transfers of each rank."""
    console = Console()
    table = Table(title=f"{options.steps} steps, each rank with {options.ram / 1e6:.0f} MB of RAM")
    for name in ("rank", "loss", "state (MB)", "in RAM at most (MB)", "read (MB)", "written (MB)"):
        table.add_column(name, justify="right")
    for number, found in enumerate(results):
        moved = [f"{found[name] / 1e6:.1f}" for name in ("state", "peak", "read", "written")]
        table.add_row(str(number), f"{found['loss']:.4f}", *moved)
    console.print(table)
    assert all(found["peak"] <= options.ram for found in results)
    print("OK: every loss, norm and weight equals that of FSDP2 alone")


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2, help="how many ranks (default: 2)")
    parser.add_argument("--width", type=int, default=512, help="of the blocks (default: 512)")
    parser.add_argument("--ram", type=parse_size, default="12MB", help="of a rank (default: 12MB)")
    parser.add_argument("--steps", type=int, default=3, help="how many steps (default: 3)")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
