"""A frozen base in training: read in place, never written, and read no more often than necessary.

A weight that is unfrozen is trained as if it had never been frozen.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.adapters.conftest import DEVICES
from tests.helpers.tensors import assert_same, parameter_bytes
from tierstore import OffloadModel, OffloadOptimizer, TierStore, load_training, save_training
from tierstore.model import shares

ON_BOTH = pytest.mark.parametrize("device", DEVICES)
CHECKPOINTED = pytest.mark.parametrize("checkpoint", [False, True], ids=["saved", "recomputed"])
WIDTH, LAYERS, STEPS = 64, 16, 3
COPIES = 4  # of a trained parameter: its value, its gradient, and two states of AdamW


class Block(nn.Module):
    """Uses its parts in another order than it registers them, as transformers do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loaded(directory: Path, model: nn.Module, *, frozen: bool = True) -> Any:
    """Load a copy of a model from a checkpoint. All but the head and the first norm are frozen."""
    path = directory / "model.safetensors"
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        save_file(model.state_dict(), path)
    found = copy.deepcopy(model)
    found.load_state_dict(load_file(path), assign=True)
    found.requires_grad_(not frozen)
    for name, parameter in found.named_parameters():
        if name.startswith(("head.", "blocks.0.norm.")):
            parameter.requires_grad_(True)
    return found


def build() -> Model:
    torch.manual_seed(0)
    return Model()


def loss_of(model: Any, number: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    given = torch.randn(8, WIDTH, generator=generator).to(device)
    loss: torch.Tensor = model(given).square().mean()
    return loss


def train(model: Any, optimizer: Any, device: str, steps: int = STEPS) -> list[torch.Tensor]:
    losses = []
    for number in range(steps):
        loss = loss_of(model, number, device)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return losses


def trained_bytes(model: nn.Module) -> int:
    return parameter_bytes(model, trained=True)


def opened(directory: Path, budget: int, device: str) -> TierStore:
    options: dict[str, Any] = {} if device == "cpu" else {"device_budget": 2 * budget}
    return TierStore(budget, directory, device=device, **options)


def adamw(model: OffloadModel) -> OffloadOptimizer:
    return OffloadOptimizer(model, model.store, torch.optim.AdamW, lr=1e-2)


def plainly(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad or p.grad is not None],
        lr=1e-2,
        fused=True,
    )


@ON_BOTH
@CHECKPOINTED
def test_frozen_base_is_read_and_never_written(
    checkpoint: bool, device: str, tmp_path: Path
) -> None:
    plain, ours = (loaded(tmp_path / "checkpoint", build()) for _ in range(2))
    budget = int(0.4 * parameter_bytes(plain))
    assert COPIES * trained_bytes(plain) < budget / 2, "the trained state does not fit"
    losses = train(plain, plainly(plain), "cpu")
    with opened(tmp_path / "store", budget, device) as store:
        model = OffloadModel(ours, store, checkpoint_activation=checkpoint)
        optimizer = adamw(model)
        found = train(model, optimizer, device)
        stats = store.stats()
        # Activations that wait for the backward pass are written if there is no space for them.
        assert stats.bytes_written <= stats.activations.shipped_bytes
        assert checkpoint or stats.bytes_written == 0
        assert stats.bytes_read >= parameter_bytes(plain), "the model fitted into memory"
        if device == "cpu":
            assert all(map(torch.equal, found, losses))
            assert_same(list(plain.parameters()), list(model.parameters()))


def test_frozen_and_trained_parameters_share_no_group(tmp_path: Path) -> None:
    with opened(tmp_path / "store", 1 << 20, "cpu") as store:
        model = OffloadModel(loaded(tmp_path / "checkpoint", build()), store)
        groups = [group for slice_ in model.slices for group in slice_.groups]
        kinds = [{tensor.requires_grad for tensor in group.tensors.values()} for group in groups]
        assert {True} in kinds and {False} in kinds
        assert {True, False} not in kinds


