"""The forwards of modules in training: with their parameters, and perhaps to be computed again."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from tierstore.adapters.activations import ActivationOffload
from tierstore.adapters.training.regions import Region
from tierstore.adapters.training.slices import Slice
from tierstore.adapters.unit_use import Arguments, StandIn

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(eq=False)
class Pass:
    """One call of the whole module, which `enter` and `leave` are told of: a `UnitUse`."""

    enter: Callable[[], None]
    leave: Callable[[], None]
    inside: bool = False

    def begin(self) -> bool:
        """It begins."""
        self.inside = True
        self.enter()
        return True

    def finish(self, result: Any, given: Arguments) -> Any:
        """It ends. What it returns is as it was."""
        self.end()
        return result

    def end(self) -> None:
        """It ends. To be called again if it was interrupted."""
        if self.inside:
            self.inside = False
            self.leave()


Run = Callable[[StandIn, Any, Any], Any]
"""What a `StandIn` runs."""


def recomputed(module: nn.Module, aside: ActivationOffload) -> Run:
    """The forward of a module that is computed again in the backward pass."""
    region = Region([module], aside)
    return lambda forward, args, kwargs: region(forward.original, args, kwargs)


def chain(module: nn.Module, slices: list[Slice], aside: ActivationOffload) -> Run:
    """The forward of an `nn.Sequential` whose slices are computed again, each by itself."""
    children = list(module.children())
    ends = _ends(children, slices)
    parts = [children[a:b] for a, b in itertools.pairwise([0, *ends]) if children[a:b]]
    regions = [(Region(part, aside), functools.partial(_through, part)) for part in parts]

    def forward(given: Any) -> Any:
        for region, run in regions:
            given = region(run, (given,), {})
        return given

    return lambda _, args, kwargs: forward(*args, **kwargs)


def _through(modules: list[nn.Module], given: Any) -> Any:
    for module in modules:
        given = module(given)
    return given


def _ends(children: list[nn.Module], slices: list[Slice]) -> list[int]:
    """Behind which children of an `nn.Sequential` its slices end."""
    place = {id(part): i for i, child in enumerate(children) for part in child.modules()}
    last = [max((place.get(id(u.module), 0) for u in s.units), default=0) + 1 for s in slices]
    return sorted({*last[:-1], len(children)})


def regions_in(module: nn.Module) -> list[nn.Module]:
    """What is computed again, each by itself: the blocks of a model, which are in lists; of a model
    without any, its children, or else all of it."""
    found = list(_blocks(module))
    if not found:
        found = [child for child in module.children() if any(True for _ in child.children())]
    return found or [module]


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(module, _LISTS) and not isinstance(child, _LISTS):
            if any(True for _ in child.parameters()):
                yield child
        else:
            yield from _blocks(child)
