"""Tensors of a model that stay on the device for as long as the model is offloaded.

They are small, or their place is there. What they take is counted in the budget: it is a leased
group of the store.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from tierstore.adapters.codecs import is_storable
from tierstore.adapters.codecs.memory import over, tensor_bytes
from tierstore.adapters.codecs.plain import assign
from tierstore.adapters.codecs.wrapper import exchange
from tierstore.lease import Lease
from tierstore.model.outline import in_portions
from tierstore.model.tiers import Access
from tierstore.store import TierStore, engine_of


def is_resident(key: str) -> bool:
    """Whether a group of a store is one of tensors that stay on the device."""
    return key.endswith("/resident")


class DeviceResident:
    """Tensors on the device of a store, and where they were before."""

    def __init__(self, store: TierStore) -> None:
        self._store = store
        self._before: list[tuple[torch.Tensor, torch.device]] = []
        self._swapped: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.leases: list[Lease] = []

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those that show the store's memory."""
        return [tensor for tensor, _ in self._before]

    def take(
        self,
        prefix: str,
        tensors: Mapping[str, torch.Tensor],
        target: int,
        groups: dict[str, list[str]],
    ) -> None:
        """Bring tensors to the device, in groups of up to `target` bytes.

        They are added to `groups`, the names of the tensors in each. Their keys begin with `prefix`
        and end with `/resident`.
        """
        for tensor in tensors.values():
            if not is_storable(tensor):
                self._swap(tensor)
        held = [name for name, tensor in tensors.items() if is_storable(tensor)]
        portions = in_portions(held, lambda name: tensor_bytes(tensors[name]), target)
        for number, names in enumerate(portions):
            key = f"{prefix}/{number}/resident" if number else f"{prefix}/resident"
            groups[key] = names
            self._take(key, {name: tensors[name] for name in names})

    def _take(self, key: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self._store.put(key, tensors, durable=False)
        lease = engine_of(self._store).leases.acquire_permanently(key, Access.UPDATE)
        self.leases.append(lease)
        for name, tensor in tensors.items():
            self._before.append((tensor, tensor.device))
            assign(tensor, over(lease.tensors[name]))

    def _swap(self, tensor: torch.Tensor) -> None:
        """Move what no store holds, such as a quantised weight."""
        moved = tensor.detach().to(self._store.device)
        if isinstance(tensor, nn.Parameter):
            moved = nn.Parameter(moved, requires_grad=tensor.requires_grad)
        exchange(tensor, moved)
        self._swapped.append((tensor, moved))

    def give_back(self) -> None:
        """Let them be where they were before, with the values that they have now."""
        while self._swapped:
            exchange(*self._swapped.pop())
        for tensor, device in self._before:
            assign(tensor, tensor.detach().to(device, copy=True))
        self._before.clear()
        while self.leases:
            self.leases.pop().release()
