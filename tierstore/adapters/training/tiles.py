"""One tile of an optimizer's work: some parameters, their gradients and their states.

What a tile works on is passed from where it is brought to RAM to where it is used, and nobody keeps
it any longer: memory that somebody still looks at would be in RAM beside what takes its room.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import nn

from tierstore.adapters.training.places import Place
from tierstore.adapters.training.weights import Weights
from tierstore.model.tiers import Hold
from tierstore.store import TierStore

MASTER = "master"
"""The name of the state that is a parameter in a higher precision."""


class Whole(Protocol):
    """What a tile knows of the optimizer that it is a part of."""

    store: TierStore
    master_dtype: torch.dtype | None
    param_groups: list[dict[str, Any]]
    state: Any


class Tile:
    """Parameters that are stepped together, and the place of their states."""

    def __init__(
        self,
        optimizer: Whole,
        key: str,
        parameters: list[nn.Parameter],
        weights: Weights | None,
    ) -> None:
        self.parameters = parameters
        self._weights = weights
        self._optimizer = optimizer
        self._by_id = {id(p): p for p in parameters}
        self._key = key
        self._keys = itertools.count()
        self._places: list[Place] = []
        self._where: dict[tuple[int, str], tuple[Place, str]] = {}
        self._names = {}
        if weights is not None:
            self._names = {id(p): name for name, p in weights.parameters.items()}

    @property
    def weights(self) -> Weights | None:
        """The group that the parameters are in; None if they are ordinary ones, or are so again."""
        return None if self._weights is None or self._weights.gone else self._weights

    def has_gradients(self) -> bool:
        """Whether there is anything to do."""
        return any(parameter.grad is not None for parameter in self.parameters)

    def places(self) -> Iterator[Place]:
        """Where what it works on is."""
        if self.weights is not None:
            yield self.weights.place
            if self.weights.gradients.place is not None:
                yield self.weights.gradients.place
        yield from self._places

    def settle_down(self) -> None:
        """Nobody works on it for now."""
        for place in self.places():
            place.settle_down()
        for place in self._places:
            place.ready()
        for (number, name), (place, inner) in self._where.items():
            self._optimizer.state[self._by_id[number]][name] = place.tensors[inner]

    def norms(self, norm_type: float) -> dict[int, torch.Tensor]:
        """The norm of each gradient, by the id of its parameter."""
        with ExitStack() as stack:
            return _norms(self._gradients(stack, Hold.READ), norm_type)

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply every gradient."""
        with ExitStack() as stack:
            _scale(self._gradients(stack, Hold.UPDATE), factor)

    def step(self, inner: torch.optim.Optimizer) -> None:
        """Have `inner` do its step on the tensors of this tile."""
        with ExitStack() as stack:
            self._step(
                inner,
                self._values(stack),
                self._gradients(stack, Hold.READ),
                {place: place.enter(stack, Hold.UPDATE) for place in self._places},
            )

    def load(self, states: dict[int, dict[str, Any]]) -> None:
        """Keep what was loaded."""
        large = {
            (number, name)
            for number, state in states.items()
            for name, value in state.items()
            if _is_large(value)
        }
        if large != self._where.keys():
            self._where.clear()
            while self._places:
                self._places.pop().discard()
        with ExitStack() as stack, torch.no_grad():
            self._keep(states, {place: place.enter(stack, Hold.UPDATE) for place in self._places})

    def _gradients(self, stack: ExitStack, purpose: Hold) -> dict[int, torch.Tensor]:
        """By the id of its parameter, each gradient: those in the store in RAM, and those that
        somebody else has given where they are."""
        found = {id(p): p.grad for p in self.parameters if p.grad is not None}
        place = None if self.weights is None else self.weights.gradients.place
        if place is not None:
            ours = {
                number: name
                for number, name in self._names.items()
                if number in found and found[number] is place.tensors.get(name)
            }
            if ours:
                tensors = place.enter(stack, purpose)
                found.update({number: tensors[name] for number, name in ours.items()})
        return found

    def _step(
        self,
        inner: torch.optim.Optimizer,
        values: dict[int, torch.Tensor],
        gradients: dict[int, torch.Tensor],
        held: dict[Place, dict[str, torch.Tensor]],
    ) -> None:
        shadows: dict[int, torch.Tensor] = {}
        inner.state = defaultdict(dict)
        for number, gradient in gradients.items():
            state = self._state_of(number, held)
            shadow = self._worked_on(values[number], state)
            shadow.grad = gradient.to(dtype=shadow.dtype, device=shadow.device)
            shadows[number] = shadow
            if state:
                inner.state[shadow] = state
        groups = self._optimizer.param_groups
        inner.param_groups = [
            {**group, "params": [shadows[id(p)] for p in group["params"] if id(p) in shadows]}
            for group in groups
        ]
        # Not its wrapper, which tells those who listen of a step: this is a part of one.
        step: Any = type(inner).step
        getattr(step, "__wrapped__", step)(inner)
        for group, done in zip(groups, inner.param_groups, strict=True):
            group.update({name: value for name, value in done.items() if name != "params"})
        states = {number: dict(inner.state[shadow]) for number, shadow in shadows.items()}
        for number, shadow in shadows.items():
            self._give_back(number, shadow.detach(), values[number], states[number])
        self._keep(states, held)
        inner.state = defaultdict(dict)
        inner.param_groups = []

    def _state_of(self, number: int, held: dict[Place, dict[str, torch.Tensor]]) -> dict[str, Any]:
        state = dict(self._optimizer.state.get(self._by_id[number], {}))
        for name in state:
            where = self._where.get((number, name))
            if where is not None:
                state[name] = held[where[0]][where[1]]
        return state

    def _worked_on(self, value: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        """What the optimizer is to change: the value, or its master."""
        master = self._optimizer.master_dtype
        if master is not None and value.dtype is not master:
            value = state.pop(MASTER, None) if MASTER in state else value.to(master)
        return value.detach().requires_grad_()

    def _give_back(
        self, number: int, shadow: torch.Tensor, value: torch.Tensor, state: dict[str, Any]
    ) -> None:
        parameter = self._by_id[number]
        if shadow.data_ptr() != value.data_ptr():  # a master, or the optimizer gave it new memory
            value.copy_(shadow)
        if shadow.dtype is not value.dtype:
            state[MASTER] = shadow
        if value.device != parameter.device and self.weights is None:
            parameter.copy_(value)
        torch.autograd.graph.increment_version(parameter)

    def _values(self, stack: ExitStack) -> dict[int, torch.Tensor]:
        """By parameter: its value on the CPU, to be changed."""
        if self.weights is None:
            return {id(p): p.detach().cpu() for p in self.parameters}
        tensors = self.weights.place.enter(stack, Hold.UPDATE)
        return {id(p): tensors[self._names[id(p)]] for p in self.parameters}

    def _keep(
        self, states: dict[int, dict[str, Any]], held: dict[Place, dict[str, torch.Tensor]]
    ) -> None:
        """Keep what a step has left: what is as large as its parameter, in the store."""
        fresh: dict[tuple[int, str], torch.Tensor] = {}
        for number, state in states.items():
            for name, value in state.items():
                where = self._where.get((number, name))
                if where is not None:
                    target = held[where[0]][where[1]]
                    if value.data_ptr() != target.data_ptr():
                        target.copy_(value)
                elif _is_large(value):
                    fresh[number, name] = value
                else:
                    self._optimizer.state[self._by_id[number]][name] = value
        if fresh:
            self._store(fresh)

    def _store(self, fresh: dict[tuple[int, str], torch.Tensor]) -> None:
        index = {id(p): i for i, p in enumerate(self.parameters)}
        named = {f"{index[number]}.{name}": t for (number, name), t in fresh.items()}
        key = f"{self._key}/{next(self._keys)}"
        place = Place(self._optimizer.store, key, named)
        self._places.append(place)
        for number, name in fresh:
            self._where[number, name] = place, f"{index[number]}.{name}"


def _norms(gradients: dict[int, torch.Tensor], norm_type: float) -> dict[int, torch.Tensor]:
    return {n: torch.linalg.vector_norm(g, norm_type).cpu() for n, g in gradients.items()}


def _scale(gradients: dict[int, torch.Tensor], factor: torch.Tensor) -> None:
    for gradient in gradients.values():
        gradient.mul_(factor.to(gradient.device))


def _is_large(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.device.type == "cpu"
