"""How a model is cut into groups.

A *unit* is a module and the tensors its forward needs: all of a block (a child of a ModuleList or
Sequential, wherever that is nested), or only the tensors of the module itself. Units that follow
each other share a group until it is large enough. Tensors are grouped by the memory they show, not
by the module that names them: a weight tied to two modules is in one group, and both modules use
that group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

RESIDENT_BUFFER_BYTES = 1 << 20
"""Buffers below this stay where they are used: statistics and tables that a forward may change."""

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_ATOMIC = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules that use the weights of their children without calling them."""


@dataclass(eq=False)
class Unit:
    """A module whose forward needs `tensors` (by full name). `encloses` others while it runs."""

    name: str
    module: nn.Module
    tensors: dict[str, torch.Tensor]
    block: bool = False
    encloses: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, ties within the unit counted once."""
        return unique_bytes(self.tensors.values())


@dataclass(eq=False)
class GroupPlan:
    """The tensors that move together, by full name, and the name to call them by."""

    name: str
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def unique_bytes(tensors: object) -> int:
    """Bytes of tensors, each address counted once."""
    seen = {t.data_ptr(): tensor_bytes(t) for t in tensors}  # type: ignore[attr-defined]
    return sum(seen.values())


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def find_units(
    root: nn.Module, offload_type: str, block_limit: int | None, block_modules: list[str]
) -> list[Unit]:
    """Cut a model into units, in the order in which its modules were registered.

    `"leaf_level"` makes every module with tensors of its own a unit. `"block_level"` keeps blocks
    of up to `block_limit` bytes whole (None: however large) and cuts larger ones into leaves;
    children of the root named in `block_modules` are blocks too.
    """
    return list(_walk(root, "", offload_type == "block_level", block_limit, set(block_modules)))


def _walk(
    module: nn.Module, name: str, blocks: bool, limit: int | None, extra: set[str]
) -> Iterator[Unit]:
    if _is_atomic(module):
        yield Unit(name, module, _tensors(module, name, recurse=True))
        return
    own = _tensors(module, name, recurse=False)
    children = list(module.named_children())
    if own:
        yield Unit(name, module, own, encloses=bool(children))
    for child_name, child in children:
        full = f"{name}.{child_name}" if name else child_name
        is_block = blocks and (isinstance(module, _CONTAINERS) or full in extra)
        if is_block and _is_whole(child, full, limit):
            yield Unit(full, child, _tensors(child, full, recurse=True), block=True)
        else:
            yield from _walk(child, full, blocks, limit, extra)


def _is_whole(module: nn.Module, name: str, limit: int | None) -> bool:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return False  # it has no forward: its children are called one by one
    tensors = _tensors(module, name, recurse=True)
    return bool(tensors) and (limit is None or unique_bytes(tensors.values()) <= limit)


def _is_atomic(module: nn.Module) -> bool:
    return isinstance(module, _ATOMIC) or hasattr(module, "parametrizations") or _is_adapter(module)


def _is_adapter(module: nn.Module) -> bool:
    """A layer of PEFT may use its base layer's weight without calling it (DoRA does)."""
    return hasattr(module, "base_layer") and hasattr(module, "active_adapters")


def _tensors(module: nn.Module, name: str, *, recurse: bool) -> dict[str, torch.Tensor]:
    prefix = f"{name}." if name else ""
    found: dict[str, torch.Tensor] = {}
    for key, parameter in module.named_parameters(recurse=recurse, remove_duplicate=False):
        if is_plain(parameter):
            found[prefix + key] = parameter
    persistent = set(module.state_dict(keep_vars=True)) if recurse else _own_persistent(module)
    for key, buffer in module.named_buffers(recurse=recurse, remove_duplicate=False):
        if key in persistent and is_plain(buffer) and tensor_bytes(buffer) >= RESIDENT_BUFFER_BYTES:
            found[prefix + key] = buffer
    return found


