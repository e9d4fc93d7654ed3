"""Saved-tensor hooks: autograd keeps a note of each weight, and the backward pass leases it again.

While a module runs with leased weights, `WeightHooks` are on. They replace each view of a leased
weight that autograd saves by an `Unpack`: which weight it was, and how it was looked at. The
backward pass calls that, and the weight is leased again (`BackwardLeases`). So the memory of a
weight serves others between the passes, and gradients are the same to the last bit: the tensor that
comes back has the same bytes, the same strides, and an alignment as good.

Inference and training share all of it; a `LeaseOwner` says where a weight is leased again.

(FSDP2 of PyTorch frees and refills the storages themselves, `torch.distributed.fsdp`. That is as
exact, but wants memory that can be resized, which neither a pool of pinned memory nor a map is.)
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tierstore.adapters.activations import Unpack, packed_in_place
from tierstore.adapters.activations.in_place import described, refuse_changed
from tierstore.adapters.binding import BindingPolicy, ParameterBinding
from tierstore.adapters.codecs.memory import Geometry, address_of, geometry_of, span
from tierstore.adapters.codecs.wrapper import WrapperCodec, is_wrapper
from tierstore.adapters.compat import PackView
from tierstore.adapters.view_lifetime import TensorLease
from tierstore.torch_private import (
    after_backward,
    base_of,
    in_backward,
    saved_tensor_hooks,
    version_of,
)

_CAST = "ToCopyBackward0"
"""Name of a cast's node in autograd."""


class WeightHooks:
    """Take the weights out of what autograd saves, and pass the rest on to the hooks before."""

    def __init__(self, pack_view: PackView) -> None:
        self._pack_view = pack_view
        self._outer = saved_tensor_hooks()

    @property
    def hooks(self) -> Any:
        """Hooks to enter. Kept nowhere: they keep us, and what was around us."""
        return saved_tensors_hooks(self._pack, self._unpack)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _pack(self, tensor: torch.Tensor) -> Unpack:
        with torch.no_grad():
            found = self._pack_weight(tensor)
        if found is not None:
            return found
        if self._outer is not None:
            pack, unpack = self._outer
            return functools.partial(unpack, pack(tensor))
        return packed_in_place(tensor)

    def _pack_weight(self, tensor: torch.Tensor) -> Unpack | None:
        """Return what brings a saved tensor back, if it is a view of a leased weight, or of such a
        weight's cast, as autocast makes them: the weight is then cast again."""
        if is_wrapper(tensor):
            return self._pack_parts(tensor)
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return None
        found = self._pack_view(tensor)
        if found is not None or (made := _cast_in(tensor)) is None:
            return found
        leaf, cast = made
        weight = self._pack_view(leaf)
        if weight is None:
            return None
        return functools.partial(_cast_again, weight, geometry_of(cast), geometry_of(tensor))

    def _pack_parts(self, tensor: torch.Tensor) -> Unpack | None:
        """Return what brings a tensor back that consists of others, if a leased weight is in it."""
        codec = WrapperCodec()
        parts = codec.flatten(tensor)
        found = {name: self._pack_weight(part) for name, part in parts.items()}
        if not any(found.values()):
            return None
        rebuild = codec.rebuilder(tensor)
        each = {name: found[name] or packed_in_place(part) for name, part in parts.items()}
        return lambda: rebuild({name: unpack() for name, unpack in each.items()})

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _unpack(self, unpack: Unpack) -> torch.Tensor:
        return unpack()


def other_hooks_are_on() -> bool:
    """Tell whether another library's saved-tensor hooks are on. A module around this one whose own
    weights are in use has ours on."""
    top = saved_tensor_hooks()
    while top is not None and isinstance(getattr(top[0], "__self__", None), WeightHooks):
        outer: WeightHooks = top[0].__self__  # type: ignore[attr-defined]
        top = outer._outer
    return top is not None


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


@torch.no_grad()
def _cast_again(weight: Unpack, cast: Geometry, geometry: Geometry) -> torch.Tensor:
    """A view of a weight's cast: the same bytes, laid out in the same way."""
    return geometry.within(cast.empty().copy_(weight()))


# Which weight it was ------------------------------------------------------------------------------


class LeasedMemory(NamedTuple):
    """Leased memory: which tensor `name` of group `key` it holds, and the binding of the weight."""

    start: int
    stop: int
    binding: ParameterBinding
    key: str
    name: str

    @staticmethod
    def of(tensor: torch.Tensor, binding: ParameterBinding, key: str, name: str) -> LeasedMemory:
        """Return that of a tensor that is not empty."""
        start = address_of(tensor)
        return LeasedMemory(start, start + span(tensor), binding, key, name)


