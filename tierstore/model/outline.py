"""How a model is cut into groups, whether its modules are at hand or only the names in its files.

A *unit* is a module and the tensors its forward needs: all of a block (a child of a list of
modules, wherever that is nested), or only the tensors of the module itself. Units that follow each
other share a group until it is large enough. Tensors are grouped by the memory they show, not by
the module that names them: a weight tied to two modules is in one group.
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
"""Buffers below this stay where they are used: statistics and tables that a forward may change."""

EXPERTS = "experts"
"""What a list of modules, or a module with stacks of weights, is called of which a router chooses a
few for each token."""

WELL_READ = 32 << 20
"""Smaller groups are read more slowly, byte for byte, and each costs a call."""
LARGEST_GROUP = 256 << 20
LINK_GROUP = 64 << 20
"""The largest group that crosses a link to an accelerator, but for tensors that are larger: some
milliseconds of it. (It is the same on every machine: weights that are in no file are found again by
the content of their groups.)"""
LARGEST_LEAF_GROUP = 32 << 20

TILE = 16 << 20
"""Bytes of a tile, at most: what one copy moves where a loop is planned."""
LEAST_TILE = 4 << 20
"""Smaller tiles cost more calls than their rings save bytes."""
CRUMBS = 1024
"""One in so many bytes of a group: smaller units and tensors go with their neighbours, whatever
these have, as a group costs more to move than they do."""


class GroupSizes(NamedTuple):
    """Bytes: of groups, of blocks that are not cut into leaves, and of modules that are compiled as
    a whole, at most.

    A block that is larger than a group is in several. They are in use together.
    """

    group: int
    block: int
    compiled: int


def usual_sizes(
    offload_type: str, budgets: Mapping[Tier, int | None], model_bytes: int
) -> GroupSizes:
    """What fits the budgets of the tiers in memory."""
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
    """How large a group should be: many must fit beside each other on every tier in memory."""
    largest, least = LARGEST_GROUP, smallest_budget // shares.LARGE_GROUP
    if model_bytes > smallest_budget:
        least = min(WELL_READ, least)
    if offload_type == "leaf_level":
        largest, least = LARGEST_LEAF_GROUP, least // 2
    return max(min(max(smallest_budget // shares.GROUP, least), largest), 1)


def tile_sizes(budgets: Mapping[Tier, int | None]) -> GroupSizes:
    """The sizes for a model whose loop is planned: `group` is that of a tile.

    A group is as many tensors as fit into a tile, or a larger tensor, which moves in several tiles.
    A block is whole only if it and the next one take few bytes of the fastest tier: what a unit
    uses, beside what comes next, is missing to what stays.
    """
    limits = [n for tier, n in budgets.items() if tier is not Tier.DISK and n is not None]
    smallest, fastest = min(limits), budgets[min(budgets)] or min(limits)
    tile = tile_bytes(budgets)
    return GroupSizes(tile, max(tile, fastest // shares.PLANNED_BLOCK), smallest // 2)


def tile_bytes(budgets: Mapping[Tier, int | None], least: int | None = None) -> int:
    """Return the bytes of a tile, at most: so few that rings take little of each budget, but not
    fewer than `least` (None: `LEAST_TILE`)."""
    limits = [n for tier, n in budgets.items() if tier is not Tier.DISK and n is not None]
    share = min(limits, default=TILE * shares.TILE) // shares.TILE // PAGE * PAGE
    return max(min(TILE, share), LEAST_TILE if least is None else least)


def tiles(nbytes: int, tile: int, alignment: int = PAGE) -> list[tuple[int, int]]:
    """Cut a group into as few tiles of up to `tile` bytes as there can be, all about equal.

    Returns the first byte and the bytes of each. All but the last are multiples of `alignment`,
    which `tile` must be, too.

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
    """A module of a model, as far as cutting the model needs to know it."""

    @property
    def name(self) -> str:
        """Its full name; empty for the model itself."""

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors, ties counted once."""

    @property
    def atomic(self) -> bool:
        """Whether it uses tensors of the modules in it without calling them."""

    @property
    def compiled(self) -> bool:
        """Whether its forward is compiled by itself: nothing can come in the middle of it."""

    @property
    def routed(self) -> bool:
        """Whether data choose if it is used: it is one of several experts, or has all of them."""

    @property
    def recomputed_in_parts(self) -> bool:
        """Whether a backward pass runs modules in it again, without the rest of it."""

    @property
    def holds_blocks(self) -> bool:
        """Whether its children are blocks: it is a list of modules."""

    @property
    def callable(self) -> bool:
        """Whether it has a forward. Of some lists, only the children are called."""

    @property
    def has_own(self) -> bool:
        """Whether it has tensors of its own, outside of its children."""

    def children(self) -> Sequence[Branch]:
        """The modules in it."""


BranchType = TypeVar("BranchType", bound=Branch)
ItemType = TypeVar("ItemType")


@dataclass(frozen=True)
class OutlinePiece(Generic[BranchType]):
    """A unit: a branch, with all that is in it (`whole`) or with its own tensors only.

    `block` says that it counts as a block. `encloses` others while it runs. Data choose whether
    what is `routed` is used.
    """

    branch: BranchType
    whole: bool
    block: bool = False
    encloses: bool = False
    routed: bool = False


def cut(
    root: BranchType, offload_type: str, block_limit: int | None, block_modules: Collection[str]
) -> Iterator[OutlinePiece[BranchType]]:
    """Cut a model into units, in the order of its modules.

    `"leaf_level"` makes every module with tensors of its own a unit. `"block_level"` keeps blocks
    of up to `block_limit` bytes whole (None: however large) and cuts larger ones into leaves;
    the modules that are named in `block_modules` are blocks too. So are those that are compiled
    by themselves, however large. Experts are units, and blocks that have some are cut into leaves.
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
    """A unit, as far as grouping sees it: the memory that it needs, piece by piece, in the order
    in which its tensors were registered and, if that is another, in that of their names."""

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
    """Return the need of a unit. `memory` maps the names of its tensors to what they show.

    A unit of several groups is spread over them in the order of its tensors' names, as they are in
    a file. So it is in the same ones whether its modules are known or only its files, and a group
    is contiguous in a file.
    """
    by_name = tuple(memory[tensor] for tensor in sorted(memory))
    registered = by_name if block else tuple(memory.values())
    return Need(name, registered, block, encloses, routed, by_name)


