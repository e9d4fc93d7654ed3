"""Partition a model into units and groups.

Applies the rules of `tierstore.model.outline` to modules and tensors. A weight tied to two modules
is in one group, which both modules use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from tierstore.adapters.codecs import leaves_of, movable_leaves, weight_bytes, with_names
from tierstore.adapters.codecs.memory import address_of, span, tensor_bytes, unique_bytes
from tierstore.adapters.compat import Library, any_answer, first_answer, joined_answers
from tierstore.adapters.contents import (
    modules_of,
    named_buffers_of,
    named_children_of,
    named_modules_of,
    named_parameters_of,
    named_weights_of,
    parameters_of,
)
from tierstore.model.outline import (
    EXPERTS,
    RESIDENT_BUFFER_BYTES,
    GroupSizes,
    OutlinePiece,
    need_of,
    partition_units,
    portions,
    usual_sizes,
)
from tierstore.store import TierStore, engine_of
from tierstore.torch_private import COMPILED_CALL

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
ATOMIC = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.RNNBase)
"""Modules that pass all their weights, and those of their children, to one operation."""


def sizes_for(offload_type: str, store: TierStore, module: nn.Module) -> GroupSizes:
    """Return the maximum sizes of groups and whole blocks, given the store's budgets."""
    budgets = engine_of(store).reporting.weight_budgets()
    leaves = (leaf for p in parameters_of(module) for leaf in leaves_of(p).values())
    return usual_sizes(offload_type, budgets, sum(map(tensor_bytes, leaves)))


@dataclass(frozen=True)
class Partitioner:
    """Partitions a model into units and groups; see `tierstore.model.outline`.

    Groups have up to `target` bytes, or `blocks_per_group` blocks. Blocks of up to `largest_block`
    bytes are not split into leaves, but may span several groups. Modules whose class is named in
    `whole` use the weights of their children without calling them. Compiled modules of up to
    `largest_compiled` bytes are not split either.
    """

    offload_type: str
    target: int
    block_modules: tuple[str, ...] = ()
    blocks_per_group: int | None = None
    whole: frozenset[str] = frozenset()
    largest_block: int = 0
    largest_compiled: int = 0

    @property
    def block_limit(self) -> int | None:
        """Size in bytes above which blocks are split into leaves; None for no limit."""
        return None if self.blocks_per_group else max(self.target, self.largest_block)

    def units(self, root: nn.Module) -> list[Unit]:
        """Return the units of a model, in the order in which its modules were registered."""
        branch = ModuleBranch(root, "", self)
        pieces = partition_units(
            branch, self.offload_type, self.block_limit, set(self.block_modules)
        )
        return [
            unit
            for piece in pieces
            for b in [piece.branch]
            for unit in _units_of(b, b.tensors(whole=piece.whole), piece)
        ]

    def groups(self, units: list[Unit]) -> list[GroupPlan]:
        """Return the groups of units, of up to `target` bytes or `blocks_per_group` blocks."""
        shown = MemoryPieces(units)
        needs = [need_of(u.name, shown.memory_of(u), u.block, u.encloses, u.routed) for u in units]
        groups: list[GroupPlan] = []
        for portion in portions(needs, shown.nbytes, self.target, self.blocks_per_group):
            members = [m for piece in portion.memory for m in shown.members[piece].items()]
            groups.append(GroupPlan(portion.name, _unique_members(members), portion.routed))
        return groups


@dataclass(eq=False)
class Unit:
    """A module whose forward needs `tensors`, by full name.

    With `encloses`, other units run inside its forward. With `whole`, `tensors` are all tensors in
    the module, as its forward may use any of them. With `routed`, data choose whether it runs; or,
    if it has `stacks` (by attribute name), which slices of them it uses.
    """

    name: str
    module: nn.Module
    tensors: dict[str, torch.Tensor]
    block: bool = False
    encloses: bool = False
    routed: bool = False
    whole: bool = False
    stacks: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def only(self, wanted: Callable[[str, torch.Tensor], bool]) -> Unit | None:
        """Return the unit restricted to the wanted tensors; None if there are none."""
        tensors = {name: tensor for name, tensor in self.tensors.items() if wanted(name, tensor)}
        return replace(self, tensors=tensors) if tensors else None


@dataclass(eq=False)
class GroupPlan:
    """A group's name, and the tensors that move together, by full name."""

    name: str
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    routed: bool = False


def _units_of(
    branch: ModuleBranch, tensors: dict[str, torch.Tensor], piece: OutlinePiece[ModuleBranch]
) -> list[Unit]:
    """Return the unit of a branch; with expert stacks, one for them and one for other tensors."""
    stacks = branch.stacks if piece.routed else None
    if not stacks:
        return [
            Unit(
                branch.name,
                branch.module,
                tensors,
                piece.block,
                piece.encloses,
                piece.routed,
                piece.whole,
            )
        ]
    own = set(map(id, stacks.values()))
    sliced = {name: tensor for name, tensor in tensors.items() if id(tensor) in own}
    rest = {name: tensor for name, tensor in tensors.items() if id(tensor) not in own}
    units = [Unit(branch.name, branch.module, rest)] if rest else []
    return [*units, Unit(branch.name, branch.module, sliced, routed=True, stacks=stacks)]


