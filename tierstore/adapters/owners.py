"""Which modules are offloaded by whom, and noticing that a model is built differently from before.

A weight belongs to one offloading, the innermost that has it. When somebody gives an offloaded
model another parameter, buffer or submodule, torch tells (by its hooks on registration), and the
model is cut into groups anew before it runs next.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from tierstore.adapters.modules import OffloadedModule

MARKER = "group_offloading"
"""The name of the hook by which diffusers knows an offloaded model."""

_owners: weakref.WeakKeyDictionary[nn.Module, weakref.ref[OffloadedModule]] = (
    weakref.WeakKeyDictionary()
)


def own(offloaded: OffloadedModule) -> None:
    """The modules of its model are offloaded by `offloaded`, but for those that have an owner."""
    _listen()
    reference = weakref.ref(offloaded)
    for module in offloaded.root.modules():
        if owner_of(module) is None:
            _owners[module] = reference


def disown(offloaded: OffloadedModule) -> None:
    """Its modules are ordinary ones, until those who offload a model around it take them."""
    for module in offloaded.root.modules():
        if owner_of(module) is offloaded:
            del _owners[module]
    for other in around(offloaded.root):
        other.changed = True


def owner_of(module: nn.Module) -> OffloadedModule | None:
    """Who offloads a module."""
    reference = _owners.get(module)
    return None if reference is None else reference()


def around(module: nn.Module) -> list[OffloadedModule]:
    """Those who offload a model that has `module` as a part of it."""
    return [
        o for o in everyone() if o.root is not module and any(m is module for m in o.root.modules())
    ]


def others_tensors(offloaded: OffloadedModule) -> set[int]:
    """The ids of the tensors that others offload."""
    return {
        number for other in everyone() if other is not offloaded for number in other.tensor_ids()
    }


def refuse_other_offloading(name: str, module: nn.Module) -> None:
    """Raise ValueError if somebody else brings the weights of a model to where it runs."""
    owner = owner_of(module)
    if owner is not None and owner.root is module:
        raise ValueError(
            f"{name} is offloaded already, to a store: undo that first with handle.disable() or "
            "tierstore.undispatch(model)"
        )
    for part in module.modules():
        if hasattr(part, "_hf_hook"):
            raise ValueError(
                f"{name} is offloaded by accelerate already: undo that first with "
                "pipe.remove_all_hooks() or accelerate.hooks.remove_hook_from_module"
            )
        registry = getattr(part, "_diffusers_hook", None)
        if registry is not None and registry.get_hook(MARKER) is not None:
            raise ValueError(
                f"{name} is offloaded already (by diffusers, or to another store): load it again, "
                "or disable that first"
            )


def everyone() -> Iterator[OffloadedModule]:
    """All who offload anything."""
    found = {id(o): o for o in (reference() for reference in list(_owners.values())) if o}
    return iter(found.values())


@functools.cache
def _listen() -> None:
    torch.nn.modules.module.register_module_parameter_registration_hook(_parameter_given)
    torch.nn.modules.module.register_module_buffer_registration_hook(_buffer_given)
    torch.nn.modules.module.register_module_module_registration_hook(_module_given)


def _parameter_given(module: nn.Module, name: str, given: Any) -> None:
    owner = owner_of(module)
    if owner is not None and module._parameters.get(name) is not given:
        owner.changed = True


def _buffer_given(module: nn.Module, name: str, given: Any) -> None:
    owner = owner_of(module)
    before = module._buffers.get(name)
    # Modules may replace small buffers of theirs whenever they run: those are not offloaded.
    if owner is not None and before is not given and id(before) in owner.tensor_ids():
        owner.changed = True


def _module_given(module: nn.Module, name: str, given: Any) -> None:
    owner = owner_of(module)
    if owner is not None and module._modules.get(name) is not given:
        owner.changed = True
