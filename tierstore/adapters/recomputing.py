"""Recompute buffers that checkpoints do not hold, for models built on the meta device.

A model computes such buffers, for example rotary embedding tables, in its constructor; under
`torch.device("meta")` they get no values.
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
    """A tensor of a model, its name, and the value to assign to it."""

    name: str
    tensor: torch.Tensor
    shown: torch.Tensor


def first_few(items: Iterable[str]) -> str:
    """Return the first items and the number of further ones, for a message."""
    listed = list(items)
    more = len(listed) - _LISTED
    return ", ".join(listed[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def recompute_buffers(model: nn.Module) -> list[Value]:
    """Return the non-persistent buffers on meta with their values. The model is not changed.

    They can be recomputed only with a library's initializer (`Library.initializer`). Raises
    ValueError if any cannot.
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
            f"{first_few(unknown)}: these buffers are on meta and not in any checkpoint, and "
            f"{type(model).__name__} cannot recompute them. Build the model under "
            "accelerate.init_empty_weights(), which keeps buffers real"
        )
    return values


def _with_initializers(
    module: nn.Module, prefix: str, init: Initializer | None
) -> Iterator[tuple[str, nn.Module, Initializer | None]]:
    """Yield all modules by name, with the initializer of the innermost model that has one."""
    init = first_answer(Library.initializer, module) or init
    yield prefix, module, init
    for name, child in named_children_of(module):
        yield from _with_initializers(child, f"{prefix}.{name}" if prefix else name, init)


def _values_of(module: nn.Module, init: Initializer | None) -> dict[str, torch.Tensor | None]:
    """Return the values of a module's non-persistent buffers on meta; None for unknown ones.

    A buffer counts as computed if the result does not depend on its previous contents.
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
    except Exception:  # whatever the initializer raises, the advice is the same
        return dict.fromkeys(names)
    return {name: zero[name] if torch.equal(zero[name], one[name]) else None for name in names}


def _initialized(
    module: nn.Module, init: Initializer, names: list[str], fill: int
) -> dict[str, torch.Tensor]:
    """Return the named buffers after the initializer ran on buffers filled with `fill`."""
    twin = _twin(module)
    for name, buffer in module._buffers.items():
        if buffer is not None and name in names:
            twin._buffers[name] = torch.full_like(buffer, fill, device="cpu")
        elif buffer is not None:
            twin._buffers[name] = buffer.clone()
    init(twin)
    return {name: twin._buffers[name] for name in names}


def _twin(module: nn.Module) -> Any:
    """Return a copy of the module with tensors on meta, so that the model itself is not changed."""
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
