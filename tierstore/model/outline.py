"""Partitions a model into units and groups, from its modules or only from the names in its files.

A *unit* is a module and the tensors that its forward needs: all of a block (a child of a module
list, at any depth), or only the module's own tensors. Consecutive units share a group until it is
large enough. Tensors are grouped by their memory, not by the module that names them: a weight tied
to two modules is in one group.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from tierstore.model import shares
from tierstore.model.sizes import PAGE
from tierstore.model.tiers import Tier

OFFLOAD_TYPES = ("block_level", "leaf_level")

RESIDENT_BUFFER_BYTES = 1 << 20
"""Bytes. Smaller buffers are not offloaded: statistics and tables that a forward may change."""

EXPERTS = "experts"
"""Name of the module that holds the experts among which a router selects, as a list or stacked."""

EFFICIENT_READ = 32 << 20
"""Bytes. Smaller groups are read at a lower bandwidth, and each costs a call."""
LARGEST_GROUP = 256 << 20
LINK_GROUP = 64 << 20
"""Largest group, in bytes, that crosses a link to an accelerator, unless one tensor is larger.

It takes a few milliseconds of the link. It is the same on every machine, because weights that are
in no file are identified by the content of their groups.
"""
LARGEST_LEAF_GROUP = 32 << 20

TILE = 16 << 20
"""Largest tile, in bytes: the unit of copying in a planned loop."""
LEAST_TILE = 4 << 20
"""Smallest tile, in bytes. Smaller tiles cost more in calls than their rings save in bytes."""
NEGLIGIBLE_FRACTION = 1024
"""Units and tensors below 1/1024 of the target size join their neighbours regardless of size.

A separate group would cost more to move than their bytes.
"""


class GroupSizes(NamedTuple):
    """Upper limits in bytes.

    Attributes:
        group: size of a group. A larger block is spread over several groups, used together.
        block: size of a block that is not split into leaves.
        compiled: size of a module that is compiled as a whole.
    """

    group: int
    block: int
    compiled: int


def usual_sizes(
    offload_type: str, budgets: Mapping[Tier, int | None], model_bytes: int
) -> GroupSizes:
    """Return the sizes for a model, from the budgets of the tiers in memory."""
    limits = [nbytes for tier, nbytes in budgets.items() if tier is not Tier.DISK]
    smallest = min(nbytes for nbytes in limits if nbytes is not None)
    on_device = budgets.get(Tier.DEVICE)
    if on_device is None:
        group = target_bytes(offload_type, smallest, model_bytes)
        return GroupSizes(group, group, smallest // 2)
    group = min(target_bytes(offload_type, smallest, model_bytes), LINK_GROUP)
    share = shares.LARGE_GROUP if model_bytes <= on_device else shares.PLANNED_BLOCK
    return GroupSizes(group, max(group, on_device // share), smallest // 2)


def target_bytes(offload_type: str, smallest_budget: int, model_bytes: int) -> int:
    """Return the target size of a group, in bytes: many must fit on every tier in memory."""
    largest, least = LARGEST_GROUP, smallest_budget // shares.LARGE_GROUP
    if model_bytes > smallest_budget:
        least = min(EFFICIENT_READ, least)
    if offload_type == "leaf_level":
        largest, least = LARGEST_LEAF_GROUP, least // 2
    return max(min(max(smallest_budget // shares.GROUP, least), largest), 1)


def tile_sizes(budgets: Mapping[Tier, int | None]) -> GroupSizes:
    """Return the sizes for a model whose loop is planned; `group` is the size of a tile.

    A group is as many tensors as fit in a tile, or one larger tensor, which moves in several tiles.
    A block stays whole only if it and the next block take a small share of the fastest tier,
    because both reduce the memory left for resident groups.
    """
    limits = [n for tier, n in budgets.items() if tier is not Tier.DISK and n is not None]
    smallest, fastest = min(limits), budgets[min(budgets)] or min(limits)
    tile = tile_bytes(budgets)
    return GroupSizes(tile, max(tile, fastest // shares.PLANNED_BLOCK), smallest // 2)


def tile_bytes(budgets: Mapping[Tier, int | None], least: int | None = None) -> int:
    """Return the largest size of a tile, in bytes, for rings to take little of each budget.

    It is at least `least` (None: `LEAST_TILE`).
    """
    limits = [n for tier, n in budgets.items() if tier is not Tier.DISK and n is not None]
    share = min(limits, default=TILE * shares.TILE) // shares.TILE // PAGE * PAGE
    return max(min(TILE, share), LEAST_TILE if least is None else least)


def tiles(nbytes: int, tile: int, alignment: int = PAGE) -> list[tuple[int, int]]:
    """Split a group into the fewest tiles of up to `tile` bytes, all about equal.

    Returns the offset and the size of each, in bytes. All sizes but the last are multiples of
    `alignment`, and so must be `tile`.

    >>> tiles(100, 40, alignment=10)
    [(0, 40), (40, 40), (80, 20)]
    >>> tiles(90, 40, alignment=10)
    [(0, 30), (30, 30), (60, 30)]
    """
    count = max(-(-nbytes // tile), 1)
    each = -(-nbytes // (count * alignment)) * alignment
    bounds = [min(number * each, nbytes) for number in range(count + 1)]
    return [(start, stop - start) for start, stop in pairwise(bounds) if stop > start]


class Branch(Protocol):
    """The module interface that partitioning needs."""

    @property
    def name(self) -> str:
        """Full name; empty for the model itself."""

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors, with tied ones counted once."""

    @property
    def atomic(self) -> bool:
        """True if it uses tensors of its children without calling them."""

    @property
    def compiled(self) -> bool:
        """True if its forward is compiled as a whole, so no hook can run inside it."""

    @property
    def routed(self) -> bool:
        """True if it is one of several experts, or holds all of them: data decide its use."""

    @property
    def recomputed_in_parts(self) -> bool:
        """True if a backward pass recomputes some of its modules without the others."""

    @property
    def holds_blocks(self) -> bool:
        """True if it is a module list, whose children are blocks."""

    @property
    def callable(self) -> bool:
        """True if it has a forward. Some module lists are never called themselves."""

    @property
    def has_own(self) -> bool:
        """True if it has tensors outside its children."""

    def children(self) -> Sequence[Branch]:
        """Return its child modules, in order."""


