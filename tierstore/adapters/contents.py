"""Modules and tensors of a module, read from its own dictionaries.

A module may override its own methods for this (`parameters()`, `named_modules()`, `state_dict()`):
to return only trained parameters, to accept fewer arguments, or to change the module with each
call, as PEFT's attention does. The functions here see all of a module, and do not change it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import nn

T = TypeVar("T")


def named_modules_of(
    root: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    """Yield `root` and every module in it with its full name, as `named_modules()` does."""
    seen: set[int] = set()
    pending = [("", root)]
    while pending:
        name, module = pending.pop()
        if remove_duplicate and id(module) in seen:
            continue
        seen.add(id(module))
        yield name, module
        lead = f"{name}." if name else ""
        children = [(key, child) for key, child in module._modules.items() if child is not None]
        pending += [(lead + key, child) for key, child in reversed(children)]


def named_children_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules directly in a module, each once, with their first names there."""
    first: dict[int, tuple[str, nn.Module]] = {}
    for name, child in module._modules.items():
        if child is not None:
            first.setdefault(id(child), (name, child))
    return list(first.values())


def children_of(module: nn.Module) -> list[nn.Module]:
    """Return the modules directly in a module, each once."""
    return [child for _, child in named_children_of(module)]


def modules_of(root: nn.Module) -> list[nn.Module]:
    """Return `root` and every module in it, each once."""
    return [module for _, module in named_modules_of(root)]


def named_parameters_of(
    root: nn.Module, *, recurse: bool = True, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a module with their full names."""
    return _named(root, lambda module: module._parameters, recurse, remove_duplicate)


def named_buffers_of(
    root: nn.Module, *, recurse: bool = True, remove_duplicate: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers of a module with their full names."""
    return _named(root, lambda module: module._buffers, recurse, remove_duplicate)


def parameters_of(root: nn.Module, *, recurse: bool = True) -> list[nn.Parameter]:
    """Return the parameters of a module, each once."""
    return [parameter for _, parameter in named_parameters_of(root, recurse=recurse)]


def tensors_of(root: nn.Module, *, recurse: bool = True) -> list[torch.Tensor]:
    """Return the parameters of a module, then its buffers, each once."""
    buffers = [buffer for _, buffer in named_buffers_of(root, recurse=recurse)]
    return [*parameters_of(root, recurse=recurse), *buffers]


def named_weights_of(root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and persistent buffers, which a checkpoint has, under all their names."""
    for lead, module in named_modules_of(root, remove_duplicate=False):
        weights = [*module._parameters.items(), *_persistent(module).items()]
        for name, tensor in weights:
            if tensor is not None:
                yield f"{lead}.{name}" if lead else name, tensor


def _persistent(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}


def _named(
    root: nn.Module,
    members: Callable[[nn.Module], Mapping[str, T | None]],
    recurse: bool,
    remove_duplicate: bool,
) -> Iterator[tuple[str, T]]:
    seen: set[int] = set()
    modules = named_modules_of(root, remove_duplicate=remove_duplicate) if recurse else [("", root)]
    for lead, module in modules:
        for name, member in members(module).items():
            if member is None or (remove_duplicate and id(member) in seen):
                continue
            seen.add(id(member))
            yield f"{lead}.{name}" if lead else name, member
