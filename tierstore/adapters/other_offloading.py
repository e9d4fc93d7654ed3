"""Prevent two libraries from offloading the same model.

The second one is rejected, in either order: if two libraries move the same weights, tensors become
wrong without any error.
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

    From then on, imported libraries also refuse to offload models that are in a store.
    """
    notify_all(Library.guard)
    owner = owner_of(module)
    if owner is not None and owner.root is module:
        raise ValueError(
            f"{name} is already offloaded to a store: call tierstore.disable_offload(model) first"
        )
    for part in modules_of(module):
        if is_claimed(part):
            raise ValueError(
                f"{name} is being trained in a store: call disable() of its OffloadModel first"
            )
        if (by := first_answer(Library.other_offloading, part)) is not None:
            raise ValueError(f"{name} is already offloaded {by}")


class TierstoreOffloading:
    """Marker in a library's settings for tierstore's offloading, which it must not apply."""


@functools.cache
def install_model_check(
    holder: object, name: str, before: Callable[[nn.Module], None] | None = None
) -> None:
    """Make a library's function raise ValueError for a model in a store.

    `before`, if given, is called with such a model first.
    """
    original: Callable[..., Any] = getattr(holder, name)

    @functools.wraps(original)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        if any(isinstance(each, TierstoreOffloading) for each in given):
            return None  # tierstore detects changes itself: there is nothing to apply again
        for each in given:
            if isinstance(each, nn.Module):
                _check_not_in_store(each, before)
        return original(*args, **kwargs)

    setattr(holder, name, checked)


def _check_not_in_store(module: nn.Module, before: Callable[[nn.Module], None] | None) -> None:
    parts = [p for p in modules_of(module) if owner_of(p) is not None or is_claimed(p)]
    if not parts:
        return
    if before is not None:
        before(module)
    name, part = type(module).__name__, type(parts[0]).__name__
    whole = name if parts[0] is module else f"{part} in {name}"
    raise ValueError(
        f"{whole} is in a tierstore, which loads its weights to the device as it runs: do not "
        "offload it again, or undo this offloading first (tierstore.disable_offload(model), or "
        "disable() of an OffloadModel)"
    )
