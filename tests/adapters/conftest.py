"""Fixtures: checkpoints and un-offloaded runs, each made once for all tests of the adapters."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.hooks import apply_group_offloading
from torch import nn

from tests import accelerator, pipelines
from tests.accelerator import DEVICES as DEVICES
from tests.store.helpers import open_store
from tierstore import TierStore

OFFLOAD_TYPES = ("block_level", "leaf_level")

Checkpoints = Callable[..., Path]


def acquires(store: TierStore) -> int:
    """Return the number of leases of groups."""
    stats = store.stats()
    return stats.hits + stats.late + stats.misses


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Return `checkpoint(kind, size="tiny", **seeds)`, which makes a read-only directory."""
    root = tmp_path_factory.mktemp("checkpoints")

    @functools.cache
    def build(name: str, kind: str, size: str, seeds: tuple[tuple[str, int], ...]) -> Path:
        return pipelines.BUILDERS[kind](root / name, size, **dict(seeds))

    def find(kind: str, size: str = "tiny", **seeds: int) -> Path:
        name = "-".join([kind, size, *(f"{part}{seed}" for part, seed in sorted(seeds.items()))])
        return build(name, kind, size, tuple(sorted(seeds.items())))

    return find


@dataclass(frozen=True)
class Reference:
    """The un-offloaded run of a reloaded pipeline.

    `weights` are the bytes of all its weights, `needed` those of the parameters whose modules ran.
    On an accelerator, `activations` is how far the run took the peak above the memory of weights
    and buffers there, and `read_back` how many bytes it copied from there.
    """

    output: torch.Tensor
    weights: int
    needed: int
    activations: int = 0
    read_back: int = 0


References = Callable[..., Reference]


@pytest.fixture(scope="session")
def reference(checkpoint: Checkpoints) -> References:
    """Return `reference(kind, size="tiny", device="cpu")`, which runs a plain pipeline once."""

    @functools.cache
    def run(kind: str, size: str = "tiny", device: str = "cpu") -> Reference:
        pipe = pipelines.load(kind, checkpoint(kind, size))
        weights = pipelines.weight_bytes(pipe)
        if device == "cpu":
            output, needed = run_and_count(kind, pipe, device)
            return Reference(output, weights, needed)
        pipe.to(device)
        start_measuring()
        resident = accelerator.module().memory_allocated()
        output, needed = run_and_count(kind, pipe, device)
        activations = accelerator.module().max_memory_allocated() - resident
        read_back = accelerator.counted("copied", "d2h")
        return Reference(output, weights, needed, activations, read_back)

    return run


def start_measuring() -> None:
    """Collect garbage, then reset the counters and peaks of the accelerator."""
    gc.collect()
    accelerator.start_counting()


def run_and_count(kind: str, pipe: Any, device: str) -> tuple[torch.Tensor, int]:
    """Return the output, and the bytes of the parameters of all modules whose forward ran."""
    parts = pipelines.components(pipe).values()
    with called_modules(*parts) as called:
        output = pipelines.run(kind, pipe, device=device)
    used = {id(p): p.nbytes for module in called for p in module.parameters(recurse=False)}
    return output, sum(used.values())


@contextmanager
def called_modules(*roots: nn.Module) -> Iterator[set[nn.Module]]:
    """Collect every module below `roots` that is called inside the context."""
    called: set[nn.Module] = set()
    hooks = [
        module.register_forward_pre_hook(lambda module, args: called.add(module))
        for root in roots
        for module in root.modules()
    ]
    yield called
    for hook in hooks:
        hook.remove()


def a_third_of(target: Any, disk_dir: Path, device: str) -> TierStore:
    """Return a store whose budgets are a third of the weights."""
    return open_store(disk_dir, pipelines.weight_bytes(target) // 3, device)


def diffusers_offload(target: Any, directory: Path, offload_type: str = "block_level") -> None:
    """Offload with diffusers' own disk offload, on the CPU."""
    settings = {
        "onload_device": torch.device("cpu"),
        "offload_type": offload_type,
        "num_blocks_per_group": 1 if offload_type == "block_level" else None,
        "offload_to_disk_path": str(directory),
    }
    if isinstance(target, nn.Module):
        apply_group_offloading(target, **settings)
    else:
        target.enable_group_offload(**settings)
