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
from tierstore.adapters.contents import modules_of, named_parameters_of
from tierstore.adapters.owners import enabled_models, is_claimed, owner_of, trainer_of


def check_not_offloaded(name: str, module: nn.Module) -> None:
    """Raise ValueError if something else moves the weights of a model.

    From then on, imported libraries also raise for models that are in a store.
    """
    notify_all(Library.guard)
    owner = owner_of(module)
    if owner is not None and owner.root is module:
        raise ValueError(
            f"{name} is already offloaded to a store: call tierstore.disable_offload(model) first"
        )
    for part in modules_of(module):
        if (trainer := trainer_of(part)) is not None:
            raise ValueError(_describe_trained(name, module, part, trainer))
        if (by := first_answer(Library.other_offloading, part)) is not None:
            raise ValueError(f"{name} is already offloaded {by}")


def check_no_part_offloaded(name: str, module: nn.Module) -> None:
    """Raise ValueError if a model, a part of it, or a model around it is offloaded."""
    check_not_offloaded(name, module)
    for part in modules_of(module):
        if (owner := owner_of(part)) is not None:
            what = name if part is module else f"{type(part).__name__} in {name}"
            whole = "" if owner.root is part else f" as part of a {type(owner.root).__name__}"
            raise ValueError(
                f"{what} is already offloaded to a store{whole}: call "
                f"tierstore.disable_offload({'model' if whole else 'it'}) first"
            )
    offloaded = {number for model in enabled_models() for number in model.weights.tensor_ids()}
    for weight, parameter in named_parameters_of(module):
        if id(parameter) in offloaded:
            raise ValueError(
                f"{weight} of {name} is also a weight of a model that is offloaded to a store: "
                "call tierstore.disable_offload(model) first"
            )


def _describe_trained(name: str, module: nn.Module, part: nn.Module, trainer: object) -> str:
    """Describe in an error that `trainer` manages the weights of `part` of a model."""
    if module is trainer:
        return (
            "this module is already an OffloadModel: use it as it is, or call its disable() first"
        )
    if part is trainer:
        return f"{name} contains an OffloadModel: call disable() of that OffloadModel first"
    whole = name if part is module else f"{type(part).__name__} in {name}"
    return (
        f"{whole} is already in an OffloadModel: use that OffloadModel as it is, or call its "
        "disable() first"
    )


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
