"""Memory of a store that is lent to tensors of their own, for as long as anybody looks at it."""

from __future__ import annotations

import weakref

import torch

from tierstore.adapters.grouping import span
from tierstore.lease import Lease


class Holder:
    """Keeps the memory that tensors show. It goes with the last of them."""

    def __init__(self, memory: object) -> None:
        self.memory = memory


def over(tensor: torch.Tensor, holder: object) -> torch.Tensor:
    """A tensor over the same memory, as a storage of its own that keeps `holder`.

    Who saves a tensor saves its whole storage, and who looks at a part of it keeps all of it.
    """
    if not tensor.numel():
        return tensor
    storage = torch._C._construct_storage_from_data_pointer(
        tensor.data_ptr(), tensor.device, span(tensor)
    )
    vars(storage)["holder"] = holder
    alone = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alone.set_(storage, 0, tensor.shape, tensor.stride())


class Loan:
    """The tensors of a lease, which ends when nobody looks at any of them.

    Autograd, and whoever else comes by, may keep a view of a weight. What it looks at stays.
    """

    def __init__(self, lease: Lease) -> None:
        holder = Holder(lease)
        self.tensors = {name: over(tensor, holder) for name, tensor in lease.tensors.items()}
        self._lease = lease
        self._holder = weakref.ref(holder)
        weakref.finalize(holder, lease.abandon).atexit = False

    def end(self) -> None:
        """Let go of it. If nobody else looks at it, the lease is over now."""
        self.tensors = {}
        if self._holder() is None:
            self._lease.release()
