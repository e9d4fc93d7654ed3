"""The forwards of modules in training: with their parameters, and perhaps to be computed again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import nn

from tierstore.adapters.activations import ActivationOffload
from tierstore.adapters.training.regions import Region
from tierstore.adapters.training.slices import Slice
from tierstore.adapters.wrapping import StandIn

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


class Called(Protocol):
    """A model that wants to know of its calls."""

    def enter(self) -> None:
        """A call begins."""

    def leave(self) -> None:
        """It ends."""


class Pass:
    """One call of the whole module."""

    def __init__(self, model: Called) -> None:
        self._model: Called | None = model
        self._inside = False

    def begin(self) -> None:
        """It begins."""
        assert self._model is not None
        self._inside = True
        self._model.enter()

    def end(self) -> None:
        """It ends. To be called again if it was interrupted."""
        if self._inside:
            self._inside = False
            assert self._model is not None
            self._model.leave()


class Trained(StandIn):
    """The forward of a module in training: `visit()` is begun before each call, and ended after."""

    def __init__(self, module: nn.Module, visit: Callable[[], Any]) -> None:
        self._visit: Callable[[], Any] | None = visit
        super().__init__(module, "forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._visit is None:
            return self.original(*args, **kwargs)
        visit = self._visit()
        try:
            visit.begin()
            return self.original(*args, **kwargs)
        finally:
            try:
                visit.end()
            except BaseException:  # an interrupt in the middle of putting back: do it again
                visit.end()
                raise

    def remove(self) -> None:
        self._visit = None
        super().remove()


class Recomputed(StandIn):
    """The forward of a module that is computed again in the backward pass."""

    def __init__(self, module: nn.Module, aside: ActivationOffload) -> None:
        super().__init__(module, "forward")
        self._region: Callable[..., Any] | None = Region([module], self.original, aside)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._region or self.original)(*args, **kwargs)

    def remove(self) -> None:
        self._region = None
        super().remove()


class Chain(StandIn):
    """The forward of an `nn.Sequential`, slice by slice."""

    def __init__(self, module: nn.Module, parts: list[Callable[..., Any]]) -> None:
        self._parts = parts
        super().__init__(module, "forward")

    def __call__(self, given: Any) -> Any:
        if not self._parts:
            return self.original(given)
        for part in self._parts:
            given = part(given)
        return given

    def remove(self) -> None:
        self._parts = []
        super().remove()


def _through(modules: list[nn.Module]) -> Callable[[Any], Any]:
    def run(given: Any) -> Any:
        for module in modules:
            given = module(given)
        return given

    return run


def chain(
    module: nn.Module, slices: list[Slice], aside: ActivationOffload
) -> list[Callable[..., Any]]:
    """The slices of an `nn.Sequential`, as regions."""
    children = list(module.children())
    ends = _ends(children, slices)
    parts = [children[a:b] for a, b in itertools.pairwise([0, *ends]) if children[a:b]]
    return [Region(part, _through(part), aside) for part in parts]


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
