"""Models that other libraries offload, and models on a store that they are to leave alone.

Who comes second is refused, by us or for us: two that move the same weights make each other's
tensors wrong without any error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from tierstore.adapters.compat import Library, first_answer, notify_all
from tierstore.adapters.contents import modules_of
from tierstore.adapters.owners import is_claimed, owner_of


def check_not_offloaded(name: str, module: nn.Module) -> None:
    """Raise ValueError if something else moves the weights of a model.

    From now on, other libraries refuse the models that are in a store.
    """
    notify_all(Library.guard)
    owner = owner_of(module)
    if owner is not None and owner.root is module:
        raise ValueError(
            f"{name} is offloaded already, to a store: undo that first with "
            "tierstore.disable_offload(model)"
        )
    for part in modules_of(module):
        if is_claimed(part):
            raise ValueError(
                f"{name} is in training on a store: call disable() of its OffloadModel first"
            )
        if (by := first_answer(Library.other_offloading, part)) is not None:
            raise ValueError(f"{name} is offloaded {by}")


class OffloadingByUs:
    """What stands for our offloading among a library's settings: not to be applied by it."""


@functools.cache
def refuse_models_in_stores(
    holder: object, name: str, before: Callable[[nn.Module], None] | None = None
) -> None:
    """Replace a function of a library by one that raises ValueError for a model in a store.

    `before` is called with such a model first.
    """
    original: Callable[..., Any] = getattr(holder, name)

    @functools.wraps(original)
    def refusing(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        if any(isinstance(each, OffloadingByUs) for each in given):
            return None  # ours sees changes by itself, and stays
        for each in given:
            if isinstance(each, nn.Module):
                _check_not_in_store(each, before)
        return original(*args, **kwargs)

    setattr(holder, name, refusing)


def _check_not_in_store(module: nn.Module, before: Callable[[nn.Module], None] | None) -> None:
    parts = [p for p in modules_of(module) if owner_of(p) is not None or is_claimed(p)]
    if not parts:
        return
    if before is not None:
        before(module)
    name, part = type(module).__name__, type(parts[0]).__name__
    whole = name if parts[0] is module else f"{part} in {name}"
    raise ValueError(
        f"{whole} is on a tierstore, which brings its weights to where it runs: leave other "
        "offloading out, or undo this one first (tierstore.disable_offload(model), or "
        "disable() of an OffloadModel)"
    )
