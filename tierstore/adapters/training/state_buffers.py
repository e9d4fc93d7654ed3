"""Where the parts of the training state are: always in RAM, or on disk and in RAM when needed.

A training step uses every parameter three times (forward, backward, optimizer) and changes it once;
its gradient is written once and read once, and so is each state of the optimizer. So a byte of RAM
saves most transfers where it holds parameters, then gradients, then states. Which are resident is
decided once, in that order; the rest streams. None of them may take the room that streaming needs.

Either way, a part shows itself all the time, as ordinary CPU tensors: memory of the store, or maps
of its place on disk. See `tierstore.state`.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Mapping

import torch

from tierstore.adapters.codecs.memory import span
from tierstore.adapters.view_lifetime import Allowance, ViewLease
from tierstore.errors import BudgetError
from tierstore.model import shares
from tierstore.model.sizes import PAGE
from tierstore.model.tiers import HostAccess, Tier
from tierstore.store import TierStore, engine_of

LARGEST = 64 << 20
"""Bytes: larger groups are not moved any faster."""
STREAMING_GROUPS = 12
"""Groups that are in RAM at once when the state passes through: what is in use (a parameter, its
gradient, two or three states), what comes next, and what is being written."""
COPIES = 4
"""Of each parameter there is its value, its gradient and, usually, two states."""
STREAMING_LARGEST = 6
"""The same, if there are groups that are larger than they should be."""

STREAMING_FROZEN = 3
"""Groups of frozen parameters that pass through at once: one in use, and those before and after
it."""


class StateBudget:
    """How much of a store's RAM is for resident groups, of all who train with it."""

    def __init__(self, store: TierStore) -> None:
        self.budget = store.stats().budget_bytes[Tier.HOST.name]
        self.target = LARGEST
        if self.budget is not None:
            self.target = max(min(self.budget // shares.STATE_GROUP, LARGEST), PAGE)
        self._resident = Allowance()
        self._largest = 0
        self._largest_frozen = 0
        self._in_all = 0

    def streaming_bytes(self) -> int:
        """Bytes that are left for what streams."""
        frozen = STREAMING_FROZEN * self._largest_frozen
        if self.budget is not None:
            passing = max(self.budget // shares.STATE_PASSING, frozen)
            if self._in_all + 2 * self._largest <= self.budget - passing:
                return passing  # for activations and what is frozen: nothing else has to pass
        return max(STREAMING_GROUPS * self.target, STREAMING_LARGEST * self._largest, frozen)

    def ahead_bytes(self) -> int:
        """Bytes of parameters that the store is told of in advance: a quarter of what is left. The
        rest is for what is in use, for gradients on their way out, and for what was used last,
        which a pass that turns back uses first."""
        return self.streaming_bytes() // 4

    def expect(self, parameter_bytes: int) -> None:
        """There is a group of so many bytes of parameters."""
        self._largest = max(self._largest, parameter_bytes)
        self._in_all += COPIES * parameter_bytes

    def expect_frozen(self, nbytes: int) -> None:
        """There is a group of so many bytes that only passes through."""
        self._largest_frozen = max(self._largest_frozen, nbytes)

    def reserve(self, nbytes: int) -> bool:
        """Whether so many bytes more may be resident; if so, they are."""
        limit = None if self.budget is None else self.budget - self.streaming_bytes()
        return self._resident.take(nbytes, limit)

    def release(self, nbytes: int) -> None:
        """So many bytes are resident no more. Finalizers may say so in the middle of anything."""
        self._resident.give_back(nbytes)


_budgets: weakref.WeakKeyDictionary[TierStore, StateBudget] = weakref.WeakKeyDictionary()
_budgets_lock = threading.RLock()


def state_budget_of(store: TierStore) -> StateBudget:
    """That of a store."""
    with _budgets_lock:
        if store not in _budgets:
            _budgets[store] = StateBudget(store)
        return _budgets[store]


def packed_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """About what a group of these tensors takes."""
    nbytes = sum(-(-span(t) // 256) * 256 for t in tensors.values() if t.numel())
    return max(-(-nbytes // PAGE), 1) * PAGE


class StateBuffer:
    """One packed group of the training state. `tensors` shows it, at all times.

    `ready` is to be called before `tensors` is used for the first time: until then, the group may
    still be on its way to the disk.
    """

    def __init__(
        self,
        store: TierStore,
        key: str,
        tensors: Mapping[str, torch.Tensor],
        *,
        with_values: bool = True,
    ) -> None:
        self.store = store
        self.key = key
        self.names = tuple(tensors)
        self.nbytes = packed_bytes(tensors)
        self.tensors: dict[str, torch.Tensor] = {}
        self._budget = state_budget_of(store)
        self.host_resident = self._budget.reserve(self.nbytes)
        resident = self.nbytes if self.host_resident else 0
        self._end = weakref.finalize(self, _forget, weakref.ref(store), key, self._budget, resident)
        self._end.atexit = False
        self._lease: ViewLease | None = None
        self._in_ram = False  # there may be a copy in RAM that is not held
        if self.host_resident:
            engine_of(store).mutable_groups.create(key, tensors)
            self._lease = ViewLease(
                engine_of(store).mutable_groups.lease_in_host(key, HostAccess.PERMANENT)
            )
            self.tensors = self._lease.tensors
        elif not (with_values and self._settled_by_way_of_ram(tensors)):
            engine_of(store).mutable_groups.create_on_disk(key, tensors)
            self.tensors = engine_of(store).mutable_groups.view_on_disk(key)
            for name, tensor in tensors.items() if with_values else ():
                self.tensors[name].copy_(tensor)

    def _settled_by_way_of_ram(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        try:
            engine_of(self.store).mutable_groups.create(self.key, tensors)
        except BudgetError as error:
            if error.tier == Tier.DISK.name:
                raise
            return False  # what is in use takes the room
        self._in_ram = True
        engine_of(self.store).mutable_groups.write_back(self.key)
        return True

    def ready(self) -> None:
        """Wait until it can be seen."""
        if not self.tensors:
            engine_of(self.store).mutable_groups.move_to_disk([self.key])
            self.tensors = engine_of(self.store).mutable_groups.view_on_disk(self.key)

    def enter(self, stack: contextlib.ExitStack, purpose: HostAccess) -> dict[str, torch.Tensor]:
        """The tensors until `stack` is closed: in RAM if there is room for them; else where it
        shows them."""
        if not self.host_resident:
            with contextlib.suppress(BudgetError):
                return stack.enter_context(self._held(purpose))
        self.put_away()
        self.ready()
        return self.tensors

    @contextlib.contextmanager
    def _held(self, purpose: HostAccess) -> Iterator[dict[str, torch.Tensor]]:
        with engine_of(self.store).mutable_groups.lease_in_host(self.key, purpose) as lease:
            self._in_ram = True
            yield lease.tensors
        if purpose is not HostAccess.READ:
            engine_of(self.store).mutable_groups.write_back(self.key)

    def fill(self, target: torch.Tensor, source: torch.Tensor, *, add: bool) -> torch.Event | None:
        """Copy `source` to one of the tensors that `enter` returned, or add it to that. For the
        event that is returned see `MutableGroups.fill`."""
        return engine_of(self.store).mutable_groups.fill(self.key, target, source, add=add)

    def read(self) -> ViewLease:
        """The tensors on the device, to be read there."""
        self._in_ram = True
        return ViewLease(self.store.acquire(self.key))

    def expected(self) -> None:
        """The store was told that it is wanted next: it may be in RAM soon."""
        self._in_ram = True

    def put_away(self) -> None:
        """Nobody uses it for now: see that it is what it shows."""
        if self._in_ram and not self.host_resident:
            engine_of(self.store).mutable_groups.move_to_disk([self.key])
            self._in_ram = False

    def discard(self) -> None:
        """It is not needed any more."""
        self.tensors = {}
        if self._lease is not None:
            self._lease.release()
        self._end()


def _forget(store: weakref.ref[TierStore], key: str, budget: StateBudget, resident: int) -> None:
    """Nobody has the buffer any more."""
    budget.release(resident)
    forget_group(store, key)


def forget_group(store: weakref.ref[TierStore], key: str) -> None:
    """Nobody has the buffer of this group any more."""
    alive = store()
    if alive is not None:
        engine_of(alive).groups.discard_soon([key])
