"""What a tensor of a model shows while it is away and while it is used; noticing its changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tierstore.adapters.casting import CastCache
from tierstore.adapters.wrapping import (
    Arguments,
    refuse_to_go_back,
    tensors_in,
    with_tensors,
)
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


def make_ordinary(tensor: torch.Tensor) -> None:
    """Let a tensor that was made in inference mode be one as any other, of the same memory.

    Call it outside of inference mode. It stays the same object.
    """
    if not tensor.is_inference():
        return
    memory = tensor.untyped_storage()
    alike = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    alike.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
    if isinstance(tensor, torch.nn.Parameter):
        alike = torch.nn.Parameter(alike, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, alike)


class Binding:
    """A tensor of the model, the group it is in, and its home: what it shows while away.

    `user` is the visit during which it shows leased memory, one of them if there are `others`.
    `edited` tells whether somebody gave it other memory or wrote to it by a torch operation since
    it was brought home. (Writes that torch does not count, such as to `tensor.data`, show in the
    pages of the home: see `WriteWatch`.)

    All of this runs for every tensor in every step, between computations that fill the processor's
    caches: what counts is how few objects are touched.
    """

    __slots__ = (
        "_address",
        "_shown_at",
        "home",
        "key",
        "name",
        "others",
        "tensor",
        "user",
        "version",
    )

    def __init__(self, tensor: torch.Tensor, key: str, name: str, home: torch.Tensor) -> None:
        self.tensor = tensor
        self.name = name
        self.user: object = None
        self.others: set[object] | None = None
        self.settle(key, home)

    def settle(self, key: str, home: torch.Tensor) -> None:
        """The tensor is in group `key` from now on, and away."""
        self.key = key
        self.home = home
        self._address = home.data_ptr()
        if self.user is None:
            self._bring_home()

    def _bring_home(self) -> None:
        assign(self.tensor, self.home)
        self.version = version_of(self.tensor)

    @property
    def edited(self) -> bool:
        """Whether it is away and not what it was."""
        return self.user is None and not self._is_as(self.home)

    def _is_as(self, expected: torch.Tensor) -> bool:
        """Whether it shows its home, unchanged, in the form of `expected`."""
        tensor = self.tensor
        return (
            tensor.data_ptr() == self._address
            and version_of(tensor) == self.version
            and tensor.shape == expected.shape
            and tensor.stride() == expected.stride()
            and tensor.dtype is expected.dtype
            and not tensor.is_conj()
        )

    def show(self, visit: object, leased: torch.Tensor, *, unless_edited: bool) -> bool:
        """Let the tensor show the leased bytes while `visit` lasts. False if it was edited."""
        if self.user is not None:
            self.others = {visit} if self.others is None else {*self.others, visit}
            return True
        if unless_edited and not self._is_as(leased):
            return False
        self.user = visit  # before anything is shown: wherever this ends, put_back undoes it
        self._shown_at = leased.data_ptr()
        assign(self.tensor, leased)
        self.version = version_of(self.tensor)
        return True

    def put_back(self, visit: object, *, with_grad: bool) -> None:
        """Let it show its home again, when the last visit ends. May be repeated if interrupted.

        `with_grad` tells whether autograd may have saved it.
        """
        if self.others:
            self._leave_to_others(visit, self.others)
        if self.user is visit:
            self._put_back(with_grad)
            self.user = None

    def _leave_to_others(self, visit: object, others: set[object]) -> None:
        others.discard(visit)
        if self.user is visit and others:
            self.user = next(iter(others))
            others.discard(self.user)

    def value(self, shown: torch.Tensor) -> torch.Tensor:
        """What the tensor is, in memory that nobody uses again: its home if it is in use; else what
        it shows. If it was changed in use, that is known when the use is over."""
        return (
            shown if self.user is None and shown.data_ptr() == self.tensor.data_ptr() else self.home
        )

    def leave(self, visit: object) -> None:
        """Show the home again; what the tensor showed during `visit` is not looked at."""
        if self.user is visit:
            self.user = self.others.pop() if self.others else None
            self._bring_home()

    def give(self, value: torch.Tensor) -> None:
        """Let the tensor show other memory, of the CPU: from now on it counts as edited."""
        assign(self.tensor, value)
        self.version = -1

    def _put_back(self, with_grad: bool) -> None:
        if self.tensor.data_ptr() not in (self._shown_at, self._address):
            # The forward itself gave it other memory: the tensor keeps that, on the CPU.
            self.give(self.tensor.detach().cpu())
            return
        if version_of(self.tensor) != self.version:
            # The forward itself changed it. The home is where the change is kept, and noticed.
            self.home.copy_(self.tensor.detach())
            assign(self.tensor, self.home)
            self.version = -1
            return
        self._bring_home()
        if with_grad and not self.tensor.is_inference():
            # What autograd saved shows memory that is used again: a backward must raise. It saves
            # frozen weights too, where the gradient of an input goes through them.
            torch.autograd.graph.increment_version(self.tensor)
            self.version = version_of(self.tensor)


def version_of(tensor: torch.Tensor) -> int:
    """How often torch operations wrote to a tensor; 0 for inference tensors, which do not count."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