BranchType = TypeVar("BranchType", bound=Branch)
ItemType = TypeVar("ItemType")


@dataclass(frozen=True)
class OutlinePiece(Generic[BranchType]):
    """A unit: a branch with all its descendants (`whole`) or only with its own tensors.

    Attributes:
        block: True if it counts as a block.
        encloses: True if other units run during its forward.
        routed: True if data decide whether it is used.
    """

    branch: BranchType
    whole: bool
    block: bool = False
    encloses: bool = False
    routed: bool = False


def partition_units(
    root: BranchType, offload_type: str, block_limit: int | None, block_modules: Collection[str]
) -> Iterator[OutlinePiece[BranchType]]:
    """Partition a model into units, in the order of its modules.

    `"leaf_level"` makes every module with its own tensors a unit. `"block_level"` keeps blocks of
    up to `block_limit` bytes whole (None: no limit) and splits larger ones into leaves. The modules
    named in `block_modules` are blocks too, and so are separately compiled modules of any size.
    Each expert is a unit, and blocks with experts are split into leaves.
    """
    return _walk(root, offload_type == "block_level", block_limit, block_modules)


def _walk(
    branch: BranchType, blocks: bool, limit: int | None, extra: Collection[str]
) -> Iterator[OutlinePiece[BranchType]]:
    if branch.atomic or branch.compiled:
        yield OutlinePiece(branch, whole=True, block=branch.compiled)
        return
    if branch.routed:
        yield OutlinePiece(branch, whole=True, routed=True)
        return
    children: Sequence[BranchType] = branch.children()  # type: ignore[assignment]
    if branch.has_own:
        yield OutlinePiece(branch, whole=False, encloses=bool(children))
    for child in children:
        is_block = blocks and (branch.holds_blocks or child.name in extra)
        if is_block and _stays_whole(child, limit):
            yield OutlinePiece(child, whole=True, block=True)
        else:
            yield from _walk(child, blocks, limit, extra)


def _stays_whole(branch: Branch, limit: int | None) -> bool:
    fits = limit is None or branch.nbytes <= limit
    in_parts = branch.recomputed_in_parts or _has_routed(branch)
    return branch.callable and branch.nbytes > 0 and fits and not in_parts


def _has_routed(branch: Branch) -> bool:
    return branch.routed or any(map(_has_routed, branch.children()))


@dataclass(frozen=True)
class Need:
    """A unit as grouping sees it: the pieces of memory that it needs.

    `memory` is in the order in which tensors were registered, `by_name` in the order of their
    names.
    """

    name: str
    memory: tuple[Hashable, ...]
    block: bool = False
    encloses: bool = False
    routed: bool = False
    by_name: tuple[Hashable, ...] = ()


