"""One tile of an optimizer step: some parameters, their gradients and their states.

Leased tensors are passed as arguments and never stored: a tensor that outlives its lease would keep
its memory resident beside the memory that replaces it.
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
"""Name of the state that holds the master copy of a parameter."""
PIECE = 1 << 18
"""Elements compared at a time."""


class TiledOptimizer(Protocol):
    """The optimizer interface that a tile uses."""

    store: TierStore
    master_dtype: torch.dtype | None
    state: Any


class StepPart(NamedTuple):
    """The properties that parameters of one optimizer call must share.

    `group` is the index of their parameter group. `fused` is True for a fused kernel. Then
    `has_state` matters too, because fused SGD accepts states of all parameters or of none.
    """

    group: int
    fused: bool = False
    has_state: bool = False


def can_step_fused(parameter: torch.Tensor, state: dict[str, Any]) -> bool:
    """Return True if a fused kernel can step a parameter with this state.

    Fused kernels ignore strides and assume one dtype, so all tensors must be dense in memory, with
    equal strides and dtypes.
    """
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
    """The parameter groups of an optimizer during one step.

    The options of each group (learning rate, counters) are read once, before the step. Each part of
    the step receives a copy of them, and changes are applied after the last part, so that a counter
    counts steps, not parts.
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

    def step(self, inner: torch.optim.Optimizer, substitutes: dict[int, torch.Tensor]) -> None:
        """Run `inner.step` on substitutes for some of the parameters, given by parameter id."""
        members: dict[StepPart, list[torch.Tensor]] = {}
        present = filter(self._order.__contains__, substitutes)
        for parameter in sorted(present, key=self._order.__getitem__):
            number, substitute = self._order[parameter][0], substitutes[parameter]
            state = inner.state.get(substitute, {})
            fused = bool(self._before[number].get("fused")) and can_step_fused(substitute, state)
            has_state = fused and any(isinstance(value, torch.Tensor) for value in state.values())
            part = StepPart(number, fused, has_state)
            members.setdefault(part, []).append(substitute)
        self._run(inner, members)

    def finish(self, inner: torch.optim.Optimizer) -> None:
        """Apply changed options after the last part.

        Groups without gradients are stepped first, as torch does.
        """
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
        # Bypass torch's step wrapper, which runs step hooks: this is only part of a step.
        step: Any = type(inner).step
        getattr(step, "__wrapped__", step)(inner)
        done, inner.param_groups = inner.param_groups, []
        for part, group in zip(parts, done, strict=True):
            left = _without_parameters(group)
            if "fused" in left:
                left["fused"] = self._before[part.group]["fused"]
            if not _same(self._after.setdefault(part.group, left), left):
                raise TypeError(
                    f"{type(inner).__name__} computes a value over all parameters of a group, but "
                    "steps them in parts; this step was aborted halfway. Use an optimizer that "
                    "updates each parameter independently, such as torch.optim.AdamW"
                )


