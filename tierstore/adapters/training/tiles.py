"""One tile of an optimizer's work: some parameters, their gradients and their states.

What a tile works on is passed from where it is brought to RAM to where it is used, and nobody keeps
it any longer: memory that somebody still looks at would be in RAM beside what takes its room.
"""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from tierstore.adapters.codecs.memory import address_of, span
from tierstore.adapters.training.sharded import distributed_like, local_part, memory_of, norm_of
from tierstore.adapters.training.state_buffers import StateBuffer
from tierstore.adapters.training.weights import Weights
from tierstore.model.tiers import HostAccess
from tierstore.store import TierStore

MASTER = "master"
"""The name of the state that is a parameter in a higher precision."""
PIECE = 1 << 18
"""Numbers that are compared at a time."""


class TiledOptimizer(Protocol):
    """What a tile knows of the optimizer that it is a part of."""

    store: TierStore
    master_dtype: torch.dtype | None
    state: Any


class StepPart(NamedTuple):
    """What parameters must have in common for one step: their group, whether its kernel is fused,
    and, if so, whether they have states. (A fused SGD wants them of all, or of none.)"""

    group: int
    fused: bool = False
    begun: bool = False


def fits_a_fused_step(parameter: torch.Tensor, state: dict[str, Any]) -> bool:
    """Whether a fused kernel can step it. It goes through memory as it lies, whatever strides are,
    and believes that all is of one dtype."""
    assert parameter.grad is not None
    large = [value for value in state.values() if _is_large(value)]
    return parameter.is_floating_point() and all(
        each.layout is torch.strided
        and each.dtype is parameter.dtype
        and each.stride() == parameter.stride()
        and (not each.numel() or span(each) == each.nbytes)
        for each in (parameter, parameter.grad, *large)
    )


