"""GGUF files of small models, with valid bytes and arbitrary values."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from torch import nn

TYPES = ("Q8_0", "Q4_0", "Q4_K")

_REST = "Q8_0"
"""The type for rows that are not a whole number of blocks."""
_RANDOM = np.random.default_rng(0)


def write_gguf(model: nn.Module, path: Path, kind: str, architecture: str = "flux") -> None:
    """Write the model's weights by name; matrices as `kind`, if their rows allow it."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, weight in model.state_dict().items():
        quantised = gguf.GGMLQuantizationType[kind]
        if weight.ndim == 2 and weight.shape[1] % gguf.GGML_QUANT_SIZES[quantised][0]:
            quantised = gguf.GGMLQuantizationType[_REST]
        if weight.ndim == 2 and weight.shape[1] % gguf.GGML_QUANT_SIZES[quantised][0] == 0:
            writer.add_tensor(name, _blocks(weight, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(name, weight.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _blocks(weight: torch.Tensor, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    if kind is gguf.GGMLQuantizationType.Q4_K:
        return _random_q4_k(*weight.shape)
    return gguf.quants.quantize(weight.float().numpy(), kind)


def _random_q4_k(rows: int, columns: int) -> np.ndarray:
    """Return weights around zero, scaled by row size: the package does not quantise to Q4_K.

    A block has 256 of them in 144 bytes: a scale and a minimum in float16, 6 bits for the scale and
    minimum of each 32 weights, and 4 bits for each weight.
    """
    width, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q4_K]
    blocks = _RANDOM.integers(0, 256, (rows, columns // width, nbytes), dtype=np.uint8)
    scale = 1 / (250 * columns**0.5)  # scales and weights are 31.5 and 7.5 in the mean
    factors = np.array([scale, 7.5 * scale], dtype=np.float16).view(np.uint8)
    blocks[..., : factors.size] = factors
    return blocks.reshape(rows, -1)
