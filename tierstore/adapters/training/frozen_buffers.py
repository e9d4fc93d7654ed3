"""Where frozen parameters of a model in training are: in the files that they came from, and in RAM
as far as there is room.

Nothing of them changes, so they are groups like those of a model in inference: read by reference,
never written back, in an order that the store learns. Whoever changes one after all makes it part
of the training state.
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
    forget_group,
    packed_bytes,
)
from tierstore.adapters.view_lifetime import ViewLease
from tierstore.errors import BudgetError
from tierstore.store import TierStore, engine_of
from tierstore.system.maps import AddressSpace, WriteWatch

FROZEN = "frozen"
"""How the keys of such groups end."""


class FrozenBuffer:
    """One group of frozen parameters. `tensors` shows it, at all times: private maps of its file.

    Raises what `TierStore.register` raises.
    """

    host_resident = False

    def __init__(
        self, store: TierStore, key: str, tensors: Mapping[str, torch.Tensor], space: AddressSpace
    ) -> None:
        self.store = store
        self.key = key
        self.nbytes = packed_bytes(tensors)
        self.tensors = engine_of(store).groups.register(key, tensors, space)
        self._end = weakref.finalize(self, forget_group, weakref.ref(store), key)
        self._end.atexit = False

    def read(self) -> ViewLease:
        """The tensors on the device, to be read there."""
        return ViewLease(self.store.acquire(self.key))

    def ready(self) -> None:
        """It can be seen from the beginning."""

    def expected(self) -> None:
        """It is wanted next. The store knows."""

    def put_away(self) -> None:
        """Nobody uses it for now. What is in RAM of it is what it shows, and may stay."""

    def discard(self) -> None:
        """It is not needed any more."""
        self.tensors = {}
        self._end()


def _is_frozen(parameters: Mapping[str, torch.Tensor]) -> bool:
    return not any(parameter.requires_grad for parameter in parameters.values())


def expect_buffer(budget: StateBudget, parameters: Mapping[str, torch.Tensor]) -> None:
    """There will be a `buffer_of` these parameters."""
    expect = budget.expect_frozen if _is_frozen(parameters) else budget.expect
    expect(packed_bytes(_memory(parameters)))


def _memory(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: memory_of(parameter) for name, parameter in parameters.items()}


def buffer_of(
    store: TierStore, key: str, parameters: Mapping[str, torch.Tensor], space: AddressSpace
) -> StateBuffer | FrozenBuffer:
    """Where parameters are that are all frozen, or all trained: of sharded ones, the shards."""
    tensors = _memory(parameters)
    if _is_frozen(parameters):
        with contextlib.suppress(BudgetError):  # no file holds it, and there is no room to write it
            return FrozenBuffer(store, f"{key}/{FROZEN}", tensors, space)
    return StateBuffer(store, key, tensors)


def watch_of(buffers: list[FrozenBuffer]) -> WriteWatch:
    """Notices what is written to what they show. Ranges are numbered as tensors follow each
    other."""
    shown = [tensor for buffer in buffers for tensor in buffer.tensors.values()]
    return WriteWatch([(address_of(tensor), tensor_bytes(tensor)) for tensor in shown])
