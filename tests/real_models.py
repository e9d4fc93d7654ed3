"""The models that the store is made for, with their real configs, for torch's meta device."""

from __future__ import annotations

from collections.abc import Callable

import diffusers
from torch import nn


def flux() -> nn.Module:
    """FLUX.1-dev."""
    return diffusers.FluxTransformer2DModel(guidance_embeds=True)


def sdxl() -> nn.Module:
    """The UNet of SDXL."""
    return diffusers.UNet2DConditionModel(
        sample_size=128,
        block_out_channels=(320, 640, 1280),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2, 10),
        attention_head_dim=(5, 10, 20),
        cross_attention_dim=2048,
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
        use_linear_projection=True,
    )


def wan() -> nn.Module:
    """One expert of Wan with 14 billion parameters."""
    return diffusers.WanTransformer3DModel()


MODELS: dict[str, Callable[[], nn.Module]] = {"flux": flux, "sdxl": sdxl, "wan": wan}
