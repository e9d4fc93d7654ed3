"""Parameters in training: on the device while their modules run, and nothing of them in the graph.

What autograd saves of a weight is a note of which weight it was, and how it was looked at. The
backward pass, which wants it back, brings the weight's group in again. So the memory of a weight
serves others between the passes, and gradients are the same to the last bit: what comes back has
the same bytes, the same strides, and an alignment as good.

(FSDP2 of PyTorch frees and refills the storages themselves, `torch.distributed.fsdp`. That is as
exact, but wants memory that can be resized, which neither a pool of pinned memory nor a map is.)
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tierstore.adapters.activations import InPlace
from tierstore.adapters.activations.in_place import described, refuse_changed
from tierstore.adapters.autocast_cache import CastCache
from tierstore.adapters.codecs.memory import Geometry, address_of, geometry_of, storage_id_of
from tierstore.adapters.codecs.plain import assign
from tierstore.adapters.training.gradients import Gradients
from tierstore.adapters.training.state_buffers import StateBuffer
from tierstore.adapters.unit_use import Arguments
from tierstore.adapters.view_lifetime import ViewLease
from tierstore.model.errors import BudgetError
from tierstore.store import TierStore, engine_of
from tierstore.torch_private import base_of, in_backward, saved_tensor_hooks, version_of

_CAST = "ToCopyBackward0"
"""What autograd calls a cast."""

BORROWED = 2
"""Groups that the backward pass keeps, where there are no slices on a device."""


class Weights:
    """One group of parameters, by name, and where it is."""

    def __init__(
        self, buffer: StateBuffer, parameters: dict[str, nn.Parameter], number: int, slice_: int
    ) -> None:
        self.buffer = buffer
        self.parameters = parameters
        self.number = number
        self.slice = slice_
        self.gradients = Gradients(self)
        self.lock = threading.RLock()
        self.users = 0
        self.gone = False  # the model is an ordinary one again
        self.loan: ViewLease | None = None
        self._versions: dict[str, int] = {}

    @property
    def key(self) -> str:
        """The group's key."""
        return self.buffer.key

    @property
    def shown(self) -> dict[str, torch.Tensor]:
        """What the parameters show now."""
        return (self.buffer if self.loan is None else self.loan).tensors

    def show(self, loan: ViewLease) -> None:
        """Let the parameters show what was lent."""
        self.loan = loan
        for name, parameter in self.parameters.items():
            assign(parameter, loan.tensors[name])
            self._versions[name] = version_of(parameter)

    def hide(self) -> None:
        """Let them show what they show while away."""
        loan = self.loan
        assert loan is not None
        for name, parameter in self.parameters.items():
            home = self.buffer.tensors[name]
            if version_of(parameter) != self._versions[name]:
                with torch.no_grad():  # the forward itself changed it
                    home.copy_(parameter.detach())
            assign(parameter, home)
        self.loan = None
        loan.end()

    def take_what_was_given(self) -> None:
        """Somebody may have given a parameter other memory (`parameter.data = ...`): keep that."""
        for name, parameter in self.parameters.items():
            home = self.buffer.tensors[name]
            if address_of(parameter) != address_of(home):
                with torch.no_grad():
                    home.copy_(parameter.detach())
                assign(parameter, home)


class Noted:
    """What the graph holds instead of a view of a weight."""

    __slots__ = ("_geometry", "_name", "_parameter", "_said", "_streamer", "_version", "_weights")

    def __init__(
        self, streamer: WeightStreamer, weights: Weights, name: str, tensor: torch.Tensor
    ) -> None:
        self._streamer = streamer
        self._weights = weights
        self._name = name
        self._parameter = weights.parameters[name]
        self._version = version_of(self._parameter)
        self._geometry: Geometry = geometry_of(tensor)
        self._said = described(tensor)

    def unpack(self) -> torch.Tensor:
        """The view, as it was."""
        refuse_changed(self._said, version_of(self._parameter), self._version)
        with torch.no_grad():
            return self._streamer.borrow(self._weights, self._name, self._geometry)


