"""The value of a weight while it is away: true, on the CPU.

Failures (4) and (7) of diffusers. True values are read from the checkpoint's files with
safetensors, not from a loaded model.
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
    "model and partition are independent; test_parity.py covers both devices",
    keep="a third",
)

ON_BOTH = pytest.mark.parametrize("device", DEVICES)


def in_files(directory: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint's directory, read from its files."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(path)
    assert tensors
    return tensors


def component_directories(pipe: Any, directory: Path) -> Iterator[tuple[nn.Module, Path]]:
    for name, module in pipelines.components(pipe).items():
        yield module, directory if module is pipe else directory / name


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Return whether `found` has every tensor of `expected`, and others only as ties of these."""
    values = {(t.data_ptr(), t.shape) for name, t in found.items() if name in expected}
    extra = [t for name, t in found.items() if name not in expected]
    return all(torch.equal(found[name].cpu(), value) for name, value in expected.items()) and all(
        (t.data_ptr(), t.shape) in values for t in extra
    )


@ON_BOTH
@pytest.mark.parametrize("offload_type", OFFLOAD_TYPES)
@pytest.mark.parametrize("kind", pipelines.KINDS)
def test_state_dict_and_save_pretrained_have_true_values(
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
def test_torch_save_of_a_state_dict_saves_true_values(
    device: str, checkpoint: Checkpoints, disk_dir: Path, tmp_path: Path
) -> None:
    model = pipelines.load("llama", checkpoint("llama"))
    with a_third_of(model, disk_dir, device) as store, enable_group_offload(model, store):
        torch.save(model.state_dict(), tmp_path / "weights.pt")
    saved = torch.load(tmp_path / "weights.pt", map_location="cpu")
    assert same(saved, in_files(checkpoint("llama")))


@pytest.mark.full("shows another library's fault; tierstore's behaviour is in the default lane")
def test_diffusers_state_dict_is_garbage(checkpoint: Checkpoints, tmp_path: Path) -> None:
    directory = checkpoint("flux")
    pipe = pipelines.load("flux", directory)
    diffusers_offload(pipe, tmp_path)
    for module, place in component_directories(pipe, directory):
        assert not same(module.state_dict(), in_files(place))


@ON_BOTH
@pytest.mark.parametrize("kind", ("wan", "llama"))
def test_weight_is_one_object_and_true_on_the_cpu_while_away(
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
def test_weight_used_outside_of_its_module_is_right(
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
def test_deep_copy_is_an_ordinary_pipeline(
    kind: str, device: str, checkpoint: Checkpoints, reference: References, disk_dir: Path
) -> None:
    expected = reference(kind, device=device).output
    pipe = pipelines.load(kind, checkpoint(kind))
    with a_third_of(pipe, disk_dir, device) as store, enable_group_offload(pipe, store):
        assert torch.equal(pipelines.run(kind, pipe, device=device), expected)
        twin = copy.deepcopy(pipe)
        leases = acquires(store)  # not bytes: a prefetch may still be on its way from the disk
        for (module, place), original in zip(
            component_directories(twin, checkpoint(kind)),
            pipelines.components(pipe).values(),
            strict=True,
        ):
            assert same(module.state_dict(), in_files(place))
            assert module is not original
        assert torch.equal(pipelines.run(kind, twin.to(device), device=device), expected)
        assert acquires(store) == leases > 0
        # The two share nothing: the copy computes with its own weights.
        for part in pipelines.components(twin).values():
            for parameter in part.parameters():
                parameter.data.zero_()
        assert not torch.equal(pipelines.run(kind, twin, device=device), expected)
        assert torch.equal(pipelines.run(kind, pipe, device=device), expected)


@pytest.mark.full("shows another library's fault; tierstore's behaviour is in the default lane")
def test_diffusers_deep_copy_fails(checkpoint: Checkpoints, tmp_path: Path) -> None:
    model = pipelines.load("llama", checkpoint("llama"))
    diffusers_offload(model, tmp_path)
    with pytest.raises(TypeError):
        copy.deepcopy(model)


def channels_last_autoencoder(checkpoint: Checkpoints) -> Any:
    vae = pipelines.load("flux", checkpoint("flux")).vae
    return vae.to(memory_format=torch.channels_last)


def channels_last_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p for n, p in model.named_parameters() if not p.is_contiguous()}


@ON_BOTH
@torch.no_grad()
def test_channels_last_weights_are_written_once_with_strides(
    device: str, checkpoint: Checkpoints, disk_dir: Path
) -> None:
    latents = torch.randn(1, 4, 8, 8, dtype=pipelines.DTYPE)
    expected = channels_last_autoencoder(checkpoint).to(device).decode(latents.to(device)).sample
    vae = channels_last_autoencoder(checkpoint)
    strides = {name: weight.stride() for name, weight in channels_last_weights(vae).items()}
    nbytes = sum(weight.nbytes for weight in channels_last_weights(vae).values())
    assert nbytes > pipelines.weight_bytes(vae) / 2
    shown: dict[str, tuple[int, ...]] = {}
    for name, module in vae.named_modules():
        if f"{name}.weight" in strides:
            module.register_forward_pre_hook(
                lambda module, args, name=name: shown.update({name: module.weight.stride()})
            )
    with a_third_of(vae, disk_dir, device) as store, enable_group_offload(vae, store):
        assert nbytes <= store.stats().bytes_written
        assert {n: w.stride() for n, w in channels_last_weights(vae).items()} == strides
        assert torch.equal(vae.decode(latents).sample.cpu(), expected.cpu())
        assert shown and all(strides[f"{name}.weight"] == found for name, found in shown.items())
    with a_third_of(vae, disk_dir, device) as store, enable_group_offload(vae, store):
        assert torch.equal(vae.decode(latents).sample.cpu(), expected.cpu())
        assert store.stats().bytes_written == 0


@pytest.mark.full("shows another library's fault; tierstore's behaviour is in the default lane")
def test_diffusers_channels_last_fails(checkpoint: Checkpoints, tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        diffusers_offload(channels_last_autoencoder(checkpoint), tmp_path)
