"""Which modules are offloaded by whom, and noticing that a model is built differently from before.

A weight belongs to one offloading, the innermost that has it. When somebody gives an offloaded
model another parameter, buffer or submodule, torch tells (by its hooks on registration), and the
model is cut into groups anew before it runs next.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn

from tierstore.adapters.contents import modules_of
from tierstore.adapters.weight_groups import WeightGroups
from tierstore.store import TierStore


class Owner(Protocol):
    """One who offloads a model. See `tierstore.adapters.modules`, where it is done.

    `changed` says that the model is built differently from what it was when it was cut; `has_run`,
    that it has run as a whole; `settings` is what its maker has said of it.
    """

    root: nn.Module
    groups: dict[str, list[str]]
    store: TierStore
    settings: object
    weights: WeightGroups
    changed: bool
    has_run: bool

    @property
    def residents(self) -> list[torch.Tensor]:
        """Its tensors that stay on the device."""

    def tell_resident(self, tensor: torch.Tensor) -> torch.Tensor:
        """One of these, for a state dict."""

    def look(self) -> None:
        """Before any part of the model runs: use it as it is now."""

    def enable(self) -> None:
        """Offload the model as it is now."""

    def disable(self) -> None:
        """Make it an ordinary module again."""


_owners: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Owner]] = weakref.WeakKeyDictionary()
_active: weakref.WeakSet[Owner] = weakref.WeakSet()
_claimed: weakref.WeakKeyDictionary[nn.Module, weakref.ref[object]] = weakref.WeakKeyDictionary()


def own(offloaded: Owner) -> None:
    """The modules of its model are offloaded by `offloaded`, but for those that have an owner."""
    _listen()
    _active.add(offloaded)
    reference = weakref.ref(offloaded)
    for module in modules_in(offloaded.root):
        if owner_of(module) is None:
            _owners[module] = reference


def disown(offloaded: Owner) -> None:
    """Its modules are ordinary ones, until others who offload a model that has them take them."""
    _active.discard(offloaded)
    given_up = {module for module in modules_in(offloaded.root) if owner_of(module) is offloaded}
    for module in given_up:
        del _owners[module]
    ours = offloaded.weights.tensor_ids()
    for other in everyone():
        modules = modules_in(other.root)
        tensors = (t for m in modules for t in (*m._parameters.values(), *m._buffers.values()))
        alone = all(id(t) not in ours for t in tensors)  # no weight of it is tied to one of ours
        if not (alone and given_up.isdisjoint(modules)):
            other.changed = True


def modules_in(root: nn.Module) -> list[nn.Module]:
    """Its modules. Not by its own `modules()`, through which users change it as they go: each
    weight would be looked at for edits."""
    return modules_of(root)


def owner_of(module: nn.Module) -> Owner | None:
    """Who offloads a module."""
    reference = _owners.get(module)
    return None if reference is None else reference()


def around(module: nn.Module) -> list[Owner]:
    """Those who offload a model that has `module` as a part of it."""
    return [o for o in everyone() if o.root is not module and module in modules_in(o.root)]


def others_tensors(offloaded: Owner) -> set[int]:
    """The ids of the tensors that others offload."""
    return {
        number
        for other in everyone()
        if other is not offloaded
        for number in other.weights.tensor_ids()
    }


def claim(modules: Iterable[nn.Module], owner: object) -> None:
    """Somebody else sees to the weights of these modules, as long as there is an `owner`."""
    reference = weakref.ref(owner)
    for module in modules:
        _claimed[module] = reference


def is_claimed(module: nn.Module) -> bool:
    """Whether somebody else sees to its weights."""
    claimed = _claimed.get(module)
    return claimed is not None and claimed() is not None


def give_up(modules: Iterable[nn.Module]) -> None:
    """They are ordinary modules again."""
    for module in modules:
        _claimed.pop(module, None)


def everyone() -> list[Owner]:
    """All who offload anything now."""
    return list(_active)


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
    if owner is not None and before is not given and id(before) in owner.weights.tensor_ids():
        owner.changed = True


def _module_given(module: nn.Module, name: str, given: Any) -> None:
    owner = owner_of(module)
    if owner is not None and module._modules.get(name) is not given:
        owner.changed = True
