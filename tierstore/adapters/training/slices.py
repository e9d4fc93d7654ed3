"""Partition a model into slices: parts that are on the device together.

A slice is a run of units (see `tierstore.model.outline`) and the groups that hold their parameters.
Slices follow the registration order of the modules. A parameter tied to several modules is in the
first slice that needs it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from tierstore.adapters.codecs.memory import unique_bytes
from tierstore.adapters.contents import parameters_of
from tierstore.adapters.grouping import GroupPlan, Partitioner, Unit
from tierstore.adapters.training.sharded import is_distributed, memory_of

LOCAL = "._local_tensor"
"""Suffix of the name of a sharded parameter's local tensor."""


@dataclass(eq=False)
class Slice:
    """Consecutive units, and the groups of the parameters that they are the first to use."""

    number: int
    units: list[Unit] = field(default_factory=list)
    groups: list[GroupPlan] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of its parameters."""
        return sum(unique_bytes(map(memory_of, g.tensors.values())) for g in self.groups)


def partition_into_slices(
    root: nn.Module, count: int | None, slice_bytes: int, group_bytes: int
) -> list[Slice]:
    """Partition a model into slices.

    Args:
        root: the model.
        count: number of slices of about equal bytes; None for slices of about `slice_bytes`. There
            are never more slices than units.
        slice_bytes: bytes of a slice.
        group_bytes: largest group, in bytes.
    """
    parameters = {id(memory_of(p)): p for p in parameters_of(root)}
    total = unique_bytes(map(memory_of, parameters_of(root)))
    if count is None:
        count = -(-total // max(slice_bytes, 1))
    limit = max(min(group_bytes, total // max(count, 1)), 1)
    units = [
        found
        for unit in Partitioner("block_level", limit).units(root)
        if (found := unit.only(lambda _, tensor: id(tensor) in parameters))
    ]
    slices = [Slice(n) for n in range(max(min(count, len(units)), 1))]
    seen: set[int] = set()
    for unit, slice_ in _assign_slices(units, slices, total, seen):
        slice_.units.append(unit)
    claimed: set[int] = set()
    for slice_ in slices:
        slice_.groups = _groups(slice_.units, group_bytes, claimed, parameters)
    return [slice_ for slice_ in slices if slice_.units]


def _assign_slices(
    units: list[Unit], slices: list[Slice], total: int, seen: set[int]
) -> Iterable[tuple[Unit, Slice]]:
    """Yield each unit with its slice: the slice that contains the middle of the unit's bytes.

    Units are shifted where a slice would otherwise be empty.
    """
    before = 0
    last = -1
    for i, unit in enumerate(units):
        new = {id(t): t for t in unit.tensors.values() if id(t) not in seen}
        seen.update(new)
        nbytes = unique_bytes(new.values())
        found = int((before + nbytes / 2) * len(slices) / max(total, 1))
        left = len(units) - i
        found = max(found, last, len(slices) - left)
        last = min(found, last + 1, len(slices) - 1)
        before += nbytes
        yield unit, slices[last]


def _groups(
    units: list[Unit], target: int, claimed: set[int], parameters: dict[int, nn.Parameter]
) -> list[GroupPlan]:
    """Return the groups of the units' parameters that no earlier slice has claimed.

    Frozen and trained parameters are in separate groups, because only trained ones are written; so
    are sharded and unsharded ones. Units list the memory of parameters, groups the parameters.
    """
    fresh = [f for unit in units if (f := unit.only(lambda _, t: id(t) not in claimed))]
    groups: list[GroupPlan] = []
    for trained, sharded in itertools.product((True, False), (False, True)):

        def part(_: str, t: torch.Tensor, kind: tuple[bool, bool] = (trained, sharded)) -> bool:
            parameter = parameters[id(t)]
            return (parameter.requires_grad, is_distributed(parameter)) == kind

        alike = [found for unit in fresh if (found := unit.only(part))]
        groups += Partitioner("block_level", target).groups(alike)
    claimed.update(id(t) for group in groups for t in group.tensors.values())
    for group in groups:
        group.tensors = {
            name.removesuffix(LOCAL) if is_distributed(parameters[id(t)]) else name: parameters[
                id(t)
            ]
            for name, t in group.tensors.items()
        }
    return groups
