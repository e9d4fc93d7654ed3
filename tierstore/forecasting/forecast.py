"""Forecasts the steps of a checkpoint's models with the planner: bytes moved, and waits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tierstore.forecasting.budgets import by_tier
from tierstore.forecasting.sources import Model
from tierstore.model.groups import GroupSpec
from tierstore.model.module_tree import groups_of
from tierstore.model.outline import tile_bytes, usual_sizes
from tierstore.model.sizes import PAGE, slot_bytes
from tierstore.model.tiers import Tier
from tierstore.plan.loop_plan import Loop, Step
from tierstore.simulation import Hop, LoopPass, simulate_loop

FROM_DISK = (Tier.DISK, Tier.HOST)
TO_DEVICE = (Tier.HOST, Tier.DEVICE)


@dataclass(frozen=True)
class PlannedComponent:
    """A model and its groups for some budgets.

    `in_files` has the bytes to read from files for each group, by key.
    """

    name: str
    groups: tuple[GroupSpec, ...]
    in_files: dict[str, int]

    @property
    def nbytes(self) -> int:
        """Bytes of all its groups in memory."""
        return sum(group.nbytes for group in self.groups)

    @property
    def file_bytes(self) -> int:
        """Bytes to read from files for all its groups."""
        return sum(self.in_files.values())


@dataclass(frozen=True)
class Conditions:
    """The conditions of a run, except its `ram_budget`.

    `device` is the device's budget in bytes; None without a device. `bandwidth` has the bytes per
    second of each known hop; without the disk's, forecasts have no times. A step computes for
    `compute` seconds. `steps` is the number of steps to simulate.
    """

    offload_type: str
    device: int | None
    bandwidth: Mapping[Hop, float]
    compute: float
    steps: int


@dataclass(frozen=True)
class Partition:
    """All models of a checkpoint, partitioned for one `ram_budget`."""

    ram: int
    components: tuple[PlannedComponent, ...]

    @property
    def largest(self) -> GroupSpec:
        """The largest group, which every budget must hold."""
        groups = (group for component in self.components for group in component.groups)
        return max(groups, key=lambda group: group.nbytes)


def partition(models: Iterable[Model], ram: int, conditions: Conditions) -> Partition:
    """Partition each model as `enable_group_offload` would, in a store of this budget."""
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
    return Partition(ram, tuple(found))


def bytes_for_all(models: Sequence[Model], conditions: Conditions) -> int:
    """Return the bytes of a `ram_budget` that holds all groups of these models.

    It is found by iteration, since the groups depend on the budget.
    """
    nbytes = sum(model.nbytes for model in models)
    for _ in range(8):
        parts = partition(models, max(nbytes, PAGE), conditions).components
        needed = sum(slot_bytes(group.nbytes) for part in parts for group in part.groups)
        if needed <= nbytes:
            break
        nbytes = needed
    return nbytes


def forecast(
    component: PlannedComponent, known: Mapping[str, int], ram: int, conditions: Conditions
) -> dict[str, Any]:
    """Forecast one step of a component's loop, in bytes and seconds.

    Figures are averages over the second half of the simulated steps, when the planner has learned
    the loop. `resident` are the bytes of the files that a step need not read. `known` has the bytes
    of all groups of the store, by key.

    Raises BudgetError if a group is larger than a budget.
    """
    nbytes, groups = component.nbytes, component.groups
    uses = [
        Step(group.key, (number,), conditions.compute * group.nbytes / nbytes)
        for number, group in enumerate(groups)
    ]
    budgets = by_tier(ram, conditions.device)
    passes = simulate_loop(
        Loop(tuple(uses), tuple(known[group.key] for group in groups)),
        budgets,
        conditions.steps,
        bandwidth=conditions.bandwidth,
        tile=tile_bytes(budgets),
    )
    later = passes[conditions.steps // 2 :]

    def mean(figure: Callable[[LoopPass], float]) -> float:
        return sum(map(figure, later)) / len(later)

    def read_by(one: LoopPass) -> int:
        return sum(count * component.in_files[groups[n].key] for n, count in one.reads.items())

    read, timed = mean(read_by), FROM_DISK in conditions.bandwidth
    return {
        "component": component.name,
        "resident": round(max(component.file_bytes - read, 0.0)),
        "first_read": read_by(passes[0]),
        "read": round(read),
        "onloaded": round(mean(lambda one: one.bytes_moved.get(TO_DEVICE, 0))),
        "seconds": mean(lambda one: one.seconds) if timed else None,
        "stalled_seconds": mean(lambda one: one.stalled) if timed else None,
    }