class TileGroups:
    """The groups of an optimizer during one step.

    What a group says besides its parameters (a rate, a counter) is taken once, before the step.
    Each part of the step is given a copy of it, and what it leaves counts after the last part: so
    a counter counts steps, not parts.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self._groups = groups
        self._before = [_without_parameters(group) for group in groups]
        self._after: dict[int, dict[str, Any]] = {}
        self._order = {
            id(parameter): (number, index)
            for number, group in enumerate(groups)
            for index, parameter in enumerate(group["params"])
        }

    def step(self, inner: torch.optim.Optimizer, stand_ins: dict[int, torch.Tensor]) -> None:
        """Have `inner` do its step on what stands for some of the parameters, by their ids."""
        members: dict[StepPart, list[torch.Tensor]] = {}
        still_there = filter(self._order.__contains__, stand_ins)
        for parameter in sorted(still_there, key=self._order.__getitem__):
            number, stand_in = self._order[parameter][0], stand_ins[parameter]
            state = inner.state.get(stand_in, {})
            fused = bool(self._before[number].get("fused")) and fits_a_fused_step(stand_in, state)
            begun = fused and any(isinstance(value, torch.Tensor) for value in state.values())
            part = StepPart(number, fused, begun)
            members.setdefault(part, []).append(stand_in)
        self._run(inner, members)

    def finish(self, inner: torch.optim.Optimizer) -> None:
        """All parts are done. Groups without any gradient still have their turn, as in torch."""
        idle = {
            StepPart(number): list(group["params"])
            for number, group in enumerate(self._groups)
            if number not in self._after
        }
        if idle:
            self._run(inner, idle)
        for number, left in self._after.items():
            before = self._before[number]
            for name, value in left.items():
                if name not in before or not _same(before[name], value):
                    self._groups[number][name] = value

    def _run(
        self, inner: torch.optim.Optimizer, members: dict[StepPart, list[torch.Tensor]]
    ) -> None:
        parts = sorted(members)
        inner.param_groups = [
            {**_copied(self._before[part.group]), "params": members[part]} for part in parts
        ]
        for part, group in zip(parts, inner.param_groups, strict=True):
            if group.get("fused") and not part.fused:
                group["fused"] = None
        # Not its wrapper, which tells those who listen of a step: this is a part of one.
        step: Any = type(inner).step
        getattr(step, "__wrapped__", step)(inner)
        done, inner.param_groups = inner.param_groups, []
        for part, group in zip(parts, done, strict=True):
            left = _without_parameters(group)
            if "fused" in left:
                left["fused"] = self._before[part.group]["fused"]
            if not _same(self._after.setdefault(part.group, left), left):
                raise TypeError(
                    f"{type(inner).__name__} computes something from all parameters of a group "
                    "together, but is given one part of them after the other; this step was given "
                    "up halfway. Use one that treats each parameter by itself, such as "
                    "torch.optim.AdamW"
                )


class Tile:
    """Parameters that are stepped together, and the place of their states."""

    def __init__(
        self,
        optimizer: TiledOptimizer,
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
        self.state_buffers: list[StateBuffer] = []
        self._where: dict[tuple[int, str], tuple[StateBuffer, str]] = {}
        # What the optimizer's state was given to show it. Another tensor there is somebody else's.
        self._shown: dict[tuple[int, str], torch.Tensor] = {}
        self._names = {}
        if weights is not None:
            self._names = {id(p): name for name, p in weights.parameters.items()}

    @property
    def weights(self) -> Weights | None:
        """The group that the parameters are in; None if they are ordinary ones, or are so again."""
        return None if self._weights is None or self._weights.detached else self._weights

    def has_gradients(self) -> bool:
        """Whether there is anything to do."""
        return any(parameter.grad is not None for parameter in self.parameters)

    def buffers(self) -> Iterator[StateBuffer]:
        """Where what it works on is."""
        if self.weights is not None:
            if isinstance(self.weights.buffer, StateBuffer):
                yield self.weights.buffer
            if self.weights.gradients.buffer is not None:
                yield self.weights.gradients.buffer
        yield from self.state_buffers

    def put_away(self) -> None:
        """Nobody works on it for now."""
        for buffer in self.buffers():
            buffer.put_away()
        for buffer in self.state_buffers:
            buffer.ready()
        for number, name in self._where:
            self._show(number, name)
        used = {buffer for buffer, _ in self._where.values()}
        while unused := [buffer for buffer in self.state_buffers if buffer not in used]:
            self.state_buffers.remove(unused[0])
            unused[0].discard()

    def _show(self, number: int, name: str) -> None:
        """Let the optimizer's state show what is stored, unless somebody removed or replaced it."""
        key, parameter = (number, name), self._by_id[number]
        shown = self._shown.get(key)
        if shown is not None:
            state = self._optimizer.state.get(parameter, {})
            if state.get(name) is not shown:
                return
        buffer, inner = self._where[key]
        tensor = self._shown[key] = distributed_like(parameter, buffer.tensors[inner])
        self._optimizer.state[parameter][name] = tensor

    def norms(self, norm_type: float) -> dict[int, torch.Tensor]:
        """The norm of each gradient, by the id of its parameter."""
        with ExitStack() as stack:
            return {
                number: norm_of(self._by_id[number], gradient, norm_type)
                for number, gradient in self._gradients(stack, HostAccess.READ).items()
            }

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply every gradient."""
        with ExitStack() as stack:
            _scale(self._gradients(stack, HostAccess.UPDATE), factor)

    def step(self, inner: torch.optim.Optimizer, groups: TileGroups) -> None:
        """Have `inner` do its step on the tensors of this tile."""
        with ExitStack() as stack:
            self._step(
                inner,
                groups,
                self._values(stack),
                self._gradients(stack, HostAccess.READ),
                {buffer: buffer.enter(stack, HostAccess.UPDATE) for buffer in self.state_buffers},
            )

    def load(self, states: dict[int, dict[str, Any]]) -> None:
        """Keep what was loaded."""
        if _large_ones(states).keys() != self._where.keys():
            self._forget_states()
        with ExitStack() as stack, torch.no_grad():
            held = {b: b.enter(stack, HostAccess.UPDATE) for b in self.state_buffers}
            self._store_states(states, held)

    def lay_out(self, states: dict[int, dict[str, Any]]) -> None:
        """Keep what is small, and make room for what is as large as its parameter."""
        large = _large_ones(states)
        shown = {key: buffer.tensors[name] for key, (buffer, name) in self._where.items()}
        if large.keys() != shown.keys() or not all(_is_like(shown[k], large[k]) for k in large):
            self._forget_states()
            if large:
                self._create_buffer(large, with_values=False)
        self._shown.clear()
        for number, state in states.items():
            small = {name: value for name, value in state.items() if (number, name) not in large}
            self._optimizer.state[self._by_id[number]].update(small)

    def _forget_states(self) -> None:
        self._where.clear()
        self._shown.clear()
        while self.state_buffers:
            self.state_buffers.pop().discard()

    def _gradients(self, stack: ExitStack, purpose: HostAccess) -> dict[int, torch.Tensor]:
        """By the id of its parameter, each gradient: those in the store in RAM, and those that
        somebody else has given where they are."""
        found = {id(p): memory_of(p.grad) for p in self.parameters if p.grad is not None}
        gradients = None if self.weights is None else self.weights.gradients
        buffer = None if gradients is None else gradients.buffer
        if gradients is not None and buffer is not None:
            ours = {
                number: name
                for number, name in self._names.items()
                if number in found and self._by_id[number].grad is gradients.shown_as(name)
            }
            if ours:
                tensors = buffer.enter(stack, purpose)
                found.update({number: tensors[name] for number, name in ours.items()})
        return found

    def _step(
        self,
        inner: torch.optim.Optimizer,
        groups: TileGroups,
        values: dict[int, torch.Tensor],
        gradients: dict[int, torch.Tensor],
        held: dict[StateBuffer, dict[str, torch.Tensor]],
    ) -> None:
        shadows: dict[int, torch.Tensor] = {}
        inner.state = defaultdict(dict)
        for number, gradient in gradients.items():
            state = self._state_of(number, held)
            shadow = self._worked_on(values[number], state)
            _give_gradient(shadow, gradient, values[number].dtype)
            shadows[number] = shadow
            if state:
                inner.state[shadow] = state
        groups.step(inner, shadows)
        states = {number: dict(inner.state[shadow]) for number, shadow in shadows.items()}
        for number, shadow in shadows.items():
            self._give_back(number, shadow.detach(), values[number], states[number])
        self._store_states(states, held)
        inner.state = defaultdict(dict)

    def _state_of(
        self, number: int, held: dict[StateBuffer, dict[str, torch.Tensor]]
    ) -> dict[str, Any]:
        state = dict(self._optimizer.state.get(self._by_id[number], {}))
        for name, value in state.items():
            shown = self._shown.get((number, name))
            if shown is not None and value is shown:  # what else is there, somebody assigned
                buffer, inner = self._where[number, name]
                state[name] = held[buffer][inner]
            elif isinstance(value, torch.Tensor):
                state[name] = local_part(self._by_id[number], value)
        return state

    def _worked_on(self, value: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        """What the optimizer is to change: the value, or its master."""
        master = self._optimizer.master_dtype
        if master is not None and value.dtype is not master:
            value = _up_to_date(state.pop(MASTER), value) if MASTER in state else value.to(master)
        return value.detach().requires_grad_()

    def _give_back(
        self, number: int, shadow: torch.Tensor, value: torch.Tensor, state: dict[str, Any]
    ) -> None:
        parameter = self._by_id[number]
        if address_of(shadow) != address_of(value):  # a master, or the optimizer gave it new memory
            value.copy_(shadow)
        if shadow.dtype is not value.dtype:
            state[MASTER] = shadow
        memory = memory_of(parameter)
        if value.device != memory.device and self.weights is None:
            memory.copy_(value)
        torch.autograd.graph.increment_version(memory)

    def _values(self, stack: ExitStack) -> dict[int, torch.Tensor]:
        """By parameter: its value on the CPU, to be changed."""
        if self.weights is None:
            return {id(p): memory_of(p).detach().cpu() for p in self.parameters}
        self.weights.become_state()  # somebody gave a frozen parameter a gradient
        assert isinstance(self.weights.buffer, StateBuffer)
        tensors = self.weights.buffer.enter(stack, HostAccess.UPDATE)
        return {id(p): tensors[self._names[id(p)]] for p in self.parameters}

    def _store_states(
        self, states: dict[int, dict[str, Any]], held: dict[StateBuffer, dict[str, torch.Tensor]]
    ) -> None:
        """Keep what a step has left: what is as large as its parameter, in the store."""
        fresh: dict[tuple[int, str], torch.Tensor] = {}
        for number, state in states.items():
            for name, value in state.items():
                where = self._where.get((number, name))
                self._shown.pop((number, name), None)
                if where is not None and _is_like(held[where[0]][where[1]], value):
                    target = held[where[0]][where[1]]
                    if address_of(value) != address_of(target):
                        target.copy_(value)
                elif _is_large(value):
                    fresh[number, name] = value
                else:
                    self._where.pop((number, name), None)
                    self._optimizer.state[self._by_id[number]][name] = value
        if fresh:
            self._create_buffer(fresh)

    def _create_buffer(
        self, fresh: dict[tuple[int, str], torch.Tensor], *, with_values: bool = True
    ) -> None:
        index = {id(p): i for i, p in enumerate(self.parameters)}
        named = {f"{index[number]}.{name}": t for (number, name), t in fresh.items()}
        key = f"{self._key}/{next(self._keys)}"
        buffer = StateBuffer(self._optimizer.store, key, named, with_values=with_values)
        self.state_buffers.append(buffer)
        for number, name in fresh:
            self._where[number, name] = buffer, f"{index[number]}.{name}"


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _copied(group: dict[str, Any]) -> dict[str, Any]:
    """A copy of what a group says, with copies of what may be changed in buffer."""
    copies = {}
    for name, value in group.items():
        if isinstance(value, torch.Tensor):
            value = value.detach().clone()
        elif isinstance(value, (dict, list, set)):
            value = copy.copy(value)
        copies[name] = value
    return copies


def _same(left: Any, right: Any) -> bool:
    """Whether two values of a group are equal, also if they are tensors, or no numbers."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.shape == right.shape and not bool(_unlike(left, right).any())
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[n], right[n]) for n in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(_same, left, right))
    return bool(left == right or (left != left and right != right))


