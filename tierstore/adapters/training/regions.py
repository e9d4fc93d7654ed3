"""Activation checkpointing: regions of a model that the backward pass recomputes.

For each *region*, only the inputs are saved, in the store: see `tierstore.checkpoint_activations`,
which is `torch.utils.checkpoint` in its non-reentrant form. That keeps autograd's own graph, and so
the order in which gradients accumulate. Recomputed tensors are freed as soon as the graph has used
them.
The first run is an ordinary call. Later runs use copies of the module buffers from before that
call, and copies of inputs that the region changes in place. So they compute the same values,
without side effects.
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
from tierstore.adapters.saved import other_hooks_active
from tierstore.adapters.training.slices import Slice
from tierstore.torch_private import tree_map

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)

SMALL = 64 << 10
"""Size in bytes below which the copy of a buffer is kept without a comparison.

On an accelerator, the comparison would have to wait for the device.
"""

Run = Callable[[MethodPatch, Any, Any], Any]
"""The replacement function of a `MethodPatch`."""


class Region:
    """Modules that are recomputed together. `offload` saves their inputs."""

    def __init__(self, modules: list[nn.Module], offload: ActivationOffload) -> None:
        self._modules = modules
        self._offload = offload
        self._inplace = any(
            getattr(part, "inplace", False) for m in modules for part in modules_of(m)
        )

    def __call__(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the modules by calling `run`, and checkpoint the call for backward."""
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        inputs = args, kwargs
        saved = tree_map(_copied, inputs) if self._inplace else inputs
        call = _RegionCall(self._modules, run, self._inplace)
        # Other saved-tensor hooks that are active save the inputs themselves.
        with contextlib.nullcontext() if other_hooks_active() else self._offload:
            return checkpointed(call, inputs, saved)


@dataclass(eq=False)
class _RegionCall:
    """One call of a region, which may be run again for its backward pass."""

    modules: list[nn.Module]
    run: Callable[..., Any]
    inplace: bool
    buffers: Buffers | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.buffers is not None:
            if self.inplace:  # the saved inputs may be needed for another run
                args, kwargs = tree_map(_copied, (args, kwargs))
            with self.buffers.restored():
                return self.run(*args, **kwargs)
        self.buffers = Buffers(self.modules)
        result = self.run(*args, **kwargs)
        self.buffers.drop_unchanged()
        return result


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


class Buffers:
    """A snapshot of module buffers, such as running statistics and spectral-norm vectors."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._before = [
            (module._buffers, name, buffer, None if buffer is None else buffer.clone())
            for part in modules
            for module in modules_of(part)
            for name, buffer in module._buffers.items()
        ]

    def drop_unchanged(self) -> None:
        """Drop the copies of large buffers that the first run did not change."""
        self._before = [
            (buffers, name, buffer, buffer if _same(buffer, before) else before)
            for buffers, name, buffer, before in self._before
        ]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Replace the modules' buffers by copies of the snapshot within the block."""
        now = [(buffers, name, buffers.get(name)) for buffers, name, _, _ in self._before]
        for buffers, name, _, before in self._before:
            buffers[name] = None if before is None else before.clone()
        try:
            yield
        finally:
            for buffers, name, buffer in now:
                buffers[name] = buffer


def _same(buffer: torch.Tensor | None, before: torch.Tensor | None) -> bool:
    # Compare values: writes through `.data` do not change the tensor's version.
    if buffer is None or before is None or not is_movable(before) or before.nbytes < SMALL:
        return False
    return torch.equal(buffer, before)


# Choice of regions --------------------------------------------------------------------------------


def recomputed(module: nn.Module, offload: ActivationOffload) -> Run:
    """Return a forward that makes a module a region."""
    region = Region([module], offload)
    return lambda forward, args, kwargs: region(forward.original, args, kwargs)


def chain(module: nn.Module, slices: list[Slice], offload: ActivationOffload) -> Run:
    """Return a forward that makes each slice of an `nn.Sequential` a region.

    It uses the children that the module has at the time of the call. If the class has another
    forward by then, that forward runs without checkpointing.
    """
    chained: list[nn.Module] = []
    regions: list[tuple[Region, Callable[..., Any]]] = []

    def divide(children: list[nn.Module]) -> None:
        ends = _slice_ends(children, slices)
        parts = [children[a:b] for a, b in itertools.pairwise([0, *ends]) if children[a:b]]
        regions[:] = [
            (Region(part, offload), functools.partial(_run_sequence, part)) for part in parts
        ]
        chained[:] = children

    def through_all(input: Any) -> Any:
        for region, run in regions:
            input = region(run, (input,), {})
        return input

    def run(forward: MethodPatch, args: Any, kwargs: Any) -> Any:
        if getattr(forward.unpatched, "__func__", None) is not nn.Sequential.forward:
            return forward.original(*args, **kwargs)
        children = [child for child in module._modules.values() if child is not None]
        if children != chained:
            divide(children)
        return through_all(*args, **kwargs)

    return run


def _run_sequence(modules: list[nn.Module], given: Any) -> Any:
    for module in modules:
        given = module(given)
    return given


def _slice_ends(children: list[nn.Module], slices: list[Slice]) -> list[int]:
    """Return the index after the last child of each slice of an `nn.Sequential`."""
    index = {id(part): i for i, child in enumerate(children) for part in modules_of(child)}
    last = [max((index.get(id(u.module), 0) for u in s.units), default=0) + 1 for s in slices]
    return sorted({*last[:-1], len(children)})


def regions_in(module: nn.Module) -> list[nn.Module]:
    """Return the modules to make regions: the blocks of a model, which are in module lists.

    Without module lists, these are the children that have children, or else the whole model.
    """
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
