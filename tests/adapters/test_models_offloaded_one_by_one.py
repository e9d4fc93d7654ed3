"""A pipeline whose models were offloaded one by one, not through the pipeline."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, DiffusionPipeline

from tests.accelerator import DEVICES, same
from tests.store.helpers import open_store
from tierstore import disable_offload, dispatch_model, enable_group_offload
from tierstore.adapters.compat import weight_changing_methods
from tierstore.adapters.owners import owner_of


class Pipe(DiffusionPipeline):
    def __init__(self, vae: AutoencoderKL, other: AutoencoderKL) -> None:
        super().__init__()
        self.register_modules(vae=vae, other=other)


def small_vae() -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(8,),
        norm_num_groups=4,
        down_block_types=["DownEncoderBlock2D"],
        up_block_types=["UpDecoderBlock2D"],
        latent_channels=4,
    ).eval()


@pytest.fixture
def untouched_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the class as in a process without any offloaded pipeline."""
    monkeypatch.setattr(DiffusionPipeline, "to", inspect.unwrap(DiffusionPipeline.to))
    if "__init_subclass__" in vars(DiffusionPipeline):
        monkeypatch.delattr(DiffusionPipeline, "__init_subclass__")


@pytest.mark.usefixtures("untouched_class")
@pytest.mark.parametrize("offload", [enable_group_offload, dispatch_model])
@torch.no_grad()
def test_pipeline_casts_models_offloaded_one_by_one(
    offload: Callable[..., Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    pipe = Pipe(small_vae(), small_vae())
    x = torch.randn(1, 3, 8, 8)
    with open_store(tmp_path, 1 << 20) as store:
        offload(pipe.vae, store)
        before = pipe.vae(x).sample
        pipe.to(torch.float64)
        assert pipe.vae.dtype is pipe.other.dtype is torch.float64
        read = store.stats().bytes_read
        after = pipe.vae(x.double()).sample
        assert store.stats().bytes_read > read
        assert torch.allclose(after.float(), before, atol=1e-5)
        assert not torch.equal(after, before.double())


def doubling(seen: list[bool]) -> Callable[[Any], None]:
    """Return a pipeline method that changes a weight, and records whether its model is ordinary."""

    def method(pipe: Any) -> None:
        seen.append(owner_of(pipe.vae) is None)
        pipe.vae.decoder.conv_out.weight.data.mul_(2)

    return method


def pipeline_with(name: str, way: str, method: Callable[[Any], None]) -> type[Any]:
    """Return a pipeline class with such a method: its own, or one of another base."""
    if way == "inherited":
        return type("Recording", (Pipe, type("Mixin", (), {name: method})), {})
    return type("Recording", (Pipe,), {name: method})


def computed(vae: AutoencoderKL) -> torch.Tensor:
    x = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    found: torch.Tensor = vae(x).sample
    return found


@pytest.mark.full("all methods are replaced in the same way", keep="a third")
@pytest.mark.usefixtures("untouched_class")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", ["own", "inherited", "of a later class", "given as a whole"])
@pytest.mark.parametrize("name", [*weight_changing_methods(), "describe"])
@torch.no_grad()
def test_method_of_pipeline_runs_suspended(
    name: str, way: str, device: str, tmp_path: Path
) -> None:
    seen: list[bool] = []
    torch.manual_seed(0)
    vae, plain = small_vae(), small_vae()
    plain.load_state_dict(vae.state_dict())
    plain.decoder.conv_out.weight.mul_(2)
    with open_store(tmp_path, 1 << 20, device) as store:
        if way == "of a later class":
            enable_group_offload(vae, store)
        pipe = pipeline_with(name, way, doubling(seen))(vae, small_vae())
        if way != "of a later class":
            enable_group_offload(pipe if way == "given as a whole" else vae, store)
        computed(vae)
        getattr(pipe, name)()
        assert seen == [name != "describe"]  # the control: other methods run as they are
        read = store.stats().bytes_read
        assert same(computed(vae), computed(plain), device)
        assert store.stats().bytes_read > read
        assert torch.equal(vae.decoder.conv_out.weight, plain.decoder.conv_out.weight)


@pytest.mark.usefixtures("untouched_class")
def test_copy_of_pipeline_has_ordinary_models_and_methods(tmp_path: Path) -> None:
    """The control: a method of a pipeline without offloaded models works as usual."""
    seen: list[bool] = []
    pipe = pipeline_with("load_lora_weights", "own", doubling(seen))(small_vae(), small_vae())
    before = pipe.vae.decoder.conv_out.weight.detach().clone()
    with open_store(tmp_path, 1 << 20) as store:
        handle = enable_group_offload(pipe, store)
        copied = copy.deepcopy(pipe)
        copied.load_lora_weights()
        assert handle.enabled and seen == [True]
        disable_offload(handle)
        pipe.load_lora_weights()
        assert seen == [True, True] and "load_lora_weights" not in vars(pipe)
    for each in (pipe, copied):
        assert torch.equal(each.vae.decoder.conv_out.weight, 2 * before)
