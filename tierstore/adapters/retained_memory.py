"""Detect weights whose old memory stays in RAM because something else still refers to it."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping

import torch

from tierstore.adapters.codecs.memory import address_of, storage_reference, tensor_bytes
from tierstore.model.formatting import count, size
from tierstore.system.maps import AddressSpace

logger = logging.getLogger("tierstore.adapters")


class RetainedMemory:
    """Records the memory of tensors that move to a store, and logs what is retained afterwards.

    A view created when the model was built, or a `state_dict()`, retains a weight's memory.
    """

    def __init__(self, space: AddressSpace) -> None:
        self._space = space
        self._storages: dict[str, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def note(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Record the current memory of tensors that are about to move."""
        for name, tensor in tensors.items():
            nbytes = tensor_bytes(tensor)
            in_ram = tensor.device.type == "cpu" and nbytes
            if in_ram and self._space.extent_at(address_of(tensor), nbytes) is None:
                self._storages[name] = storage_reference(tensor), nbytes

    def log(self, model: str) -> None:
        """Log a warning if any recorded memory is still retained."""
        kept = {name: n for name, (storage, n) in self._storages.items() if storage() is not None}
        if kept:
            logger.warning(
                "%s: %s of %s (first: %s) stay in RAM outside the budgets, as something else "
                "refers to their memory: a view created in __init__, a state_dict(), an optimizer. "
                "Delete it, or keep a copy of what is needed",
                model,
                size(sum(kept.values())),
                count(len(kept), "weight"),
                next(iter(kept)),
            )
