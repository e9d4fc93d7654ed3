"""Retry a forward that ran out of device memory, after the store has released some.

A retry must compute what the first run would have. That holds for a forward that depends only on
weights, arguments and random numbers: gradients are off, and its module is in evaluation mode, has
no hooks, and gets only tensors and plain values. Any other argument, such as a key-value cache, may
have been changed by the first run. Changed tensors are detected by their version counters, except
inference tensors, and the random number generators are rewound. In all other cases, the original
error is raised with a note.
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
    """Calls methods of an offloaded module on an accelerator, with a retry after out-of-memory."""

    def __init__(self, module: nn.Module, store: TierStore) -> None:
        self._module = module
        self._store = store
        self._own = list(map(weakref.ref, tensors_of(module)))
        on_device = torch.get_device_module(store.device)
        self._get_state, self._set_state = on_device.get_rng_state, on_device.set_rng_state

    def __call__(
        self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the method's result. Raises OutOfMemoryError if the retry fails too."""
        if torch.is_grad_enabled() or self._module.training:
            return self._run_with_note(method, args, kwargs)
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
        # The error is freed here, and with it the frames of the first run and their tensors.
        memory = engine_of(self._store).device_memory
        released = memory.spare_bytes()
        memory.free_idle()
        memory.retries += 1
        logger.log(
            # Each retry costs a run; warn only once.
            logging.WARNING if memory.retries == 1 else logging.DEBUG,
            "%s ran out of memory in a %s: the store releases %s, and the forward is retried. A "
            "smaller device_budget avoids this",
            self._store.device,
            type(self._module).__name__,
            size(released),
        )
        self._restore(*random)
        return self._run_with_note(method, args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _watched(self, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """Return the module's tensors and those among the arguments.

        Not compiled, as torch.compile mistakes a weak reference for its referent.
        """
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
        """Return the random number generator states of the CPU and the device."""
        return torch.default_generator.get_state(), self._get_state(self._store.device)

    def _restore(self, cpu: torch.Tensor, device: torch.Tensor) -> None:
        torch.default_generator.set_state(cpu)
        self._set_state(device, self._store.device)

    def _run_with_note(self, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            self._advise(error)
            raise

    def _may_run_again(self, error: BaseException, args: Any, kwargs: Any) -> bool:
        return (
            not _is_advised(error)  # else a unit inside this one has already retried
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
            f"{_NOTE}the store uses {used:,} bytes of {self._store.device}, of a budget of "
            f"{budget:,}; a smaller device_budget leaves more memory for activations"
        )


def _is_advised(error: BaseException) -> bool:
    return any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ()))


def _is_plain(value: Any) -> bool:
    """Return whether a value is plain, so that a change of it by the forward is detected."""
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
    """Return whether others have patched a module's forward or registered hooks on it."""
    forward = module.__dict__.get("forward")
    foreign = forward is not None and not isinstance(forward, MethodPatch)
    return foreign or has_forward_hooks(module)
