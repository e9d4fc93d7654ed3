"""Storage of frozen parameters: in their original files, cached in RAM as space allows.

Frozen parameters never change, so they are groups like those of a model in inference: registered in
place, never written back, and prefetched in the order that the store learns. If a frozen parameter
is changed anyway, it becomes part of the training state.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping

import torch

from tierstore.adapters.codecs.memory import address_of, tensor_bytes
from tierstore.adapters.training.sharded import memory_of
from tierstore.adapters.training.state_buffers import (
    StateBudget,
    StateBuffer,
    discard_group,
    packed_bytes,
)
from tierstore.adapters.view_lifetime import ViewLease
from tierstore.errors import BudgetError
from tierstore.store import TierStore, engine_of
from tierstore.system.maps import AddressSpace, WriteWatch

FROZEN = "frozen"
"""Last part of the keys of frozen groups."""


class FrozenBuffer:
    """One group of frozen parameters. `tensors` are private mapped views of its file.

    Raises the errors of `TierStore.register`.
    """

    host_resident = False

    def __init__(
        self, store: TierStore, key: str, tensors: Mapping[str, torch.Tensor], space: AddressSpace
    ) -> None:
        self.store = store
        self.key = key
        self.nbytes = packed_bytes(tensors)
        self.tensors = engine_of(store).groups.register(key, tensors, space)
        self._end = weakref.finalize(self, discard_group, weakref.ref(store), key)
        self._end.atexit = False

    def read(self) -> ViewLease:
        """Lease the tensors on the device, for reading."""
        return ViewLease(self.store.acquire(self.key))

    def ready(self) -> None:
        """No-op: `tensors` can be used immediately."""

    def mark_expected(self) -> None:
        """No-op: the store tracks its copies."""

    def flush(self) -> None:
        """No-op: the copy in RAM equals the file, so the store may keep it."""

    def discard(self) -> None:
        """Free the group."""
        self.tensors = {}
        self._end()


def _is_frozen(parameters: Mapping[str, torch.Tensor]) -> bool:
    return not any(parameter.requires_grad for parameter in parameters.values())


def account_for(budget: StateBudget, parameters: Mapping[str, torch.Tensor]) -> None:
    """Account for a future `create_buffer` of these parameters in the state budget."""
    count_group = budget.count_frozen_group if _is_frozen(parameters) else budget.count_group
    count_group(packed_bytes(_memory(parameters)))


def _memory(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: memory_of(parameter) for name, parameter in parameters.items()}


def create_buffer(
    store: TierStore, key: str, parameters: Mapping[str, torch.Tensor], space: AddressSpace
) -> StateBuffer | FrozenBuffer:
    """Return a buffer for parameters that are all frozen or all trained.

    For sharded parameters, it stores the shards.
    """
    tensors = _memory(parameters)
    if _is_frozen(parameters):
        with contextlib.suppress(BudgetError):  # in no file, and the budget does not allow writing
            return FrozenBuffer(store, f"{key}/{FROZEN}", tensors, space)
    return StateBuffer(store, key, tensors)


def write_watch_of(buffers: list[FrozenBuffer]) -> WriteWatch:
    """Return a watch for writes to the buffers' tensors. Ranges are numbered in tensor order."""
    views = [tensor for buffer in buffers for tensor in buffer.tensors.values()]
    return WriteWatch([(address_of(tensor), tensor_bytes(tensor)) for tensor in views])
