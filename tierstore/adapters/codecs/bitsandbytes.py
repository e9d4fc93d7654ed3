"""Weights of bitsandbytes: plain numbers, and beside them tensors that say what these mean.

Four bits (`Params4bit`) have a `quant_state`, which may have one in it. Eight bits (`Int8Params`)
have their numbers and scales in attributes, too, until they have run: then these are in the `state`
of the module, which shows their memory to the weight. Written from bitsandbytes 0.50.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from tierstore.adapters.codecs.plain import PlainCodec
from tierstore.torch_private import like

_STATE = ("quant_state.absmax", "quant_state.code", "quant_state.offset")
_INNER_STATE = ("quant_state.state2.absmax", "quant_state.state2.code")
_BESIDE = {"Params4bit": (*_STATE, *_INNER_STATE), "Int8Params": ("CB", "SCB")}
"""Where tensors may be, by the name of the class."""


class BitsandbytesCodec(PlainCodec):
    """The numbers, and the tensors of its state."""

    def accepts(self, tensor: torch.Tensor) -> bool:
        """Whether it is a weight of bitsandbytes that was quantised."""
        return (
            is_of_bitsandbytes(tensor)
            and super().accepts(tensor)
            and any(True for _ in _beside(tensor))
        )

    def flatten(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """The numbers, with an empty name, and what is beside them."""
        return {"": tensor.detach(), **dict(_beside(tensor))}

    def rebuild(self, tensor: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A weight of the same class over other parts, with a state of its own."""
        made: Any = like(tensor, parts[""])
        if hasattr(made, "quant_state"):
            made.quant_state = copy.copy(made.quant_state)
            made.quant_state.state2 = copy.copy(made.quant_state.state2)
        for name, _ in _beside(tensor):
            *path, last = name.split(".")
            setattr(attrgetter(".".join(path))(made) if path else made, last, parts[name])
        return made  # type: ignore[no-any-return]


def is_of_bitsandbytes(value: object) -> bool:
    """Whether the class of a weight, or of a state, is one of that library."""
    return type(value).__module__.startswith("bitsandbytes.")


def hidden_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors of a module that its forward needs and that are neither parameters nor buffers."""
    state = getattr(module, "state", None) if type(module).__name__ == "Linear8bitLt" else None
    found = {f"state.{name}": getattr(state, name, None) for name in ("CB", "SCB")}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def _beside(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for name in _BESIDE.get(type(tensor).__name__, ()):
        found: Any = tensor
        for attribute in name.split("."):
            found = getattr(found, attribute, None)
        if isinstance(found, torch.Tensor):
            yield name, found
