"""Any torch module on a store: its weights are on the device while its forward runs.

Each unit's `forward` is wrapped: it acquires the unit's groups, lets the parameters show the leased
tensors, runs, and puts the parameters back to what they show while away: a CPU tensor of the true
value that costs no memory. No Parameter object is ever replaced. Whatever is raised in the middle,
nothing stays leased.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from tierstore.adapters.attachment import Attachment
from tierstore.adapters.changing import (
    Conversion,
    Copying,
    Hook,
    Loading,
    after_state_dict,
    tell_true_values,
    walking,
)
from tierstore.adapters.codecs import weight_bytes
from tierstore.adapters.codecs.plain import make_inference, make_ordinary
from tierstore.adapters.codecs.wrapper import is_wrapper
from tierstore.adapters.compat import first_answer
from tierstore.adapters.contents import (
    modules_of,
    named_buffers_of,
    named_modules_of,
    named_parameters_of,
    parameters_of,
    tensors_of,
)
from tierstore.adapters.fitting import (
    check_groups,
    has_forward,
    nearest_with_forward,
    touched_units,
    uses_of,
)
from tierstore.adapters.grouping import Cutting, GroupPlan, Unit, is_compiled
from tierstore.adapters.nested import are_there, device_of, to_device
from tierstore.adapters.out_of_memory import OnceMore
from tierstore.adapters.owners import Owner, around, disown, everyone, others_tensors, own, owner_of
from tierstore.adapters.routed import ExpertsUse, experts_of
from tierstore.adapters.touched import ModelEntry, other_entries
from tierstore.adapters.trained import FollowingStates, Merging, Trained
from tierstore.adapters.unit_use import (
    Arguments,
    StandIn,
    UnitForward,
    UnitUse,
    calls_of,
    has_method,
)
from tierstore.adapters.weight_groups import WeightGroups
from tierstore.adapters.weight_use import ModelRun, UnitWeights, WeightUse
from tierstore.adapters.wrapped import leaf_ids, wrapped_tensors
from tierstore.model.errors import BudgetError, LeaseError
from tierstore.model.words import first_of
from tierstore.observe.passes import FORWARD, PassesOf
from tierstore.store import TierStore, engine_of
from tierstore.torch_private import (
    CALL,
    COMPILED_CALL,
    call_uncompiled,
    in_backward,
    in_derivative,
    in_trace,
)

logger = logging.getLogger("tierstore.adapters")

MANY_UNITS = 8
"""A part of a model that has so many is looked at as a whole when it is called by itself."""
ON_DEVICE, IN_RAM, ANYWHERE = "device", "cpu", "disk"
"""Where a weight should stay between its uses: for good on the device; in RAM, given up last; or
wherever the store finds it best."""


class OffloadedModule:
    """One model on a store. `groups` maps the keys of its groups to their tensors' names.

    `places` tells by a tensor's name where it should stay. With `aligned`, every module's inputs
    come to the device, and what the model returns goes to the device of what it was given. Values
    of arguments named in `skip` are left where they are. `changed` says that the model is built
    differently from what it was when it was cut: it is cut anew before it runs next. What
    the caller wants to know of it later is in `settings`.
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
        settings: object = None,
    ) -> None:
        self.root = root
        self.store = store
        self.settings = settings
        self._attachment = Attachment(self, store)
        self.groups = self._attachment.groups
        self.changed = False
        self.has_run = False
        self._inference: list[tuple[torch.Tensor, bool]] = []
        self._trained = Trained(root)
        self._prefix = prefix
        self._cutting = cutting
        self._skip = skip
        self._places = places
        self._aligned = aligned and store.device.type != "cpu"
        self._renewing = threading.RLock()
        self.enable()

    @torch.inference_mode(mode=False)
    def enable(self) -> None:
        """Offload the model as it is now. If it raises, it is an ordinary module.

        Those who offload a model around it go without it from now on.
        """
        outer = around(self.root)
        if any(other.weights.in_use for other in outer):
            raise LeaseError("the model around it runs at this moment: offload it before or after")
        for other in outer:
            other.disable()
        self.weights = WeightGroups(self.store, self._prefix, self.groups, self._renewing)
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
        for tensor in tensors_of(self.root):
            if tensor.is_inference() and not is_wrapper(tensor):
                self._inference.append((tensor, tensor.requires_grad))
                make_ordinary(tensor)
        units = self._cutting.units(self.root)
        _tell_what_is_compiled_in_parts(self.root, units)
        wrapped = wrapped_tensors(tensors_of(self.root))
        plans, in_ram = self._plans(units)
        check_groups(self.store, self._cutting, plans, units)
        self.weights.register(plans, in_ram, wrapped)
        for unit in units:
            for binding in self.weights.bindings(map(id, unit.stacks.values())):
                self.weights.slices(binding)
        self._keep_the_rest()
        uses = [use for unit in units for use in uses_of(unit)]
        self._touched = touched_units(self.weights, self._cutting, uses)
        self._other_entries = other_entries(self.root)
        for unit in uses:
            self._wrap(unit)
        self._wrap_entries({unit.module for unit in uses})
        self._watch_changes()
        if self._trained.parameters and self.store.device.type != "cpu":
            self._follow_what_is_trained()

    def _follow_what_is_trained(self) -> None:
        self._attachment.add(FollowingStates(self._trained))
        for module in modules_of(self.root):
            if owner_of(module) is self:
                for name in first_answer("merges", module) or ():
                    self._attachment.stand_in(module, name, Merging(self._trained, self))

    def _watch_changes(self) -> None:
        self._attachment.stand_in(self.root, "_apply", Conversion(self))
        for name in ("named_modules", "apply"):
            self._attachment.stand_in(self.root, name, walking(self))
        self._attachment.add(Copying(self))
        loading = Hook(Loading(self))
        saving = Hook(functools.partial(tell_true_values, self))
        residents = set(map(id, self.residents))
        for module in modules_of(self.root):
            if owner_of(module) is self:
                self._attachment.stand_in(module, "compile", self._compile)
            holds = bool(self.weights.bindings_of(module, recurse=False))
            if holds or (module is self.root and self.weights.tensor_ids()):
                self._attachment.add(module.register_load_state_dict_post_hook(loading))
            shows = holds or not residents.isdisjoint(map(id, tensors_of(module, recurse=False)))
            if shows and not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
                self._attachment.add(after_state_dict(module, saving))

    def _plans(self, units: list[Unit]) -> tuple[list[GroupPlan], set[str]]:
        """The groups, and the names of what should stay in RAM: that and the rest are never in one
        group."""
        taken = others_tensors(self).union(self._trained.ids)
        plans: list[GroupPlan] = []
        in_ram: set[str] = set()
        for place in (IN_RAM, ANYWHERE):
            wanted = functools.partial(self._is_at, place, taken)
            parts = [part for unit in units if (part := unit.only(wanted))]
            found = self._cutting.groups(parts)
            taken |= {id(tensor) for plan in found for tensor in plan.tensors.values()}
            if place == IN_RAM:
                in_ram = {name for plan in found for name in plan.tensors}
            plans += found
        return plans, in_ram

    def _is_at(self, place: str, taken: set[int], name: str, tensor: torch.Tensor) -> bool:
        return self._places(name) == place and id(tensor) not in taken

    def _keep_the_rest(self) -> None:
        """What is not offloaded lives on the device, within its budget, for as long as we do."""
        taken = others_tensors(self).union(self.weights.tensor_ids())
        rest = {
            name: tensor
            for name, tensor in [*named_parameters_of(self.root), *named_buffers_of(self.root)]
            if id(tensor) not in taken and tensor.device.type != "meta"
        }
        trained = set(self._trained.ids)
        kept = [tensor for tensor in rest.values() if id(tensor) in trained]
        try:
            self._attachment.keep_on_device(self._prefix, rest, self._cutting.target, kept)
        except BudgetError as error:
            error.add_note(
                f"tierstore: of {type(self.root).__name__}, {first_of(list(rest))} stay on the "
                "device for good: small buffers, and what a device map says"
            )
            raise

    def _wrap(self, unit: Unit) -> None:
        if owner_of(unit.module) is not self:
            return
        own = {id(tensor) for tensor in unit.tensors.values()}
        if (experts := experts_of(unit, self.weights)) is not None:
            before = experts.announced_after(self._move)
            self._wrap_with(unit, self, functools.partial(ExpertsUse, experts), before)
            return
        bindings = [] if unit in self._touched else self.weights.bindings(own)
        weights = UnitWeights.of(self.weights, bindings)
        if weights.bindings or self._aligned:
            self._wrap_with(unit, self, functools.partial(WeightUse, weights))
        for other in everyone():
            # A weight may be tied to one that they offload: they lend it, as it is with them then.
            if other is not self and not own.isdisjoint(other.weights.tensor_ids()):
                tied = self._used_by(unit) & own
                self._wrap_with(unit, other, functools.partial(_use_of, other, tied))

    def _wrap_with(
        self,
        unit: Unit,
        owner: Owner,
        use: Callable[[], UnitUse | None],
        before: Callable[[Any, Any], Arguments] | None = None,
    ) -> None:
        move = before or (self._move if self._aligned else None)
        call = None if self.store.device.type == "cpu" else OnceMore(unit.module, self.store)
        names = calls_of(unit.module)
        for name in (*names, *self._other_entries) if unit.module is self.root else names:
            if has_method(unit.module, name):
                forward = UnitForward(use, owner.look, before=move, call=call)
                self._attachment.stand_in(unit.module, name, forward)

    def _wrap_entries(self, units: set[nn.Module]) -> None:
        """Parts of the model may be called by themselves. The units of a larger one run in one run,
        too, and what changed is looked for once; so do those of one with weights that come as they
        are touched."""
        move = self._move if self._aligned else None
        named = dict(named_modules_of(self.root))
        touching = {nearest_with_forward(unit.name, named) for unit in self._touched}
        for name, module in named.items():
            large = (
                module not in units and len(units.intersection(modules_of(module))) >= MANY_UNITS
            )
            if (
                module is not self.root
                and owner_of(module) is self
                and (large or module in touching)
                and has_forward(module)
            ):
                self._wrap_run(module, f"{self._prefix}/{name}", calls_of(module), before=move)
        # Outside of `forward`, which others may have patched since.
        self._attachment.stand_in(self.root, CALL, self._call_as_it_is)
        align = self._align if self._aligned else None
        entries = (*calls_of(self.root), *self._other_entries)
        self._wrap_run(self.root, self._prefix, entries, before=self._move, after=align)
        if align is None and has_method(self.root, "generate"):
            # It goes on with what it was given and what the model returned: on one device.
            around = UnitForward(lambda: None, before=self._move, after=self._align)
            self._attachment.stand_in(self.root, "generate", around)

    def _wrap_run(
        self, module: nn.Module, model: str, names: Collection[str], **around: Any
    ) -> None:
        passes = PassesOf(engine_of(self.store).passes, model)
        parts = set(modules_of(module))
        always = any(unit.module in parts for unit in self._touched)
        for name in names:
            if has_method(module, name):
                does = name if name in self._other_entries else FORWARD
                entry = None if name == COMPILED_CALL else ModelEntry(self, always)
                run = functools.partial(self._run, passes, does, entry)
                self._attachment.stand_in(module, name, UnitForward(run, self.look, **around))

    def _run(self, passes: PassesOf, does: str, entry: ModelEntry | None) -> ModelRun | None:
        held = self.weights.held
        if held.run is not None:
            return None
        run = ModelRun(held, self.weights.last_lease, self._over, passes, does)
        if entry is not None and not torch.compiler.is_compiling():
            entry.prepare(run, self._attachment.patched)
        return run

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _over(self) -> None:
        if not self.has_run:
            self.has_run = True
            if all(other.has_run for other in everyone() if other.store is self.store):
                engine_of(self.store).device_memory.grow_budget()

    def _used_by(self, unit: Unit) -> set[int]:
        """The tensors that modules of ours have, in the unit."""
        ours = [module for module in modules_of(unit.module) if owner_of(module) is self]
        return set[int]().union(*(leaf_ids(module, recurse=False) for module in ours))

    def _compile(self, method: StandIn, args: Any, kwargs: Any) -> None:
        """A part of the model is compiled by itself: its weights have to come before all of it, and
        the model is cut anew when it is called next."""
        method.original(*args, **kwargs)
        self._attachment.stand_in(method.module, COMPILED_CALL, self._call_compiled)
        self.changed = True

    def _call_compiled(self, method: StandIn, args: Any, kwargs: Any) -> Any:
        self.look()
        if getattr(method.module, COMPILED_CALL) is method:  # not cut anew: it is in use
            return call_uncompiled(method.module, args, kwargs)
        return method.module(*args, **kwargs)

    def _call_as_it_is(self, method: StandIn, args: Any, kwargs: Any) -> Any:
        """The model is called. If its `forward` was patched since, that does not look first."""
        forward = self.root.__dict__.get("forward")
        if not isinstance(forward, StandIn) or forward.gone:
            self.look()
        return method.original(*args, **kwargs)

    # Around a run ------------------------------------------------------------------------------

    def look(self) -> None:
        """Before any part of the model runs: use it as it is now. During a run, or a backward that
        runs it again, nothing is seen."""
        if self.weights.held.run is None and not (in_backward() and self._trained.known):
            self._look()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _look(self) -> None:
        _refuse_other_ways_to_run(self.root, self.store.device)
        with self._renewing:  # others wait until it is cut anew
            self._attachment.resident.take_told()
            self.changed = self.changed or not all(w.intact for w in self.weights.wrapped.values())
            if torch.is_grad_enabled() and self._trained.look():
                self.changed = True
            if self._attachment.stand_in_again():
                self.changed = True
            if self.changed and self.weights.end_use():
                self._cut_anew()
            self.weights.renew_written()

    def _cut_anew(self) -> None:
        # The stand-ins stay until others take their places: on another thread, the model may begin
        # to run, and waits in them.
        outdated = self._attachment.outdate(UnitForward)
        try:
            self.disable()
            self.enable()
        finally:
            while outdated:
                outdated.pop().remove()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _move(self, args: Any, kwargs: Any) -> Arguments:
        device = self.store.device
        if device.type == "cpu" or are_there(args, kwargs, device):
            return args, kwargs
        return to_device(args, device), to_device(kwargs, device, self._skip)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _align(self, result: Any, args: Any, kwargs: Any) -> Any:
        """After the whole model ran: what it returns goes to where its inputs came from."""
        home = device_of((args, kwargs))
        return result if home is None else to_device(result, home, self._skip)

    @property
    def residents(self) -> list[torch.Tensor]:
        """Its tensors that stay on the device."""
        return self._attachment.resident.tensors

    def tell_resident(self, tensor: torch.Tensor) -> torch.Tensor:
        """One of these on the CPU, for a state dict. What is written to it counts before a run."""
        return self._attachment.resident.told(tensor)

    @torch.inference_mode(mode=False)
    def disable(self) -> None:
        """Make it an ordinary module again. Its weights show what they showed while away."""
        with self._renewing:
            self._disable()

    def _disable(self) -> None:
        self.weights.stop()
        self._attachment.detach()
        disown(self)
        self._attachment.resident.give_back()
        self.weights.discard()
        while self._inference:
            tensor, requires_grad = self._inference.pop()
            make_inference(tensor, requires_grad=requires_grad)


