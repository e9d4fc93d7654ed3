"""Whether the budgets have room for the groups of a model, and which units wait for each operation.

A unit's weights are leased when its module is called, if there is room for all of them beside those
of the modules around it, and in it. If there is not, or if nothing calls the module, they are
leased as operations are given them: see `tierstore.adapters.touched`.
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
from tierstore.adapters.grouping import ATOMIC, Cutting, GroupPlan, Unit, is_compiled
from tierstore.adapters.weight_groups import WeightGroups
from tierstore.errors import BudgetError
from tierstore.model.formatting import first_of
from tierstore.model.tiers import Tier
from tierstore.store import TierStore, engine_of

logger = logging.getLogger("tierstore.adapters")


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called: a `ParameterList` cannot, nor can a bare container."""
    unimplemented = getattr(type(module), "forward", None) is nn.Module.forward
    return not unimplemented or "forward" in vars(module)


def uses_of(unit: Unit) -> list[Unit]:
    """The modules that are called for a unit's weights, each as a unit: itself, or what is in it
    if it has no forward."""
    if not unit.whole or has_forward(unit.module):
        return [unit]
    own, parts = dict(unit.tensors), []
    for name, child in named_children_of(unit.module):
        full_name = f"{unit.name}.{name}" if unit.name else name
        tensors = {n: t for n, t in own.items() if n.startswith(f"{full_name}.")}
        if tensors:
            own = {n: t for n, t in own.items() if n not in tensors}
            parts += uses_of(replace(unit, name=full_name, module=child, tensors=tensors))
    return [replace(unit, tensors=own, whole=False), *parts] if own else parts


def check_groups(
    store: TierStore, cutting: Cutting, plans: Iterable[GroupPlan], units: Iterable[Unit]
) -> None:
    """Raise BudgetError if a group of these units has no room on a tier in memory."""
    sliced = {id(tensor) for unit in units for tensor in unit.stacks.values()}
    moved = [plan for plan in plans if sliced.isdisjoint(map(id, plan.tensors.values()))]
    largest = max(moved, key=_nbytes, default=None)
    for tier, budget in engine_of(store).reporting.weight_budgets().items():
        if tier.persistent or budget is None or largest is None:
            continue
        if (needed := _nbytes(largest)) > budget:
            at_once = _AtOnce(largest.name, list(largest.tensors), needed)
            raise _error(store, cutting, at_once, tier)


def _nbytes(plan: GroupPlan) -> int:
    return unique_bytes(plan.tensors.values())


def touched_units(weights: WeightGroups, cutting: Cutting, units: list[Unit]) -> set[Unit]:
    """The units whose weights are not leased when their modules are called.

    Raises BudgetError if what has to be on the fastest tier at once has no room there.
    """
    store = weights.store
    tier = Tier.HOST if store.device.type == "cpu" else Tier.DEVICE
    budget = engine_of(store).reporting.weight_budgets().get(tier)
    sizes = {group.key: group.nbytes for group in store.snapshot().groups}
    staying = sum(nbytes for key, nbytes in sizes.items() if is_resident(key))
    beside = staying if tier is Tier.DEVICE else 0
    inside: dict[str, int] = {}  # bytes that modules in a module need at once, by its name
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
            raise _error(store, cutting, _AtOnce(largest, names, needed), tier, beside)
        for outer in _around(unit.name):
            inside[outer] = max(inside.get(outer, 0), needed)
    return found


def _is_called(unit: Unit) -> bool:
    return has_forward(unit.module) or unit.name == "" or unit.routed


def _is_atomic(unit: Unit) -> bool:
    """Whether one operation, or what was compiled, uses all the weights of a module in it."""
    atomic = any(isinstance(part, ATOMIC) or is_compiled(part) for part in modules_of(unit.module))
    return unit.routed or (unit.whole and atomic)


def nearest_with_forward(name: str, modules: Mapping[str, nn.Module]) -> nn.Module:
    """A module by its name, or the nearest one around it that can be called; else the model.

    A module that has several names may be among `modules` by another one.
    """
    while name and not (name in modules and has_forward(modules[name])):
        name = name.rpartition(".")[0]
    return modules[name]


def _around(name: str) -> Iterable[str]:
    """The names of the modules around one."""
    while name:
        name = name.rpartition(".")[0]
        yield name


class _AtOnce(NamedTuple):
    """Weights that have to be on a tier at once, and the group to name for them."""

    key: str
    names: list[str]
    nbytes: int


def _error(
    store: TierStore, cutting: Cutting, needed: _AtOnce, tier: Tier, beside: int = 0
) -> BudgetError:
    reporting = engine_of(store).reporting
    budget = reporting.weight_budgets()[tier] or 0
    several = len(needed.names) > 1
    advice = (
        f"{first_of(needed.names)} {'are needed at once' if several else 'is one weight'}; raise "
        f"{reporting.budget_name(tier)} to at least {needed.nbytes + beside:,} bytes ("
        + (f"{beside:,} are in use there for good; " if beside else "")
        + f"{3 * needed.nbytes + beside:,} for prefetch)"
    )
    if several and (cutting.block_limit is None or cutting.block_limit > budget):
        advice += ", or cut the model finer with offload_type='leaf_level'"
    return BudgetError(needed.key, tier.name, needed.nbytes, budget, advice)


def warn_of_compiled_parts(root: nn.Module, units: Iterable[Unit]) -> None:
    """Log which modules are compiled by themselves, and larger than what may come at once."""
    whole = {unit.module for unit in units if unit.block}
    whole = {part for module in whole for part in modules_of(module)}
    cut = [module for module in modules_of(root) if module not in whole and is_compiled(module)]
    if cut:
        nbytes = max(weight_bytes(parameters_of(module)) for module in cut)
        logger.warning(
            "%s: a %s that is compiled takes %s bytes, more than half of the smallest budget. Its "
            "parts come one by one, and break its graph (with fullgraph=True, torch raises); with "
            "a budget of %s bytes they would not",
            type(root).__name__,
            type(cut[0]).__name__,
            f"{nbytes:,}",
            f"{nbytes * 5 // 2:,}",
        )