def _memory_of(tensor: torch.Tensor) -> int:
    """The address of the storage that a tensor shows; 0 if it has none that can be told."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse, or a wrapper around others
        return 0


def _memory_of_all(tensors: Mapping[str, torch.Tensor]) -> int | None:
    """The address of a group's memory, in which all of its tensors lie."""
    for tensor in tensors.values():
        if found := _memory_of(tensor):
            return found
    return None


class Kept(threading.local):
    """The lease of the group that was used last on this thread, kept for the unit that comes next.

    Units that follow each other often share a group. It is kept only while `run` (a call of the
    whole model) goes on. It rests: whoever would have to wait for it gets it.
    """

    run: object = None
    lease: Lease | None = None

    def let_go(self) -> None:
        """Release it. May be repeated if interrupted."""
        if self.lease is not None:
            self.lease.release()
            self.lease = None


class Shared:
    """What the units of one model share, from when it was cut into groups until it is so no more.

    `lock` guards what their tensors show; `renewals`: how often any of them went to other groups;
    and whether it is `over`: then nothing is shown any more.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.renewals = 0
        self.over = False
        self.kept = Kept()


class WholeRun:
    """One call of the whole model: while it goes on, leases may be kept from unit to unit.

    `over` is called after one that is not inside of another, and that did not raise.
    """

    def __init__(self, shared: Shared, over: Callable[[], None]) -> None:
        self._kept = shared.kept
        self._over = over

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self) -> bool:
        """A call inside of another one changes nothing."""
        if self._kept.run is None:
            self._kept.run = self
        return True

    def finish(self, result: Any, given: Arguments) -> Any:
        """Leave nothing leased. What units return is theirs to look at."""
        outermost = self._kept.run is self
        self.end()
        if outermost:
            self._over()
        return result

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(self) -> None:
        """Leave nothing leased. To be called again if it was interrupted."""
        if self._kept.run is self:
            self._kept.let_go()
            self._kept.run = None


class Loan:
    """What one unit needs of the store while it runs.

    `renew` is called with the bindings that were edited, before they are used. Where `shared` is
    over, `settled` returns when it is clear what comes next.
    """

    def __init__(
        self,
        store: TierStore,
        bindings: list[Binding],
        shared: Shared,
        renew: Callable[[list[Binding]], None],
        settled: Callable[[], None],
    ) -> None:
        self.store = store
        self.bindings = bindings
        self.shared = shared
        self.renew = renew
        self.settled = settled
        self._keys: tuple[int, list[str]] = (-1, [])

    def keys(self) -> tuple[int, list[str]]:
        """The groups that the tensors are in, each once, as of which renewal. With the lock."""
        if self._keys[0] != self.shared.renewals:
            keys = dict.fromkeys(binding.key for binding in self.bindings)
            self._keys = self.shared.renewals, list(keys)
        return self._keys


class Visit:
    """One run of a unit. `begin` brings its tensors in; `end`, whatever happened, undoes that.

    Every visit holds leases of its own, so that visits on several threads may overlap.
    """

    __slots__ = ("_casts", "_leases", "_loan", "_with_grad")

    def __init__(self, loan: Loan) -> None:
        self._loan = loan
        self._leases: list[Lease] = []
        self._casts = CastCache()
        self._with_grad = False

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self) -> bool:
        """Bring the tensors in. In any case, `end` has to be called.

        False if the model is not cut into these groups any more.
        """
        edited = self._show(unless_edited=True)
        if edited:
            self._release_all()
            self._loan.renew(edited)
        while edited is None or edited:
            self._release_all()  # groups were renewed, by us or on another thread
            if self._loan.shared.over:
                self._loan.settled()
                return False
            edited = self._show(unless_edited=False)
        self._casts.stop()
        return True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def finish(self, result: Any, given: Arguments) -> Any:
        """After the forward: put everything back. Returns its result, safe to keep."""
        tensors = [result] if type(result) is torch.Tensor else list(tensors_in(result))
        leased = [_memory_of_all(lease.tensors) for lease in self._leases]
        for tensor in tensors:
            if tensor.grad_fn is not None:
                self._with_grad = True  # it may have turned gradients on by itself
                refuse_to_go_back(tensors, given)
                break
        for tensor in tensors:
            if _memory_of(tensor) in leased:  # which others may use soon
                result = with_tensors(result, lambda t: t.clone() if _memory_of(t) in leased else t)
                break
        self._end()
        return result

    def _show(self, *, unless_edited: bool) -> list[Binding] | None:
        """Let the tensors show leased memory. Returns those that do not, as they were edited; then
        nor do the others. None if groups were renewed meanwhile."""
        loan, shared, leases = self._loan, self._loan.shared, self._leases
        with shared.lock:
            as_of, keys = loan.keys()
        try:
            if shared.kept.lease is not None:
                self._take_over(shared.kept, keys)
            for key in keys[len(leases) :]:
                leases.append(loan.store.acquire(key))
        except UnknownKeyError:
            if shared.renewals == as_of and not shared.over:
                raise
            return None
        if len(leases) == 1:
            leased = leases[0].tensors
        else:
            leased = {name: t for lease in leases for name, t in lease.tensors.items()}
        with shared.lock:
            if shared.renewals != as_of or shared.over:
                return None
            edited = [
                binding
                for binding in loan.bindings
                if not binding.show(self, leased[binding.name], unless_edited=unless_edited)
            ]
            if edited:
                self._put_back()
        return edited

    def _put_back(self) -> None:
        with_grad = self._with_grad or torch.is_grad_enabled()
        for binding in self._loan.bindings:
            binding.put_back(self, with_grad=with_grad)

    def _take_over(self, kept: Kept, keys: list[str]) -> None:
        """Use the lease that was kept if it is the one that is needed; else let it go first."""
        lease = kept.lease
        if lease is None or keys != [lease.key] or not lease.resume():
            kept.let_go()
            return
        self._leases.append(lease)
        kept.lease = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(self) -> None:
        """Put everything back. To be called again if it was interrupted."""
        self._end()

    def _end(self) -> None:
        self._casts.resume()
        loan, kept = self._loan, self._loan.shared.kept
        with loan.shared.lock:
            self._put_back()
        if kept.run is not None and kept.lease is None and len(self._leases) == 1:
            self._leave(kept)
        self._release_all()

    def _leave(self, kept: Kept) -> None:
        if self._leases[0].rest():
            kept.lease = self._leases[0]
            self._leases.pop()

    def _release_all(self) -> None:
        while self._leases:
            self._leases[-1].release()
            self._leases.pop()


def visit_of(lend: Callable[[set[int]], Loan], tensors: set[int]) -> Visit | None:
    """A visit of those of the tensors (by id) that somebody else offloads, where they are now."""
    loan = lend(tensors)
    return Visit(loan) if loan.bindings else None
