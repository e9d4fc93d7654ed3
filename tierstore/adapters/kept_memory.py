"""Memory of weights that stays in RAM although they went to a store: something else shows it."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping

import torch

from tierstore.adapters.codecs.memory import address_of, storage_reference, tensor_bytes
from tierstore.model.formatting import count, size
from tierstore.system.maps import AddressSpace

logger = logging.getLogger("tierstore.adapters")


class KeptMemory:
    """Notes where tensors lie before they go to a store, and tells of what is kept of that after.

    A view that was made when the model was built, or a `state_dict()`, keeps a weight's memory.
    """

    def __init__(self, space: AddressSpace) -> None:
        self._space = space
        self._storages: dict[str, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def note(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """These are about to show other memory."""
        for name, tensor in tensors.items():
            nbytes = tensor_bytes(tensor)
            in_ram = tensor.device.type == "cpu" and nbytes
            if in_ram and self._space.extent_at(address_of(tensor), nbytes) is None:
                self._storages[name] = storage_reference(tensor), nbytes

    def log(self, model: str) -> None:
        """Log what is kept, once for a model, if anything is."""
        kept = {name: n for name, (storage, n) in self._storages.items() if storage() is not None}
        if kept:
            logger.warning(
                "%s: %s of %s (first: %s) stay in RAM beside the budgets, as something else shows "
                "their memory: a view that was made in __init__, a state_dict(), an optimizer. Let "
                "go of it, or keep a copy of what is needed",
                model,
                size(sum(kept.values())),
                count(len(kept), "weight"),
                next(iter(kept)),
            )