class Tile:
    """Parameters that are stepped together, and the buffers that hold their states."""

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
        # Tensors bound in the optimizer's state. Any other tensor there was assigned by the user.
        self._bound: dict[tuple[int, str], torch.Tensor] = {}
        self._names = {}
        if weights is not None:
            self._names = {id(p): name for name, p in weights.parameters.items()}

    @property
    def weights(self) -> Weights | None:
        """The group of the parameters; None if they are not (or no longer) in an OffloadModel."""
        return None if self._weights is None or self._weights.detached else self._weights

    def has_gradients(self) -> bool:
        """Return True if any parameter has a gradient, so the tile must be stepped."""
        return any(parameter.grad is not None for parameter in self.parameters)

    def buffers(self) -> Iterator[StateBuffer]:
        """Yield the buffers that the tile reads or writes."""
        if self.weights is not None:
            if isinstance(self.weights.buffer, StateBuffer):
                yield self.weights.buffer
            if self.weights.gradients.buffer is not None:
                yield self.weights.gradients.buffer
        yield from self.state_buffers

    def flush(self) -> None:
        """Write the tile back, rebind the optimizer's states, and discard unused state buffers."""
        for buffer in self.buffers():
            buffer.flush()
        for buffer in self.state_buffers:
            buffer.ready()
        for number, name in self._where:
            self._bind(number, name)
        used = {buffer for buffer, _ in self._where.values()}
        while unused := [buffer for buffer in self.state_buffers if buffer not in used]:
            self.state_buffers.remove(unused[0])
            unused[0].discard()

    def _bind(self, number: int, name: str) -> None:
        """Bind an entry of the optimizer's state, unless the user removed or replaced it."""
        key, parameter = (number, name), self._by_id[number]
        bound = self._bound.get(key)
        if bound is not None:
            state = self._optimizer.state.get(parameter, {})
            if state.get(name) is not bound:
                return
        buffer, inner = self._where[key]
        tensor = self._bound[key] = distributed_like(parameter, buffer.tensors[inner])
        self._optimizer.state[parameter][name] = tensor

    def norms(self, norm_type: float) -> dict[int, torch.Tensor]:
        """Return the norm of each gradient, by parameter id."""
        with ExitStack() as stack:
            return {
                number: norm_of(self._by_id[number], gradient, norm_type)
                for number, gradient in self._gradients(stack, HostAccess.READ).items()
            }

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply every gradient by `factor`."""
        with ExitStack() as stack:
            _scale(self._gradients(stack, HostAccess.UPDATE), factor)

    def step(self, inner: torch.optim.Optimizer, groups: TileGroups) -> None:
        """Run `inner.step` on the tensors of this tile."""
        with ExitStack() as stack:
            self._step(
                inner,
                groups,
                self._values(stack),
                self._gradients(stack, HostAccess.READ),
                {buffer: buffer.enter(stack, HostAccess.UPDATE) for buffer in self.state_buffers},
            )

    def load(self, states: dict[int, dict[str, Any]]) -> None:
        """Store loaded states, given by parameter id and name."""
        if _large_states(states).keys() != self._where.keys():
            self._forget_states()
        with ExitStack() as stack, torch.no_grad():
            leased = {b: b.enter(stack, HostAccess.UPDATE) for b in self.state_buffers}
            self._store_states(states, leased)

    def allocate_state(self, states: dict[int, dict[str, Any]]) -> None:
        """Store small states, and allocate large ones without copying their values."""
        large = _large_states(states)
        bound = {key: buffer.tensors[name] for key, (buffer, name) in self._where.items()}
        if large.keys() != bound.keys() or not all(_is_like(bound[k], large[k]) for k in large):
            self._forget_states()
            if large:
                self._create_buffer(large, with_values=False)
        self._bound.clear()
        for number, state in states.items():
            small = {name: value for name, value in state.items() if (number, name) not in large}
            self._optimizer.state[self._by_id[number]].update(small)

    def _forget_states(self) -> None:
        self._where.clear()
        self._bound.clear()
        while self.state_buffers:
            self.state_buffers.pop().discard()

    def _gradients(self, stack: ExitStack, purpose: HostAccess) -> dict[int, torch.Tensor]:
        """Return the gradients by parameter id.

        Stored gradients are leased in RAM; gradients assigned by the user stay where they are.
        """
        found = {id(p): memory_of(p.grad) for p in self.parameters if p.grad is not None}
        gradients = None if self.weights is None else self.weights.gradients
        buffer = None if gradients is None else gradients.buffer
        if gradients is not None and buffer is not None:
            ours = {
                number: name
                for number, name in self._names.items()
                if number in found and self._by_id[number].grad is gradients.bound_gradient(name)
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
        leased: dict[StateBuffer, dict[str, torch.Tensor]],
    ) -> None:
        shadows: dict[int, torch.Tensor] = {}
        inner.state = defaultdict(dict)
        for number, gradient in gradients.items():
            state = self._state_of(number, leased)
            shadow = self._working_copy(values[number], state)
            _set_gradient(shadow, gradient, values[number].dtype)
            shadows[number] = shadow
            if state:
                inner.state[shadow] = state
        groups.step(inner, shadows)
        states = {number: dict(inner.state[shadow]) for number, shadow in shadows.items()}
        for number, shadow in shadows.items():
            self._write_back(number, shadow.detach(), values[number], states[number])
        self._store_states(states, leased)
        inner.state = defaultdict(dict)

    def _state_of(
        self, number: int, leased: dict[StateBuffer, dict[str, torch.Tensor]]
    ) -> dict[str, Any]:
        state = dict(self._optimizer.state.get(self._by_id[number], {}))
        for name, value in state.items():
            bound = self._bound.get((number, name))
            if bound is not None and value is bound:  # else the user assigned it
                buffer, inner = self._where[number, name]
                state[name] = leased[buffer][inner]
            elif isinstance(value, torch.Tensor):
                state[name] = local_part(self._by_id[number], value)
        return state

    def _working_copy(self, value: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        """Return the tensor that the optimizer updates: the value, or its master copy."""
        master = self._optimizer.master_dtype
        if master is not None and value.dtype is not master:
            value = _merge_edits(state.pop(MASTER), value) if MASTER in state else value.to(master)
        return value.detach().requires_grad_()

    def _write_back(
        self, number: int, shadow: torch.Tensor, value: torch.Tensor, state: dict[str, Any]
    ) -> None:
        parameter = self._by_id[number]
        if address_of(shadow) != address_of(value):  # a master copy, or reallocated by the step
            value.copy_(shadow)
        if shadow.dtype is not value.dtype:
            state[MASTER] = shadow
        memory = memory_of(parameter)
        if value.device != memory.device and self.weights is None:
            memory.copy_(value)
        torch.autograd.graph.increment_version(memory)

    def _values(self, stack: ExitStack) -> dict[int, torch.Tensor]:
        """Return the values on the CPU by parameter id, leased for writing."""
        if self.weights is None:
            return {id(p): memory_of(p).detach().cpu() for p in self.parameters}
        self.weights.become_state()  # if the user assigned a gradient to a frozen parameter
        assert isinstance(self.weights.buffer, StateBuffer)
        tensors = self.weights.buffer.enter(stack, HostAccess.UPDATE)
        return {id(p): tensors[self._names[id(p)]] for p in self.parameters}

    def _store_states(
        self, states: dict[int, dict[str, Any]], leased: dict[StateBuffer, dict[str, torch.Tensor]]
    ) -> None:
        """Keep the states after a step: large ones in the store, small ones in the optimizer."""
        fresh: dict[tuple[int, str], torch.Tensor] = {}
        for number, state in states.items():
            for name, value in state.items():
                where = self._where.get((number, name))
                self._bound.pop((number, name), None)
                if where is not None and _is_like(leased[where[0]][where[1]], value):
                    target = leased[where[0]][where[1]]
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
    """Return a copy of a group, with copies of its mutable values."""
    copies = {}
    for name, value in group.items():
        if isinstance(value, torch.Tensor):
            value = value.detach().clone()
        elif isinstance(value, (dict, list, set)):
            value = copy.copy(value)
        copies[name] = value
    return copies


def _same(left: Any, right: Any) -> bool:
    """Return True if two option values are equal; tensors element by element, NaN equals NaN."""
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
    """Return a mask of the elements that differ; NaN equals NaN."""
    return (left != right) & ~(left.isnan() & right.isnan())


def _merge_edits(master: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Update a master copy with edits of the value since the last step, and return it.

    Each step leaves the value equal to the rounded master, so elements that differ were edited.
    """
    for exact, now in zip(_pieces(master), _pieces(value), strict=True):
        rounded = exact.to(now.dtype)
        if not torch.equal(rounded, now):
            exact.copy_(torch.where(_unlike(rounded, now), now.to(exact.dtype), exact))
    return master


