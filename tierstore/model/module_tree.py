"""A model's module tree, reconstructed from the names of its tensors.

A weight file names every tensor, as in `transformer_blocks.3.attn.to_q.weight`, but does not record
the order or the classes of the modules. Both are guessed from convention: numbered modules are a
list of blocks, in numerical order; modules named after inputs precede them, those named after
outputs follow. After a wrong guess, modules too small for a group of their own share one with
modules that are not their neighbours in the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from tierstore.model.groups import FileTensor, GroupSpec, group_of, place
from tierstore.model.module_order import in_customary_order
from tierstore.model.outline import (
    EXPERTS,
    RESIDENT_BUFFER_BYTES,
    need_of,
    needed_by,
    partition_units,
    portions,
    unused,
)

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked", "position_ids")
"""Names of buffers (not parameters); small ones are not offloaded."""

DEEPEST = 64
"""Largest depth of nested modules; the rest of a longer name counts as one name."""


class NamedBranch:
    """A module reconstructed from the names of its tensors."""

    compiled = False
    recomputed_in_parts = False
    """Unknown from files."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._own: list[FileTensor] = []
        self._parts: dict[str, NamedBranch] = {}

    def add(self, path: list[str], tensor: FileTensor) -> None:
        """Add a tensor. `path` is its name relative to this module, split at the dots."""
        if len(path) == 1:
            self._own.append(tensor)
            return
        name = f"{self.name}.{path[0]}" if self.name else path[0]
        self._parts.setdefault(path[0], NamedBranch(name)).add(path[1:], tensor)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors in the module and its descendants."""
        return sum(tensor.extent.nbytes for tensor in self.tensors(whole=True))

    @property
    def atomic(self) -> bool:
        """True if it uses tensors of its children without calling them."""
        projection = any(t.name.endswith("in_proj_weight") for t in self._own)
        return projection or "parametrizations" in self._parts

    @property
    def routed(self) -> bool:
        """True if it is one of several experts, so data decide whether it is used."""
        *_, holder, name = f"..{self.name}".split(".")
        return holder == EXPERTS and name.isdigit()

    @property
    def holds_blocks(self) -> bool:
        """True if it is a module list: all its members are numbered."""
        return bool(self._parts) and not self._own and all(n.isdigit() for n in self._parts)

    @property
    def callable(self) -> bool:
        """True if it has a forward. A module list that is a block of another is assumed to."""
        return not self.holds_blocks or self.name.rpartition(".")[2].isdigit()

    @property
    def has_own(self) -> bool:
        """True if it has tensors outside its children."""
        return bool(self._own)

    def children(self) -> list[NamedBranch]:
        """Return the children in their likely order of registration."""
        return [self._parts[name] for name in in_customary_order(self._parts)]

    def tensors(self, *, whole: bool) -> Iterator[FileTensor]:
        """Yield its own tensors and, if `whole`, those of its descendants."""
        yield from self._own
        for part in self._parts.values() if whole else ():
            yield from part.tensors(whole=True)


def outline(tensors: Iterable[FileTensor]) -> NamedBranch:
    """Return the root of the module tree of these tensors."""
    root = NamedBranch("")
    for tensor in tensors:
        if tensor.extent.nbytes and not _stays_resident(tensor):
            root.add(tensor.name.split(".", DEEPEST), tensor)
    return root


def _stays_resident(tensor: FileTensor) -> bool:
    statistics = tensor.name.rpartition(".")[2] in _STATISTICS
    return statistics and tensor.extent.nbytes < RESIDENT_BUFFER_BYTES


@dataclass(frozen=True)
class PartitionedModel:
    """A model partitioned into groups and units.

    Attributes:
        groups: the groups in order of use, each with the bytes to read for it (without padding).
        units: the names of the units in order of use, each with the indices of its groups.
    """

    groups: list[tuple[GroupSpec, int]]
    units: list[tuple[str, tuple[int, ...]]]


def groups_of(
    tensors: Iterable[FileTensor],
    offload_type: str,
    target: int,
    block_modules: Collection[str] = (),
    *,
    largest_block: int = 0,
) -> list[tuple[GroupSpec, int]]:
    """Return the groups of a model of these tensors: see `partition_model`."""
    model = partition_model(
        tensors, offload_type, target, block_modules, largest_block=largest_block
    )
    return model.groups


def partition_model(
    tensors: Iterable[FileTensor],
    offload_type: str,
    target: int,
    block_modules: Collection[str] = (),
    *,
    largest_block: int = 0,
) -> PartitionedModel:
    """Partition a model of these tensors into units and groups, as an adapter would.

    Args:
        tensors: the tensors of the model, in files.
        offload_type: `"block_level"` or `"leaf_level"`; see `outline.partition_units`.
        target: largest group, in bytes.
        block_modules: names of children of the model that count as blocks.
        largest_block: bytes up to which a block is not split into leaves.
    """
    limit = max(target, largest_block)
    by_name = {tensor.name: tensor for tensor in tensors}
    needs = [
        need_of(
            piece.branch.name,
            {tensor.name: tensor.name for tensor in piece.branch.tensors(whole=piece.whole)},
            piece.block,
            piece.encloses,
            piece.routed,
        )
        for piece in partition_units(outline(by_name.values()), offload_type, limit, block_modules)
    ]
    sizes = {name: tensor.extent.nbytes for name, tensor in by_name.items()}
    parts = portions(needs, sizes, target, None)
    groups = []
    used: set[str] = set()  # a block in several groups has several keys, as in a store
    for portion in parts:
        placement = place([by_name[str(name)] for name in portion.memory])
        read = sum(segment.extent.nbytes for segment in placement.segments)
        key = unused(portion.name, used)
        groups.append((group_of(key, placement.specs, placement.end), read))
    names = [unit.name for unit in needs]
    return PartitionedModel(groups, list(zip(names, needed_by(needs, parts), strict=True)))
