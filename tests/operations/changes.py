"""Conversions, saving, copying and edits of whole pipelines."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import diffusers
import torch

from tests import pipelines
from tests.operations.actions import Actions
from tests.operations.operation import Table

CONVERSIONS = Table("Other types and layouts of weights")
SAVING = Table("Saving, loading, copying")


def run_in_float(actions: Actions, pipe: Any) -> None:
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    actions.run("sdxl", pipe, latents=latents.to(pipe.unet.dtype))


@CONVERSIONS.row("`pipe.to(torch.float32)`")
def cast_a_pipeline(actions: Actions) -> None:
    pipe = actions.load("sdxl")
    actions.offload(pipe)
    run_in_float(actions, pipe)
    pipe.to(torch.float32)
    run_in_float(actions, pipe)
    actions.check_that_it_changed()


@CONVERSIONS.row(
    "`pipe.vae.to(torch.float32)`, `.half()`, `.float()`, `.bfloat16()` of a component"
)
def cast_a_component(actions: Actions) -> None:
    pipe = actions.load("sdxl")
    actions.offload(pipe)
    actions.run("sdxl", pipe, output_type="latent")
    latents = actions.outputs[-1].to(actions.device)

    @torch.no_grad()
    def decode() -> torch.Tensor:
        image: torch.Tensor = pipe.vae.decode(latents.to(pipe.vae.dtype), return_dict=False)[0]
        return image

    for cast in ("float", "bfloat16"):
        getattr(pipe.vae, cast)()
        actions.compute(decode)
    actions.check_that_it_changed()


@CONVERSIONS.row("`enable_layerwise_casting`")
def layerwise_casting(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    actions.run("flux", pipe)
    pipe.transformer.enable_layerwise_casting(
        storage_dtype=torch.float8_e4m3fn, compute_dtype=pipelines.DTYPE
    )
    actions.run("flux", pipe)
    actions.check_that_it_changed()


@CONVERSIONS.row("`enable_layerwise_casting` before offloading")
def layerwise_casting_before(actions: Actions) -> None:
    pipe = actions.load("flux")
    pipe.transformer.enable_layerwise_casting(
        storage_dtype=torch.float8_e4m3fn, compute_dtype=pipelines.DTYPE
    )
    actions.offload(pipe)
    actions.run("flux", pipe)


@CONVERSIONS.row("`pipe.unet.to(memory_format=torch.channels_last)`")
def channels_last(actions: Actions) -> None:
    pipe = actions.load("sdxl")
    actions.offload(pipe)
    actions.run("sdxl", pipe)
    pipe.unet.to(memory_format=torch.channels_last)
    actions.run("sdxl", pipe)
    assert pipe.unet.conv_in.weight.is_contiguous(memory_format=torch.channels_last)


@CONVERSIONS.row("`pipe.to(device)`", note="nothing moves, and diffusers warns")
def move_a_pipeline(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    pipe.to(actions.device)
    actions.run("flux", pipe)


@CONVERSIONS.row("`pipe.transformer.to(device)`", note="nothing moves, and diffusers warns")
def move_a_component(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    pipe.transformer.to(actions.device)
    actions.run("flux", pipe)


@CONVERSIONS.row("`reset_device_map`, `remove_all_hooks`", note="tierstore's patches stay")
def reset_the_device_map(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    pipe.reset_device_map()
    pipe.remove_all_hooks()
    actions.run("flux", pipe)


@SAVING.row("`pipe.save_pretrained`, then loading the result")
def save_a_pipeline(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    actions.run("flux", pipe)
    folder = actions.folder / "saved"
    pipe.save_pretrained(folder)
    again = pipelines.load("flux", folder)
    actions.offload(again)
    actions.run("flux", again)
    assert torch.equal(*actions.outputs)


@SAVING.row("`save_pretrained` of a component that was changed")
def save_a_component(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    actions.run("flux", pipe)
    with torch.no_grad():
        pipe.transformer.proj_out.weight.zero_()
    folder = actions.folder / "saved"
    pipe.transformer.save_pretrained(folder)
    model: Any = diffusers.FluxTransformer2DModel
    other = actions.load("flux")
    other.transformer = model.from_pretrained(folder, torch_dtype=pipelines.DTYPE)
    actions.offload(other)
    actions.run("flux", other)
    actions.check_that_it_changed()
    actions.run("flux", pipe)
    assert torch.equal(*actions.outputs[-2:])


@SAVING.row("`state_dict` and `load_state_dict`")
def load_a_state_dict(actions: Actions) -> None:
    pipe, other = actions.load("flux"), actions.load("flux")
    actions.offload(pipe)
    actions.run("flux", pipe)
    state = other.transformer.state_dict()
    state["proj_out.weight"] = state["proj_out.weight"] / 2
    pipe.transformer.load_state_dict(state)
    actions.run("flux", pipe)
    actions.check_that_it_changed()


@SAVING.row("`copy.deepcopy` of a pipeline", note="the copy is an ordinary one, on the CPU")
def copy_a_pipeline(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    actions.run("flux", pipe)
    copied = copy.deepcopy(pipe)
    actions.offload(copied)
    actions.run("flux", copied)
    assert torch.equal(*actions.outputs)


@SAVING.row("`pickle` and `torch.save` of a component")
def pickle_a_component(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    actions.run("flux", pipe)
    file = actions.folder / "transformer.pt"
    with actions.on_the_cpu(pipe):
        torch.save(pipe.transformer, file)
        pickled = pickle.dumps(pipe.vae)
    other = actions.load("flux")
    other.transformer = torch.load(file, weights_only=False)
    other.vae = pickle.loads(pickled)
    actions.offload(other)
    actions.run("flux", other)
    assert torch.equal(*actions.outputs)


@SAVING.row("`disable_offload(handle)`, and offloading it again")
def end_and_offload_again(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    actions.run("flux", pipe)
    actions.end(pipe)
    pipe.to(actions.device)
    ordinary = pipelines.run("flux", pipe, steps=2, device=actions.device)
    assert torch.equal(ordinary, actions.outputs[0])
    pipe.to("cpu")
    actions.offload(pipe)
    actions.run("flux", pipe)
