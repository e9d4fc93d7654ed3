"""A backward through a dispatched model that is trained raises, and never gives wrong gradients.

Its weights have left the device by then. The forward itself needs no `torch.no_grad()`. Through
frozen weights it works: see also tests/adapters/test_frozen.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.dispatch import models
from tests.dispatch.conftest import ON_BOTH, Weights, store_for
from tests.helpers.tensors import assert_same, parameter_bytes
from tierstore import disable_offload, dispatch_model

pytestmark = [
    pytest.mark.full(
        "model and dispatch method are independent; test_parity.py covers both devices",
        keep="any device",
    ),
    ON_BOTH,
]
SHARE = 0.3

Trainable = Callable[[nn.Module], object]


def all_weights(model: nn.Module) -> None:
    """Let every weight require a gradient."""


def most_weights(model: nn.Module) -> None:
    """Train all but a table, as in models with a fixed table."""
    model.layers[1].requires_grad_(False)


@pytest.mark.parametrize("of_input", (True, False), ids=("input too", "weights only"))
@pytest.mark.parametrize("trainable", (all_weights, most_weights))
def test_backward_raises(trainable: Trainable, of_input: bool, device: str, disk_dir: Path) -> None:
    plain, model = models.Tower(), models.Tower()
    expected = plain.to(device)(models.rows().to(device))
    trainable(model)
    weights = Weights.of(model)
    with store_for(model, disk_dir, device, SHARE) as store:
        dispatch_model(model, store)
        x = models.rows().requires_grad_(of_input)
        for _ in range(2):
            output = model(x)
            assert torch.equal(output.cpu(), expected.cpu())
            assert output.requires_grad
            assert store.stats().bytes_read > 0
            with pytest.raises(RuntimeError, match=r"TierStore.*no_grad.*disable_offload"):
                output.sum().backward()
            with pytest.raises(RuntimeError):
                torch.autograd.grad(model(x).sum(), x if of_input else list(wanting(model)))
        assert x.grad is None
        assert all(parameter.grad is None for parameter in model.parameters())
        weights.assert_unchanged(model)
        disable_offload(model)
    model(x).sum().backward()  # restored, it trains
    plain.to("cpu")
    trainable(plain)
    plain(models.rows().requires_grad_(of_input)).sum().backward()
    for found, reference in zip(model.parameters(), plain.parameters(), strict=True):
        assert (found.grad is None) == (reference.grad is None)
        assert found.grad is None or torch.equal(found.grad, reference.grad)


def wanting(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@dataclass
class Output:
    """An output type that no library knows."""

    value: torch.Tensor


class Wrapping(models.Tower):
    """Returns its output in a custom object."""

    def forward(self, x: torch.Tensor) -> Any:
        return Output(super().forward(x))


def from_the_output(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).value


def from_a_part_of_the_output(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).value[0, :3] * 2


def from_a_hook(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    seen = []
    hook = model.layers[3].register_forward_hook(lambda module, args, output: seen.append(output))
    model(x)
    hook.remove()
    return seen[0]


def one_layer(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model.layers[3](x.to(model.layers[3].weight.device))


def some_layers(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model.layers(x)


def recomputed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda x: model(x).value, x, use_reentrant=False)


WAYS = (from_the_output, from_a_part_of_the_output, from_a_hook, one_layer, some_layers, recomputed)


@pytest.mark.parametrize("frozen", (True, False), ids=("frozen", "trainable"))
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_loss_from_any_output_raises_or_is_right(
    way: Callable[[nn.Module, torch.Tensor], torch.Tensor],
    frozen: bool,
    device: str,
    disk_dir: Path,
) -> None:
    """The memory of the weights holds others by the time of the backward.

    Frozen weights are loaded again.
    """
    model = Wrapping().requires_grad_(not frozen)
    expected = models.rows().to(device).requires_grad_(True)
    way(copy.deepcopy(model).to(device), expected).square().sum().backward()
    with store_for(model, disk_dir, device, SHARE) as store:
        dispatch_model(model, store)
        x = models.rows().requires_grad_(True)
        if device != "cpu" and way in (one_layer, some_layers):
            x = models.rows().to(device).requires_grad_(True)
        loss = way(model, x).square().sum()
        model(models.rows())  # other weights take the memory
        if frozen:
            loss.backward()
            assert torch.equal(x.grad.cpu(), expected.grad.cpu())
            return
        with pytest.raises(RuntimeError, match=r"tierstore|modified by an inplace operation"):
            loss.backward()
        assert x.grad is None
        assert all(parameter.grad is None for parameter in model.parameters())


def test_training_step_raises_and_changes_nothing(device: str, disk_dir: Path) -> None:
    model = models.build("parts").train()
    with store_for(model, disk_dir, device, SHARE) as store:
        dispatch_model(model, store)
        weights = Weights.of(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with pytest.raises(RuntimeError, match="tierstore"):
            model(models.tokens(shape=(16,))).square().sum().backward()
        optimizer.step()
        weights.assert_unchanged(model)


def test_gradients_outside_the_model_are_right(device: str, disk_dir: Path) -> None:
    """Paths that do not lead through the model work as usual."""
    model, x = models.Tower(), models.rows()
    with store_for(model, disk_dir, device, SHARE) as store:
        dispatch_model(model, store)
        outside = nn.Linear(models.WIDTH, 1)
        with torch.no_grad():
            features = model(x)
        outside(features).sum().backward()
        assert torch.equal(outside.weight.grad, features.sum(0, keepdim=True))
        detached = model(x).detach()
        assert torch.equal(detached, features)
        weight = model.layers[2].weight
        (weight * 3).sum().backward()  # of the weight itself, while it is away
        assert torch.equal(weight.grad, torch.full_like(weight, 3))
        model.zero_grad()
        assert weight.grad is None
        assert store.stats().bytes_read > 0


def test_optimizer_step_with_other_gradients_is_stored(device: str, disk_dir: Path) -> None:
    """The gradients may come from another copy of the model."""
    model, plain = models.build("parts"), models.build("parts")
    with store_for(model, disk_dir, device, SHARE) as store:
        dispatch_model(model, store)
        models.run("parts", model)
        written = store.stats().bytes_written
        for each in (plain, model):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            for parameter in each.parameters():
                parameter.grad = torch.ones(parameter.shape)
            optimizer.step()
        assert_same(models.run("parts", model), models.run("parts", plain.to(device), device))
        assert store.stats().bytes_written >= written + parameter_bytes(model)
