"""Experts whose weights lie in stacks: those that a router chose are brought in, one by one.

The experts of a layer are one module whose parameters have a first dimension for the experts. Its
forward is told which of them each token goes to, and looks the weights up: `stack[expert]` for one
of them, `stack[experts]` for several, or all at once in a grouped product of matrices. Every slice
of a stack is a group of the store. While the forward runs, the module's attribute is an
`ExpertStack`, which brings in the slices that are asked for; which these will be is told to the
store before. The parameter itself stays what it is: it shows all slices, where they lie on disk.
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
from tierstore.adapters.codecs.memory import OF_THE_FORM
from tierstore.adapters.forward import Arguments, refuse_to_go_back
from tierstore.adapters.grouping import Unit
from tierstore.adapters.nested import tensors_in
from tierstore.adapters.saved import LeasedMemory, WeightHooks, pack_view
from tierstore.adapters.view_lifetime import ViewLease
from tierstore.adapters.weight_groups import WeightGroups
from tierstore.errors import UnknownKeyError
from tierstore.store import engine_of
from tierstore.torch_private import hooks_are_allowed

logger = logging.getLogger("tierstore.adapters")

_LAST_TWO = ({-1, -2}, {1, 2})


Before = Callable[[Any, Any], Arguments]


class Experts:
    """The experts of one module: `stacks` has a binding for each attribute that is a stack."""

    def __init__(
        self, module: nn.Module, groups: WeightGroups, stacks: Mapping[str, ParameterBinding]
    ):
        self.module = module
        self.groups = groups
        self.stacks = {name: ExpertStack(self, name, each) for name, each in stacks.items()}
        self._users: set[ExpertsContext] = set()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def announce(self, args: Any, kwargs: Any) -> None:
        """Tell the store which experts come next, as the arguments of the forward say."""
        given = [each for each in [*args, *kwargs.values()] if isinstance(each, torch.Tensor)]
        index = next((t for t in given if not (t.is_floating_point() or t.is_complex())), None)
        if index is not None and index.numel() and not self.groups.invalidated:
            chosen = index.unique().tolist()  # sorted, as they are used
            stacks = [stack.keys() for stack in self.stacks.values()]
            known = [i for i in chosen if 0 <= i < len(stacks[0])]
            keys = [keys[i] for i in known for keys in stacks]
            engine = engine_of(self.groups.store)
            engine.groups.expect_known(keys, engine.core.planner.tiers[0])

    def announced_after(self, move: Before) -> Before:
        """What is done before the forward: after `move`, the store is told."""

        def before(args: Any, kwargs: Any) -> Arguments:
            moved = move(args, kwargs)
            self.announce(*moved)
            return moved

        return before

    def show(self, use: ExpertsContext) -> bool:
        """Have the attributes be stacks while `use` lasts. False if the groups are over."""
        with self.groups.lock:
            begun = not self.groups.invalidated
            if begun:
                self.groups.running.add(use)
                self._users.add(use)
                self.module.__dict__.update(self.stacks)
        return begun

    def hide(self, use: ExpertsContext) -> None:
        """Have them be parameters, when nobody uses the stacks any more. May be repeated."""
        with self.groups.lock:
            self.groups.running.discard(use)
            self._users.discard(use)
            if not self._users:
                for name in self.stacks:
                    self.module.__dict__.pop(name, None)


def experts_of(unit: Unit, groups: WeightGroups) -> Experts | None:
    """The experts of a unit, if it has stacks of them that are all in these groups."""
    stacks = {name: groups.bindings([id(t)]) for name, t in unit.stacks.items()}
    if not stacks or not all(stacks.values()):
        return None
    return Experts(unit.module, groups, {name: found[0] for name, found in stacks.items()})


class ExpertsContext:
    """One run of a module of experts. See `tierstore.adapters.forward.ForwardContext`."""

    def __init__(self, experts: Experts) -> None:
        self._experts = experts
        self._leases: dict[str, tuple[str, ViewLease]] = {}
        self._memory: dict[str, LeasedMemory] = {}  # by the same names: what is leased
        self._hooks: Any = None
        self._outer: list[tuple[ExpertStack, ExpertsContext | None]] = []

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self) -> bool:
        """Have slices come when they are asked for.

        False if the model is not cut into these groups any more.
        """
        experts, groups = self._experts, self._experts.groups
        edited = [s.binding for s in experts.stacks.values() if s.binding.edited]
        if edited:
            groups.renew(edited)
        if not experts.show(self):
            groups.wait_until_renewed()
            return False
        groups.loops.steps().note_chosen()
        for stack in experts.stacks.values():
            self._outer.append((stack, stack.use))
            stack.use = self
        if torch.is_grad_enabled() and hooks_are_allowed():
            hooks = WeightHooks(self._pack).hooks
            hooks.__enter__()
            self._hooks = hooks
        return True

    def _pack(self, tensor: torch.Tensor) -> Unpack | None:
        """What brings a saved tensor back, if it is a view of a slice that is used."""
        groups = self._experts.groups
        if tensor.device != groups.store.device:
            return None
        return pack_view(groups, self._memory.values(), tensor)

    def slice_of(self, stack: ExpertStack, expert: int) -> torch.Tensor:
        """One expert's weight, on the device. Its memory is kept as long as somebody looks at it,
        and until another one of the stack is asked for."""
        while True:
            groups = self._experts.groups
            key = stack.keys()[expert]
            held = self._leases.get(stack.name)
            if held is None or held[0] != key:
                self._let_go_of(stack.name)
                as_of = groups.renewals
                try:
                    lease = ViewLease(groups.store.acquire(key))
                except UnknownKeyError:
                    if groups.renewals == as_of:
                        raise
                    continue  # stored anew meanwhile
                self._leases[stack.name] = held = key, lease
                ((name, tensor),) = lease.tensors.items()
                if tensor.numel():
                    self._memory[stack.name] = LeasedMemory.of(tensor, stack.binding, key, name)
            return next(iter(held[1].tensors.values()))

    def _let_go_of(self, name: str) -> None:
        self._memory.pop(name, None)
        held = self._leases.pop(name, None)
        if held is not None:
            held[1].release()

    def finish(self, result: Any, given: Arguments) -> Any:
        """After the forward. What it returns was computed, and is as it was."""
        tensors = list(tensors_in([result]))
        trained = any(s.binding.tensor.requires_grad for s in self._experts.stacks.values())
        if (trained or self._hooks is None) and any(t.grad_fn is not None for t in tensors):
            refuse_to_go_back(tensors, given)
        self.end()
        return result

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(self) -> None:
        """Put everything back. To be called again if it was interrupted."""
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__()
        while self._outer:
            stack, use = self._outer[-1]
            stack.use = use
            self._outer.pop()
        self._experts.hide(self)
        for name in list(self._leases):
            self._let_go_of(name)


class _Current(threading.local):
    use: ExpertsContext | None = None


class ExpertStack:
    """Stands for a parameter with a slice for each expert while its module runs.

    Slices come when they are asked for; of what else is asked, torch is told the whole, which is
    put together for that. On a thread on which the module does not run, it is the parameter.
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
    def use(self) -> ExpertsContext | None:
        """The run of the module on this thread."""
        return self._current.use

    @use.setter
    def use(self, use: ExpertsContext | None) -> None:
        self._current.use = use

    def keys(self) -> list[str]:
        """The keys of the slices' groups, as the stack is stored now."""
        return self._experts.groups.slices(self.binding)

    # As a tensor -------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where slices are."""
        return self.binding.tensor.device if self.use is None else self._experts.groups.store.device

    @property
    def shape(self) -> torch.Size:
        """That of the tensor."""
        return self._plain.shape

    def size(self, *dim: int) -> Any:
        """That of the tensor."""
        return self._plain.size(*dim)

    def __len__(self) -> int:
        return len(self.binding.tensor)

    @property
    def _plain(self) -> torch.Tensor:
        tensor = self.binding.tensor
        return tensor.transpose(-2, -1) if self._transposed else tensor

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._plain, name)
        if self.use is None or not callable(found) or name in OF_THE_FORM:
            return found
        return getattr(self.whole(), name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        if self.use is None:
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
        """A stack of the transposed slices, if it is the last two dimensions that change places."""
        if self.use is None or {first, second} not in _LAST_TWO or self.binding.tensor.dim() != 3:
            return self.whole().transpose(first, second)
        other = ExpertStack(self._experts, self.name, self.binding, transposed=not self._transposed)
        other.use = self.use
        return other

    @property
    def mT(self) -> Any:
        """A stack of the transposed slices."""
        return self.transpose(-2, -1)

    def whole(self) -> torch.Tensor:
        """All slices beside each other, in memory of their own."""
        if self.use is None:
            return self._plain
        _tell_of_the_whole(type(self._experts.module).__name__, self.name)
        slices = [self._slice(i).clone() for i in range(len(self))]
        return torch.stack(slices)

    def _slice(self, expert: int) -> torch.Tensor:
        assert self.use is not None, "the module runs on this thread"
        number = expert + len(self) if expert < 0 else expert
        if not 0 <= number < len(self):
            raise IndexError(f"there is no expert {expert} of {len(self)}")
        found = self.use.slice_of(self, number)
        return found.transpose(-2, -1) if self._transposed else found

    def _gathered(self, index: torch.Tensor) -> torch.Tensor:
        """The slices of several indices, as indexing a tensor copies them."""
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
        """A grouped product of matrices, expert by expert: those without rows are not brought in.

        Rows of `x` (rows, features in) up to each of `offs` (experts) go to one expert. Returns
        (rows, features out); rows after the last of `offs` are zero.
        """
        if self.use is None:
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
def _tell_of_the_whole(module: str, name: str) -> None:
    logger.warning(
        "%s uses %s in a way that needs all experts at once: they are put together in memory that "
        "no budget counts. With experts_implementation='eager' or 'grouped_mm', transformers uses "
        "them one by one",
        module,
        name,
    )
