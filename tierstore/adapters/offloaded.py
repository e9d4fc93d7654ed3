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
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
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
    save_true_values,
    walking,
)
from tierstore.adapters.codecs import weight_bytes
from tierstore.adapters.codecs.plain import make_inference, make_ordinary
from tierstore.adapters.codecs.wrapper import is_wrapper
from tierstore.adapters.compat import (
    Library,
    first_answer,
    methods_that_change_weights,
    notify_all,
    tell_of_offloading,
)
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
    warn_of_compiled_parts,
)
from tierstore.adapters.forward import (
    Arguments,
    ForwardContext,
    ForwardRunner,
    MethodPatch,
    calls_of,
    has_method,
)
from tierstore.adapters.grouping import GroupPlan, Unit
from tierstore.adapters.nested import are_there, device_of, to_device
from tierstore.adapters.other_offloading import check_not_offloaded
from tierstore.adapters.out_of_memory import OomRetry
from tierstore.adapters.owners import (
    around,
    disown,
    enabled_models,
    forget,
    others,
    own,
    owner_of,
)
from tierstore.adapters.routed import ExpertsContext, experts_of
from tierstore.adapters.settings import ANYWHERE, IN_RAM, OffloadSettings, place_of
from tierstore.adapters.suspended import SuspendedModel
from tierstore.adapters.touched import ModelEntry, other_entries
from tierstore.adapters.trained import FollowingStates, Merging, Trained
from tierstore.adapters.unit_context import PassContext, UnitContext
from tierstore.adapters.weight_groups import WeightGroups
from tierstore.adapters.wrapped import leaf_ids, wrapped_tensors
from tierstore.errors import BudgetError, LeaseError
from tierstore.model.formatting import first_of
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


