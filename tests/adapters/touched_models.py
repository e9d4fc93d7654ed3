"""Models that use weights without calling the modules that have them."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.functional import linear

WIDTH = 64
COUNT = 12
SHARE = 0.3
"""Budget of a store as a fraction of the weights: several of them fit, but not half of all."""


def weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weight() for _ in range(COUNT))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.weights:
            x = torch.tanh(x @ each)
        return x


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({f"at_{n}": weight() for n in range(COUNT)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.weights:
            x = torch.tanh(linear(x, weight=self.weights[name]))
        return x


class Many(nn.Module):
    """All weights belong to one module, which uses them directly and through views."""

    def __init__(self) -> None:
        super().__init__()
        for n in range(COUNT):
            self.register_parameter(f"w{n}", weight())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for n in range(0, COUNT, 3):
            first, second, third = (getattr(self, f"w{n + i}") for i in range(3))
            x = torch.tanh(x @ first @ second.T).to(third.device)
            x = torch.cat([x, x[:1] @ third.data])[: len(x)]
        return x


class Sharing(nn.Module):
    """Two modules have the same list; another module calls one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Listed(), Listed()
        self.second.weights = self.first.weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(x))
        return result


class Around(nn.Module):
    """Its own weight, modules that are called, and one larger than the budget."""

    def __init__(self) -> None:
        super().__init__()
        self.own = weight()
        self.many = Many()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.many(x @ self.own)
        for layer in self.layers:
            x = torch.tanh(layer(x)) @ self.own
        return x


class Functional(nn.Module):
    """Uses the weights of its children, but does not call them. `tail` is used on request."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(COUNT))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(linear(x, layer.weight, layer.bias))
        return x


class Contained(nn.Module):
    """Its blocks are bare containers, as in older autoencoders."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Module() for _ in range(COUNT // 2))
        for block in self.blocks:
            block.up, block.scale = nn.Linear(WIDTH, WIDTH), weight()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block.up(x)) @ block.scale
        return x


class Yielding(nn.Module):
    """Its forward is a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.own = weight()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(COUNT))

    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x)) @ self.own
            yield x


class OfYielding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Yielding()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(list(self.inner(x)))


class Encoding(nn.Module):
    """It is entered by other methods than its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(COUNT))
        self.projection = weight()

    def encode_image(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x @ self.projection

    def get_image_features(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode_image(x) * 2


def exported() -> nn.Module:
    plain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(COUNT)))
    return torch.export.export(plain, (torch.randn(3, WIDTH),)).module()


def patched() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(COUNT)))
    model.forward = types.MethodType(Functional.forward, model)  # type: ignore[method-assign]
    model.layers = nn.ModuleList(model.children())
    return model


def patched_layer() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(COUNT)))
    other: Any = model[7]
    model[3].forward = lambda x: linear(x, other.weight)
    return model


def wavlm() -> nn.Module:
    config = transformers.WavLMConfig(
        hidden_size=WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=128,
        conv_dim=(32, 32),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        num_buckets=32,
        max_bucket_distance=80,
    )
    return transformers.WavLMModel(config)


def mimi() -> nn.Module:
    """Its codebooks are buffers that are large enough to be offloaded."""
    config = transformers.MimiConfig(
        hidden_size=32,
        num_filters=8,
        num_residual_layers=1,
        upsampling_ratios=[4, 2],
        codebook_size=16_384,
        codebook_dim=16,
        vector_quantization_hidden_dimension=16,
        num_quantizers=4,
        num_semantic_quantizers=1,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=64,
        head_dim=8,
        upsample_groups=32,
        sliding_window=16,
    )
    return transformers.MimiModel(config)


def call(model: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(x)
    return result


def joined(model: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.stack(list(model(x)))


@dataclass(frozen=True)
class Case:
    """A model, its input, and the way to run it."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = (3, WIDTH)
    run: Callable[[Any, torch.Tensor], torch.Tensor] = call

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.make().requires_grad_(False)
        for module in model.modules():
            module.training = False  # exported models reject eval()
        return model

    def given(self) -> torch.Tensor:
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(1))


CASES = {
    "list": Case(Listed),
    "dict": Case(Named),
    "many": Case(Many),
    "sharing": Case(Sharing),
    "around": Case(Around),
    "functional": Case(Functional),
    "contained": Case(Contained),
    "yielding": Case(Yielding, run=joined),
    "of_yielding": Case(OfYielding),
    "encode": Case(Encoding, run=lambda model, x: model.encode_image(x)),
    "features": Case(Encoding, run=lambda model, x: model.get_image_features(x)),
    "exported": Case(exported),
    "patched": Case(patched),
    "patched_layer": Case(patched_layer),
}
LIBRARIES = {
    "wavlm": Case(wavlm, (1, 2000), lambda model, x: model(x).last_hidden_state),
    "mimi": Case(mimi, (1, 1, 480), lambda model, x: model(x).audio_values),
    "mimi_encode": Case(mimi, (1, 1, 480), lambda model, x: model.encode(x).audio_codes),
}


@functools.cache
def expected(name: str) -> torch.Tensor:
    """Return the output of the plain model."""
    case = {**CASES, **LIBRARIES}[name]
    with torch.no_grad():
        return case.run(case.model(), case.given())
