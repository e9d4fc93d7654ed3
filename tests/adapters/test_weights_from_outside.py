"""What a weight shows while it is away: itself, on the CPU. Failures (4) and (7) of diffusers.

True values are read from the checkpoint's files with safetensors, not from a loaded model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests import pipelines
from tests.adapters.conftest import (
    DEVICES,
    OFFLOAD_TYPES,
    Checkpoints,
    References,
    a_third_of,
    acquires,
    diffusers_offload,
)
from tierstore import enable_group_offload

pytestmark = pytest.mark.full(
    "the model, how it is cut: each has its own part; test_parity.py runs on both devices",
    keep="a third",
)

ON_BOTH = pytest.mark.parametrize("device", DEVICES)


def in_files(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint's directory, read from its files."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(path)
    assert tensors
    return tensors


def component_directories(pipe: Any, directory: Path) -> Iterator[tuple[nn.Module, Path]]:
    for name, module in pipelines.components(pipe).items():
        yield module, directory if module is pipe else directory / name


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Every tensor of `expected` is in `found`; what is there beside is tied to one of them."""
    values = {(t.data_ptr(), t.shape) for name, t in found.items() if name in expected}
    extra = [t for name, t in found.items() if name not in expected]
    return all(torch.equal(found[name].cpu(), value) for name, value in expected.items()) and all(
        (t.data_ptr(), t.shape) in values for t in extra
    )


@ON_BOTH
@pytest.mark.parametrize("offload_type", OFFLOAD_TYPES)
@pytest.mark.parametrize("kind", pipelines.KINDS)
def test_4_state_dict_and_save_pretrained_give_the_true_values(
    kind: str,
    offload_type: str,
    device: str,
    checkpoint: Checkpoints,
    reference: References,
    disk_dir: Path,
    tmp_path: Path,
) -> None:
    directory = checkpoint(kind)
    pipe = pipelines.load(kind, directory)
    with (
        a_third_of(pipe, disk_dir, device) as store,
        enable_group_offload(pipe, store, offload_type=offload_type),
    ):
        pipelines.run(kind, pipe, device=device)  # some weights are on the device now
        for module, place in component_directories(pipe, directory):
            assert same(module.state_dict(), in_files(place))
        pipe.save_pretrained(tmp_path / "saved")
    for _, place in component_directories(pipe, directory):
        saved = in_files(tmp_path / "saved" / place.relative_to(directory))
        expected = in_files(place)
        assert saved.keys() == expected.keys()
        assert all(torch.equal(saved[name], value) for name, value in expected.items())
    assert torch.equal(
        pipelines.run(kind, pipelines.load(kind, tmp_path / "saved")), reference(kind).output
    )


@ON_BOTH
def test_4_saving_a_state_dict_with_torch(
    device: str, checkpoint: Checkpoints, disk_dir: Path, tmp_path: Path
) -> None:
    model = pipelines.load("llama", checkpoint("llama"))
    with a_third_of(model, disk_dir, device) as store, enable_group_offload(model, store):
        torch.save(model.state_dict(), tmp_path / "weights.pt")
    saved = torch.load(tmp_path / "weights.pt", map_location="cpu")
    assert same(saved, in_files(checkpoint("llama")))


@pytest.mark.full("shows what another library does wrong; that tierstore does not is tested always")
def test_4_in_diffusers_a_state_dict_is_garbage(checkpoint: Checkpoints, tmp_path: Path) -> None:
    directory = checkpoint("flux")
    pipe = pipelines.load("flux", directory)
    diffusers_offload(pipe, tmp_path)
    for module, place in component_directories(pipe, directory):
        assert not same(module.state_dict(), in_files(place))


@ON_BOTH
@pytest.mark.parametrize("kind", ("wan", "llama"))
def test_a_weight_is_one_object_that_is_true_on_the_cpu_while_away(
    kind: str, device: str, checkpoint: Checkpoints, disk_dir: Path
) -> None:
    pipe = pipelines.load(kind, checkpoint(kind))
    before = [(name, id(tensor)) for name, tensor in pipelines.weights(pipe)]
    seen: dict[str, list[tuple[str, int]]] = {}
    places: set[str] = set()

    def look(module: nn.Module, args: Any, output: Any) -> None:
        seen["during"] = [(name, id(tensor)) for name, tensor in pipelines.weights(pipe)]
        places.update(p.device.type for p in module.parameters(recurse=False))

    blocks = next(m for m in main_model(pipe).modules() if isinstance(m, nn.ModuleList))
    inner = [module for module in blocks[-1].modules() if isinstance(module, nn.Linear)]
    inner[0].register_forward_hook(look)
    with (
        a_third_of(pipe, disk_dir, device) as store,
        enable_group_offload(pipe, store, num_blocks_per_group=1),
    ):
        pipelines.run(kind, pipe, device=device)
        assert places == {device}
        for module in pipelines.components(pipe).values():
            assert {p.device.type for p in module.parameters()} == {"cpu"}
        seen["while away"] = [(name, id(tensor)) for name, tensor in pipelines.weights(pipe)]
    seen["after"] = [(name, id(tensor)) for name, tensor in pipelines.weights(pipe)]
    assert seen == dict.fromkeys(["during", "while away", "after"], before)


