"""Models that other libraries offload, and models on a store that they are to leave alone.

Who comes second is refused, by us or for us: two that move the same weights make each other's
tensors wrong without any error.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tierstore.adapters.contents import modules_of
from tierstore.adapters.owners import is_claimed, owner_of

MARKER = "group_offloading"
"""The name of the hook by which diffusers knows an offloaded model."""


def refuse_other_offloading(name: str, module: nn.Module) -> None:
    """Raise ValueError if somebody else brings the weights of a model to where it runs.

    From now on, other libraries are refused the models that are on a store.
    """
    _guard_all()
    owner = owner_of(module)
    if owner is not None and owner.root is module:
        raise ValueError(
            f"{name} is offloaded already, to a store: undo that first with handle.disable() or "
            "tierstore.undispatch(model)"
        )
    for part in modules_of(module):
        if is_claimed(part):
            raise ValueError(
                f"{name} is in training on a store: call disable() of its OffloadModel first"
            )
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


def _guard_all() -> None:
    """Guard what others call with a module before they take it, whichever of their functions was
    called, as far as they are imported."""
    if "accelerate" in sys.modules:
        from accelerate import hooks

        _guard(hooks.AlignDevicesHook, "init_hook")
        _guard(hooks.CpuOffload, "init_hook")
    if "diffusers" in sys.modules:
        from diffusers.hooks import group_offloading

        _guard(group_offloading, "_apply_group_offloading")


@functools.cache
def _guard(holder: object, name: str) -> None:
    """Have a function of another library refuse what is on a store, as long as it is."""
    original: Callable[..., Any] = getattr(holder, name)

    @functools.wraps(original)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        if any(isinstance(each, _MarkConfig) for each in given):
            # After it loaded a LoRA, diffusers applies its offloading anew to every model of the
            # pipeline that has a hook of that name. Ours sees changes by itself, and stays.
            return None
        for each in given:
            if isinstance(each, nn.Module):
                _refuse_if_on_a_store(each)
        return original(*args, **kwargs)

    setattr(holder, name, guarded)


def _refuse_if_on_a_store(module: nn.Module) -> None:
    parts = [p for p in modules_of(module) if owner_of(p) is not None or is_claimed(p)]
    if not parts:
        return
    if not hasattr(module, "_hf_hook"):
        module.__dict__.pop("_old_forward", None)  # accelerate noted it before it asked
    name, part = type(module).__name__, type(parts[0]).__name__
    whole = name if parts[0] is module else f"{part} in {name}"
    raise ValueError(
        f"{whole} is on a tierstore, which brings its weights to where it runs: leave other "
        "offloading out, or undo this one first (handle.disable(), tierstore.undispatch(model), or "
        "disable() of an OffloadModel)"
    )


def mark(module: nn.Module, device: torch.device) -> None:
    """Let diffusers see that the model is offloaded, and to where."""
    try:
        from diffusers.hooks import HookRegistry
    except ImportError:
        return  # without diffusers nobody asks
    _guard_all()
    # Not register_hook: its wrapper around forward would make a deep copy run this model's weights.
    registry = HookRegistry.check_if_exists_or_initialize(module)
    registry.hooks = _Marked(registry.hooks, _MarkConfig(device, torch.device("cpu")))


def unmark(module: nn.Module) -> None:
    """It is not, any more."""
    registry = getattr(module, "_diffusers_hook", None)
    if registry is not None and isinstance(registry.hooks, _Marked):
        registry.hooks = dict(registry.hooks)


@dataclass(frozen=True)
class _MarkConfig:
    """What diffusers asks the hook of an offloaded model for."""

    onload_device: torch.device
    offload_device: torch.device


class _Marked(dict[str, Any]):
    """The hooks of a model, where the mark is found by `get` only: nobody can remove it.

    A copy or a pickle of the model is an ordinary model: its hooks are the others.
    """

    def __init__(self, others: dict[str, Any], config: _MarkConfig) -> None:
        super().__init__(others)
        self._mark = SimpleNamespace(config=config)

    def get(self, name: str, default: Any = None) -> Any:
        """The hook of that name, as `HookRegistry.get_hook` asks for it."""
        return self._mark if name == MARKER else super().get(name, default)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(self), memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)
