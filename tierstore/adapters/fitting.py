"""Check that a model's groups fit the budgets, and choose the units to lease on demand.

A unit's weights are leased when its module is called, if they fit together with those of the
enclosing and inner modules. If they do not fit, or if the module is never called, each operation
leases the weights that it uses: see `tierstore.adapters.on_demand`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from tierstore.adapters.codecs import weight_bytes
from tierstore.adapters.codecs.memory import unique_bytes
from tierstore.adapters.contents import modules_of, named_children_of, parameters_of
from tierstore.adapters.device_resident import is_resident
from tierstore.adapters.grouping import ATOMIC, GroupPlan, Partitioner, Unit, is_compiled
from tierstore.adapters.weight_groups import WeightGroups
from tierstore.errors import BudgetError
from tierstore.model.formatting import first_of
from tierstore.model.tiers import Tier
from tierstore.store import TierStore, engine_of

logger = logging.getLogger("tierstore.adapters")


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called: a `ParameterList` or a bare container cannot."""
    unimplemented = getattr(type(module), "forward", None) is nn.Module.forward
    return not unimplemented or "forward" in vars(module)


def called_units(unit: Unit) -> list[Unit]:
    """Return the units to patch for a unit: itself, or the parts of a module without a forward."""
    if not unit.whole or has_forward(unit.module):
        return [unit]
    own, parts = dict(unit.tensors), []
    for name, child in named_children_of(unit.module):
        full_name = f"{unit.name}.{name}" if unit.name else name
        tensors = {n: t for n, t in own.items() if n.startswith(f"{full_name}.")}
        if tensors:
            own = {n: t for n, t in own.items() if n not in tensors}
            parts += called_units(replace(unit, name=full_name, module=child, tensors=tensors))
    return [replace(unit, tensors=own, whole=False), *parts] if own else parts


def check_groups(
    store: TierStore, partitioner: Partitioner, plans: Iterable[GroupPlan], units: Iterable[Unit]
) -> None:
    """Raise BudgetError if a group of these units is larger than the budget of a memory tier."""
    sliced = {id(tensor) for unit in units for tensor in unit.stacks.values()}
    moved = [plan for plan in plans if sliced.isdisjoint(map(id, plan.tensors.values()))]
    largest = max(moved, key=_nbytes, default=None)
    for tier, budget in engine_of(store).reporting.weight_budgets().items():
        if tier.persistent or budget is None or largest is None:
            continue
        if (needed := _nbytes(largest)) > budget:
            at_once = _Requirement(largest.name, list(largest.tensors), needed)
            raise _error(store, partitioner, at_once, tier)


def _nbytes(plan: GroupPlan) -> int:
    return unique_bytes(plan.tensors.values())


def on_demand_units(
    weights: WeightGroups, partitioner: Partitioner, units: list[Unit]
) -> set[Unit]:
    """Return the units whose weights are leased on demand, not when their modules are called.

    Raises BudgetError if weights needed at the same time exceed the budget of the fastest tier.
    """
    store = weights.store
    tier = Tier.HOST if store.device.type == "cpu" else Tier.DEVICE
    budget = engine_of(store).reporting.weight_budgets().get(tier)
    sizes = {group.key: group.nbytes for group in store.snapshot().groups}
    staying = sum(nbytes for key, nbytes in sizes.items() if is_resident(key))
    beside = staying if tier is Tier.DEVICE else 0
    inside: dict[
        str, int
    ] = {}  # bytes needed at the same time inside a module, by the module's name
    found: set[Unit] = set()
    for unit in reversed(units):
        keys = weights.keys_of(unit)
        if not keys:
            continue
        within = inside.get(unit.name, 0)
        largest = max(keys, key=sizes.__getitem__)
        needed = within + sum(sizes[key] for key in keys)
        fits = budget is None or needed + beside <= budget
        if not _is_called(unit) or not (fits or _is_atomic(unit)):
            found.add(unit)
            needed = max(within, sizes[largest])
        if budget is not None and needed + beside > budget:
            names = weights.groups[largest] if unit in found else list(unit.tensors)
            raise _error(store, partitioner, _Requirement(largest, names, needed), tier, beside)
        for outer in _enclosing_names(unit.name):
            inside[outer] = max(inside.get(outer, 0), needed)
    return found


def _is_called(unit: Unit) -> bool:
    return has_forward(unit.module) or unit.name == "" or unit.routed


def _is_atomic(unit: Unit) -> bool:
    """Return whether one operation, or compiled code, uses all weights of a part of the unit."""
    atomic = any(isinstance(part, ATOMIC) or is_compiled(part) for part in modules_of(unit.module))
    return unit.routed or (unit.whole and atomic)


def nearest_with_forward(name: str, modules: Mapping[str, nn.Module]) -> nn.Module:
    """Return the module of that name, or the nearest enclosing one that can be called.

    Falls back to the model itself. A module with several names may be listed under another one.
    """
    while name and not (name in modules and has_forward(modules[name])):
        name = name.rpartition(".")[0]
    return modules[name]


def _enclosing_names(name: str) -> Iterable[str]:
    """Yield the names of the enclosing modules, the innermost first."""
    while name:
        name = name.rpartition(".")[0]
        yield name


class _Requirement(NamedTuple):
    """Weights needed on a tier at the same time, and the group to name in an error."""

    key: str
    names: list[str]
    nbytes: int


def _error(
    store: TierStore, partitioner: Partitioner, needed: _Requirement, tier: Tier, beside: int = 0
) -> BudgetError:
    reporting = engine_of(store).reporting
    budget = reporting.weight_budgets()[tier] or 0
    several = len(needed.names) > 1
    why = "are needed at the same time" if several else "is one weight"
    advice = (
        f"{first_of(needed.names)} {why}; raise "
        f"{reporting.budget_name(tier)} to at least {needed.nbytes + beside:,} bytes ("
        + (f"{beside:,} are in permanent use there; " if beside else "")
        + f"{3 * needed.nbytes + beside:,} would let reading and computing overlap)"
    )
    if several and (partitioner.block_limit is None or partitioner.block_limit > budget):
        advice += ", or use smaller groups with offload_type='leaf_level'"
    return BudgetError(needed.key, tier.name, needed.nbytes, budget, advice)


def warn_of_compiled_parts(root: nn.Module, units: Iterable[Unit]) -> None:
    """Log a warning if a compiled module is too large to be leased as a whole."""
    whole = {unit.module for unit in units if unit.block}
    whole = {part for module in whole for part in modules_of(module)}
    cut = [module for module in modules_of(root) if module not in whole and is_compiled(module)]
    if cut:
        nbytes = max(weight_bytes(parameters_of(module)) for module in cut)
        logger.warning(
            "%s: a compiled %s takes %s bytes, more than half of the smallest budget. Its parts "
            "are leased one by one, which breaks its graph (with fullgraph=True, torch raises). A "
            "budget of %s bytes avoids this",
            type(root).__name__,
            type(cut[0]).__name__,
            f"{nbytes:,}",
            f"{nbytes * 5 // 2:,}",
        )
