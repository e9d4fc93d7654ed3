"""Registry of offloaded models, and detection of changes in their structure.

A weight belongs to the innermost offloaded model that contains it. If a parameter, buffer or
submodule of an offloaded model is replaced or added, torch calls registration hooks, and the model
is repartitioned before its next run.
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
class _Offloading:
    """The handle of an offloaded pipeline or model, and the models in it."""

    handle: Any
    parts: Sequence[weakref.ref[nn.Module]]


@dataclass(frozen=True)
class _Registry:
    """Owners of modules, and handles. Entries do not keep modules, models or pipelines alive."""

    owners: weakref.WeakKeyDictionary[nn.Module, weakref.ref[OffloadedModel]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    trainers: weakref.WeakKeyDictionary[nn.Module, weakref.ref[object]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    models: weakref.WeakSet[OffloadedModel] = field(default_factory=weakref.WeakSet)
    offloadings: weakref.WeakKeyDictionary[Any, _Offloading] = field(
        default_factory=weakref.WeakKeyDictionary
    )


_registry = _Registry()


# Models -----------------------------------------------------------------------------------------


def own(model: OffloadedModel) -> None:
    """Make `model` the owner of its modules, except those that already have an owner."""
    _listen()
    _registry.models.add(model)
    reference = weakref.ref(model)
    for module in modules_of(model.root):
        if owner_of(module) is None:
            _registry.owners[module] = reference


def disown(model: OffloadedModel) -> None:
    """Remove a model's ownership of its modules.

    Other offloaded models that contain these modules or weights repartition, and take them over.
    """
    given_up = {module for module in modules_of(model.root) if owner_of(module) is model}
    for module in given_up:
        del _registry.owners[module]
    ours = model.weights.tensor_ids()
    for other in enabled_models():
        modules = modules_of(other.root)
        tensors = (t for m in modules for t in (*m._parameters.values(), *m._buffers.values()))
        alone = all(id(t) not in ours for t in tensors)  # none of its weights is tied to ours
        if not (alone and given_up.isdisjoint(modules)):
            other.changed = True


def forget(model: OffloadedModel) -> None:
    """Remove a model whose offloading has ended permanently."""
    _registry.models.discard(model)


def owner_of(module: nn.Module) -> OffloadedModel | None:
    """Return the offloaded model that owns a module now; None if there is none."""
    reference = _registry.owners.get(module)
    return None if reference is None else reference()


def offloading_of(root: nn.Module) -> OffloadedModel | None:
    """Return the offloading of this model itself, also while suspended; None if there is none."""
    return next((model for model in list(_registry.models) if model.root is root), None)


def enabled_models() -> list[OffloadedModel]:
    """Return the offloaded models that own their modules now."""
    return [model for model in list(_registry.models) if owner_of(model.root) is model]


def enclosing_models(module: nn.Module) -> list[OffloadedModel]:
    """Return the enabled models that contain `module` as a part."""
    found = [model for model in enabled_models() if model.root is not module]
    return [model for model in found if module in modules_of(model.root)]


def other_owners(model: OffloadedModel) -> list[tuple[OffloadedModel, set[int]]]:
    """Return the other enabled models, each with the ids of the tensors that it offloads."""
    found = [other for other in enabled_models() if other is not model]
    return [(other, other.weights.tensor_ids()) for other in found]


# Models in training -------------------------------------------------------------------------------


def claim(modules: Iterable[nn.Module], trainer: object) -> None:
    """Record that a trainer manages the weights of these modules, as long as it exists."""
    _registry.trainers.update(dict.fromkeys(modules, weakref.ref(trainer)))


def trainer_of(module: nn.Module) -> object | None:
    """Return the trainer that manages a module's weights; None if there is none."""
    claimed = _registry.trainers.get(module)
    return None if claimed is None else claimed()


def is_claimed(module: nn.Module) -> bool:
    """Return whether a trainer manages a module's weights."""
    return trainer_of(module) is not None


def release_claims(modules: Iterable[nn.Module]) -> None:
    """Record that no trainer manages these modules any more."""
    for module in modules:
        _registry.trainers.pop(module, None)


# Handles ------------------------------------------------------------------------------------------


def add_handle(target: object, handle: object, parts: Sequence[weakref.ref[nn.Module]]) -> None:
    """Record the handle of a pipeline or model, and its models, as long as the target exists."""
    _registry.offloadings[target] = _Offloading(handle, parts)


def remove_handle(target: object, handle: object) -> None:
    """Remove the handle of a target, unless another one has replaced it."""
    if handle_of(target) is handle:
        del _registry.offloadings[target]


def handle_of(target: object) -> Any:
    """Return the handle of a pipeline or model; None if it has none."""
    try:
        return _registry.offloadings[target].handle
    except (KeyError, TypeError):  # TypeError: the target cannot be weakly referenced
        return None


def handles_with(model: OffloadedModel) -> list[Any]:
    """Return the handles that offload a model, the oldest first."""
    offloadings = list(_registry.offloadings.values())
    return [each.handle for each in offloadings if any(p() is model.root for p in each.parts)]


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
    # Small buffers, which modules may replace at each run, are not offloaded: ignore them.
    if owner is not None and before is not given and id(before) in owner.weights.tensor_ids():
        owner.changed = True


def _module_given(module: nn.Module, name: str, given: Any) -> None:
    owner = owner_of(module)
    if owner is not None and module._modules.get(name) is not given:
        owner.changed = True
