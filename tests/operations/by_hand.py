"""User code around a pipeline: component calls, loops, hooks, and weight changes."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.training_utils import EMAModel
from torch import nn

from tests import pipelines
from tests.operations import parts
from tests.operations.actions import Actions
from tests.operations.loras import lora_file
from tests.operations.operation import Table

BY_HAND = Table("By hand: calls, hooks, weights")


def noise(*shape: int) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return drawn.to(pipelines.DTYPE)


@BY_HAND.row("a component called directly: `pipe.text_encoder(...)`, `pipe.vae.encode(...)`")
def call_components(actions: Actions) -> None:
    pipe = actions.load("sdxl")
    actions.offload(pipe)
    tokens = pipe.tokenizer(pipelines.PROMPT, padding="max_length", return_tensors="pt")
    ids = tokens.input_ids.to(actions.device)
    image = parts.image().to(actions.device, pipelines.DTYPE)

    @torch.no_grad()
    def encode_the_text() -> torch.Tensor:
        states = pipe.text_encoder_2(ids, output_hidden_states=True)
        return torch.cat([states.hidden_states[-2].flatten(), states[0].flatten()])

    @torch.no_grad()
    def encode_and_decode() -> torch.Tensor:
        latents = pipe.vae.encode(image).latent_dist.mode()
        decoded: torch.Tensor = pipe.vae.decode(latents, return_dict=False)[0]
        return decoded

    actions.compute(encode_the_text)
    actions.compute(encode_and_decode)


@BY_HAND.row("your own denoising loop: `pipe.transformer(...)`, `pipe.scheduler.step(...)`")
def denoise_by_hand(actions: Actions) -> None:
    pipe = actions.load("sd3")
    actions.offload(pipe)
    config = pipe.transformer.config
    given = {
        "encoder_hidden_states": noise(1, 8, config.joint_attention_dim).to(actions.device),
        "pooled_projections": noise(1, config.pooled_projection_dim).to(actions.device),
    }

    @torch.no_grad()
    def denoise() -> torch.Tensor:
        pipe.scheduler.set_timesteps(2)
        latents = noise(1, config.in_channels, 8, 8).to(actions.device)
        for time in pipe.scheduler.timesteps:
            times = time[None].to(actions.device)
            found = pipe.transformer(latents, timestep=times, return_dict=False, **given)[0]
            latents = pipe.scheduler.step(found, time, latents, return_dict=False)[0]
        return latents

    actions.compute(denoise)
    actions.compute(denoise)


@BY_HAND.row("hooks: `register_forward_hook`, `register_forward_pre_hook`")
def hooks(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    actions.run("flux", pipe)
    features: list[torch.Tensor] = []
    block = pipe.transformer.single_transformer_blocks[1]

    def keep(module: nn.Module, given: Any, output: torch.Tensor) -> None:
        features.append(output.clone())

    def scale(module: nn.Module, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (given[0] * 0.5,)

    handles = [
        block.proj_mlp.register_forward_hook(keep),
        pipe.transformer.proj_out.register_forward_pre_hook(scale),
    ]
    actions.run("flux", pipe)
    actions.check_that_it_changed()
    for handle in handles:
        handle.remove()
    actions.run("flux", pipe)
    actions.outputs += [feature.cpu() for feature in features]
    assert len(features) == 2


@BY_HAND.row("a weight edited in place: `weight.mul_(2)`, `weight.data[0] = 5`")
def edit_weights(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    actions.run("flux", pipe)
    with torch.no_grad():
        pipe.transformer.proj_out.weight.mul_(2)
    actions.run("flux", pipe)
    actions.check_that_it_changed()
    pipe.vae.decoder.conv_out.weight.data[0] = 0.25
    actions.run("flux", pipe)
    actions.check_that_it_changed()


@BY_HAND.row(
    "another Parameter: `module.weight = nn.Parameter(...)`", note="its type may be another"
)
def replace_a_parameter(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    actions.run("flux", pipe)
    with actions.on_the_cpu(pipe):
        layer = pipe.transformer.proj_out
        layer.weight = nn.Parameter(noise(*layer.weight.shape))
    actions.run("flux", pipe)
    actions.check_that_it_changed()


@BY_HAND.row("two models mixed: a loop over `parameters()`", note="computed on the CPU")
def mix_two_models(actions: Actions) -> None:
    pipe, other = actions.load("flux"), actions.load("flux")
    actions.offload(pipe)
    actions.run("flux", pipe)
    with torch.no_grad(), actions.on_the_cpu(pipe):
        pairs = zip(pipe.transformer.parameters(), other.transformer.parameters(), strict=True)
        for weight, another in pairs:
            weight.lerp_(another.flip(0), 0.3)
    actions.run("flux", pipe)
    actions.check_that_it_changed()


@BY_HAND.row("averaged weights: `EMAModel.copy_to`", note="computed on the CPU")
def averaged_weights(actions: Actions) -> None:
    pipe, other = actions.load("flux"), actions.load("flux")
    actions.offload(pipe)
    actions.run("flux", pipe)
    averaged = EMAModel(other.transformer.parameters())
    averaged.shadow_params = [weight * 0.9 for weight in averaged.shadow_params]
    with actions.on_the_cpu(pipe):
        averaged.store(pipe.transformer.parameters())
        averaged.copy_to(pipe.transformer.parameters())
    actions.run("flux", pipe)
    actions.check_that_it_changed()
    with actions.on_the_cpu(pipe):
        averaged.restore(pipe.transformer.parameters())
    actions.run("flux", pipe)
    assert torch.equal(actions.outputs[0], actions.outputs[-1])


@BY_HAND.row("any of these within `handle.suspended()`", note="computed on the CPU")
def change_it_suspended(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    actions.run("flux", pipe)
    with actions.on_the_cpu(pipe), actions.suspended():
        pipe.load_lora_weights(lora_file(pipe, actions.folder / "lora"))
        pipe.fuse_lora()
        with torch.no_grad():
            pipe.transformer.proj_out.weight.mul_(2)
    actions.run("flux", pipe)
    actions.check_that_it_changed()
