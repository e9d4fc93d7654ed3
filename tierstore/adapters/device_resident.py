"""Tensors of a model that stay on the device for as long as the model is offloaded.

They are small, or their place is there: then they are in a group of the store that is leased. Or no
codec knows their kind: then they lie outside of the store, and its budget is smaller by as much.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from tierstore.adapters.codecs import leaves_of, weight_bytes, with_names
from tierstore.adapters.codecs.memory import over, tensor_bytes
from tierstore.adapters.codecs.plain import assign
from tierstore.adapters.codecs.wrapper import exchange
from tierstore.adapters.wrapped import WrappedTensor, wrapped_tensors
from tierstore.lease import Lease
from tierstore.model.outline import in_portions
from tierstore.model.tiers import Access
from tierstore.store import TierStore, engine_of
from tierstore.torch_private import version_of

logger = logging.getLogger("tierstore.adapters")


def is_resident(key: str) -> bool:
    """Whether a group of a store is one of tensors that stay on the device."""
    return key.endswith("/resident")


@dataclass(eq=False)
class DeviceShare:
    """A model's part of the fastest tier: leases, and bytes `outside` of the store.

    It does not keep the model alive, whose end it outlives.
    """

    leases: list[Lease] = field(default_factory=list)
    outside: int = 0

    def give_back_soon(self, store: TierStore | None) -> None:
        """The model is gone, and maybe the store. For finalizers, which may run anywhere."""
        for lease in self.leases:
            lease.abandon()
        if store is not None and self.outside:
            engine_of(store).device_memory.count_inside_again_soon(self.outside)


class DeviceResident:
    """Tensors on the device of a store, and where they were before. `share` is what they take."""

    def __init__(self, store: TierStore) -> None:
        self._store = store
        self.share = DeviceShare()
        self._before: list[tuple[weakref.ref[torch.Tensor], torch.device]] = []
        self._wrapped: list[WrappedTensor] = []
        self._swapped: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._told: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those that show the store's memory."""
        return [tensor for tensor, _ in self._places()]

    def _places(self) -> list[tuple[torch.Tensor, torch.device]]:
        """Those that are not gone, and where they were."""
        found = [(reference(), device) for reference, device in self._before]
        return [(tensor, device) for tensor, device in found if tensor is not None]

    def told(self, tensor: torch.Tensor) -> torch.Tensor:
        """One of them on the CPU, for a state dict. Whoever writes to that writes to the model, as
        in any state dict, once `take_told` is called."""
        self._take_told(id(tensor))
        copied = tensor.detach().to("cpu", copy=True)
        self._told[id(tensor)] = tensor, copied, version_of(tensor)
        return copied

    def take_told(self) -> None:
        """Before they are used: let them have what was written to what was told of them."""
        for number in list(self._told):
            self._take_told(number)

    @torch.no_grad()
    def _take_told(self, number: int) -> None:
        if number in self._told:
            tensor, told, version = self._told.pop(number)
            # If it was written to itself, that came later.
            if version_of(tensor) == version and not torch.equal(tensor.detach().cpu(), told):
                tensor.detach().copy_(told)

    def take(
        self,
        prefix: str,
        tensors: Mapping[str, torch.Tensor],
        target: int,
        groups: dict[str, list[str]],
        trained: Collection[torch.Tensor] = (),
    ) -> None:
        """Bring tensors to the device, in groups of up to `target` bytes.

        They are added to `groups`, the names of the tensors in each. Their keys begin with `prefix`
        and end with `/resident`. Where the device is the CPU, all of them are there already, and
        the store's budget is smaller by the bytes of those that are `trained`.

        Raises BudgetError if those that lie outside of the store leave no room in the budget.
        """
        leaves = {name: leaves_of(tensor) for name, tensor in tensors.items()}
        self._keep_outside(prefix, {n: t for n, t in tensors.items() if not leaves[n]})
        if self._store.device.type == "cpu":
            self._count_outside(weight_bytes(t for t in trained if leaves_of(t)))
            return
        held: dict[str, torch.Tensor] = {}
        for name, found in leaves.items():
            held |= with_names(name, found)
        portions = in_portions(held, lambda name: tensor_bytes(held[name]), target)
        for number, names in enumerate(portions):
            key = f"{prefix}/{number}/resident" if number else f"{prefix}/resident"
            groups[key] = names
            self._take(key, {name: held[name] for name in names})
        for wrapped in wrapped_tensors(tensors.values()):
            wrapped.show(self)
            self._wrapped.append(wrapped)

    def _take(self, key: str, tensors: Mapping[str, torch.Tensor]) -> None:
        engine = engine_of(self._store)
        if engine.is_connected:
            # They pass through the service's memory: there may be none of our own. What changes is
            # the copy on the device, which nobody else has for as long as it is leased.
            engine.groups.register(key, tensors)
            lease = engine.leases.acquire_permanently(key, Access.READ)
        else:
            self._store.put(key, tensors, durable=False)
            lease = engine.leases.acquire_permanently(key, Access.UPDATE)
        self.share.leases.append(lease)
        for name, tensor in tensors.items():
            self._before.append((weakref.ref(tensor), tensor.device))
            _assign_with_gradient(tensor, over(lease.tensors[name]))

    def _keep_outside(self, prefix: str, unknown: Mapping[str, torch.Tensor]) -> None:
        """Of these, no store can hold any."""
        if not unknown:
            return
        nbytes = weight_bytes(unknown.values())
        kinds = sorted({type(tensor).__name__ for tensor in unknown.values()})
        logger.warning(
            "%s: %d tensors (%s) of %s bytes are of a kind that no store takes: they stay on "
            "%s, and the budget there is smaller by as much",
            prefix,
            len(unknown),
            ", ".join(kinds),
            f"{nbytes:,}",
            self._store.device,
        )
        self._count_outside(nbytes)
        if self._store.device.type != "cpu":
            for tensor in unknown.values():
                self._swap(tensor)

    def _count_outside(self, nbytes: int) -> None:
        if nbytes:
            engine_of(self._store).device_memory.count_outside(nbytes)
            self.share.outside += nbytes

    def _swap(self, tensor: torch.Tensor) -> None:
        moved = tensor.detach().to(self._store.device)
        if isinstance(tensor, nn.Parameter):
            moved = nn.Parameter(moved, requires_grad=tensor.requires_grad)
        exchange(tensor, moved)
        self._swapped.append((tensor, moved))

    def give_back(self) -> None:
        """Let them be where they were before, with the values that they have now."""
        self.take_told()
        while self._swapped:
            exchange(*self._swapped.pop())
        while self._wrapped:
            self._wrapped.pop().put_back(self)
        for tensor, device in self._places():
            _assign_with_gradient(tensor, tensor.detach().to(device, copy=True))
        self._before.clear()
        while self.share.leases:
            self.share.leases.pop().release()
        outside, self.share.outside = self.share.outside, 0
        if outside:
            engine_of(self._store).device_memory.count_outside(-outside)


def _assign_with_gradient(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Let a tensor show other memory, and its gradient, if it has one, be on the same device."""
    gradient = tensor.grad if tensor.requires_grad and tensor.is_leaf else None
    if gradient is not None:
        tensor.grad = None
    assign(tensor, value)
    if gradient is not None:
        tensor.grad = gradient.to(value.device)