def _own_persistent(module: nn.Module) -> set[str]:
    return set(module._buffers) - module._non_persistent_buffers_set


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has bytes that can be moved; wrappers (quantised weights) stay put."""
    return (
        tensor.numel() > 0
        and tensor.device.type != "meta"
        and tensor.layout is torch.strided
        and not hasattr(tensor, "__tensor_flatten__")
    )


def group_units(
    units: list[Unit], target: int, blocks_per_group: int | None
) -> tuple[list[GroupPlan], dict[Unit, list[str]]]:
    """Put units into groups of up to `target` bytes, or of `blocks_per_group` blocks.

    Returns the groups, and for each unit the names of the groups it needs: its own first, then
    those of tensors tied to others.
    """
    ties = _Ties(units)
    groups: list[GroupPlan] = []
    needs: dict[Unit, list[str]] = {}
    open_group: GroupPlan | None = None
    size = count = 0
    for unit in units:
        own = ties.unclaimed(unit)
        nbytes = unique_bytes(own.values())
        full = (
            count >= blocks_per_group if blocks_per_group and unit.block else size + nbytes > target
        )
        if open_group is None or full or unit.encloses or unit.block != ties.block_of(open_group):
            open_group, size, count = GroupPlan(unit.name or "root"), 0, 0
            ties.remember(open_group, unit.block)
            groups.append(open_group)
        ties.claim(open_group, own)
        size, count = size + nbytes, count + 1
        needs[unit] = ties.needed(unit)
        if unit.encloses:
            open_group = None  # held while its children run: nothing else should be in it
    return [group for group in groups if group.tensors], needs


class _Ties:
    """Which group has the memory that a tensor shows."""

    def __init__(self, units: list[Unit]) -> None:
        spans = {
            (t.device, t.data_ptr(), t.data_ptr() + _span(t))
            for unit in units
            for t in unit.tensors.values()
        }
        self._cluster: dict[tuple[torch.device, int], tuple[torch.device, int]] = {}
        end, first = 0, (torch.device("cpu"), 0)
        for device, start, stop in sorted(spans, key=lambda s: (str(s[0]), s[1], s[2])):
            if device != first[0] or start >= end:
                first, end = (device, start), stop
            self._cluster[device, start] = first
            end = max(end, stop)
        self._group: dict[tuple[torch.device, int], GroupPlan] = {}
        self._blocks: dict[str, bool] = {}
        self._members: dict[tuple[torch.device, int], dict[str, torch.Tensor]] = {}
        for unit in units:
            for name, tensor in unit.tensors.items():
                self._members.setdefault(self._of(tensor), {})[name] = tensor

    def _of(self, tensor: torch.Tensor) -> tuple[torch.device, int]:
        return self._cluster[tensor.device, tensor.data_ptr()]

    def remember(self, group: GroupPlan, block: bool) -> None:
        self._blocks[group.name] = block

    def block_of(self, group: GroupPlan) -> bool:
        return self._blocks[group.name]

    def unclaimed(self, unit: Unit) -> dict[str, torch.Tensor]:
        """All tensors that show memory which this unit is the first to need."""
        own: dict[str, torch.Tensor] = {}
        for tensor in unit.tensors.values():
            cluster = self._of(tensor)
            if cluster not in self._group:
                own.update(self._members[cluster])
        return own

    def claim(self, group: GroupPlan, tensors: dict[str, torch.Tensor]) -> None:
        # One object may have several names: it moves once, under the first.
        objects = {id(tensor) for tensor in group.tensors.values()}
        for name, tensor in tensors.items():
            self._group[self._of(tensor)] = group
            if id(tensor) not in objects:
                objects.add(id(tensor))
                group.tensors[name] = tensor

    def needed(self, unit: Unit) -> list[str]:
        names = [self._group[self._of(tensor)].name for tensor in unit.tensors.values()]
        return list(dict.fromkeys(names))


def _span(tensor: torch.Tensor) -> int:
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
