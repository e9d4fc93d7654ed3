"""Training with FSDP2 alone and on a store, side by side in each rank, and their comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

from tests.accelerator import ACCELERATOR, synchronize
from tierstore import OffloadModel, OffloadOptimizer, TierStore

WIDTH, INNER, TOKENS, LABELS = 67, 301, 101, 3
STEPS = 10


class Block(nn.Module):
    """A transformer block without attention. No dimension is even."""

    def __init__(self, inner: int = INNER) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks between a table and a head of three labels (on four ranks, one rank has none)."""

    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, LABELS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def build(frozen: bool = False) -> Model:
    """Build a model with the same weights each time."""
    torch.manual_seed(7)
    model = Model()
    if frozen:
        model.table.requires_grad_(False)
        for block in list(model.blocks)[::2]:
            block.requires_grad_(False)
    return model


def sharded(model: Model, mesh: DeviceMesh, **options: Any) -> Model:
    """Shard each block, and then the rest."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of this rank for a step."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    tokens = torch.randint(0, TOKENS, (4, 5), generator=generator)
    return tokens, torch.randn(4, LABELS, generator=generator)


def local(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    with torch.no_grad():
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def state_bytes(model: nn.Module) -> int:
    """Return the bytes of this rank's parameters and gradients, and of two states each."""
    trained = sum(local(p).nbytes for p in model.parameters() if p.requires_grad)
    return 3 * trained + sum(local(p).nbytes for p in model.parameters())