class LeaseOwner(Protocol):
    """Leases the groups of one model."""

    def lease_again(self, memory: LeasedMemory) -> Mapping[str, torch.Tensor]:
        """Return the tensors of the memory's group, on the device, for a backward pass.

        Raises RuntimeError if the weight is not what it was.
        """


class SavedViews:
    """Recognizes views of the weights that one use of a unit has leased."""

    def __init__(
        self,
        owner: LeaseOwner,
        bindings: Iterable[ParameterBinding],
        leased: Mapping[str, torch.Tensor],
    ) -> None:
        self._owner = owner
        shown = [(b, leased[b.name]) for b in bindings if leased[b.name].numel()]
        self._leased = [LeasedMemory.of(t, b, b.key, b.name) for b, t in shown]
        self._device = shown[0][1].device if shown else None
        self._start = min((each.start for each in self._leased), default=0)
        self._stop = max((each.stop for each in self._leased), default=0)

    def pack(self, tensor: torch.Tensor) -> Unpack | None:
        """Return what brings a saved tensor back, if it is a view of a weight that is leased."""
        if not self._start <= address_of(tensor) < self._stop or tensor.device != self._device:
            return None
        return pack_view(self._owner, self._leased, tensor)


def pack_view(
    owner: LeaseOwner, leased: Iterable[LeasedMemory], tensor: torch.Tensor
) -> Unpack | None:
    """Return what brings a saved tensor back, if it is a view of leased memory on its device."""
    address = address_of(tensor)
    for each in leased:
        if each.start <= address < each.stop:
            geometry = geometry_of(tensor)
            origin = geometry.offset * tensor.element_size() - (address - each.start)
            note = version_of(each.binding.tensor), origin, geometry, described(tensor)
            return functools.partial(_view_again, owner, each, *note)
    return None


@torch.no_grad()
def _view_again(
    owner: LeaseOwner,
    memory: LeasedMemory,
    version: int,
    origin: int,
    geometry: Geometry,
    description: str,
) -> torch.Tensor:
    """Return a view of a weight, as it was saved at this `version`: `origin` is where the weight
    began in the storage of the view. Raises RuntimeError if the weight is not what it was."""
    binding = memory.binding
    if binding.policy is not BindingPolicy.MUTABLE:
        if binding.tensor.requires_grad:
            refuse_backward()
        version = binding.version  # a change has become another group since, and counts anew
    refuse_changed(description, version_of(binding.tensor), version)
    return geometry.within(owner.lease_again(memory)[memory.name], origin)


def refuse_backward(*gradients: Any) -> None:
    """Raise the error of a backward pass through weights that are away."""
    raise RuntimeError(
        "this backward needs weights that have left the device since the forward: they are in a "
        "tierstore. Run the forward under torch.no_grad() if no gradient is wanted. To train a few "
        "weights, freeze the others before (model.requires_grad_(False)); to train all, make it an "
        "ordinary model first (tierstore.disable_offload(model))"
    )


class BackwardLeases:
    """The groups that a backward pass used last: up to `limit` of them (None: all) stay leased
    until it is over.

    The oldest is released before another one is leased, so that a backward pass never waits for
    itself. Tensors that somebody still looks at stay until nobody does.
    """

    def __init__(self, lease: Callable[[str], TensorLease], limit: int | None) -> None:
        self._lease = lease
        self._limit = limit
        self._leases: OrderedDict[str, TensorLease] = OrderedDict()
        self._lock = threading.RLock()

    def tensors(self, key: str) -> Mapping[str, torch.Tensor]:
        """Return the tensors of a group, on the device for as long as anybody looks at them.

        Raises what leasing raises.
        """
        with self._lock:
            if (found := self._leases.get(key)) is not None:
                self._leases.move_to_end(key)
                return found.tensors
        while self._limit is not None and len(self._leases) >= self._limit:
            self._release_oldest()
        lease = self._lease(key)
        tensors = lease.tensors
        if in_backward():
            after_backward(self.release_all)
            with self._lock:
                before = self._leases.pop(key, None)
                self._leases[key] = lease
            if before is not None:
                before.release()
        return tensors

    def release(self, keys: Iterable[str]) -> None:
        """Release these groups."""
        with self._lock:
            leases = [self._leases.pop(key) for key in keys if key in self._leases]
        for lease in leases:
            lease.release()

    def release_all(self) -> None:
        """Release all of them."""
        while self._leases:
            self._release_oldest()

    def _release_oldest(self) -> None:
        with self._lock:
            lease = self._leases.popitem(last=False)[1] if self._leases else None
        if lease is not None:
            lease.release()
