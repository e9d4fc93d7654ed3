"""A model in training whose parameters and gradients are in a store."""

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
from tierstore.adapters.forward import CopiedAs, ForwardRunner, calls_of, same
from tierstore.adapters.nested import to_device
from tierstore.adapters.owners import claim, give_up
from tierstore.adapters.training.frozen_buffers import buffer_of, expect_buffer
from tierstore.adapters.training.gradients import GradientStreamer
from tierstore.adapters.training.microbatches import Microbatches
from tierstore.adapters.training.refusals import ADVICE, refuse_arguments, refuse_spread_later
from tierstore.adapters.training.regions import chain, recomputed, regions_in
from tierstore.adapters.training.sharded import (
    PassHooks,
    Shard,
    is_distributed,
    sharded_modules,
    shards_of,
)
from tierstore.adapters.training.slices import Slice, cut_into_slices
from tierstore.adapters.training.state_buffers import state_budget_of
from tierstore.adapters.training.weights import Weights, WeightStreamer
from tierstore.adapters.unit_context import PassContext, UnitContext
from tierstore.model import shares
from tierstore.model.formatting import size
from tierstore.model.sizes import PAGE
from tierstore.model.tiers import Tier
from tierstore.observe.passes import PassesOf
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

    It stands for `module`: it is called like it, has its parameters and buffers under their own
    names, and its modes. Forward brings in slice after slice, backward in reverse; gradients leave
    for the store as they become final. While they are away, parameters and gradients are ordinary
    CPU tensors that read as what they are, and may be changed. Losses, gradients and weights are
    those of ordinary training, to the last bit.

    To go through a model slice by slice is the idea of FairScale's `OffloadModel`, after Pudipeddi
    et al., "Training Large Neural Networks with Constant Memory using a New Execution Algorithm"
    (2020).

    In several processes, apply `fully_shard` (FSDP2) to the module before: then each process has
    its shards in its own store. All of them make their OffloadModel at the same time, since that
    gathers each module once. It cannot be combined with DistributedDataParallel or FSDP1.

    Args:
        module: what to train; on the CPU, or where `fully_shard` has put its shards; with values
            (nothing on meta). Changed in place: `disable` makes it an ordinary module again.
        store: where parameters and gradients are; the optimizer's state too, if it is told so.
        device: where to compute: the store's device, which is what None means.
        num_slices: how many slices; None: a fitting number. An accelerator has two at a time.
        checkpoint_activation: keep only what each block is given (of an `nn.Sequential`: each
            slice), in the store, and compute the rest again in the backward pass.
        num_microbatches: cut each batch (the first dimension of tensors) into so many parts;
            gradients add up.

    Raises:
        ValueError: an argument cannot be; or the module is offloaded already, or spread otherwise.
        BudgetError: at its first use on an accelerator: a parameter is larger than a budget.
        TransferError: of the disk (DiskFullError: no room for what does not stay in RAM).
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
        refuse_arguments(module, store, device, num_slices, num_microbatches)
        self.__dict__["module"] = module  # not a child: names are those of the module itself
        self._share()
        self.store = store
        self._attachment = Attachment(self, store)
        self._running = 0
        self._hooks: PassHooks | None = None
        self._key = f"training/{next(_numbers)}"
        self._passes = PassesOf(engine_of(store).passes, f"{self._key}/{type(module).__name__}")
        self._sharded = sharded_modules(module)
        shards = shards_of(module)
        self.slices = _slices(module, store, num_slices)
        self._groups = self._take_parameters(shards)
        self._group_of = {id(p): w for w in self._groups for p in w.parameters.values()}
        self._streamer = WeightStreamer(store, self._groups, len(self.slices))
        self._streamer.serve(shards)
        self._gradient_streamer = GradientStreamer(
            [weights.gradients for weights in self._groups], self._streamer.put_away, self._passes
        )
        self._streamer.make_room = self.make_room
        self._wrap()
        if checkpoint_activation:
            self._recompute()
        run: Callable[..., Any] = module
        if num_microbatches > 1:
            run = Microbatches(module, num_microbatches, self._gradient_streamer.begin)
        self.__dict__["_run"] = run
        self.__class__ = _with_signature_of(type(module))
        claim(modules_of(module), self)
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

    # Standing for the module -------------------------------------------------------------------

    def _share(self) -> None:
        """Have the module's own dicts: whatever it is asked for by name, it is the module's."""
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[name] = self.module.__dict__[name]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise  # what a class says of its own objects, such as how they are copied
            return getattr(self.__dict__["module"], name)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """What DistributedDataParallel asks a module for, before it does anything to it."""
        raise RuntimeError(
            f"a model in training on a store cannot be in DistributedDataParallel, {ADVICE}"
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
        """The state of the module, under its own names: CPU tensors, views of what is stored.

        Args:
            *args: as for `nn.Module.state_dict`.
            **kwargs: as for `nn.Module.state_dict`.
        """
        self.put_away()
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load values into the module.

        Args:
            state_dict: tensors by the module's own names.
            strict: whether missing and unknown names are an error.
            assign: makes no difference: values are copied.

        Returns:
            What `nn.Module.load_state_dict` returns: missing and unexpected names.

        Raises:
            RuntimeError: names or shapes do not fit.
        """
        self.put_away()
        for part in self._sharded:
            part.reshard()
        names = {id(p): name for name, p in named_parameters_of(self.module)}
        loaded = dict(state_dict)
        same = [w for w in self._groups if w.frozen and w.keeps(names, loaded)]
        # An overridden one may know no arguments but the values.
        result = self.module.load_state_dict(loaded, **({} if strict else {"strict": False}))
        for weights in same:
            weights.accept()
        self.put_away()  # FSDP2 may have given some parameters other memory
        return result

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Forget all gradients, also what a backward pass that failed has left in the store.

        Args:
            *args: as for `nn.Module.zero_grad`.
            **kwargs: as for `nn.Module.zero_grad`.
        """
        self.put_away()
        self.module.zero_grad(*args, **kwargs)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        probe = next(iter(parameters_of(self.module)), torch.empty(0))[:0].detach()
        changed = fn(probe)
        if changed.device == probe.device and changed.dtype is probe.dtype:
            return self
        if changed.device == self.store.device and changed.dtype is probe.dtype:
            return self  # that is where it computes
        raise RuntimeError(
            "a model in training on a store can neither be moved nor converted: do that before "
            "OffloadModel(module, store), or after model.disable()"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        # No `__deepcopy__`: a wrapper that hands on what it is asked for would be copied by that.
        self.put_away()
        copied = functools.partial(copy.deepcopy, self.module)
        return same, (CopiedAs(copied, copied),)

    def extra_repr(self) -> str:
        """How many slices there are, and what of the model is in the store."""
        nbytes = sum(weights.buffer.nbytes for weights in self._groups)
        return f"slices={len(self.slices)}, groups={len(self._groups)}, in_store={size(nbytes)!r}"

    # Setting up --------------------------------------------------------------------------------

    def _take_parameters(self, shards: dict[int, Shard]) -> list[Weights]:
        """Put the parameters into the store, and let them show what they are there."""
        groups: list[Weights] = []
        waiting: list[Weights] = []
        freed = FreedMemory()
        plans = [(slice_, plan) for slice_ in self.slices for plan in slice_.groups]
        budget = state_budget_of(self.store)
        for _, plan in plans:
            expect_buffer(budget, plan.tensors)
        space = AddressSpace()
        for number, (slice_, plan) in enumerate(bar(plans, "Taking parameters", "groups")):
            key = f"{self._key}/{number}"
            buffer = buffer_of(self.store, key, plan.tensors, space)
            parameters: dict[str, Any] = dict(plan.tensors)
            weights = Weights(key, buffer, parameters, slice_.number)
            groups.append(weights)
            waiting.append(weights)
            if len(waiting) > 2:
                freed.add(waiting.pop(0).move_in(shards))
        for weights in waiting:
            freed.add(weights.move_in(shards))
        freed.give_back()
        rest = {n: b for n, b in named_buffers_of(self.module) if b.device.type != "meta"}
        rest |= {
            name: parameter
            for name, parameter in named_parameters_of(self.module)
            if not is_movable(parameter) and not is_distributed(parameter)
        }
        attached = self._attachment
        attached.resident.take(self._key, rest, budget.target, attached.groups)
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
                    self._attachment.patch(unit.module, calls_of(unit.module)[0], forward)
        if self._sharded:
            self._hooks = PassHooks(self.module, self._pass, self._gradient_streamer.begin)
            return
        whole = ForwardRunner(self._pass)
        self._attachment.patch(self.module, calls_of(self.module)[0], whole)

    def _recompute(self) -> None:
        aside = offload_activations(self.store, min_size=PAGE)
        if type(self.module).forward is nn.Sequential.forward:
            forward = chain(self.module, self.slices, aside)
            self._attachment.patch(self.module, "forward", forward)
            return
        for module in dict.fromkeys(map(self._unit_module_of, regions_in(self.module))):
            self._attachment.patch(module, calls_of(module)[0], recomputed(module, aside))

    def _unit_module_of(self, module: nn.Module) -> nn.Module:
        """The module of the unit that has this one's weights: they must come again with it, too."""
        weights = {id(parameter) for parameter in parameters_of(module)}
        for unit in (unit for slice_ in self.slices for unit in slice_.units):
            brought = {id(tensor) for tensor in unit.tensors.values()}
            if not brought.isdisjoint(weights) and any(
                m is module for m in modules_of(unit.module)
            ):
                return unit.module
        return module

    # Running -----------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns, on the device, for inputs from anywhere.

        Args:
            *args: the inputs of the module; tensors are brought to the store's device.
            **kwargs: the same, by name.

        Raises:
            RuntimeError: `fully_shard` or another library has taken the module since.
            ClosedError: the store is closed.
            BudgetError: on an accelerator: what is needed at once is larger than a budget.
            TransferError: weights cannot be read or written.
        """
        refuse_spread_later(self, self._sharded)
        self._attachment.patch_again()
        args = to_device(args, self.store.device)
        kwargs = to_device(kwargs, self.store.device)
        return self._run(*args, **kwargs)

    def make_room(self) -> None:
        """Give back what is in RAM for later, or for no reason but that it may be wanted again."""
        self._gradient_streamer.make_room()
        self._streamer.release_all()

    def _pass(self) -> PassContext:
        """Return the context of one call of the module."""
        current, begun, ended = self._streamer.current, self._begin_pass, self._end_pass
        return PassContext(current, self._passes, begun, ended=ended)

    def _begin_pass(self) -> bool:
        """A call of the module begins, on this thread. Tells whether it is a pass of its own: not
        if it is computed again in a backward pass, or if another one goes on."""
        self._running += 1
        if self._running > 1 or in_backward():
            return False
        self.put_away()
        self._streamer.watch_frozen()
        self._gradient_streamer.watch()
        return True

    def _end_pass(self, error: BaseException | None) -> None:
        """It ends."""
        self._running -= 1
        if self._running == 0 and not torch.is_grad_enabled():
            self.put_away()

    def put_away(self) -> None:
        """See that every parameter is what it shows. Between the passes, all are."""
        if not in_backward():
            self._gradient_streamer.finish()  # of a backward pass that was given up
            self._streamer.put_away()

    @property
    def groups(self) -> list[Weights]:
        """The groups that its parameters are in."""
        return self._groups

    def weights_of(self, parameter: nn.Parameter) -> Weights | None:
        """The group that a parameter is in."""
        return self._group_of.get(id(parameter))

    def disable(self) -> nn.Module:
        """The module that was given, an ordinary one again, on the CPU. It takes its memory."""
        give_up(modules_of(self.module))
        self._attachment.detach()
        self._gradient_streamer.stop()
        self.put_away()
        self._attachment.resident.give_back()
        engine_of(self.store).groups.discard_soon(self._attachment.groups)
        self._attachment.groups.clear()
        for weights in bar(self._groups, "Giving parameters back", "groups"):
            weights.move_out()
            for parameter in weights.parameters.values():
                _models.pop(id(parameter), None)
            weights.detached = True
            weights.gradients.discard()
            weights.buffer.discard()
        self._groups.clear()
        if self._hooks is not None:
            self._hooks.remove()
            self.module.load_state_dict({}, strict=False)  # FSDP2 looks at local tensors anew
        self.__dict__["_run"] = self.module
        return self.module


def _asked_of_the_module(name: str) -> Callable[..., Any]:
    """A method that is the module's: it may be overridden, to give only what is trained, say."""

    @functools.wraps(getattr(nn.Module, name))
    def method(self: OffloadModel, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.module, name)(*args, **kwargs)

    return method


for _name in ("parameters", "named_parameters", "buffers", "named_buffers"):
    setattr(OffloadModel, _name, _asked_of_the_module(_name))


def _with_signature_of(kind: type[nn.Module]) -> type[OffloadModel]:
    """A class of its own, whose `forward` tells of the arguments of another: trainers choose by
    their names what to pass, and which of it are labels."""

    def forward(self: OffloadModel, *args: Any, **kwargs: Any) -> Any:
        return OffloadModel.forward(self, *args, **kwargs)

    with contextlib.suppress(TypeError, ValueError):  # of a forward that tells nothing of itself
        vars(forward)["__signature__"] = inspect.signature(kind.forward)
    own = {"forward": forward, "__doc__": OffloadModel.__doc__, "__module__": __name__}
    return type(OffloadModel.__name__, (OffloadModel,), own)


def _slices(module: nn.Module, store: TierStore, count: int | None) -> list[Slice]:
    budgets = store.stats().budget_bytes
    memory = [b for tier, b in budgets.items() if tier != Tier.DISK.name and b is not None]
    fastest = budgets.get(Tier.DEVICE.name) or budgets[Tier.HOST.name] or (1 << 40)
    group = min([state_budget_of(store).target, *(b // shares.SLICE for b in memory)])
    return cut_into_slices(module, count, max(fastest // shares.SLICE, group), max(group, PAGE))


def model_of(parameter: nn.Parameter) -> OffloadModel | None:
    """The model in training that a parameter is part of."""
    return _models.get(id(parameter))
