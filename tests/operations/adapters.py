"""Further extensions of diffusers pipelines: image prompts, textual inversion, ControlNets."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from safetensors.torch import save_file

from tests import pipelines
from tests.operations import parts
from tests.operations.actions import Actions
from tests.operations.loras import lora_file
from tests.operations.operation import Table

ADAPTERS = Table("Image prompts, new words, ControlNets, refiners")
WORD = "<boat>"


def load_ip_adapter(actions: Actions, pipe: Any) -> None:
    folder = actions.checkpoint("ip adapter")
    pipe.load_ip_adapter(folder, subfolder="", weight_name="ip_adapter.safetensors")


@ADAPTERS.row("`load_ip_adapter` (with its image encoder) and `unload_ip_adapter`")
def load_and_unload_an_ip_adapter(actions: Actions) -> None:
    pipe = actions.load("sdxl")
    actions.offload(pipe)
    actions.run("sdxl", pipe)
    load_ip_adapter(actions, pipe)
    actions.run("sdxl", pipe, ip_adapter_image=picture())
    actions.check_that_it_changed()
    pipe.unload_ip_adapter()
    actions.run("sdxl", pipe)
    actions.check_that_it_changed()


@ADAPTERS.row("`load_ip_adapter` before offloading, `set_ip_adapter_scale`")
def scale_an_ip_adapter(actions: Actions) -> None:
    pipe = actions.load("sdxl")
    load_ip_adapter(actions, pipe)
    actions.offload(pipe)
    actions.run("sdxl", pipe, ip_adapter_image=picture())
    pipe.set_ip_adapter_scale(0.4)
    actions.run("sdxl", pipe, ip_adapter_image=picture())
    actions.check_that_it_changed()


@ADAPTERS.row("`load_ip_adapter` and a LoRA, then `unload_ip_adapter`")
def an_ip_adapter_and_a_lora(actions: Actions) -> None:
    pipe = actions.load("sdxl")
    actions.offload(pipe)
    load_ip_adapter(actions, pipe)
    pipe.load_lora_weights(lora_file(pipe, actions.folder / "lora"))
    actions.run("sdxl", pipe, ip_adapter_image=picture())
    pipe.unload_ip_adapter()
    actions.run("sdxl", pipe)
    actions.check_that_it_changed()


def picture() -> Any:
    return diffusers.image_processor.VaeImageProcessor.numpy_to_pil(
        parts.image().permute(0, 2, 3, 1).numpy()
    )[0]


@ADAPTERS.row("`load_textual_inversion` and `unload_textual_inversion`")
def load_and_unload_a_textual_inversion(actions: Actions) -> None:
    pipe = actions.load("sdxl")
    actions.offload(pipe)
    prompt = f"a {WORD} on a lake"
    actions.run("sdxl", pipe, prompt=prompt)
    width = pipe.text_encoder.config.hidden_size
    vectors = torch.randn(2, width, generator=torch.Generator().manual_seed(0))
    file = actions.folder / "word.safetensors"
    save_file({WORD: vectors.to(pipelines.DTYPE)}, file)
    for number in ("", "_2"):
        encoder = getattr(pipe, f"text_encoder{number}")
        tokenizer = getattr(pipe, f"tokenizer{number}")
        pipe.load_textual_inversion(file, text_encoder=encoder, tokenizer=tokenizer)
    actions.run("sdxl", pipe, prompt=prompt)
    actions.check_that_it_changed()
    for number in ("", "_2"):
        encoder = getattr(pipe, f"text_encoder{number}")
        tokenizer = getattr(pipe, f"tokenizer{number}")
        pipe.unload_textual_inversion(text_encoder=encoder, tokenizer=tokenizer)
    actions.run("sdxl", pipe, prompt=prompt)
    actions.check_that_it_changed()


def controlnet(actions: Actions, name: str = "controlnet") -> Any:
    model: Any = diffusers.ControlNetModel
    return model.from_pretrained(actions.checkpoint(name), torch_dtype=pipelines.DTYPE)


@ADAPTERS.row("a pipeline with a ControlNet")
def a_controlnet(actions: Actions) -> None:
    base = actions.load("sdxl")
    pipe = diffusers.StableDiffusionXLControlNetPipeline(
        **base.components, controlnet=controlnet(actions)
    )
    actions.offload(pipelines.quiet(pipe))
    actions.run("sdxl", pipe, image=parts.image())
    actions.run("sdxl", pipe, image=parts.image(), controlnet_conditioning_scale=0.3)
    actions.check_that_it_changed()


@ADAPTERS.row("several ControlNets, in a pipeline made from an offloaded one")
def several_controlnets(actions: Actions) -> None:
    base = actions.load("sdxl")
    actions.offload(base)
    actions.run("sdxl", base)
    nets = [controlnet(actions), controlnet(actions, "another controlnet")]
    pipe = diffusers.StableDiffusionXLControlNetPipeline(**base.components, controlnet=nets)
    actions.offload(pipelines.quiet(pipe))
    actions.run("sdxl", pipe, image=[parts.image(0), parts.image(1)])
    actions.check_that_it_changed()


@ADAPTERS.row("a pipeline with a T2I adapter")
def a_t2i_adapter(actions: Actions) -> None:
    model: Any = diffusers.T2IAdapter
    adapter = model.from_pretrained(actions.checkpoint("t2i adapter"), torch_dtype=pipelines.DTYPE)
    base = actions.load("sdxl")
    pipe = diffusers.StableDiffusionXLAdapterPipeline(**base.components, adapter=adapter)
    actions.offload(pipelines.quiet(pipe))
    actions.run("sdxl", pipe, image=parts.image())
    actions.run("sdxl", pipe, image=parts.image(), adapter_conditioning_scale=0.3)
    actions.check_that_it_changed()


@ADAPTERS.row("a refiner that shares a text encoder and the VAE")
def a_refiner(actions: Actions) -> None:
    base = actions.load("sdxl")
    actions.offload(base)
    actions.run("sdxl", base, denoising_end=0.6, output_type="latent", steps=3)
    latents = actions.outputs[-1]
    model: Any = diffusers.UNet2DConditionModel
    unet = model.from_pretrained(actions.checkpoint("refiner"), torch_dtype=pipelines.DTYPE)
    refiner = diffusers.StableDiffusionXLImg2ImgPipeline(
        vae=base.vae,
        text_encoder=None,
        text_encoder_2=base.text_encoder_2,
        tokenizer=None,
        tokenizer_2=base.tokenizer_2,
        unet=unet,
        scheduler=base.scheduler,
        add_watermarker=False,
    )
    actions.offload(pipelines.quiet(refiner))
    actions.compute(
        lambda: refiner(
            prompt=pipelines.PROMPT,
            image=latents.to(actions.device),
            denoising_start=0.6,
            num_inference_steps=3,
            output_type="pt",
            return_dict=False,
            generator=torch.Generator().manual_seed(0),
        )[0]
    )
    actions.run("sdxl", base)