class Recast:
    """What the graph holds instead of a view of a weight's cast, as autocast makes them.

    It is cast again when it is wanted: to the same bytes, laid out in the same way.
    """

    __slots__ = ("_geometry", "_layout", "_weight")

    def __init__(self, weight: Noted, cast: torch.Tensor, tensor: torch.Tensor) -> None:
        self._weight = weight
        self._layout = geometry_of(cast)
        self._geometry = geometry_of(tensor)

    def unpack(self) -> torch.Tensor:
        """The view, as it was."""
        with torch.no_grad():
            cast = self._layout.empty().copy_(self._weight.unpack())
            return self._geometry.within(cast)


def _cast_in(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The leaf that a saved tensor is a cast of, or a view of one, and the cast."""
    base = base_of(tensor)
    cast = tensor if base is None else base
    node = cast.grad_fn
    if node is None or node.name() != _CAST or version_of(cast):  # it was changed since
        return None
    leaf = getattr(node.next_functions[0][0], "variable", None)
    if leaf is None or leaf.device != cast.device:
        return None
    return leaf, cast


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
        self._borrowed: OrderedDict[int, tuple[Weights, ViewLease]] = OrderedDict()
        self._lock = threading.RLock()
        self._slice = -1
        self._near: set[int] = set()  # slices that are on the device, or on their way
        self._touched: set[Weights] = set()  # since all was settled

    # Forward -----------------------------------------------------------------------------------

    def needs_visits(self, weights: Weights) -> bool:
        """Whether its parameters show something else in use than they show while away."""
        return self._sliced or not weights.buffer.stays

    def enter(self, weights: Weights) -> None:
        """A module that needs these parameters begins."""
        with weights.lock:
            if weights.users == 0:
                self.turn_to(weights.slice)
                loan = self._read(weights)
                if loan is not None:
                    weights.show(loan)
                with self._lock:
                    for name, tensor in weights.shown.items():
                        self._shown[storage_id_of(tensor)] = weights, name
            weights.users += 1

    def _read(self, weights: Weights) -> ViewLease | None:
        """The parameters on the device. None: there is no room for them, and on the CPU they can be
        used where they lie on disk."""
        self._touched.add(weights)
        try:
            return weights.buffer.read()
        except BudgetError:
            self.make_room()
        try:
            return weights.buffer.read()
        except BudgetError:
            if self._sliced:
                raise
            return None

    def give_back(self) -> None:
        """End what is borrowed; what somebody looks at stays."""
        with self._lock:
            while self._borrowed:
                self._borrowed.popitem()[1][1].end()

    def leave(self, weights: Weights) -> None:
        """The module is done."""
        with weights.lock:
            weights.users -= 1
            if weights.users == 0:
                with self._lock:
                    for tensor in weights.shown.values():
                        self._shown.pop(storage_id_of(tensor), None)
                if weights.loan is not None:
                    weights.hide()

    def turn_to(self, number: int) -> None:
        """Slice `number` is used from now on: bring it and the next one, and let go of others."""
        with self._lock:
            if number == self._slice:
                return
            step = -1 if number < self._slice or in_backward() else 1
            self._slice = number
            following = number + step
            near = {number}
            if 0 <= following < len(self._by_slice):
                near.add(following)
            if self._sliced:
                for far in self._near - near:
                    self._let_go_of(far)
            self._near = near
            wanted = [w for n in (number, following) if n in near for w in self._in_order(n, step)]
            wanted = [weights for weights in wanted if self.needs_visits(weights)]
            self._touched.update(wanted)
        for weights in wanted:
            weights.buffer.expected()
        engine_of(self.store).mutable_groups.expect(weights.key for weights in wanted)

    def _in_order(self, number: int, step: int) -> list[Weights]:
        return self._by_slice[number][::step]

    def _let_go_of(self, number: int) -> None:
        for weights in self._by_slice[number]:
            borrowed = self._borrowed.pop(weights.number, None)
            if borrowed is not None:
                borrowed[1].end()
        for weights in self._by_slice[number]:
            self.store.offload(weights.key)
        # What was on its way takes room until it is there, and others are brought next.
        engine_of(self.store).mutable_groups.wait_for_arrivals(
            weights.key for weights in self._by_slice[number]
        )

    # Backward ----------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Noted | Recast | None:
        """A note of what a saved tensor looks at, if that is a weight's memory that is on loan, or
        a cast of such a weight."""
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return None
        noted = self._noted(tensor)
        if noted is None and (found := _cast_in(tensor)) is not None:
            leaf, cast = found
            weight = self._noted(leaf)
            return None if weight is None else Recast(weight, cast, tensor)
        return noted

    def _noted(self, tensor: torch.Tensor) -> Noted | None:
        found = self._shown.get(storage_id_of(tensor))
        return None if found is None else Noted(self, *found, tensor)

    def borrow(self, weights: Weights, name: str, geometry: Geometry) -> torch.Tensor:
        """A view of a weight, as it was saved."""
        with weights.lock:
            loan = weights.loan or self._borrow(weights)
            return geometry.within((weights.buffer if loan is None else loan).tensors[name])

    def _borrow(self, weights: Weights) -> ViewLease | None:
        with self._lock:
            self.turn_to(weights.slice)
            found = self._borrowed.get(weights.number)
            if found is not None:
                self._borrowed.move_to_end(weights.number)
                return found[1]
            if not self._sliced:
                while len(self._borrowed) >= BORROWED:
                    self._borrowed.popitem(last=False)[1][1].end()
            loan = self._read(weights)
            if loan is not None:
                self._borrowed[weights.number] = weights, loan
            return loan

    # Between passes ----------------------------------------------------------------------------

    def put_away(self) -> None:
        """A pass is over, or another begins: nothing is on the device, and everything is what it
        shows."""
        for weights in self.groups:
            if not weights.users:
                weights.take_what_was_given()
        with self._lock:
            self.give_back()
            self._slice = -1
            near, self._near = self._near, set()
            touched, self._touched = self._touched, set()
        if self._sliced:
            touched |= {weights for number in near for weights in self._by_slice[number]}
        for weights in touched:
            if self._sliced:
                self.store.offload(weights.key)
            weights.buffer.put_away()


class Watching:
    """Takes the weights out of what autograd saves, and hands the rest on to those before it."""

    def __init__(self, streamer: WeightStreamer) -> None:
        self._streamer = streamer
        self._outer = saved_tensor_hooks()

    @property
    def hooks(self) -> Any:
        """Hooks to enter. Kept nowhere: they keep us, and what was around us."""
        return saved_tensors_hooks(self._pack, self._unpack)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _pack(self, tensor: torch.Tensor) -> Any:
        with torch.no_grad():
            noted = self._streamer.pack(tensor)
        if noted is not None:
            return noted
        if self._outer is not None:
            return _Handed(self._outer[1], self._outer[0](tensor))
        return InPlace(tensor, None)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _unpack(self, saved: _Saved) -> torch.Tensor:
        return saved.unpack()


def others_are_around() -> bool:
    """Whether somebody else's hooks are on for what autograd saves. A module around this one whose
    own weights are in use has ours on."""
    top = saved_tensor_hooks()
    while top is not None and isinstance(getattr(top[0], "__self__", None), Watching):
        outer: Watching = top[0].__self__  # type: ignore[attr-defined]
        top = outer._outer
    return top is not None


class _Saved(Protocol):
    """What the graph holds instead of a tensor."""

    def unpack(self) -> torch.Tensor:
        """The tensor again."""


@dataclass(slots=True, eq=False)
class _Handed:
    """What the hooks around ours made of a tensor."""

    unpack_with: Callable[[Any], torch.Tensor]
    packed: Any

    def unpack(self) -> torch.Tensor:
        """The tensor again."""
        return self.unpack_with(self.packed)


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
            hooks = Watching(self._streamer).hooks
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