def _tell_what_is_compiled_in_parts(root: nn.Module, units: list[Unit]) -> None:
    whole = {unit.module for unit in units if unit.block}
    whole = {part for module in whole for part in modules_of(module)}
    cut = [module for module in modules_of(root) if module not in whole and is_compiled(module)]
    if cut:
        nbytes = max(weight_bytes(parameters_of(module)) for module in cut)
        logger.warning(
            "%s: a %s that is compiled takes %s bytes, more than half of the smallest budget. Its "
            "parts come one by one, and break its graph (with fullgraph=True, torch raises); with "
            "a budget of %s bytes they would not",
            type(root).__name__,
            type(cut[0]).__name__,
            f"{nbytes:,}",
            f"{nbytes * 5 // 2:,}",
        )


def _refuse_other_ways_to_run(root: nn.Module, device: torch.device) -> None:
    name = type(root).__name__
    ordinary = "make it an ordinary model first (tierstore.disable_offload(model))"
    if in_trace():
        raise RuntimeError(
            f"{name} cannot be traced: a trace would not bring its weights, which are in a "
            f"tierstore. Trace copy.deepcopy(model), or {ordinary}"
        )
    if device.type != "cpu" and in_derivative():
        raise RuntimeError(
            f"{name} cannot be differentiated by torch.func: its weights are in a tierstore, "
            f"which copies them to {device} meanwhile. First, {ordinary}"
        )


def _use_of(owner: Owner, tensors: set[int]) -> WeightUse | None:
    """A use of those of the tensors (by id) that somebody else offloads, where they are now."""
    bindings = owner.weights.bindings(tensors)
    return WeightUse(UnitWeights.of(owner.weights, bindings)) if bindings else None
