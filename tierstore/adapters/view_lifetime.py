"""Leases that keep their memory as long as any view of their tensors exists."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping
from typing import Protocol

import torch

from tierstore.adapters.codecs.memory import over
from tierstore.lease import Lease
from tierstore.model.locks import RLock, guarded


class Holder:
    """Holds the memory of tensors. It is freed with the last of them."""

    def __init__(self, memory: object) -> None:
        self.memory = memory


class TensorLease(Protocol):
    """Leased tensors of a group."""

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors by name."""

    def release(self) -> None:
        """End the lease. A second call does nothing."""


class ViewLease:
    """A lease that ends when no view of its tensors exists.

    Autograd and other code may keep views of a weight; their memory stays valid.
    """

    def __init__(self, lease: Lease) -> None:
        holder = Holder(lease)
        self.tensors = {name: over(tensor, holder) for name, tensor in lease.tensors.items()}
        self._lease = lease
        self._holder = weakref.ref(holder)
        weakref.finalize(holder, lease.abandon).atexit = False

    def release(self) -> None:
        """Release the tensors. The lease ends now, or with the last remaining view."""
        self.tensors = {}
        if self._holder() is None:
            self._lease.release()


class HostViews:
    """Host views used in place of a lease, if the group does not fit."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def release(self) -> None:
        """Do nothing, as there is no lease."""


class Allowance:
    """A count of bytes in use, up to a limit. Finalizers can release bytes at any point."""

    def __init__(self) -> None:
        self._taken = 0
        self._released: deque[int] = deque()
        self._lock = RLock()

    @property
    @guarded
    def taken(self) -> int:
        """Number of bytes in use."""
        return self._settled()

    @guarded
    def take(self, nbytes: int, limit: int | None) -> bool:
        """Take bytes if the limit allows it. Return whether they were taken."""
        taken = self._settled()
        if limit is not None and taken + nbytes > limit:
            return False
        self._taken += nbytes
        return True

    def _settled(self) -> int:
        while self._released:
            self._taken -= self._released.popleft()
        return self._taken

    def release(self, nbytes: int) -> None:
        """Return bytes to the allowance."""
        self._released.append(nbytes)