def need_of(
    name: str,
    memory: Mapping[str, Hashable],
    block: bool = False,
    encloses: bool = False,
    routed: bool = False,
) -> Need:
    """Return the need of a unit. `memory` maps the names of its tensors to their memory.

    A unit that needs several groups is spread over them in the order of its tensors' names, which
    is their order in a file. So the groups are the same whether the modules or only the files are
    known, and each group is contiguous in a file.
    """
    by_name = tuple(memory[tensor] for tensor in sorted(memory))
    registered = by_name if block else tuple(memory.values())
    return Need(name, registered, block, encloses, routed, by_name)


@dataclass
class Portion:
    """The pieces of memory of one group, its name, and whether data decide its use (`routed`)."""

    name: str
    memory: list[Hashable] = field(default_factory=list)
    routed: bool = False


def portions(
    units: Sequence[Need],
    nbytes: Mapping[Any, int],
    target: int,
    blocks_per_group: int | None,
) -> list[Portion]:
    """Assign units to groups of up to `target` bytes, or of `blocks_per_group` blocks.

    `nbytes` is the size of each piece of memory, which goes to the group of the first unit that
    needs it. These units get separate groups: blocks of more than `target` bytes, other modules
    with more than `target` bytes besides their largest tensor, and routed units of any size. Pieces
    of up to `target / NEGLIGIBLE_FRACTION` bytes stay with their neighbours.
    """
    negligible = target // NEGLIGIBLE_FRACTION

    def spread(pieces: list[Hashable]) -> Iterator[list[Hashable]]:
        return in_portions(pieces, nbytes.__getitem__, target, negligible)

    groups: list[Portion] = []
    routed: list[Portion] = []
    claimed: set[Hashable] = set()
    size = count = 0
    of_blocks: bool | None = None  # whether the open group consists of blocks; None: none is open
    for unit in units:
        own = [piece for piece in dict.fromkeys(unit.memory) if piece not in claimed]
        needed = sum(nbytes[piece] for piece in own)
        if unit.routed:
            routed += [Portion(unit.name, part, routed=True) for part in spread(own)]
            claimed.update(own)
            continue
        # A group must hold the module's largest tensor in any case; only the rest is spread.
        beside = 0 if unit.block else max((nbytes[piece] for piece in own), default=0)
        if needed - beside > target and not (unit.block and blocks_per_group):
            name = unit.name or "root"
            named = [
                piece for piece in dict.fromkeys(unit.by_name or unit.memory) if piece in set(own)
            ]
            groups += [Portion(name, part) for part in spread(named)]
            claimed.update(own)
            of_blocks = None
            continue
        counted = blocks_per_group and unit.block
        over = size + needed > target and min(size, needed) > negligible
        full = count >= (blocks_per_group or 0) if counted else over
        another_kind = of_blocks is None or (blocks_per_group and unit.block is not of_blocks)
        if full or unit.encloses or another_kind:
            groups.append(Portion(unit.name or "root"))
            size, count, of_blocks = 0, 0, unit.block
        groups[-1].memory += own
        claimed.update(own)
        size, count = size + needed, count + 1
        if unit.encloses:
            of_blocks = None  # leased while its children run, so no other unit may share it
    return [group for group in [*groups, *routed] if group.memory]


def in_portions(
    items: Iterable[ItemType], nbytes: Callable[[ItemType], int], target: int, negligible: int = 0
) -> Iterator[list[ItemType]]:
    """Split items into runs of up to `target` bytes, or of one larger item.

    Runs and items of up to `negligible` bytes join their neighbours.
    """
    portion: list[ItemType] = []
    size = 0
    for item in items:
        needed = nbytes(item)
        if portion and size + needed > target and min(size, needed) > negligible:
            yield portion
            portion, size = [], 0
        portion.append(item)
        size += needed
    if portion:
        yield portion


def needed_by(units: Iterable[Need], groups: Sequence[Portion]) -> list[tuple[int, ...]]:
    """Return the indices of the groups that each unit needs while it runs."""
    group_of = {piece: number for number, group in enumerate(groups) for piece in group.memory}
    return [tuple(dict.fromkeys(group_of[piece] for piece in unit.memory)) for unit in units]


def unused(key: str, used: set[str]) -> str:
    """Return the key, with a numeric suffix if it is in `used`, and add the result to `used`."""
    number, found = 1, key
    while found in used:
        number += 1
        found = f"{key}.{number}"
    used.add(found)
    return found
