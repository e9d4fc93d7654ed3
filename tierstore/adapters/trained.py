"""Which parameters of an offloaded model are trained: they stay on the device.

Whoever fine-tunes a model freezes most of it. So parameters that require grad are taken to be
trained once the model runs with gradients enabled, where frozen ones have more bytes. In a model
that was only loaded everything requires grad, but for what cannot (quantised weights) and a table
here and there: all of it is offloaded. So is an adapter that is loaded to generate with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tierstore.adapters.codecs import is_movable, weight_bytes
from tierstore.adapters.contents import modules_of, parameters_of
from tierstore.adapters.forward import MethodPatch
from tierstore.adapters.grouping import recomputes

if TYPE_CHECKING:
    from tierstore.adapters.offloaded import OffloadedModel


class Trained:
    """The `parameters` of a model that are trained, as it was when it was looked at last. Until
    then, nothing is `known` of it."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._recomputing = [module for module in modules_of(root) if recomputes(module)]
        self.known = False
        self._references: list[weakref.ref[nn.Parameter]] = []

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that are not gone: a parameter that was replaced is not kept for this."""
        return [found for reference in self._references if (found := reference()) is not None]

    def look(self) -> bool:
        """Before a run with gradients enabled: see what is trained now. Returns whether that, or
        which modules are computed again in parts in a backward pass, is not what it was."""
        modules = modules_of(self._root)
        recomputing = [module for module in modules if recomputes(module)]
        parameters = _trained(p for module in modules for p in parameters_of(module, recurse=False))
        same = [*map(id, parameters)] == self.ids and recomputing == self._recomputing
        self.known, self._recomputing = True, recomputing
        self._references = list(map(weakref.ref, parameters))
        return not same

    def forget(self) -> None:
        """Nothing of it is trained until it is looked at again."""
        self.known, self._references = False, []

    @property
    def ids(self) -> list[int]:
        """The ids of the parameters."""
        return [id(parameter) for parameter in self.parameters]


class Merging:
    """What stands in for `merge`, by which adapters add what was trained to weights that are away:
    it goes where they are."""

    def __init__(self, trained: Trained, offloaded: OffloadedModel) -> None:
        self._trained = trained
        self._offloaded = offloaded

    def __call__(self, method: MethodPatch, args: Any, kwargs: Any) -> Any:
        if self._trained.parameters:  # else an earlier layer has had them put away
            self._trained.forget()
            self._offloaded.changed = True
            with torch.no_grad():
                self._offloaded.look()
        return method.original(*args, **kwargs)


class FollowingStates:
    """Has optimizers keep the states of what is trained where it is: they may have loaded them
    before it came to the device. Until it is removed, or the model is gone."""

    def __init__(self, trained: Trained) -> None:
        reference = weakref.ref(trained)  # torch has the hook until it is removed

        def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            known = reference()
            if known is not None and any(_is_elsewhere(optimizer, p) for p in known.parameters):
                optimizer.load_state_dict(optimizer.state_dict())

        handle = register_optimizer_step_pre_hook(hook)
        self._end = weakref.finalize(trained, handle.remove)
        self._end.atexit = False

    def remove(self) -> None:
        """Leave states where they are."""
        self._end()


def _is_elsewhere(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> bool:
    """Whether states of a parameter are not on its device. Steps, which are counted in scalars, are
    where each optimizer wants them."""
    states = optimizer.state.get(parameter, {})
    tensors = [value for value in states.values() if isinstance(value, torch.Tensor)]
    return any(value.device != parameter.device for value in tensors if value.dim())


def _trained(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Those that require grad, if that is not most of them."""
    each = {id(parameter): parameter for parameter in parameters}.values()
    wanting = [parameter for parameter in each if parameter.requires_grad]
    frozen = [parameter for parameter in each if not parameter.requires_grad]
    meant = any(map(_may_be_trained, frozen)) and weight_bytes(wanting) < weight_bytes(frozen)
    return wanting if meant else []


def _may_be_trained(parameter: torch.Tensor) -> bool:
    """Whether somebody chose that it is frozen: integers and what is quantised always are."""
    return is_movable(parameter) and parameter.is_floating_point()