def main_model(pipe: Any) -> nn.Module:
    return pipe if isinstance(pipe, nn.Module) else pipe.transformer


@ON_BOTH
@torch.no_grad()
def test_a_weight_may_be_used_outside_of_its_module(
    device: str, checkpoint: Checkpoints, disk_dir: Path
) -> None:
    model = pipelines.load("llama", checkpoint("llama"))
    x = torch.randn(3, model.config.hidden_size, dtype=pipelines.DTYPE)
    expected = nn.functional.linear(x, model.lm_head.weight)
    with a_third_of(model, disk_dir, device) as store, enable_group_offload(model, store):
        assert torch.equal(nn.functional.linear(x, model.lm_head.weight), expected)
        assert torch.equal(model.lm_head(x.to(device)).cpu(), expected)
        assert torch.equal(nn.functional.linear(x, model.lm_head.weight), expected)


@pytest.mark.full("copies a whole pipeline; tests/dispatch copies a model")
@ON_BOTH
@pytest.mark.parametrize("kind", ("flux", "llama"))
def test_7_a_deep_copy_is_an_ordinary_pipeline(
    kind: str, device: str, checkpoint: Checkpoints, reference: References, disk_dir: Path
) -> None:
    expected = reference(kind, device=device).output
    pipe = pipelines.load(kind, checkpoint(kind))
    with a_third_of(pipe, disk_dir, device) as store, enable_group_offload(pipe, store):
        assert torch.equal(pipelines.run(kind, pipe, device=device), expected)
        twin = copy.deepcopy(pipe)
        asked = acquires(store)  # not bytes: a prefetch may still be on its way from the disk
        for (module, place), original in zip(
            component_directories(twin, checkpoint(kind)),
            pipelines.components(pipe).values(),
            strict=True,
        ):
            assert same(module.state_dict(), in_files(place))
            assert module is not original
        assert torch.equal(pipelines.run(kind, twin.to(device), device=device), expected)
        assert acquires(store) == asked > 0
        # The two share nothing: the copy computes with its own weights.
        for part in pipelines.components(twin).values():
            for parameter in part.parameters():
                parameter.data.zero_()
        assert not torch.equal(pipelines.run(kind, twin, device=device), expected)
        assert torch.equal(pipelines.run(kind, pipe, device=device), expected)


@pytest.mark.full("shows what another library does wrong; that tierstore does not is tested always")
def test_7_in_diffusers_a_deep_copy_fails(checkpoint: Checkpoints, tmp_path: Path) -> None:
    model = pipelines.load("llama", checkpoint("llama"))
    diffusers_offload(model, tmp_path)
    with pytest.raises(TypeError):
        copy.deepcopy(model)


def channels_last_autoencoder(checkpoint: Checkpoints) -> Any:
    vae = pipelines.load("flux", checkpoint("flux")).vae
    return vae.to(memory_format=torch.channels_last)


def turned_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p for n, p in model.named_parameters() if not p.is_contiguous()}


@ON_BOTH
@torch.no_grad()
def test_7_channels_last_weights_are_written_once_and_keep_their_strides(
    device: str, checkpoint: Checkpoints, disk_dir: Path
) -> None:
    latents = torch.randn(1, 4, 8, 8, dtype=pipelines.DTYPE)
    expected = channels_last_autoencoder(checkpoint).to(device).decode(latents.to(device)).sample
    vae = channels_last_autoencoder(checkpoint)
    strides = {name: weight.stride() for name, weight in turned_weights(vae).items()}
    nbytes = sum(weight.nbytes for weight in turned_weights(vae).values())
    assert nbytes > pipelines.weight_bytes(vae) / 2
    shown: dict[str, tuple[int, ...]] = {}
    for name, module in vae.named_modules():
        if f"{name}.weight" in strides:
            module.register_forward_pre_hook(
                lambda module, args, name=name: shown.update({name: module.weight.stride()})
            )
    with a_third_of(vae, disk_dir, device) as store, enable_group_offload(vae, store):
        assert nbytes <= store.stats().bytes_written
        assert {n: w.stride() for n, w in turned_weights(vae).items()} == strides
        assert torch.equal(vae.decode(latents).sample.cpu(), expected.cpu())
        assert shown and all(strides[f"{name}.weight"] == found for name, found in shown.items())
    with a_third_of(vae, disk_dir, device) as store, enable_group_offload(vae, store):
        assert torch.equal(vae.decode(latents).sample.cpu(), expected.cpu())
        assert store.stats().bytes_written == 0


@pytest.mark.full("shows what another library does wrong; that tierstore does not is tested always")
def test_7_in_diffusers_channels_last_fails(checkpoint: Checkpoints, tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        diffusers_offload(channels_last_autoencoder(checkpoint), tmp_path)
