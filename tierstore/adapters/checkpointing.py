"""Activation checkpointing whose boundaries go to a store with everything else.

`torch.utils.checkpoint` keeps the inputs of a region and computes the rest again in the backward
pass. The inputs are what is left to keep; but the hooks of `offload_activations` are shown only
positional tensors. Here all tensors that a call brings along are made positional: those in
keywords, in lists, tuples and dicts, in the arguments of `functools.partial`, and in the variables
that a function takes from around it.

The first run is given what the caller gave, and may write to it. Later runs are given containers of
their own, and caches of keys and values as they were before the first.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils import checkpoint as torch_checkpoint

from tierstore.adapters.compat import Library, any_answer
from tierstore.adapters.forward import Arguments
from tierstore.torch_private import tree_flatten, tree_unflatten

P = ParamSpec("P")
T = TypeVar("T")


def checkpoint_activations(fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `fn`, keep only what it is given, and compute it again in the backward pass.

        y = checkpoint_activations(block, x, mask=mask)

    It is `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`, with the state of the
    random generators restored. Inside of `offload_activations`, what is kept goes to the store:
    tensors among the arguments, in containers, and in the closure of `fn` (or of what
    `functools.partial` wraps). A tensor that `fn` finds in an object of its own, such as an
    attribute, stays where it is. What `fn` writes into lists and dicts that it is given, or assigns
    to a tensor of its closure, it writes once: what the second pass writes is gone after it.

    Args:
        fn: what to call, such as a module.
        *args: its arguments.
        **kwargs: its arguments by name.

    Returns:
        What `fn` returns.
    """
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    result: T = checkpointed(fn, (args, kwargs), (args, kwargs))
    return result


def checkpointed(fn: Callable[..., Any], given: Arguments, kept: Arguments) -> Any:
    """Checkpoint `fn`: called with what is `given` first, and with what is `kept` again."""
    tensors = _Tensors()
    call = _Call(fn, given, tensors, tensors.taken_from(kept))
    return torch_checkpoint.checkpoint(call, *tensors.found, use_reentrant=False)


class _Index(int):
    """Where in a list a tensor is."""


class _Tensors:
    """The tensors of a call, each once."""

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []
        self._indices: dict[int, _Index] = {}

    def taken_from(self, value: Any) -> _Filled:
        """What builds `value` anew from its tensors."""
        leaves, structure = tree_flatten(value)
        return _Filled([self._left(leaf) for leaf in leaves], structure)

    def _left(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return _cache_copied(leaf)
        if id(leaf) not in self._indices:
            self._indices[id(leaf)] = _Index(len(self.found))
            self.found.append(leaf)
        return self._indices[id(leaf)]


@dataclass(eq=False)
class _Filled:
    """A value with indices instead of tensors."""

    leaves: list[Any]
    structure: Any

    @property
    def holds_tensors(self) -> bool:
        return any(isinstance(leaf, _Index) for leaf in self.leaves)

    def __call__(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """The value with these tensors."""
        leaves = [
            tensors[leaf] if isinstance(leaf, _Index) else _cache_copied(leaf)
            for leaf in self.leaves
        ]
        return tree_unflatten(leaves, self.structure)


def _cache_copied(value: Any) -> Any:
    """A cache with layers, lists and dicts of its own, and the same tensors: new keys and values
    are joined to the old ones in new memory. Anything else itself.

    Arguments are held as long as the graph. A cache must not be: it gets tensors from the first
    run, which hold the graph, and neither would ever go.
    """
    if not any_answer(Library.is_cache, value):
        return value
    made = copy.copy(value)
    made.__dict__.update(_cached_copied(vars(value)))
    return made


def _cached_copied(value: Any) -> Any:
    if type(value) is list:
        return [_cached_copied(each) for each in value]
    if type(value) is dict:
        return {name: _cached_copied(each) for name, each in value.items()}
    return _cache_copied(value)


class _Call:
    """A call that holds nothing of what it is given first, but is given its tensors each time."""

    def __init__(
        self, fn: Callable[..., Any], given: Arguments, tensors: _Tensors, kept: _Filled
    ) -> None:
        self._first: tuple[Callable[..., Any], Arguments] | None = (fn, given)
        self._arguments = kept
        self._again = _rebuilt(fn, tensors)

    def __call__(self, *tensors: torch.Tensor) -> Any:
        first, self._first = self._first, None
        fn, (args, kwargs) = first or (self._again(tensors), self._arguments(tensors))
        return fn(*args, **kwargs)


Rebuild = Callable[[tuple[torch.Tensor, ...]], Callable[..., Any]]


def _rebuilt(fn: Callable[..., Any], tensors: _Tensors) -> Rebuild:
    """What makes a function that does what `fn` does, from the tensors that `fn` brings along."""
    if isinstance(fn, functools.partial):
        inner = _rebuilt(fn.func, tensors)
        bound = tensors.taken_from((fn.args, fn.keywords))
        return lambda given: _partial(inner(given), *bound(given))
    if isinstance(fn, types.FunctionType):
        return _rebuilt_function(fn, tensors)
    return lambda given: fn


def _partial(fn: Callable[..., Any], args: Any, keywords: Any) -> Callable[..., Any]:
    return functools.partial(fn, *args, **keywords)


def _rebuilt_function(fn: types.FunctionType, tensors: _Tensors) -> Rebuild:
    defaults = tensors.taken_from((fn.__defaults__, fn.__kwdefaults__))
    cells = [_rebuilt_cell(cell, tensors) for cell in fn.__closure__ or ()]
    if not defaults.holds_tensors and all(isinstance(cell, types.CellType) for cell in cells):
        return lambda given: fn  # as it is
    code, names, name = fn.__code__, fn.__globals__, fn.__name__

    def rebuild(given: tuple[torch.Tensor, ...]) -> Callable[..., Any]:
        closure = tuple(
            cell if isinstance(cell, types.CellType) else types.CellType(cell(given))
            for cell in cells
        )
        positional, keywords = defaults(given)
        made = types.FunctionType(code, names, name, positional, closure or None)
        made.__kwdefaults__ = keywords
        return made

    return rebuild


def _rebuilt_cell(cell: types.CellType, tensors: _Tensors) -> types.CellType | _Filled:
    """The cell itself, shared with the function around, unless there are tensors in it."""
    try:
        filled = tensors.taken_from(cell.cell_contents)
    except ValueError:  # nothing is assigned yet
        return cell
    return filled if filled.holds_tensors else cell
