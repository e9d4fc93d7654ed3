"""The registry of offloaded models, and noticing that a model is built differently from before.

A weight belongs to one offloading, the innermost that has it. When somebody gives an offloaded
model another parameter, buffer or submodule, torch calls hooks on its registration, and the model
is cut into groups again before it runs next.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tierstore.adapters.contents import modules_of

if TYPE_CHECKING:
    from tierstore.adapters.offloaded import OffloadedModel


@dataclass(frozen=True)
class _Whole:
    """A pipeline or model that is offloaded as a whole: its handle, and the models in it."""

    handle: Any
    parts: Sequence[weakref.ref[nn.Module]]


@dataclass(frozen=True)
class _Registry:
    """Who offloads what. Entries go with their modules, models and pipelines."""

    owners: weakref.WeakKeyDictionary[nn.Module, weakref.ref[OffloadedModel]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    trainers: weakref.WeakKeyDictionary[nn.Module, weakref.ref[object]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    models: weakref.WeakSet[OffloadedModel] = field(default_factory=weakref.WeakSet)
    wholes: weakref.WeakKeyDictionary[Any, _Whole] = field(
        default_factory=weakref.WeakKeyDictionary
    )


_registry = _Registry()


# Models -----------------------------------------------------------------------------------------


def own(model: OffloadedModel) -> None:
    """Have `model` own its modules, but for those that have an owner."""
    _listen()
    _registry.models.add(model)
    reference = weakref.ref(model)
    for module in modules_of(model.root):
        if owner_of(module) is None:
            _registry.owners[module] = reference


def disown(model: OffloadedModel) -> None:
    """Have it own none, until others who offload a model that has these modules take them."""
    given_up = {module for module in modules_of(model.root) if owner_of(module) is model}
    for module in given_up:
        del _registry.owners[module]
    ours = model.weights.tensor_ids()
    for other in enabled_models():
        modules = modules_of(other.root)
        tensors = (t for m in modules for t in (*m._parameters.values(), *m._buffers.values()))
        alone = all(id(t) not in ours for t in tensors)  # no weight of it is tied to one of ours
        if not (alone and given_up.isdisjoint(modules)):
            other.changed = True


def forget(model: OffloadedModel) -> None:
    """Its offloading is over for good."""
    _registry.models.discard(model)


def owner_of(module: nn.Module) -> OffloadedModel | None:
    """Return who moves the weights of a module now."""
    reference = _registry.owners.get(module)
    return None if reference is None else reference()


def offloading_of(root: nn.Module) -> OffloadedModel | None:
    """Return the offloading of this very model, also while it is suspended."""
    return next((model for model in list(_registry.models) if model.root is root), None)


def enabled_models() -> list[OffloadedModel]:
    """Return all that own modules now."""
    return [model for model in list(_registry.models) if owner_of(model.root) is model]


def around(module: nn.Module) -> list[OffloadedModel]:
    """Return those that have `module` as a part."""
    found = [model for model in enabled_models() if model.root is not module]
    return [model for model in found if module in modules_of(model.root)]


def others(model: OffloadedModel) -> list[tuple[OffloadedModel, set[int]]]:
    """Return the others that own modules now, each with the ids of the tensors that it offloads."""
    found = [other for other in enabled_models() if other is not model]
    return [(other, other.weights.tensor_ids()) for other in found]


# Models in training -------------------------------------------------------------------------------


def claim(modules: Iterable[nn.Module], trainer: object) -> None:
    """Have a trainer see to the weights of these modules, as long as it exists."""
    _registry.trainers.update(dict.fromkeys(modules, weakref.ref(trainer)))


def is_claimed(module: nn.Module) -> bool:
    """Return whether a trainer sees to a module's weights."""
    claimed = _registry.trainers.get(module)
    return claimed is not None and claimed() is not None


def give_up(modules: Iterable[nn.Module]) -> None:
    """Have no trainer see to them."""
    for module in modules:
        _registry.trainers.pop(module, None)


# Handles ------------------------------------------------------------------------------------------


def add_handle(target: object, handle: object, parts: Sequence[weakref.ref[nn.Module]]) -> None:
    """Have a handle offload these models for a pipeline or a model, as long as that exists."""
    _registry.wholes[target] = _Whole(handle, parts)


def remove_handle(target: object, handle: object) -> None:
    """Have it offload them no more."""
    if handle_of(target) is handle:
        del _registry.wholes[target]


def handle_of(target: object) -> Any:
    """Return the handle of a pipeline or model; None if it was not offloaded as a whole."""
    try:
        return _registry.wholes[target].handle
    except (KeyError, TypeError):  # or of a kind that no weak reference can be to
        return None


def handles_with(model: OffloadedModel) -> list[Any]:
    """Return the handles that offload a model, the oldest first."""
    wholes = list(_registry.wholes.values())
    return [each.handle for each in wholes if any(p() is model.root for p in each.parts)]


# Changes ------------------------------------------------------------------------------------------


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
