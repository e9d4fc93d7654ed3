"""The parameters of a model in training: groups of the store that units lease as in inference.

See `tierstore.adapters.unit_context` and `tierstore.adapters.saved`. Unlike in inference, bindings
are mutable: changes by a forward, the user or the optimizer are kept in the host view.
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
from tierstore.adapters.training.frozen_buffers import FrozenBuffer, write_watch_of
from tierstore.adapters.training.gradients import Gradients
from tierstore.adapters.training.sharded import (
    Shard,
    has_value,
    is_distributed,
    memory_of,
    rebind,
)
from tierstore.adapters.training.state_buffers import StateBuffer, state_budget_of
from tierstore.adapters.unit_context import CurrentPass, UnitWeights
from tierstore.adapters.view_lifetime import HostViews, TensorLease
from tierstore.errors import BudgetError
from tierstore.store import TierStore, engine_of
from tierstore.system.maps import WriteWatch
from tierstore.torch_private import in_backward

LEASED_IN_BACKWARD = 2
"""Number of groups that a backward pass keeps leased on the CPU, where there are no slices."""


class Weights:
    """One group of parameters by name, and the buffer that stores it.

    `key` identifies the group in its bindings and never changes. The key of `buffer` changes when
    frozen parameters become part of the training state.
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
        self.edited = False  # while off the device, as far as tensor versions show
        self.parameters = parameters
        self.slice = slice_
        self.gradients = Gradients(buffer.store, key, parameters)
        self.detached = False  # True after OffloadModel.disable
        self._bindings: dict[str, ParameterBinding] = {}
        self._shards: dict[str, Shard] = {}

    @property
    def bindings(self) -> list[ParameterBinding]:
        """The bindings of the parameters, or of the local tensors of sharded ones."""
        return list(self._bindings.values())

    @property
    def in_use(self) -> bool:
        """True if any parameter is bound to leased memory."""
        return any(binding.user is not None for binding in self._bindings.values())

    def reassigned_memory(self) -> dict[int, torch.Tensor]:
        """Return tensors that the user assigned (`parameter.data = ...`), by parameter id."""
        return {
            id(self.parameters[name]): binding.tensor
            for name, binding in self._bindings.items()
            if binding.was_reassigned
        }

    def commit_edits(self) -> None:
        """Copy user-assigned tensors into the host views, and note edits made in place."""
        for binding in edited_among(self._bindings.values(), self.buffer.tensors):
            self.edited = True
            if binding.was_reassigned:
                with torch.no_grad():
                    binding.host_view.copy_(binding.tensor.detach())
                self._bind(binding.name, binding.host_view)
            else:
                binding.accept()

    def bind_to_store(self, shards: dict[int, Shard]) -> int:
        """Point the parameters at the store. Return the bytes of RAM they used before.

        `shards` maps parameter ids to shards; it contains all sharded parameters.
        """
        self.buffer.ready()
        for name, parameter in self.parameters.items():
            if id(parameter) in shards:
                self._shards[name] = shards[id(parameter)]
            self._bind(name, self.buffer.tensors[name])
        return sum(map(tensor_bytes, self.buffer.tensors.values()))

    def unbind_from_store(self) -> None:
        """Copy the parameters to memory outside the store; shards go to their mesh's device."""
        for name, parameter in self.parameters.items():
            memory = memory_of(parameter)
            own = memory.detach().to(parameter.device, copy=True)
            assign(memory, own)
            if name in self._bindings:  # the binding may outlive the store's memory
                self._bindings[name].move_to(self.key, own)
            if name in self._shards:
                self._shards.pop(name).uninstall()

    def _bind(self, name: str, host_view: torch.Tensor) -> None:
        parameter = self.parameters[name]
        rebind(parameter, host_view)
        if name in self._shards:
            self._shards[name].install()
        if name in self._bindings:
            self._bindings[name].move_to(self.key, host_view)
            return
        # FSDP2 replaces the local tensor of a parameter when values are loaded.
        find = functools.partial(memory_of, parameter) if is_distributed(parameter) else None
        memory = memory_of(parameter)
        policy = BindingPolicy.MUTABLE
        self._bindings[name] = ParameterBinding(memory, self.key, name, host_view, policy, find)

    @property
    def frozen(self) -> bool:
        """True if the group is read-only."""
        return isinstance(self.buffer, FrozenBuffer)

    def matches(self, names: dict[int, str], values: dict[str, Any]) -> bool:
        """Return True if the frozen parameters already have the values to be loaded.

        Then `values` gets the parameters themselves, so that nothing is copied. Otherwise the group
        becomes part of the training state.

        Args:
            names: names in `values`, by parameter id.
            values: the state dict to load.
        """
        ours = [(names[id(p)], p) for p in self.parameters.values() if names[id(p)] in values]
        if not all(has_value(p, torch.as_tensor(values[name])) for name, p in ours):
            self.become_state()
            return False
        values.update(ours)
        return True

    def accept(self) -> None:
        """Treat the current values as unedited."""
        for binding in self._bindings.values():
            binding.accept()

    def become_state(self) -> None:
        """Move frozen parameters into the mutable training state, before they change."""
        frozen = self.buffer
        if isinstance(frozen, FrozenBuffer):
            state_budget_of(frozen.store).count_group(frozen.nbytes)
            buffer = StateBuffer(frozen.store, f"{frozen.key}/state", frozen.tensors)
            buffer.ready()
            self.buffer = buffer
            for name in self.parameters:
                self._bind(name, buffer.tensors[name])
            frozen.discard()


