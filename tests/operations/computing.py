"""Ways to compute: attention, guidance, tiling, modes of torch, callbacks, schedulers."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import diffusers
import torch
from diffusers.models.attention_dispatch import attention_backend
from diffusers.models.attention_processor import AttnProcessor

from tests import pipelines
from tests.accelerator import ACCELERATOR
from tests.device import autocast
from tests.operations import parts
from tests.operations.actions import Actions
from tests.operations.loras import lora_file
from tests.operations.operation import Table

COMPUTING = Table("How it computes")


@COMPUTING.row("`set_attn_processor` and `set_default_attn_processor`")
def attention_processors(actions: Actions) -> None:
    pipe = actions.load("sdxl")
    actions.offload(pipe)
    actions.run("sdxl", pipe)
    pipe.unet.set_attn_processor(AttnProcessor())
    actions.run("sdxl", pipe)
    actions.check_that_it_changed()
    pipe.unet.set_default_attn_processor()
    actions.run("sdxl", pipe)


@COMPUTING.row("`set_attention_backend`, `attention_backend`, `reset_attention_backend`")
def attention_backends(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    with attention_backend("native"):  # a backend set for one model applies to all of them
        actions.run("flux", pipe)
        pipe.transformer.set_attention_backend("_native_math")
        actions.run("flux", pipe)
        pipe.transformer.reset_attention_backend()
    actions.run("flux", pipe)


@COMPUTING.row("`enable_attention_slicing` and `disable_attention_slicing`")
def sliced_attention(actions: Actions) -> None:
    pipe = actions.load("sdxl")
    actions.offload(pipe)
    actions.run("sdxl", pipe)
    pipe.enable_attention_slicing(1)
    actions.run("sdxl", pipe)
    actions.check_that_it_changed()
    pipe.disable_attention_slicing()
    actions.run("sdxl", pipe)


@COMPUTING.row("`fuse_qkv_projections` and `unfuse_qkv_projections`")
def fused_projections(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    actions.run("flux", pipe)
    pipe.transformer.fuse_qkv_projections()
    actions.run("flux", pipe)
    pipe.transformer.unfuse_qkv_projections()
    actions.run("flux", pipe)


@COMPUTING.row("`enable_freeu` and `disable_freeu`")
def freeu(actions: Actions) -> None:
    pipe = actions.load("sdxl")
    actions.offload(pipe)
    actions.run("sdxl", pipe)
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.3, b2=1.4)
    actions.run("sdxl", pipe)
    pipe.disable_freeu()
    actions.run("sdxl", pipe)


@COMPUTING.row("perturbed attention guidance: a pipeline of PAG by `from_pipe`")
def perturbed_attention(actions: Actions) -> None:
    pipe = actions.load("sdxl")
    actions.offload(pipe)
    actions.run("sdxl", pipe)
    other = diffusers.StableDiffusionXLPAGPipeline.from_pipe(
        pipe, torch_dtype=pipelines.DTYPE, pag_applied_layers=["mid"]
    )
    actions.run("sdxl", pipelines.quiet(other), pag_scale=3.0)
    actions.check_that_it_changed()


@COMPUTING.row("skip layer guidance: `skip_guidance_layers=[...]`")
def skip_layer_guidance(actions: Actions) -> None:
    pipe = actions.load("sd3")
    actions.offload(pipe)
    actions.run("sd3", pipe, steps=4)
    skip = {"skip_layer_guidance_start": 0.0, "skip_layer_guidance_stop": 0.9}
    actions.run("sd3", pipe, steps=4, skip_guidance_layers=[1, 2], **skip)
    actions.check_that_it_changed()


def guided_by(actions: Actions, guider: Any) -> None:
    """Compare the output with the modular pipeline's guider, and with another."""
    base = actions.load("sdxl")
    pipe = diffusers.modular_pipelines.StableDiffusionXLAutoBlocks().init_pipeline()
    pipe.set_progress_bar_config(disable=True)
    own = ("unet", "vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "scheduler")
    pipe.update_components(**{name: getattr(base, name) for name in own})
    actions.offload(pipe)
    work = functools.partial(
        torch.no_grad()(pipe),
        prompt=pipelines.PROMPT,
        negative_prompt=pipelines.NEGATIVE_PROMPT,
        num_inference_steps=4,  # with fewer, rounding may hide the guidance
        height=parts.IMAGE_SIZE,
        width=parts.IMAGE_SIZE,
        output_type="pt",
        output="images",
    )
    for guidance in (pipe.guider, guider):
        pipe.update_components(guider=guidance)
        actions.compute(lambda: work(generator=torch.Generator().manual_seed(0)))
    assert guider.num_conditions == 3, "the model is computed a third time, for the guider"


A_BLOCK = "mid_block.attentions.0.transformer_blocks"


@COMPUTING.row("a modular pipeline, with `SkipLayerGuidance`")
def a_modular_pipeline_with_skip_layer_guidance(actions: Actions) -> None:
    skipped = diffusers.LayerSkipConfig(indices=[0], fqn=A_BLOCK)
    guider = diffusers.SkipLayerGuidance(
        skip_layer_guidance_start=0.0, skip_layer_guidance_stop=1.0, skip_layer_config=skipped
    )
    guided_by(actions, guider)
    actions.check_that_it_changed()


@COMPUTING.row("the same with `PerturbedAttentionGuidance`")
def a_modular_pipeline_with_perturbed_attention(actions: Actions) -> None:
    perturbed = diffusers.LayerSkipConfig(
        indices=[0],
        fqn=A_BLOCK,
        skip_attention=False,
        skip_ff=False,
        skip_attention_scores=True,
    )
    guider = diffusers.PerturbedAttentionGuidance(
        perturbed_guidance_start=0.0,
        perturbed_guidance_stop=1.0,
        perturbed_guidance_config=perturbed,
    )
    guided_by(actions, guider)  # a model this small may give the same image


@COMPUTING.row("`vae.enable_tiling`, `vae.enable_slicing` and their opposites")
def a_vae_in_tiles(actions: Actions) -> None:
    pipe = actions.load("sdxl")
    actions.offload(pipe)
    actions.run("sdxl", pipe)
    pipe.vae.tile_latent_min_size = 4
    pipe.vae.tile_sample_min_size = 8
    pipe.vae.enable_tiling()
    pipe.vae.enable_slicing()
    actions.run("sdxl", pipe)
    actions.check_that_it_changed()
    pipe.vae.disable_tiling()
    pipe.vae.disable_slicing()
    actions.run("sdxl", pipe)
    actions.check_that_it_changed()


@COMPUTING.row("`enable_forward_chunking` and `disable_forward_chunking`")
def chunked_feed_forward(actions: Actions) -> None:
    pipe = actions.load("sd3")
    actions.offload(pipe)
    actions.run("sd3", pipe)
    pipe.transformer.enable_forward_chunking(chunk_size=1, dim=1)
    actions.run("sd3", pipe)
    pipe.transformer.disable_forward_chunking()
    actions.run("sd3", pipe)


@COMPUTING.row("`torch.inference_mode`")
def in_inference_mode(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    with torch.inference_mode():
        actions.run("flux", pipe)
    actions.run("flux", pipe)


@COMPUTING.row("`torch.autocast`")
def in_autocast(actions: Actions) -> None:
    pipe = actions.load("sdxl").to(torch.float32)
    actions.offload(pipe)
    if actions.device == ACCELERATOR:
        autocast.load()
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.autocast(actions.device, torch.bfloat16):
        actions.run("sdxl", pipe, latents=latents)
    actions.run("sdxl", pipe, latents=latents)
    actions.check_that_it_changed()


@COMPUTING.row("`enable_gradient_checkpointing`", note="without effect, as always in inference")
def gradient_checkpointing(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    pipe.transformer.enable_gradient_checkpointing()
    actions.run("flux", pipe)
    pipe.transformer.disable_gradient_checkpointing()
    actions.run("flux", pipe)


@COMPUTING.row("another scheduler: `pipe.scheduler = ...`")
def another_scheduler(actions: Actions) -> None:
    pipe = actions.load("sdxl")
    actions.offload(pipe)
    actions.run("sdxl", pipe)
    pipe.scheduler = diffusers.DDIMScheduler.from_config(pipe.scheduler.config)
    actions.run("sdxl", pipe)
    actions.check_that_it_changed()


@COMPUTING.row("`encode_prompt`, then a call with `prompt_embeds`")
def prompts_encoded_before(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    embeddings: list[Any] = []

    @torch.no_grad()
    def encode() -> torch.Tensor:
        embeddings[:] = pipe.encode_prompt(
            pipelines.PROMPT,
            prompt_2=None,
            device=torch.device(actions.device),
            max_sequence_length=pipelines.MAX_SEQUENCE_LENGTH,
        )
        return embeddings[0]

    actions.compute(encode)
    given = {"prompt_embeds": embeddings[0], "pooled_prompt_embeds": embeddings[1]}
    actions.run("flux", pipe, prompt=None, **given)


@COMPUTING.row("a pipeline without its text encoders, with `prompt_embeds`")
def without_text_encoders(actions: Actions) -> None:
    pipe = actions.load("flux")
    drawn = torch.Generator().manual_seed(0)
    given = {
        "prompt_embeds": torch.randn(1, 8, 64, generator=drawn),
        "pooled_prompt_embeds": torch.randn(1, 32, generator=drawn),
    }
    on_device = {n: t.to(actions.device, pipelines.DTYPE) for n, t in given.items()}
    alone = diffusers.FluxPipeline(
        **{**pipe.components, "text_encoder": None, "text_encoder_2": None}
    )
    actions.offload(pipelines.quiet(alone))
    actions.run("flux", alone, prompt=None, **on_device)


@COMPUTING.row("a callback that changes a weight: `callback_on_step_end`")
def a_callback_that_edits(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    actions.run("flux", pipe)
    original = pipe.transformer.proj_out.weight.detach().clone().cpu()

    def halve(pipe: Any, step: int, time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        with torch.no_grad():
            pipe.transformer.proj_out.weight.copy_(original / 2 if step == 0 else original)
        return {}

    actions.run("flux", pipe, callback_on_step_end=halve)
    actions.check_that_it_changed()


@COMPUTING.row("a callback that reads all weights")
def a_callback_that_reads(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    sums: list[torch.Tensor] = []

    def read(pipe: Any, step: int, time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        state = pipe.transformer.state_dict()
        sums.append(sum(weight.cpu().double().sum() for weight in state.values()))
        return {}

    actions.run("flux", pipe, callback_on_step_end=read)
    actions.outputs += sums
    assert len(sums) == 2


@COMPUTING.row("a callback that loads a LoRA")
def a_callback_that_loads_a_lora(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    actions.run("flux", pipe)
    file = lora_file(pipe, actions.folder / "lora")

    def load(pipe: Any, step: int, time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == 0 and not pipe.get_active_adapters():
            pipe.load_lora_weights(file)
        return {}

    actions.run("flux", pipe, callback_on_step_end=load)
    actions.check_that_it_changed()


@COMPUTING.row("a callback that stops the pipeline: `pipe._interrupt = True`")
def a_callback_that_interrupts(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    actions.run("flux", pipe)

    def stop(pipe: Any, step: int, time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        setattr(pipe, "_interrupt", True)  # noqa: B010 (how diffusers documents it)
        return {}

    actions.run("flux", pipe, callback_on_step_end=stop)
    actions.check_that_it_changed()
    actions.run("flux", pipe)


@COMPUTING.row("an error in a callback, or Ctrl-C, and another call after it")
def an_interrupted_call(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    actions.run("flux", pipe)

    def fail(pipe: Any, step: int, time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        actions.run("flux", pipe, callback_on_step_end=fail)
    actions.run("flux", pipe)


@COMPUTING.row("images of several prompts, several images of a prompt")
def several_images(actions: Actions) -> None:
    pipe = actions.load("sdxl")
    actions.offload(pipe)
    actions.run("sdxl", pipe)
    latents = torch.cat([parts.image(n, 8)[:, :1].repeat(1, 4, 1, 1) for n in range(4)])
    actions.run(
        "sdxl",
        pipe,
        prompt=["a boat", "a lake"],
        negative_prompt=["dark", "blurry"],
        num_images_per_prompt=2,
        latents=latents.to(pipelines.DTYPE),
    )
