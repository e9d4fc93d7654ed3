"""Edit the weights of an offloaded module on the device."""

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
    """Load the weights of `module` onto the device for a `with` block, to edit them there.

        with edit_weights(model.layers[5].up_proj) as layer:
            layer.weight.data += up @ down  # merges a LoRA

    Any kind of change is allowed. The weights are copies that count against the device budget;
    changes are written back to the store on exit. The model can run inside the block. A module that
    is not offloaded is yielded unchanged. Blocks nest on one thread: an inner block uses the
    weights that the outer one has loaded, and changes are written back when the outermost block
    exits. The design follows PEFT's `onload_layer`.

    Args:
        module: an offloaded module, or a part of one.

    Yields:
        The same module.

    Raises:
        LeaseError: the module is running, or another thread is editing it.
        BudgetError: the weights do not fit into the device budget.
    """
    owners = {owner for part in modules_of(module) if (owner := owner_of(part)) is not None}
    with ExitStack() as stack:
        for owner in owners:
            bindings = [b for b in owner.weights.bindings_of(module) if not _is_edited_here(b)]
            if bindings:
                stack.enter_context(_edited(owner.weights, bindings))
        yield module


@dataclass(eq=False)
class _Edit:
    """The user of weights that are bound by a thread's outermost `edit_weights` block."""

    thread: int = field(default_factory=threading.get_ident)


@contextmanager
def _edited(groups: WeightGroups, bindings: list[ParameterBinding]) -> Iterator[None]:
    store, lock, edit = groups.store, groups.lock, _Edit()
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
                    bind_all(bindings, edit, lease.tensors)
                    for each in wrapped:
                        each.bind(edit)
                yield
            finally:
                changed = [b for b in bindings if b.user is edit and not _is_unchanged(b)]
                copies = [b.tensor.detach().to("cpu", copy=True) for b in changed]
                with lock:
                    for each in wrapped:
                        each.unbind(edit)
                    for b in bindings:
                        b.unbind(edit)
                    for b, copy in zip(changed, copies, strict=True):
                        b.replace_value(copy)
    finally:
        store.discard(key)
    # Also writes the changes of inner blocks to the same groups, which could not be written before.
    groups.rewrite_edited({b.key for b in bindings})


def _check_idle(bindings: list[ParameterBinding]) -> None:
    if any(binding.user is not None for binding in bindings):
        raise LeaseError(
            "these weights are in use: the module is running, or another thread is editing them; "
            "edit them before or after that"
        )


def _is_edited_here(binding: ParameterBinding) -> bool:
    """Return whether this thread is already editing a tensor."""
    user = binding.user
    return isinstance(user, _Edit) and user.thread == threading.get_ident()


def _is_unchanged(binding: ParameterBinding) -> bool:
    """Return whether a tensor is bit-equal to its host view."""
    shown, host_view = binding.tensor.detach(), binding.host_view
    if shown.dtype is not host_view.dtype or shown.shape != host_view.shape:
        return False
    return torch.equal(_bytes_of(shown.cpu()), _bytes_of(host_view))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
