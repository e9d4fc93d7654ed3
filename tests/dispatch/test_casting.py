"""`half()`, `to(dtype)`, `to(device)` of a dispatched model work, or raise with a reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.accelerator import ACCELERATOR, DEVICE_1, count, needs_accelerator
from tests.dispatch import models
from tests.dispatch.conftest import (
    ON_BOTH,
    Checkpoints,
    Weights,
    store_for,
)
from tests.helpers.tensors import assert_same, parameter_bytes
from tierstore import disable_offload, dispatch_model, load_checkpoint_and_dispatch

pytestmark = pytest.mark.full(
    "model and dispatch method are independent; test_parity.py covers both devices",
    keep="a third",
)

SHARE = 0.25
Cast = Callable[[nn.Module], nn.Module]

CASTS: dict[str, Cast] = {
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "double": lambda model: model.double(),
    "to dtype": lambda model: model.to(torch.bfloat16),
    "to dtype and cpu": lambda model: model.to("cpu", torch.float64),
    "to tensor": lambda model: model.to(torch.zeros(1, dtype=torch.float16)),
    "type": lambda model: model.type(torch.float64),
}


def forms(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    return {
        name: (tensor.dtype, tensor.shape, tensor.stride())
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }


def assert_equal_in_form_and_value(model: nn.Module, plain: nn.Module) -> None:
    assert forms(model) == forms(plain)
    expected = plain.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value.cpu(), expected[name].cpu()), name


@ON_BOTH
@pytest.mark.parametrize("name", CASTS)
def test_cast_equals_plain_torch(name: str, device: str, disk_dir: Path) -> None:
    cast = CASTS[name]
    model, plain = models.build("parts"), cast(models.build("parts"))
    if name == "type":  # casts everything, ids of buffers too
        plain.mask, plain.norm.num_batches_tracked = plain.mask.bool(), torch.tensor(0)
    assert plain.scale.dtype != torch.float32
    expected = models.run("parts", plain.to(device), device)
    objects = Weights.of(model).objects
    with store_for(model, disk_dir, device, SHARE) as store:
        dispatch_model(model, store)
        models.run("parts", model)
        written = store.stats().bytes_written
        assert cast(model) is model
        if name == "type":
            model.mask, model.norm.num_batches_tracked = model.mask.bool(), torch.tensor(0)
        assert_equal_in_form_and_value(model, plain)
        assert model.head.weight is model.embed.weight
        for _ in range(2):
            read = store.stats().bytes_read
            assert_same(models.run("parts", model), expected)
            assert store.stats().bytes_read > read
            assert Weights.of(model).objects == objects
            assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
        cast_bytes = parameter_bytes(plain)
        assert store.stats().bytes_written >= written + cast_bytes
        disable_offload(model)
    assert_equal_in_form_and_value(model, plain)


@ON_BOTH
def test_cast_and_back_equals_plain_torch(device: str, disk_dir: Path) -> None:
    model, plain = models.build("parts"), models.build("parts").bfloat16().float()
    with store_for(model, disk_dir, device, SHARE) as store:
        dispatch_model(model, store).bfloat16().float()
        expected = models.run("parts", plain.to(device), device)
        assert_same(models.run("parts", model), expected)
        assert_equal_in_form_and_value(model, plain)


@ON_BOTH
@pytest.mark.parametrize("kind", ("llama", "unet"))
def test_checkpoint_cast_leaves_the_file_unchanged(
    kind: str, device: str, checkpoint: Checkpoints, disk_dir: Path
) -> None:
    """The file is unchanged, and the cast weights go to the store."""
    true = models.in_files(checkpoint(kind))
    plain = models.build(kind).double()
    expected = models.run(kind, plain.to(device), device) if kind == "llama" else None
    with store_for(plain, disk_dir, device, SHARE) as store:
        model = load_checkpoint_and_dispatch(models.empty(kind), checkpoint(kind), store)
        assert store.stats().bytes_written == 0
        model.double()
        assert_equal_in_form_and_value(model, plain)
        if expected is not None:
            assert_same(models.run(kind, model), expected)
        assert store.stats().bytes_written > 0
    found = models.in_files(checkpoint(kind))
    assert all(torch.equal(found[name], value) for name, value in true.items())


@ON_BOTH
def test_channels_last_equals_plain_torch(device: str, disk_dir: Path) -> None:
    def convolutions() -> nn.Module:
        return models.draw(nn.Sequential(*(nn.Conv2d(16, 16, 3, padding=1) for _ in range(8))))

    def run(model: nn.Module, place: str) -> torch.Tensor:
        x = torch.randn(1, 16, 6, 6, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            return model(x.to(place).contiguous(memory_format=torch.channels_last))

    plain = convolutions().to(memory_format=torch.channels_last)
    assert plain[0].weight.is_contiguous(memory_format=torch.channels_last)
    model = convolutions()
    with store_for(model, disk_dir, device, 0.4) as store:
        dispatch_model(model, store)
        run(model, "cpu")
        assert model.to(memory_format=torch.channels_last) is model
        assert_equal_in_form_and_value(model, plain)
        expected = run(plain.to(device), device)
        for _ in range(2):
            read = store.stats().bytes_read
            assert torch.equal(run(model, "cpu"), expected.cpu())
            assert store.stats().bytes_read > read
        disable_offload(model)
    assert_equal_in_form_and_value(model, plain.to("cpu"))


# Moving -------------------------------------------------------------------------------------------

STAYS: dict[str, Cast] = {
    "to cpu": lambda model: model.to("cpu"),
    "cpu": lambda model: model.cpu(),
    "to device=": lambda model: model.to(device=torch.device("cpu")),
    "to its own dtype": lambda model: model.to(torch.float32),
    "float": lambda model: model.float(),
    "to nothing": lambda model: model.to(),
}


@ON_BOTH
def test_move_to_the_same_place_changes_nothing(device: str, disk_dir: Path) -> None:
    model = models.build("parts")
    weights = Weights.of(model)
    expected = models.run("parts", models.build("parts").to(device), device)
    with store_for(model, disk_dir, device, SHARE) as store:
        dispatch_model(model, store)
        models.run("parts", model)
        written = store.stats().bytes_written
        for move in STAYS.values():
            assert move(model) is model
            weights.assert_unchanged(model)
            read = store.stats().bytes_read
            assert_same(models.run("parts", model), expected)
            assert store.stats().bytes_written == written
            assert store.stats().bytes_read > read  # it is still dispatched


MOVES: dict[str, Cast] = {
    "to meta": lambda model: model.to("meta"),
    "to device=meta": lambda model: model.to(device="meta"),
    "to meta and dtype": lambda model: model.to("meta", torch.float16),
    "to the accelerator": lambda model: model.to(ACCELERATOR),
    "to empty": lambda model: model.to_empty(device="meta"),
}
if count() > 1:
    MOVES["to the other accelerator"] = lambda model: model.to(DEVICE_1)


@needs_accelerator
@ON_BOTH
def test_move_elsewhere_raises(device: str, disk_dir: Path) -> None:
    model = models.build("parts")
    weights = Weights.of(model)
    expected = models.run("parts", models.build("parts").to(device), device)
    with store_for(model, disk_dir, device, SHARE) as store:
        dispatch_model(model, store)
        models.run("parts", model)
        for move in MOVES.values():
            with pytest.raises(RuntimeError, match="disable_offload"):
                move(model)
            weights.assert_unchanged(model)
            assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
            assert_same(models.run("parts", model), expected)
        disable_offload(model)
        weights.assert_unchanged(model)
        for move in MOVES.values():
            move(model)  # a plain model may go anywhere
            assert model.blocks[3].weight.device.type != "cpu"
            model = models.build("parts")


@needs_accelerator
@pytest.mark.two_devices
@ON_BOTH
def test_moved_submodule_returns_to_the_cpu(device: str, disk_dir: Path) -> None:
    model = models.build("parts")
    weights = Weights.of(model)
    expected = models.run("parts", models.build("parts").to(device), device)
    with store_for(model, disk_dir, device, SHARE) as store:
        dispatch_model(model, store)
        models.run("parts", model)
        model.blocks[3].to(DEVICE_1)
        model.blocks[4].to("cpu")
        assert torch.equal(model.blocks[3].weight.cpu(), weights.values["blocks.3.weight"])
        assert_same(models.run("parts", model), expected)
        weights.assert_unchanged(model)


@ON_BOTH
def test_submodule_without_values_raises(device: str, disk_dir: Path) -> None:
    model, plain = models.build("parts"), models.build("parts")
    expected = models.run("parts", models.build("parts").to(device), device)
    with store_for(model, disk_dir, device, SHARE) as store:
        dispatch_model(model, store)
        models.run("parts", model)
        model.blocks[3].to("meta")
        for _ in range(2):
            with pytest.raises(RuntimeError, match="meta"):
                models.run("parts", model)
        model.blocks[3].load_state_dict(plain.blocks[3].state_dict(), assign=True)
        assert_same(models.run("parts", model), expected)
