"""Any torch module on a store: its weights are on the device while its forward runs.

Each unit's `forward` is wrapped: it acquires the unit's groups, lets the parameters show the leased
tensors, runs, and puts the parameters back to what they show while away: a CPU tensor of the true
value that costs no memory. No Parameter object is ever replaced. Whatever is raised in the middle,
nothing stays leased.
"""

from __future__ import annotations

import copy
import functools
import threading
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tierstore.adapters.bindings import Binding, Loan, Shared, Visit, WholeRun, assign
from tierstore.adapters.grouping import GroupPlan, Unit, find_units, group_units, tensor_bytes
from tierstore.lease import Lease
from tierstore.model.tiers import Access
from tierstore.progress import bar
from tierstore.store import TierStore
from tierstore.transfer.maps import AddressSpace, WriteWatch

ENTRIES = ("forward", "encode", "decode")
"""Methods through which a whole model is entered (autoencoders have no useful forward)."""


class OffloadedForward:
    """Stands in for a bound method of a module while the module is offloaded.

    A deep copy of the module gets its ordinary method back: the copy is an ordinary module.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        visit: Callable[[], Visit | WholeRun],
        move: Callable[[Any, Any], tuple[Any, Any]] | None,
    ) -> None:
        self.module = module
        self.name = name
        self.visit: Callable[[], Visit | WholeRun] | None = visit
        self.move = move
        self.replaced = module.__dict__.get(name)
        self.original: Callable[..., Any] = getattr(module, name)
        # Not its attributes: it may be another of our wrappers, and each has its own.
        functools.update_wrapper(self, self.original, updated=())
        setattr(module, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        begin = self.visit
        if self.move is not None:
            args, kwargs = self.move(args, kwargs)
        if begin is None:
            return self.original(*args, **kwargs)
        visit = begin()
        try:
            visit.begin()
            result = self.original(*args, **kwargs)
        finally:
            try:
                visit.end()
            except BaseException:  # an interrupt in the middle of putting back: do it again
                visit.end()
                raise
        return result

    def remove(self) -> None:
        """Give the module its own method back; where others wrapped this one, only pass through."""
        self.visit = self.move = None
        if self.module.__dict__.get(self.name) is not self:
            return
        if self.replaced is None:
            delattr(self.module, self.name)
        else:
            setattr(self.module, self.name, self.replaced)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = memo.get(id(self.module))
        if module is None:
            return self.original
        method = getattr(type(module), self.name)
        return (
            copy.deepcopy(self.replaced, memo)
            if self.replaced
            else types.MethodType(method, module)
        )


class OffloadedModule:
    """One model on a store. `groups` maps the keys of its groups to their tensors' names."""

    def __init__(
        self,
        root: nn.Module,
        store: TierStore,
        prefix: str,
        grouping: Mapping[str, Any],
        skip_keywords: frozenset[str],
    ) -> None:
        self.root = root
        self.store = store
        self.groups: dict[str, list[str]] = {}
        self._prefix = prefix
        self._renewing = threading.RLock()
        self._shared = Shared()
        self._watched: list[Binding] = []
        self._watch = WriteWatch([])
        self._skip = skip_keywords
        self._wrappers: list[OffloadedForward] = []
        self._bindings: dict[int, Binding] = {}
        self._residents: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._swapped: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._resident_leases: list[Lease] = []
        weakref.finalize(self, _forget, weakref.ref(store), self.groups, self._resident_leases)
        try:
            self._take(grouping)
        except BaseException:
            self.disable()
            raise

    def _take(self, grouping: Mapping[str, Any]) -> None:
        units = find_units(
            self.root, grouping["offload_type"], grouping["block_limit"], grouping["block_modules"]
        )
        plans, needs = group_units(units, grouping["target"], grouping["blocks_per_group"])
        self._register(plans)
        self._keep_the_rest()
        self._watch_homes()
        for unit in units:
            self._wrap(unit, needs[unit])
        for name in self._entries():
            run = functools.partial(WholeRun, self._shared)
            self._wrappers.append(OffloadedForward(self.root, name, run, self._prepare))

    def _register(self, plans: list[GroupPlan]) -> None:
        space = AddressSpace()
        for plan in bar(plans, self._prefix, "groups"):
            key = f"{self._prefix}/{plan.name}"
            homes = self.store.register(key, plan.tensors, space=space)
            self.groups[key] = list(plan.tensors)
            for name, tensor in plan.tensors.items():
                self._bindings[id(tensor)] = Binding(tensor, key, name, homes[name])

    def _wrap(self, unit: Unit, needed: list[str]) -> None:
        distinct = {id(tensor): tensor for tensor in unit.tensors.values()}
        bindings = [self._bindings[i] for i in distinct]
        loan = Loan(self.store, bindings, self._shared, self._renew)
        for name in self._entries() if unit.module is self.root else ["forward"]:
            if callable(getattr(unit.module, name, None)):
                visit = functools.partial(Visit, loan)
                self._wrappers.append(OffloadedForward(unit.module, name, visit, None))

    def _entries(self) -> list[str]:
        return [name for name in ENTRIES if callable(getattr(self.root, name, None))]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _prepare(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Before the whole model runs: use the weights as they are now, on inputs at hand."""
        written = [self._watched[i] for i in self._watch.written()]
        if written:
            self._renew(written)
        device = self.store.device
        if device.type == "cpu":
            return args, kwargs
        moved = {n: v if n in self._skip else to_device(v, device) for n, v in kwargs.items()}
        return tuple(to_device(value, device) for value in args), moved

    def _watch_homes(self) -> None:
        self._watched = list(self._bindings.values())
        self._watch = WriteWatch([(b.home.data_ptr(), tensor_bytes(b.home)) for b in self._watched])

    def _renew(self, edited: list[Binding]) -> None:
        """Store the groups of changed tensors anew; what did not change in them is not written."""
        with self._renewing:
            for old in dict.fromkeys(binding.key for binding in edited):
                members = [b for b in self._bindings.values() if b.key == old]
                with self._shared.lock:
                    if not members or any(b.user is not None for b in members):
                        continue  # they are in use: noticed again before the next one
                    # Aliases: on another thread, the tensors may show leased memory soon.
                    changed = {b.name: b.tensor.detach() for b in members}
                key = f"{old.partition('~')[0]}~{self._shared.renewals + 1}"
                homes = self.store.register(key, changed)
                self.groups[key] = self.groups.pop(old)
                with self._shared.lock:
                    self._shared.renewals += 1
                    for binding in members:
                        binding.settle(key, homes[binding.name])
                self.store.discard(old)
            self._watch_homes()

    def _keep_the_rest(self) -> None:
        """What is not offloaded lives on the device, within its budget, for as long as we do."""
        if self.store.device.type == "cpu":
            return
        rest = {
            name: tensor
            for name, tensor in [*self.root.named_parameters(), *self.root.named_buffers()]
            if id(tensor) not in self._bindings and tensor.device.type != "meta"
        }
        plain = {n: t for n, t in rest.items() if not hasattr(t, "__tensor_flatten__")}
        for name, tensor in rest.items():
            if name not in plain:
                self._swap_to_device(tensor)
        if not plain:
            return
        key = f"{self._prefix}/resident"
        self.store.put(key, plain, durable=False)
        self.groups[key] = list(plain)
        lease = self.store.acquire(key, Access.UPDATE)
        self._resident_leases.append(lease)
        for name, tensor in plain.items():
            self._residents.append((tensor, tensor.data))
            assign(tensor, lease.tensors[name])

    def _swap_to_device(self, tensor: torch.Tensor) -> None:
        """Move a wrapper around other tensors (a quantised weight): `.data` would not do."""
        moved = tensor.detach().to(self.store.device)
        if isinstance(tensor, nn.Parameter):
            moved = nn.Parameter(moved, requires_grad=tensor.requires_grad)
        torch.utils.swap_tensors(tensor, moved)
        self._swapped.append((tensor, moved))

    def _give_residents_back(self) -> None:
        while self._swapped:
            torch.utils.swap_tensors(*self._swapped.pop())
        for tensor, before in self._residents:
            assign(tensor, tensor.data.to(before.device, copy=True))
        self._residents.clear()
        while self._resident_leases:
            self._resident_leases.pop().release()

    def disable(self) -> None:
        """Make it an ordinary module again. Its weights show what they showed while away."""
        while self._wrappers:
            self._wrappers.pop().remove()
        self._give_residents_back()
        for binding in self._bindings.values():
            if not binding.edited:  # otherwise it shows what somebody gave it
                assign(binding.tensor, binding.home)
        self._bindings.clear()
        for key in self.groups:
            if not self.store.closed and key in self.store:
                self.store.discard(key)
        self.groups.clear()


def _forget(
    store: weakref.ref[TierStore], groups: dict[str, list[str]], leases: list[Lease]
) -> None:
    """A model was garbage-collected: its groups are of no use to anybody."""
    for lease in leases:
        lease.abandon()
    alive = store()
    if alive is not None:
        alive.discard_soon(groups)


def to_device(value: Any, device: torch.device) -> Any:
    """Tensors in a value moved to `device`. Containers are rebuilt only if something in them moved:
    some are caches that the model changes in place."""
    if isinstance(value, torch.Tensor):
        return value if value.device == device else value.to(device, non_blocking=False)
    if isinstance(value, (list, tuple)):
        moved = [to_device(item, device) for item in value]
        if all(new is old for new, old in zip(moved, value, strict=True)):
            return value
        return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
    if type(value) is dict:
        new = {key: to_device(item, device) for key, item in value.items()}
        return value if all(new[key] is value[key] for key in value) else new
    return value