def _pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Split a tensor into views that fit in the CPU caches."""
    rows: torch.Tensor = torch.atleast_1d(tensor)
    pieces: tuple[torch.Tensor, ...] = rows.split(max(PIECE * len(rows) // max(rows.numel(), 1), 1))
    return pieces


def _set_gradient(shadow: torch.Tensor, gradient: torch.Tensor, of_value: torch.dtype) -> None:
    """Set the gradient of a working copy. A master copy gets it in the master's dtype."""
    dtype = gradient.dtype if shadow.dtype is of_value else shadow.dtype
    if dtype is not shadow.dtype:
        substitute: Any = shadow  # unreachable before torch 2.9, which added grad_dtype
        substitute.grad_dtype = dtype
    shadow.grad = gradient.to(dtype=dtype, device=shadow.device)


def _is_like(target: torch.Tensor, value: Any) -> bool:
    return _is_large(value) and value.shape == target.shape and value.dtype is target.dtype


def _scale(gradients: dict[int, torch.Tensor], factor: torch.Tensor) -> None:
    for gradient in gradients.values():
        gradient.mul_(factor.to(gradient.device))


def _large_states(states: dict[int, dict[str, Any]]) -> dict[tuple[int, str], torch.Tensor]:
    named = ((number, *item) for number, state in states.items() for item in state.items())
    return {(number, name): value for number, name, value in named if _is_large(value)}


def _is_large(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.device.type == "cpu"
