"""Modules whose forward cannot be replaced, and modules that TorchScript runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.adapters.conftest import DEVICES
from tests.store.helpers import open_store
from tierstore import OffloadModel, dispatch_model, enable_group_offload, from_pretrained

WIDTH = 64


class WithProperty(nn.Linear):
    @property
    def forward(self) -> Callable[[torch.Tensor], torch.Tensor]:  # type: ignore[override]
        return lambda x: nn.functional.linear(x, self.weight, self.bias)


class Refusing(nn.Linear):
    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward":
            raise AttributeError(f"{name} cannot be set")
        super().__setattr__(name, value)


class Whole(nn.Sequential):
    """The model itself has such a forward, too."""

    @property
    def forward(self) -> Callable[[torch.Tensor], torch.Tensor]:  # type: ignore[override]
        return lambda x: nn.Sequential.forward(self, x)


def odd(kind: str) -> nn.Module:
    torch.manual_seed(0)
    layer: Any = Refusing if kind == "refusing" else WithProperty
    whole: Any = Whole if kind == "whole" else nn.Sequential
    model: nn.Module = whole(*(layer(WIDTH, WIDTH) for _ in range(24)))
    return model


@pytest.mark.full("the forward, the way to offload", keep="a third")
@pytest.mark.parametrize("kind", ["property", "refusing", "whole"])
@pytest.mark.parametrize("offload", [dispatch_model, enable_group_offload])
@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_model_with_odd_forward_runs_with_weights_moved(
    device: str, offload: Callable[..., Any], kind: str, tmp_path: Path
) -> None:
    model, x = odd(kind), torch.randn(2, WIDTH)
    expected = model(x)
    with open_store(tmp_path, 80_000, device) as store:
        offload(model, store)
        for _ in range(2):
            read = store.stats().bytes_read
            assert torch.equal(model(x).cpu(), expected)
            assert store.stats().bytes_read > read


@pytest.mark.parametrize("kind", ["property", "refusing", "whole"])
def test_model_with_odd_forward_is_trained(kind: str, tmp_path: Path) -> None:
    plain, module, x = odd(kind), odd(kind), torch.randn(2, WIDTH)
    with open_store(tmp_path, 160_000) as store:
        model = OffloadModel(module, store)
        for each in (plain, model):
            each(x).square().mean().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None
            assert torch.equal(ours.grad, theirs.grad)
        assert store.stats().bytes_read > 0


def scripted() -> nn.Module:
    torch.manual_seed(0)
    script: nn.Module = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()))
    return script


@pytest.mark.parametrize("offload", [dispatch_model, enable_group_offload])
@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_scripted_root_stays_on_the_device(
    device: str, offload: Callable[..., Any], tmp_path: Path
) -> None:
    model, x = scripted(), torch.randn(2, WIDTH)
    expected = model(x)
    with open_store(tmp_path, 1 << 20, device) as store:
        offload(model, store)
        assert torch.equal(model(x).cpu(), expected)
        assert {weight.device.type for weight in model.parameters()} == {device}
    assert torch.equal(scripted()(x), expected)


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_scripted_component_of_a_pipeline_stays(device: str, tmp_path: Path) -> None:
    x = torch.randn(2, WIDTH)

    class Pipe:
        def __init__(self) -> None:
            net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(24)))
            self.components = {"scripted": scripted(), "net": net}

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.components["net"](self.components["scripted"](x))
            return result

    pipe = Pipe()
    expected = pipe(x)
    with open_store(tmp_path, 160_000, device) as store, enable_group_offload(pipe, store):
        read = store.stats().bytes_read
        assert torch.equal(pipe(x).cpu(), expected)
        assert store.stats().bytes_read > read


def test_from_pretrained_returns_loading_info(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    info = {"missing_keys": []}
    library = SimpleNamespace(from_pretrained=lambda source, **kwargs: (model, info))
    x = torch.randn(2, WIDTH)
    with torch.no_grad(), open_store(tmp_path / "store", 80_000) as store:
        expected = model(x)
        found = from_pretrained(library, tmp_path, store, output_loading_info=True)
        assert found[0] is model and found[1] is info
        assert torch.equal(model(x), expected)
        assert len(store) > 0
