"""Ways to quantise the linear layers of a model, as users of the libraries do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bitsandbytes
import optimum.quanto as quanto
import torch
from torch import nn
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

from tests import pipelines
from tierstore.adapters.codecs import leaves_of


def torchao_int8(model: nn.Module) -> None:
    quantize_(model, Int8WeightOnlyConfig())


def torchao_fp8(model: nn.Module) -> None:
    quantize_(model, Float8WeightOnlyConfig())


def quanto_int8(model: nn.Module) -> None:
    quanto.quantize(model, weights=quanto.qint8)
    quanto.freeze(model)


def bitsandbytes_nf4(model: nn.Module) -> None:
    _replace(
        model,
        lambda linear: bitsandbytes.nn.Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            compute_dtype=pipelines.DTYPE,
            quant_type="nf4",
        ),
    )


def bitsandbytes_int8(model: nn.Module) -> None:
    _replace(
        model,
        lambda linear: bitsandbytes.nn.Linear8bitLt(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            has_fp16_weights=False,
        ),
    )


def _replace(model: nn.Module, made: Callable[[nn.Linear], Any]) -> None:
    """The libraries' integrations refuse to do so without a GPU."""
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and "embedder" not in path:  # Wan reads dtypes there
                quantised = made(child)
                quantised.load_state_dict(child.state_dict())
                quantised.to("cpu")  # this is where it quantises
                if quantised.bias is not None:
                    quantised.bias.data = child.bias.data
                setattr(parent, name, quantised.requires_grad_(False))


KINDS: dict[str, Callable[[nn.Module], None]] = {
    each.__name__: each
    for each in (torchao_int8, torchao_fp8, quanto_int8, bitsandbytes_nf4, bitsandbytes_int8)
}

CPU_ONLY = {"bitsandbytes_int8", "bitsandbytes_nf4"}
"""bitsandbytes has no kernels for the pretend accelerator: int8 fails, nf4 takes minutes."""

LEAST = 160 << 10
"""Bytes of the tiny models' largest table, which is not quantised, and of resident weights."""

MODELS = ("flux", "sd3", "wan", "llama")
_COMPONENTS = {
    "flux": ["transformer"],
    "sd3": ["transformer"],
    "wan": ["transformer", "transformer_2"],
}


def quantised(model: str, checkpoint: Any, kind: str) -> Any:
    """Return a pipeline or model of `tests.pipelines` with its large part quantised."""
    pipe = pipelines.load(model, checkpoint(model))
    for part in large_parts(model, pipe):
        KINDS[kind](part)
    return pipe


def large_parts(model: str, pipe: Any) -> Iterator[nn.Module]:
    """Yield the models to quantise."""
    if model == "llama":
        yield pipe
    for name in _COMPONENTS.get(model, ()):
        yield getattr(pipe, name)


def weights_of(pipe: Any) -> list[torch.Tensor]:
    """Parameters and buffers of all parts."""
    parts = pipelines.components(pipe).values()
    return [t for part in parts for t in (*part.parameters(), *part.buffers())]


def outside(model: str, pipe: Any) -> int:
    """Return the bytes of quantised weights whose memory is not a map of a file."""
    mapped = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/"):
            mapped.append(tuple(int(bound, 16) for bound in fields[0].split("-")))
    weights = [weight for part in large_parts(model, pipe) for weight in part.parameters()]
    leaves = {id(t): t for weight in weights for t in leaves_of(weight).values()}
    return sum(
        leaf.nbytes
        for leaf in leaves.values()
        if not any(start <= leaf.data_ptr() < end for start, end in mapped)
    )