def read_in_passes(directory: Path, share: float, *, frozen: bool, checkpoint: bool) -> Any:
    """Return the bytes that both passes of a step read, and their limit."""
    ours = loaded(directory / "checkpoint", build(), frozen=frozen)
    weights, trained = parameter_bytes(ours), trained_bytes(ours)
    budget = int(share * weights)
    with opened(directory / "store", budget, "cpu") as store:
        model = OffloadModel(ours, store, checkpoint_activation=checkpoint)
        optimizer = adamw(model)
        reads = []
        for number in range(STEPS):
            before = store.stats().bytes_read
            loss_of(model, number, "cpu").backward()
            reads.append(store.stats().bytes_read - before)
            optimizer.step()
            optimizer.zero_grad()
        groups = store.snapshot().groups
    missed = max(weights - trained - max(budget - COPIES * trained, 0), 0)
    too_early = 2 * budget // shares.EARLY_IF_STEADY  # in each pass; the times are measured
    if not frozen:  # between passes, state in RAM stays there permanently
        values = [g for g in groups if g.key.startswith("training/") and "gradient" not in g.key]
        missed, too_early = sum(g.nbytes for g in values if "HOST" not in g.tiers), 0
    largest = max(g.nbytes for g in groups)
    return min(reads[1:]), 1.05 * (2 * missed + 3 * largest) + too_early


@pytest.mark.full("several budgets; one is in test_parity.py")
@CHECKPOINTED
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_frozen_parameters_are_read_once_per_pass_at_most(
    frozen: bool, checkpoint: bool, tmp_path: Path
) -> None:
    before = None
    for share in (0.6, 0.8):
        place = tmp_path / str(share)
        read, most = read_in_passes(place, share, frozen=frozen, checkpoint=checkpoint)
        assert 0 < read <= most
        assert before is None or read < before
        before = read


# Unfreezing ---------------------------------------------------------------------------------------


def unfreeze(model: Any) -> None:
    model.blocks[3].requires_grad_(True)


def edit(model: Any) -> None:
    with torch.no_grad():
        model.blocks[3].up.weight.mul_(2)


def edit_unseen(model: Any) -> None:
    model.blocks[3].up.weight.data.mul_(2)


def give(model: Any) -> None:
    model.blocks[3].up.weight.data = torch.full((2 * WIDTH, WIDTH), 0.01)


def load(model: Any) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["blocks.3.up.weight"] *= 2
    model.load_state_dict(state)


def give_gradient(model: Any) -> None:
    weight = model.blocks[3].up.weight
    weight.grad = torch.ones_like(weight.detach(), device="cpu")


@ON_BOTH
@pytest.mark.parametrize("change", [unfreeze, edit, edit_unseen, give, load, give_gradient])
def test_frozen_weight_changed_later_takes_effect(
    change: Callable[[Any], None], device: str, tmp_path: Path
) -> None:
    plain, ours = (loaded(tmp_path / "checkpoint", build()) for _ in range(2))
    before = plain.blocks[3].up.weight.detach().clone()
    with opened(tmp_path / "store", int(0.4 * parameter_bytes(plain)), device) as store:
        model = OffloadModel(ours, store)
        optimizer = adamw(model)
        usual = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
        train(plain, usual, "cpu", 1)
        train(model, optimizer, device, 1)
        change(plain)
        change(model)
        losses, found = train(plain, usual, "cpu"), train(model, optimizer, device)
        after = model.blocks[3].up.weight.detach().clone()
        assert not torch.equal(after, before), "the weight was not changed"
        assert store.stats().bytes_read > 0
        if device == "cpu":
            assert all(map(torch.equal, found, losses))
            assert_same(list(plain.parameters()), list(model.parameters()))
        else:
            torch.testing.assert_close(after, plain.blocks[3].up.weight.detach())


def test_resumed_training_writes_no_frozen_weights(tmp_path: Path) -> None:
    first, second = (loaded(tmp_path / "checkpoint", build()) for _ in range(2))
    with opened(tmp_path / "store", int(0.4 * parameter_bytes(first)), "cpu") as store:
        model = OffloadModel(first, store)
        optimizer = adamw(model)
        train(model, optimizer, "cpu")
        save_training(tmp_path / "saved", model, optimizer)
    with opened(tmp_path / "again", int(0.4 * parameter_bytes(second)), "cpu") as store:
        again = OffloadModel(second, store)
        resumed = adamw(again)
        load_training(tmp_path / "saved", again, resumed)
        assert_same(list(again.parameters()), list(model.parameters()))
        train(again, resumed, "cpu")
        assert store.stats().bytes_written == 0
