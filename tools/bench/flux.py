"""A Flux transformer of any size with random weights, and the loop that denoises with it.

Only the transformer runs in every step, so only the transformer is here: the text is a fixed
random embedding, the image 64 tokens (8 by 8) or another square.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is built here

import diffusers
import torch

diffusers.utils.logging.disable_progress_bar()
warnings.filterwarnings("ignore", message=".*torch_dtype", category=FutureWarning)

IMAGE_TOKENS, TEXT_TOKENS = 64, 32
CHANNELS = 64
RECIPE = "recipe.json"
CLASS = diffusers.FluxTransformer2DModel


@dataclass(frozen=True)
class Shape:
    """Attention heads of `head_dim`, double and single blocks, a dtype by its name in torch, and
    the seed of the weights."""

    heads: int
    double: int
    single: int
    dtype: str = "bfloat16"
    head_dim: int = 128
    shard: str = "1GB"
    seed: int = 0

    def build(self) -> Any:
        """The transformer, its weights not set to anything useful."""
        rope = {16: (4, 4, 8), 32: (8, 12, 12), 128: (16, 56, 56)}[self.head_dim]
        return CLASS(
            in_channels=CHANNELS,
            num_layers=self.double,
            num_single_layers=self.single,
            attention_head_dim=self.head_dim,
            num_attention_heads=self.heads,
            joint_attention_dim=256,
            pooled_projection_dim=128,
            guidance_embeds=True,
            axes_dims_rope=rope,
        )


@torch.no_grad()
def save(shape: Shape, directory: Path) -> Path:
    """A sharded checkpoint with random weights. One that is there from an earlier run is kept."""
    recipe = directory / RECIPE
    if recipe.exists() and json.loads(recipe.read_text()) == asdict(shape):
        return directory
    generator = torch.Generator().manual_seed(shape.seed)
    model = shape.build()
    for parameter in model.parameters():
        fan_in = parameter[0].numel() if parameter.ndim > 1 else 100
        parameter.normal_(std=fan_in**-0.5, generator=generator)
        if parameter.ndim == 1:
            parameter.add_(1.0)
        parameter.data = parameter.data.to(getattr(torch, shape.dtype))
    model.save_pretrained(directory, max_shard_size=shape.shard)
    recipe.write_text(json.dumps(asdict(shape)))
    return directory


def load(checkpoint: Path) -> Any:
    """As a user loads it, at the dtype in which it was saved: its weights are maps of the files."""
    dtype = getattr(torch, json.loads((checkpoint / RECIPE).read_text())["dtype"])
    return CLASS.from_pretrained(checkpoint, torch_dtype=dtype)


def weight_bytes(model: Any) -> int:
    """Bytes of all weights."""
    return sum(parameter.nbytes for parameter in model.parameters())


@torch.no_grad()
def denoise(
    model: Any, steps: int, device: str = "cpu", tokens: int = IMAGE_TOKENS
) -> Iterator[torch.Tensor]:
    """Yield the image (packed latents) after each step, always the same for the same weights."""
    dtype = next(iter(model.parameters())).dtype
    generator = torch.Generator().manual_seed(1)
    ids = torch.zeros(tokens, 3)
    side = int(tokens**0.5)
    ids[:, 1], ids[:, 2] = torch.arange(tokens) // side, torch.arange(tokens) % side

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(device, dtype)

    image = random(1, tokens, CHANNELS)
    fixed = {
        "encoder_hidden_states": random(1, TEXT_TOKENS, 256),
        "pooled_projections": random(1, 128),
        "guidance": torch.tensor([3.5], device=device),
        "img_ids": ids.to(device),
        "txt_ids": torch.zeros(TEXT_TOKENS, 3, device=device),
        "return_dict": False,
    }
    for step in range(steps):
        time = torch.tensor([1.0 - step / 50], device=device)  # a part of a loop of 50 steps
        image = image - model(hidden_states=image, timestep=time, **fixed)[0] / 50
        yield image
