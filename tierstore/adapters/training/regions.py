"""Parts of a model that are computed again in the backward pass.

Of a *region* only what it was given is kept, in the store: see `tierstore.checkpoint_activations`,
which is `torch.utils.checkpoint` in its non-reentrant form. That keeps autograd's own graph, and so
the order in which gradients are added up; what is computed again goes as soon as the graph has used
it.
The first run is an ordinary call. Later runs work on copies of the buffers as they were before it,
and of what the region changes in place: what they compute is the same, and they change nothing.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tierstore.adapters.activations import ActivationOffload
from tierstore.adapters.checkpointing import checkpointed
from tierstore.adapters.codecs import is_movable
from tierstore.adapters.contents import children_of, modules_of, parameters_of
from tierstore.adapters.forward import MethodPatch
from tierstore.adapters.saved import other_hooks_are_on
from tierstore.adapters.training.slices import Slice
from tierstore.torch_private import tree_map

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)

SMALL = 64 << 10
"""Bytes of a buffer whose copy is kept without asking whether the buffer has changed: on an
accelerator, the answer has to be waited for."""

Run = Callable[[MethodPatch, Any, Any], Any]
"""What a `MethodPatch` runs."""


class Region:
    """Modules that are computed again together. `offload` keeps what they were given."""

    def __init__(self, modules: list[nn.Module], offload: ActivationOffload) -> None:
        self._modules = modules
        self._offload = offload
        self._inplace = any(
            getattr(part, "inplace", False) for m in modules for part in modules_of(m)
        )

    def __call__(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What `run`, which computes the modules, returns."""
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        given = args, kwargs
        kept = tree_map(_copied, given) if self._inplace else given
        again = _Runs(self._modules, run, self._inplace)
        # If somebody else's hooks are on, they see to what is given.
        with contextlib.nullcontext() if other_hooks_are_on() else self._offload:
            return checkpointed(again, given, kept)


@dataclass(eq=False)
class _Runs:
    """One call of a region: computed once, and later again."""

    modules: list[nn.Module]
    run: Callable[..., Any]
    inplace: bool
    buffers: Buffers | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.buffers is not None:
            if self.inplace:  # what is kept may be wanted once more
                args, kwargs = tree_map(_copied, (args, kwargs))
            with self.buffers.put_back():
                return self.run(*args, **kwargs)
        self.buffers = Buffers(self.modules)
        result = self.run(*args, **kwargs)
        self.buffers.keep_changed()
        return result


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


class Buffers:
    """The buffers of modules (statistics, the vectors of a spectral norm), as they are now."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._before = [
            (module._buffers, name, buffer, None if buffer is None else buffer.clone())
            for part in modules
            for module in modules_of(part)
            for name, buffer in module._buffers.items()
        ]

    def keep_changed(self) -> None:
        """The first run is over: large buffers that it did not change need no copy."""
        self._before = [
            (buffers, name, buffer, buffer if _same(buffer, before) else before)
            for buffers, name, buffer, before in self._before
        ]

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """The modules have copies of what they had then, for as long as this lasts."""
        now = [(buffers, name, buffers.get(name)) for buffers, name, _, _ in self._before]
        for buffers, name, _, before in self._before:
            buffers[name] = None if before is None else before.clone()
        try:
            yield
        finally:
            for buffers, name, buffer in now:
                buffers[name] = buffer


def _same(buffer: torch.Tensor | None, before: torch.Tensor | None) -> bool:
    # Values are compared: what is written through `.data` has no version.
    if buffer is None or before is None or not is_movable(before) or before.nbytes < SMALL:
        return False
    return torch.equal(buffer, before)


# What is computed again ---------------------------------------------------------------------------


def recomputed(module: nn.Module, offload: ActivationOffload) -> Run:
    """The forward of a module that is computed again in the backward pass."""
    region = Region([module], offload)
    return lambda forward, args, kwargs: region(forward.original, args, kwargs)


def chain(module: nn.Module, slices: list[Slice], offload: ActivationOffload) -> Run:
    """The forward of an `nn.Sequential` whose slices are computed again, each by itself.

    It is that of the children that the module has when it is called. Under another forward, which
    its class was given since, nothing is computed again.
    """
    chained: list[nn.Module] = []
    regions: list[tuple[Region, Callable[..., Any]]] = []

    def divide(children: list[nn.Module]) -> None:
        ends = _ends(children, slices)
        parts = [children[a:b] for a, b in itertools.pairwise([0, *ends]) if children[a:b]]
        regions[:] = [(Region(part, offload), functools.partial(_through, part)) for part in parts]
        chained[:] = children

    def through_all(input: Any) -> Any:
        for region, run in regions:
            input = region(run, (input,), {})
        return input

    def run(forward: MethodPatch, args: Any, kwargs: Any) -> Any:
        if getattr(forward.ordinary, "__func__", None) is not nn.Sequential.forward:
            return forward.original(*args, **kwargs)
        children = [child for child in module._modules.values() if child is not None]
        if children != chained:
            divide(children)
        return through_all(*args, **kwargs)

    return run


def _through(modules: list[nn.Module], given: Any) -> Any:
    for module in modules:
        given = module(given)
    return given


def _ends(children: list[nn.Module], slices: list[Slice]) -> list[int]:
    """Behind which children of an `nn.Sequential` its slices end."""
    index = {id(part): i for i, child in enumerate(children) for part in modules_of(child)}
    last = [max((index.get(id(u.module), 0) for u in s.units), default=0) + 1 for s in slices]
    return sorted({*last[:-1], len(children)})


def regions_in(module: nn.Module) -> list[nn.Module]:
    """What is computed again, each by itself: the blocks of a model, which are in lists; of a model
    without any, its children, or else all of it."""
    found = list(_blocks(module))
    if not found:
        found = [child for child in children_of(module) if children_of(child)]
    return found or [module]


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in children_of(module):
        if isinstance(module, _LISTS) and not isinstance(child, _LISTS):
            if parameters_of(child):
                yield child
        else:
            yield from _blocks(child)
