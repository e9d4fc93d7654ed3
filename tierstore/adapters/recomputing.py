"""Buffers that no checkpoint holds, computed again for a model that was built on the meta device.

Such as the tables of rotary embeddings: a model computes them when it is built, and under
`torch.device("meta")` nothing comes of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tierstore.adapters.compat import Library, first_answer
from tierstore.adapters.contents import named_children_of

Initializer = Callable[[nn.Module], object]

_LISTED = 5


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor of a model, by its name there, and what it shall show."""

    name: str
    tensor: torch.Tensor
    shown: torch.Tensor


def some(items: Iterable[str]) -> str:
    """The first of the items, for a message, and how many more there are."""
    listed = list(items)
    more = len(listed) - _LISTED
    return ", ".join(listed[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def recomputed(model: nn.Module) -> list[Value]:
    """Non-persistent buffers on meta, such as the tables of rotary embeddings, with their values.

    Only a library that initializes its models (`Library.initializer`) can compute them again.
    Nothing of the model is changed.
    """
    values: list[Value] = []
    unknown: list[str] = []
    for prefix, module, init in _with_initializers(model, "", None):
        for key, value in _values_of(module, init).items():
            name = f"{prefix}.{key}" if prefix else key
            buffer = module._buffers[key]
            if value is None:
                unknown.append(repr(name))
            elif buffer is not None:
                values.append(Value(name, buffer, value))
    if unknown:
        raise ValueError(
            f"{some(unknown)}: on meta, and buffers that no checkpoint has; a "
            f"{type(model).__name__} cannot compute them again. Build it under "
            "accelerate.init_empty_weights(), which leaves buffers real"
        )
    return values


def _with_initializers(
    module: nn.Module, prefix: str, init: Initializer | None
) -> Iterator[tuple[str, nn.Module, Initializer | None]]:
    """All modules by name, with the initializer of the innermost model that has one."""
    init = first_answer(Library.initializer, module) or init
    yield prefix, module, init
    for name, child in named_children_of(module):
        yield from _with_initializers(child, f"{prefix}.{name}" if prefix else name, init)


def _values_of(module: nn.Module, init: Initializer | None) -> dict[str, torch.Tensor | None]:
    """The module's own non-persistent buffers on meta: their values, or None where unknown.

    A buffer counts as computed if what it held before makes no difference.
    """
    names = [
        name
        for name, buffer in module._buffers.items()
        if name in module._non_persistent_buffers_set and buffer is not None and buffer.is_meta
    ]
    if not names or init is None:
        return dict.fromkeys(names)
    try:
        with torch.no_grad(), torch.device("cpu"):
            zero, one = (_initialized(module, init, names, fill) for fill in (0, 1))
    except Exception:  # whatever that code stumbled over, the advice is the same
        return dict.fromkeys(names)
    return {name: zero[name] if torch.equal(zero[name], one[name]) else None for name in names}


def _initialized(
    module: nn.Module, init: Initializer, names: list[str], fill: int
) -> dict[str, torch.Tensor]:
    """The named buffers as the model's own code leaves them, if they held `fill` before."""
    twin = _twin(module)
    for name, buffer in module._buffers.items():
        if buffer is not None and name in names:
            twin._buffers[name] = torch.full_like(buffer, fill, device="cpu")
        elif buffer is not None:
            twin._buffers[name] = buffer.clone()
    init(twin)
    return {name: twin._buffers[name] for name in names}


def _twin(module: nn.Module) -> Any:
    """The same module with tensors on meta: what initializes it changes nothing of the model."""
    twin: Any = type(module).__new__(type(module))
    twin.__dict__.update(module.__dict__)
    twin.__dict__["_buffers"] = {n: _on_meta(b) for n, b in module._buffers.items()}
    twin.__dict__["_parameters"] = {
        name: None if on_meta is None else nn.Parameter(on_meta, requires_grad=False)
        for name, parameter in module._parameters.items()
        for on_meta in [_on_meta(parameter)]
    }
    twin.__dict__["_modules"] = {
        name: None if child is None else _twin(child) for name, child in module._modules.items()
    }
    return twin


def _on_meta(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else torch.empty_like(tensor, device="meta")
