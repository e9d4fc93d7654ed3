"""Parts that extend SDXL pipelines, as on the hub: adapters and a refiner.

`BUILDERS[kind](directory, checkpoint)` saves one for the SDXL pipeline of `tests.pipelines`, with
random weights of the same dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from safetensors.torch import save_file

from tests import pipelines

IMAGE_SIZE = 16
"""Height and width of images, in pixels."""
TOKENS_OF_AN_IMAGE = 4

Checkpoint = Callable[[str], Path]


def image(seed: int = 0, size: int = IMAGE_SIZE) -> torch.Tensor:
    """Return an image with values between 0 and 1."""
    return torch.rand(1, 3, size, size, generator=torch.Generator().manual_seed(seed))


def sdxl_unet(checkpoint: Checkpoint, **changes: Any) -> Any:
    """Build a UNet like SDXL's with some other settings; its weights are drawn later."""
    model: Any = diffusers.UNet2DConditionModel
    config = model.load_config(checkpoint("sdxl") / "unet")
    return model.from_config({**config, **changes})


def save(model: Any, directory: Path, seed: int = 0) -> Path:
    pipelines.randomise({"model": model}, {"model": seed})
    model.save_pretrained(directory)
    return directory


def build_controlnet(directory: Path, checkpoint: Checkpoint, seed: int = 0) -> Path:
    return save(
        diffusers.ControlNetModel.from_unet(
            sdxl_unet(checkpoint),
            conditioning_embedding_out_channels=(8, 16),  # half the size, as the VAE of the tests
        ),
        directory,
        seed,
    )


def build_another_controlnet(directory: Path, checkpoint: Checkpoint) -> Path:
    return build_controlnet(directory, checkpoint, seed=1)


def build_t2i_adapter(directory: Path, checkpoint: Checkpoint) -> Path:
    adapter = diffusers.T2IAdapter(
        in_channels=3,
        channels=[16, 32, 32, 32],
        num_res_blocks=1,
        downscale_factor=4,
        adapter_type="full_adapter_xl",
    )
    return save(adapter, directory)


def build_ip_adapter(directory: Path, checkpoint: Checkpoint) -> Path:
    """Save `ip_adapter.safetensors`, and its image encoder in a folder."""
    config = transformers.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        projection_dim=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=IMAGE_SIZE,
        patch_size=4,
    )
    save(transformers.CLIPVisionModelWithProjection(config), directory / "image_encoder")
    unet = sdxl_unet(checkpoint)
    width = unet.config.cross_attention_dim
    drawn = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=drawn) * shape[-1] ** -0.5).to(pipelines.DTYPE)

    weights = {
        "image_proj.proj.weight": weight(TOKENS_OF_AN_IMAGE * width, config.projection_dim),
        "image_proj.proj.bias": weight(TOKENS_OF_AN_IMAGE * width),
        "image_proj.norm.weight": 1 + weight(width),
        "image_proj.norm.bias": weight(width),
    }
    for number, name in enumerate(unet.attn_processors):
        if name.endswith("attn2.processor"):
            hidden = unet.get_submodule(name.removesuffix(".processor")).to_q.in_features
            weights[f"ip_adapter.{number}.to_k_ip.weight"] = weight(hidden, width)
            weights[f"ip_adapter.{number}.to_v_ip.weight"] = weight(hidden, width)
    save_file(weights, directory / "ip_adapter.safetensors")
    return directory


def build_refiner(directory: Path, checkpoint: Checkpoint) -> Path:
    """Save a refiner's UNet. All other parts are those of the pipeline whose images it refines."""
    base = sdxl_unet(checkpoint).config
    one_encoder = base.cross_attention_dim // 2
    return save(sdxl_unet(checkpoint, cross_attention_dim=one_encoder), directory)


def build_another_vae(directory: Path, checkpoint: Checkpoint) -> Path:
    model: Any = diffusers.AutoencoderKL
    config = model.load_config(checkpoint("sdxl") / "vae")
    return save(model.from_config(config), directory, seed=1)


BUILDERS: dict[str, Callable[[Path, Checkpoint], Path]] = {
    "controlnet": build_controlnet,
    "another controlnet": build_another_controlnet,
    "t2i adapter": build_t2i_adapter,
    "ip adapter": build_ip_adapter,
    "refiner": build_refiner,
    "another vae": build_another_vae,
}
