"""Tensors of a model that stay on the device while the model is offloaded.

Small tensors, and tensors that a device map places there, are in groups of the store that stay
leased. Tensors of a kind that no codec knows stay outside the store, and reduce its budget.
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
    """Return whether a key names a group of tensors that stay on the device."""
    return key.endswith("/resident")


@dataclass(eq=False)
class DeviceShare:
    """A model's share of the fastest tier: leases, and bytes `outside` the store.

    Holds no reference to the model, and outlives it.
    """

    leases: list[Lease] = field(default_factory=list)
    outside: int = 0

    def release_soon(self, store: TierStore | None) -> None:
        """Release the share after the model, and possibly the store, were freed.

        Safe in finalizers, which may run at any point.
        """
        for lease in self.leases:
            lease.abandon()
        if store is not None and self.outside:
            engine_of(store).device_memory.release_outside_bytes_later(self.outside)


class DeviceResident:
    """Tensors moved to a store's device, with their original devices. `share` is their memory."""

    def __init__(self, store: TierStore) -> None:
        self._store = store
        self.share = DeviceShare()
        self._before: list[tuple[weakref.ref[torch.Tensor], torch.device]] = []
        self._wrapped: list[WrappedTensor] = []
        self._swapped: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._cpu_copies: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that are bound to the store's memory."""
        return [tensor for tensor, _ in self._live()]

    def _live(self) -> list[tuple[torch.Tensor, torch.device]]:
        """Return the tensors that still exist, with their original devices."""
        found = [(reference(), device) for reference, device in self._before]
        return [(tensor, device) for tensor, device in found if tensor is not None]

    def cpu_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a CPU copy of a tensor for a state dict.

        Writes to a state dict must reach the model: `apply_copy_writes` applies them to the tensor.
        """
        self._apply_copy_write(id(tensor))
        copied = tensor.detach().to("cpu", copy=True)
        self._cpu_copies[id(tensor)] = tensor, copied, version_of(tensor)
        return copied

    def apply_copy_writes(self) -> None:
        """Apply writes to CPU copies to their tensors, before the tensors are used."""
        for number in list(self._cpu_copies):
            self._apply_copy_write(number)

    @torch.no_grad()
    def _apply_copy_write(self, number: int) -> None:
        if number in self._cpu_copies:
            tensor, cpu_copy, version = self._cpu_copies.pop(number)
            # If the tensor itself was written to, that write is newer.
            if version_of(tensor) == version and not torch.equal(tensor.detach().cpu(), cpu_copy):
                tensor.detach().copy_(cpu_copy)

    def place(
        self,
        prefix: str,
        tensors: Mapping[str, torch.Tensor],
        target: int,
        groups: dict[str, list[str]],
        trained: Collection[torch.Tensor] = (),
    ) -> None:
        """Move tensors to the device, in groups of up to `target` bytes.

        The groups are added to `groups`, with keys that begin with `prefix` and end with
        `/resident`. If the device is the CPU, no tensor is moved, and the store's budget is reduced
        by the bytes of the `trained` ones.

        Raises BudgetError if the tensors outside the store exceed the budget.
        """
        leaves = {name: leaves_of(tensor) for name, tensor in tensors.items()}
        self._place_outside(prefix, {n: t for n, t in tensors.items() if not leaves[n]})
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
            self._place_group(key, {name: held[name] for name in names})
        for wrapped in wrapped_tensors(tensors.values()):
            wrapped.bind(self)
            self._wrapped.append(wrapped)

    def _place_group(self, key: str, tensors: Mapping[str, torch.Tensor]) -> None:
        engine = engine_of(self._store)
        if engine.is_connected:
            # Register them with the service, as this process may have no host memory. Changes are
            # made to the copy on the device, which is exclusive while it is leased.
            engine.groups.register(key, tensors)
            lease = engine.leases.acquire_permanently(key, Access.READ)
        else:
            self._store.put(key, tensors, durable=False)
            lease = engine.leases.acquire_permanently(key, Access.UPDATE)
        self.share.leases.append(lease)
        for name, tensor in tensors.items():
            self._before.append((weakref.ref(tensor), tensor.device))
            _assign_with_gradient(tensor, over(lease.tensors[name]))

    def _place_outside(self, prefix: str, unknown: Mapping[str, torch.Tensor]) -> None:
        """Place tensors of unknown kinds on the device, outside the store."""
        if not unknown:
            return
        nbytes = weight_bytes(unknown.values())
        kinds = sorted({type(tensor).__name__ for tensor in unknown.values()})
        logger.warning(
            "%s: %d tensors (%s) of %s bytes are of a kind that a store cannot hold: they stay on "
            "%s, and count against its budget",
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
            engine_of(self._store).device_memory.adjust_outside_bytes(nbytes)
            self.share.outside += nbytes

    def _swap(self, tensor: torch.Tensor) -> None:
        moved = tensor.detach().to(self._store.device)
        if isinstance(tensor, nn.Parameter):
            moved = nn.Parameter(moved, requires_grad=tensor.requires_grad)
        exchange(tensor, moved)
        self._swapped.append((tensor, moved))

    def release(self) -> None:
        """Move the tensors back to their original devices, with their current values."""
        self.apply_copy_writes()
        while self._swapped:
            exchange(*self._swapped.pop())
        while self._wrapped:
            self._wrapped.pop().unbind(self)
        for tensor, device in self._live():
            _assign_with_gradient(tensor, tensor.detach().to(device, copy=True))
        self._before.clear()
        while self.share.leases:
            self.share.leases.pop().release()
        outside, self.share.outside = self.share.outside, 0
        if outside:
            engine_of(self._store).device_memory.adjust_outside_bytes(-outside)


def _assign_with_gradient(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Point a tensor at other memory, and move its gradient, if any, to the same device."""
    gradient = tensor.grad if tensor.requires_grad and tensor.is_leaf else None
    if gradient is not None:
        tensor.grad = None
    assign(tensor, value)
    if gradient is not None:
        tensor.grad = gradient.to(value.device)
