"""Storage of the training state: resident in RAM, or on disk and leased in RAM when needed.

A training step uses every parameter three times (forward, backward, optimizer) and changes it once.
Each gradient and each optimizer state is written once and read once. So a byte of RAM saves most
transfers if it holds parameters, then gradients, then states. Residency is decided once, in that
order; the rest streams. Resident groups never take the RAM that streaming needs.

Either way, every group is visible at all times as ordinary CPU tensors: memory of the store, or a
mapped view of its file. See `tierstore.state`.
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
"""Largest group, in bytes: larger groups are not transferred any faster."""
STREAMING_GROUPS = 12
"""Number of groups in RAM at once while the state streams.

These are the groups in use (parameters, gradients, two or three states), those being prefetched and
those being written.
"""
COPIES = 4
"""State bytes per parameter byte: the value, the gradient and, usually, two optimizer states."""
STREAMING_LARGEST = 6
"""Number of groups in RAM at once where groups exceed the target size."""

STREAMING_FROZEN = 3
"""Number of frozen groups in RAM at once: the one in use, its predecessor and its successor."""


class StateBudget:
    """Divides a store's RAM between resident and streaming groups of all models that it trains."""

    def __init__(self, store: TierStore) -> None:
        self.budget = store.stats().budget_bytes[Tier.HOST.name]
        self.target = LARGEST if self.budget is None else _target(self.budget)
        self._resident = Allowance()
        self._largest = 0
        self._largest_frozen = 0
        self._in_all = 0

    def streaming_bytes(self) -> int:
        """Return the bytes of RAM reserved for streaming groups."""
        frozen = STREAMING_FROZEN * self._largest_frozen
        if self.budget is not None:
            passing = max(self.budget // shares.STATE_PASSING, frozen)
            if self._in_all + 2 * self._largest <= self.budget - passing:
                return passing  # all state is resident: only activations and frozen groups stream
        return _streaming(self.target, self._largest, frozen)

    def prefetch_bytes(self) -> int:
        """Return the bytes of parameters to prefetch: a quarter of the streaming bytes.

        The rest is for groups in use, outgoing gradients, and the groups used last, which a
        backward pass uses first.
        """
        return self.streaming_bytes() // 4

    def count_group(self, parameter_bytes: int) -> None:
        """Account for a future group of trained parameters, in bytes."""
        self._largest = max(self._largest, parameter_bytes)
        self._in_all += COPIES * parameter_bytes

    def count_frozen_group(self, nbytes: int) -> None:
        """Account for a future frozen group, in bytes. It only streams."""
        self._largest_frozen = max(self._largest_frozen, nbytes)

    def reserve(self, nbytes: int) -> bool:
        """Reserve bytes for a resident group. Return False if streaming needs them."""
        limit = None if self.budget is None else self.budget - self.streaming_bytes()
        return self._resident.take(nbytes, limit)

    def least_for(self, largest: int) -> int:
        """Return a ram_budget, in bytes, that keeps one more group in RAM between uses.

        `largest` is the largest group, in bytes. With a larger budget groups may be larger, too.
        """
        least = budget = self.budget or 0
        while True:
            target = _target(budget)
            group = max(largest, target)
            frozen = STREAMING_FROZEN * self._largest_frozen
            least = self._resident.taken + _streaming(target, group, frozen) + group
            if least <= budget:
                return least
            budget = least

    def release(self, nbytes: int) -> None:
        """Release the bytes of a resident group. Safe to call from finalizers."""
        self._resident.release(nbytes)


def _target(budget: int) -> int:
    """Return the target size of a group, in bytes, under a ram_budget."""
    return max(min(budget // shares.STATE_GROUP, LARGEST), PAGE)


def _streaming(target: int, largest: int, frozen: int) -> int:
    """Return the bytes that groups need to stream if not all state is resident."""
    return max(STREAMING_GROUPS * target, STREAMING_LARGEST * largest, frozen)


_budgets: weakref.WeakKeyDictionary[TierStore, StateBudget] = weakref.WeakKeyDictionary()
_budgets_lock = threading.RLock()


def state_budget_of(store: TierStore) -> StateBudget:
    """Return the state budget of a store."""
    with _budgets_lock:
        if store not in _budgets:
            _budgets[store] = StateBudget(store)
        return _budgets[store]


def packed_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the approximate bytes of a packed group of these tensors."""
    nbytes = sum(-(-span(t) // 256) * 256 for t in tensors.values() if t.numel())
    return max(-(-nbytes // PAGE), 1) * PAGE


class StateBuffer:
    """One packed group of the training state.

    `tensors` are views of it, valid from the first call of `ready` on: before that, the group may
    still be on its way to disk.
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
        self._end = weakref.finalize(
            self, _release_buffer, weakref.ref(store), key, self._budget, resident
        )
        self._end.atexit = False
        self._lease: ViewLease | None = None
        self._in_ram = False  # True if there may be an unleased copy in RAM
        if self.host_resident:
            engine_of(store).mutable_groups.create(key, tensors)
            self._lease = ViewLease(
                engine_of(store).mutable_groups.lease_in_host(key, HostAccess.PERMANENT)
            )
            self.tensors = self._lease.tensors
        elif not (with_values and self._create_via_ram(tensors)):
            engine_of(store).mutable_groups.create_on_disk(key, tensors)
            self.tensors = engine_of(store).mutable_groups.view_on_disk(key)
            for name, tensor in tensors.items() if with_values else ():
                self.tensors[name].copy_(tensor)

    def _create_via_ram(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        try:
            engine_of(self.store).mutable_groups.create(self.key, tensors)
        except BudgetError as error:
            if error.tier == Tier.DISK.name:
                raise
            return False  # groups in use fill the budget
        self._in_ram = True
        engine_of(self.store).mutable_groups.write_back(self.key)
        return True

    def ready(self) -> None:
        """Block until `tensors` can be used."""
        if not self.tensors:
            engine_of(self.store).mutable_groups.move_to_disk([self.key])
            self.tensors = engine_of(self.store).mutable_groups.view_on_disk(self.key)

    def enter(self, stack: contextlib.ExitStack, purpose: HostAccess) -> dict[str, torch.Tensor]:
        """Return the tensors, valid until `stack` is closed.

        They are leased in RAM if the budget allows it, else they are the views in `tensors`.
        """
        if not self.host_resident:
            with contextlib.suppress(BudgetError):
                return stack.enter_context(self._leased(purpose))
        self.flush()
        self.ready()
        return self.tensors

    @contextlib.contextmanager
    def _leased(self, purpose: HostAccess) -> Iterator[dict[str, torch.Tensor]]:
        with engine_of(self.store).mutable_groups.lease_in_host(self.key, purpose) as lease:
            self._in_ram = True
            yield lease.tensors
        if purpose is not HostAccess.READ:
            engine_of(self.store).mutable_groups.write_back(self.key)

    def fill(self, target: torch.Tensor, source: torch.Tensor, *, add: bool) -> torch.Event | None:
        """Copy or add `source` to `target`, a tensor returned by `enter`.

        Returns the event of an asynchronous copy: see `MutableGroups.fill`.
        """
        return engine_of(self.store).mutable_groups.fill(self.key, target, source, add=add)

    def read(self) -> ViewLease:
        """Lease the tensors on the device, for reading."""
        self._in_ram = True
        return ViewLease(self.store.acquire(self.key))

    def mark_expected(self) -> None:
        """Note that the group is being prefetched, so it may have a copy in RAM."""
        self._in_ram = True

    def flush(self) -> None:
        """Write the group to disk and drop its copy in RAM, unless it is resident."""
        if self._in_ram and not self.host_resident:
            engine_of(self.store).mutable_groups.move_to_disk([self.key])
            self._in_ram = False

    def discard(self) -> None:
        """Free the group."""
        self.tensors = {}
        if self._lease is not None:
            self._lease.release()
        self._end()


def _release_buffer(
    store: weakref.ref[TierStore], key: str, budget: StateBudget, resident: int
) -> None:
    """Free the resident bytes and the group of a buffer that was discarded or collected."""
    budget.release(resident)
    discard_group(store, key)


def discard_group(store: weakref.ref[TierStore], key: str) -> None:
    """Discard a group soon, if its store still exists. Safe to call from finalizers."""
    alive = store()
    if alive is not None:
        engine_of(alive).groups.discard_from_finalizer([key])