class ModuleBranch:
    """A module of a loaded model, as a branch of its outline."""

    def __init__(
        self, module: nn.Module, name: str, partitioner: Partitioner, *, expert: bool = False
    ) -> None:
        self.module = module
        self.name = name
        self._partitioner = partitioner
        self._expert = expert

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the module, tied tensors counted once."""
        return unique_bytes(self.tensors(whole=True).values())

    @property
    def atomic(self) -> bool:
        """True if the module uses tensors of its submodules without calling them."""
        module = self.module
        return (
            isinstance(module, ATOMIC)
            or type(module).__name__ in self._partitioner.whole
            or hasattr(module, "parametrizations")
            or any_answer(Library.uses_weights_of_parts, module)
        )

    @property
    def compiled(self) -> bool:
        """True if the module is compiled separately and small enough to lease as a whole."""
        return is_compiled(self.module) and self.nbytes <= self._partitioner.largest_compiled

    @property
    def routed(self) -> bool:
        """True if the module is one of a list of experts, or has stacks of expert weights."""
        return self._expert or bool(self.stacks)

    @property
    def stacks(self) -> dict[str, nn.Parameter]:
        """Stacks of expert weights, by attribute; empty if the module has none."""
        return first_answer(Library.expert_stacks, self.module) or {}

    @property
    def recomputed_in_parts(self) -> bool:
        """True if the module or one inside it recomputes its parts in a backward pass."""
        return any(map(recomputes, modules_of(self.module)))

    @property
    def holds_blocks(self) -> bool:
        """True if the module is a list of modules."""
        return isinstance(self.module, _LISTS)

    @property
    def callable(self) -> bool:
        """True if the module has a forward."""
        return not isinstance(self.module, (nn.ModuleList, nn.ModuleDict))

    @property
    def has_own(self) -> bool:
        """True if the module has tensors besides those of its children."""
        return bool(self.tensors(whole=False))

    def children(self) -> list[ModuleBranch]:
        """Return the branches of the child modules."""
        if isinstance(self.module, torch.jit.ScriptModule):
            return []
        prefix = f"{self.name}." if self.name else ""
        lists = isinstance(self.module, (nn.ModuleList, nn.ModuleDict))
        experts = (
            lists and self.name.rpartition(".")[2] == EXPERTS and len(self.module._modules) > 1
        )
        return [
            ModuleBranch(child, prefix + name, self._partitioner, expert=experts)
            for name, child in named_children_of(self.module)
        ]

    def tensors(self, *, whole: bool) -> dict[str, torch.Tensor]:
        """Return the module's own offloadable tensors by full name; with `whole`, all inside it."""
        module, prefix = self.module, f"{self.name}." if self.name else ""
        if isinstance(module, torch.jit.ScriptModule):
            return {}  # TorchScript does not call Python's `forward`: the weights stay resident
        found: dict[str, torch.Tensor] = {}
        for key, parameter in named_parameters_of(module, recurse=whole, remove_duplicate=False):
            if not self._is_scripted(key):
                found |= with_names(prefix + key, movable_leaves(parameter))
        kept = {name for name, _ in named_weights_of(module)}
        for key, buffer in named_buffers_of(module, recurse=whole, remove_duplicate=False):
            large = key in kept and weight_bytes([buffer]) >= RESIDENT_BUFFER_BYTES
            if large and not self._is_scripted(key):
                found |= with_names(prefix + key, movable_leaves(buffer))
        for name, part in named_modules_of(module) if whole else [("", module)]:
            for attribute, tensor in joined_answers(Library.hidden_tensors, part).items():
                full_name = prefix + f"{name}.{attribute}".lstrip(".")
                found |= with_names(full_name, movable_leaves(tensor))
        return found

    def _is_scripted(self, name: str) -> bool:
        """Return whether a tensor, by its name in the module, belongs to a TorchScript module."""
        here: nn.Module | None = self.module
        for part in name.split(".")[:-1]:
            here = None if here is None else here._modules[part]
            if isinstance(here, torch.jit.ScriptModule):
                return True
        return False


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module was compiled: `module.compile()` or `torch.compile(module)`."""
    return getattr(module, COMPILED_CALL, None) is not None or "_orig_mod" in module._modules


def recomputes(module: nn.Module) -> bool:
    """Return whether a backward pass recomputes parts of a module without calling the module."""
    return any_answer(Library.recomputes_parts, module)


def _unique_members(members: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the tensors by name, each object once, under its first name."""
    objects: set[int] = set()
    kept: dict[str, torch.Tensor] = {}
    for name, tensor in members:
        if id(tensor) not in objects:
            objects.add(id(tensor))
            kept[name] = tensor
    return kept


class MemoryPieces:
    """Index of the memory that the tensors of units show: overlapping tensors share a piece."""

    def __init__(self, units: list[Unit]) -> None:
        spans = {
            (t.device, address_of(t), address_of(t) + span(t))
            for unit in units
            for t in unit.tensors.values()
        }
        self._piece: dict[tuple[torch.device, int], object] = {}
        end, first = 0, (torch.device("cpu"), 0)
        for device, start, stop in sorted(spans, key=lambda s: (str(s[0]), s[1], s[2])):
            if device != first[0] or start >= end:
                first, end = (device, start), stop
            self._piece[device, start] = first
            end = max(end, stop)
        self.members: dict[object, dict[str, torch.Tensor]] = {}
        for unit in units:
            for name, tensor in unit.tensors.items():
                self.members.setdefault(self._of(tensor), {})[name] = tensor
        self.nbytes = {piece: unique_bytes(m.values()) for piece, m in self.members.items()}

    def _of(self, tensor: torch.Tensor) -> object:
        return self._piece[tensor.device, address_of(tensor)]

    def memory_of(self, unit: Unit) -> dict[str, object]:
        """Return the piece of memory of each tensor of a unit, by name."""
        return {name: self._of(tensor) for name, tensor in unit.tensors.items()}
