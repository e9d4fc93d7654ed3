"""A transformer with the weights, tokens and operations of Flux, in plain torch.

It requires only torch and safetensors, so it runs on any rented GPU. `FLUX_1_DEV` has the size of
FLUX.1-dev: 11.9 billion parameters, 23.8 GB in bfloat16. Weights are random, scaled to keep
activations from vanishing or growing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

CHANNELS = 64
SHARD = 2 << 30


@dataclass(frozen=True)
class Shape:
    """Attention heads of `head` elements, blocks of both kinds, tokens of image and text."""

    heads: int
    double: int
    single: int
    image_tokens: int
    text_tokens: int
    text_width: int = 4096
    head: int = 128

    @property
    def width(self) -> int:
        """Elements per token."""
        return self.heads * self.head


FLUX_1_DEV = Shape(24, 19, 38, 4096, 512)
SMALL = Shape(2, 2, 4, 16, 8, text_width=32, head=16)


def heads_of(x: torch.Tensor, head: int) -> torch.Tensor:
    return x.unflatten(-1, (-1, head)).transpose(1, 2)


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Apply rotary embeddings: rotate each pair of elements by the angle of its token."""
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


class Attention(nn.Module):
    """Self-attention with normalised queries and keys, and rotary embeddings."""

    def __init__(self, head: int) -> None:
        super().__init__()
        self.head = head
        self.norm_q = nn.RMSNorm(head)
        self.norm_k = nn.RMSNorm(head)

    def forward(self, qkv: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        q, k, v = (heads_of(part, self.head) for part in qkv.chunk(3, -1))
        q, k = rotated(self.norm_q(q), angles), rotated(self.norm_k(k), angles)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Stream(nn.Module):
    """The layers that a double block has once for the image and once for the text."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.modulation = nn.Linear(width, 6 * width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(F.gelu(self.wide(x), approximate="tanh"))


class DoubleBlock(nn.Module):
    """A block with separate layers for image and text, and joint attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.image, self.text = Stream(shape.width), Stream(shape.width)
        self.attention = Attention(shape.head)

    def forward(
        self,
        image: torch.Tensor,
        text: torch.Tensor,
        condition: torch.Tensor,
        angles: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = ((self.text, text), (self.image, image))
        changes = [part.modulation(F.silu(condition)).chunk(6, -1) for part, _ in parts]
        qkv = [
            part.qkv(changed(x, shift, scale))
            for (part, x), (shift, scale, *_) in zip(parts, changes, strict=True)
        ]
        mixed = self.attention(torch.cat(qkv, 1), angles)
        mixed_parts = mixed.split([text.shape[1], image.shape[1]], 1)
        found = []
        for (part, x), change, each in zip(parts, changes, mixed_parts, strict=True):
            _, _, gate, shift, scale, last_gate = change
            x = x + gate[:, None] * part.out(each)
            found.append(x + last_gate[:, None] * part(changed(x, shift, scale)))
        return found[1], found[0]


def changed(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale[:, None]) + shift[:, None]


class SingleBlock(nn.Module):
    """A block with joint layers for image and text, and attention parallel to the wide layers."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.modulation = nn.Linear(width, 3 * width)
        self.qkv = nn.Linear(width, 3 * width)
        self.wide = nn.Linear(width, 4 * width)
        self.out = nn.Linear(5 * width, width)
        self.attention = Attention(shape.head)

    def forward(
        self, x: torch.Tensor, condition: torch.Tensor, angles: torch.Tensor
    ) -> torch.Tensor:
        shift, scale, gate = self.modulation(F.silu(condition)).chunk(3, -1)
        inner = changed(x, shift, scale)
        wide = F.gelu(self.wide(inner), approximate="tanh")
        mixed = self.attention(self.qkv(inner), angles)
        return x + gate[:, None] * self.out(torch.cat((mixed, wide), -1))


class FluxShaped(nn.Module):
    """The whole transformer: image and text tokens and a condition in, image tokens out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.shape = shape
        self.image_in = nn.Linear(CHANNELS, width)
        self.text_in = nn.Linear(shape.text_width, width)
        self.condition_in = nn.Linear(256, width)
        self.transformer_blocks = nn.ModuleList(DoubleBlock(shape) for _ in range(shape.double))
        self.single_transformer_blocks = nn.ModuleList(
            SingleBlock(shape) for _ in range(shape.single)
        )
        self.image_out = nn.Linear(width, CHANNELS)

    def forward(
        self, image: torch.Tensor, text: torch.Tensor, condition: torch.Tensor
    ) -> torch.Tensor:
        x, y = self.image_in(image), self.text_in(text)
        given = self.condition_in(condition)
        count = x.shape[1] + y.shape[1]
        steps = torch.arange(count, device=x.device)[:, None]
        rates = 0.01 ** torch.linspace(0, 1, self.shape.head // 2, device=x.device)
        angles = steps * rates
        for block in self.transformer_blocks:
            x, y = block(x, y, given, angles)
        x = torch.cat((y, x), 1)
        for block in self.single_transformer_blocks:
            x = block(x, given, angles)
        return self.image_out(x[:, y.shape[1] :])


# Weights ------------------------------------------------------------------------------------------


def on_meta(shape: Shape) -> FluxShaped:
    """Return the model on meta, in bfloat16."""
    with torch.device("meta"):
        return FluxShaped(shape).to(torch.bfloat16).eval()


@torch.no_grad()
def save(shape: Shape, directory: Path, device: torch.device) -> Path:
    """Write shards with random weights, generated on the device, which is faster than a CPU."""
    directory.mkdir()
    generator = torch.Generator().manual_seed(0) if device.type != "cuda" else None
    if device.type == "cuda":
        torch.cuda.manual_seed_all(0)
    shard: dict[str, torch.Tensor] = {}
    count = 0
    names = dict(on_meta(shape).named_parameters())
    for number, (name, parameter) in enumerate(names.items()):
        where = device if generator is None else "cpu"
        value = torch.empty(parameter.shape, dtype=torch.float32, device=where)
        if parameter.ndim > 1:
            value.normal_(std=parameter.shape[1] ** -0.5, generator=generator)
        else:
            value.fill_(1.0 if "norm" in name else 0.0)
        shard[name] = value.to(torch.bfloat16).cpu()
        last = number == len(names) - 1
        if last or sum(tensor.nbytes for tensor in shard.values()) >= SHARD:
            save_file(shard, directory / f"model-{count:05}.safetensors")
            shard, count = {}, count + 1
    return directory


def load(shape: Shape, directory: Path, *, in_ram: bool = False) -> FluxShaped:
    """Load the model; its weights are maps of the files, or copies in RAM (`in_ram`)."""
    model = on_meta(shape)
    for shard in sorted(directory.glob("*.safetensors")):
        weights = load_file(shard)
        if in_ram:
            weights = {name: tensor.clone() for name, tensor in weights.items()}
        model.load_state_dict(weights, strict=False, assign=True)
    return model


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of all weights."""
    return sum(parameter.nbytes for parameter in model.parameters())


@torch.no_grad()
def denoise(model: FluxShaped, steps: int, device: torch.device) -> Iterator[torch.Tensor]:
    """Yield the image (packed latents) after each step, deterministic for given weights."""
    generator = torch.Generator().manual_seed(1)
    shape = model.shape

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(device, torch.bfloat16)

    image = drawn(1, shape.image_tokens, CHANNELS)
    text = drawn(1, shape.text_tokens, shape.text_width)
    for _ in range(steps):
        condition = drawn(1, 256)
        image = image - model(image, text, condition) / 50
        yield image
