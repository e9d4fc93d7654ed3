"""Small models of every kind that is trained, each with batches and a loss.

A kind is a name in `KINDS`; `build(kind)` makes the same model each time, and `batch(kind, number)`
the same batch. Weights are small, but too many to fit in a fifth of the state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
import transformers
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map

WIDTH = 64
BATCH = 12
TOKENS = 16
VOCABULARY = 64


@dataclass(frozen=True)
class Batch:
    """The inputs of a model, and its target output."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: torch.Tensor

    def to(self, device: str) -> Batch:
        """Return the same batch on another device."""
        return tree_to(self, device)


def tree_to(batch: Batch, device: str) -> Batch:
    args, kwargs, target = tree_map(
        lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf,
        (batch.args, batch.kwargs, batch.target),
    )
    return Batch(args, kwargs, target)


# Models -------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    """Linear layers with biases; `dropout` between them. The first dimension is the batch."""

    def __init__(self, dropout: float = 0.0, layers: int = 12) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for _ in range(layers):
            parts += [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout)]
        self.layers = nn.Sequential(*parts)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))


class Residual(nn.Module):
    """A block of a ResNet: BatchNorm, ReLU in place, and a residual connection."""

    def __init__(self, given: int, made: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(given, made, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(made)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(made, made, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(made)
        self.around = nn.Sequential()
        if stride > 1 or given != made:
            self.around = nn.Sequential(
                nn.Conv2d(given, made, 1, stride, bias=False), nn.BatchNorm2d(made)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.around(x)
        return self.relu(out)


class ResNet(nn.Module):
    """A stem, five blocks, and a head."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
        )
        wide = 2 * channels
        self.blocks = nn.Sequential(
            Residual(channels, channels, 1),
            Residual(channels, wide, 2),
            *(Residual(wide, wide, 1) for _ in range(3)),
        )
        self.head = nn.Linear(wide, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Tied(nn.Module):
    """One linear layer is used three times, far apart."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(WIDTH, WIDTH)
        self.first = shared
        self.between = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.middle = shared
        self.after = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.last = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for layer in self.between:
            x = torch.tanh(layer(x))
        x = torch.tanh(self.middle(x))
        for layer in self.after:
            x = torch.tanh(layer(x))
        return self.last(x)


def _llama(**changes: Any) -> nn.Module:
    options = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "use_cache": False,
    }
    config = transformers.LlamaConfig(**{**options, **changes})
    return transformers.LlamaForCausalLM(config)


def _flux() -> nn.Module:
    return diffusers.FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )


# Batches ------------------------------------------------------------------------------------------


def _rows(random: torch.Generator) -> Batch:
    x, y = torch.randn(2, BATCH, WIDTH, generator=random)
    return Batch((x,), {}, y)


def _images(random: torch.Generator) -> Batch:
    x = torch.randn(BATCH, 3, 8, 8, generator=random)
    return Batch((x,), {}, torch.randint(10, (BATCH,), generator=random))


def _tokens(random: torch.Generator) -> Batch:
    ids = torch.randint(3, VOCABULARY, (BATCH, TOKENS), generator=random)
    return Batch((), {"input_ids": ids, "labels": ids}, ids)


def _tokens_without_labels(random: torch.Generator) -> Batch:
    ids = torch.randint(3, VOCABULARY, (BATCH, TOKENS), generator=random)
    return Batch((), {"input_ids": ids}, ids)


def _latents(random: torch.Generator) -> Batch:
    side, many = 4, 2
    places = torch.zeros(side * side, 3)
    places[:, 1] = torch.arange(side).repeat_interleave(side)
    places[:, 2] = torch.arange(side).repeat(side)
    hidden, target = torch.randn(2, many, side * side, 16, generator=random)
    inputs = {
        "hidden_states": hidden,
        "encoder_hidden_states": torch.randn(many, 8, 32, generator=random),
        "pooled_projections": torch.randn(many, 32, generator=random),
        "timestep": torch.rand(many, generator=random),
        "guidance": torch.full((many,), 3.5),
        "img_ids": places,
        "txt_ids": torch.zeros(8, 3),
        "return_dict": False,
    }
    return Batch((), inputs, target)


# Losses -------------------------------------------------------------------------------------------


def _distance(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.float() - target).square().mean()


def _class(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output, target)


def _its_own(output: Any, target: torch.Tensor) -> torch.Tensor:
    return output.loss


def _next_token(output: Any, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def _first(output: Any, target: torch.Tensor) -> torch.Tensor:
    return _distance(output[0], target)


@dataclass(frozen=True)
class Kind:
    """A kind of model: its constructor, its inputs, and its loss."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[Any, torch.Tensor], torch.Tensor]


KINDS: dict[str, Kind] = {
    "small": Kind(lambda: Mlp(layers=5), _rows, _distance),
    "small-dropout": Kind(lambda: Mlp(0.2, layers=5), _rows, _distance),
    "mlp": Kind(Mlp, _rows, _distance),
    "mlp-dropout": Kind(lambda: Mlp(0.2), _rows, _distance),
    "sequential": Kind(lambda: Mlp().layers, _rows, _distance),
    "resnet": Kind(ResNet, _images, _class),
    "llama": Kind(_llama, _tokens, _its_own),
    "llama-dropout": Kind(
        lambda: _llama(attention_dropout=0.1), _tokens_without_labels, _next_token
    ),
    "llama-tied": Kind(lambda: _llama(tie_word_embeddings=True), _tokens, _its_own),
    "flux": Kind(_flux, _latents, _first),
    "tied": Kind(Tied, _rows, _distance),
}


def build(kind: str, seed: int = 0) -> Any:
    """Build a model in training mode, on the CPU, in float32. A seed determines its weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return KINDS[kind].build().train()


def batch(kind: str, number: int = 0) -> Batch:
    """Return one of its batches, on the CPU."""
    return KINDS[kind].batch(torch.Generator().manual_seed(1000 + number))


def loss(kind: str, model: Any, given: Batch) -> torch.Tensor:
    """Return the loss of one forward."""
    return KINDS[kind].loss(model(*given.args, **given.kwargs), given.target)
