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
from tqdm.auto import tqdm

from tierstore.adapters.grouping import GroupPlan, Unit, find_units, group_units, tensor_bytes
from tierstore.lease import Lease
from tierstore.model.tiers import Access
from tierstore.store import TierStore
from tierstore.transfer.maps import AddressSpace

ENTRIES = ("forward", "encode", "decode")
"""Methods through which a whole model is entered (autoencoders have no useful forward)."""

QUIET_SECONDS = 2.0


def assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Let `tensor` show the memory of `value`, on whatever device. It stays the same object."""
    try:
        tensor.data = value
    except RuntimeError:
        # Some accelerators outside of torch allow this only between tensors of their own.
        kind = type(tensor)
        other = torch.Tensor._make_subclass(kind, value, tensor.requires_grad)
        other.__dict__.update(tensor.__dict__)
        torch.utils.swap_tensors(tensor, other)


class Binding:
    """A tensor of the model, what it shows while away, and how many running units show it."""

    __slots__ = ("home", "key", "name", "tensor", "users")

    def __init__(self, tensor: torch.Tensor, key: str, name: str, home: torch.Tensor) -> None:
        self.tensor = tensor
        self.key = key
        self.name = name
        self.home = home
        self.users = 0

    def show(self, leased: Mapping[str, torch.Tensor]) -> None:
        """Let the tensor show the leased bytes."""
        if self.users == 0:
            assign(self.tensor, leased[self.name])
        self.users += 1

    def put_back(self) -> None:
        """Let it show its home again, when the last unit is done with it."""
        self.users -= 1
        if self.users == 0:
            assign(self.tensor, self.home)
            if torch.is_grad_enabled() and self.tensor.requires_grad:
                # What autograd saved shows memory that is used again: a backward must raise.
                torch.autograd.graph.increment_version(self.tensor)


class Loan:
    """What one unit needs of the store while it runs."""

    def __init__(self, store: TierStore, bindings: list[Binding], lock: threading.Lock) -> None:
        self._store = store
        self._keys = list(dict.fromkeys(binding.key for binding in bindings))
        self._bindings = bindings
        self._lock = lock

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def enter(self) -> list[Lease]:
        """Bring the tensors in. Undone by `leave`; nothing is held if it raises.

        Every call holds leases of its own, so that calls on several threads may overlap.
        """
        leases: list[Lease] = []
        shown: list[Binding] = []
        try:
            for key in self._keys:
                leases.append(self._store.acquire(key))
            tensors = {lease.key: lease.tensors for lease in leases}
            with self._lock:
                for binding in self._bindings:
                    binding.show(tensors[binding.key])
                    shown.append(binding)
        except BaseException:
            self._send_back(shown, leases)
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


class OffloadedForward:
    """Stands in for a bound method of a module while the module is offloaded.

    A deep copy of the module gets its ordinary method back: the copy is an ordinary module.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        loan: Loan | None,
        move: Callable[[Any, Any], tuple[Any, Any]] | None,
    ) -> None:
        self.module = module
        self.name = name
        self.loan = loan
        self.move = move
        self.replaced = module.__dict__.get(name)
        self.original: Callable[..., Any] = getattr(module, name)
        functools.update_wrapper(self, self.original)
        setattr(module, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        loan = self.loan
        if self.move is not None:
            args, kwargs = self.move(args, kwargs)
        if loan is None:
            return self.original(*args, **kwargs)
        leases = loan.enter()
        try:
            return self.original(*args, **kwargs)
        finally:
            loan.leave(leases)

    def remove(self) -> None:
        """Give the module its own method back; where others wrapped this one, only pass through."""
        self.loan = self.move = None
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
        self._lock = threading.Lock()
        self._skip = skip_keywords
        self._wrappers: list[OffloadedForward] = []
        self._bindings: dict[int, Binding] = {}
        self._residents: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._resident_lease: Lease | None = None
        self._finalizer = weakref.finalize(self, _forget, weakref.ref(store), self.groups)
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
        for unit in units:
            self._wrap(unit, needs[unit])
        if self.store.device.type != "cpu":
            self._wrap_entries()

    def _register(self, plans: list[GroupPlan]) -> None:
        space = AddressSpace()
        total = sum(tensor_bytes(t) for plan in plans for t in plan.tensors.values())
        with tqdm(
            total=total,
            unit="B",
            unit_scale=True,
            delay=QUIET_SECONDS,
            desc=self._prefix,
            leave=False,
        ) as bar:
            for plan in plans:
                key = f"{self._prefix}/{plan.name}"
                homes = self.store.register(key, plan.tensors, space=space)
                self.groups[key] = list(plan.tensors)
                for name, tensor in plan.tensors.items():
                    self._bindings[id(tensor)] = Binding(tensor, key, name, homes[name])
                    assign(tensor, homes[name])
                    bar.update(tensor_bytes(tensor))

    def _wrap(self, unit: Unit, needed: list[str]) -> None:
        distinct = {id(tensor): tensor for tensor in unit.tensors.values()}
        loan = Loan(self.store, [self._bindings[i] for i in distinct], self._lock)
        entries = ENTRIES if unit.module is self.root else ENTRIES[:1]
        for name in entries:
            if callable(getattr(unit.module, name, None)):
                self._wrappers.append(OffloadedForward(unit.module, name, loan, None))

    def _wrap_entries(self) -> None:
        for name in ENTRIES:
            if callable(getattr(self.root, name, None)):
                self._wrappers.append(OffloadedForward(self.root, name, None, self._move_inputs))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _move_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        moved = {
            name: value if name in self._skip else to_device(value, self.store.device)
            for name, value in kwargs.items()
        }
        return tuple(to_device(value, self.store.device) for value in args), moved

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
                assign(tensor, tensor.data.to(self.store.device))
        if not plain:
            return
        key = f"{self._prefix}/resident"
        self.store.put(key, plain, durable=False)
        self.groups[key] = list(plain)
        self._resident_lease = self.store.acquire(key, Access.UPDATE)
        for name, tensor in plain.items():
            self._residents.append((tensor, tensor.data))
            assign(tensor, self._resident_lease.tensors[name])

    def disable(self) -> None:
        """Make it an ordinary module again. Its weights show what they showed while away."""
        while self._wrappers:
            self._wrappers.pop().remove()
        for tensor, before in self._residents:
            assign(tensor, tensor.data.to(before.device, copy=True))
        self._residents.clear()
        if self._resident_lease is not None:
            self._resident_lease.release()
            self._resident_lease = None
        for binding in self._bindings.values():
            assign(binding.tensor, binding.home)
        self._bindings.clear()
        for key in self.groups:
            if not self.store.closed and key in self.store:
                self.store.discard(key)
        self.groups.clear()


def _forget(store: weakref.ref[TierStore], groups: dict[str, list[str]]) -> None:
    """A model was garbage-collected: its groups are of no use to anybody."""
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