@dataclass
class Portion:
    """What moves together, and the name to call it by; whether it is `routed`."""

    name: str
    memory: list[Hashable] = field(default_factory=list)
    routed: bool = False


def portions(
    units: Sequence[Need],
    nbytes: Mapping[Any, int],
    target: int,
    blocks_per_group: int | None,
) -> list[Portion]:
    """Put units into groups of up to `target` bytes, or of `blocks_per_group` blocks.

    `nbytes` tells the size of each piece of memory. It is in the group of the first unit that
    needs it. A block of more than `target` bytes is spread over groups of its own. So is a module
    with more than that beside its largest tensor, and what is routed, however small. Crumbs, one in
    `CRUMBS` bytes of `target`, stay with their neighbours.
    """
    crumb = target // CRUMBS

    def spread(pieces: list[Hashable]) -> Iterator[list[Hashable]]:
        return in_portions(pieces, nbytes.__getitem__, target, crumb)

    groups: list[Portion] = []
    routed: list[Portion] = []
    claimed: set[Hashable] = set()
    size = count = 0
    of_blocks: bool | None = None  # what the open group is made of; None: no group is open
    for unit in units:
        own = [piece for piece in dict.fromkeys(unit.memory) if piece not in claimed]
        needed = sum(nbytes[piece] for piece in own)
        if unit.routed:
            routed += [Portion(unit.name, part, routed=True) for part in spread(own)]
            claimed.update(own)
            continue
        # A module's largest tensor sets how large its group must be: more than that is spread.
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
        over = size + needed > target and min(size, needed) > crumb
        full = count >= (blocks_per_group or 0) if counted else over
        another_kind = of_blocks is None or (blocks_per_group and unit.block is not of_blocks)
        if full or unit.encloses or another_kind:
            groups.append(Portion(unit.name or "root"))
            size, count, of_blocks = 0, 0, unit.block
        groups[-1].memory += own
        claimed.update(own)
        size, count = size + needed, count + 1
        if unit.encloses:
            of_blocks = None  # held while its children run: nothing else should be in it
    return [group for group in [*groups, *routed] if group.memory]


def in_portions(
    items: Iterable[ItemType], nbytes: Callable[[ItemType], int], target: int, crumb: int = 0
) -> Iterator[list[ItemType]]:
    """Items that follow each other, in portions of up to `target` bytes, or of one item.

    Portions and items of up to `crumb` bytes are not left by themselves.
    """
    portion: list[ItemType] = []
    size = 0
    for item in items:
        needed = nbytes(item)
        if portion and size + needed > target and min(size, needed) > crumb:
            yield portion
            portion, size = [], 0
        portion.append(item)
        size += needed
    if portion:
        yield portion


def needed_by(units: Iterable[Need], groups: Sequence[Portion]) -> list[tuple[int, ...]]:
    """The numbers of the groups that each unit needs while it runs."""
    group_of = {piece: number for number, group in enumerate(groups) for piece in group.memory}
    return [tuple(dict.fromkeys(group_of[piece] for piece in unit.memory)) for unit in units]


def unused(key: str, used: set[str]) -> str:
    """Return the key itself, or with a number behind it if it is in `used`, and add it there."""
    number, found = 1, key
    while found in used:
        number += 1
        found = f"{key}.{number}"
    used.add(found)
    return found
