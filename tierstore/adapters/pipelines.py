"""Patch pipeline methods that change weights or models, to respect offloaded models.

A pipeline is any object with `components`. Methods are replaced on its class.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from tierstore.adapters.compat import weight_changing_methods
from tierstore.adapters.owners import handle_of, offloading_of, owner_of


def models_in(target: Any) -> dict[str, nn.Module]:
    """Return the models of a pipeline by name; of a module, itself under the name ""."""
    if isinstance(target, nn.Module):
        return {"": target}
    return {n: m for n, m in target.components.items() if isinstance(m, nn.Module)}


def patch_class_tree(base: type[Any]) -> None:
    """Replace methods of a class and of all its subclasses, including future ones.

    Methods are replaced on classes because the pipelines that contain a model, now or later, are
    unknown when the model is offloaded. A pipeline without offloaded models behaves as before.
    """
    own = vars(base).get("__init_subclass__")
    if _is_ours(own):
        return

    def followed(kind: type[Any], /, **kwargs: Any) -> None:
        if own is None:
            super(base, kind).__init_subclass__(**kwargs)
        else:
            own.__func__(kind, **kwargs)
        patch_methods(kind)

    base.__init_subclass__ = classmethod(_marked(followed))  # type: ignore[assignment]
    pending = [base]
    while pending:
        kind = pending.pop()
        patch_methods(kind)
        pending += kind.__subclasses__()


def patch_methods(kind: type[Any]) -> None:
    """Replace the methods of one class that change weights or models.

    They run while the offloading of the pipeline's models is suspended. `to` also casts offloaded
    models to its dtype.
    """
    for name in ("to", *weight_changing_methods()):
        defining = next((each for each in kind.__mro__ if name in vars(each)), None)
        if defining is None or not inspect.isfunction(vars(defining)[name]):
            continue
        if not _is_ours(original := vars(defining)[name]):
            setattr(defining, name, _marked(_wrapped(original, name)))


def _marked(function: Any) -> Any:
    function.of_tierstore = True
    return function


def _is_ours(method: Any) -> bool:
    """Return whether a function, or the function of a class method, is already a replacement."""
    return hasattr(getattr(method, "__func__", method), "of_tierstore")


def _wrapped(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the replacement of a pipeline method."""
    run = _converted if name == "to" else _suspended

    @functools.wraps(original)
    def method(pipe: Any, *args: Any, **kwargs: Any) -> Any:
        return run(functools.partial(original, pipe), pipe, *args, **kwargs)

    return method


def _suspended(method: Callable[..., Any], pipe: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a method while the offloading of a pipeline and its models is suspended."""
    handle, found = handle_of(pipe), map(offloading_of, models_in(pipe).values())
    models = [model for model in found if model is not None and not model.settings.dispatched]
    with ExitStack() as stack:
        for each in (*([] if handle is None else [handle]), *models):
            stack.enter_context(each.suspended())
        return method(*args, **kwargs)


def _converted(method: Callable[..., Any], pipe: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `to`, which skips offloaded models, and cast these to its dtype as well.

    `from_pipe` creates pipelines with the same models, and casts them through this method.
    """
    result = method(*args, **kwargs)
    models = models_in(pipe).values()
    for given in (*args, *kwargs.values()):
        for model in models if isinstance(given, torch.dtype) else ():
            if owner_of(model) is not None:
                model.to(given)
    return result
