"""A forward that ran out of device memory runs once more, when the store has given some back.

To run it again must be the same as to run it for the first time. A forward is taken to compute its
result from weights, arguments and random numbers if gradients are off and its module is in
evaluation mode, has no hooks, and is given nothing but tensors and plain values: what else there
is, such as a cache of keys and values, it may have changed. Tensors that it did change are noticed,
those of inference mode excepted, and random numbers are drawn again from where they began. All
others see their error as it was raised, with a note.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tierstore.adapters.contents import modules_of, tensors_of
from tierstore.adapters.forward import MethodPatch
from tierstore.model.formatting import size
from tierstore.model.tiers import Tier
from tierstore.store import TierStore, engine_of
from tierstore.torch_private import has_forward_hooks, versions_of

logger = logging.getLogger("tierstore.adapters")

_NOTE = "tierstore: "
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class OomRetry:
    """Calls methods of a module whose weights are on a store with an accelerator."""

    def __init__(self, module: nn.Module, store: TierStore) -> None:
        self._module = module
        self._store = store
        self._own = list(map(weakref.ref, tensors_of(module)))
        on_device = torch.get_device_module(store.device)
        self._get_state, self._set_state = on_device.get_rng_state, on_device.set_rng_state

    def __call__(
        self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What the method returns; its OutOfMemoryError if it runs out of memory again."""
        if torch.is_grad_enabled() or self._module.training:
            return self._told(method, args, kwargs)
        watched = self._watched(args, kwargs)
        versions = versions_of(watched)
        random = self._random_states()
        try:
            return method(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            as_before = versions == versions_of(watched)
            if not as_before or not self._may_run_again(error, args, kwargs):
                self._advise(error)
                raise
        # Here the error is gone, and with it the frames of the first run and what they held.
        memory = engine_of(self._store).device_memory
        given_back = memory.spare_bytes()
        memory.give_back()
        memory.retries += 1
        logger.log(
            # It costs a run each time, and is told of once.
            logging.WARNING if memory.retries == 1 else logging.DEBUG,
            "%s ran out of memory in a %s: the store gives %s back, and it runs again. With a "
            "smaller device_budget it would not have to",
            self._store.device,
            type(self._module).__name__,
            size(given_back),
        )
        self._restore(*random)
        return self._told(method, args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _watched(self, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """The module's tensors, and those that it is given. (torch.compile takes a weak reference
        for what it refers to.)"""
        found: list[torch.Tensor] = []
        for reference in self._own:
            tensor = reference()
            if tensor is not None:
                found.append(tensor)
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor):
                found.append(value)
            elif isinstance(value, tuple):
                found += _tensors_among(value)
        return found

    def _random_states(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the random numbers of the CPU and of the device go on."""
        return torch.default_generator.get_state(), self._get_state(self._store.device)

    def _restore(self, cpu: torch.Tensor, device: torch.Tensor) -> None:
        torch.default_generator.set_state(cpu)
        self._set_state(device, self._store.device)

    def _told(self, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            self._advise(error)
            raise

    def _may_run_again(self, error: BaseException, args: Any, kwargs: Any) -> bool:
        return (
            not _is_advised(error)  # a unit inside of this one has tried
            and engine_of(self._store).device_memory.spare_bytes() > 0
            and _is_plain((*args, *kwargs.values()))
            and not any(_has_hooks(module) for module in modules_of(self._module))
        )

    def _advise(self, error: BaseException) -> None:
        if _is_advised(error):
            return
        stats = self._store.stats()
        used, budget = (of[Tier.DEVICE.name] for of in (stats.used_bytes, stats.budget_bytes))
        error.add_note(
            f"{_NOTE}the store has {used:,} bytes of {self._store.device}, and may have "
            f"{budget:,}; with a smaller device_budget, more is left to what the model computes"
        )


def _is_advised(error: BaseException) -> bool:
    return any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ()))


def _is_plain(value: Any) -> bool:
    """Whether a forward cannot have changed it unnoticed."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return type(value) is torch.Tensor or isinstance(value, _PLAIN)


def _tensors_among(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors_among(value)


def _has_hooks(module: nn.Module) -> bool:
    """Whether others do something of their own around its forward."""
    forward = module.__dict__.get("forward")
    foreign = forward is not None and not isinstance(forward, MethodPatch)
    return foreign or has_forward_hooks(module)
