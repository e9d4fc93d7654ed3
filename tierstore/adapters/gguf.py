"""GGUF files: their tensors as maps of the file, for diffusers to build a model of.

diffusers' own `load_gguf_checkpoint` copies each into memory. The format is llama.cpp's:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import torch

from tierstore.model.extras import extra_for


def mapped_gguf(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """The tensors of a file by name, each a copy-on-write map of it on the CPU.

    Of a quantised one the shape is that of its bytes: rows of uint8, as diffusers' `GGUFParameter`.

    Raises ImportError without gguf or diffusers, ValueError for what is no GGUF file or is
    quantised in a way that diffusers does not know.
    """
    with extra_for("to read a GGUF file"):
        gguf: Any = import_module("gguf")
        utils: Any = import_module("diffusers.quantizers.gguf.utils")
    plain = {gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16}
    tensors: dict[str, torch.Tensor] = {}
    for tensor in gguf.GGUFReader(path, "c").tensors:
        kind = tensor.tensor_type
        weight = torch.from_numpy(tensor.data)
        if kind not in plain and kind not in utils.SUPPORTED_GGUF_QUANT_TYPES:
            known = ", ".join(sorted(k.name for k in utils.SUPPORTED_GGUF_QUANT_TYPES))
            raise ValueError(
                f"{path}: {tensor.name} is quantised as {kind.name}, which diffusers does not "
                f"know. It knows {known}"
            )
        tensors[tensor.name] = (
            weight if kind in plain else utils.GGUFParameter(weight, quant_type=kind)
        )
    return tensors
