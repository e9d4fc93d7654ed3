"""The parameters of a model in training: groups of the store that units lease as in inference.

See `tierstore.adapters.unit_context` and `tierstore.adapters.saved`. The bindings here are mutable:
what a forward, a user or an optimizer changes is kept in the host view.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tierstore.adapters.binding import BindingPolicy, ParameterBinding, edited_among
from tierstore.adapters.codecs.memory import address_of, span, tensor_bytes
from tierstore.adapters.codecs.plain import assign
from tierstore.adapters.saved import BackwardLeases, LeasedMemory
from tierstore.adapters.training.frozen_buffers import FrozenBuffer, watch_of
from tierstore.adapters.training.gradients import Gradients
from tierstore.adapters.training.sharded import (
    Shard,
    has_value,
    is_distributed,
    memory_of,
    take_over,
)
from tierstore.adapters.training.state_buffers import StateBuffer, state_budget_of
from tierstore.adapters.unit_context import CurrentPass, UnitWeights
from tierstore.adapters.view_lifetime import HostViews, TensorLease
from tierstore.errors import BudgetError
from tierstore.store import TierStore, engine_of
from tierstore.system.maps import WriteWatch
from tierstore.torch_private import in_backward

LEASED_IN_BACKWARD = 2
"""Groups that the backward pass keeps leased, where there are no slices on a device."""


class Weights:
    """One group of parameters, by name, and where it is.

    `key` is that of its bindings, for good; the key of `buffer` changes when frozen parameters
    become part of the training state.
    """

    def __init__(
        self,
        key: str,
        buffer: StateBuffer | FrozenBuffer,
        parameters: dict[str, nn.Parameter],
        slice_: int,
    ) -> None:
        self.key = key
        self.buffer = buffer
        self.edited = False  # since they are away, as far as torch tells
        self.parameters = parameters
        self.slice = slice_
        self.gradients = Gradients(buffer.store, key, parameters)
        self.detached = False  # the model is an ordinary one again
        self._bindings: dict[str, ParameterBinding] = {}
        self._shards: dict[str, Shard] = {}

    @property
    def bindings(self) -> list[ParameterBinding]:
        """Those of the parameters; of sharded ones, of their local tensors."""
        return list(self._bindings.values())

    @property
    def in_use(self) -> bool:
        """Whether any of them is bound to leased memory."""
        return any(binding.user is not None for binding in self._bindings.values())

    def given(self) -> dict[int, torch.Tensor]:
        """Return the other memory that somebody gave to parameters, by their ids."""
        return {
            id(self.parameters[name]): binding.tensor
            for name, binding in self._bindings.items()
            if binding.was_given_memory
        }

    def keep_edits(self) -> None:
        """Copy what somebody gave a parameter (`parameter.data = ...`), and note other edits."""
        for binding in edited_among(self._bindings.values(), self.buffer.tensors):
            self.edited = True
            if binding.was_given_memory:
                with torch.no_grad():
                    binding.host_view.copy_(binding.tensor.detach())
                self._bind(binding.name, binding.host_view)
            else:
                binding.accept()

    def move_in(self, shards: dict[int, Shard]) -> int:
        """Let parameters show what is in the store from now on. They have these shards, by their
        ids. Returns the bytes that they had in RAM."""
        self.buffer.ready()
        for name, parameter in self.parameters.items():
            if id(parameter) in shards:
                self._shards[name] = shards[id(parameter)]
            self._bind(name, self.buffer.tensors[name])
        return sum(map(tensor_bytes, self.buffer.tensors.values()))

    def move_out(self) -> None:
        """Give parameters memory of their own, sharded ones where they are gathered."""
        for name, parameter in self.parameters.items():
            memory = memory_of(parameter)
            own = memory.detach().to(parameter.device, copy=True)
            assign(memory, own)
            if name in self._bindings:  # it outlives this, and must not keep the store's memory
                self._bindings[name].move_to(self.key, own)
            if name in self._shards:
                self._shards.pop(name).ignore()

    def _bind(self, name: str, host_view: torch.Tensor) -> None:
        parameter = self.parameters[name]
        take_over(parameter, host_view)
        if name in self._shards:
            self._shards[name].answer()
        if name in self._bindings:
            self._bindings[name].move_to(self.key, host_view)
            return
        # FSDP2 gives a parameter another local tensor when values are loaded.
        find = functools.partial(memory_of, parameter) if is_distributed(parameter) else None
        memory = memory_of(parameter)
        policy = BindingPolicy.MUTABLE
        self._bindings[name] = ParameterBinding(memory, self.key, name, host_view, policy, find)

    @property
    def frozen(self) -> bool:
        """Whether they are in a group that is only read."""
        return isinstance(self.buffer, FrozenBuffer)

    def keeps(self, names: dict[int, str], values: dict[str, Any]) -> bool:
        """Whether frozen parameters (known by their ids under these names) have these values. Then
        nothing is to be copied to them; otherwise they are part of the training state from now on.
        """
        ours = [(names[id(p)], p) for p in self.parameters.values() if names[id(p)] in values]
        if not all(has_value(p, torch.as_tensor(values[name])) for name, p in ours):
            self.become_state()
            return False
        values.update(ours)
        return True

    def accept(self) -> None:
        """Count all of them as unchanged."""
        for binding in self._bindings.values():
            binding.accept()

    def become_state(self) -> None:
        """Make frozen parameters part of the training state: they are going to change."""
        frozen = self.buffer
        if isinstance(frozen, FrozenBuffer):
            state_budget_of(frozen.store).expect(frozen.nbytes)
            buffer = StateBuffer(frozen.store, f"{frozen.key}/state", frozen.tensors)
            buffer.ready()
            self.buffer = buffer
            for name in self.parameters:
                self._bind(name, buffer.tensors[name])
            frozen.discard()


class PassOrder:
    """The order in which groups were used in the last pass: this one is expected to follow it."""

    def __init__(self) -> None:
        self._last: list[Weights] = []
        self._now: list[Weights] = []
        self._place = 0  # in the last pass

    def after(self, used: Weights, nbytes: int) -> list[Weights]:
        """Note that a group is used. Returns the others that come next, each once, up to so many
        bytes."""
        self._now.append(used)
        with contextlib.suppress(ValueError):  # it was not used again: nothing better is known
            self._place = self._last.index(used, self._place) + 1
        coming: dict[Weights, None] = {}
        for weights in itertools.islice(self._last, self._place, None):
            if weights is not used and weights not in coming:
                nbytes -= weights.buffer.nbytes
                if nbytes < 0:
                    break
                coming[weights] = None
        return list(coming)

    def end(self) -> None:
        """End the pass, if it has begun."""
        if self._now:
            self._last, self._now, self._place = self._now, [], 0


class WeightStreamer:
    """Leases the groups of one model in training: a `WeightOwner` and a `LeaseOwner`.

    On an accelerator, the groups of up to two slices are on the device; otherwise groups come as
    they are used, and the store is told what follows, as it did in the last pass.
    """

    renewals = 0
    invalidated = False

    def __init__(self, store: TierStore, groups: list[Weights], slices: int) -> None:
        self.store = store
        self.lock = threading.RLock()
        self.current = CurrentPass()
        self.loops = engine_of(store).loops
        self.make_room: Callable[[], None] = self.release_all
        self.groups = groups
        self._sliced = store.device.type != "cpu"
        self._by_key = {weights.key: weights for weights in groups}
        self._by_slice: list[list[Weights]] = [[] for _ in range(slices)]
        for weights in groups:
            self._by_slice[weights.slice].append(weights)
        limit = None if self._sliced else LEASED_IN_BACKWARD
        self._backward_leases = BackwardLeases(self.lease, limit)
        self._state_lock = threading.RLock()
        self._slice = -1
        self._near: set[int] = set()  # slices that are on the device, or on their way
        self._touched: set[Weights] = set()  # since all was settled
        self._order = PassOrder()
        self._ahead = state_budget_of(store).ahead_bytes()
        self._frozen: list[Weights] = []
        self._watch: WriteWatch | None = None  # of what these show while away

    def serve(self, shards: dict[int, Shard]) -> None:
        """Have these shards read in the store."""
        for weights in self.groups:
            for name, parameter in weights.parameters.items():
                if id(parameter) in shards:
                    shards[id(parameter)].read = functools.partial(self.shard, weights, name)

    def unit_weights(self, groups: list[Weights]) -> UnitWeights:
        """Return the weights of a unit that needs these groups."""
        bindings = [binding for weights in groups for binding in weights.bindings]
        return UnitWeights(self, bindings, mutable=True)

    def needs_lease(self, weights: Weights) -> bool:
        """Whether its parameters show something else in use than they show while away."""
        return self._sliced or not weights.buffer.host_resident

    # Leases ------------------------------------------------------------------------------------

    def lease(self, key: str) -> TensorLease:
        """Lease a group on the device. If there is no room, it is used in its host views where the
        device is the CPU."""
        weights = self._by_key[key]
        self.turn_to(weights.slice)
        self._touched.add(weights)
        try:
            lease = weights.buffer.read()
        except BudgetError:
            self.make_room()
            try:
                lease = weights.buffer.read()
            except BudgetError:
                if self._sliced:
                    raise
                return HostViews(weights.buffer.tensors)
        if not self._sliced:
            self._expect_after(weights)
        return lease

    def lease_again(self, memory: LeasedMemory) -> Mapping[str, torch.Tensor]:
        """Return the tensors of the memory's group, on the device, for a backward pass."""
        return self._tensors_in_backward(self._by_key[memory.key])

    def _tensors_in_backward(self, weights: Weights) -> Mapping[str, torch.Tensor]:
        self.turn_to(weights.slice)
        return self._backward_leases.tensors(weights.key)

    def renew(self, edited: list[ParameterBinding]) -> None:
        """Nothing is stored again: bindings are mutable."""

    def wait_until_renewed(self) -> None:
        """There is nothing to wait for."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def shard(self, weights: Weights, name: str) -> torch.Tensor:
        """Return the shard of a parameter, where it can be copied from on the device."""
        if not self.needs_lease(weights):
            return weights.buffer.tensors[name]
        if not self._sliced:
            return self._tensors_in_backward(weights)[name]
        # FSDP2 asks on a stream of its own, and only that knows when it is done with it.
        lease = self.lease(weights.key)
        shard = lease.tensors[name].clone()
        lease.release()
        return shard

    def _expect_after(self, used: Weights) -> None:
        """Tell the store what follows a use, as it did in the last pass. The store itself learns
        the order of frozen groups."""
        if isinstance(used.buffer, FrozenBuffer):
            return
        with self._state_lock:
            coming = self._order.after(used, self._ahead)
            self._touched.update(coming)
        for weights in coming:
            weights.buffer.expected()
        if coming:
            keys = [weights.buffer.key for weights in coming]
            engine_of(self.store).mutable_groups.expect(keys)

    def release_all(self) -> None:
        """Release what a backward pass keeps; what somebody looks at stays."""
        self._backward_leases.release_all()

    def turn_to(self, number: int) -> None:
        """On an accelerator, use slice `number` from now on: bring it and the next one, and release
        others."""
        with self._state_lock:
            if number == self._slice or not self._sliced:
                return
            step = -1 if number < self._slice or in_backward() else 1
            self._slice = number
            near = [n for n in (number, number + step) if 0 <= n < len(self._by_slice)]
            for far in self._near.difference(near):
                self._release_slice(far)
            self._near = set(near)
            wanted = [w for n in near for w in self._by_slice[n][::step]]
            self._touched.update(wanted)
        for weights in wanted:
            weights.buffer.expected()
        engine_of(self.store).mutable_groups.expect(weights.buffer.key for weights in wanted)

    def _release_slice(self, number: int) -> None:
        self._backward_leases.release(weights.key for weights in self._by_slice[number])
        keys = [weights.buffer.key for weights in self._by_slice[number]]
        for key in keys:
            self.store.offload(key)
        # What was on its way takes room until it is there, and others are brought next.
        engine_of(self.store).mutable_groups.wait_for_arrivals(keys)

    # Between passes ----------------------------------------------------------------------------

    def put_away(self) -> None:
        """Take everything off the device, and keep edits: a pass is over, or another begins."""
        idle = [weights for weights in self.groups if not weights.in_use]
        self._check_ties({n: memory for w in idle for n, memory in w.given().items()})
        for weights in idle:
            weights.keep_edits()
        self.release_all()
        with self._state_lock:
            self._slice = -1
            self._near = set()
            self._order.end()
            touched, self._touched = self._touched, set()
        for weights in touched:
            if self._sliced:
                self.store.offload(weights.buffer.key)
            weights.buffer.put_away()

    def _check_ties(self, given: dict[int, torch.Tensor]) -> None:
        """Raise RuntimeError if what parameters were given is memory of others, too: each has its
        own place in the store, and changes of one would not be seen in the other."""
        if not given:
            return
        parts = []
        for weights in self.groups:
            for name, parameter in weights.parameters.items():
                memory = given.get(id(parameter), weights.buffer.tensors[name])
                parts.append((address_of(memory), span(memory), name, id(parameter) in given))
        end, last, last_given = 0, "", False
        for start, nbytes, name, is_given in sorted(parts):
            if start < end and nbytes and (is_given or last_given):
                raise RuntimeError(
                    f"{last} and {name} show the same memory since one was given that of the other "
                    "(parameter.data = other.data): a model in training on a store keeps them "
                    "apart. Tie them before OffloadModel(module, store), or give one of them a "
                    "copy (parameter.data = other.data.clone())"
                )
            if start + nbytes > end:
                end, last, last_given = start + nbytes, name, is_given

    def watch_frozen(self) -> None:
        """Make what is frozen no more, or was changed, part of the training state."""
        frozen = [w for w in self.groups if w.frozen]
        if self._watch is None or frozen != self._frozen:
            self._frozen = frozen
            self._watch = watch_of([w.buffer for w in frozen if isinstance(w.buffer, FrozenBuffer)])
        shown = [weights for weights in frozen for _ in weights.parameters]
        written = {shown[i] for i in self._watch.written()}
        for weights in frozen:
            trained = any(p.requires_grad for p in weights.parameters.values())
            if (trained or weights.edited or weights in written) and not weights.in_use:
                weights.become_state()
