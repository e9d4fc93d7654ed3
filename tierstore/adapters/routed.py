"""Experts with stacked weights: only the slices that the router has chosen are leased.

The experts of a layer are one module whose parameters have the experts as their first dimension.
The arguments of its forward route each token to experts, whose weights it reads as `stack[expert]`,
as `stack[experts]`, or in a grouped matrix product. Each slice of a stack is a group of the store.
During the forward, the module's attribute is an `ExpertStack`, which leases slices as they are
read; the chosen slices are prefetched beforehand. The parameter itself does not change: it shows
all slices in a mapped view of its file.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tierstore.adapters.activations import Unpack
from tierstore.adapters.binding import ParameterBinding
from tierstore.adapters.codecs.memory import METADATA_METHODS
from tierstore.adapters.forward import Arguments, forbid_backward
from tierstore.adapters.grouping import Unit
from tierstore.adapters.nested import tensors_in
from tierstore.adapters.saved import LeasedMemory, WeightHooks, pack_view
from tierstore.adapters.view_lifetime import ViewLease
from tierstore.adapters.weight_groups import WeightGroups
from tierstore.errors import UnknownKeyError
from tierstore.store import engine_of
from tierstore.torch_private import saved_tensor_hooks_allowed

logger = logging.getLogger("tierstore.adapters")

_LAST_TWO = ({-1, -2}, {1, 2})


Before = Callable[[Any, Any], Arguments]


class Experts:
    """The experts of one module, with an `ExpertStack` for each attribute that is a stack."""

    def __init__(
        self, module: nn.Module, groups: WeightGroups, stacks: Mapping[str, ParameterBinding]
    ):
        self.module = module
        self.groups = groups
        self.stacks = {name: ExpertStack(self, name, each) for name, each in stacks.items()}
        self._users: set[ExpertsContext] = set()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def prefetch(self, args: Any, kwargs: Any) -> None:
        """Prefetch the experts that the arguments of the forward choose."""
        given = [each for each in [*args, *kwargs.values()] if isinstance(each, torch.Tensor)]
        index = next((t for t in given if not (t.is_floating_point() or t.is_complex())), None)
        if index is not None and index.numel() and not self.groups.invalidated:
            chosen = index.unique().tolist()  # sorted, as they are used
            stacks = [stack.keys() for stack in self.stacks.values()]
            known = [i for i in chosen if 0 <= i < len(stacks[0])]
            keys = [keys[i] for i in known for keys in stacks]
            engine = engine_of(self.groups.store)
            engine.groups.prefetch_existing(keys, engine.core.planner.tiers[0])

    def prefetching_after(self, move: Before) -> Before:
        """Return a function that applies `move` to the arguments, and then prefetches experts."""

        def before(args: Any, kwargs: Any) -> Arguments:
            moved = move(args, kwargs)
            self.prefetch(*moved)
            return moved

        return before

    def bind(self, context: ExpertsContext) -> bool:
        """Replace the parameters by stacks for `context`. Return False if they are invalid."""
        with self.groups.lock:
            begun = not self.groups.invalidated
            if begun:
                self.groups.running.add(context)
                self._users.add(context)
                self.module.__dict__.update(self.stacks)
        return begun

    def unbind(self, context: ExpertsContext) -> None:
        """Restore the parameters when the last context ends. Can be repeated if interrupted."""
        with self.groups.lock:
            self.groups.running.discard(context)
            self._users.discard(context)
            if not self._users:
                for name in self.stacks:
                    self.module.__dict__.pop(name, None)


def experts_of(unit: Unit, groups: WeightGroups) -> Experts | None:
    """Return the experts of a unit; None unless it has stacks that are all in these groups."""
    stacks = {name: groups.bindings([id(t)]) for name, t in unit.stacks.items()}
    if not stacks or not all(stacks.values()):
        return None
    return Experts(unit.module, groups, {name: found[0] for name, found in stacks.items()})


class ExpertsContext:
    """Context of one run of a module of experts. See `tierstore.adapters.forward`."""

    def __init__(self, experts: Experts) -> None:
        self._experts = experts
        self._leases: dict[str, tuple[str, ViewLease]] = {}
        self._memory: dict[str, LeasedMemory] = {}  # leased slices, by the same names
        self._hooks: Any = None
        self._outer: list[tuple[ExpertStack, ExpertsContext | None]] = []

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self) -> bool:
        """Replace the parameters by stacks, which lease slices as they are read.

        Returns False if these groups are no longer valid because the model was repartitioned.
        """
        experts, groups = self._experts, self._experts.groups
        edited = [s.binding for s in experts.stacks.values() if s.binding.edited]
        if edited:
            groups.rewrite(edited)
        if not experts.bind(self):
            groups.wait_for_rewrite()
            return False
        groups.loops.steps().note_chosen()
        for stack in experts.stacks.values():
            self._outer.append((stack, stack.context))
            stack.context = self
        if torch.is_grad_enabled() and saved_tensor_hooks_allowed():
            hooks = WeightHooks(self._pack).hooks
            hooks.__enter__()
            self._hooks = hooks
        return True

    def _pack(self, tensor: torch.Tensor) -> Unpack | None:
        """Return an `Unpack` for a saved tensor that is a view of a leased slice; else None."""
        groups = self._experts.groups
        if tensor.device != groups.store.device:
            return None
        return pack_view(groups, self._memory.values(), tensor)

    def slice_of(self, stack: ExpertStack, expert: int) -> torch.Tensor:
        """Return one expert's weight on the device.

        Its memory is held until another expert of the stack is read, and while any view exists.
        """
        while True:
            groups = self._experts.groups
            key = stack.keys()[expert]
            held = self._leases.get(stack.name)
            if held is None or held[0] != key:
                self._drop_slice(stack.name)
                as_of = groups.generation
                try:
                    lease = ViewLease(groups.store.acquire(key))
                except UnknownKeyError:
                    if groups.generation == as_of:
                        raise
                    continue  # rewritten meanwhile
                self._leases[stack.name] = held = key, lease
                ((name, tensor),) = lease.tensors.items()
                if tensor.numel():
                    self._memory[stack.name] = LeasedMemory.of(tensor, stack.binding, key, name)
            return next(iter(held[1].tensors.values()))

    def _drop_slice(self, name: str) -> None:
        self._memory.pop(name, None)
        held = self._leases.pop(name, None)
        if held is not None:
            held[1].release()

    def finish(self, result: Any, given: Arguments) -> Any:
        """End the context after the forward, and return its result unchanged."""
        tensors = list(tensors_in([result]))
        trained = any(s.binding.tensor.requires_grad for s in self._experts.stacks.values())
        if (trained or self._hooks is None) and any(t.grad_fn is not None for t in tensors):
            forbid_backward(tensors, given)
        self.end()
        return result

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(self) -> None:
        """Restore the parameters, and release all slices. Called again if it was interrupted."""
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__()
        while self._outer:
            stack, context = self._outer[-1]
            stack.context = context
            self._outer.pop()
        self._experts.unbind(self)
        for name in list(self._leases):
            self._drop_slice(name)


class _Current(threading.local):
    context: ExpertsContext | None = None


class ExpertStack:
    """Replaces a parameter with one slice per expert while its module runs.

    Indexing leases single slices. Any other operation gets the whole tensor, assembled for that
    operation. On threads that do not run the module, it behaves as the parameter.
    """

    def __init__(
        self, experts: Experts, name: str, binding: ParameterBinding, *, transposed: bool = False
    ) -> None:
        self.name = name
        self.binding = binding
        self._experts = experts
        self._transposed = transposed
        self._current = _Current()

    @property
    def context(self) -> ExpertsContext | None:
        """The context of the module's run on this thread; None if it does not run here."""
        return self._current.context

    @context.setter
    def context(self, context: ExpertsContext | None) -> None:
        self._current.context = context

    def keys(self) -> list[str]:
        """Return the keys of the slices' current groups."""
        return self._experts.groups.slices(self.binding)

    # As a tensor -------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Device of the slices."""
        return (
            self.binding.tensor.device
            if self.context is None
            else self._experts.groups.store.device
        )

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole tensor."""
        return self._plain.shape

    def size(self, *dim: int) -> Any:
        """Return the size of the whole tensor, or of one dimension."""
        return self._plain.size(*dim)

    def __len__(self) -> int:
        return len(self.binding.tensor)

    @property
    def _plain(self) -> torch.Tensor:
        tensor = self.binding.tensor
        return tensor.transpose(-2, -1) if self._transposed else tensor

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._plain, name)
        if self.context is None or not callable(found) or name in METADATA_METHODS:
            return found
        return getattr(self.whole(), name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        if self.context is None:
            return self._plain[index]
        if isinstance(index, int):
            return self._slice(index)
        if isinstance(index, torch.Tensor) and not (
            index.is_floating_point() or index.dtype is torch.bool
        ):
            if index.dim() == 0:
                return self._slice(int(index))
            return self._gathered(index)
        return self.whole()[index]

    def transpose(self, first: int, second: int) -> Any:
        """Return a stack of transposed slices if the last two dimensions are swapped."""
        if (
            self.context is None
            or {first, second} not in _LAST_TWO
            or self.binding.tensor.dim() != 3
        ):
            return self.whole().transpose(first, second)
        other = ExpertStack(self._experts, self.name, self.binding, transposed=not self._transposed)
        other.context = self.context
        return other

    @property
    def mT(self) -> Any:
        """Stack of the transposed slices."""
        return self.transpose(-2, -1)

    def whole(self) -> torch.Tensor:
        """Return a copy of the whole tensor, assembled from all slices."""
        if self.context is None:
            return self._plain
        _warn_of_whole_stack(type(self._experts.module).__name__, self.name)
        slices = [self._slice(i).clone() for i in range(len(self))]
        return torch.stack(slices)

    def _slice(self, expert: int) -> torch.Tensor:
        assert self.context is not None, "the module runs on this thread"
        number = expert + len(self) if expert < 0 else expert
        if not 0 <= number < len(self):
            raise IndexError(f"expert {expert} is out of range: there are {len(self)} experts")
        found = self.context.slice_of(self, number)
        return found.transpose(-2, -1) if self._transposed else found

    def _gathered(self, index: torch.Tensor) -> torch.Tensor:
        """Return copies of the slices at several indices, as tensor indexing does."""
        tensor = self._plain
        out = torch.empty((*index.shape, *tensor.shape[1:]), dtype=tensor.dtype, device=self.device)
        for expert in index.unique().tolist():
            out[index == expert] = self._slice(expert)
        return out

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if len(args) == 2 and isinstance(args[1], cls) and "offs" in kwargs:
            return args[1].grouped(func, args[0], **kwargs)
        named = {name: _with_whole(value) for name, value in kwargs.items()}
        return func(*map(_with_whole, args), **named)

    def grouped(
        self,
        func: Callable[..., torch.Tensor],
        x: torch.Tensor,
        *,
        offs: torch.Tensor,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Compute a grouped matrix product expert by expert, skipping experts without rows.

        `x` has shape (rows, in_features). `offs` has shape (experts,), and holds the end of each
        expert's rows. Returns a tensor of shape (rows, out_features), in which rows after the last
        offset are zero.
        """
        if self.context is None:
            return func(x, self._plain, offs=offs, **kwargs)
        out = torch.zeros(x.shape[0], self.shape[-1], dtype=x.dtype, device=x.device)
        rows = torch.diff(offs, prepend=offs.new_zeros(1))
        start = 0
        for expert, end in enumerate(offs.tolist()):
            if end > start:
                weight = self._slice(expert).unsqueeze(0)
                own = rows[expert : expert + 1]
                out[start:end] = func(x[start:end], weight, offs=own, **kwargs)
            start = end
        return out


def _operator(name: str) -> Callable[..., Any]:
    def apply(stack: ExpertStack, *others: Any) -> Any:
        return getattr(stack.whole(), name)(*map(_with_whole, others))

    return apply


for _name in ("add", "sub", "mul", "truediv", "matmul", "pow"):
    for _method in (f"__{_name}__", f"__r{_name}__"):
        setattr(ExpertStack, _method, _operator(_method))
setattr(ExpertStack, "__neg__", _operator("__neg__"))  # noqa: B010


def _with_whole(value: Any) -> Any:
    if isinstance(value, ExpertStack):
        return value.whole()
    if isinstance(value, (list, tuple)):
        return type(value)(map(_with_whole, value))
    return value


@functools.cache
def _warn_of_whole_stack(module: str, name: str) -> None:
    logger.warning(
        "%s uses %s in a way that needs all experts at the same time: they are assembled in memory "
        "that is not counted in any budget. With experts_implementation='eager' or 'grouped_mm', "
        "transformers uses them one at a time",
        module,
        name,
    )
