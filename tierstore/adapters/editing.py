"""A layer on the device for as long as its weights are edited there."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from tierstore.adapters.binding import ParameterBinding, bind_all
from tierstore.adapters.contents import modules_of
from tierstore.adapters.owners import owner_of
from tierstore.adapters.weight_groups import WeightGroups
from tierstore.errors import LeaseError
from tierstore.model.tiers import Access

_numbers = itertools.count()


@contextmanager
def edit_weights(module: nn.Module) -> Iterator[nn.Module]:
    """Have the weights of `module` on the device for a while, to change them in any way.

        with edit_weights(model.layers[5].up_proj) as layer:
            layer.weight.data += up @ down  # merges a LoRA

    They are copies within the budget of the store; what they are at the end reaches the tier that
    they came from. The model may run inside, too. Nothing happens to a module that is not
    offloaded. It nests: on the same thread, an inner one uses what an outer one has brought, and
    what is changed reaches its tier when the outermost ends. The idea is PEFT's `onload_layer`.

    Args:
        module: a module that is offloaded, or a part of one.

    Yields:
        The module.

    Raises:
        LeaseError: the module is running at this moment, or is edited on another thread.
        BudgetError: it does not fit.
    """
    owners = {owner for part in modules_of(module) if (owner := owner_of(part)) is not None}
    with ExitStack() as stack:
        for owner in owners:
            bindings = [b for b in owner.weights.bindings_of(module) if not _is_here(b)]
            if bindings:
                stack.enter_context(_edited(owner.weights, bindings))
        yield module


@dataclass(eq=False)
class _Edit:
    """The use of weights that lasts as long as the outermost `edit_weights` of a thread."""

    thread: int = field(default_factory=threading.get_ident)


@contextmanager
def _edited(groups: WeightGroups, bindings: list[ParameterBinding]) -> Iterator[None]:
    store, lock, use = groups.store, groups.lock, _Edit()
    key = f"{groups.prefix}/edited-{next(_numbers)}"
    with lock:
        _check_idle(bindings)
        values = {b.name: b.tensor.detach() for b in bindings}
        wrapped = [] if store.device.type == "cpu" else groups.wrapped_of(bindings)
    store.put(key, values, durable=False)
    try:
        with store.acquire(key, Access.UPDATE) as lease:
            try:
                with lock:
                    _check_idle(bindings)
                    bind_all(bindings, use, lease.tensors)
                    for each in wrapped:
                        each.show(use)
                yield
            finally:
                changed = [b for b in bindings if b.user is use and not _is_unchanged(b)]
                copies = [b.tensor.detach().to("cpu", copy=True) for b in changed]
                with lock:
                    for each in wrapped:
                        each.put_back(use)
                    for b in bindings:
                        b.leave(use)
                    for b, copy in zip(changed, copies, strict=True):
                        b.give(copy)
    finally:
        store.discard(key)
    # What an inner one changed in the same groups had to wait for this.
    groups.renew_edited({b.key for b in bindings})


def _check_idle(bindings: list[ParameterBinding]) -> None:
    if any(binding.user is not None for binding in bindings):
        raise LeaseError(
            "these weights are in use: the module runs, or another thread edits them; edit "
            "them before or after that"
        )


def _is_here(binding: ParameterBinding) -> bool:
    """Whether this thread edits a tensor already."""
    user = binding.user
    return isinstance(user, _Edit) and user.thread == threading.get_ident()


def _is_unchanged(binding: ParameterBinding) -> bool:
    """Whether a tensor has the value of its host view, bit for bit."""
    shown, host_view = binding.tensor.detach(), binding.host_view
    if shown.dtype is not host_view.dtype or shown.shape != host_view.shape:
        return False
    return torch.equal(_bytes_of(shown.cpu()), _bytes_of(host_view))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
