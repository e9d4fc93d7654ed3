"""Offload any torch module: its weights are on the device only while its forward runs.

The `forward` of each unit is patched. It leases the unit's groups, binds the parameters to the
leased tensors, runs, and binds the parameters to their host views again: CPU tensors with the true
values that take no memory. Parameter objects are never replaced. After an exception, nothing stays
leased.
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
    walk_patch,
)
from tierstore.adapters.codecs import weight_bytes
from tierstore.adapters.codecs.plain import make_inference, make_ordinary
from tierstore.adapters.codecs.wrapper import is_wrapper
from tierstore.adapters.compat import (
    Library,
    first_answer,
    notify_all,
    notify_offloaded,
    weight_changing_methods,
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
    called_units,
    check_groups,
    has_forward,
    nearest_with_forward,
    on_demand_units,
    warn_of_compiled_parts,
)
from tierstore.adapters.forward import (
    Arguments,
    ForwardContext,
    ForwardRunner,
    MethodPatch,
    entry_methods,
    has_method,
)
from tierstore.adapters.grouping import GroupPlan, Unit
from tierstore.adapters.nested import are_on_device, device_of, to_device
from tierstore.adapters.on_demand import ModelEntry, other_entries
from tierstore.adapters.other_offloading import check_not_offloaded
from tierstore.adapters.out_of_memory import OomRetry
from tierstore.adapters.owners import (
    disown,
    enabled_models,
    enclosing_models,
    forget,
    other_owners,
    own,
    owner_of,
)
from tierstore.adapters.routed import ExpertsContext, experts_of
from tierstore.adapters.settings import ANYWHERE, STICKY, OffloadSettings, place_of
from tierstore.adapters.suspended import SuspendedChanges
from tierstore.adapters.trained import MergePatch, OptimizerStateMover, TrainedParameters
from tierstore.adapters.unit_context import PassContext, UnitContext
from tierstore.adapters.weight_groups import WeightGroups
from tierstore.adapters.wrapped import leaf_ids, wrapped_tensors
from tierstore.errors import BudgetError, LeaseError
from tierstore.model.formatting import first_of
from tierstore.observe.passes import FORWARD, ModelPasses
from tierstore.store import TierStore, engine_of
from tierstore.torch_private import (
    CALL,
    COMPILED_CALL,
    call_uncompiled,
    in_backward,
    in_functorch_grad,
    is_tracing,
)

logger = logging.getLogger("tierstore.adapters")

MANY_UNITS = 8
"""A part of a model with this many units is refreshed once, as a whole, when called directly."""


class OffloadedModel:
    """A model whose weights are in a store.

    `groups` maps group keys to tensor names; `resident` holds the tensors that stay on the device.

    The model keeps this object alive through its patched methods. `changed` is True if the model's
    structure has changed since it was partitioned; it is repartitioned before its next run.
    `enabled` is True while the weights are offloaded. It is False once the offloading has ended,
    while it is suspended, and if it could not be resumed. `has_run` is True after a run of the
    whole model.

    Raises ValueError if something else offloads the model, and BudgetError if a group, or the
    weights needed on the device at the same time, exceed a budget. The model is then an ordinary
    one.
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
        self._groups_lock = threading.RLock()
        try:
            self.resume()
        except BaseException:
            self.end()
            raise

    # Beginning and end -------------------------------------------------------------------------

    def resume(self) -> None:
        """Offload the model in its current form, unless it is offloaded, suspended or ended."""
        if self.enabled or self._suspensions or self._ended:
            return
        dispatched = self.settings.dispatched
        check_not_offloaded(self._prefix.partition("/")[2] or _name(self.root), self.root)
        before = self.store.stats().bytes_written
        self._trained = TrainedParameters(self.root)
        self._partitioner = self.settings.partitioner(self.root, self.store)
        self._skip = self.settings.skipped(self.root)
        self.enable()
        if not dispatched:
            notify_offloaded(self.root, self.store.device)
        logger.info(
            "%s: %d groups, %d bytes of weights; %d bytes written",
            _name(self.root) if dispatched else self._prefix,
            len(self.groups),
            weight_bytes(parameters_of(self.root)),
            self.store.stats().bytes_written - before,
        )

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Make the model an ordinary one within the block. Weights are stored as they change.

        See `SuspendedChanges`.
        """
        self._suspensions += 1
        changes = None
        try:
            if self.enabled:
                self._make_ordinary()
                changes = SuspendedChanges(self.root, self.store, self._partitioner.target)
                changes.begin()
            yield
        finally:
            if changes is not None:
                changes.end()
            self._suspensions -= 1
            if not self.store.closed:
                self.resume()

    def end(self) -> None:
        """End the offloading permanently: the model becomes an ordinary one."""
        self._ended = True
        forget(self)
        self._make_ordinary()
        engine_of(self.store).groups.discard_from_finalizer(())

    def _make_ordinary(self) -> None:
        if self.enabled:
            notify_all(Library.unmark, self.root)
            self.enabled = False
            self.disable()

    @torch.inference_mode(mode=False)
    def enable(self) -> None:
        """Offload the model in its current form. If this raises, the model is an ordinary module.

        An enclosing offloaded model no longer offloads this part of it.
        """
        outer = enclosing_models(self.root)
        if any(other.weights.in_use for other in outer):
            raise LeaseError(
                "the enclosing model is running: offload its part before or after that"
            )
        for other in outer:
            other.disable()
        self.weights = WeightGroups(self.store, self._prefix, self.groups, self._groups_lock)
        try:
            own(self)
            self._attach()
            self.enabled = True
        except BaseException:
            self.enabled = False
            self.disable()
            raise
        finally:
            for other in reversed(outer):
                other.enable()

    def _attach(self) -> None:
        self.changed = False
        for tensor in tensors_of(self.root):
            if tensor.is_inference() and not is_wrapper(tensor):
                self._inference.append((tensor, tensor.requires_grad))
                make_ordinary(tensor)
        units = self._partitioner.units(self.root)
        warn_of_compiled_parts(self.root, units)
        other_models = other_owners(self)
        elsewhere = set[int]().union(*(tensors for _, tensors in other_models))
        wrapped = wrapped_tensors(tensors_of(self.root))
        plans, sticky = self._plans(units, elsewhere)
        check_groups(self.store, self._partitioner, plans, units)
        self.weights.register(plans, sticky, wrapped)
        for unit in units:
            for binding in self.weights.bindings(map(id, unit.stacks.values())):
                self.weights.slices(binding)
        self._place_rest_on_device(elsewhere)
        called = [part for unit in units for part in called_units(unit)]
        self._on_demand = on_demand_units(self.weights, self._partitioner, called)
        self._other_entries = other_entries(self.root)
        for unit in called:
            self._patch_unit(unit, other_models)
        self._patch_entries({unit.module for unit in called})
        self._watch_changes()
        if self._trained.parameters and self.store.device.type != "cpu":
            self._follow_trained()

    def _follow_trained(self) -> None:
        self._attachment.add(OptimizerStateMover(self._trained))
        for module in modules_of(self.root):
            if owner_of(module) is self:
                for name in first_answer(Library.merges, module) or ():
                    self._attachment.patch(module, name, MergePatch(self._trained, self))

    def _watch_changes(self) -> None:
        self._attachment.patch(self.root, "_apply", Conversion(self))
        for name in ("named_modules", "apply"):
            self._attachment.patch(self.root, name, walk_patch(self))
        self._attachment.add(Copying(self))
        for name in () if self.settings.dispatched else weight_changing_methods():
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
            if shows and not isinstance(module, torch.jit.ScriptModule):  # it supports no hooks
                self._attachment.add(after_state_dict(module, saving))

    def _plans(self, units: list[Unit], elsewhere: set[int]) -> tuple[list[GroupPlan], set[str]]:
        """Return the groups, and the names of sticky tensors.

        Sticky tensors never share a group with others. Other models offload the tensors whose ids
        are in `elsewhere`.
        """
        taken = elsewhere.union(self._trained.ids)
        plans: list[GroupPlan] = []
        sticky: set[str] = set()
        for place in (STICKY, ANYWHERE):
            wanted = functools.partial(self._is_at, place, taken)
            parts = [part for unit in units if (part := unit.only(wanted))]
            found = self._partitioner.groups(parts)
            taken |= {id(tensor) for plan in found for tensor in plan.tensors.values()}
            if place == STICKY:
                sticky = {name for plan in found for name in plan.tensors}
            plans += found
        return plans, sticky

    def _is_at(self, place: str, taken: set[int], name: str, tensor: torch.Tensor) -> bool:
        return place_of(self._places, name) == place and id(tensor) not in taken

    def _place_rest_on_device(self, elsewhere: set[int]) -> None:
        """Place all tensors that are not offloaded on the device, within its budget."""
        taken = elsewhere.union(self.weights.tensor_ids())
        rest = {
            name: tensor
            for name, tensor in [*named_parameters_of(self.root), *named_buffers_of(self.root)]
            if id(tensor) not in taken and tensor.device.type != "meta"
        }
        trained = set(self._trained.ids)
        kept = [tensor for tensor in rest.values() if id(tensor) in trained]
        try:
            self.resident.place(self._prefix, rest, self._partitioner.target, self.groups, kept)
        except BudgetError as error:
            error.add_note(
                f"tierstore: of {type(self.root).__name__}, {first_of(list(rest))} stay on the "
                "device permanently: small buffers, and weights that the device map puts there"
            )
            raise

    def _patch_unit(self, unit: Unit, other_models: list[tuple[OffloadedModel, set[int]]]) -> None:
        if owner_of(unit.module) is not self:
            return
        own = {id(tensor) for tensor in unit.tensors.values()}
        if (experts := experts_of(unit, self.weights)) is not None:
            before = experts.prefetching_after(self._move)
            self._patch_with(unit, self, functools.partial(ExpertsContext, experts), before)
            return
        bindings = [] if unit in self._on_demand else self.weights.bindings(own)
        weights = self.weights.unit_weights(bindings)
        if weights.bindings or self._aligned:
            self._patch_with(unit, self, functools.partial(UnitContext, weights))
        for other, elsewhere in other_models:
            # A weight may be tied to one that another model offloads: lease it from that model.
            if not own.isdisjoint(elsewhere):
                tied = self._used_by(unit) & own
                self._patch_with(unit, other, functools.partial(_context_of_owner, other, tied))

    def _patch_with(
        self,
        unit: Unit,
        owner: OffloadedModel,
        make_context: Callable[[], ForwardContext | None],
        before: Callable[[Any, Any], Arguments] | None = None,
    ) -> None:
        move = before or (self._move if self._aligned else None)
        call = None if self.store.device.type == "cpu" else OomRetry(unit.module, self.store)
        names = entry_methods(unit.module)
        for name in (*names, *self._other_entries) if unit.module is self.root else names:
            if has_method(unit.module, name):
                forward = ForwardRunner(make_context, owner.refresh, before=move, call=call)
                self._attachment.patch(unit.module, name, forward)

    def _patch_entries(self, units: set[nn.Module]) -> None:
        """Patch the entry methods of the model and of parts that may be called directly.

        A direct call of a large part, or of one with weights leased on demand, is a separate pass:
        the model is refreshed once, not before each unit.
        """
        move = self._move if self._aligned else None
        named = dict(named_modules_of(self.root))
        on_demand = {nearest_with_forward(unit.name, named) for unit in self._on_demand}
        for name, module in named.items():
            large = (
                module not in units and len(units.intersection(modules_of(module))) >= MANY_UNITS
            )
            if (
                module is not self.root
                and owner_of(module) is self
                and (large or module in on_demand)
                and has_forward(module)
            ):
                self._patch_run(
                    module, f"{self._prefix}/{name}", entry_methods(module), before=move
                )
        # Patch `__call__` too: others may have patched `forward` since.
        self._attachment.patch(self.root, CALL, self._call_refreshed)
        align = self._align if self._aligned else None
        entries = (*entry_methods(self.root), *self._other_entries)
        self._patch_run(self.root, self._prefix, entries, before=self._move, after=align)
        if align is None and has_method(self.root, "generate"):
            # `generate` combines its inputs with the model's outputs: both must be on one device.
            around = ForwardRunner(lambda: None, before=self._move, after=self._align)
            self._attachment.patch(self.root, "generate", around)

    def _patch_run(
        self, module: nn.Module, model: str, names: Collection[str], **around: Any
    ) -> None:
        passes = ModelPasses(engine_of(self.store).passes, model)
        parts = set(modules_of(module))
        always = any(unit.module in parts for unit in self._on_demand)
        for name in names:
            if has_method(module, name):
                operation = name if name in self._other_entries else FORWARD
                entry = None if name == COMPILED_CALL else ModelEntry(self, always)
                run = functools.partial(self._run, passes, operation, entry)
                self._attachment.patch(module, name, ForwardRunner(run, self.refresh, **around))

    def _run(
        self, passes: ModelPasses, operation: str, entry: ModelEntry | None
    ) -> PassContext | None:
        current = self.weights.current
        if current.context is not None:
            return None
        run = PassContext(current, passes, self.weights.begin_pass, operation, self._on_success)
        if entry is not None and not torch.compiler.is_compiling():
            entry.prepare(run, self._attachment.patched)
        return run

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _on_success(self) -> None:
        if not self.has_run:
            self.has_run = True
            if all(other.has_run for other in enabled_models() if other.store is self.store):
                engine_of(self.store).device_memory.grow_budget()

    def _used_by(self, unit: Unit) -> set[int]:
        """Return the ids of a unit's tensors that belong to modules owned by this model."""
        ours = [module for module in modules_of(unit.module) if owner_of(module) is self]
        return set[int]().union(*(leaf_ids(module, recurse=False) for module in ours))

    def _compile(self, method: MethodPatch, args: Any, kwargs: Any) -> None:
        """Compile a part of the model, and repartition the model before its next call.

        The weights of a compiled part must be leased before any of it runs.
        """
        method.original(*args, **kwargs)
        self._attachment.patch(method.module, COMPILED_CALL, self._call_compiled)
        self.changed = True

    def _call_compiled(self, method: MethodPatch, args: Any, kwargs: Any) -> Any:
        self.refresh()
        if getattr(method.module, COMPILED_CALL) is method:  # in use, so it was not repartitioned
            return call_uncompiled(method.module, args, kwargs)
        return method.module(*args, **kwargs)

    def _call_suspended(self, method: MethodPatch, args: Any, kwargs: Any) -> Any:
        with self.suspended():
            return method.original(*args, **kwargs)

    def _call_refreshed(self, method: MethodPatch, args: Any, kwargs: Any) -> Any:
        """Call the model. Refresh it first if a foreign patch of `forward` bypasses ours."""
        forward = self.root.__dict__.get("forward")
        if not isinstance(forward, MethodPatch) or forward.inactive:
            self.refresh()
        return method.original(*args, **kwargs)

    # Around a run ------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Detect changes of the model before any part of it runs.

        Does nothing during a pass, or during a backward pass that recomputes the model.
        """
        if self.weights.current.context is None and not (in_backward() and self._trained.known):
            self._refresh()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _refresh(self) -> None:
        _check_way_to_run(self.root, self.store.device)
        with self._groups_lock:  # other threads wait for the repartition
            self.resident.apply_copy_writes()
            self.changed = self.changed or not all(w.valid for w in self.weights.wrapped.values())
            if torch.is_grad_enabled() and self._trained.refresh():
                self.changed = True
            if self._attachment.reinstall_patches():
                self.changed = True
            if self.changed and self.weights.invalidate_if_idle():
                self._repartition()
            self.weights.rewrite_written()

    def _repartition(self) -> None:
        # The old patches stay until new ones are installed: another thread that calls the model
        # meanwhile waits in them.
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
        if device.type == "cpu" or are_on_device(args, kwargs, device):
            return args, kwargs
        return to_device(args, device), to_device(kwargs, device, self._skip)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _align(self, result: Any, args: Any, kwargs: Any) -> Any:
        """Move the model's outputs to the device that its inputs came from."""
        origin = device_of((args, kwargs))
        return result if origin is None else to_device(result, origin, self._skip)

    @torch.inference_mode(mode=False)
    def disable(self) -> None:
        """Make the model an ordinary module again. Its weights show their host views."""
        with self._groups_lock:
            self._disable()

    def _disable(self) -> None:
        self.weights.invalidate()
        self._attachment.detach()
        disown(self)
        self.resident.release()
        self.weights.discard()
        while self._inference:
            tensor, requires_grad = self._inference.pop()
            make_inference(tensor, requires_grad=requires_grad)


def _name(module: nn.Module) -> str:
    return type(module).__name__


def _check_way_to_run(root: nn.Module, device: torch.device) -> None:
    name = type(root).__name__
    ordinary = "call tierstore.disable_offload(model) first"
    if is_tracing():
        raise RuntimeError(
            f"{name} cannot be traced: its weights are in a tierstore, and a trace would not load "
            f"them. Trace copy.deepcopy(model), or {ordinary}"
        )
    if device.type != "cpu" and in_functorch_grad():
        raise RuntimeError(
            f"{name} cannot be differentiated by torch.func: its weights are in a tierstore, "
            f"which copies them to {device} as it runs. To differentiate it, {ordinary}"
        )


def _context_of_owner(owner: OffloadedModel, tensors: set[int]) -> UnitContext | None:
    """Return a context for those tensors (by id) that another model offloads; None if none."""
    bindings = owner.weights.bindings(tensors)
    return UnitContext(owner.weights.unit_weights(bindings)) if bindings else None
