"""LoRAs of diffusers pipelines."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import peft
import torch

from tests import pipelines
from tests.operations import parts
from tests.operations.actions import Actions
from tests.operations.operation import Table

LORAS = Table("LoRAs")
TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]
TEXT_ENCODER_TARGETS = ["q_proj", "k_proj", "v_proj", "out_proj"]
ENCODERS = ("text_encoder", "text_encoder_2")


def lora_of(root: Any, seed: int, rank: int, **config: Any) -> Mapping[str, torch.Tensor]:
    """Return a LoRA for a model, with random weights, under the names that trainers save."""
    from_config = getattr(type(root), "from_config", type(root))
    with torch.device("meta"):
        twin = from_config(root.config)
    twin = peft.inject_adapter_in_model(
        peft.LoraConfig(r=rank, lora_alpha=rank, **config), twin, adapter_name="default"
    )
    state = diffusers.utils.convert_state_dict_to_diffusers(peft.get_peft_model_state_dict(twin))
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (0.3 * torch.randn(weight.shape, generator=generator)).to(pipelines.DTYPE)
        for name, weight in state.items()
    }


def lora_file(
    pipe: Any,
    path: Path,
    *components: str,
    rank: int = 4,
    **config: Any,
) -> Path:
    """Save a LoRA for components of a pipeline, by default its denoiser, as trainers do.

    Its weights are random, seeded by the name of the file.
    """
    found = {}
    for component in components or (denoiser_of(pipe),):
        targets = TEXT_ENCODER_TARGETS if component.startswith("text") else TARGETS
        seed = zlib.crc32(f"{path.name}:{component}".encode())
        root = getattr(pipe, component)
        settings = {"target_modules": targets, **config}
        found[f"{component}_lora_layers"] = lora_of(root, seed, rank, **settings)
    type(pipe).save_lora_weights(path, **found)
    return path


def denoiser_of(pipe: Any) -> str:
    return "unet" if hasattr(pipe, "unet") else "transformer"


@LORAS.row("`load_lora_weights` before offloading")
def load_a_lora_before(actions: Actions) -> None:
    pipe = actions.load("flux")
    pipe.load_lora_weights(lora_file(pipe, actions.folder / "lora"))
    actions.offload(pipe)
    actions.run("flux", pipe)


@LORAS.row("`load_lora_weights` and `unload_lora_weights` while offloaded")
def load_and_unload_a_lora(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    actions.run("flux", pipe)
    pipe.load_lora_weights(lora_file(pipe, actions.folder / "lora"))
    actions.run("flux", pipe)
    actions.check_that_it_changed()
    pipe.unload_lora_weights()
    actions.run("flux", pipe)
    actions.check_that_it_changed()


@LORAS.row("two LoRAs, with weights: `set_adapters`")
def two_loras(actions: Actions) -> None:
    pipe = actions.load("sd3")
    actions.offload(pipe)
    for name in ("first", "second"):
        pipe.load_lora_weights(lora_file(pipe, actions.folder / name), adapter_name=name)
    pipe.set_adapters(["first", "second"], adapter_weights=[0.7, 0.4])
    actions.run("sd3", pipe)
    pipe.set_adapters("second", adapter_weights=0.4)
    actions.run("sd3", pipe)
    actions.check_that_it_changed()


@LORAS.row("a weight for each block: `set_adapters` of a dict")
def a_lora_scaled_by_block(actions: Actions) -> None:
    pipe = actions.load("sdxl")
    actions.offload(pipe)
    pipe.load_lora_weights(lora_file(pipe, actions.folder / "lora"), adapter_name="first")
    actions.run("sdxl", pipe)
    pipe.set_adapters("first", {"unet": {"down": 0.2, "mid": 0.5, "up": {"block_0": [0.1, 0.9]}}})
    actions.run("sdxl", pipe)
    actions.check_that_it_changed()


@LORAS.row('a weight for one call: `cross_attention_kwargs={"scale": 0.3}` and the like')
def a_lora_scaled_in_a_call(actions: Actions) -> None:
    pipe = actions.load("sdxl")
    actions.offload(pipe)
    pipe.load_lora_weights(lora_file(pipe, actions.folder / "lora"))
    actions.run("sdxl", pipe, cross_attention_kwargs={"scale": 0.3})
    actions.run("sdxl", pipe)
    actions.check_that_it_changed()


@LORAS.row("`disable_lora` and `enable_lora`")
def disable_and_enable_a_lora(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    pipe.load_lora_weights(lora_file(pipe, actions.folder / "lora"))
    pipe.disable_lora()
    actions.run("flux", pipe)
    pipe.enable_lora()
    actions.run("flux", pipe)
    actions.check_that_it_changed()


@LORAS.row("`delete_adapters`")
def delete_a_lora(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    for name in ("first", "second"):
        pipe.load_lora_weights(lora_file(pipe, actions.folder / name), adapter_name=name)
    pipe.set_adapters(["first", "second"])
    actions.run("flux", pipe)
    pipe.delete_adapters("first")
    actions.run("flux", pipe)
    actions.check_that_it_changed()


@LORAS.row("`fuse_lora` and `unfuse_lora`", note="computed on the CPU")
def fuse_and_unfuse_a_lora(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    pipe.load_lora_weights(lora_file(pipe, actions.folder / "lora"))
    with actions.on_the_cpu(pipe):
        pipe.fuse_lora(lora_scale=0.7)
    actions.run("flux", pipe)
    with actions.on_the_cpu(pipe):
        pipe.unfuse_lora()
    pipe.disable_lora()
    actions.run("flux", pipe)
    actions.check_that_it_changed()


@LORAS.row("`fuse_lora`, then `unload_lora_weights`", note="computed on the CPU")
def fuse_a_lora_for_good(actions: Actions) -> None:
    pipe = actions.load("sdxl")
    actions.offload(pipe)
    actions.run("sdxl", pipe)
    pipe.load_lora_weights(lora_file(pipe, actions.folder / "lora"))
    with actions.on_the_cpu(pipe):
        pipe.fuse_lora()
        pipe.unload_lora_weights()
    actions.run("sdxl", pipe)
    actions.check_that_it_changed()


@LORAS.row("hot-swapping: `load_lora_weights(..., hotswap=True)`")
def swap_a_lora(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    pipe.load_lora_weights(lora_file(pipe, actions.folder / "first"), adapter_name="one")
    actions.run("flux", pipe)
    other = lora_file(pipe, actions.folder / "second")
    pipe.load_lora_weights(other, adapter_name="one", hotswap=True)
    actions.run("flux", pipe)
    actions.check_that_it_changed()


@LORAS.row("hot-swapping a LoRA of another rank: `enable_lora_hotswap(target_rank=8)`")
def swap_a_lora_of_another_rank(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    pipe.enable_lora_hotswap(target_rank=8)
    pipe.load_lora_weights(lora_file(pipe, actions.folder / "first"), adapter_name="one")
    actions.run("flux", pipe)
    other = lora_file(pipe, actions.folder / "second", rank=8)
    pipe.load_lora_weights(other, adapter_name="one", hotswap=True)
    actions.run("flux", pipe)
    actions.check_that_it_changed()


@LORAS.row("DoRA")
def load_a_dora(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    actions.run("flux", pipe)
    pipe.load_lora_weights(lora_file(pipe, actions.folder / "dora", use_dora=True))
    actions.run("flux", pipe)
    actions.check_that_it_changed()


@LORAS.row("a LoRA with parts for text encoders")
def a_lora_of_text_encoders(actions: Actions) -> None:
    pipe = actions.load("sdxl")
    actions.offload(pipe)
    pipe.load_lora_weights(lora_file(pipe, actions.folder / "lora", *ENCODERS, "unet"))
    actions.run("sdxl", pipe)
    pipe.set_adapters("default_0", {"text_encoder": 0.3, "text_encoder_2": 0.5, "unet": 0.0})
    actions.run("sdxl", pipe)
    actions.check_that_it_changed()


@LORAS.row("a LoRA for both experts of Wan: `load_into_transformer_2=True`")
def a_lora_of_two_experts(actions: Actions) -> None:
    pipe = actions.load("wan")
    actions.offload(pipe)
    first = lora_file(pipe, actions.folder / "first")
    second = lora_file(pipe, actions.folder / "second")
    pipe.load_lora_weights(first, adapter_name="first")
    actions.run("wan", pipe, output_type="latent")
    pipe.load_lora_weights(second, adapter_name="second", load_into_transformer_2=True)
    actions.run("wan", pipe, output_type="latent")
    actions.check_that_it_changed()


@LORAS.row("a LoRA loaded by another pipeline that shares the models: `from_pipe`")
def a_lora_by_another_pipeline(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    actions.run("flux", pipe)
    other = diffusers.FluxImg2ImgPipeline.from_pipe(pipe, torch_dtype=pipelines.DTYPE)
    other.load_lora_weights(lora_file(pipe, actions.folder / "lora"))
    actions.run("flux", pipe)
    actions.check_that_it_changed()


@LORAS.row("`set_lora_device` to the CPU and back")
def a_lora_on_another_device(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    for name in ("first", "second"):
        pipe.load_lora_weights(lora_file(pipe, actions.folder / name), adapter_name=name)
    pipe.set_adapters("second")
    pipe.set_lora_device(["first"], "cpu")
    actions.run("flux", pipe)
    pipe.set_lora_device(["first"], actions.device)
    pipe.set_adapters("first")
    actions.run("flux", pipe)
    actions.check_that_it_changed()


@LORAS.row("on one model: `load_lora_adapter`, `save_lora_adapter`, `unload_lora`")
def a_lora_of_a_model(actions: Actions) -> None:
    pipe = actions.load("sd3")
    actions.offload(pipe)
    file = lora_file(pipe, actions.folder / "lora")
    name = "pytorch_lora_weights.safetensors"
    pipe.transformer.load_lora_adapter(file, weight_name=name, adapter_name="first")
    actions.run("sd3", pipe)
    saved = actions.folder / "saved"
    pipe.transformer.save_lora_adapter(saved, adapter_name="first")
    pipe.transformer.unload_lora()
    actions.run("sd3", pipe)
    actions.check_that_it_changed()
    pipe.transformer.load_lora_adapter(saved, weight_name=name, prefix=None)
    actions.run("sd3", pipe)
    actions.check_that_it_changed()


@LORAS.row(
    "one that widens the first layer (a control LoRA), and "
    "`unload_lora_weights(reset_to_overwritten_params=True)`"
)
def a_control_lora(actions: Actions) -> None:
    pipe = actions.load("flux")
    actions.offload(pipe)
    actions.run("flux", pipe)
    layer = pipe.transformer.x_embedder
    generator = torch.Generator().manual_seed(0)
    wide = {
        "x_embedder.lora_A.weight": torch.randn(4, 2 * layer.in_features, generator=generator),
        "x_embedder.lora_B.weight": torch.randn(layer.out_features, 4, generator=generator),
    }
    weights = {name: weight.to(pipelines.DTYPE) for name, weight in wide.items()}
    diffusers.FluxPipeline.save_lora_weights(
        actions.folder / "lora", transformer_lora_layers=weights
    )
    control = diffusers.FluxControlPipeline(**without_image_parts(pipe))
    control.set_progress_bar_config(disable=True)
    control.load_lora_weights(actions.folder / "lora")
    tokens = torch.randn(1, 16, layer.in_features, generator=generator).to(pipelines.DTYPE)
    given = {"latents": tokens, "control_image": parts.image()}
    actions.run("flux", control, generator=torch.Generator().manual_seed(0), **given)
    control.unload_lora_weights(reset_to_overwritten_params=True)
    actions.run("flux", pipe)
    assert torch.equal(actions.outputs[0], actions.outputs[-1])


def without_image_parts(pipe: Any) -> dict[str, Any]:
    """Return its components except those for image prompts."""
    return {n: part for n, part in pipe.components.items() if not n.endswith(IMAGE_PARTS)}


IMAGE_PARTS = ("image_encoder", "feature_extractor")
