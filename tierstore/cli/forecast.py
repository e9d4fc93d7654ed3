"""What a run would read, keep and wait for: a checkpoint's groups, played through the planner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tierstore.cli.budgets import by_tier
from tierstore.cli.contents import Model
from tierstore.cli.output import Document
from tierstore.model.groups import GroupSpec
from tierstore.model.module_tree import groups_of
from tierstore.model.outline import usual_sizes
from tierstore.model.sizes import PAGE, slot_bytes
from tierstore.model.tiers import Tier
from tierstore.plan.loop_plan import Loop, Step
from tierstore.simulation import LoopPass, Way, simulate_loop

FROM_DISK = (Tier.DISK, Tier.HOST)
TO_DEVICE = (Tier.HOST, Tier.DEVICE)


@dataclass(frozen=True)
class PlannedComponent:
    """A model, and the groups that it is cut into for some budgets.

    `in_files` says, by key, how many bytes of the files are read for a group.
    """

    name: str
    groups: tuple[GroupSpec, ...]
    in_files: dict[str, int]

    @property
    def nbytes(self) -> int:
        """Bytes of all its groups, in memory."""
        return sum(group.nbytes for group in self.groups)

    @property
    def file_bytes(self) -> int:
        """Bytes of the files that are read for all its groups."""
        return sum(self.in_files.values())


@dataclass(frozen=True)
class Conditions:
    """What a run meets, whatever its `ram_budget`.

    `device` is the device's budget in bytes, or None where there is none; `bandwidth` the bytes per
    second of each hop, as far as they are known: without the disk's, no seconds are told. A step
    computes for `compute` seconds; `steps` of them are played.
    """

    offload_type: str
    device: int | None
    bandwidth: Mapping[Way, float]
    compute: float
    steps: int


@dataclass(frozen=True)
class Cut:
    """All models of a checkpoint, cut for one `ram_budget`."""

    ram: int
    components: tuple[PlannedComponent, ...]

    @property
    def largest(self) -> GroupSpec:
        """The largest group: every budget must have room for it."""
        groups = (group for component in self.components for group in component.groups)
        return max(groups, key=lambda group: group.nbytes)


def cut(models: Iterable[Model], ram: int, conditions: Conditions) -> Cut:
    """Each model cut as `enable_group_offload` would cut it, in a store of this budget."""
    budgets = by_tier(ram, conditions.device)
    found = []
    for model in models:
        prefix = f"{model.name}/" if model.name else ""
        sizes = usual_sizes(conditions.offload_type, budgets, model.nbytes)
        named = [
            (replace(group, key=prefix + group.key), read)
            for group, read in groups_of(
                model.tensors,
                conditions.offload_type,
                sizes.group,
                model.blocks,
                largest_block=sizes.block,
            )
        ]
        in_files = {group.key: read for group, read in named}
        found.append(PlannedComponent(model.name, tuple(group for group, _ in named), in_files))
    return Cut(ram, tuple(found))


def room_for_all(models: Sequence[Model], conditions: Conditions) -> int:
    """Bytes of a `ram_budget` that has room for all groups of these models, in whole pages.

    How they are cut depends on the budget, and what they take on how they are cut: a little.
    """
    nbytes = sum(model.nbytes for model in models)
    for _ in range(8):
        parts = cut(models, max(nbytes, PAGE), conditions).components
        needed = sum(slot_bytes(group.nbytes) for part in parts for group in part.groups)
        if needed <= nbytes:
            break
        nbytes = needed
    return nbytes


def forecast(
    component: PlannedComponent, known: Mapping[str, int], ram: int, conditions: Conditions
) -> Document:
    """One step of a component's loop, once the planner knows the order: bytes and seconds.

    What is told is the mean of the second half of the steps that are played. `resident` are the
    bytes of the files that need not be read in a step, as they stay in memory. `known` are all
    groups that the store has, by key, with their bytes.

    Raises BudgetError if a group is larger than a budget.
    """
    nbytes, groups = component.nbytes, component.groups
    uses = [
        Step(group.key, (number,), conditions.compute * group.nbytes / nbytes)
        for number, group in enumerate(groups)
    ]
    passes = simulate_loop(
        Loop(tuple(uses), tuple(known[group.key] for group in groups)),
        by_tier(ram, conditions.device),
        conditions.steps,
        bandwidth=conditions.bandwidth,
        tile=max(known.values()),
    )
    later = passes[conditions.steps // 2 :]

    def each(told: Callable[[LoopPass], float]) -> float:
        return sum(map(told, later)) / len(later)

    def read_by(one: LoopPass) -> int:
        return sum(count * component.in_files[groups[n].key] for n, count in one.reads.items())

    read, timed = each(read_by), FROM_DISK in conditions.bandwidth
    return {
        "component": component.name,
        "resident": round(max(component.file_bytes - read, 0.0)),
        "first_read": read_by(passes[0]),
        "read": round(read),
        "onloaded": round(each(lambda one: one.bytes_moved.get(TO_DEVICE, 0))),
        "seconds": each(lambda one: one.seconds) if timed else None,
        "stalled_seconds": each(lambda one: one.stalled) if timed else None,
    }