class OffloadedModel:
    """One model on a store.

    `groups` maps the keys of its groups to their tensors' names; `resident` has the tensors that
    stay on the device.

    The model keeps it alive, by the methods that it wraps. `changed` says that the model is built
    differently from what it was when it was cut: it is cut again before it runs next. `enabled`
    says that its weights are offloaded, unless it was made ordinary, is suspended, or could not be
    offloaded again after that. `has_run` says that it has run as a whole.

    Raises ValueError if something else offloads the model, and BudgetError if a group or what has
    to be on the device at once is larger than a budget. Then it is an ordinary model.
    """

    weights: WeightGroups

    def __init__(
        self, root: nn.Module, store: TierStore, prefix: str, settings: OffloadSettings
    ) -> None:
        self.root = root
        self.store = store
        self.settings = settings
        self._attachment = Attachment(self, store)
        self.groups = self._attachment.groups
        self.resident = self._attachment.resident
        self.enabled = False
        self.changed = False
        self.has_run = False
        self._ended = False
        self._suspensions = 0
        self._inference: list[tuple[torch.Tensor, bool]] = []
        self._prefix = prefix
        self._places = dict(settings.places)
        self._aligned = settings.dispatched and store.device.type != "cpu"
        self._renewing = threading.RLock()
        try:
            self.resume()
        except BaseException:
            self.end()
            raise

    # Beginning and end -------------------------------------------------------------------------

    def resume(self) -> None:
        """Offload the model as it is now, unless it is offloaded, suspended or at its end."""
        if self.enabled or self._suspensions or self._ended:
            return
        dispatched = self.settings.dispatched
        check_not_offloaded(self._prefix.partition("/")[2] or _name(self.root), self.root)
        before = self.store.stats().bytes_written
        self._trained = Trained(self.root)
        self._cutting = self.settings.cutting(self.root, self.store)
        self._skip = self.settings.skipped(self.root)
        self.enable()
        if not dispatched:
            tell_of_offloading(self.root, self.store.device)
        logger.info(
            "%s: %d groups, %d bytes of weights; %d bytes written",
            _name(self.root) if dispatched else self._prefix,
            len(self.groups),
            weight_bytes(parameters_of(self.root)),
            self.store.stats().bytes_written - before,
        )

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, the model is an ordinary one. Changes of its weights are stored as they come."""
        self._suspensions += 1
        changes = None
        try:
            if self.enabled:
                self._make_ordinary()
                changes = SuspendedModel(self.root, self.store, self._cutting.target)
                changes.begin()
            yield
        finally:
            if changes is not None:
                changes.end()
            self._suspensions -= 1
            if not self.store.closed:
                self.resume()

    def end(self) -> None:
        """Make it an ordinary model for good."""
        self._ended = True
        forget(self)
        self._make_ordinary()
        engine_of(self.store).groups.discard_soon(())

    def _make_ordinary(self) -> None:
        if self.enabled:
            notify_all(Library.unmark, self.root)
            self.enabled = False
            self.disable()

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
            self.enabled = True
        except BaseException:
            self.enabled = False
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
        warn_of_compiled_parts(self.root, units)
        lenders = others(self)
        theirs = set[int]().union(*(tensors for _, tensors in lenders))
        wrapped = wrapped_tensors(tensors_of(self.root))
        plans, in_ram = self._plans(units, theirs)
        check_groups(self.store, self._cutting, plans, units)
        self.weights.register(plans, in_ram, wrapped)
        for unit in units:
            for binding in self.weights.bindings(map(id, unit.stacks.values())):
                self.weights.slices(binding)
        self._keep_the_rest(theirs)
        uses = [use for unit in units for use in uses_of(unit)]
        self._touched = touched_units(self.weights, self._cutting, uses)
        self._other_entries = other_entries(self.root)
        for unit in uses:
            self._wrap(unit, lenders)
        self._wrap_entries({unit.module for unit in uses})
        self._watch_changes()
        if self._trained.parameters and self.store.device.type != "cpu":
            self._follow_what_is_trained()

    def _follow_what_is_trained(self) -> None:
        self._attachment.add(FollowingStates(self._trained))
        for module in modules_of(self.root):
            if owner_of(module) is self:
                for name in first_answer(Library.merges, module) or ():
                    self._attachment.patch(module, name, Merging(self._trained, self))

    def _watch_changes(self) -> None:
        self._attachment.patch(self.root, "_apply", Conversion(self))
        for name in ("named_modules", "apply"):
            self._attachment.patch(self.root, name, walking(self))
        self._attachment.add(Copying(self))
        for name in () if self.settings.dispatched else methods_that_change_weights():
            if has_method(self.root, name):
                self._attachment.patch(self.root, name, self._call_suspended)
        loading = Hook(Loading(self))
        saving = Hook(functools.partial(save_true_values, self))
        residents = set(map(id, self.resident.tensors))
        for module in modules_of(self.root):
            if owner_of(module) is self:
                self._attachment.patch(module, "compile", self._compile)
            holds = bool(self.weights.bindings_of(module, recurse=False))
            if holds or (module is self.root and self.weights.tensor_ids()):
                self._attachment.add(module.register_load_state_dict_post_hook(loading))
            shows = holds or not residents.isdisjoint(map(id, tensors_of(module, recurse=False)))
            if shows and not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
                self._attachment.add(after_state_dict(module, saving))

    def _plans(self, units: list[Unit], theirs: set[int]) -> tuple[list[GroupPlan], set[str]]:
        """The groups, and the names of what should stay in RAM: that and the rest are never in one
        group."""
        taken = theirs.union(self._trained.ids)
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
        return place_of(self._places, name) == place and id(tensor) not in taken

    def _keep_the_rest(self, theirs: set[int]) -> None:
        """What is not offloaded lives on the device, within its budget, for as long as we do."""
        taken = theirs.union(self.weights.tensor_ids())
        rest = {
            name: tensor
            for name, tensor in [*named_parameters_of(self.root), *named_buffers_of(self.root)]
            if id(tensor) not in taken and tensor.device.type != "meta"
        }
        trained = set(self._trained.ids)
        kept = [tensor for tensor in rest.values() if id(tensor) in trained]
        try:
            self.resident.take(self._prefix, rest, self._cutting.target, self.groups, kept)
        except BudgetError as error:
            error.add_note(
                f"tierstore: of {type(self.root).__name__}, {first_of(list(rest))} stay on the "
                "device for good: small buffers, and what a device map says"
            )
            raise

    def _wrap(self, unit: Unit, lenders: list[tuple[OffloadedModel, set[int]]]) -> None:
        if owner_of(unit.module) is not self:
            return
        own = {id(tensor) for tensor in unit.tensors.values()}
        if (experts := experts_of(unit, self.weights)) is not None:
            before = experts.announced_after(self._move)
            self._wrap_with(unit, self, functools.partial(ExpertsContext, experts), before)
            return
        bindings = [] if unit in self._touched else self.weights.bindings(own)
        weights = self.weights.unit_weights(bindings)
        if weights.bindings or self._aligned:
            self._wrap_with(unit, self, functools.partial(UnitContext, weights))
        for other, theirs in lenders:
            # A weight may be tied to one that they offload: they lend it, as it is with them then.
            if not own.isdisjoint(theirs):
                tied = self._used_by(unit) & own
                self._wrap_with(unit, other, functools.partial(_use_of, other, tied))

    def _wrap_with(
        self,
        unit: Unit,
        owner: OffloadedModel,
        use: Callable[[], ForwardContext | None],
        before: Callable[[Any, Any], Arguments] | None = None,
    ) -> None:
        move = before or (self._move if self._aligned else None)
        call = None if self.store.device.type == "cpu" else OomRetry(unit.module, self.store)
        names = calls_of(unit.module)
        for name in (*names, *self._other_entries) if unit.module is self.root else names:
            if has_method(unit.module, name):
                forward = ForwardRunner(use, owner.look, before=move, call=call)
                self._attachment.patch(unit.module, name, forward)

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
        self._attachment.patch(self.root, CALL, self._call_as_it_is)
        align = self._align if self._aligned else None
        entries = (*calls_of(self.root), *self._other_entries)
        self._wrap_run(self.root, self._prefix, entries, before=self._move, after=align)
        if align is None and has_method(self.root, "generate"):
            # It goes on with what it was given and what the model returned: on one device.
            around = ForwardRunner(lambda: None, before=self._move, after=self._align)
            self._attachment.patch(self.root, "generate", around)

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
                self._attachment.patch(module, name, ForwardRunner(run, self.look, **around))

    def _run(self, passes: PassesOf, does: str, entry: ModelEntry | None) -> PassContext | None:
        current = self.weights.current
        if current.context is not None:
            return None
        run = PassContext(current, passes, self.weights.begin_pass, does, self._over)
        if entry is not None and not torch.compiler.is_compiling():
            entry.prepare(run, self._attachment.patched)
        return run

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _over(self) -> None:
        if not self.has_run:
            self.has_run = True
            if all(other.has_run for other in enabled_models() if other.store is self.store):
                engine_of(self.store).device_memory.grow_budget()

    def _used_by(self, unit: Unit) -> set[int]:
        """The tensors that modules of ours have, in the unit."""
        ours = [module for module in modules_of(unit.module) if owner_of(module) is self]
        return set[int]().union(*(leaf_ids(module, recurse=False) for module in ours))

    def _compile(self, method: MethodPatch, args: Any, kwargs: Any) -> None:
        """A part of the model is compiled by itself: its weights have to come before all of it, and
        the model is cut anew when it is called next."""
        method.original(*args, **kwargs)
        self._attachment.patch(method.module, COMPILED_CALL, self._call_compiled)
        self.changed = True

    def _call_compiled(self, method: MethodPatch, args: Any, kwargs: Any) -> Any:
        self.look()
        if getattr(method.module, COMPILED_CALL) is method:  # not cut anew: it is in use
            return call_uncompiled(method.module, args, kwargs)
        return method.module(*args, **kwargs)

    def _call_suspended(self, method: MethodPatch, args: Any, kwargs: Any) -> Any:
        with self.suspended():
            return method.original(*args, **kwargs)

    def _call_as_it_is(self, method: MethodPatch, args: Any, kwargs: Any) -> Any:
        """The model is called. If its `forward` was patched since, that does not look first."""
        forward = self.root.__dict__.get("forward")
        if not isinstance(forward, MethodPatch) or forward.inactive:
            self.look()
        return method.original(*args, **kwargs)

    # Around a run ------------------------------------------------------------------------------

    def look(self) -> None:
        """Before any part of the model runs: use it as it is now. During a run, or a backward that
        runs it again, nothing is seen."""
        if self.weights.current.context is None and not (in_backward() and self._trained.known):
            self._look()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _look(self) -> None:
        _check_way_to_run(self.root, self.store.device)
        with self._renewing:  # others wait until it is cut anew
            self.resident.take_told()
            self.changed = self.changed or not all(w.intact for w in self.weights.wrapped.values())
            if torch.is_grad_enabled() and self._trained.look():
                self.changed = True
            if self._attachment.patch_again():
                self.changed = True
            if self.changed and self.weights.end_use():
                self._cut_anew()
            self.weights.renew_written()

    def _cut_anew(self) -> None:
        # The patches stay until others take their places: on another thread, the model may begin
        # to run, and waits in them.
        superseded = self._attachment.supersede(ForwardRunner)
        try:
            self.disable()
            self.enable()
        finally:
            while superseded:
                superseded.pop().remove()

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

    @torch.inference_mode(mode=False)
    def disable(self) -> None:
        """Make it an ordinary module again. Its weights show what they showed while away."""
        with self._renewing:
            self._disable()

    def _disable(self) -> None:
        self.weights.stop()
        self._attachment.detach()
        disown(self)
        self.resident.give_back()
        self.weights.discard()
        while self._inference:
            tensor, requires_grad = self._inference.pop()
            make_inference(tensor, requires_grad=requires_grad)


def _name(module: nn.Module) -> str:
    return type(module).__name__


def _check_way_to_run(root: nn.Module, device: torch.device) -> None:
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


def _use_of(owner: OffloadedModel, tensors: set[int]) -> UnitContext | None:
    """A use of those of the tensors (by id) that somebody else offloads, where they are now."""
    bindings = owner.weights.bindings(tensors)
    return UnitContext(owner.weights.unit_weights(bindings)) if bindings else None
