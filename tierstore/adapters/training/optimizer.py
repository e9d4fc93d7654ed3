"""The optimizer in RAM, over parameters, gradients and states that need not be there together.

It runs on the CPU, tile by tile: a tile is one group of parameters with their gradients and states.
While one is computed, the next one is read and the one before is written. What is computed is what
torch's own optimizer computes, by running it on the tensors of one tile at a time.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from tierstore.adapters.training.model import OffloadModel, model_of
from tierstore.adapters.training.places import Place, packed_bytes, rooms_of
from tierstore.adapters.training.weights import Weights
from tierstore.model.tiers import Hold
from tierstore.store import TierStore

MASTER = "master"
"""The name of the state that is a parameter in a higher precision."""

AHEAD = 2
"""Tiles that the store is told of in advance."""

_numbers = itertools.count()


class OffloadOptimizer(torch.optim.Optimizer):
    """An optimizer of torch whose state is in a store, on disk where RAM ends.

    Args:
        model_or_params: an `OffloadModel`, any other module, or parameters (or groups of them) as
            torch's optimizers take them. Parameters that are not in a store stay where they are;
            their states go to the store all the same.
        store: where states are.
        optimizer_class: a class like `torch.optim.AdamW` that treats every parameter by itself.
        master_dtype: keep every parameter of a lower precision in this one too, and let the
            optimizer work on that (`torch.float32`, for a model in bfloat16). It is a state, called
            "master".
        kwargs: what the class takes.

    It is used as torch's are: schedulers, groups of parameters, `state_dict` and `load_state_dict`
    in torch's own form, with states as CPU tensors that read as what they are. Every step gives
    what the class would give, to the last bit, with the same arguments.

    Raises TypeError or ValueError for arguments that cannot be, and what the class raises.
    """

    def __init__(
        self,
        model_or_params: Any,
        store: TierStore,
        optimizer_class: type[torch.optim.Optimizer],
        *,
        master_dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        _refuse_class(optimizer_class)
        self.store = store
        self.master_dtype = master_dtype
        # torch's optimizer itself, which is given the tensors of one tile after the other.
        self._inner = optimizer_class([nn.Parameter(torch.zeros(1))], **kwargs)
        self._key = f"optimizer/{next(_numbers)}"
        self._tiles: list[Tile] = []
        params = model_or_params
        if isinstance(model_or_params, nn.Module):
            params = model_or_params.parameters()
        super().__init__(params, dict(self._inner.defaults))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with arguments of their own."""
        super().add_param_group(param_group)
        known = {id(p) for tile in self._tiles for p in tile.parameters}
        fresh = [p for p in self.param_groups[-1]["params"] if id(p) not in known]
        self._cut(fresh)

    def _cut(self, parameters: list[nn.Parameter]) -> None:
        """Put parameters into tiles: those of an offloaded model as they are grouped there."""
        offloaded: dict[int, list[nn.Parameter]] = {}
        weights_of: dict[int, Weights] = {}
        rest: list[nn.Parameter] = []
        for parameter in parameters:
            model = model_of(parameter)
            weights = None if model is None else model.weights_of(parameter)
            if weights is None:
                rest.append(parameter)
            else:
                weights_of[id(weights)] = weights
                offloaded.setdefault(id(weights), []).append(parameter)
        for number, members in offloaded.items():
            self._tiles.append(Tile(self, members, weights_of[number]))
        rooms = rooms_of(self.store)
        for members in _portions(rest, rooms.target):
            rooms.expect(packed_bytes({str(i): p.detach() for i, p in enumerate(members)}))
            self._tiles.append(Tile(self, members, None))

    def new_key(self) -> str:
        """A key for the states of one more tile."""
        return f"{self._key}/{len(self._tiles)}"

    # Steps -------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one step. Gradients stay as they are. Raises what the class and the store raise."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._settle_down()
        busy = [tile for tile in self._tiles if tile.has_gradients()]
        try:
            for place, tile in enumerate(busy):
                self._expect(busy[place : place + 1 + AHEAD])
                tile.step(self._inner)
        finally:
            for tile in busy:
                tile.settle_down()
        return loss

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their norm, taken together, is at most `max_norm`.

        Returns the norm that they had. As `torch.nn.utils.clip_grad_norm_`, to the last bit; raises
        its RuntimeError if `error_if_nonfinite`.
        """
        self._settle_down()
        busy = [tile for tile in self._tiles if tile.has_gradients()]
        norms: dict[int, torch.Tensor] = {}
        for tile in busy:
            norms.update(tile.norms(norm_type))
        order = [norms[id(p)] for g in self.param_groups for p in g["params"] if id(p) in norms]
        if not order:
            return torch.tensor(0.0)
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(order), norm_type)
        if error_if_nonfinite and torch.logical_or(total.isnan(), total.isinf()):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from `parameters` is "
                "non-finite, so it cannot be clipped. To disable this error and scale the "
                "gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
            )
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        if scale != 1.0:  # by 1.0 nothing would change
            for tile in busy:
                tile.scale(scale)
        for tile in busy:
            tile.settle_down()
        return total

    def _settle_down(self) -> None:
        for model in {id(m): m for m in map(_model_of_tile, self._tiles) if m is not None}.values():
            model.settle_down()

    def _expect(self, tiles: Iterable[Tile]) -> None:
        places = [place for tile in tiles for place in tile.places() if not place.stays]
        for place in places:
            place.expected()
        if places:
            self.store.expect_in_ram(place.key for place in places)

    # State -------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the state that an optimizer of torch, or this one, has told."""
        # torch's own way would bring all states to where the parameters compute.
        super().load_state_dict({**state_dict, "state": {}})
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        ours = [p for group in self.param_groups for p in group["params"]]
        loaded = {
            id(parameter): self._as_loaded(state_dict["state"][number], parameter)
            for number, parameter in zip(numbers, ours, strict=True)
            if number in state_dict["state"]
        }
        self.state = defaultdict(dict)
        for tile in self._tiles:
            tile.load({id(p): loaded[id(p)] for p in tile.parameters if id(p) in loaded})
        for tile in self._tiles:
            tile.settle_down()

    def _as_loaded(self, state: dict[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
        """Values are given the dtype of the parameter, as torch does, unless it has a master."""
        return {
            name: value.detach().to("cpu", self._dtype_of(name, value, parameter))
            if isinstance(value, torch.Tensor)
            else value
            for name, value in state.items()
        }

    def _dtype_of(self, name: str, value: torch.Tensor, parameter: nn.Parameter) -> torch.dtype:
        has_master = self.master_dtype not in (None, parameter.dtype)
        if name == "step" or has_master or not parameter.is_floating_point():
            return value.dtype
        return parameter.dtype if value.is_floating_point() else value.dtype


class Tile:
    """Parameters that are stepped together, and the place of their states."""

    def __init__(
        self, optimizer: OffloadOptimizer, parameters: list[nn.Parameter], weights: Weights | None
    ) -> None:
        self.parameters = parameters
        self._weights = weights
        self._optimizer = optimizer
        self._by_id = {id(p): p for p in parameters}
        self._key = optimizer.new_key()
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

    # What is in RAM is passed from here to where it is used, and nobody keeps it any longer: memory
    # that somebody still looks at would be in RAM beside what takes its room.

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
        if shadow.dtype is not value.dtype:
            value.copy_(shadow)
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


def _model_of_tile(tile: Tile) -> OffloadModel | None:
    return model_of(tile.parameters[0]) if tile.weights is not None else None


def _portions(parameters: list[nn.Parameter], target: int) -> Iterator[list[nn.Parameter]]:
    """Parameters in portions of up to `target` bytes."""
    portion: list[nn.Parameter] = []
    nbytes = 0
    for parameter in parameters:
        size = packed_bytes({"": parameter.detach()})
        if portion and nbytes + size > target:
            yield portion
            portion, nbytes = [], 0
        portion.append(parameter)
        nbytes += size
    if portion:
        yield portion


def _refuse_class(optimizer_class: Any) -> None:
    if not (
        isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)
    ):
        raise TypeError(
            f"{optimizer_class!r} is no class of optimizers: pass one such as torch.optim.AdamW, "
            "and its arguments by name"
        )
    if issubclass(optimizer_class, (torch.optim.LBFGS, torch.optim.SparseAdam)):
        raise TypeError(
            f"{optimizer_class.__name__} cannot work on one part of the parameters after the other:"
            " use one that treats each parameter by itself, such as torch.optim.AdamW"
        )
