"""Methods of pipelines that change weights or models: they respect what is offloaded.

A pipeline is any object with `components`. Methods are replaced on its class.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from tierstore.adapters.compat import methods_that_change_weights
from tierstore.adapters.components import models_in, suspended_in
from tierstore.adapters.owners import owner_of

REPLACED_METHODS: weakref.WeakKeyDictionary[type[Any], set[str]] = weakref.WeakKeyDictionary()
"""The methods of classes that are replaced."""


def follow_class_tree(base: type[Any]) -> None:
    """Replace methods of a class and of all derived from it, also later.

    They are replaced on their classes: when a model is offloaded, nobody knows which pipelines have
    it, or will. For a pipeline with no offloaded model they do what they did.
    """
    replaced = REPLACED_METHODS.setdefault(base, set())
    if "__init_subclass__" in replaced:
        return
    replaced.add("__init_subclass__")
    own = vars(base).get("__init_subclass__")

    def followed(kind: type[Any], /, **kwargs: Any) -> None:
        if own is None:
            super(base, kind).__init_subclass__(**kwargs)
        else:
            own.__func__(kind, **kwargs)
        follow_methods(kind)

    base.__init_subclass__ = classmethod(followed)  # type: ignore[assignment]
    pending = [base]
    while pending:
        kind = pending.pop()
        follow_methods(kind)
        pending += kind.__subclasses__()


def follow_methods(kind: type[Any]) -> None:
    """Replace the methods of one class that change weights or models: they run while what is
    offloaded of the pipeline is suspended. `to` gives offloaded models its dtype."""
    for name in ("to", *methods_that_change_weights()):
        defining = next((each for each in kind.__mro__ if name in vars(each)), None)
        if defining is None or not inspect.isfunction(vars(defining)[name]):
            continue
        replaced = REPLACED_METHODS.setdefault(defining, set())
        if name not in replaced:
            replaced.add(name)
            setattr(defining, name, _around(vars(defining)[name], name))


def _around(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the replacement of a method of pipelines."""
    run = _converted if name == "to" else _suspended

    @functools.wraps(original)
    def method(pipe: Any, *args: Any, **kwargs: Any) -> Any:
        return run(functools.partial(original, pipe), pipe, *args, **kwargs)

    return method


def _suspended(method: Callable[..., Any], pipe: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a method while all that is offloaded of a pipeline is suspended."""
    with ExitStack() as stack:
        for context in suspended_in(pipe):
            stack.enter_context(context)
        return method(*args, **kwargs)


def _converted(method: Callable[..., Any], pipe: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `to`, which passes over models that are offloaded, and give them its dtype, too.
    `from_pipe` makes other pipelines, and casts those."""
    result = method(*args, **kwargs)
    models = models_in(pipe).values()
    for given in (*args, *kwargs.values()):
        for model in models if isinstance(given, torch.dtype) else ():
            if owner_of(model) is not None:
                model.to(given)
    return result
