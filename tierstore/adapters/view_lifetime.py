"""Leases whose tensors keep their memory for as long as anybody looks at them."""

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
    """Keeps the memory that tensors show. It goes with the last of them."""

    def __init__(self, memory: object) -> None:
        self.memory = memory


class TensorLease(Protocol):
    """Tensors of a group, to be used until they are released."""

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors by name."""

    def release(self) -> None:
        """End the lease. A second call does nothing."""


class ViewLease:
    """The tensors of a lease, which ends when nobody looks at any of them.

    Autograd, and whoever else comes by, may keep a view of a weight. What it looks at stays.
    """

    def __init__(self, lease: Lease) -> None:
        holder = Holder(lease)
        self.tensors = {name: over(tensor, holder) for name, tensor in lease.tensors.items()}
        self._lease = lease
        self._holder = weakref.ref(holder)
        weakref.finalize(holder, lease.abandon).atexit = False

    def release(self) -> None:
        """Release it. If nobody else looks at its tensors, the lease is over now."""
        self.tensors = {}
        if self._holder() is None:
            self._lease.release()


class HostViews:
    """Host views in use where they are: there is no room to lease their group."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def release(self) -> None:
        """Nothing is leased."""


class Allowance:
    """Bytes that may be taken up to a limit, and that finalizers give back in the middle of
    anything."""

    def __init__(self) -> None:
        self._taken = 0
        self._given_back: deque[int] = deque()
        self._lock = RLock()

    @guarded
    def take(self, nbytes: int, limit: int | None) -> bool:
        """Whether so many bytes more are within the limit; if so, they are taken."""
        while self._given_back:
            self._taken -= self._given_back.popleft()
        if limit is not None and self._taken + nbytes > limit:
            return False
        self._taken += nbytes
        return True

    def give_back(self, nbytes: int) -> None:
        """So many bytes are not needed any more."""
        self._given_back.append(nbytes)
