"""What a tensor of a model shows while it is away and while it is used; noticing its changes."""

from __future__ import annotations

import threading
from collections.abc import Callable

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

    `users` are the visits during which it shows leased memory. `edited` tells whether somebody gave
    it other memory or wrote to it by a torch operation since it was brought home. (Writes that
    torch does not count, such as to `tensor.data`, show in the pages of the home: see
    `WriteWatch`.)
    """

    __slots__ = ("_seen", "home", "key", "name", "tensor", "users", "version")

    def __init__(self, tensor: torch.Tensor, key: str, name: str, home: torch.Tensor) -> None:
        self.tensor = tensor
        self.name = name
        self.users: set[object] = set()
        self.settle(key, home)

    def settle(self, key: str, home: torch.Tensor) -> None:
        """The tensor is in group `key` from now on, and away."""
        self.key = key
        self.home = home
        if not self.users:
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

    def show(self, visit: object, leased: torch.Tensor) -> None:
        """Let the tensor show the leased bytes while `visit` lasts."""
        first = not self.users
        self.users.add(visit)  # before anything is shown: wherever this ends, put_back undoes it
        if first:
            assign(self.tensor, leased)
            self.version = version_of(self.tensor)

    def put_back(self, visit: object) -> None:
        """Let it show its home again, when the last visit ends. May be repeated if interrupted."""
        if self.users == {visit}:
            self._put_back()
        self.users.discard(visit)

    def _put_back(self) -> None:
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
        self.store = store
        self.bindings = bindings
        self.lock = lock
        self.renew = renew


class Visit:
    """One run of a unit. `begin` brings its tensors in; `end`, whatever happened, undoes that.

    Every visit holds leases of its own, so that visits on several threads may overlap.
    """

    def __init__(self, loan: Loan) -> None:
        self._loan = loan
        self._leases: list[Lease] = []

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self) -> None:
        """Bring the tensors in. If it raises, `end` still has to be called."""
        loan = self._loan
        with loan.lock:  # in the middle of another thread's step, anything looks edited
            edited = [binding for binding in loan.bindings if binding.edited]
        if edited:
            loan.renew(edited)
        while not self._show():
            self._release_all()  # groups were renewed on another thread, meanwhile

    def _show(self) -> bool:
        keys = list(dict.fromkeys(binding.key for binding in self._loan.bindings))
        try:
            for key in keys:
                self._leases.append(self._loan.store.acquire(key))
        except UnknownKeyError:
            if all(binding.key in keys for binding in self._loan.bindings):
                raise
            return False
        tensors = {lease.key: lease.tensors for lease in self._leases}
        with self._loan.lock:
            if any(binding.key not in tensors for binding in self._loan.bindings):
                return False
            for binding in self._loan.bindings:
                binding.show(self, tensors[binding.key][binding.name])
        return True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(self) -> None:
        """Put everything back. To be called again if it was interrupted."""
        with self._loan.lock:
            for binding in self._loan.bindings:
                binding.put_back(self)
        self._release_all()

    def _release_all(self) -> None:
        while self._leases:
            self._leases[-1].release()
            self._leases.pop()