class PassOrder:
    """Predicts the order of use: that of the previous pass."""

    def __init__(self) -> None:
        self._last: list[Weights] = []
        self._now: list[Weights] = []
        self._position = 0  # in the last pass

    def after(self, used: Weights, nbytes: int) -> list[Weights]:
        """Record a use. Return the groups expected next, each once, up to `nbytes` in total."""
        self._now.append(used)
        with contextlib.suppress(ValueError):  # not used again in the last pass: keep the position
            self._position = self._last.index(used, self._position) + 1
        coming: dict[Weights, None] = {}
        for weights in itertools.islice(self._last, self._position, None):
            if weights is not used and weights not in coming:
                nbytes -= weights.buffer.nbytes
                if nbytes < 0:
                    break
                coming[weights] = None
        return list(coming)

    def end(self) -> None:
        """End the current pass, if any."""
        if self._now:
            self._last, self._now, self._position = self._now, [], 0


class WeightStreamer:
    """Leases the groups of one model in training: a `WeightOwner` and a `LeaseOwner`.

    On an accelerator, the groups of up to two slices are on the device at a time. On the CPU,
    groups are leased as they are used, and prefetched in the order of the last pass.
    """

    generation = 0
    invalidated = False

    def __init__(self, store: TierStore, groups: list[Weights], slices: int) -> None:
        self.store = store
        self.lock = threading.RLock()
        self.current = CurrentPass()
        self.loops = engine_of(store).loops
        self.free_memory: Callable[[], None] = self.release_all
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
        self._near: set[int] = set()  # slices that are on the device, or arriving there
        self._touched: set[Weights] = set()  # groups to flush
        self._order = PassOrder()
        self._ahead = state_budget_of(store).prefetch_bytes()
        self._frozen: list[Weights] = []
        self._watch: WriteWatch | None = None  # on the host views of `_frozen`

    def connect_shards(self, shards: dict[int, Shard]) -> None:
        """Make FSDP2's all-gather read these shards from the store."""
        for weights in self.groups:
            for name, parameter in weights.parameters.items():
                if id(parameter) in shards:
                    shards[id(parameter)].read = functools.partial(self.shard, weights, name)

    def unit_weights(self, groups: list[Weights]) -> UnitWeights:
        """Return the weights of a unit that needs these groups."""
        bindings = [binding for weights in groups for binding in weights.bindings]
        return UnitWeights(self, bindings, mutable=True)

    def needs_lease(self, weights: Weights) -> bool:
        """Return True if the group must be leased before use, so its tensors move."""
        return self._sliced or not weights.buffer.host_resident

    # Leases ------------------------------------------------------------------------------------

    def lease(self, key: str) -> TensorLease:
        """Lease a group on the device.

        If the budget is exhausted and the device is the CPU, return the host views instead.
        """
        weights = self._by_key[key]
        self.turn_to(weights.slice)
        self._touched.add(weights)
        try:
            lease = weights.buffer.read()
        except BudgetError:
            self.free_memory()
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
        """Lease the group of `memory` again for a backward pass, and return its tensors."""
        return self._tensors_in_backward(self._by_key[memory.key])

    def _tensors_in_backward(self, weights: Weights) -> Mapping[str, torch.Tensor]:
        self.turn_to(weights.slice)
        return self._backward_leases.tensors(weights.key)

    def rewrite(self, edited: list[ParameterBinding]) -> None:
        """No-op: bindings are mutable, so edits need no new group."""

    def wait_for_rewrite(self) -> None:
        """No-op: see `rewrite`."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def shard(self, weights: Weights, name: str) -> torch.Tensor:
        """Return the shard of a parameter in memory that the device can copy from."""
        if not self.needs_lease(weights):
            return weights.buffer.tensors[name]
        if not self._sliced:
            return self._tensors_in_backward(weights)[name]
        # FSDP2 reads on its own stream, which alone knows when the read is done: so return a copy.
        lease = self.lease(weights.key)
        shard = lease.tensors[name].clone()
        lease.release()
        return shard

    def _expect_after(self, used: Weights) -> None:
        """Prefetch the groups that followed this use in the last pass.

        The store itself learns the order of frozen groups.
        """
        if isinstance(used.buffer, FrozenBuffer):
            return
        with self._state_lock:
            coming = self._order.after(used, self._ahead)
            self._touched.update(coming)
        for weights in coming:
            weights.buffer.mark_expected()
        if coming:
            keys = [weights.buffer.key for weights in coming]
            engine_of(self.store).mutable_groups.prefetch(keys)

    def release_all(self) -> None:
        """Release the leases that a backward pass keeps. Memory with live views stays valid."""
        self._backward_leases.release_all()

    def turn_to(self, number: int) -> None:
        """On an accelerator, make slice `number` current.

        Prefetches it and the next slice in the current direction, and releases all others.
        """
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
            weights.buffer.mark_expected()
        engine_of(self.store).mutable_groups.prefetch(weights.buffer.key for weights in wanted)

    def _release_slice(self, number: int) -> None:
        self._backward_leases.release(weights.key for weights in self._by_slice[number])
        keys = [weights.buffer.key for weights in self._by_slice[number]]
        for key in keys:
            self.store.offload(key)
        # Transfers in flight occupy memory until they arrive, and the next slice needs it.
        engine_of(self.store).mutable_groups.wait_for_arrivals(keys)

    # Between passes ----------------------------------------------------------------------------

    def flush(self) -> None:
        """Commit edits and move every idle group off the device, between two passes."""
        idle = [weights for weights in self.groups if not weights.in_use]
        self._check_ties({n: memory for w in idle for n, memory in w.reassigned_memory().items()})
        for weights in idle:
            weights.commit_edits()
        self.release_all()
        with self._state_lock:
            self._slice = -1
            self._near = set()
            self._order.end()
            touched, self._touched = self._touched, set()
        for weights in touched:
            if self._sliced:
                self.store.offload(weights.buffer.key)
            weights.buffer.flush()

    def _check_ties(self, reassigned_memory: dict[int, torch.Tensor]) -> None:
        """Raise RuntimeError if a user-assigned tensor overlaps another parameter.

        The store keeps a separate copy of each, so an edit of one would not reach the other.
        """
        if not reassigned_memory:
            return
        parts = []
        for weights in self.groups:
            for name, parameter in weights.parameters.items():
                memory = reassigned_memory.get(id(parameter), weights.buffer.tensors[name])
                parts.append(
                    (address_of(memory), span(memory), name, id(parameter) in reassigned_memory)
                )
        end, last, last_given = 0, "", False
        for start, nbytes, name, is_given in sorted(parts):
            if start < end and nbytes and (is_given or last_given):
                raise RuntimeError(
                    f"{last} and {name} share memory since one was assigned the data of the other "
                    "(parameter.data = other.data): an OffloadModel stores them separately. Tie "
                    "them before OffloadModel(module, store), or assign a copy "
                    "(parameter.data = other.data.clone())"
                )
            if start + nbytes > end:
                end, last, last_given = start + nbytes, name, is_given

    def watch_frozen(self) -> None:
        """Move frozen groups that now require gradients or were edited into the training state."""
        frozen = [w for w in self.groups if w.frozen]
        if self._watch is None or frozen != self._frozen:
            self._frozen = frozen
            self._watch = write_watch_of(
                [w.buffer for w in frozen if isinstance(w.buffer, FrozenBuffer)]
            )
        by_range = [weights for weights in frozen for _ in weights.parameters]
        written = {by_range[i] for i in self._watch.written()}
        for weights in frozen:
            trained = any(p.requires_grad for p in weights.parameters.values())
            if (trained or weights.edited or weights in written) and not weights.in_use:
                weights.become_state()
