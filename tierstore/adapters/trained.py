"""Detect the trained parameters of an offloaded model, which stay on the device.

Fine-tuning freezes most of a model. Parameters that require grad therefore count as trained once
the model runs with gradients enabled, provided that frozen parameters have more bytes. In a model
that was only loaded, everything requires grad except quantised weights and a few tables, so all of
it is offloaded; so is an adapter that is loaded only for generation.
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


class TrainedParameters:
    """The trained `parameters` of a model, as of the last `refresh`. `known` is False before."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._recomputing = [module for module in modules_of(root) if recomputes(module)]
        self.known = False
        self._references: list[weakref.ref[nn.Parameter]] = []

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters that still exist. Replaced parameters are not kept alive."""
        return [found for reference in self._references if (found := reference()) is not None]

    def refresh(self) -> bool:
        """Detect what is trained, before a run with gradients enabled. Return whether it changed.

        A change of the modules that a backward pass recomputes in parts also counts.
        """
        modules = modules_of(self._root)
        recomputing = [module for module in modules if recomputes(module)]
        parameters = _trained(p for module in modules for p in parameters_of(module, recurse=False))
        same = [*map(id, parameters)] == self.ids and recomputing == self._recomputing
        self.known, self._recomputing = True, recomputing
        self._references = list(map(weakref.ref, parameters))
        return not same

    def reset(self) -> None:
        """Treat nothing as trained until the next `refresh`."""
        self.known, self._references = False, []

    @property
    def ids(self) -> list[int]:
        """The ids of the parameters."""
        return [id(parameter) for parameter in self.parameters]


class MergePatch:
    """Replacement for `merge`, with which adapters add trained weights to offloaded ones.

    Moves the trained weights back to the CPU first, where the offloaded ones are.
    """

    def __init__(self, trained: TrainedParameters, offloaded: OffloadedModel) -> None:
        self._trained = trained
        self._offloaded = offloaded

    def __call__(self, method: MethodPatch, args: Any, kwargs: Any) -> Any:
        if self._trained.parameters:  # else the merge of an earlier layer has moved them
            self._trained.reset()
            self._offloaded.changed = True
            with torch.no_grad():
                self._offloaded.refresh()
        return method.original(*args, **kwargs)


class OptimizerStateMover:
    """Moves optimizer states to the device of their trained parameters before each step.

    An optimizer may have loaded its states before the parameters moved to the device. Active until
    it is removed or the model is freed.
    """

    def __init__(self, trained: TrainedParameters) -> None:
        reference = weakref.ref(trained)  # torch holds the hook until it is removed

        def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            known = reference()
            if known is not None and any(_is_elsewhere(optimizer, p) for p in known.parameters):
                optimizer.load_state_dict(optimizer.state_dict())

        handle = register_optimizer_step_pre_hook(hook)
        self._end = weakref.finalize(trained, handle.remove)
        self._end.atexit = False

    def remove(self) -> None:
        """Stop moving states."""
        self._end()


def _is_elsewhere(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> bool:
    """Return whether optimizer states of a parameter are on another device.

    Scalars, such as step counts, are ignored: each optimizer chooses their device.
    """
    states = optimizer.state.get(parameter, {})
    tensors = [value for value in states.values() if isinstance(value, torch.Tensor)]
    return any(value.device != parameter.device for value in tensors if value.dim())


def _trained(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters that require grad, if they have fewer bytes than the frozen ones."""
    each = {id(parameter): parameter for parameter in parameters}.values()
    wanting = [parameter for parameter in each if parameter.requires_grad]
    frozen = [parameter for parameter in each if not parameter.requires_grad]
    meant = any(map(_may_be_trained, frozen)) and weight_bytes(wanting) < weight_bytes(frozen)
    return wanting if meant else []


def _may_be_trained(parameter: torch.Tensor) -> bool:
    """Return whether a parameter could require grad, unlike integer and quantised ones."""
    return is_movable(parameter) and parameter.is_floating_point()