class ByWayOfTheCpu:
    """Collectives for the pretend accelerator, which gloo does not support."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any = None,
        async_op: bool = False,
    ) -> None:
        found = torch.empty(output_tensor.shape, dtype=output_tensor.dtype)
        if op is None:
            dist.all_gather_into_tensor(found, input_tensor.cpu(), group=group)
        else:
            dist.reduce_scatter_tensor(found, input_tensor.cpu(), op=op, group=group)
        output_tensor.copy_(found)


@dataclass(frozen=True)
class Case:
    """A way to train, and its options."""

    share: float = 0.5
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    frozen: bool = False
    reshard: bool | None = None
    bfloat16: bool = False
    checkpoint: bool = False
    replicas: int = 1
    device: str = "cpu"

    @property
    def options(self) -> dict[str, Any]:
        if self.device == ACCELERATOR:
            return {"lr": 1e-2, "foreach": False}
        if self.optimizer in FUSED:
            return {"lr": 1e-2, "fused": True}
        return {"lr": 1e-2, "momentum": 0.9, "foreach": False}

    def mesh(self) -> DeviceMesh:
        world = dist.get_world_size()
        if self.replicas == 1:
            return init_device_mesh(self.device, (world,))
        shape = (self.replicas, world // self.replicas)
        return init_device_mesh(self.device, shape, mesh_dim_names=("replicas", "shards"))

    def sharded(self) -> Model:
        options: dict[str, Any] = {}
        if self.reshard is not None:
            options["reshard_after_forward"] = self.reshard
        if self.bfloat16:
            options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        model = sharded(build(self.frozen).to(self.device), self.mesh(), **options)
        if self.device == ACCELERATOR:
            for part in [model, *model.blocks]:
                part.set_custom_all_gather(ByWayOfTheCpu())  # type: ignore[operator]
                part.set_custom_reduce_scatter(ByWayOfTheCpu())  # type: ignore[operator]
        return model


@dataclass
class Run:
    """One training: a model that `fully_shard` was applied to, and its optimizer."""

    case: Case
    model: nn.Module
    optimizer: Any
    clip: Callable[[float], Any]

    def losses(self, *steps: int) -> torch.Tensor:
        """Run forward and backward."""
        found = []
        for step in steps:
            tokens, wanted = (each.to(self.case.device) for each in batch(step))
            loss = functional.mse_loss(self.model(tokens), wanted)
            loss.backward()
            found.append(loss.detach())
        return torch.stack(found)

    def step(self) -> None:
        """Apply the gradients."""
        self.optimizer.step()
        if self.case.device == ACCELERATOR:
            # FSDP2 returns gradients to the stream that reduced them, and relies on their memory
            # being unchanged until that stream reuses it. Here it is not.
            synchronize()
        self.optimizer.zero_grad()


FUSED = (torch.optim.Adam, torch.optim.AdamW)
"""Optimizers whose fused kernels torch has for DTensors."""


def plain_run(case: Case) -> Run:
    """Run without a store."""
    model = case.sharded()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = case.optimizer(trained, **case.options)
    return Run(case, model, optimizer, lambda norm: nn.utils.clip_grad_norm_(trained, norm))


@contextmanager
def opened(case: Case, model: nn.Module, place: str) -> Iterator[TierStore]:
    """Open a store of this rank that holds a fraction of its state."""
    directory = Path(place) / str(dist.get_rank())
    budget = int(case.share * state_bytes(model))
    on_device = budget if case.device == ACCELERATOR else None
    with TierStore(budget, directory, device=case.device, device_budget=on_device) as store:
        yield store


@contextmanager
def on_store(case: Case, place: str) -> Iterator[tuple[Run, TierStore]]:
    """Run on a store of this rank."""
    module = case.sharded()
    with opened(case, module, place) as store:
        model = OffloadModel(module, store, checkpoint_activation=case.checkpoint)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = OffloadOptimizer(trained, store, case.optimizer, **case.options)
        yield Run(case, model, optimizer, optimizer.clip_grad_norm_), store
        model.disable()


def assert_equal(run: Run, expected: Run) -> None:
    """Check that parameters and gradients have the same names, shapes, bits and placements."""
    pairs = zip(run.model.named_parameters(), expected.model.named_parameters(), strict=True)
    for (name, ours), (other, theirs) in pairs:
        assert name == other
        assert_alike(ours, theirs, name)
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None:
            assert_alike(ours.grad, theirs.grad, f"gradient of {name}")
    for (name, ours), theirs in zip(
        run.model.named_parameters(), expected.model.parameters(), strict=True
    ):
        found, wanted = run.optimizer.state.get(ours), expected.optimizer.state.get(theirs)
        assert (found or {}).keys() == (wanted or {}).keys(), name
        for key in found or {}:
            assert_alike(found[key], wanted[key], f"{key} of {name}")


def assert_alike(ours: Any, theirs: Any, name: str) -> None:
    """Check that two DTensors, or two tensors, are the same."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, name
    assert getattr(ours, "placements", None) == getattr(theirs, "placements", None), name
    assert getattr(ours, "device_mesh", None) == getattr(theirs, "device_mesh", None), name
    assert torch.equal(local(ours).cpu(), local(theirs).cpu()), name


def side_by_side(case: Case, place: str, steps: int = STEPS) -> dict[str, Any]:
    """Train in both ways; return the bytes that the store has moved and held."""
    expected = plain_run(case)
    with on_store(case, place) as (run, store):
        settled = store.stats()
        for step in range(steps):
            assert torch.equal(run.losses(step), expected.losses(step)), step
            if case.device == "cpu" or dist.get_world_size() == 1:
                theirs = expected.clip(0.5)
                assert torch.equal(local(run.clip(0.5)), theirs.full_tensor()), step
            if step in (0, 1, steps - 1):
                assert_equal(run, expected)  # with gradients
            run.step()
            expected.step()
            assert_equal(run, expected)
            if step == 1:
                settled = store.stats()
        after = store.stats()
        budget = after.budget_bytes["HOST"]
        assert budget is not None
        assert after.peak_bytes["HOST"] <= budget
        return {
            "read": after.bytes_read - settled.bytes_read,
            "written": after.bytes_written - settled.bytes_written,
            "parameters": sum(local(p).nbytes for p in run.model.parameters()),
            "steps": steps - 2,
        }
