"""Tensors that wrap others, and say how: `__tensor_flatten__` and `__tensor_unflatten__`.

Quantised weights of several libraries do so, and DTensor. Groups hold the tensors inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tierstore.torch_private import swap


class WrapperCodec:
    """What a wrapper says of itself."""

    def accepts(self, tensor: torch.Tensor) -> bool:
        """Whether its class says how it is taken apart."""
        return is_wrapper(tensor)

    def flatten(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors inside, by the names of its attributes."""
        return {n: part for n, part in _inside(tensor).items() if isinstance(part, torch.Tensor)}

    def rebuilder(self, tensor: torch.Tensor) -> Callable[[Mapping[str, torch.Tensor]], Any]:
        """What makes a wrapper like `tensor` of other parts. It keeps nothing of its memory."""
        wrapper: Any = tensor
        kind, size, stride = type(wrapper), tensor.size(), tensor.stride()
        _, context = wrapper.__tensor_flatten__()
        inside = _inside(tensor)
        others = {n: part for n, part in inside.items() if not isinstance(part, torch.Tensor)}
        return lambda parts: kind.__tensor_unflatten__({**others, **parts}, context, size, stride)

    def rebuild(self, tensor: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A wrapper of the same class around the parts."""
        made: torch.Tensor = self.rebuilder(tensor)(parts)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made

    def show(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """See `exchange`."""
        exchange(tensor, value)


def _inside(tensor: torch.Tensor) -> dict[str, Any]:
    """What a wrapper names as its insides: tensors, and what else it wants back (a DTensor, its
    mesh)."""
    wrapper: Any = tensor
    names, _ = wrapper.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor's class says how it is taken apart."""
    return hasattr(tensor, "__tensor_flatten__")


def exchange(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Let two tensors be each other; both stay the same objects. For those without plain memory,
    of which no other can be shown. To exchange them again undoes it."""
    swap(tensor, other)
