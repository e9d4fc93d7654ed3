"""A Flux transformer of any size with random weights, and its denoising loop.

Only the transformer, which runs in every step, is included: the text is a fixed random embedding,
the image 64 tokens (8 x 8) or another square number.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bench.models import RECIPE, kept, weight_bytes

__all__ = ["CLASS", "Shape", "denoise", "inputs", "load", "save", "weight_bytes"]

import diffusers
import torch

diffusers.utils.logging.disable_progress_bar()
warnings.filterwarnings("ignore", message=".*torch_dtype", category=FutureWarning)

CHANNELS = 64
CLASS = diffusers.FluxTransformer2DModel


@dataclass(frozen=True)
class Shape:
    """Attention heads of `head_dim` elements, double and single blocks, torch dtype, and seed."""

    heads: int
    double: int
    single: int
    dtype: str = "bfloat16"
    head_dim: int = 128
    shard: str = "1GB"
    seed: int = 0

    def build(self) -> Any:
        """Return the transformer with initial weights."""
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
    """Write a sharded checkpoint with random weights, or reuse that of an earlier run."""

    def write() -> None:
        generator = torch.Generator().manual_seed(shape.seed)
        model = shape.build()
        for parameter in model.parameters():
            fan_in = parameter[0].numel() if parameter.ndim > 1 else 100
            parameter.normal_(std=fan_in**-0.5, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(1.0)
            parameter.data = parameter.data.to(getattr(torch, shape.dtype))
        model.save_pretrained(directory, max_shard_size=shape.shard)

    return kept(shape, directory, write)


def load(checkpoint: Path) -> Any:
    """Load a checkpoint in its own dtype, as users do: the weights are maps of the files."""
    dtype = getattr(torch, json.loads((checkpoint / RECIPE).read_text())["dtype"])
    return CLASS.from_pretrained(checkpoint, torch_dtype=dtype)


def inputs(
    device: str = "cpu", image: int = 64, text: int = 32, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Return the inputs of the model for a number of tokens; always the same."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.zeros(image, 3)
    side = int(image**0.5)
    ids[:, 1], ids[:, 2] = torch.arange(image) // side, torch.arange(image) % side

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(device, dtype)

    return {
        "hidden_states": random(1, image, CHANNELS),
        "encoder_hidden_states": random(1, text, 256),
        "pooled_projections": random(1, 128),
        "timestep": torch.tensor([0.5], device=device),
        "guidance": torch.tensor([3.5], device=device),
        "img_ids": ids.to(device),
        "txt_ids": torch.zeros(text, 3, device=device),
        "return_dict": False,
    }


@torch.no_grad()
def denoise(
    model: Any, steps: int, device: str = "cpu", tokens: int = 64
) -> Iterator[torch.Tensor]:
    """Yield the image (packed latents) after each step, deterministic for given weights."""
    fixed = inputs(device, tokens, dtype=next(iter(model.parameters())).dtype)
    image = fixed.pop("hidden_states")
    for step in range(steps):
        fixed["timestep"] = torch.tensor([1.0 - step / 50], device=device)  # of 50 steps
        image = image - model(hidden_states=image, **fixed)[0] / 50
        yield image
