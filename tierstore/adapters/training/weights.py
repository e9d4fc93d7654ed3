"""Parameters in training: on the device while their modules run, and nothing of them in the graph.

See `tierstore.adapters.saved_weights`: the backward pass brings a weight's group in again.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tierstore.adapters.activations import Unpack
from tierstore.adapters.activations.in_place import described, refuse_changed
from tierstore.adapters.autocast_cache import CastCache
from tierstore.adapters.codecs.memory import (
    Geometry,
    address_of,
    geometry_of,
    span,
    storage_id_of,
    tensor_bytes,
)
from tierstore.adapters.codecs.plain import assign
from tierstore.adapters.saved_weights import WeightHooks
from tierstore.adapters.training.frozen_buffers import FrozenBuffer, watch_of
from tierstore.adapters.training.gradients import Gradients
from tierstore.adapters.training.pass_order import PassOrder
from tierstore.adapters.training.sharded import (
    Shard,
    has_value,
    is_distributed,
    memory_of,
    take_over,
)
from tierstore.adapters.training.state_buffers import StateBuffer, state_budget_of
from tierstore.adapters.unit_use import Arguments
from tierstore.adapters.view_lifetime import ViewLease
from tierstore.model.errors import BudgetError
from tierstore.store import TierStore, engine_of
from tierstore.system.maps import WriteWatch
from tierstore.torch_private import in_backward, version_of

BORROWED = 2
"""Groups that the backward pass keeps, where there are no slices on a device."""


class Weights:
    """One group of parameters, by name, and where it is."""

    def __init__(
        self,
        buffer: StateBuffer | FrozenBuffer,
        parameters: dict[str, nn.Parameter],
        slice_: int,
    ) -> None:
        self.buffer = buffer
        self.edited = False  # since they are away, as far as torch tells
        self.parameters = parameters
        self.slice = slice_
        self.gradients = Gradients(self)
        self.lock = threading.RLock()
        self.users = 0
        self.gone = False  # the model is an ordinary one again
        self.lease: ViewLease | None = None
        self._versions: dict[str, int] = {}
        self._shards: dict[str, Shard] = {}

    @property
    def shown(self) -> dict[str, torch.Tensor]:
        """What the parameters show now."""
        return (self.buffer if self.lease is None else self.lease).tensors

    def show(self, lease: ViewLease) -> None:
        """Let the parameters show what is leased."""
        self.lease = lease
        for name, parameter in self.parameters.items():
            assign(parameter, lease.tensors[name])
            self._versions[name] = version_of(parameter)

    def hide(self) -> None:
        """Let them show what they show while away."""
        lease = self.lease
        assert lease is not None
        for name, parameter in self.parameters.items():
            home = self.buffer.tensors[name]
            if version_of(parameter) != self._versions[name]:
                with torch.no_grad():  # the forward itself changed it
                    home.copy_(parameter.detach())
                self.edited = True
            assign(parameter, home)
            self._versions[name] = version_of(parameter)
        self.lease = None
        lease.end()

    def given(self) -> dict[int, torch.Tensor]:
        """The other memory that somebody gave to parameters, by their ids."""
        memory = {name: memory_of(parameter) for name, parameter in self.parameters.items()}
        return {
            id(self.parameters[name]): each
            for name, each in memory.items()
            if address_of(each) != address_of(self.buffer.tensors[name])
        }

    def take_what_was_given(self) -> None:
        """Somebody may have given a parameter other memory (`parameter.data = ...`): keep that."""
        for name, parameter in self.parameters.items():
            home, memory = self.buffer.tensors[name], memory_of(parameter)
            if address_of(memory) != address_of(home):
                with torch.no_grad():
                    home.copy_(memory.detach())
                self._show_at(name, home)
                self.edited = True
            elif version_of(memory) != self._versions.setdefault(name, version_of(memory)):
                self.edited = True

    def move_in(self, shards: dict[int, Shard]) -> int:
        """Let parameters show what is in the store from now on. They have these shards, by their
        ids. Returns the bytes that they had in RAM."""
        self.buffer.ready()
        for name, parameter in self.parameters.items():
            if id(parameter) in shards:
                self._shards[name] = shards[id(parameter)]
            self._show_at(name, self.buffer.tensors[name])
        return sum(map(tensor_bytes, self.buffer.tensors.values()))

    def move_out(self) -> None:
        """Give parameters memory of their own, sharded ones where they are gathered."""
        for name, parameter in self.parameters.items():
            memory = memory_of(parameter)
            assign(memory, memory.detach().to(parameter.device, copy=True))
            if name in self._shards:
                self._shards.pop(name).ignore()

    def _show_at(self, name: str, memory: torch.Tensor) -> None:
        take_over(self.parameters[name], memory)
        if name in self._shards:
            self._shards[name].answer()
        self._versions[name] = version_of(memory_of(self.parameters[name]))

    @property
    def sharded(self) -> bool:
        """Whether what is here are shards of them."""
        return any(map(is_distributed, self.parameters.values()))

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

    def count_as_unchanged(self) -> None:
        """What torch counted was none of a change."""
        self._versions = {name: version_of(memory_of(p)) for name, p in self.parameters.items()}

    def become_state(self) -> None:
        """Make frozen parameters part of the training state: they are going to change."""
        frozen = self.buffer
        if isinstance(frozen, FrozenBuffer):
            state_budget_of(frozen.store).expect(frozen.nbytes)
            buffer = StateBuffer(frozen.store, f"{frozen.key}/state", frozen.tensors)
            buffer.ready()
            self.buffer = buffer
            for name in self.parameters:
                self._show_at(name, buffer.tensors[name])
            frozen.discard()


class WeightStreamer:
    """What of one model is on the device, and why: shown by parameters, or borrowed by a backward
    pass.

    `order` tells in which order groups were used in the last pass; `slices` is how many there are.
    """

    def __init__(self, store: TierStore, groups: list[Weights], slices: int) -> None:
        self.store = store
        self.make_room: Callable[[], None] = self.give_back
        self.groups = groups
        self._sliced = store.device.type != "cpu"
        self._by_slice: list[list[Weights]] = [[] for _ in range(slices)]
        for weights in groups:
            self._by_slice[weights.slice].append(weights)
        self._shown: dict[int, tuple[Weights, str]] = {}  # storage -> what it shows
        self._borrowed: OrderedDict[Weights, ViewLease] = OrderedDict()
        self._lock = threading.RLock()
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

    # Forward -----------------------------------------------------------------------------------

    def needs_lease(self, weights: Weights) -> bool:
        """Whether its parameters show something else in use than they show while away."""
        return self._sliced or not weights.buffer.host_resident

    def enter(self, weights: Weights) -> None:
        """A module that needs these parameters begins."""
        with weights.lock:
            if weights.users == 0:
                self.turn_to(weights.slice)
                lease = self._read(weights)
                if lease is not None:
                    weights.show(lease)
                with self._lock:
                    for name, tensor in weights.shown.items():
                        self._shown[storage_id_of(tensor)] = weights, name
            weights.users += 1

    def _read(self, weights: Weights) -> ViewLease | None:
        """The parameters on the device. None: there is no room for them, and on the CPU they can be
        used where they lie on disk."""
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
                return None
        if not self._sliced:
            self._announce(weights)
        return lease

    def _announce(self, used: Weights) -> None:
        """Tell the store what follows a use, as it did in the last pass. What is frozen it learns
        by itself."""
        if isinstance(used.buffer, FrozenBuffer):
            return
        with self._lock:
            coming = self._order.after(used, self._ahead)
            self._touched.update(coming)
        for weights in coming:
            weights.buffer.expected()
        if coming:
            keys = [weights.buffer.key for weights in coming]
            engine_of(self.store).mutable_groups.expect(keys)

    def give_back(self) -> None:
        """End what is borrowed; what somebody looks at stays."""
        with self._lock:
            while self._borrowed:
                self._borrowed.popitem()[1].end()

    def leave(self, weights: Weights) -> None:
        """The module is done."""
        with weights.lock:
            weights.users -= 1
            if weights.users == 0:
                with self._lock:
                    for tensor in weights.shown.values():
                        self._shown.pop(storage_id_of(tensor), None)
                if weights.lease is not None:
                    weights.hide()

    def turn_to(self, number: int) -> None:
        """Slice `number` is used from now on: on an accelerator, bring it and the next one, and let
        go of others."""
        with self._lock:
            if number == self._slice or not self._sliced:
                return
            step = -1 if number < self._slice or in_backward() else 1
            self._slice = number
            near = [n for n in (number, number + step) if 0 <= n < len(self._by_slice)]
            for far in self._near.difference(near):
                self._let_go_of(far)
            self._near = set(near)
            wanted = [w for n in near for w in self._by_slice[n][::step]]
            self._touched.update(wanted)
        for weights in wanted:
            weights.buffer.expected()
        engine_of(self.store).mutable_groups.expect(weights.buffer.key for weights in wanted)

    def _let_go_of(self, number: int) -> None:
        for weights in self._by_slice[number]:
            if (borrowed := self._borrowed.pop(weights, None)) is not None:
                borrowed.end()
        keys = [weights.buffer.key for weights in self._by_slice[number]]
        for key in keys:
            self.store.offload(key)
        # What was on its way takes room until it is there, and others are brought next.
        engine_of(self.store).mutable_groups.wait_for_arrivals(keys)

    # Backward ----------------------------------------------------------------------------------

    def pack_view(self, tensor: torch.Tensor) -> Unpack | None:
        """What brings a saved tensor back, if it is a view of a weight that is in use."""
        found = self._shown.get(storage_id_of(tensor))
        if found is None:
            return None
        version = version_of(found[0].parameters[found[1]])
        how = geometry_of(tensor), described(tensor)
        return functools.partial(self._unpack_view, *found, version, *how)

    @torch.no_grad()
    def _unpack_view(
        self, weights: Weights, name: str, version: int, geometry: Geometry, description: str
    ) -> torch.Tensor:
        """A view of a weight, as it was saved."""
        refuse_changed(description, version_of(weights.parameters[name]), version)
        with weights.lock:
            lease = weights.lease or self._borrow(weights)
            return geometry.within((weights.buffer if lease is None else lease).tensors[name])

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def shard(self, weights: Weights, name: str) -> torch.Tensor:
        """The shard of a parameter, where it can be copied from on the device."""
        with weights.lock:
            if not self.needs_lease(weights):
                return weights.buffer.tensors[name]
            if not self._sliced:
                lease = self._borrow(weights)
                return (weights.buffer if lease is None else lease).tensors[name]
            # FSDP2 asks on a stream of its own, and only that knows when it is done with it.
            self.turn_to(weights.slice)
            lease = self._read(weights)
            assert lease is not None, "where it is lent, or it has raised"
            shard = lease.tensors[name].clone()
            lease.end()
            return shard

    def _borrow(self, weights: Weights) -> ViewLease | None:
        with self._lock:
            self.turn_to(weights.slice)
            if (found := self._borrowed.get(weights)) is not None:
                self._borrowed.move_to_end(weights)
                return found
            if not self._sliced:
                while len(self._borrowed) >= BORROWED:
                    self._borrowed.popitem(last=False)[1].end()
            lease = self._read(weights)
            if lease is not None:
                self._borrowed[weights] = lease
            return lease

    # Between passes ----------------------------------------------------------------------------

    def put_away(self) -> None:
        """A pass is over, or another begins: nothing is on the device, and everything is what it
        shows."""
        idle = [weights for weights in self.groups if not weights.users]
        self._refuse_ties({n: memory for w in idle for n, memory in w.given().items()})
        for weights in idle:
            weights.take_what_was_given()
        with self._lock:
            self.give_back()
            self._slice = -1
            self._near = set()
            self._order.over()
            touched, self._touched = self._touched, set()
        for weights in touched:
            if self._sliced:
                self.store.offload(weights.buffer.key)
            weights.buffer.put_away()

    def _refuse_ties(self, given: dict[int, torch.Tensor]) -> None:
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
        """What is frozen no more, or was changed, is part of the training state from now on."""
        frozen = [w for w in self.groups if w.frozen]
        if self._watch is None or frozen != self._frozen:
            self._frozen = frozen
            self._watch = watch_of([w.buffer for w in frozen if isinstance(w.buffer, FrozenBuffer)])
        shown = [weights for weights in frozen for _ in weights.parameters]
        written = {shown[i] for i in self._watch.written()}
        for weights in frozen:
            trained = any(p.requires_grad for p in weights.parameters.values())
            if (trained or weights.edited or weights in written) and not weights.users:
                weights.become_state()


class TrainingUse:
    """One run of a module: its parameters are on the device, and autograd saves notes of them.

    See `tierstore.adapters.unit_use.UnitUse`.
    """

    def __init__(self, streamer: WeightStreamer, groups: list[Weights]) -> None:
        self._streamer = streamer
        self._groups = groups
        self._entered = 0
        self._hooks: Any = None
        self._casts = CastCache()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self) -> bool:
        """Bring them in."""
        for weights in self._groups:
            self._streamer.enter(weights)
            self._entered += 1
        if torch.is_grad_enabled():
            hooks = WeightHooks(self._streamer.pack_view).hooks
            hooks.__enter__()
            self._hooks = hooks
        self._casts.stop()
        return True

    def finish(self, result: Any, given: Arguments) -> Any:
        """Let them go. What the module returned is as it was."""
        self.end()
        return result

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(self) -> None:
        """Let them go. To be called again if it was interrupted."""
        self._casts.resume()
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__()
        while self._entered:
            self._entered -= 1
            self._streamer.leave(self._groups[self._entered])
