"""A tensor that wraps others and lists them, as quantised weights do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map


class Scaled(torch.Tensor):
    """Rows of small numbers, each row with a scale, as in quantised weights."""

    numbers: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, scales: torch.Tensor) -> Scaled:
        made = torch.Tensor._make_wrapper_subclass(
            cls, numbers.shape, dtype=scales.dtype, device=numbers.device
        )
        made.numbers, made.scales = numbers, scales
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scales"], None

    @classmethod
    def __tensor_unflatten__(
        cls, parts: Mapping[str, torch.Tensor], context: None, size: Any, stride: Any
    ) -> Scaled:
        return cls(parts["numbers"], parts["scales"])

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].numbers, args[0].scales)
        plain = tree_map(lambda x: x.numbers * x.scales if isinstance(x, cls) else x, args)
        return function(*plain, **(kwargs or {}))


def scaled() -> Scaled:
    return Scaled(torch.arange(12, dtype=torch.int8).view(3, 4) + 2, torch.rand(3, 1) + 2)
