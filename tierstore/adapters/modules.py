"""Any torch module on a store: its weights are on the device while its forward runs.

Each unit's `forward` is wrapped: it acquires the unit's groups, lets the parameters show the leased
tensors, runs, and puts the parameters back to what they show while away: a CPU tensor of the true
value that costs no memory. No Parameter object is ever replaced. Whatever is raised in the middle,
nothing stays leased.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, KeysView, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tierstore.adapters.bindings import (
    Binding,
    Loan,
    Shared,
    Visit,
    WholeRun,
    assign,
    make_ordinary,
    visit_of,
)
from tierstore.adapters.changing import (
    Conversion,
    Copying,
    Loading,
    Saving,
    after_state_dict,
)
from tierstore.adapters.grouping import Cutting, GroupPlan, Unit, tensor_bytes, unused
from tierstore.adapters.owners import (
    Change,
    Owner,
    around,
    disown,
    everyone,
    others_tensors,
    own,
    owner_of,
)
from tierstore.adapters.rerunning import OnceMore
from tierstore.adapters.staying import Staying, forget
from tierstore.adapters.wrapping import (
    Arguments,
    OffloadedForward,
    StandIn,
    device_of,
    has_method,
    to_device,
)
from tierstore.model.errors import BudgetError, ClosedError, LeaseError
from tierstore.model.tiers import Tier
from tierstore.progress import bar
from tierstore.store import TierStore
from tierstore.transfer.maps import AddressSpace, WriteWatch, give_back_free_memory

ENTRIES = ("forward", "encode", "decode")
"""Methods through which a whole model is entered (autoencoders have no useful forward)."""

MANY_UNITS = 8
"""A part of a model that has so many is looked at as a whole when it is called by itself."""
ON_DEVICE, IN_RAM, ANYWHERE = "device", "cpu", "disk"
"""Where a weight should stay between its uses: for good on the device; in RAM, given up last; or
wherever the store finds it best."""

_renewals = itertools.count(1)


class OffloadedModule:
    """One model on a store. `groups` maps the keys of its groups to their tensors' names.

    `places` tells by a tensor's name where it should stay. With `aligned`, every module's inputs
    come to the device, and what the model returns goes to the device of what it was given. Values
    of arguments named in `skip` are left where they are. `changed` says that the model is built
    differently from what it was when it was cut: it is cut anew before it runs next.
    """

    def __init__(  # noqa: PLR0913 - half of them are optional and by name
        self,
        root: nn.Module,
        store: TierStore,
        prefix: str,
        cutting: Cutting,
        *,
        skip: frozenset[str] = frozenset(),
        places: Callable[[str], str | None] = lambda _: ANYWHERE,
        aligned: bool = False,
    ) -> None:
        self.root = root
        self.store = store
        self.groups: dict[str, list[str]] = {}
        self.changed = False
        self.has_run = False
        self.prefix = prefix
        self._cutting = cutting
        self._skip = skip
        self._places = places
        self._aligned = aligned and store.device.type != "cpu"
        self._renewing = threading.RLock()
        self._watched: list[Binding] = []
        self._watch = WriteWatch([])
        self._wrappers: list[StandIn | Copying] = []
        self._hooks: list[RemovableHandle] = []
        self._bindings: dict[int, Binding] = {}
        self._in_ram: set[str] = set()  # names of tensors
        self._staying = Staying(store)
        weakref.finalize(self, forget, weakref.ref(store), self.groups, self._staying.leases)
        self.enable()

    @torch.inference_mode(mode=False)
    def enable(self) -> None:
        """Offload the model as it is now. If it raises, it is an ordinary module.

        Those who offload a model around it go without it from now on.
        """
        outer = around(self.root)
        if any(other.in_use for other in outer):
            raise LeaseError("the model around it runs at this moment: offload it before or after")
        for other in outer:
            other.disable()
        self.shared = Shared()
        try:
            own(self)
            self._take()
        except BaseException:
            self.disable()
            raise
        finally:
            for other in reversed(outer):
                other.enable()

    def _take(self) -> None:
        self.changed = False
        for tensor in [*self.root.parameters(), *self.root.buffers()]:
            make_ordinary(tensor)
        units = self._cutting.units(self.root)
        self._register(self._plans(units))
        self._refuse_groups_that_never_fit()
        self._keep_the_rest()
        self._watch_homes()
        for unit in units:
            self._wrap(unit)
        self._wrap_entries({unit.module for unit in units})
        self._wrappers.append(Conversion(self))
        self._wrappers.append(Copying(self))
        loading, saving = Loading(self), Saving(self)
        for module in self.root.modules():
            holds = bool(self.bindings_of(module, recurse=False))
            if holds or module is self.root:
                self._hooks.append(module.register_load_state_dict_post_hook(loading))
            if holds:
                self._hooks.append(after_state_dict(module, saving))

    def _plans(self, units: list[Unit]) -> list[GroupPlan]:
        """The groups: what should stay in RAM and what need not are never in one."""
        taken = others_tensors(self)
        plans: list[GroupPlan] = []
        for place in (IN_RAM, ANYWHERE):
            parts = []
            for unit in units:
                wanted = {
                    name: tensor
                    for name, tensor in unit.tensors.items()
                    if self._places(name) == place and id(tensor) not in taken
                }
                if wanted:
                    parts.append(Unit(unit.name, unit.module, wanted, unit.block, unit.encloses))
            found = self._cutting.groups(parts)
            taken |= {id(tensor) for plan in found for tensor in plan.tensors.values()}
            if place == IN_RAM:
                self._in_ram = {name for plan in found for name in plan.tensors}
            plans += found
        return plans

    def _register(self, plans: list[GroupPlan]) -> None:
        space = AddressSpace()
        names: set[str] = set()
        for plan in bar(plans, self.prefix, "groups"):
            key = unused(f"{self.prefix}/{plan.name}", names)
            homes = self.store.register(key, plan.tensors, space=space)
            self._know(key, list(plan.tensors))
            for name, tensor in plan.tensors.items():
                self._bindings[id(tensor)] = Binding(tensor, key, name, homes[name])

    def _know(self, key: str, names: list[str]) -> None:
        self.groups[key] = names
        if self._in_ram.issuperset(names):
            self.store.keep(key)

    def _refuse_groups_that_never_fit(self) -> None:
        snapshot = {group.key: group.nbytes for group in self.store.snapshot().groups}
        for tier, budget in self.store.stats().budget_bytes.items():
            if tier == Tier.DISK.name or budget is None:
                continue
            key = max(self.groups, key=lambda k: snapshot[k], default=None)
            if key is not None and snapshot[key] > budget:
                name = "ram_budget" if tier == Tier.HOST.name else "device_budget"
                advice = (
                    f"raise {name} to at least {snapshot[key]:,} bytes (three times that for "
                    "prefetch)"
                )
                if self._cutting.block_limit is None or self._cutting.block_limit > budget:
                    advice += ", or cut the model finer with offload_type='leaf_level'"
                raise BudgetError(key, tier, snapshot[key], budget, advice)

    def _keep_the_rest(self) -> None:
        """What is not offloaded lives on the device, within its budget, for as long as we do."""
        if self.store.device.type == "cpu":
            return
        taken = others_tensors(self).union(self.tensor_ids())
        rest = {
            name: tensor
            for name, tensor in [*self.root.named_parameters(), *self.root.named_buffers()]
            if id(tensor) not in taken and tensor.device.type != "meta"
        }
        self._staying.take(self.prefix, rest, self._cutting.target, self.groups)

    def _wrap(self, unit: Unit) -> None:
        if owner_of(unit.module) is not self:
            return
        own = {id(tensor) for tensor in unit.tensors.values()}
        loan = self.loan(own)
        if loan.bindings or self._aligned:
            self._wrap_with(unit, self, functools.partial(Visit, loan))
        for other in everyone():
            # A weight may be tied to one that they offload: they lend it, as it is with them then.
            if other is not self and not own.isdisjoint(other.tensor_ids()):
                tied = self._used_by(unit) & own
                self._wrap_with(unit, other, functools.partial(visit_of, other.loan, tied))

    def _wrap_with(self, unit: Unit, owner: Owner, visit: Callable[[], Visit | None]) -> None:
        move = self._move if self._aligned else None
        call = None if self.store.device.type == "cpu" else OnceMore(unit.module, self.store)
        for name in self._entries() if unit.module is self.root else ["forward"]:
            if has_method(unit.module, name):
                wrapper = OffloadedForward(unit.module, name, owner.look, visit, move, call=call)
                self._wrappers.append(wrapper)

    def _wrap_entries(self, units: set[nn.Module]) -> None:
        """Larger parts of the model may be called by themselves: their units run in one run, too,
        and what changed is looked for once."""
        move = self._move if self._aligned else None
        for module in self.root.modules():
            if (
                module is not self.root
                and module not in units
                and owner_of(module) is self
                and len(units.intersection(module.modules())) >= MANY_UNITS
                and type(module).forward is not nn.Module.forward
            ):
                wrapper = OffloadedForward(module, "forward", self.look, self._run, move)
                self._wrappers.append(wrapper)
        align = self._align if self._aligned else None
        for name in self._entries():
            wrapper = OffloadedForward(self.root, name, self.look, self._run, self._move, align)
            self._wrappers.append(wrapper)

    def _run(self) -> WholeRun | None:
        return WholeRun(self.shared, self._over) if self.shared.kept.run is None else None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _over(self) -> None:
        if not self.has_run:
            self.has_run = True
            if all(other.has_run for other in everyone() if other.store is self.store):
                self.store.grow_device_budget()

    def loan(self, tensors: set[int]) -> Loan:
        """What a unit needs to use those of the tensors (by id) that are offloaded here."""
        bindings = [self._bindings[each] for each in tensors if each in self._bindings]
        return Loan(self.store, bindings, self.shared, self.renew, self._settled)

    def _used_by(self, unit: Unit) -> set[int]:
        """The tensors that modules of ours have, in the unit."""
        ours = [module for module in unit.module.modules() if owner_of(module) is self]
        held = [[*m.parameters(recurse=False), *m.buffers(recurse=False)] for m in ours]
        return {id(tensor) for tensors in held for tensor in tensors}

    def _entries(self) -> list[str]:
        return [name for name in ENTRIES if has_method(self.root, name)]

    # Around a run ------------------------------------------------------------------------------

    def look(self) -> None:
        """Before any part of the model runs: use it as it is now. During a run, nothing is seen."""
        if self.shared.kept.run is None:
            self._look()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _look(self) -> None:
        with self._renewing:  # others wait until it is cut anew
            if self.changed and self._end_use():
                self._cut_anew()
            written = [self._watched[i] for i in self._watch.written()]
            if written:
                self.renew(written)

    def _end_use(self) -> bool:
        """Have nothing shown from now on. False if something is at this moment."""
        with self.shared.lock:
            self.shared.over = not self.in_use
            return self.shared.over

    def _cut_anew(self) -> None:
        # The wrappers stay until others take their places: on another thread, the model may begin
        # to run, and waits in them.
        outdated = [w for w in self._wrappers if isinstance(w, OffloadedForward)]
        self._wrappers = [w for w in self._wrappers if w not in outdated]
        for wrapper in outdated:
            wrapper.outdated = True
        try:
            self.disable()
            self.enable()
        finally:
            while outdated:
                outdated.pop().remove()

    def _settled(self) -> None:
        """Returns when the model is not being cut anew, or made an ordinary one."""
        with self._renewing:
            pass

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _move(self, args: Any, kwargs: Any) -> Arguments:
        device = self.store.device
        if device.type == "cpu":
            return args, kwargs
        return to_device(args, device), to_device(kwargs, device, self._skip)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _align(self, result: Any, args: Any, kwargs: Any) -> Any:
        """After the whole model ran: what it returns goes to where its inputs came from."""
        home = device_of((args, kwargs))
        return result if home is None else to_device(result, home, self._skip)

    # Changed weights ---------------------------------------------------------------------------

    def _watch_homes(self) -> None:
        self._watched = list(self._bindings.values())
        self._watch = WriteWatch([(b.home.data_ptr(), tensor_bytes(b.home)) for b in self._watched])

    def tensor_ids(self) -> KeysView[int]:
        """The ids of the tensors in its groups."""
        return self._bindings.keys()

    @property
    def residents(self) -> list[torch.Tensor]:
        """Its tensors that stay on the device."""
        return self._staying.tensors

    @property
    def bindings(self) -> list[Binding]:
        """Its tensors that are in groups."""
        return list(self._bindings.values())

    def bindings_of(self, module: nn.Module, *, recurse: bool = True) -> list[Binding]:
        """Those of a part of the model, each once."""
        tensors = {id(t): t for t in [*module.parameters(recurse), *module.buffers(recurse)]}
        return [self._bindings[number] for number in tensors if number in self._bindings]

    def _members(self, key: str) -> list[Binding]:
        return [binding for binding in self._bindings.values() if binding.key == key]

    @property
    def in_use(self) -> bool:
        """Whether any of its modules runs at this moment."""
        return any(binding.user is not None for binding in self._bindings.values())

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def renew(self, edited: list[Binding]) -> None:
        """Store the groups of changed tensors anew; what did not change in them is not written."""
        with self._renewing:
            for key in dict.fromkeys(binding.key for binding in edited):
                members = self._members(key)
                with self.shared.lock:
                    if not members or any(b.user is not None for b in members):
                        continue  # they are in use: noticed again before the next one
                    # Aliases: on another thread, the tensors may show leased memory soon.
                    values = {b.name: b.tensor.detach() for b in members}
                self._store_anew(key, members, values)
            self._watch_homes()

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def convert(self, change: Change) -> None:
        """Apply `change` to every tensor, group by group: of what changes, one is in memory."""
        with self._renewing:
            self.renew([b for b in self._bindings.values() if b.edited])
            for key in bar(list(self.groups), "Converting", "groups"):
                members = self._members(key)
                values = {b.name: change(b.tensor) for b in members}
                if any(values[b.name] is not b.tensor for b in members):
                    self._store_anew(key, members, {n: v.detach() for n, v in values.items()})
                    del values
                    give_back_free_memory()
            self._watch_homes()

    def _store_anew(
        self, old: str, members: list[Binding], values: Mapping[str, torch.Tensor]
    ) -> None:
        named = (f"{old.partition('~')[0]}~{number}" for number in _renewals)
        key = next(key for key in named if key not in self.groups)
        homes = self.store.register(key, values)
        self._know(key, self.groups.pop(old))
        with self.shared.lock:
            self.shared.renewals += 1
            for binding in members:
                binding.settle(key, homes[binding.name])
        self.store.discard(old)

    @torch.inference_mode(mode=False)
    def disable(self) -> None:
        """Make it an ordinary module again. Its weights show what they showed while away."""
        with self._renewing:
            self._disable()

    def _disable(self) -> None:
        with self.shared.lock:
            self.shared.over = True
        while self._wrappers:
            self._wrappers.pop().remove()
        while self._hooks:
            self._hooks.pop().remove()
        disown(self)
        self._staying.give_back()
        for binding in self._bindings.values():
            if not binding.edited:  # otherwise it shows what somebody gave it
                assign(binding.tensor, binding.home)
        self._bindings.clear()
        with suppress(ClosedError):  # in a child process, too, where the store is of no use
            for key in self.groups:
                if key in self.store:
                    self.store.discard(key)
        self.groups.clear()
