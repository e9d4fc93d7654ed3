"""What a tensor of a model shows while it is away and while it is used; noticing its changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import torch

from tierstore.lease import Lease
from tierstore.model.errors import UnknownKeyError
from tierstore.store import TierStore


def assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Let `tensor` show the memory of `value`, on whatever device. It stays the same object."""
    try:
        tensor.data = value
    except RuntimeError:
        # Some accelerators outside of torch allow this only between tensors of their own.
        other = torch.Tensor._make_subclass(type(tensor), value, tensor.requires_grad)
        other.__dict__.update(tensor.__dict__)
        torch.utils.swap_tensors(tensor, other)


class Binding:
    """A tensor of the model, the group it is in, and its home: what it shows while away.

    `users` counts the running units that show it. `edited` tells whether somebody gave it other
    memory or wrote to it by a torch operation since it was brought home. (Writes that torch does
    not count, such as to `tensor.data`, show in the pages of the home: see `WriteWatch`.)
    """

    __slots__ = ("_seen", "home", "key", "name", "tensor", "users", "version")

    def __init__(self, tensor: torch.Tensor, key: str, name: str, home: torch.Tensor) -> None:
        self.tensor = tensor
        self.name = name
        self.users = 0
        self.settle(key, home)

    def settle(self, key: str, home: torch.Tensor) -> None:
        """The tensor is in group `key` from now on, and away."""
        self.key = key
        self.home = home
        if self.users == 0:
            self._bring_home()

    def _bring_home(self) -> None:
        assign(self.tensor, self.home)
        self.version = version_of(self.tensor)
        self._seen = (self.home.data_ptr(), self.home.dtype, self.home.shape)

    @property
    def edited(self) -> bool:
        """Whether it is away and not what it was."""
        if self.users:
            return False
        now = (self.tensor.data_ptr(), self.tensor.dtype, self.tensor.shape)
        return now != self._seen or version_of(self.tensor) != self.version

    def show(self, leased: Mapping[str, torch.Tensor]) -> None:
        """Let the tensor show the leased bytes."""
        if self.users == 0:
            assign(self.tensor, leased[self.name])
            self.version = version_of(self.tensor)
        self.users += 1

    def put_back(self) -> None:
        """Let it show its home again, when the last unit is done with it."""
        self.users -= 1
        if self.users:
            return
        if version_of(self.tensor) != self.version:
            # The forward itself changed it. The home is where the change is kept, and noticed.
            self.home.copy_(self.tensor.detach())
            assign(self.tensor, self.home)
            self.version = -1
            return
        self._bring_home()
        if torch.is_grad_enabled() and self.tensor.requires_grad:
            # What autograd saved shows memory that is used again: a backward must raise.
            torch.autograd.graph.increment_version(self.tensor)
            self.version = version_of(self.tensor)


def version_of(tensor: torch.Tensor) -> int:
    """How often torch operations wrote to a tensor; 0 for inference tensors, which do not count."""
    return 0 if tensor.is_inference() else tensor._version


class Loan:
    """What one unit needs of the store while it runs.

    `renew` is called with the bindings that were edited, before they are used.
    """

    def __init__(
        self,
        store: TierStore,
        bindings: list[Binding],
        lock: threading.Lock,
        renew: Callable[[list[Binding]], None],
    ) -> None:
        self._store = store
        self._bindings = bindings
        self._lock = lock
        self._renew = renew

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def enter(self) -> list[Lease]:
        """Bring the tensors in. Undone by `leave`; nothing is held if it raises.

        Every call holds leases of its own, so that calls on several threads may overlap.
        """
        edited = [binding for binding in self._bindings if binding.edited]
        if edited:
            self._renew(edited)
        leases = self._acquire_all()
        shown: list[Binding] = []
        try:
            tensors = {lease.key: lease.tensors for lease in leases}
            with self._lock:
                for binding in self._bindings:
                    binding.show(tensors[binding.key])
                    shown.append(binding)
        except BaseException:
            self._send_back(shown, leases)
            raise
        return leases

    def _acquire_all(self) -> list[Lease]:
        leases: list[Lease] = []
        keys = list(dict.fromkeys(binding.key for binding in self._bindings))
        try:
            for key in keys:
                leases.append(self._store.acquire(key))
        except BaseException as error:
            self._send_back([], leases)
            renewed = any(binding.key not in keys for binding in self._bindings)
            if isinstance(error, UnknownKeyError) and renewed:  # on another thread, meanwhile
                return self._acquire_all()
            raise
        return leases

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def leave(self, leases: list[Lease]) -> None:
        """The opposite of `enter`."""
        self._send_back(self._bindings, leases)

    def _send_back(self, shown: list[Binding], leases: list[Lease]) -> None:
        with self._lock:
            for binding in shown:
                binding.put_back()
        for lease in reversed(leases):
            lease.release()
