"""Activation checkpointing whose saved inputs can be offloaded.

`torch.utils.checkpoint` saves the inputs of a region and recomputes the rest in the backward pass.
The hooks of `offload_activations` see only positional tensors among these inputs, so all tensors of
a call are passed as positional ones here: those in keyword arguments, in lists, tuples and dicts,
in the arguments of `functools.partial`, and in the closure of a function.

The first run gets the caller's own objects, and may write to them. Recomputation gets separate
containers, and key-value caches as they were before the first run.
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
    """Call `fn`, save only its inputs, and recompute the rest in the backward pass.

        y = checkpoint_activations(block, x, mask=mask)

    Works like `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`, including the restored
    state of the random number generators. Inside `offload_activations`, the saved inputs go to the
    store: tensors in arguments and containers, and in the closure of `fn` (or of the function that
    a `functools.partial` wraps). A tensor that `fn` reads from another object, such as an
    attribute, stays where it is. Writes of `fn` to its list and dict arguments, or to tensor
    variables of its closure, take effect once: those of the recomputation are discarded.

    Args:
        fn: the function or module to call.
        *args: positional arguments for `fn`.
        **kwargs: keyword arguments for `fn`.

    Returns:
        The result of `fn`.
    """
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    result: T = checkpointed(fn, (args, kwargs), (args, kwargs))
    return result


def checkpointed(fn: Callable[..., Any], given: Arguments, kept: Arguments) -> Any:
    """Checkpoint `fn`: called with `given` first, and with a copy of `kept` for recomputation."""
    tensors = _Tensors()
    call = _Call(fn, given, tensors, tensors.template_of(kept))
    return torch_checkpoint.checkpoint(call, *tensors.found, use_reentrant=False)


class _Index(int):
    """Index of a tensor in a list."""


class _Tensors:
    """The distinct tensors of a call."""

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []
        self._indices: dict[int, _Index] = {}

    def template_of(self, value: Any) -> _Template:
        """Return a template that rebuilds `value` from its tensors."""
        leaves, structure = tree_flatten(value)
        return _Template([self._replace(leaf) for leaf in leaves], structure)

    def _replace(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return _cache_copied(leaf)
        if id(leaf) not in self._indices:
            self._indices[id(leaf)] = _Index(len(self.found))
            self.found.append(leaf)
        return self._indices[id(leaf)]


@dataclass(eq=False)
class _Template:
    """A nested value with indices in place of tensors."""

    leaves: list[Any]
    structure: Any

    @property
    def holds_tensors(self) -> bool:
        return any(isinstance(leaf, _Index) for leaf in self.leaves)

    def __call__(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """Return the value with these tensors."""
        leaves = [
            tensors[leaf] if isinstance(leaf, _Index) else _cache_copied(leaf)
            for leaf in self.leaves
        ]
        return tree_unflatten(leaves, self.structure)


def _cache_copied(value: Any) -> Any:
    """Return a copy of a cache with copied containers and the same tensors; else the value itself.

    A model appends to a cache by concatenation into new memory, so the tensors can be shared. The
    graph holds the arguments. It must not hold the caller's cache: tensors that the first run adds
    to the cache hold the graph, and the reference cycle would never be freed.
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
    """A call that drops its first arguments after use, and rebuilds them from tensors later."""

    def __init__(
        self, fn: Callable[..., Any], given: Arguments, tensors: _Tensors, kept: _Template
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
    """Return a function that rebuilds `fn` from the tensors in its closure and bound arguments."""
    if isinstance(fn, functools.partial):
        inner = _rebuilt(fn.func, tensors)
        bound = tensors.template_of((fn.args, fn.keywords))
        return lambda given: _partial(inner(given), *bound(given))
    if isinstance(fn, types.FunctionType):
        return _rebuilt_function(fn, tensors)
    return lambda given: fn


def _partial(fn: Callable[..., Any], args: Any, keywords: Any) -> Callable[..., Any]:
    return functools.partial(fn, *args, **keywords)


def _rebuilt_function(fn: types.FunctionType, tensors: _Tensors) -> Rebuild:
    defaults = tensors.template_of((fn.__defaults__, fn.__kwdefaults__))
    cells = [_rebuilt_cell(cell, tensors) for cell in fn.__closure__ or ()]
    if not defaults.holds_tensors and all(isinstance(cell, types.CellType) for cell in cells):
        return lambda given: fn  # no tensors: use it unchanged
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


def _rebuilt_cell(cell: types.CellType, tensors: _Tensors) -> types.CellType | _Template:
    """Return a template of a closure cell that contains tensors, or else the shared cell itself."""
    try:
        filled = tensors.template_of(cell.cell_contents)
    except ValueError:  # the cell is still empty
        return cell
    return filled if filled.holds_tensors else cell
