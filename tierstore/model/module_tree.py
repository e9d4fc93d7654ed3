"""A model's modules, as the names of its tensors tell them.

A file of weights names every tensor, `transformer_blocks.3.attn.to_q.weight`, and says nothing
about the order of the modules, or what kind they are. Both are guessed by what is customary:
numbered modules are a list of blocks, in numerical order; what has to do with inputs comes before
them, what has to do with outputs after. Where a guess is wrong, modules that are small for a group
are put together with other neighbours than they have in the model.
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
    cut,
    need_of,
    needed_by,
    portions,
    unused,
)

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked", "position_ids")
"""Names of tensors that are no parameters but buffers: small ones are not offloaded."""

DEEPEST = 64
"""Modules within modules that are looked for; what a name says after them is one name."""


class NamedBranch:
    """A module that is known by the names of its tensors."""

    compiled = False
    recomputed_in_parts = False
    """Files do not tell."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._own: list[FileTensor] = []
        self._parts: dict[str, NamedBranch] = {}

    def add(self, path: list[str], tensor: FileTensor) -> None:
        """Take a tensor in; `path` is what its name says after the name of this module."""
        if len(path) == 1:
            self._own.append(tensor)
            return
        name = f"{self.name}.{path[0]}" if self.name else path[0]
        self._parts.setdefault(path[0], NamedBranch(name)).add(path[1:], tensor)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.extent.nbytes for tensor in self.tensors(whole=True))

    @property
    def atomic(self) -> bool:
        """Whether it uses tensors of the modules in it without calling them."""
        projection = any(t.name.endswith("in_proj_weight") for t in self._own)
        return projection or "parametrizations" in self._parts

    @property
    def routed(self) -> bool:
        """Whether data choose if it is used: it is one of several experts."""
        *_, holder, name = f"..{self.name}".split(".")
        return holder == EXPERTS and name.isdigit()

    @property
    def holds_blocks(self) -> bool:
        """Whether it is a list of modules: all that is in it is numbered."""
        return bool(self._parts) and not self._own and all(n.isdigit() for n in self._parts)

    @property
    def callable(self) -> bool:
        """Whether it has a forward. A list that is a block of another is taken to have one."""
        return not self.holds_blocks or self.name.rpartition(".")[2].isdigit()

    @property
    def has_own(self) -> bool:
        """Whether it has tensors of its own, outside of its children."""
        return bool(self._own)

    def children(self) -> list[NamedBranch]:
        """The modules in it, in the order in which they are customary."""
        return [self._parts[name] for name in in_customary_order(self._parts)]

    def tensors(self, *, whole: bool) -> Iterator[FileTensor]:
        """Its own tensors; all in it if `whole`."""
        yield from self._own
        for part in self._parts.values() if whole else ():
            yield from part.tensors(whole=True)


def outline(tensors: Iterable[FileTensor]) -> NamedBranch:
    """The modules that these tensors belong to."""
    root = NamedBranch("")
    for tensor in tensors:
        if tensor.extent.nbytes and not _stays(tensor):
            root.add(tensor.name.split(".", DEEPEST), tensor)
    return root


def _stays(tensor: FileTensor) -> bool:
    statistics = tensor.name.rpartition(".")[2] in _STATISTICS
    return statistics and tensor.extent.nbytes < RESIDENT_BUFFER_BYTES


@dataclass(frozen=True)
class CutModel:
    """The groups of a model in the order of their use, each with the bytes of the files that are
    read for it (without padding); and the units in their order, each with the numbers of the groups
    that it needs."""

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
    """The groups that a model of these tensors would be cut into: see `cut_model`."""
    cutting = cut_model(tensors, offload_type, target, block_modules, largest_block=largest_block)
    return cutting.groups


def cut_model(
    tensors: Iterable[FileTensor],
    offload_type: str,
    target: int,
    block_modules: Collection[str] = (),
    *,
    largest_block: int = 0,
) -> CutModel:
    """Cut a model of these tensors into units and groups, as it would be cut.

    `target` is how many bytes a group should have at most. `block_modules` names children of the
    model that count as blocks; blocks of up to `largest_block` bytes are not cut into leaves.
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
        for piece in cut(outline(by_name.values()), offload_type, limit, block_modules)
    ]
    sizes = {name: tensor.extent.nbytes for name, tensor in by_name.items()}
    parts = portions(needs, sizes, target, None)
    groups = []
    used: set[str] = set()  # a block in several groups has as many keys, as it has in a store
    for portion in parts:
        placement = place([by_name[str(name)] for name in portion.memory])
        read = sum(segment.extent.nbytes for segment in placement.segments)
        key = unused(portion.name, used)
        groups.append((group_of(key, placement.specs, placement.end), read))
    names = [unit.name for unit in needs]
    return CutModel(groups, list(zip(names, needed_by(needs, parts), strict=True)))
