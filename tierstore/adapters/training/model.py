"""A module wrapper that trains with its parameters and gradients in a store."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tierstore.adapters.activations import offload_activations
from tierstore.adapters.attachment import Attachment
from tierstore.adapters.codecs import is_movable, weight_bytes
from tierstore.adapters.contents import (
    modules_of,
    named_buffers_of,
    named_parameters_of,
    parameters_of,
)
from tierstore.adapters.forward import CopiedAs, ForwardRunner, entry_methods, same
from tierstore.adapters.nested import to_device
from tierstore.adapters.owners import claim, release_claims
from tierstore.adapters.training.checks import (
    ADVICE,
    check_not_spread_later,
    check_training_arguments,
)
from tierstore.adapters.training.frozen_buffers import account_for, create_buffer
from tierstore.adapters.training.gradients import GradientStreamer
from tierstore.adapters.training.microbatches import Microbatches
from tierstore.adapters.training.regions import chain, recomputed, regions_in
from tierstore.adapters.training.sharded import (
    PassHooks,
    Shard,
    is_distributed,
    sharded_modules,
    shards_of,
)
from tierstore.adapters.training.slices import Slice, partition_into_slices
from tierstore.adapters.training.state_buffers import state_budget_of
from tierstore.adapters.training.weights import Weights, WeightStreamer
from tierstore.adapters.unit_context import PassContext, UnitContext
from tierstore.model import shares
from tierstore.model.formatting import Units, at_least, size
from tierstore.model.sizes import PAGE
from tierstore.model.tiers import Tier
from tierstore.observe.passes import ModelPasses
from tierstore.progress import bar
from tierstore.store import TierStore, engine_of
from tierstore.system.allocator import FreedMemory
from tierstore.system.maps import AddressSpace
from tierstore.torch_private import in_backward

logger = logging.getLogger("tierstore.adapters")

_numbers = itertools.count()
_models: weakref.WeakValueDictionary[int, OffloadModel] = weakref.WeakValueDictionary()


class OffloadModel(nn.Module):
    """Trains any module with its parameters and gradients in a store.

    Use it in place of `module`: same call signature, same parameter and buffer names, same
    training and evaluation modes. Forward streams the model through the device slice by slice,
    backward streams it in reverse order, and each gradient moves to the store as soon as it is
    final. Between uses, parameters and gradients are ordinary CPU tensors with their true values,
    which you may read and edit. Losses, gradients and weights are bit-identical to ordinary
    training.

    The slice-by-slice scheme is that of FairScale's `OffloadModel`, after Pudipeddi et al.,
    "Training Large Neural Networks with Constant Memory using a New Execution Algorithm" (2020).

    To train in several processes, first apply `fully_shard` (FSDP2) to the module; each process
    then keeps its shards in its own store. Construct OffloadModel on all processes at the same
    time, because the constructor gathers each sharded module once. DistributedDataParallel and
    FSDP1 are not supported.

    Args:
        module: the module to train, on the CPU or where `fully_shard` placed its shards. All
            parameters must have values (none on meta). It is modified in place; `disable` restores
            it.
        store: the store for parameters and gradients. Pass the same store to OffloadOptimizer to
            keep the optimizer state there too.
        device: the compute device. It must be the store's device (default: the store's device).
        num_slices: number of slices (default: chosen from the budgets). An accelerator holds two
            slices at a time.
        checkpoint_activation: save only the input of each block (in an `nn.Sequential`: of each
            slice) in the store, and recompute the rest in the backward pass.
        num_microbatches: number of parts to split each batch into, along the first dimension of
            its tensors. Gradients accumulate over the parts.

    Raises:
        ValueError: an argument is invalid, or the module is already offloaded or wrapped in
            DistributedDataParallel or FSDP1.
        BudgetError: at the first use on an accelerator, if a parameter is larger than a budget.
        TransferError: the disk cannot be read or written (DiskFullError: the state that does not
            stay in RAM does not fit).
    """

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        store: TierStore,
        *,
        device: torch.device | str | None = None,
        num_slices: int | None = None,
        checkpoint_activation: bool = False,
        num_microbatches: int = 1,
    ) -> None:
        super().__init__()
        check_training_arguments(module, store, device, num_slices, num_microbatches)
        _check_not_tied(module)
        self.__dict__["module"] = module  # not a child: names are those of the module itself
        self._share()
        self.store = store
        self._attachment = Attachment(self, store)
        self._running = 0
        self._hooks: PassHooks | None = None
        self._key = f"training/{next(_numbers)}"
        self._passes = ModelPasses(engine_of(store).passes, f"{self._key}/{type(module).__name__}")
        self._sharded = sharded_modules(module)
        shards = shards_of(module)
        self.slices = _slices(module, store, num_slices)
        self._groups = self._store_parameters(shards)
        self._group_of = {id(p): w for w in self._groups for p in w.parameters.values()}
        self._streamer = WeightStreamer(store, self._groups, len(self.slices))
        self._streamer.connect_shards(shards)
        self._gradient_streamer = GradientStreamer(
            [weights.gradients for weights in self._groups], self._streamer.flush, self._passes
        )
        self._streamer.free_memory = self.release_idle_leases
        self._wrap()
        if checkpoint_activation:
            self._recompute()
        run: Callable[..., Any] = module
        if num_microbatches > 1:
            run = Microbatches(module, num_microbatches, self._gradient_streamer.begin)
        self.__dict__["_run"] = run
        self.__class__ = _with_signature_of(type(module))
        claim([self, *modules_of(module)], self)
        engine_of(store).saved_tensors.lease_holders.add(self)
        for parameter in parameters_of(module):
            _models[id(parameter)] = self
        logger.info(
            "%s in training: %d slices, %d groups, %d bytes of parameters",
            type(module).__name__,
            len(self.slices),
            len(self._groups),
            weight_bytes(parameters_of(module)),
        )
        _warn_of_small_budget(type(module).__name__, store, self._groups)

    # Module interface --------------------------------------------------------------------------

    def _share(self) -> None:
        """Share the module's dicts, so parameters, buffers and children are the module's own."""
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[name] = self.module.__dict__[name]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise  # a protocol hook of the class, such as `__deepcopy__`
            return getattr(self.__dict__["module"], name)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """Attribute that DistributedDataParallel reads first. Raises RuntimeError to reject it."""
        raise RuntimeError(
            f"an OffloadModel cannot be wrapped in DistributedDataParallel, {ADVICE}"
        )

    def train(self, mode: bool = True) -> OffloadModel:
        """Set the mode of the module, as `nn.Module.train` does.

        Args:
            mode: True for training, False for evaluation.

        Returns:
            This model.
        """
        self.module.train(mode)
        self.training = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's state dict: CPU tensors, views of the stored values.

        Args:
            *args: as for `nn.Module.state_dict`.
            **kwargs: as for `nn.Module.state_dict`.
        """
        self.flush()
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load values into the module.

        Args:
            state_dict: tensors by the module's own names.
            strict: True if missing and unexpected names are errors.
            assign: ignored; values are always copied.

        Returns:
            The result of `nn.Module.load_state_dict`: missing and unexpected names.

        Raises:
            RuntimeError: names or shapes do not match the module.
        """
        self.flush()
        for part in self._sharded:
            part.reshard()
        names = {id(p): name for name, p in named_parameters_of(self.module)}
        loaded = dict(state_dict)
        same = [w for w in self._groups if w.frozen and w.matches(names, loaded)]
        # An override may accept no argument but the state dict.
        result = self.module.load_state_dict(loaded, **({} if strict else {"strict": False}))
        for weights in same:
            weights.accept()
        self.flush()  # FSDP2 may have assigned new memory to some parameters
        return result

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Drop all gradients, including those that a failed backward pass left in the store.

        Args:
            *args: as for `nn.Module.zero_grad`.
            **kwargs: as for `nn.Module.zero_grad`.
        """
        self.flush()
        self.module.zero_grad(*args, **kwargs)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        probe = next(iter(parameters_of(self.module)), torch.empty(0))[:0].detach()
        changed = fn(probe)
        if changed.device == probe.device and changed.dtype is probe.dtype:
            return self
        if changed.device == self.store.device and changed.dtype is probe.dtype:
            return self  # it already computes there
        raise RuntimeError(
            "an OffloadModel can be neither moved nor converted: move or convert the module before "
            "OffloadModel(module, store), or after model.disable()"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Not `__deepcopy__`: a wrapper that forwards attribute access would pick it up.
        self.flush()
        copied = functools.partial(copy.deepcopy, self.module)
        return same, (CopiedAs(copied, copied),)

    def extra_repr(self) -> str:
        """Return the numbers of slices and groups, and the bytes of parameters in the store."""
        nbytes = sum(weights.buffer.nbytes for weights in self._groups)
        return f"slices={len(self.slices)}, groups={len(self._groups)}, in_store={size(nbytes)!r}"

    # Setup -------------------------------------------------------------------------------------

    def _store_parameters(self, shards: dict[int, Shard]) -> list[Weights]:
        """Store the parameters and point them at the stored bytes."""
        groups: list[Weights] = []
        waiting: list[Weights] = []
        freed = FreedMemory()
        plans = [(slice_, plan) for slice_ in self.slices for plan in slice_.groups]
        budget = state_budget_of(self.store)
        for _, plan in plans:
            account_for(budget, plan.tensors)
        space = AddressSpace()
        for number, (slice_, plan) in enumerate(bar(plans, "Storing parameters", "groups")):
            key = f"{self._key}/{number}"
            buffer = create_buffer(self.store, key, plan.tensors, space)
            parameters: dict[str, Any] = dict(plan.tensors)
            weights = Weights(key, buffer, parameters, slice_.number)
            groups.append(weights)
            waiting.append(weights)
            if len(waiting) > 2:
                freed.add(waiting.pop(0).bind_to_store(shards))
        for weights in waiting:
            freed.add(weights.bind_to_store(shards))
        freed.release()
        rest = {n: b for n, b in named_buffers_of(self.module) if b.device.type != "meta"}
        rest |= {
            name: parameter
            for name, parameter in named_parameters_of(self.module)
            if not is_movable(parameter) and not is_distributed(parameter)
        }
        attached = self._attachment
        attached.resident.place(self._key, rest, budget.target, attached.groups)
        return groups

    def _wrap(self) -> None:
        for slice_ in self.slices:
            for unit in slice_.units:
                ids = [id(t) for t in unit.tensors.values()]
                groups = dict.fromkeys(self._group_of[i] for i in ids if i in self._group_of)
                leased = [w for w in groups if self._streamer.needs_lease(w)]
                if leased:
                    weights = self._streamer.unit_weights(leased)
                    forward = ForwardRunner(functools.partial(UnitContext, weights))
                    self._attachment.patch(unit.module, entry_methods(unit.module)[0], forward)
        if self._sharded:
            self._hooks = PassHooks(self.module, self._pass, self._gradient_streamer.begin)
            return
        whole = ForwardRunner(self._pass)
        self._attachment.patch(self.module, entry_methods(self.module)[0], whole)

    def _recompute(self) -> None:
        offload = offload_activations(self.store, min_size=PAGE)
        if type(self.module).forward is nn.Sequential.forward:
            forward = chain(self.module, self.slices, offload)
            self._attachment.patch(self.module, "forward", forward)
            return
        for module in dict.fromkeys(map(self._unit_module_of, regions_in(self.module))):
            self._attachment.patch(module, entry_methods(module)[0], recomputed(module, offload))

    def _unit_module_of(self, module: nn.Module) -> nn.Module:
        """Return the module of the unit that leases this module's weights, or the module itself.

        Recomputation must run the whole unit, so that its weights are leased again.
        """
        weights = {id(parameter) for parameter in parameters_of(module)}
        for unit in (unit for slice_ in self.slices for unit in slice_.units):
            leased = {id(tensor) for tensor in unit.tensors.values()}
            if not leased.isdisjoint(weights) and any(m is module for m in modules_of(unit.module)):
                return unit.module
        return module

    # Running -----------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on the store's device. Inputs may be on any device.

        Args:
            *args: positional inputs of the module; tensors are moved to the store's device.
            **kwargs: keyword inputs, moved likewise.

        Raises:
            RuntimeError: `fully_shard` or another parallel wrapper was applied to the module
                after OffloadModel.
            ClosedError: the store is closed.
            BudgetError: on an accelerator, the tensors needed at once exceed a budget.
            TransferError: weights cannot be read or written.
        """
        check_not_spread_later(self, self._sharded)
        self._attachment.reinstall_patches()
        args = to_device(args, self.store.device)
        kwargs = to_device(kwargs, self.store.device)
        return self._run(*args, **kwargs)

    def release_idle_leases(self) -> None:
        """Release memory in RAM that is held only for possible reuse."""
        self._gradient_streamer.free_memory()
        self._streamer.release_all()

    def _pass(self) -> PassContext:
        """Return the forward context of one call of the module."""
        current, begun, ended = self._streamer.current, self._begin_pass, self._end_pass
        return PassContext(current, self._passes, begun, on_end=ended)

    def _begin_pass(self) -> bool:
        """Note that a call of the module begins on this thread. Return True if it starts a pass.

        Recomputation in a backward pass and a call within another call do not.
        """
        self._running += 1
        if self._running > 1 or in_backward():
            return False
        self.flush()
        self._streamer.watch_frozen()
        self._gradient_streamer.watch()
        return True

    def _end_pass(self, error: BaseException | None) -> None:
        """Note that a call ends. Without grad, no backward pass follows, so flush at once."""
        self._running -= 1
        if self._running == 0 and not torch.is_grad_enabled():
            self.flush()

    def flush(self) -> None:
        """Write edits back and move everything off the device. No-op inside a backward pass.

        Between passes, every parameter and gradient reads its true value.
        """
        if not in_backward():
            self._gradient_streamer.finish()  # after a backward pass that was aborted
            self._streamer.flush()

    @property
    def groups(self) -> list[Weights]:
        """The groups that hold the parameters."""
        return self._groups

    def weights_of(self, parameter: nn.Parameter) -> Weights | None:
        """Return the group that holds a parameter, or None."""
        return self._group_of.get(id(parameter))

    def disable(self) -> nn.Module:
        """Restore the original module on the CPU, in memory outside the store, and return it."""
        release_claims([self, *modules_of(self.module)])
        self._attachment.detach()
        self._gradient_streamer.stop()
        self.flush()
        self._attachment.resident.release()
        engine_of(self.store).groups.discard_from_finalizer(self._attachment.groups)
        self._attachment.groups.clear()
        for number in [number for number, model in _models.items() if model is self]:
            _models.pop(number, None)  # also of empty shards, which are in no group
        for weights in bar(self._groups, "Restoring parameters", "groups"):
            weights.unbind_from_store()
            weights.detached = True
            weights.gradients.discard()
            weights.buffer.discard()
        self._groups.clear()
        if self._hooks is not None:
            self._hooks.remove()
            self.module.load_state_dict({}, strict=False)  # makes FSDP2 re-read local tensors
        self.__dict__["_run"] = self.module
        return self.module


def _delegated(name: str) -> Callable[..., Any]:
    """Return a method that calls the module's own, which may be overridden.

    An override of `parameters` may, for example, yield only the trained ones.
    """

    @functools.wraps(getattr(nn.Module, name))
    def method(self: OffloadModel, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.module, name)(*args, **kwargs)

    return method


for _name in ("parameters", "named_parameters", "buffers", "named_buffers"):
    setattr(OffloadModel, _name, _delegated(_name))


def _with_signature_of(kind: type[nn.Module]) -> type[OffloadModel]:
    """Return a subclass of OffloadModel whose `forward` has the signature of `kind.forward`.

    Trainers choose inputs and labels by its parameter names.
    """

    def forward(self: OffloadModel, *args: Any, **kwargs: Any) -> Any:
        return OffloadModel.forward(self, *args, **kwargs)

    with contextlib.suppress(TypeError, ValueError):  # a forward without a signature
        vars(forward)["__signature__"] = inspect.signature(kind.forward)
    own = {"forward": forward, "__doc__": OffloadModel.__doc__, "__module__": __name__}
    return type(OffloadModel.__name__, (OffloadModel,), own)


def _slices(module: nn.Module, store: TierStore, count: int | None) -> list[Slice]:
    budgets = store.stats().budget_bytes
    memory = [b for tier, b in budgets.items() if tier != Tier.DISK.name and b is not None]
    fastest = budgets.get(Tier.DEVICE.name) or budgets[Tier.HOST.name] or (1 << 40)
    group = min([state_budget_of(store).target, *(b // shares.SLICE for b in memory)])
    return partition_into_slices(
        module, count, max(fastest // shares.SLICE, group), max(group, PAGE)
    )


def _warn_of_small_budget(name: str, store: TierStore, groups: list[Weights]) -> None:
    """Log a warning if no group of the training state stays in RAM."""
    state = [weights.buffer for weights in groups if not weights.frozen]
    ram = state_budget_of(store)
    if ram.budget is None or not state or any(buffer.host_resident for buffer in state):
        return
    largest = max(buffer.nbytes for buffer in state)
    logger.warning(
        "%s: ram_budget %s keeps no group of this model in RAM between uses (the largest "
        "needs %s bytes): training runs from disk, slowly; at least %s keeps some groups in RAM",
        name,
        size(ram.budget, Units.DECIMAL),
        f"{largest:,}",
        at_least(ram.least_for(largest)),
    )


def _check_not_tied(module: nn.Module) -> None:
    """Raise ValueError if another OffloadModel trains a parameter of `module`."""
    for name, parameter in named_parameters_of(module):
        other = model_of(parameter)
        # The number of a parameter that is gone may be another one's.
        if other is not None and any(parameter is each for each in parameters_of(other.module)):
            raise ValueError(
                f"{name} is already trained by another OffloadModel: pass one module that contains "
                "both models, or untie the parameter (nn.Parameter(parameter.detach().clone()))"
            )


def model_of(parameter: nn.Parameter) -> OffloadModel | None:
    """Return the OffloadModel that a parameter belongs to, or None."""
    return _models.get(id(parameter))
