"""Codec for wrapper tensors, which define `__tensor_flatten__` and `__tensor_unflatten__`.

Examples are the quantised weights of several libraries, and DTensor. Groups hold the inner tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tierstore.torch_private import swap


class WrapperCodec:
    """Codec for wrapper tensors, through their own flatten and unflatten methods."""

    def accepts(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a wrapper tensor."""
        return is_wrapper(tensor)

    def flatten(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the inner tensors by attribute name."""
        return {n: part for n, part in _inside(tensor).items() if isinstance(part, torch.Tensor)}

    def rebuilder(self, tensor: torch.Tensor) -> Callable[[Mapping[str, torch.Tensor]], Any]:
        """Return a function that builds a wrapper like `tensor` from parts.

        It holds no reference to the tensor's memory.
        """
        wrapper: Any = tensor
        kind, size, stride = type(wrapper), tensor.size(), tensor.stride()
        _, context = wrapper.__tensor_flatten__()
        inside = _inside(tensor)
        others = {n: part for n, part in inside.items() if not isinstance(part, torch.Tensor)}
        return lambda parts: kind.__tensor_unflatten__({**others, **parts}, context, size, stride)

    def rebuild(self, tensor: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return a wrapper of the same class around the parts."""
        made: torch.Tensor = self.rebuilder(tensor)(parts)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made

    def assign(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Exchange the wrapper with another one. See `exchange`."""
        exchange(tensor, value)


def _inside(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that a wrapper flattens to: tensors, and others such as a mesh."""
    wrapper: Any = tensor
    names, _ = wrapper.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's class defines `__tensor_flatten__`."""
    return hasattr(tensor, "__tensor_flatten__")


def exchange(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Swap the contents of two tensors, which stay the same objects. A second call undoes it.

    For tensors without plain memory, which cannot be pointed at other memory.
    """
    swap(tensor, other)