def _unlike(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Where they differ. What is no number is like itself."""
    return (left != right) & ~(left.isnan() & right.isnan())


def _up_to_date(master: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A master with what somebody has changed in the value since.

    Each step leaves the value as the rounded master. Where it is something else, it was changed.
    """
    for exact, now in zip(_pieces(master), _pieces(value), strict=True):
        rounded = exact.to(now.dtype)
        if not torch.equal(rounded, now):
            exact.copy_(torch.where(_unlike(rounded, now), now.to(exact.dtype), exact))
    return master


def _pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views of all of it, small enough that work on them stays in the processor's caches."""
    rows: torch.Tensor = torch.atleast_1d(tensor)
    pieces: tuple[torch.Tensor, ...] = rows.split(max(PIECE * len(rows) // max(rows.numel(), 1), 1))
    return pieces


def _give_gradient(shadow: torch.Tensor, gradient: torch.Tensor, of_value: torch.dtype) -> None:
    """A master has gradients of its own dtype; any other has them as they are."""
    dtype = gradient.dtype if shadow.dtype is of_value else shadow.dtype
    if dtype is not shadow.dtype:
        stand_in: Any = shadow  # torch before 2.9 has no grad_dtype, and never comes here
        stand_in.grad_dtype = dtype
    shadow.grad = gradient.to(dtype=dtype, device=shadow.device)


def _is_like(target: torch.Tensor, value: Any) -> bool:
    return _is_large(value) and value.shape == target.shape and value.dtype is target.dtype


def _scale(gradients: dict[int, torch.Tensor], factor: torch.Tensor) -> None:
    for gradient in gradients.values():
        gradient.mul_(factor.to(gradient.device))


def _large_ones(states: dict[int, dict[str, Any]]) -> dict[tuple[int, str], torch.Tensor]:
    named = ((number, *item) for number, state in states.items() for item in state.items())
    return {(number, name): value for number, name, value in named if _is_large(value)}


def _is_large(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.device.type == "cpu"
